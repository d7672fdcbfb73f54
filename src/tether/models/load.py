"""`load_model`: one door for every model. A name is resolved in this order:

1. an embedded model (`tiny`, `tiny-vl`, `smollm2`),
2. a path that ends in .gguf, converted to safetensors once (gguf.py),
3. a folder in Hugging Face format (a checkpoint of a run included), or one with LoRA adapters, which names the model they belong to;
   `merged:FOLDER` is that model with the adapters worked into its weights,
4. a Hugging Face id, from the local cache or, when online, from the hub.

The tokenizer that comes back always has an end-of-turn token and a pad token. Pad may equal the end-of-turn token, so nothing
in Tether compares ids with pad: masks are carried from the rollout.
"""

import logging
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from tether.core.errors import ModelUnavailable, UnknownName, did_you_mean
from tether.models.catalog import EMBEDDED, MERGED, check_name, embedded_folder
from tether.models.gguf import gguf_folder, read_gguf
from tether.models.hardware import check_device, default_device
from tether.models.hub import hub_asked
from tether.models.lora import adapter_folder, attach_adapters, base_name, is_lora, merge
from tether.models.vision import check_sighted
from tether.runs.checkpoints import MANIFEST, MODEL, STATE, check_checkpoint

CHAT_END = "<|im_end|>"
_LOG = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoadedModel(NamedTuple):
    """A causal language model and its tokenizer. A model that sees carries what prepares its images, as `model.image_processor`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_model(name: str, *, device: str | None = None, dtype: str | None = None) -> LoadedModel:
    """Load a model by name, on the GPU if there is one.

    Args:
        name: tiny, smollm2, a .gguf file, a folder, or a Hugging Face id.
        device: where to put it; None picks the GPU if there is one.
        dtype: float32, bfloat16 or float16; None keeps float32.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UnknownName(f"unknown dtype '{dtype}': {did_you_mean(dtype, DTYPES)}")
    place = check_device(device or default_device())
    model, tokenizer = _resolve(str(name), DTYPES[dtype or "float32"])
    complete_tokenizer(tokenizer)
    return LoadedModel(model.to(place).eval(), tokenizer)


