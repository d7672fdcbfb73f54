"""What a run takes in memory: planned before anything is loaded, and adapted while updates run.

**The plan** (`plan_memory`) is counted from configurations, on modules without storage. It counts what the run certainly holds at once:
weights in the type they compute in, fp32 master weights, Adam's moments, gradients, the critic, a reference and a scorer where they are
separate models, the cache of one conversation, and the part of the logits that is computed at a time. A run that needs more than there is
is refused, with the sizes and with settings that need less. The engine's cache and the activations of an update share the rest; activations
can be recomputed and micro-batches made smaller, so they are a note, not a refusal. A model whose configuration cannot be had is not
counted, and neither is the run.

**The budget** (`MicroBudget`) is how many tokens go through the model at once. Whether activations are kept or recomputed is decided once,
before the first update, from the memory that is free then, unless a setting says it: micro-batches get smaller first, as long as they keep
a GPU busy, because recomputing everything costs a third more time. Where an update still runs out of memory, its micro-batches are halved,
again and again down to the longest sequence of the minibatch; then activations are recomputed. A reduction holds for the rest of the run.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from tether.core.errors import BadInput, ModelUnavailable
from tether.diagnostics.settings import POLICY, REFERENCE
from tether.models.catalog import EMBEDDED, MERGED, embedded_folder
from tether.models.fast.linear_logprobs import LOGIT_BYTES
from tether.models.gguf import gguf_config
from tether.models.hardware import available_memory, check_device, default_device, taken_by_others
from tether.models.hub import hub_asked
from tether.models.load import auto_class
from tether.models.logprobs import can_recompute, kept_bytes
from tether.models.lora import ADAPTER_WEIGHTS, ALL_LINEAR, adapter_folder, base_name
from tether.models.policy import Policy
from tether.models.vision import vision_tower
from tether.training.distributed.ranks import Ranks
from tether.training.settings import RunSettings, TrainedModel

GB, GIB = 1e9, 2**30
WIDTHS = {"float32": 4, "bfloat16": 2}
CACHE_SHARE = 0.25
"""Of what the run does not hold anyway; the rest is for activations, which gain more by it: a cache that is too small evicts, rarely."""
SMALL_RANK = 16
OWN_CONTEXT = 2 * GIB
"""CUDA itself takes less than this of a card for a process."""
CLEARLY = 0.02
"""A change that saves less than this share is not worth proposing."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model, without its weights."""

    parameters: int
    backbone: int
    """All of them but a language head of its own."""
    linear: Mapping[str, int]
    """Rows and columns of the linear layers added up, by the last part of their names, the language head left out."""
    cached: int
    """Numbers that the key/value cache holds for a token."""
    positions: int
    kept: int
    """Numbers that an update keeps for the backward pass over a token, about."""
    largest: int = 0
    """Numbers of the largest parameter."""
    layer: int = 0
    """Numbers of the largest layer."""
    outside: int = 0
    """Numbers of what belongs to no layer: embedding, head, last norm."""
    vision: int = 0
    """Of the parameters, those of a vision tower."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a run takes of a device, in bytes."""

    needs: dict[str, int]
    """By what it is for."""
    available: int
    cache: int
    """What the engine's cache should get."""
    notes: list[str]
    background: bool = True
    """Whether there is room for a copy that a checkpoint is written from while training goes on."""

    @property
    def total(self) -> int:
        return sum(self.needs.values())

    def words(self) -> str:
        """Example: "weights 6.2 GB, optimiser 37.0 GB, gradients 12.3 GB = 55.5 GB of 24.0 GB"."""
        parts = ", ".join(f"{what} {size / GB:.1f} GB" for what, size in self.needs.items() if size)
        return f"{parts} = {self.total / GB:.1f} GB of {self.available / GB:.1f} GB"


def plan_memory(settings: RunSettings, ranks: Ranks | None = None) -> MemoryPlan | None:
    """The memory plan of a run, of one rank where there are several; a run that cannot fit is refused. None where it cannot be counted."""
    ranks = ranks or Ranks()
    device = torch.device(check_device(settings.model.device or default_device()))
    available = available_memory(device)
    if available is not None and device.type == "cpu":
        available //= ranks.local_size  # the ranks of a machine share its memory
    found = {name: shape_of(name) for name in _models(settings)}
    shapes = {name: shape for name, shape in found.items() if shape is not None}
    if available is None or len(shapes) < len(found):
        return None
    plan = counted(settings, device, available, shapes, ranks.size)
    if plan.total > available:
        ways = _alternatives(settings, device, plan, shapes, ranks.size)
        raise BadInput(f"model '{settings.model.name}' does not fit on {device}{_beside_others(device)}: {plan.words()}; {ways}")
    return plan


