"""What serves a model: `decoder_for`, the paged decoder for the Llama family on a CUDA device, contiguous rows for everything else; and
`fast_path_report`, which parts of the fast path serve it, and why a slow way was chosen where one was."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from tether.core.errors import BadInput
from tether.models.fast.backbone import FeedForward
from tether.models.fast.decoding.contiguous import ContiguousDecoder
from tether.models.fast.decoding.protocol import Decoder
from tether.models.fast.decoding.rows import decodes_with_cache, position_bytes
from tether.models.fast.layers import has_linear_mlp
from tether.models.fast.packed_attention import packed_kernel
from tether.models.hardware import available_memory, device_name
from tether.models.policy import Policy
from tether.models.scoring.local import scorer_for

if TYPE_CHECKING:
    from tether.models.fast.float8 import Float8Mlps

DecoderName = Literal["paged", "contiguous", "generic", "none"]
"""paged: kernels over a paged cache (CUDA). contiguous: the family's forward pass over rows. generic: the module's own code. none: no cache fits."""
LearnerAttention = Literal["flash kernel of torch", "by definition", "padded module"]
"""by definition: exact, with memory quadratic in the length of a text. padded module: the module's own code over padded rows."""
ScorerName = Literal["shared", "copied", "whole"]
"""shared: a prompt is computed once and read by all. copied: its cache is copied for each text. whole: prompt and text are computed together."""
Head = Literal["linear, fused log-probs", "module's own"]
PARTS = ("decoder", "learner_attention", "scorer", "head")

FLOAT8_CAPABILITY = (8, 9)
MEMORY_SHARE = 0.5
"""What the cache takes of the memory that is free, unless configured."""


def decoder_for(policy: Policy) -> "DecoderChoice":
    """Which decoder serves a model, decided once; BadInput where none does."""
    return policy.once("decoder", lambda: DecoderChoice(policy))


class DecoderChoice:
    """How a model is decoded; decoders of any size are made from it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._backbone = policy.backbone
        if self._backbone is None and (reason := decodes_with_cache(policy)):
            raise BadInput(
                f"models of type '{policy.model_type}' cannot be decoded with a key/value cache of this engine ({reason}); "
                "use a transformer with causal attention such as Llama, Qwen, Mistral, Gemma or GPT-2"
            )

    @property
    def backend(self) -> Literal["paged", "contiguous", "generic"]:
        """paged, contiguous (the family's forward pass without pages), or generic (the model's own code)."""
        if self._backbone is None:
            return "generic"
        return "paged" if self._paged_head is not None else "contiguous"

    @property
    def reason(self) -> str:
        """Why a slower decoder than the device's fastest is used; "" where it is not. Without a GPU contiguous rows are the fastest."""
        if self._backbone is None:
            return self._policy.backbone_reason
        if self.backend == "contiguous" and self._policy.device.type == "cuda":
            return f"the head is a {type(self._policy.module.get_output_embeddings()).__name__}, the paged decoder needs a linear one"
        return ""

    @property
    def position_bytes(self) -> int:
        """What the cache holds for one position of one conversation, in bytes."""
        return position_bytes(self._policy)

    @property
    def _paged_head(self) -> nn.Linear | None:
        """The head of a model that the paged decoder can serve."""
        head = self._policy.module.get_output_embeddings()
        return head if self._backbone is not None and self._policy.device.type == "cuda" and type(head) is nn.Linear else None

    def check_float8(self) -> None:
        """BadInput where the device or the model cannot be decoded in float8."""
        device, backbone = self._policy.device, self._backbone
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
            reason, remedy = (
                f"the device is {device_name(device)}",
                "it needs a GPU of compute capability 8.9 or newer, such as an L4, H100 or H200",
            )
        elif backbone is None or self._paged_head is None:
            reason, remedy = self.reason, "only models of the fast path are decoded in float8"
        elif backbone.through_modules:
            reason, remedy = "fsdp divides the weights", "set learner.sharding=zero1"
        elif self._policy.dtype != torch.bfloat16:
            reason, remedy = f"the model computes in {str(self._policy.dtype).removeprefix('torch.')}", "set model.dtype=bfloat16"
        elif not all(has_linear_mlp(layer) for layer in backbone.layers):
            reason, remedy = "an MLP is more than linear layers without bias, or its width is no multiple of 16", "take another model"
        else:
            return
        raise BadInput(f"rollout.precision is fp8, but {reason}; {remedy}, or leave rollout.precision out")

    def float8(self) -> "Float8Mlps":
        """A copy of the MLPs in float8, for `make`."""
        from tether.models.fast.float8 import Float8Mlps  # its kernels are for CUDA alone
        from tether.models.fast.kernels.warm_up import warm_up_float8

        assert self._backbone is not None  # check_float8
        copied = Float8Mlps(self._backbone.layers)
        warm_up_float8(self._backbone, copied.layers[0])
        return copied

    def make(self, num_slots: int, most_positions: int | None, budget: int | None, float8: Sequence[FeedForward] | None = None) -> Decoder:
        """A decoder of so many slots whose cache stays within a budget in bytes; None: half of the memory that is free."""
        policy = self._policy
        if budget is None and (free := available_memory(policy.device)) is not None:
            budget = int(MEMORY_SHARE * free)
        positions = min(most_positions or policy.max_positions, policy.max_positions)
        head = self._paged_head
        if self._backbone is not None and head is not None and budget is not None:
            from tether.models.fast.decoding.paged import PagedDecoder  # its kernels are for CUDA alone

            return PagedDecoder(self._backbone, head, num_slots, min(positions, self._backbone.num_positions), budget, float8)
        return ContiguousDecoder(policy, num_slots, backbone=self._backbone, most_positions=positions, budget=budget)


