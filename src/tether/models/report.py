"""`fast_path_report`: which parts of the fast path serve a model, and why a slow way was chosen where one was."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tether.core.errors import BadInput
from tether.models.fast.decoding.choose import decoder_for
from tether.models.fast.packed_attention import packed_kernel
from tether.models.policy import Policy
from tether.models.scoring.local import scorer_for

Decoder = Literal["paged", "contiguous", "generic", "none"]
"""paged: kernels over a paged cache (CUDA). contiguous: the family's forward pass over rows. generic: the module's own code. none: no cache fits."""
LearnerAttention = Literal["flash kernel of torch", "by definition", "padded module"]
"""by definition: exact, with memory quadratic in the length of a text. padded module: the module's own code over padded rows."""
Scorer = Literal["shared", "copied", "whole"]
"""shared: a prompt is computed once and read by all. copied: its cache is copied for each text. whole: prompt and text are computed together."""
Head = Literal["linear, fused log-probs", "module's own"]
PARTS = ("decoder", "learner_attention", "scorer", "head")


@dataclass(frozen=True)
class FastPathReport:
    """What computes a model. A part that is not in `reasons` has the fastest implementation that exists for the device."""

    model_type: str
    device: str
    dtype: str
    max_positions: int
    """Positions that the probe covered: those the run may use."""
    decoder: Decoder
    learner_attention: LearnerAttention
    scorer: Scorer
    head: Head
    reasons: dict[str, str] = field(default_factory=dict)
    """Part -> why a slower implementation was chosen."""

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
            *(f"{part.replace('_', ' ')} is slow ({getattr(self, part)}): {self.reasons[part]}" for part in PARTS if part in self.reasons),
        ]


def fast_path_report(policy: Policy) -> FastPathReport:
    """What serves a model; probes what has not been probed."""
    return policy.once("report", lambda: _found(policy))


def _found(policy: Policy) -> FastPathReport:
    reasons: dict[str, str] = {}
    decoder: Decoder = "none"
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
    )