def counted(settings: RunSettings, device: torch.device, available: int, shapes: Mapping[str, Shape], num_ranks: int = 1) -> MemoryPlan:
    """What a run with models of these shapes needs on each rank, and how the rest is shared out."""
    policy, width = shapes[settings.model.name], width_of(settings, device)
    row = 0 if settings.rollout.uses_servers else policy.cached * width * min(settings.rollout.max_context, policy.positions)
    wanted = None if settings.rollout.uses_servers else settings.rollout.cache_gb
    divided = settings.divides_weights(num_ranks)
    needs = {
        **_policy_needs(settings, policy, width, num_ranks, settings.learner.sharding, whole=not divided),
        **_other_needs(settings, shapes, width, num_ranks),
        "cache": row if wanted is None else min(int(wanted * GIB), settings.rollout.max_rows * row),
        "logits": 2 * LOGIT_BYTES.get(device.type, LOGIT_BYTES["cpu"]),
    }
    if settings.rollout.precision is not None:  # the engine's copy of the MLPs, a byte a number
        needs["weights in float8"] = policy.parameters - policy.outside
    if divided and device.type == "cpu":  # the first rank keeps what it published in host memory, which is here the memory it trains in
        needs["published weights"] = width * policy.parameters
    if settings.learner.sharding == "fsdp" and num_ranks > 1 and not trains_adapters(settings) and not divided:
        # While fsdp divides a model that is whole on the device it holds all float32 weights, and its part of them.
        loading = 4 * (policy.parameters + policy.parameters // num_ranks) - sum(needs.values())
        needs |= {"loading": loading} if loading > 0 else {}
    spare = max(0, available - sum(needs.values()))
    activations = int(MARGIN * policy.kept * width * settings.learner.micro_tokens)
    # On a CPU the copy that a checkpoint is written from lies in the memory that the model trains in; elsewhere in the host's.
    copied = _checkpoint_copy(settings, shapes, width) if device.type == "cpu" else 0
    background = copied + activations <= spare
    if background and copied:
        needs["checkpoint copy"], spare = copied, spare - copied
    share = 0 if settings.rollout.uses_servers else int(CACHE_SHARE * spare)
    cache = needs["cache"] + share if wanted is None else int(wanted * GIB)
    plan = MemoryPlan(needs, available, cache, [], background or not copied)
    if not plan.background:
        plan.notes.append(f"checkpoints are written in the foreground: a copy of {copied / GB:.1f} GB would not fit beside training")
    # On a card the engine takes its cache at once, as much as it can use of it; elsewhere as conversations grow.
    taken = min(cache, settings.rollout.max_rows * row) - needs["cache"] if device.type == "cuda" else 0
    if settings.learner.gradient_checkpointing is not True and activations > spare - taken:
        kept = settings.learner.gradient_checkpointing is False
        note = (
            f"little memory is left for updates ({plan.words()}): keeping the activations of {settings.learner.micro_tokens} tokens takes about "
            f"{activations / GB:.1f} GB; "
        )
        note += "leave learner.gradient_checkpointing at null" if kept else "they are computed again, which takes a third more time"
        plan.notes.append(note)
    return plan


def check_fits(settings: TrainedModel) -> None:
    """Refuse to train a model alone, without rollouts, where weights and optimiser do not fit; nothing is loaded for that."""
    device = torch.device(check_device(settings.model.device or default_device()))
    available, shape = available_memory(device), shape_of(settings.model.name)
    if available is None or shape is None:
        return
    needs = _policy_needs(settings, shape, width_of(settings, device))
    plan = MemoryPlan({**needs, "logits": 2 * LOGIT_BYTES.get(device.type, LOGIT_BYTES["cpu"])}, available, 0, [])
    if plan.total > available:
        advice = (
            "take a smaller model" if trains_adapters(settings) else f"train adapters (lora.rank={SMALL_RANK}), or take a smaller model"
        )
        raise BadInput(f"model '{settings.model.name}' does not fit on {device}{_beside_others(device)}: {plan.words()}; {advice}")


def _beside_others(device: torch.device) -> str:
    """Who has the memory that a refusal is about, where it is somebody else. Example: ", where other programs hold 121.6 GB (see nvidia-smi)"."""
    taken = taken_by_others(device)
    return f", where other programs hold {taken / GB:.1f} GB (see nvidia-smi)" if taken > OWN_CONTEXT else ""


def _policy_needs(
    settings: TrainedModel, policy: Shape, width: int, num_ranks: int = 1, sharding: str = "zero1", *, whole: bool = True
) -> dict[str, int]:
    adapters = num_adapted(settings, policy)
    if adapters is not None:
        return {"weights": width * policy.parameters + 4 * adapters, "optimiser": 8 * adapters // num_ranks, "gradients": 4 * adapters}
    frozen = num_frozen(settings, policy)
    needs = trained_needs(policy, policy.parameters - frozen, width, num_ranks, sharding, whole=whole)
    return {**needs, "vision tower": width * frozen} if frozen else needs


def num_frozen(settings: TrainedModel, policy: Shape) -> int:
    """Parameters of a vision tower that is not trained."""
    return 0 if settings.trains_vision else policy.vision


def trained_needs(shape: Shape, parameters: int, width: int, num_ranks: int, sharding: str, *, whole: bool = True) -> dict[str, int]:
    """What one of the ranks holds of `parameters` weights of a model that are trained, computed in `width` bytes: gradients and two moments in
    float32, and float32 weights beside those that compute in less.

    zero1 divides the optimiser's state by whole parameters, so a rank holds at least that of the largest. fsdp divides everything but the
    weights that the engine reads (`whole`; none where servers sample), and gathers what it computes with: two layers (one is fetched ahead) and
    what belongs to no layer, with the gradient of the larger of them before it is divided.
    """
    if sharding == "fsdp" and num_ranks > 1:
        gathered = width * (shape.outside + 2 * shape.layer) + (width + 4) * max(shape.outside, shape.layer)
        part = -(-parameters // num_ranks)
        held = {"weights": width * parameters} if whole else {}
        return {**held, "optimiser": 12 * part, "gradients": 4 * part, "gathered": gathered}
    owned = max(-(-parameters // num_ranks), min(shape.largest, parameters))
    return {"weights": width * parameters, "optimiser": (12 if width < 4 else 8) * owned, "gradients": 4 * parameters}


def _other_needs(settings: RunSettings, shapes: Mapping[str, Shape], width: int, num_ranks: int) -> dict[str, int]:
    """The models beside the policy."""
    needs = {}
    divided = settings.divides_weights(num_ranks)
    parts = num_ranks if divided else 1
    if name := critic_name(settings):
        shape = shapes[name]
        own_width = 4 if trains_adapters(settings) else width  # beside adapters the critic trains in float32
        trained = trained_needs(shape, shape.backbone, own_width, num_ranks, settings.learner.sharding, whole=not divided)
        needs["critic"] = sum(trained.values()) + -(-4 * (shape.parameters - shape.backbone) // parts)
    if name := _reference(settings):
        needs["reference model"] = -(-width * shapes[name].parameters // parts)
    if name := _scorer(settings):
        needs["scorer"] = -(-width * shapes[name].parameters // parts)
    return needs


def _checkpoint_copy(settings: RunSettings, shapes: Mapping[str, Shape], width: int) -> int:
    """What a checkpoint is written from: weights as they compute, and of everything that is trained master weights and two moments."""
    policy = shapes[settings.model.name]
    adapters = num_adapted(settings, policy)
    frozen = num_frozen(settings, policy)
    trained = 12 + (width if width < 4 else 0)
    copied = trained * (policy.parameters - frozen) + width * frozen if adapters is None else 12 * adapters
    if name := critic_name(settings):
        copied += trained * shapes[name].backbone
    return copied


def _models(settings: RunSettings) -> list[str]:
    """Every model the run loads."""
    others = (critic_name(settings), _reference(settings), _scorer(settings))
    return list(dict.fromkeys([settings.model.name, *(name for name in others if name)]))


def critic_name(settings: RunSettings) -> str | None:
    """The model of a critic with a backbone of its own; None where there is none."""
    return (settings.critic.model or settings.model.name) if settings.algorithm.has_critic and not settings.critic.shared else None


def _reference(settings: RunSettings) -> str | None:
    if not settings.algorithm.has_reference:
        return None
    return settings.algorithm.reference or (None if trains_adapters(settings) else settings.model.name)


def _scorer(settings: RunSettings) -> str | None:
    name = settings.diagnosis.scorer
    if name == POLICY or not settings.diagnosis.every or "://" in name:
        return None
    if name == REFERENCE:
        return None if trains_adapters(settings) else settings.model.name
    return name


def width_of(settings: TrainedModel, device: torch.device) -> int:
    """Bytes of a weight as the model computes."""
    return WIDTHS[settings.model.dtype or ("bfloat16" if device.type == "cuda" else "float32")]


def trains_adapters(settings: TrainedModel) -> bool:
    """Whether the run trains adapters alone: new ones, or those of the model it starts from."""
    return settings.lora.rank > 0 or adapter_folder(settings.model.name) is not None


def num_adapted(settings: TrainedModel, policy: Shape) -> int | None:
    """Parameters of the adapters; None where all weights are trained."""
    folder = adapter_folder(settings.model.name)
    if folder is not None:
        weights = folder / ADAPTER_WEIGHTS
        return weights.stat().st_size // 4 if weights.is_file() else 0
    if not settings.lora.rank:
        return None
    targets = settings.lora.targets
    chosen = policy.linear if targets == ALL_LINEAR else [targets] if isinstance(targets, str) else targets
    return settings.lora.rank * sum(policy.linear.get(name, 0) for name in chosen)


def _alternatives(settings: RunSettings, device: torch.device, plan: MemoryPlan, shapes: Mapping[str, Shape], num_ranks: int) -> str:
    """The changes that would fit, or where none does those that would need clearly less, with what they need, the least first."""
    adapters, shared = {"lora": {"rank": SMALL_RANK}}, {"critic": {"shared": True}}
    changes: dict[str, dict[str, dict[str, Any]]] = {
        f"lora.rank={SMALL_RANK}": adapters,
        "critic.shared=true": shared,
        f"lora.rank={SMALL_RANK} with critic.shared=true": adapters | shared,
        "model.dtype=bfloat16": {"model": {"dtype": "bfloat16"}},
        f"diagnosis.scorer={POLICY}": {"diagnosis": {"scorer": POLICY}},
        "half of rollout.max_context": {"rollout": {"max_context": max(1, settings.rollout.max_context // 2)}},
        "rollout.cache_gb=null": {"rollout": {"cache_gb": None}},
    }
    divided = num_ranks > 1 and settings.learner.sharding == "fsdp"
    if num_ranks > 1 and not trains_adapters(settings):
        changes["learner.sharding=fsdp"] = {"learner": {"sharding": "fsdp"}}
        elsewhere = {"rollout": {"engine": "ray"}}  # any server counts alike
        changes["learner.sharding=fsdp with servers that sample (rollout.engine)"] = changes["learner.sharding=fsdp"] | elsewhere
    found: dict[int, str] = {}
    for words, change in changes.items():
        if divided and "lora" in change:  # adapters are not divided
            change = change | {"learner": {"sharding": "zero1"}}
        sections = {section: getattr(settings, section).model_copy(update=update) for section, update in change.items()}
        needed = counted(settings.model_copy(update=sections), device, plan.available, shapes, num_ranks).total
        if needed < (1 - CLEARLY) * plan.total:
            found.setdefault(needed, words)  # of changes that come to the same, the first and shortest
    fitting = {needed: words for needed, words in found.items() if needed <= plan.available}  # where there are any, nobody needs the others
    listed = ", ".join(f"{words} ({needed / GB:.1f} GB)" for needed, words in sorted((fitting or found).items()))
    more = "more ranks, " if settings.divides_weights(num_ranks) else ""
    return f"try {listed}, {more}or a smaller model" if listed else f"take {more}a smaller model, or a device with more memory"


def shape_of(name: str) -> Shape | None:
    """The sizes of a model by any name `load_model` takes; None where its configuration cannot be had: loading it will say why."""
    folder = adapter_folder(name.removeprefix(MERGED))
    if folder is not None:
        return shape_of(base_name(folder))
    place: Any = embedded_folder(name) if name in EMBEDDED else name
    try:
        if Path(place).suffix == ".gguf":
            config = gguf_config(Path(place).expanduser())
        else:
            with nullcontext() if Path(place).is_dir() else hub_asked():
                config = AutoConfig.from_pretrained(place, trust_remote_code=False)
        with torch.device("meta"):
            model = auto_class(config).from_config(config, trust_remote_code=False)
    # No such model, no package that reads it, no class for it, or one that must compute.
    except (OSError, ValueError, KeyError, ImportError, ModelUnavailable, NotImplementedError, RuntimeError):
        return None
    return measured_shape(model)


def measured_shape(model: PreTrainedModel) -> Shape:
    """The sizes of a module, with storage or without."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tied = head is None or any(head.weight is parameter for parameter in model.base_model.parameters())
    linear: dict[str, int] = {}
    tower = vision_tower(model)
    in_tower = {id(module) for part in tower for module in part.modules()}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head and id(module) not in in_tower:
            last = path.rpartition(".")[2]
            linear[last] = linear.get(last, 0) + sum(module.weight.shape)
    layers_of = [sum(p.numel() for p in part.parameters()) for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    width, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or width // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return Shape(
        parameters=parameters,
        backbone=parameters if tied else parameters - sum(parameter.numel() for parameter in head.parameters()),
        linear=linear,
        cached=2 * layers * key_heads * head_dim,
        positions=int(getattr(config, "max_position_embeddings", 0) or 2**31),
        kept=kept_bytes(model, 1, fused=True) // model.dtype.itemsize,
        largest=max(parameter.numel() for parameter in model.parameters()),
        layer=max(layers_of, default=0),
        outside=parameters - sum(layers_of),
        vision=sum(parameter.numel() for part in tower for parameter in part.parameters()),
    )


# ----------------------------------------------------------------------------------------------------------- the budget

ENOUGH_TOKENS = 4096
"""A micro-batch of so many keeps any card busy; fewer are not chosen in order to keep activations."""
MARGIN = 1.3
"""An estimate of activations is taken this much larger: memory is held in blocks, and layers need some while they compute."""


class MicroBudget:
    """Tokens per micro-batch, and whether activations are computed again."""

    def __init__(self, tokens: int, recompute: bool | None) -> None:
        """`recompute` None: to be decided (`decide`)."""
        self.tokens = tokens
        self._recompute = recompute
        self.retries = 0
        """How often the budget was reduced in this step."""

    @property
    def recompute(self) -> bool:
        return bool(self._recompute)

    def decide(self, policies: Sequence[Policy], bytes_to_come: int, packing: bool, ranks: Ranks | None = None) -> None:
        """Settle whether activations are kept, where that is open.

        Args:
            policies: the models that are trained, one after the other.
            bytes_to_come: what optimisers will take beside the activations.
            packing: whether models may compute flat rows.
            ranks: that decide together, by the one with least room; None for a single one.
        """
        if self._recompute is None:
            free = available_memory(policies[0].module.device)
            rooms = (ranks or Ranks()).all_gather(None if free is None else free - bytes_to_come)
            room = min((room for room in rooms if room is not None), default=None)
            fewer = self.tokens
            while not _fits(policies, fewer, packing, room) and fewer // 2 >= ENOUGH_TOKENS:
                fewer //= 2
            if _fits(policies, fewer, packing, room):
                self.tokens, self._recompute = fewer, False
            else:
                self._recompute = all(_recomputes(policy) for policy in policies)

    def reduce(self, policies: Sequence[Policy], lengths: Sequence[int]) -> bool:
        """Use less memory for a minibatch with sequences of these lengths; False where nothing is left to reduce."""
        longest = max(lengths)
        if self.tokens > longest:
            self.tokens = max(longest, min(self.tokens, sum(lengths)) // 2)
        elif not self.recompute and all(_recomputes(policy) for policy in policies):
            self._recompute = True
        else:
            return False
        self.retries += 1
        return True


def _fits(policies: Sequence[Policy], tokens: int, packing: bool, room: int | None) -> bool:
    """Whether there is room for one micro-batch of each with its activations kept."""
    if room is None:
        return True
    for policy in policies:
        device_type = policy.module.device.type
        fused = packing and policy.backbone is not None and device_type == "cuda"
        kept = kept_bytes(policy.module, tokens, fused=fused) * policy.dtype.itemsize // policy.module.dtype.itemsize
        if int(MARGIN * kept) + 2 * LOGIT_BYTES.get(device_type, LOGIT_BYTES["cpu"]) > room:
            return False
    return True


def _recomputes(policy: Policy) -> bool:
    return policy.backbone is not None or can_recompute(policy.module)
