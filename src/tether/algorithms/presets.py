"""Algorithms as data: names of functions and numbers, nothing that needs torch. A new variant is a new entry of `PRESETS`.

The functions behind the names are in advantages.py and objective.py, in the tables `ESTIMATORS`, `AGGREGATIONS` and `DIVERGENCES`; a test
compares names and tables. Settings read this file, so that the command line refuses a misspelt name before torch is loaded.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tether.core.errors import UnknownName, did_you_mean

ESTIMATORS = ("group_relative", "gae", "bilevel_gae")
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum")
DIVERGENCES = ("k1", "k2", "k3")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What distinguishes one policy-gradient algorithm from another."""

    name: str
    advantages: str
    """From rewards (and values) to advantages: a name of advantages.ESTIMATORS."""
    aggregation: str
    """How token losses become one number: a name of objective.AGGREGATIONS."""
    normalize_std: bool = False
    """group_relative: divide by the standard deviation within the group."""
    constant_length: bool = False
    """sequence_mean_token_sum: divide by the token budget of a response, the same for all."""
    whiten: bool = False
    """gae: advantages of the batch get mean 0 and variance 1."""
    gamma: float = 1.0
    gae_lambda: float = 1.0
    turn_gamma: float = 1.0
    """bilevel_gae: discount from turn to turn; gamma and gae_lambda then hold within a turn."""
    bootstrap_truncated: bool = True
    """gae, bilevel_gae: after an episode that was cut (turn limit, full context) the critic's value follows; False: nothing, as in RAGEN-2."""
    reward_placement: str = "turn"
    """Where rewards stand: "turn" (at the end of the turn that earned them) or "trajectory" (all at the last token)."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    """Bound on the ratio of tokens with negative advantage (arXiv 1912.09729, equation 5); None leaves them unbounded."""
    importance_cap: float | None = None
    """Truncated importance sampling: cap of old / behavior per token; None turns the correction off."""
    entropy_coef: float = 0.001
    kl_coef: float = 0.0
    """Weight of the divergence from the reference model; 0 needs no reference."""
    kl_mode: str = "loss"
    """Where that divergence goes: "loss" or "reward"."""
    divergence: str = "k3"
    """The estimate of the divergence: a name of objective.DIVERGENCES."""

    @property
    def has_critic(self) -> bool:
        return self.advantages in ("gae", "bilevel_gae")

    @property
    def has_reference(self) -> bool:
        return self.kl_coef > 0


PRESETS = {
    algorithm.name: algorithm
    for algorithm in (
        # arXiv 1707.06347, equation 7, with a critic and GAE (arXiv 1506.02438); gamma, lambda and clips as in RAGEN-2, appendix B.2
        Algorithm("ppo", advantages="gae", aggregation="token_mean", whiten=True),
        # DeepSeekMath, arXiv 2402.03300, equation 3, with RAGEN-2's clips and without the KL term (algorithm.kl_coef adds it)
        Algorithm("grpo", advantages="group_relative", aggregation="sequence_mean_token_mean", normalize_std=True),
        # arXiv 2503.14476: clip-higher (eq. 10), token-level loss (eq. 12), no KL; its dynamic sampling and overlong shaping: SECTIONS
        Algorithm("dapo", advantages="group_relative", aggregation="token_mean", normalize_std=True, entropy_coef=0.0),
        # arXiv 2503.20783: neither the standard deviation nor the length of a response enters
        Algorithm("dr_grpo", advantages="group_relative", aggregation="sequence_mean_token_sum", constant_length=True),
    )
}

SECTIONS: dict[str, dict[str, dict[str, Any]]] = {
    # arXiv 2503.14476: groups that all succeed or all fail are left out and replaced (eq. 11), long responses are penalised (eq. 13)
    "dapo": {
        "filter": {"strategy": "all", "include_zero": False, "score": "outcome_variance", "loss_scale": "none", "refill": 3},
        "rollout": {"overlong_share": 0.2},
    },
}
"""Defaults of other sections of a run's settings that belong to an algorithm."""


def preset(name: str) -> Algorithm:
    """The algorithm of a name."""
    if name not in PRESETS:
        raise UnknownName(f"unknown algorithm '{name}': {did_you_mean(name, PRESETS)}")
    return PRESETS[name]


def customized(name: str, changes: Mapping[str, Any]) -> Algorithm:
    """A preset with some of its fields changed."""
    return dataclasses.replace(preset(name), **changes)