def _resolve(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    if name.startswith(MERGED):
        return _merged(name.removeprefix(MERGED), dtype)
    check_name(name)
    path = Path(name).expanduser()
    exact = name not in EMBEDDED and path.name == MODEL and any((path.parent / file).is_file() for file in (STATE, MANIFEST))
    if exact:  # a checkpoint's model: verified before any of its files is read
        check_checkpoint(path.parent, only=f"{MODEL}/")
    if (folder := adapter_folder(name)) is not None:
        return _with_adapters(folder, dtype)
    if name in EMBEDDED:
        model, tokenizer = _from_folder(embedded_folder(name), dtype)
    elif path.suffix == ".gguf":
        model, tokenizer = _from_gguf(path, dtype)
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(
                f"folder '{name}' holds no config.json; point to a Hugging Face model folder or a checkpoint's 'model' folder"
            )
        model, tokenizer = _from_folder(path, dtype, exact=exact)
    else:
        return _from_hub(name, dtype)
    # Adapters are saved with the name of the model they belong to: one that Tether resolves, here or on another machine.
    model.name_or_path = name if name in EMBEDDED else str(path.resolve())
    return model, tokenizer


def _with_adapters(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model that a folder of adapters names, with them; the tokenizer is the folder's own where it has one."""
    base = base_name(folder)
    try:
        model, tokenizer = _resolve(base, dtype)
    except ModelUnavailable as error:
        raise ModelUnavailable(f"the adapters in '{folder}' belong to model '{base}', which cannot be had: {error}") from error
    attach_adapters(model, folder)
    if (folder / "tokenizer_config.json").is_file():
        with _reading(folder):
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return model, tokenizer


def _merged(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model of a folder of adapters, with them worked into its float32 weights, which are rounded to `dtype` as those of any plain model."""
    model, tokenizer = _resolve(name, torch.float32)
    if not is_lora(model):
        raise ModelUnavailable(f"'{name}' holds no adapters to merge; leave out '{MERGED}'")
    merge(model).name_or_path = f"{MERGED}{Path(name).expanduser().resolve()}"
    return model.to(dtype), tokenizer


def _from_folder(folder: Path, dtype: torch.dtype, *, exact: bool = False) -> tuple[Any, Any]:
    transformers_logging.disable_progress_bar()
    with _reading(folder):
        model = _complete(folder, exact=exact, dtype=dtype, local_files_only=True)
        return model, AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _complete(name: Path | str, *, exact: bool = False, **options: Any) -> Any:
    """A model all of whose weights are in its files; transformers would draw the missing ones at random. Code that comes with a model is
    not run, and nobody is asked whether to. `exact`: the files hold nothing else, either."""
    here = {key: options[key] for key in ("local_files_only",) if key in options} | {"trust_remote_code": False}
    config = AutoConfig.from_pretrained(name, **here)
    model, found = auto_class(config).from_pretrained(name, config=config, output_loading_info=True, **options | here)
    if hasattr(config, "vision_config"):
        model.image_processor = _image_processor(name, here)
    wrong = [(key, "is missing") for key in sorted(found["missing_keys"])]
    wrong += [(str(entry[0]), "has another shape") for entry in sorted(found["mismatched_keys"])]
    wrong += [(str(entry), "cannot be converted") for entry in sorted(found.get("conversion_errors") or ())]
    wrong += [(key, "is one too many") for key in sorted(found["unexpected_keys"]) if exact]
    if wrong:
        key, words = wrong[0]
        raise ModelUnavailable(
            f"the files of model '{name}' do not hold its weights: {key} {words}{f' (and {len(wrong) - 1} more)' if wrong[1:] else ''}; "
            "replace them by whole ones"
        )
    return model


def auto_class(config: Any) -> Any:
    """What makes a model of a configuration."""
    if not hasattr(config, "vision_config"):
        return AutoModelForCausalLM
    check_sighted(config.model_type)
    return AutoModelForImageTextToText


def _image_processor(name: Path | str, options: dict[str, Any]) -> Any:
    """What makes the pixels of an image-text model; saved with it."""
    try:
        return AutoImageProcessor.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelUnavailable(
            f"model '{name}' reads images, and its files do not say how they are prepared ({_reason(error)}); "
            "put preprocessor_config.json, or processor_config.json, of the original model beside its config.json"
        ) from error


def _from_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """A .gguf file by way of its converted folder; a damaged folder is built again, and without a cache the file itself is read."""
    try:
        folder = gguf_folder(path)
    except (OSError, SafetensorError) as error:  # the cache cannot be written, or the disk is full
        _LOG.warning("'%s' cannot be cached and is converted at every load: %s", path.name, error)
        return read_gguf(path, dtype)
    try:
        return _from_folder(folder, dtype)
    except ModelUnavailable as error:
        _LOG.warning("%s; it is converted again", error)
        return _from_folder(gguf_folder(path, rebuild=True), dtype)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except ModelUnavailable:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:  # a missing, torn or foreign file
        raise ModelUnavailable(f"cannot read the model in '{folder}': {_reason(error)}; check or replace its files") from error


def _reason(error: Exception) -> str:
    """Why a model cannot be read; the libraries' own advice to run or to unpickle what came with it is not passed on."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return "it brings code of its own (auto_map in its config.json), which Tether does not run"
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in text:
        return "a file of it is pickled and holds something else than weights; nothing of it was run"
    return text[:200]


def _from_hub(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    try:
        with hub_asked():
            return _complete(name, dtype=dtype), AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except ModelUnavailable:
        raise
    except (ValueError, pickle.UnpicklingError) as error:
        raise ModelUnavailable(f"cannot read the Hugging Face model '{name}': {_reason(error)}; take another model") from error
    except OSError as error:  # transformers raises OSError for: offline and not cached, no such repository, no permission
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ModelUnavailable(
            f"Hugging Face model '{name}' is neither cached here nor reachable{offline}; check the name and the network, "
            "or use an embedded model: tiny, smollm2"
        ) from error


def complete_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer an end-of-turn and a pad token where its file forgot them."""
    if tokenizer.eos_token_id is None and CHAT_END in tokenizer.get_vocab():
        tokenizer.eos_token = CHAT_END
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
