"""Claims as data, and the rules that turn numbers into a verdict: holds, does not, cannot tell, not run.

A claim's rule is written in grid.yaml before any run. Every rule ends in an estimate with a 95% interval and one decision (`decide`):

    holds        the interval lies above zero
    does not     it lies below zero, or wholly inside the equivalence margin around zero
    cannot tell  anything else; also fewer than two seeds of an arm (or four runs of a correlation)
    not run      an arm that the rule needs has no finished cell

experiments/README.md explains the kinds in words.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, field_validator

from harness.statistics import Floats, bootstrapped, rank_correlations, with_seeds
from tether.core.config import Settings
from tether.core.intervals import Estimate, contrast, level, mean_of, spearman, sum_bounds
from tether.runs.quantities import Curves, Quantity

CORRELATION = (-1.0, 1.0)
"""The range of a correlation."""


class Verdict(StrEnum):
    """The four words."""

    HOLDS = "holds"
    DOES_NOT = "does not"
    CANNOT_TELL = "cannot tell"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class RunNumbers:
    """What claims read of a finished cell."""

    env: str
    arm: str
    seed: int
    planned: int
    """Steps that the run was planned for."""
    curves: Curves


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The finished cells of an experiment at one scale. Example: Outcomes([RunNumbers("sokoban", "top_p", 0, 150, {...})])."""

    runs: Sequence[RunNumbers]
    planned_seeds: int | None = None
    """Judge as if there were so many seeds, with the effects and the spread of those that there are, and power 0.8; None: as they are."""
    environments: Sequence[str] = ()
    """All that the experiment has at the scale, with finished cells or without."""

    @property
    def num_seeds(self) -> int:
        """Of an arm in an environment, in the mean: some arms are run under more seeds than others.

        >>> Outcomes([RunNumbers("lake", arm, seed, 10, {}) for arm, seeds in {"a": 9, "b": 3}.items() for seed in range(seeds)]).num_seeds
        6
        """
        return round(len(self.runs) / len({(run.env, run.arm) for run in self.runs}))

    def decided_on(self, estimate: Estimate) -> Estimate:
        """The estimate that a decision is made on."""
        return estimate if self.planned_seeds is None else with_seeds(estimate, self.planned_seeds, self.num_seeds)

    def values(self, env: str, arm: str, quantity: Quantity) -> dict[int, float]:
        """The quantity by seed, of the cells that have it."""
        found = {run.seed: quantity.of(run.curves, run.planned) for run in self.runs if (run.env, run.arm) == (env, arm)}
        return {seed: value for seed, value in sorted(found.items()) if value is not None}


@dataclass(frozen=True, slots=True)
class Finding:
    """One estimate behind a verdict. Example: Finding("sokoban: top_p - none", Estimate(...), Verdict.HOLDS, quantity)."""

    label: str
    verdict: Verdict
    estimate: Estimate | None = None
    quantity: Quantity | None = None
    """Of which the estimate is a value; None for correlations."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a claim, with what it was decided on."""

    verdict: Verdict
    findings: list[Finding] = field(default_factory=list)


def decide(estimate: Estimate, margin: float) -> Verdict:
    """The one decision of all rules: where the interval lies."""
    if not estimate.has_interval:
        return Verdict.CANNOT_TELL
    if estimate.low > 0:
        return Verdict.HOLDS
    if estimate.high < 0 or (estimate.low > -margin and estimate.high < margin):
        return Verdict.DOES_NOT
    return Verdict.CANNOT_TELL


def decide_near_zero(estimate: Estimate, margin: float) -> Verdict:
    """For claims that nothing is there: holds where the interval lies inside the margin, does not where it lies wholly outside."""
    if not estimate.has_interval:
        return Verdict.CANNOT_TELL
    if estimate.low > -margin and estimate.high < margin:
        return Verdict.HOLDS
    return Verdict.DOES_NOT if estimate.low > margin or estimate.high < -margin else Verdict.CANNOT_TELL


