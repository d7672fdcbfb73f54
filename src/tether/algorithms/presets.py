"""Algorithms as data: names of functions and numbers, nothing that needs torch. A new variant is a new entry of `PRESETS`.

`Algorithm` declares every setting of an algorithm once: it is the section `algorithm` of a run's settings, and what estimators, loss and learner
read. The functions behind its names are in advantages.py and objective.py, in the tables `ESTIMATORS`, `AGGREGATIONS` and `DIVERGENCES`; a
test compares names and tables. Settings are read before torch is loaded, so that the command line refuses a misspelt name at once.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tether.core.config import Settings
from tether.core.errors import UnknownName, did_you_mean

ESTIMATORS = ("group_relative", "gae", "bilevel_gae")
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum")
DIVERGENCES = ("k1", "k2", "k3")

PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 1707.06347, equation 7, with a critic and GAE (arXiv 1506.02438); gamma, lambda and clips as in RAGEN-2, appendix B.2
    "ppo": {"advantages": "gae", "aggregation": "token_mean", "normalize_std": False, "whiten": True},
    # DeepSeekMath, arXiv 2402.03300, equation 3, with RAGEN-2's clips and without the KL term (algorithm.kl_coef adds it)
    "grpo": {},
    # arXiv 2503.14476: clip-higher (eq. 10), token-level loss (eq. 12), no KL; its dynamic sampling and overlong shaping: SECTIONS
    "dapo": {"aggregation": "token_mean", "entropy_coef": 0.0},
    # arXiv 2503.20783: neither the standard deviation nor the length of a response enters
    "dr_grpo": {"aggregation": "sequence_mean_token_sum", "normalize_std": False, "constant_length": True},
}
"""By name, what an algorithm has other than `Algorithm` says."""

SECTIONS: dict[str, dict[str, dict[str, Any]]] = {
    # arXiv 2503.14476: groups that all succeed or all fail are left out and replaced (eq. 11), long responses are penalised (eq. 13)
    "dapo": {
        "filter": {"strategy": "all", "include_zero": False, "score": "outcome_variance", "loss_scale": "none", "refill": 3},
        "rollout": {"overlong_share": 0.2},
    },
}
"""Defaults of other sections of a run's settings that belong to an algorithm."""


NULL_MEANS_OFF = ("dual_clip", "importance_cap", "reference")
"""Fields for which null is a value. For all others it means: as the preset has it."""


class Algorithm(Settings):
    """What distinguishes one policy-gradient algorithm from another: a preset and, where given, changes to it. The defaults are grpo's."""

    renamed = {"scale_by_std": "normalize_std", "lam": "gae_lambda", "reward_at": "reward_placement", "kl_in": "kl_mode"}

    name: str = "grpo"
    """The preset: ppo, grpo, dapo or dr_grpo."""
    advantages: str = "group_relative"
    """How advantages are estimated: group_relative, gae or bilevel_gae; the last two need a critic."""
    aggregation: str = "sequence_mean_token_mean"
    """How token losses become one number: token_mean, sequence_mean_token_mean or sequence_mean_token_sum."""
    normalize_std: bool = True
    """group_relative: divide by the standard deviation within the group."""
    constant_length: bool = False
    """sequence_mean_token_sum: divide by `rollout.max_tokens`, the same for all."""
    whiten: bool = False
    """gae, bilevel_gae: advantages of the step get mean 0 and variance 1."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount from token to token."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda of GAE."""
    turn_gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """bilevel_gae: discount from turn to turn; gamma and gae_lambda then hold within a turn."""
    bootstrap_truncated: bool = False
    """gae, bilevel_gae: after an episode cut by the turn limit or a full context, count what the critic expects there; false: 0, the paper's way.
    For limits that the agent cannot see: an environment that shows the turns left has its limit as a part of the task."""
    reward_placement: Literal["turn", "trajectory"] = "turn"
    """gae, bilevel_gae: rewards stand at the end of the turn that earned them, or all at the last token."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip bound of the ratio: 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Upper clip bound of the ratio: 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the ratio of tokens with a negative advantage (arXiv 1912.09729, equation 5); null: none."""
    importance_cap: Annotated[float, Field(gt=0)] | None = None
    """Truncated importance sampling: weigh every token by min(old / behavior, this cap); null turns it off. Where it is not given it is null with
    the native engine, which needs none, and 2.0 with servers."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the entropy bonus."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the reference; 0 needs no reference."""
    kl_mode: Literal["loss", "reward"] = "loss"
    """Whether the divergence is added to the loss or subtracted from the reward."""
    divergence: str = "k3"
    """How the divergence is estimated: k1, k2 or k3."""
    reference: str | None = None
    """Model that the divergence is taken from; null: the model the run starts with."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        named = {key: cls.renamed.get(key, key) for key in data}
        given = {key: value for key, value in data.items() if value is not None or named[key] in NULL_MEANS_OFF}
        name = given.get("name", "grpo")
        preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
        return {**{key: value for key, value in preset.items() if key not in {named[key] for key in given}}, **given}

    @field_validator("name", "advantages", "aggregation", "divergence")
    @classmethod
    def _names(cls, name: str, info: Any) -> str:
        known = {"name": PRESETS, "advantages": ESTIMATORS, "aggregation": AGGREGATIONS, "divergence": DIVERGENCES}[info.field_name]
        if name not in known:
            what = "algorithm" if info.field_name == "name" else info.field_name
            raise ValueError(f"is not a known {what}: {did_you_mean(name, known)}")
        return name

    @property
    def has_critic(self) -> bool:
        return self.advantages in ("gae", "bilevel_gae")

    @property
    def has_reference(self) -> bool:
        return self.kl_coef > 0


def preset(name: str, **changes: Any) -> Algorithm:
    """The algorithm of a name, with some of its settings changed."""
    if name not in PRESETS:
        raise UnknownName(f"unknown algorithm '{name}': {did_you_mean(name, PRESETS)}")
    return Algorithm(name=name, **changes)


def own_changes(section: Mapping[str, Any]) -> dict[str, Any]:
    """What a section `algorithm` says beyond its preset: what is left of it where another algorithm is asked for."""
    plain = preset(name).model_dump() if (name := section.get("name", "grpo")) in PRESETS else {}
    return {key: value for key, value in section.items() if key != "name" and not (key in plain and plain[key] == value)}
