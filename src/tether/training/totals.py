"""Sums over the trained tokens of a step, reduced to means once at its end.

Sums stay on the device until the step is done, because reading a number makes the host wait for the GPU. Several ranks combine what they saw of a
minibatch before anything is decided by it, and so read it then.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MEANS = ("policy_loss", "entropy", "clip_low", "clip_high", "clip_dual", "kl_sampled")
"""Always logged, 0 where nothing was trained."""
INTERNAL = ("ratio", "ratio_squared", "mismatch", "mismatch_ratio")
"""Sums that are logged in another form."""
LOSS, RATIO_MAX, RATIO_MIN, MISMATCH_RATIO_MAX, MISMATCH_MAX = "loss", "ratio_max", "ratio_min", "mismatch_ratio_max", "mismatch_max"
"""Numbers of a minibatch that are not sums over tokens."""
EXTREMES: dict[str, Callable[[float, float], float]] = {RATIO_MAX: max, RATIO_MIN: min, MISMATCH_RATIO_MAX: max, MISMATCH_MAX: max}
"""How those of several micro-batches become one; all other numbers add up."""


class UpdateWork(NamedTuple):
    """What an update put through the policy, padding and what was shared left out. Example: UpdateWork(900, 41_000, 300)."""

    tokens: int
    pairs: int
    """Positions that the tokens looked at, their own included."""
    targets: int
    """Tokens whose log-probs were computed: those that go through the head."""


class TokenTotals:
    """What an update saw, token by token, summed up in double precision."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        """What has been read from the device: `settle` first."""
        self.count = 0
        self.ratio_max, self.ratio_min, self.mismatch_ratio_max, self.mismatch_max = 0.0, math.inf, 0.0, 0.0
        self.losses: list[float] = []
        """The loss of each minibatch."""
        self.norms: list[dict[str, float]] = []
        """Gradient norms of each update, by optimiser."""
        self.nonfinite = 0
        self.tokens, self.positions, self.saved, self.pairs = 0, 0, 0, 0
        """Tokens that went through the model, the positions of those passes, padding included, and tokens that were not computed because others share them;
        pairs are the positions that the tokens looked at."""
        self._pending: list[tuple[tuple[str, ...], Tensor]] = []
        """Names and float64 values on the device, in the order in which they came."""

    def add(self, **values: Tensor) -> None:
        """Numbers of every token, to be summed up."""
        wide_KN = torch.stack([value.detach().double() for value in values.values()])
        self._pending.append((tuple(values), wide_KN.sum(dim=1)))

    def add_ratios(self, ratio_N: Tensor) -> None:
        self.add(ratio=ratio_N, ratio_squared=ratio_N.double().square())
        self._put((RATIO_MIN, RATIO_MAX), *ratio_N.aminmax())

    def add_mismatch(self, log_ratio_N: Tensor) -> None:
        """log-prob of the learner - log-prob of the sampler."""
        ratio_N, distance_N = log_ratio_N.exp(), log_ratio_N.abs()
        self.add(mismatch=distance_N, mismatch_ratio=ratio_N)
        self._put((MISMATCH_RATIO_MAX, MISMATCH_MAX), ratio_N.max(), distance_N.max())

    def add_loss(self, loss: Tensor) -> None:
        """The loss of a micro-batch, a part of its minibatch's."""
        self._put((LOSS,), loss)

    def _put(self, names: tuple[str, ...], *values: Tensor) -> None:
        self._pending.append((names, torch.stack([value.detach().double() for value in values])))

    def count_micro(self, count: int, tokens: int, positions: int, saved: int, pairs: int) -> None:
        self.count += count
        self.tokens += tokens
        self.positions += positions
        self.saved += saved
        self.pairs += pairs

    @property
    def work(self) -> UpdateWork:
        return UpdateWork(self.tokens, self.pairs, self.count)

    def finite(self, device: torch.device) -> Tensor:
        """Whether everything that was seen of a minibatch is finite, as a bool on the device, where it is decided without waiting."""
        if not self._pending:
            return torch.tensor(self.is_finite, device=device)
        return torch.cat([values for _, values in self._pending]).isfinite().all()

    def settle(self) -> None:
        """Read what the device has summed up for a minibatch."""
        if not self._pending:
            return
        names, values = (name for names, _ in self._pending for name in names), torch.cat([values for _, values in self._pending]).tolist()
        found: dict[str, float] = {}
        for name, value in zip(names, values, strict=True):
            combine = EXTREMES.get(name, operator.add)
            found[name] = combine(found[name], value) if name in found else value
        self._pending = []
        if LOSS in found:
            self.losses.append(found.pop(LOSS))
        if RATIO_MAX in found:
            self.ratio_max, self.ratio_min = found.pop(RATIO_MAX), found.pop(RATIO_MIN)
        self.mismatch_ratio_max, self.mismatch_max = found.pop(MISMATCH_RATIO_MAX, 0.0), found.pop(MISMATCH_MAX, 0.0)
        self.sums = found

    def merge(self, part: "TokenTotals") -> None:
        """Add what a minibatch saw, which is settled."""
        self.count, self.tokens, self.positions = self.count + part.count, self.tokens + part.tokens, self.positions + part.positions
        self.saved, self.pairs = self.saved + part.saved, self.pairs + part.pairs
        self.ratio_max, self.ratio_min = max(self.ratio_max, part.ratio_max), min(self.ratio_min, part.ratio_min)
        self.mismatch_ratio_max = max(self.mismatch_ratio_max, part.mismatch_ratio_max)
        self.mismatch_max = max(self.mismatch_max, part.mismatch_max)
        self.losses += part.losses
        self.norms += part.norms
        for name, value in part.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    @staticmethod
    def combined(parts: Sequence["TokenTotals"]) -> "TokenTotals":
        """What several ranks saw of one minibatch, as one rank would have seen it: its loss is the sum of their parts."""
        if len(parts) == 1:
            return parts[0]
        whole = TokenTotals()
        for part in parts:
            whole.merge(part)
        whole.losses = [sum(whole.losses)] if whole.losses else []
        return whole

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in (self.ratio_max, *self.losses, *self.sums.values()))

    def mean(self, name: str) -> float:
        return self.sums.get(name, 0.0) / max(1, self.count)

    @property
    def mismatch(self) -> dict[str, float]:
        """How far the learner's log-probs are from the sampler's; 0 where that is not finite, which the counts of updates say."""
        found = {
            "mismatch": self.mean("mismatch"),
            "mismatch_max": self.mismatch_max,
            "mismatch_tokens": self.count,
            "mismatch_ratio_mean": self.mean("mismatch_ratio"),
            "mismatch_ratio_max": self.mismatch_ratio_max,
        }
        return {name: value if math.isfinite(value) else 0.0 for name, value in found.items()}


