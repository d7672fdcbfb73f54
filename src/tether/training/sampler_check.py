"""What servers sampled, or the native engine in float8, recomputed by the learner before a step trains on it.

A server that holds the weights of the last step must return the log-probs that the learner computes for the same tokens, rounding apart. A wrong token
or log-prob is therefore seen in the first step that has one, and the run stops before anybody gets weights that learned from it. Compared are

- before the update all rows of the batch, where truncated importance sampling has computed their log-probs; of the groups that the filter left out, or of
  all groups where there is no such pass, CHECKED_EPISODES episodes, drawn anew in every step;
- after the update all tokens of its first minibatch, which were compared before anything was updated (`update/mismatch`, `update/mismatch_max`).

Only groups whose every token was sampled with the weights before this update take part: older weights differ, and importance sampling corrects that.

The bounds are multiples of the tolerance t that the probe has (`server.tolerance`: 0.001 in float32, 0.02 in float16, 0.05 in bfloat16, on average):

| what is off | bound | float32 | bfloat16 | seen in healthy runs | one wrong token in each response of `tiny` |
|---|---|---|---|---|---|
| mean of all tokens | 10 t, at most 1 | 0.01 | 0.5 | 3e-7 in float32, below 0.05 in bfloat16 | 1.3 |
| median of the rows' largest | 100 t, at most 5 | 0.1 | 5 | below 1e-4, up to 0.5 | over 10 |
| largest | 500 t, at most 15 | 0.5 | 15 | below 1e-4, up to 2 | over 10 |

Rounding moves many tokens a little, and a few rare ones by more; a defect moves single tokens by many nats. So the mean may be ten times what the
probe may have, a typical row may hold one token a hundred times as far off, and no token at all may be five hundred times as far off. Measured:
`tiny` in bfloat16 beside float32 0.013, 0.14 and 0.82; with weights in float8 0.026, 0.32 and 0.67 (8 rows of 64 tokens). With MLPs in float8
(`rollout.precision`) t is FLOAT8_TOLERANCE: SmolLM2-135M, rounded so on a CPU, is off by 0.18 on average and 0.82 at most.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tether.algorithms.batch import Batch
from tether.core.types import Group

FLOAT8_TOLERANCE = 0.1
CHECKED_EPISODES = 8
"""Episodes of a step that are recomputed for the comparison alone, at most."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """|log-prob of the learner - log-prob of the server| over some tokens."""

    num_tokens: int
    num_rows: int
    mean: float
    typical: float
    """The median, over the rows, of the largest difference in a row; 0 where rows were not told apart."""
    largest: float

    def metrics(self) -> dict[str, float]:
        """For the "update/" section."""
        return {"checked_tokens": self.num_tokens, "checked_difference": self.mean, "checked_difference_max": self.largest}

    def complaint(self, tolerance: float) -> str | None:
        """What rounding does not explain, in words, or None. What is not finite is beyond every bound."""
        found = {
            f"{self.mean:.2g} on average": (self.mean, min(10 * tolerance, 1.0)),
            f"{self.typical:.2g} at the worst token of a typical row": (self.typical, min(100 * tolerance, 5.0)),
            f"{self.largest:.2g} at the worst token": (self.largest, min(500 * tolerance, 15.0)),
        }
        wrong = [f"{words} (at most {bound:.2g})" for words, (value, bound) in found.items() if not value <= bound]
        if not wrong:
            return None
        rows = f" of {self.num_rows} rows" if self.num_rows else ""
        return f"over {self.num_tokens} tokens{rows} the learner's log-probs differ from the server's by {', '.join(wrong)}"


def is_current(group: Group, version: int) -> bool:
    """Whether every token of a group was sampled with the weights of this version, as the server says."""
    turns = [turn for trajectory in group.trajectories for turn in trajectory.turns if turn.response_ids]
    return bool(turns) and all(set(turn.versions) == {version} for turn in turns)


def compare(batches: Sequence[Batch], groups: set[int]) -> Comparison | None:
    """Compare the rows of these groups; None where there is none. The batches hold the learner's log-probs."""
    rows = []
    for batch in batches:
        assert batch.old_logprobs_BT is not None
        difference_BT = (batch.old_logprobs_BT - batch.behavior_logprobs_BT).abs().double().cpu()
        mask_BT = batch.loss_mask_BT.cpu()
        rows += [difference_BT[b, mask_BT[b]] for b, group in enumerate(batch.groups_B.tolist()) if group in groups]
    rows = [row for row in rows if len(row)]
    if not rows:
        return None
    whole_N, largest_B = torch.cat(rows), torch.stack([row.max() for row in rows])
    mean, typical, largest = float(whole_N.mean()), float(largest_B.quantile(0.5)), float(whole_N.max())
    if math.isnan(mean):  # a maximum may hide it
        mean = math.inf
    return Comparison(len(whole_N), len(rows), mean, typical, largest)
