"""`GroupFilter`: the settings of the filter for a trainer that is not Tether's, and what it keeps of a step's rewards.

Strategies and scores are those of `tether.select_groups`, and `auto`. The option names of the paper's author in TRL, verl and SkyRL
(`reward_variance_filtering`, `top_p`, `top_k`, `include_zero`, `selection_eps`) map onto it: there `top_k` is a number of groups, not a share.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tether.algorithms.filters.scores import check_score
from tether.algorithms.filters.select import AUTO, LOSS_SCALES, ORDERS, STRATEGIES, Selection, auto_strategy, check_band, select_groups
from tether.core.errors import BadInput, did_you_mean

RECENT = 5
"""Steps whose rv_ratio strategy `auto` looks at, the present one included."""
NEEDS = {"outcome_variance": "successes", "entropy": "entropies", "entropy_variance": "entropies", "length": "lengths"}
"""The column that a score needs beside the rewards."""


@dataclass(slots=True)
class GroupFilter:
    """Which groups take part in the loss."""

    strategy: str = "top_p"
    """top_p, top_k, min_p, band, all or auto."""
    keep: float = 0.9
    """The share to keep, in (0, 1]."""
    score: str = "reward_variance"
    order: str = "largest"
    include_zero: bool = True
    """False drops groups of equal rewards before anything else."""
    eps: float = 0.01
    """Slack of top_p, in units of the summed score."""
    band: tuple[float, float] | None = None
    num_groups: int | None = None
    """With top_k: how many groups to keep, in place of a share."""
    loss_scale: str = "none"
    """A factor on the loss of a filtered batch: none (the mean over what is kept), kept_ratio (the paper's definition G.1), sqrt."""
    auto_ratio: float = 0.75
    """Strategy auto filters where Std(RV) / Mean(RV) is at least this, over the recent steps."""
    ratios: list[float] = field(default_factory=list, repr=False)
    """rv_ratio of the recent steps, for auto."""

    def __post_init__(self) -> None:
        known: dict[str, Any] = {"strategy": [*STRATEGIES, AUTO], "order": ORDERS, "loss_scale": LOSS_SCALES}
        for name, names in known.items():
            if getattr(self, name) not in names:
                raise BadInput(f"unknown {name} {getattr(self, name)!r} of the filter: {did_you_mean(str(getattr(self, name)), names)}")
        check_score(self.score)
        if not 0 < self.keep <= 1:
            raise BadInput(f"keep of the filter is {self.keep}; it must be in (0, 1]")
        if self.eps < 0:
            raise BadInput(f"eps of the filter is {self.eps}; it must be zero or a positive number")
        if self.strategy == "band":
            check_band(self.band)
        if self.num_groups is not None and (self.strategy != "top_k" or self.num_groups < 1):
            raise BadInput(f"num_groups of the filter is {self.num_groups} with strategy {self.strategy}; give 1 or more, with top_k")

    @classmethod
    def parse(cls, text: str) -> "GroupFilter":
        """From a text such as "top_p:0.9", "top_k:0.5" or "all"."""
        strategy, _, keep = text.partition(":")
        try:
            return cls(strategy, float(keep)) if keep else cls(strategy)
        except ValueError as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"filter {text!r} does not parse: {keep!r} is no number; write it as top_p:0.9") from error

    @property
    def column(self) -> str | None:
        """The column beside the rewards that the score needs: successes, entropies or lengths."""
        return NEEDS.get(self.score)

    def select(
        self, rewards: Sequence[float], groups: Sequence[Hashable], columns: Mapping[str, Sequence[float]] | None = None
    ) -> Selection:
        """What to keep of one step's rows; `columns` holds successes, entropies or lengths where the score needs them."""
        num_groups = len(set(groups))
        keep = self.keep if self.num_groups is None else min(1.0, self.num_groups / max(1, num_groups))
        options: dict[str, Any] = {
            "keep": keep,
            "score": self.score,
            "order": self.order,
            "include_zero": self.include_zero,
            "eps": self.eps,
            "band": self.band,
            **(columns or {}),
        }
        if self.strategy != AUTO:
            return select_groups(rewards, groups, strategy=self.strategy, **options)
        unfiltered = select_groups(rewards, groups, strategy="all", **options)
        strategy = auto_strategy(unfiltered, self.ratios[-(RECENT - 1) :], self.auto_ratio)
        self.ratios = [*self.ratios, unfiltered.rv_ratio][-RECENT:]
        return select_groups(rewards, groups, strategy=strategy, **options)