def all_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Holds where all hold; does not where any does not. A part that was not run leaves only that one answer possible."""
    if Verdict.DOES_NOT in verdicts:
        return Verdict.DOES_NOT
    if Verdict.NOT_RUN in verdicts:
        return Verdict.NOT_RUN
    return Verdict.HOLDS if set(verdicts) == {Verdict.HOLDS} else Verdict.CANNOT_TELL


def most_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Holds where more than half hold; does not where half or more do not; not run where a missing part could still change that."""
    count = {word: sum(verdict is word for verdict in verdicts) for word in Verdict}
    if 2 * count[Verdict.HOLDS] > len(verdicts):
        return Verdict.HOLDS
    if 2 * count[Verdict.DOES_NOT] >= len(verdicts):
        return Verdict.DOES_NOT
    return Verdict.NOT_RUN if count[Verdict.NOT_RUN] else Verdict.CANNOT_TELL


# ------------------------------------------------------------------------------------------------------------------- rules

Margin = Annotated[float, Field(ge=0)]


class _Rule(Settings):
    def arms(self) -> set[str]:
        """The arms that the rule names."""
        return set()

    def environments_named(self) -> set[str]:
        return set()

    def judge(self, outcomes: Outcomes) -> Judgement:
        raise NotImplementedError


class Above(_Rule):
    """A weighted sum of arms lies above zero: one arm against another, a difference of differences, or a change within an arm."""

    kind: Literal["above"]
    contrast: dict[str, float]
    """Arm to weight, such as {top_p: 1, none: -1}."""
    quantity: str
    environments: list[str] = []
    """None named: all that the experiment has at the scale."""
    over: Literal["each", "most", "mean"] = "each"
    """All environments must hold, most of them, or the mean over them."""
    margin: Margin
    slack: float = 0.0
    """Added to the estimate: "not below by more than this"; a negative one: "above by at least this"."""

    @field_validator("quantity")
    @classmethod
    def _known(cls, text: str) -> str:
        return str(Quantity.parse(text))

    def arms(self) -> set[str]:
        return set(self.contrast)

    def environments_named(self) -> set[str]:
        return set(self.environments)

    def judge(self, outcomes: Outcomes) -> Judgement:
        quantity = Quantity.parse(self.quantity)
        label = " ".join(f"{'+' if weight > 0 else '-'} {_weight(weight)}{arm}" for arm, weight in self.contrast.items()).removeprefix("+ ")
        environments = self.environments or list(outcomes.environments)
        if not environments:
            return Judgement(Verdict.NOT_RUN, [Finding(label, Verdict.NOT_RUN)])
        estimates = {env: self._estimate(env, outcomes, quantity) for env in environments}
        if self.over == "mean":
            complete = [estimate for estimate in estimates.values() if estimate is not None]
            mean = mean_of(complete) if len(complete) == len(estimates) else None
            if mean is not None and quantity.bounds is not None:
                mean = mean.within(sum_bounds(list(self.contrast.values()), quantity.bounds))
            estimates = {f"mean of {', '.join(environments)}": mean}
        findings = [self._finding(f"{env}: {label}", estimate, quantity, outcomes) for env, estimate in estimates.items()]
        combine = most_of if self.over == "most" else all_of
        return Judgement(combine([finding.verdict for finding in findings]), findings)

    def _estimate(self, env: str, outcomes: Outcomes, quantity: Quantity) -> Estimate | None:
        """The contrast in one environment; None where an arm has no cell."""
        arms = [(weight, outcomes.values(env, arm, quantity)) for arm, weight in self.contrast.items()]
        return contrast(arms, quantity.bounds) if all(values for _, values in arms) else None

    def _finding(self, label: str, estimate: Estimate | None, quantity: Quantity, outcomes: Outcomes) -> Finding:
        if estimate is None:
            return Finding(label, Verdict.NOT_RUN)
        return Finding(label, decide(_shifted(outcomes.decided_on(estimate), self.slack), self.margin), estimate, quantity)


