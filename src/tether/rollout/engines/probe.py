"""The fixed probe that compares a server with the learner: the same text, scored token by token on both.

A server that answers 200 to new weights may still hold old ones, in whole or in part (vLLM's reload in place leaves a tied head stale on a
CPU). So the probe is scored after every publish. Two things end a run: a difference above the tolerance, and a server that is nearer to the
weights before the update than to those after it, where the update moved the probe by more than rounding.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from tether.models.logprobs import score_tokens
from tether.models.policy import Policy

PROBE_TEXT = (
    "You are on a frozen lake, P is you and G is the goal. <think> The goal is two rows down and one column to the right, and the hole at "
    "(1, 2) is in the way, so I go Down, Down, then Right. </think> <answer> Down || Down || Right </answer> Turn 2 of 5: 37 + 25 = 62, and "
    "7 * (8 - 3) = 35. Search for the book of which she wrote the second half in 1893; then click buy."
)
MOST_TOKENS = 128
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Mean absolute difference of a log-prob on the probe, by what the learner computes in."""
MOVED = 4.0
"""An update moved the probe measurably where the mean change is so many times the difference before the update."""

Scores = npt.NDArray[np.float64]
NO_SCORES: Scores = np.zeros(0)
"""Of a rank that verifies no server."""


@dataclass(slots=True)
class Probe:
    """The probe of one policy, with the learner's scores at the latest publish."""

    policy: Policy
    tolerance: float
    ids: tuple[int, ...] = field(init=False)
    _scores: Scores | None = field(default=None, init=False)
    _before: Scores | None = field(default=None, init=False)
    _noise: float = field(default=0.0, init=False)
    """The largest difference that a right server has shown."""

    def __post_init__(self) -> None:
        self.ids = tuple(encode(self.policy.tokenizer, PROBE_TEXT)[:MOST_TOKENS])

    def score(self) -> Scores:
        """The probe's log-probs by the learner's present weights."""
        return np.array(score_tokens(self.policy, self.ids))

    def adopt(self, scores: Scores) -> None:
        """Compare with these scores from now on; those of the weights before them are kept for comparison."""
        self._before, self._scores = self._scores, scores

    def difference(self, served: list[float]) -> float:
        """Mean absolute difference between a server's scores and the learner's."""
        return _distance(self._learner(), np.array(served))

    def complaint(self, served: list[float]) -> str | None:
        """What is wrong with a server's scores, in words, or None."""
        scores, answer = self._learner(), np.array(served)
        difference = _distance(scores, answer)
        if not difference <= self.tolerance:
            return f"its log-probs on the probe differ from the learner's by {difference:.2g} on average, more than {self.tolerance:g}"
        if self._before is not None and len(self._before) == len(scores):
            moved, stale = _distance(scores, self._before), _distance(answer, self._before)
            if moved > MOVED * self._noise and stale < difference and difference > moved / 2:
                return (
                    f"it still answers with the weights before the update: the probe is {stale:.2g} from those and {difference:.2g} from "
                    "the new ones"
                )
        self._noise = max(self._noise, difference)
        return None

    def _learner(self) -> Scores:
        if self._scores is None:
            self.adopt(self.score())
        assert self._scores is not None
        return self._scores


def encode(tokenizer: PreTrainedTokenizerBase | None, text: str) -> list[int]:
    """Tokens of a text, nothing added."""
    assert tokenizer is not None  # engines have a policy with its tokenizer
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def default_tolerance(policy: Policy) -> float:
    """What rounding explains, by the precision that the learner computes in."""
    return TOLERANCES.get(policy.dtype, TOLERANCES[torch.bfloat16])


def _distance(first: Scores, second: Scores) -> float:
    return float(np.abs(first - second).mean()) if first.shape == second.shape else float("inf")
