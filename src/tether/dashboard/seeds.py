"""Seeds of the same settings, found and drawn as one curve: the mean over the seeds at every step, with Student's 95% interval of that mean.

The mean is of the seeds that have recorded the metric at that step, and is drawn where more than half of the seeds that ever recorded it have; so
a curve does not jump when one of five runs is further than the others. Pooled numbers take the form of step records, so the charts of a
report draw them like any run; the ends of the interval are metrics of their own, `<metric> low` and `<metric> high`.
"""

import dataclasses
import json
from collections.abc import Sequence

from tether.core.intervals import mean_interval
from tether.dashboard.catalogue import LiveRun
from tether.runs.compare import flattened
from tether.runs.panels import Panel, Style
from tether.runs.schema import StepRecord

NOT_SETTINGS = ("seed", "tags")
"""Runs that differ in these alone are repetitions of one another."""
READING = "The mean over seeds of the same settings, with Student's 95% interval of that mean; a run without other seeds has no band here."


def seed_groups(runs: Sequence[LiveRun]) -> list[list[LiveRun]]:
    """The runs in order, those that differ in nothing but the seed together."""
    groups: dict[str, list[LiveRun]] = {}
    for run in runs:
        kept = {name: value for name, value in flattened(run.config()).items() if name not in NOT_SETTINGS}
        groups.setdefault(json.dumps(kept, sort_keys=True, default=str), []).append(run)
    return list(groups.values())


def group_name(runs: Sequence[LiveRun]) -> str:
    """What a group of seeds is called: its run, or what their names begin with and how many there are.

    The names of seeds mostly differ in their ends: `sokoban-seed0` and `sokoban-seed1` are `sokoban-seed* (2 seeds)`.
    """
    if len(runs) == 1:
        return runs[0].name
    names = [run.name for run in runs]
    common = 0
    while all(len(name) > common and name[common] == names[0][common] for name in names):
        common += 1
    return f"{names[0][:common]}* ({len(runs)} seeds)"


def pooled(seeds: Sequence[Sequence[StepRecord]], *, share: frozenset[str] = frozenset()) -> list[StepRecord]:
    """The mean of several runs, step by step, as records; intervals of the metrics in `share` are cut at 0 and 1."""
    values: dict[int, dict[str, list[float]]] = {}
    recorded: dict[str, int] = {}
    for records in seeds:
        for metric in {metric for record in records for metric in record.metrics}:
            recorded[metric] = recorded.get(metric, 0) + 1
        for record in records:
            for metric, value in record.metrics.items():
                values.setdefault(record.step, {}).setdefault(metric, []).append(value)
    return [StepRecord(step, _summary(found, recorded, share)) for step, found in sorted(values.items())]


def _summary(found: dict[str, list[float]], recorded: dict[str, int], share: frozenset[str]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for metric, values in found.items():
        if 2 * len(values) <= recorded[metric]:
            continue
        metrics[metric] = sum(values) / len(values)
        ends = mean_interval(values)
        if ends is not None:
            low, high = (max(0.0, ends[0]), min(1.0, ends[1])) if metric in share else ends
            metrics[f"{metric} low"], metrics[f"{metric} high"] = low, high
    return metrics


def over_seeds(panel: Panel) -> Panel:
    """A panel whose bands are intervals over seeds, not over the prompts of one run."""
    series = tuple(
        each
        if each.style in (Style.REFERENCE, Style.SHARE)
        else dataclasses.replace(each, band=(f"{each.metric} low", f"{each.metric} high"))
        for each in panel.series
    )
    return dataclasses.replace(panel, series=series, reading=READING)


def shares(panels: Sequence[Panel]) -> frozenset[str]:
    """The metrics that lie between 0 and 1, by the axes of their panels."""
    return frozenset(series.metric for panel in panels if panel.percent for series in panel.series)