class Ordered(_Rule):
    """A quantity falls from the first arm to the last."""

    kind: Literal["ordered"]
    falls: list[str]
    """Arms, the largest value first."""
    quantity: str
    environments: list[str]
    margin: Margin

    @field_validator("quantity")
    @classmethod
    def _known(cls, text: str) -> str:
        return str(Quantity.parse(text))

    def arms(self) -> set[str]:
        return set(self.falls)

    def environments_named(self) -> set[str]:
        return set(self.environments)

    def judge(self, outcomes: Outcomes) -> Judgement:
        findings = [finding for env in self.environments for finding in self._findings(env, outcomes)]
        return Judgement(all_of([finding.verdict for finding in findings]), findings)

    def _findings(self, env: str, outcomes: Outcomes) -> list[Finding]:
        """The rank correlation with the claimed order, and the difference of the ends."""
        quantity = Quantity.parse(self.quantity)
        values = [outcomes.values(env, arm, quantity) for arm in self.falls]
        order, ends = f"{env}: rank correlation with the order {' > '.join(self.falls)}", f"{env}: {self.falls[0]} - {self.falls[-1]}"
        if not all(values):
            return [Finding(order, Verdict.NOT_RUN), Finding(ends, Verdict.NOT_RUN)]
        shared = sorted(set.intersection(*map(set, values)))
        difference = contrast([(1.0, values[0]), (-1.0, values[-1])], quantity.bounds)
        found = [Finding(ends, decide(outcomes.decided_on(difference), self.margin), difference, quantity)]
        if not shared:
            return [Finding(order, Verdict.CANNOT_TELL), *found]
        claimed = list(range(len(values), 0, -1))
        agreement = level([spearman(claimed, [arm[seed] for arm in values]) for seed in shared]).within(CORRELATION)
        return [Finding(order, decide(outcomes.decided_on(agreement), 0.0), agreement), *found]


class Correlation(_Rule):
    """Two quantities are correlated over runs, within environments, with the claimed sign; or more so than a third one."""

    kind: Literal["correlation"]
    x: str
    y: str
    sign: Literal[1, 0, -1] = 1
    """Of the claimed correlation; 0: it is near zero, inside the margin."""
    than: str | None = None
    """Another quantity: the correlation of x with y is larger than that of this one with y."""
    margin: Margin = 0.1

    @field_validator("x", "y", "than")
    @classmethod
    def _known(cls, text: str | None) -> str | None:
        return text if text is None else str(Quantity.parse(text))

    def judge(self, outcomes: Outcomes) -> Judgement:
        named = [Quantity.parse(text) for text in (self.x, self.y, self.than) if text is not None]
        rows = [(run.env, [quantity.of(run.curves, run.planned) for quantity in named]) for run in outcomes.runs]
        complete = [(env, [value for value in values if value is not None]) for env, values in rows if None not in values]
        label = f"rank correlation of {self.x} with {self.y}" + (f", less that of {self.than}" if self.than else "")
        if not complete:
            return Judgement(Verdict.NOT_RUN, [Finding(label, Verdict.NOT_RUN)])
        environments = [env for env, _ in complete]
        x, y, *other = zip(*(values for _, values in complete), strict=True)

        def statistic(counts: Floats) -> Floats:
            first = rank_correlations(x, y, environments, counts)
            return first - rank_correlations(other[0], y, environments, counts) if other else first

        estimate = bootstrapped(statistic, environments)
        verdict = _signed(outcomes.decided_on(estimate), self.sign, self.margin)
        return Judgement(verdict, [Finding(label, verdict, estimate)])


class Buckets(_Rule):
    """Over the buckets of the gradient decomposition, lowest reward variance first, a metric rises, falls or is flat."""

    kind: Literal["buckets"]
    arm: str
    metric: str
    """Without the number of the bucket, such as gradients/task_norm."""
    buckets: Annotated[int, Field(ge=2)]
    environments: list[str]
    sign: Literal[1, 0, -1] = 1
    """1: rises, -1: falls, by Spearman's correlation with the bucket; 0: flat, by (highest - lowest bucket) / mean of the buckets."""
    margin: Margin = 0.1

    @field_validator("metric")
    @classmethod
    def _known(cls, name: str) -> str:
        return Quantity.parse(f"mean {name}_1").metric.removesuffix("_1")

    def arms(self) -> set[str]:
        return {self.arm}

    def environments_named(self) -> set[str]:
        return set(self.environments)

    def judge(self, outcomes: Outcomes) -> Judgement:
        findings = [self._finding(env, outcomes) for env in self.environments]
        return Judgement(all_of([finding.verdict for finding in findings]), findings)

    def _finding(self, env: str, outcomes: Outcomes) -> Finding:
        numbers = list(range(1, self.buckets + 1))
        values = [outcomes.values(env, self.arm, Quantity("mean", f"{self.metric}_{number}")) for number in numbers]
        label = f"{env}: {self.metric} of {self.arm}, " + ("rank correlation with the bucket" if self.sign else "(highest - lowest) / mean")
        seeds = sorted(set.intersection(*map(set, values)))
        if not seeds:
            return Finding(label, Verdict.NOT_RUN)
        rows = [[bucket[seed] for bucket in values] for seed in seeds]
        estimate = (
            level([spearman(numbers, row) for row in rows]).within(CORRELATION) if self.sign else level([_spread(row) for row in rows])
        )
        return Finding(label, _signed(outcomes.decided_on(estimate), self.sign, self.margin), estimate)