@dataclass(frozen=True)
class FastPathReport:
    """What computes a model. A part that is not in `reasons` has the fastest implementation that exists for the device."""

    model_type: str
    device: str
    dtype: str
    max_positions: int
    """Positions that the probe covered: those the run may use."""
    decoder: DecoderName
    learner_attention: LearnerAttention
    scorer: ScorerName
    head: Head
    reasons: dict[str, str] = field(default_factory=dict)
    """Part -> why a slower implementation was chosen."""
    vision: str = ""
    """Of a model that sees: whether its tower is trained."""

    @property
    def is_fast(self) -> bool:
        """Whether every part has the fastest implementation of the device."""
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        """For run.json."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For a terminal: one line that names the parts, then one line for each slow part."""
        parts = f"decoder {self.decoder}, learner attention {self.learner_attention}, scorer {self.scorer}, head {self.head}"
        speed = "fast path" if self.is_fast else "partly slow path"
        return [
            f"{speed} ({self.model_type}, {self.dtype} on {self.device}): {parts}",
            *([f"images: the vision tower is {self.vision}"] if self.vision else []),
            *(f"{part.replace('_', ' ')} is slow ({getattr(self, part)}): {self.reasons[part]}" for part in PARTS if part in self.reasons),
        ]


def fast_path_report(policy: Policy) -> FastPathReport:
    """What serves a model; probes what has not been probed."""
    return policy.once("report", lambda: _found(policy))


def _found(policy: Policy) -> FastPathReport:
    reasons: dict[str, str] = {}
    decoder: DecoderName = "none"
    try:
        decoder, reasons["decoder"] = decoder_for(policy).backend, decoder_for(policy).reason
    except BadInput as error:
        reasons["decoder"] = str(error)
    attention: LearnerAttention = "padded module"
    if policy.backbone is None:
        one_a_row = [f"one sequence a row: {policy.packing_reason}"] if policy.packing_reason else []
        reasons["learner_attention"] = "; ".join([policy.backbone_reason, *one_a_row])
    else:
        reasons["learner_attention"] = packed_kernel(policy.device.type, policy.dtype, policy.backbone.head_dim).reason
        attention = "by definition" if reasons["learner_attention"] else "flash kernel of torch"
    scorer = scorer_for(policy)
    reasons["scorer"] = scorer.reason
    linear = policy.linear_head is not None
    reasons["head"] = "" if linear else policy.head_reason or f"the head is a {type(policy.module.get_output_embeddings()).__name__}"
    return FastPathReport(
        policy.model_type,
        str(policy.device),
        str(policy.dtype).removeprefix("torch."),
        policy.max_positions,
        decoder,
        attention,
        scorer.backend,
        "linear, fused log-probs" if linear else "module's own",
        {part: reason for part, reason in reasons.items() if reason},
        _vision_words(policy),
    )


def _vision_words(policy: Policy) -> str:
    if policy.vision is None:
        return ""
    return "trained" if policy.vision.is_trained else "frozen (learner.train_vision), the features of an image are computed once"