def update_metrics(totals: TokenTotals, mismatch: dict[str, float], rate: float, nonfinite_streak: int) -> dict[str, float]:
    """The "update/" metrics of a step; `mismatch` is that of its first minibatch, before anything was updated."""
    num_updates = len(totals.norms)
    metrics = {
        "loss": sum(totals.losses) / max(1, num_updates),
        **{name: totals.mean(name) for name in MEANS},
        **{name: totals.mean(name) for name in totals.sums if name not in INTERNAL},
        "ratio_mean": totals.mean("ratio"),
        "ratio_std": math.sqrt(max(0.0, totals.mean("ratio_squared") - totals.mean("ratio") ** 2)),
        "ratio_max": totals.ratio_max,
        "ratio_min": totals.ratio_min if num_updates else 0.0,
        **mismatch,
        "grad_norm": _mean_norm(totals.norms, "policy"),
        "learning_rate": rate,
        "num_updates": num_updates,
        "nonfinite": totals.nonfinite,
        "nonfinite_streak": nonfinite_streak,
        "tokens_trained": totals.count,
        "tokens_shared": totals.saved,
        "padding": 1 - totals.tokens / totals.positions if totals.positions else 0.0,
    }
    if totals.norms and "head" in totals.norms[0]:
        metrics["critic_grad_norm"] = _mean_norm(totals.norms, "critic", "head")
    return metrics


def _mean_norm(norms: list[dict[str, float]], *names: str) -> float:
    """The norm of some optimisers' gradients together, on average over the updates."""
    return sum(math.hypot(*(norm.get(name, 0.0) for name in names)) for norm in norms) / max(1, len(norms))