class Predicts(_Rule):
    """Over settings, a quantity of the baseline arm predicts the gain of the other arm (a positive rank correlation). More seeds make no further
    settings, so a plan has no number of seeds for it."""

    kind: Literal["predicts"]
    pairs: list[tuple[str, str]]
    """(baseline, other) arms."""
    x: str
    gain: str
    margin: Margin = 0.1

    @field_validator("x", "gain")
    @classmethod
    def _known(cls, text: str) -> str:
        return str(Quantity.parse(text))

    def arms(self) -> set[str]:
        return {arm for pair in self.pairs for arm in pair}

    def settings(self, outcomes: Outcomes) -> list[tuple[str, float, Estimate]]:
        """Every setting that was run: its name, the baseline's quantity (mean over seeds) and the gain."""
        x, gain = Quantity.parse(self.x), Quantity.parse(self.gain)
        found = []
        for env in dict.fromkeys(run.env for run in outcomes.runs):
            for base, other in self.pairs:
                start, before, after = outcomes.values(env, base, x), outcomes.values(env, base, gain), outcomes.values(env, other, gain)
                if start and before and after:
                    name = f"{env}, {base} to {other}"
                    found.append((name, math.fsum(start.values()) / len(start), contrast([(1.0, after), (-1.0, before)], gain.bounds)))
        return found

    def judge(self, outcomes: Outcomes) -> Judgement:
        label = f"rank correlation of {self.x} with the gain in {self.gain}, over settings"
        settings = self.settings(outcomes)
        if len(settings) < 2:
            return Judgement(Verdict.NOT_RUN, [Finding(label, Verdict.NOT_RUN)])

        x, gains = [x for _, x, _ in settings], [gain.value for _, _, gain in settings]
        strata = [0] * len(settings)
        estimate = bootstrapped(lambda counts: rank_correlations(x, gains, strata, counts), strata)
        return Judgement(decide(estimate, self.margin), [Finding(label, decide(estimate, self.margin), estimate)])


class Combined(_Rule):
    """Several rules in one claim."""

    kind: Literal["all_of", "most_of"]
    of: list["Rule"]

    def arms(self) -> set[str]:
        return set().union(*(rule.arms() for rule in self.of))

    def environments_named(self) -> set[str]:
        return set().union(*(rule.environments_named() for rule in self.of))

    def judge(self, outcomes: Outcomes) -> Judgement:
        parts = [rule.judge(outcomes) for rule in self.of]
        combine = all_of if self.kind == "all_of" else most_of
        return Judgement(combine([part.verdict for part in parts]), [finding for part in parts for finding in part.findings])


Rule = Annotated[Above | Ordered | Correlation | Buckets | Predicts | Combined, Field(discriminator="kind")]


class Claim(Settings):
    """A sentence of the paper, or a question it leaves open, with the rule that decides it."""

    text: str
    paper: str | None = None
    """The paper's own sentence or numbers; None for questions it leaves open."""
    rule: Rule


def _weight(weight: float) -> str:
    return "" if abs(weight) == 1 else f"{abs(weight):g} x "


def _signed(estimate: Estimate, sign: int, margin: float) -> Verdict:
    """The decision on an estimate that is claimed to be positive (1), negative (-1) or near zero (0)."""
    if sign == 0:
        return decide_near_zero(estimate, margin)
    return decide(estimate if sign > 0 else Estimate(-estimate.value, -estimate.high, -estimate.low, estimate.num, estimate.how), margin)


def _shifted(estimate: Estimate, by: float) -> Estimate:
    return Estimate(estimate.value + by, estimate.low + by, estimate.high + by, estimate.num, estimate.how)


def _spread(values: Sequence[float]) -> float:
    """(last - first) / mean; 0 where all are zero."""
    mean = math.fsum(values) / len(values)
    return (values[-1] - values[0]) / mean if mean else 0.0
