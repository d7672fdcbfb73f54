"""The fixed probe that compares a server with the learner: the same text, scored token by token on both.

A server that answers 200 to new weights may still hold old ones, in whole or in part (vLLM's reload in place leaves a tied head stale on a
CPU). So the probe is scored after every publish. Two things end a run: a difference above the tolerance, and a server that is nearer to the
weights before the update than to those after it, where the update moved the probe by more than rounding.

The learner's side is computed once for each publish. A server that is checked later (it was replaced) is compared with these numbers and not
with the policy, which an asynchronous run has trained on meanwhile.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from tether.models.logprobs import cut_batch, forward, logprobs_and_entropy
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

PREFIXES = 8
"""Beginnings of the probe behind which a server samples a token, to see which log-probs it returns."""

Scores = npt.NDArray[np.float64]


class ProbeScores(NamedTuple):
    """What the learner's weights say about the probe."""

    tokens: Scores
    """Log-probs of its tokens but the first."""
    next_logits: npt.NDArray[np.float32]
    """[PREFIXES, V]: logits of the token behind each of `Probe.prefixes`."""


NO_SCORES = ProbeScores(np.zeros(0), np.zeros((0, 0), dtype=np.float32))
"""Of a rank that verifies no server."""


@dataclass(slots=True)
class Probe:
    """The probe of one policy, with the learner's scores at the latest publish."""

    policy: Policy
    tolerance: float
    ids: tuple[int, ...] = field(init=False)
    _scores: ProbeScores | None = field(default=None, init=False)
    _before: ProbeScores | None = field(default=None, init=False)
    _noise: float = field(default=0.0, init=False)
    """The largest difference that a right server has shown."""

    def __post_init__(self) -> None:
        self.ids = tuple(encode(self.policy.tokenizer, PROBE_TEXT)[:MOST_TOKENS])

    @property
    def prefixes(self) -> list[tuple[int, ...]]:
        """Beginnings of the probe, the last half of it in equal steps."""
        ends = np.linspace(len(self.ids) // 2, len(self.ids) - 1, PREFIXES).astype(int)
        return [self.ids[:end] for end in ends]

    def score(self) -> ProbeScores:
        """The probe under the learner's present weights. Of a divided policy all ranks call it."""
        with torch.no_grad():
            return self.policy.in_step(self._score)

    def _score(self) -> ProbeScores:
        ids_1T = torch.tensor([self.ids], device=self.policy.device)
        mask_1T = torch.ones_like(ids_1T, dtype=torch.bool)
        mask_1T[0, 0] = False
        (micro,) = cut_batch(self.policy, ids_1T, torch.tensor([len(self.ids)], device=self.policy.device), len(self.ids))
        features_ND, targets_N = forward(self.policy, ids_1T, mask_1T, micro)  # feature n predicts token n + 1
        logprobs_N, _ = logprobs_and_entropy(self.policy, features_ND, targets_N, 1.0)
        next_logits = self.policy.logits(features_ND[[len(prefix) - 1 for prefix in self.prefixes]]).float()
        return ProbeScores(logprobs_N.double().cpu().numpy(), next_logits.cpu().numpy())

    def next_logprob(self, prefix: int, token: int, temperature: float) -> float:
        """The learner's log-prob of a token behind one of the prefixes."""
        logits_V = self._learner().next_logits[prefix].astype(np.float64) / temperature
        highest = logits_V.max()
        return float(logits_V[token] - highest - np.log(np.exp(logits_V - highest).sum()))

    def adopt(self, scores: ProbeScores) -> None:
        """Compare with these scores from now on; those of the weights before them are kept for comparison."""
        self._before, self._scores = self._scores, scores

    def difference(self, served: list[float]) -> float:
        """Mean absolute difference between a server's scores and the learner's."""
        return _distance(self._learner().tokens, np.array(served))

    def complaint(self, served: list[float]) -> str | None:
        """What is wrong with a server's scores, in words, or None."""
        scores, answer = self._learner().tokens, np.array(served)
        difference = _distance(scores, answer)
        if not difference <= self.tolerance:
            return f"its log-probs on the probe differ from the learner's by {difference:.2g} on average, more than {self.tolerance:g}"
        if self._before is not None and len(self._before.tokens) == len(scores):
            moved, stale = _distance(scores, self._before.tokens), _distance(answer, self._before.tokens)
            if moved > MOVED * self._noise and stale < difference and difference > moved / 2:
                return (
                    f"it still answers with the weights before the update: the probe is {stale:.2g} from those and {difference:.2g} from "
                    "the new ones"
                )
        self._noise = max(self._noise, difference)
        return None

    def _learner(self) -> ProbeScores:
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
