"""LoRA: a few small matrices beside the frozen linear layers of a model, through peft, in place.

The model keeps its class and its attributes, so engine, scorer and learner use it as they use any other; only the adapters require
gradients, and they are kept in float32 whatever the model's type. Their starting values are sampled per layer from the seed: the second
matrix is zero, so training starts from the very model. A run may also start from adapters that were trained before. Either way the model the
run started with is the same model with its adapters left out, or with copies of the first ones in their place (`as_at_start`). Merged into
a copy they leave a plain model. What is saved are the adapters and the name of the model they belong to, in peft's format; the saving of transformers does
that too, but asks the hub about the model first.
"""

import copy
import importlib.util
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, modeling_utils
from transformers.pytorch_utils import Conv1D

from tether.core.errors import BadInput, MissingDependency, ModelUnavailable, did_you_mean
from tether.core.seeding import derive_seed
from tether.models.catalog import EMBEDDED
from tether.models.tensor_files import TensorFile, entry_of, write_files

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
VISION_LAYERS = r".*\b(visual|vision_model|connector)\..*"
MODEL_FILE_BYTES = 2_000_000_000
"""A larger model is saved in several files, which are written side by side."""
_SAVING = threading.Lock()
SAVED_PREFIX = "base_model.model."
"""What peft's file format puts before the name of every tensor."""


def is_lora(model: PreTrainedModel) -> bool:
    """Whether the model carries adapters."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def add_lora(
    model: PreTrainedModel, rank: int, alpha: int, targets: str | Sequence[str] = ALL_LINEAR, seed: int = 0, *, vision: bool = False
) -> None:
    """Freeze the model and put trainable adapters beside its linear layers.

    Args:
        model: changed in place.
        rank: the inner width of the adapters.
        alpha: their outputs are scaled by alpha / rank.
        targets: "all-linear" (every linear layer but the language head), or the last parts of the layers' names, such as q_proj.
        seed: of the run; the same seed gives the same adapters on every machine.
        vision: put adapters into the vision tower of a model that sees, too.
    """
    _require_peft()
    from peft import LoraConfig

    if is_lora(model):
        raise BadInput("the model already carries adapters; train those, or merge them into the model first")
    if rank < 1 or alpha < 1:
        raise BadInput(f"lora needs rank and alpha of at least 1, got rank {rank} and alpha {alpha}")
    chosen = ALL_LINEAR if targets == ALL_LINEAR else _checked(model, [targets] if isinstance(targets, str) else list(targets))
    transposed = any(isinstance(module, Conv1D) for module in model.modules())  # GPT-2 keeps its linear layers the other way round
    excluded = VISION_LAYERS if hasattr(model, "image_processor") and not vision else None
    _inject(
        model,
        LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, exclude_modules=excluded, lora_dropout=0.0, fan_in_fan_out=transposed),
    )
    # peft's own start (uniform first matrix, zero second), but each layer from a stream of its own, on the CPU.
    for name, parameter in _adapter_parameters(model):
        if ".lora_A." in name:
            start = torch.empty(parameter.shape)
            generator = torch.Generator().manual_seed(derive_seed("lora", seed, name))
            torch.nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
            parameter.data.copy_(start)


def _require_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise MissingDependency("adapters (LoRA) need the package peft; install with: pip install 'tether-agents[lora]'")


def _checked(model: PreTrainedModel, targets: list[str]) -> list[str]:
    """The target names, each of which must be the last part of the name of a linear layer."""
    known = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}
    for target in targets:
        if target not in known:
            raise BadInput(f"lora target '{target}' is no linear layer of this model: {did_you_mean(target, known)}; or '{ALL_LINEAR}'")
    if not targets:
        raise BadInput(f"lora needs at least one target, got none; name layers or take '{ALL_LINEAR}'")
    return targets


def _inject(model: PreTrainedModel, config: Any) -> None:
    """Add adapters by their configuration, in float32; the global random state is left as it was."""
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        model.add_adapter(config)
    for _, parameter in _adapter_parameters(model):
        parameter.data = parameter.data.float()


def _adapter_parameters(model: PreTrainedModel) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if ".lora_" in name]


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was before its adapters, inside the block."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def adapter_folder(name: str) -> Path | None:
    """The folder of a model name that stands for adapters; None for a model of its own."""
    folder = Path(name).expanduser()
    return folder if name not in EMBEDDED and (folder / ADAPTER_CONFIG).is_file() else None


def as_at_start(model: PreTrainedModel, start_model: str | None = None) -> Callable[[], AbstractContextManager[None]]:
    """Blocks in which a model with adapters computes what it did at the start of a run, however far they have been trained.

    Args:
        model: with adapters.
        start_model: the name of the model that the run started from; where that is a folder of adapters, these are read again, so that a
            resumed run finds its start. None: the adapters as they are now.
    """
    folder = None if start_model is None else adapter_folder(start_model)
    if folder is not None:
        saved = _saved_adapters(folder)
        _check_fit(model, saved, folder)
    elif start_model is None:
        saved = {name: tensor.detach().clone() for name, tensor in _adapter_state(model).items()}
    else:  # adapters of a plain model start at zero
        return lambda: without_adapters(model)
    (adapter,) = model.active_adapters()
    start = {
        parameter: saved[SAVED_PREFIX + name.replace(f".{adapter}.", ".")].to(parameter.device, parameter.dtype)
        for name, parameter in _adapter_parameters(model)
    }
    return lambda: _replaced(start)


@contextmanager
def _replaced(start: Mapping[torch.nn.Parameter, Tensor]) -> Iterator[None]:
    """Parameters with other values inside the block. Only `.data` changes: optimisers keep their parameters, and nothing is copied."""
    trained = {parameter: parameter.data for parameter in start}
    try:
        for parameter, value in start.items():
            parameter.data = value
        yield
    finally:
        for parameter, value in trained.items():
            parameter.data = value


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """A plain copy of the model with the adapters worked into its weights, for export; without adapters, simply a copy."""
    plain = copy.deepcopy(model)
    return merge(plain) if is_lora(model) else plain


def merge(model: PreTrainedModel) -> PreTrainedModel:
    """Work the adapters into the weights, in place; returns the model, which is a plain one then.

    The sums are made in float64 and rounded once, to the type of the weights. Numbers in float16 are multiples of 2**-24, so the product of two
    matrices saved in it is exact in float64 below 32, whatever the order of its sums: such adapters give the same bits on every machine.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            adapted: Any = layer
            dtype = adapted.get_base_layer().weight.dtype
            adapted.double().merge()
            model.set_submodule(name, adapted.get_base_layer().to(dtype))
    model._hf_peft_config_loaded = False
    del model.peft_config
    return model.requires_grad_(True)


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a folder that `load_model` reads: the whole model, or its adapters alone and the name of the model they belong to."""
    write_files(model_files(model, folder))


def model_files(model: PreTrainedModel, folder: Path) -> list[TensorFile]:
    """Write such a folder but for the weights; returns their files."""
    if not is_lora(model):
        return _transformers_files(model, folder)
    folder.mkdir(parents=True, exist_ok=True)
    (adapter,) = model.active_adapters()
    config: Any = copy.copy(model.peft_config[adapter])
    if isinstance(config.target_modules, set):  # in the order of the alphabet: the same adapters give the same file
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))
    entries = {name: entry_of(tensor) for name, tensor in _adapter_state(model).items()}
    return [TensorFile(folder / ADAPTER_WEIGHTS, entries, {"format": "pt"})]


def _transformers_files(model: PreTrainedModel, folder: Path) -> list[TensorFile]:
    """What transformers would write, which knows what belongs into which file under which name, but has no way to be asked."""
    files: list[TensorFile] = []

    def note(tensors: dict[str, Tensor], filename: str | os.PathLike[Any], metadata: dict[str, str] | None = None) -> None:
        files.append(TensorFile(Path(filename), {name: entry_of(tensor) for name, tensor in tensors.items()}, metadata or {}))

    with _SAVING:
        write, modeling_utils.safe_save_file = modeling_utils.safe_save_file, note
        try:
            model.save_pretrained(folder, max_shard_size=MODEL_FILE_BYTES)
        finally:
            modeling_utils.safe_save_file = write
    return files


def _adapter_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of the adapters under the names they are saved by."""
    from peft import get_peft_model_state_dict

    return {SAVED_PREFIX + name: tensor for name, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items()}


