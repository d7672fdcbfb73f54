"""Algorithms as data: a frozen bundle of functions and numbers, each function from a file beside this one. A new variant is a new entry."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tether.algorithms.aggregate import AGGREGATIONS, Aggregation, sequence_mean_token_mean, sequence_mean_token_sum, token_mean
from tether.algorithms.batch import Episodes, Estimates
from tether.algorithms.divergence import DIVERGENCES, k3
from tether.algorithms.estimators import ESTIMATORS, bilevel_gae, gae, group_relative
from tether.core.errors import UnknownName, did_you_mean

Estimator = Callable[[Episodes, "Algorithm"], Estimates]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What distinguishes one policy-gradient algorithm from another."""

    name: str
    advantages: Estimator
    """From rewards (and values) to advantages."""
    aggregation: Aggregation
    """How token losses become one number."""
    normalize_std: bool = False
    """group_relative: divide by the standard deviation within the group."""
    constant_length: bool = False
    """sequence_mean_token_sum: divide by the token budget of a response, the same for all."""
    whiten: bool = False
    """gae: advantages of the batch get mean 0 and variance 1."""
    gamma: float = 1.0
    gae_lambda: float = 1.0
    turn_gamma: float = 1.0
    """bilevel_gae: discount from turn to turn; gamma and lam then hold within a turn."""
    reward_placement: str = "turn"
    """Where rewards stand: "turn" (at the end of the turn that earned them) or "trajectory" (all at the last token)."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    """Bound on the ratio of tokens with negative advantage (arXiv 1912.09729, equation 5); None leaves them unbounded."""
    entropy_coef: float = 0.001
    kl_coef: float = 0.0
    """Weight of the divergence from the reference model; 0 needs no reference."""
    kl_mode: str = "loss"
    """Where that divergence goes: "loss" or "reward"."""
    divergence: Callable[[Tensor, Tensor], Tensor] = k3

    @property
    def has_critic(self) -> bool:
        return self.advantages in (gae, bilevel_gae)

    @property
    def has_reference(self) -> bool:
        return self.kl_coef > 0


PRESETS = {
    algorithm.name: algorithm
    for algorithm in (
        # arXiv 1707.06347, equation 7, with a critic and GAE (arXiv 1506.02438); gamma, lambda and clips as in RAGEN-2, appendix B.2
        Algorithm("ppo", advantages=gae, aggregation=token_mean, whiten=True),
        # DeepSeekMath, arXiv 2402.03300, equation 3, with RAGEN-2's clips and without the KL term (algorithm.kl_coef adds it)
        Algorithm("grpo", advantages=group_relative, aggregation=sequence_mean_token_mean, normalize_std=True),
        # arXiv 2503.14476: clip-higher (eq. 10), token-level loss (eq. 12), no KL; its dynamic sampling and overlong shaping: names.SECTIONS
        Algorithm(
            "dapo",
            advantages=group_relative,
            aggregation=token_mean,
            normalize_std=True,
            entropy_coef=0.0,
        ),
        # arXiv 2503.20783: neither the std nor the length of a response enters
        Algorithm("dr_grpo", advantages=group_relative, aggregation=sequence_mean_token_sum, constant_length=True),
    )
}


def preset(name: str) -> Algorithm:
    """The algorithm of a name."""
    if name not in PRESETS:
        raise UnknownName(f"unknown algorithm '{name}': {did_you_mean(name, PRESETS)}")
    return PRESETS[name]


def customised(name: str, changes: Mapping[str, Any]) -> Algorithm:
    """A preset with departures from it; functions are given by their names."""
    tables: dict[str, Mapping[str, Any]] = {"advantages": ESTIMATORS, "aggregation": AGGREGATIONS, "divergence": DIVERGENCES}
    resolved = {field: tables[field][value] if field in tables else value for field, value in changes.items()}
    return dataclasses.replace(preset(name), **resolved)
