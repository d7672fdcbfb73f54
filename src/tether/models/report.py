"""`FastPathReport`: which parts of the fast path serve a model, and why a slow way was chosen where one was. Plain data, without torch."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

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