def base_name(folder: Path) -> str:
    """The name of the model that the adapters in a folder belong to."""
    try:
        name = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:  # unreadable, no JSON, or JSON that is no table
        raise ModelUnavailable(f"cannot read '{folder / ADAPTER_CONFIG}': {error}; replace the file") from error
    if not name:
        raise ModelUnavailable(f"'{folder / ADAPTER_CONFIG}' names no base_model_name_or_path; write the name of the model they belong to")
    if (Path(name).expanduser() / ADAPTER_CONFIG).is_file():
        raise ModelUnavailable(
            f"the adapters in '{folder}' belong to '{name}', which holds adapters itself; merge those into a model first"
        )
    return str(name)


def attach_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Put the adapters that `save_model` wrote to a folder on the model they belong to, ready to be trained on."""
    _require_peft()
    from peft import LoraConfig, PeftConfig

    with _reading_adapters(folder):
        config = PeftConfig.from_pretrained(str(folder))
    saved = _saved_adapters(folder)
    if not isinstance(config, LoraConfig):
        raise ModelUnavailable(f"the adapters in '{folder}' are of type {config.peft_type}; only LORA is supported")
    try:
        _inject(model, config)
    except ValueError as error:  # peft finds none of the layers that the configuration names
        raise _does_not_fit(folder, model, "its layers are named otherwise") from error
    _check_fit(model, saved, folder)
    with torch.no_grad():
        for name, tensor in _adapter_state(model).items():
            tensor.copy_(saved[name])


@contextmanager
def _reading_adapters(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:  # a missing, torn or foreign file
        raise ModelUnavailable(f"cannot read the adapters in '{folder}': {' '.join(str(error).split())[:200]}") from error


def _saved_adapters(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder that `save_model` wrote, under the names they are saved by."""
    with _reading_adapters(folder):
        return load_file(folder / ADAPTER_WEIGHTS)


def _check_fit(model: PreTrainedModel, saved: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse saved adapters that are not those of the model."""
    own = _adapter_state(model)
    strange = sorted(own.keys() ^ saved.keys()) or sorted(name for name in own if own[name].shape != saved[name].shape)
    if strange:
        raise _does_not_fit(folder, model, f"{len(strange)} tensors differ, {strange[0]} among them")


def _does_not_fit(folder: Path, model: PreTrainedModel, why: str) -> ModelUnavailable:
    return ModelUnavailable(f"the adapters in '{folder}' do not fit model '{model.name_or_path}': {why}; check the base it names")
