"""`GroupFilter`: the settings of the filter, and what it keeps of a step. Tether's trainer and the plug-ins of other trainers use the same.

Strategies and scores are those of `select_groups`, and `auto`. The option names of the paper's author in TRL, verl and SkyRL
(`reward_variance_filtering`, `top_p`, `top_k`, `include_zero`, `selection_eps`) map onto it: there `top_k` is `num_groups`, not a share.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from tether.algorithms.filters.scores import check_score
from tether.algorithms.filters.select import AUTO, LOSS_SCALES, ORDERS, STRATEGIES, Selection, auto_strategy, check_band, select_within
from tether.core.config import Settings, validate
from tether.core.errors import BadInput, did_you_mean

NEEDS = {"outcome_variance": "successes", "entropy": "entropies", "entropy_variance": "entropies", "length": "lengths"}
"""The column that a score needs beside the rewards."""
SELECTING = {"score", "order", "include_zero", "eps", "band"}
"""The settings that `select_groups` takes as they are."""


class GroupFilter(Settings):
    """Which groups take part in the loss."""

    strategy: str = "top_p"
    """Which part of the ranked groups is kept: top_p, top_k, min_p, band, all, or auto (top_p where filtering helps, else all)."""
    keep: Annotated[float, Field(gt=0, le=1)] = 0.9
    """The share to keep; what it is a share of depends on the strategy."""
    score: str = "reward_variance"
    """What groups are ranked by: reward_variance, reward_std, outcome_variance, reward_sum, entropy, entropy_variance, length, or a function of
    yours as module:function."""
    order: str = "largest"
    """Which end of the ranking is kept: largest or smallest."""
    include_zero: bool = True
    """False drops zero-variance groups before anything else."""
    eps: Annotated[float, Field(ge=0)] = 0.01
    """Slack of top_p, in units of the summed score."""
    band: tuple[float, float] | None = None
    """Strategy band: the interval of quantiles, [low, high]."""
    num_groups: Annotated[int, Field(ge=1)] | None = None
    """Strategy top_k: how many groups to keep, in place of a share."""
    loss_scale: str = "kept_ratio"
    """Factor on the loss after filtering: kept_ratio, sqrt or none."""
    auto_ratio: Annotated[float, Field(gt=0)] = 0.75
    """Strategy `auto` filters where Std(RV) / Mean(RV) is at least this, on average over the recent steps."""
    auto_steps: Annotated[int, Field(ge=1)] = 5
    """How many recent steps, the present one included."""
    members: Annotated[int, Field(ge=1)] | None = None
    """Train only on so many best and as many worst trajectories of each prompt (the paper's trajectory-level baseline)."""
    reweight: bool = False
    """Weigh the advantages of a prompt by its reward variance, relative to the largest of the batch."""
    refill: Annotated[int, Field(ge=0)] = 0
    """At most so many further rounds of sampling until the batch holds `rollout.num_groups` kept prompts."""

    def __init__(self, *given: Any, **options: Any) -> None:
        """The settings by name, or in the order above: `GroupFilter("top_k", num_groups=1)`."""
        super().__init__(**dict(zip(type(self).model_fields, given, strict=False)), **options)

    @field_validator("strategy", "score", "order", "loss_scale")
    @classmethod
    def _names(cls, name: str, info: Any) -> str:
        if info.field_name == "score":
            return check_score(name)
        known: dict[str, Any] = {"strategy": [*STRATEGIES, AUTO], "order": ORDERS, "loss_scale": LOSS_SCALES}
        if name not in known[info.field_name]:
            raise ValueError(f"is not a known filter {info.field_name}: {did_you_mean(name, known[info.field_name])}")
        return name

    @model_validator(mode="after")
    def _fits_the_strategy(self) -> "GroupFilter":
        if self.strategy == "band":
            check_band(self.band)
        if self.num_groups is not None and self.strategy != "top_k":
            raise ValueError(f"num_groups is {self.num_groups} with strategy {self.strategy}; give it with top_k, or a share (keep)")
        return self

    @classmethod
    def parse(cls, text: str) -> "GroupFilter":
        """From a text such as "top_p:0.9", "top_k:0.5" or "all"."""
        return validate(cls, filter_settings(text), "filter")

    @property
    def column(self) -> str | None:
        """The column beside the rewards that the score needs: successes, entropies or lengths."""
        return NEEDS.get(self.score)

    def select(
        self,
        rewards: Sequence[float],
        groups: Sequence[Hashable],
        columns: Mapping[str, Sequence[float]] | None = None,
        environments: Sequence[Hashable] | None = None,
        earlier_ratios: Sequence[float] = (),
    ) -> Selection:
        """What to keep of one step's trajectories; strategy `all` ranks nothing and keeps groups in the order in which they come.

        Args:
            rewards: of each trajectory.
            groups: the group of each.
            columns: successes, entropies or lengths of each, where the score needs them.
            environments: the environment of each: groups are ranked within theirs. None: all are of one.
            earlier_ratios: `rv_ratio` of the steps before, for strategy `auto`.
        """
        options = {**self.model_dump(include=SELECTING), **(columns or {}), "keep": self.keep}
        if self.num_groups is not None:
            options["keep"] = min(1.0, self.num_groups / max(1, len(set(groups))))
        environments = [None] * len(groups) if environments is None else environments
        strategy = self.strategy
        if strategy == AUTO:
            recent = earlier_ratios[max(0, len(earlier_ratios) - self.auto_steps + 1) :]
            unfiltered = select_within(rewards, groups, environments, strategy="all", **options)
            strategy = auto_strategy(unfiltered, recent, self.auto_ratio)
        selection = select_within(rewards, groups, environments, strategy=strategy, **options)
        if strategy == "all":  # of too many, the first that were sampled are the batch, as DAPO fills its buffer
            kept = set(selection.kept)
            selection = dataclasses.replace(selection, kept=[group for group in dict.fromkeys(groups) if group in kept])
        return selection


def filter_settings(text: str) -> dict[str, Any]:
    """`strategy` or `strategy:share`, as settings by name."""
    strategy, colon, keep = text.partition(":")
    if not colon:
        return {"strategy": strategy}
    try:
        return {"strategy": strategy, "keep": float(keep)}
    except ValueError:
        raise BadInput(
            f"filter '{text}' does not parse: '{keep}' is no number; write it as strategy:share, for example top_p:0.9"
        ) from None
