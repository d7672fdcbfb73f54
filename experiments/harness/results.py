"""From the finished cells of an experiment to its results at one scale: levels with intervals, verdicts, what is missing.

Everything follows from the committed cells and the grid, so writing it again changes nothing. The results are one JSON file per scale.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.cells import Cell, CellFiles, CellRecord
from harness.claims import Claim, Correlation, Judgement, Outcomes, RunNumbers, Verdict
from harness.grid import Library
from harness.spending import bought
from tether.core.intervals import Estimate, contrast
from tether.runs.quantities import Quantity

DIGITS = 6


@dataclass(frozen=True, slots=True)
class Level:
    """One arm's quantity in one environment, over its seeds."""

    env: str
    arm: str
    quantity: Quantity
    values: dict[int, float]
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class Results:
    """An experiment at one scale."""

    name: str
    scale: str
    cells: list[Cell]
    """Planned, those of other experiments included."""
    records: dict[str, CellRecord]
    """Cell id to the finished cell."""
    failures: dict[str, str]
    outcomes: Outcomes
    levels: list[Level]
    judgements: list[tuple[Claim, Judgement]]
    correlations: list[tuple[str, Judgement]]

    @property
    def missing(self) -> list[str]:
        return [cell.id for cell in self.cells if cell.id not in self.records]

    def verdict(self) -> str:
        """All verdicts in few words, such as "2 hold, 1 cannot tell"."""
        counts = {word: sum(judged.verdict is word for _, judged in self.judgements) for word in Verdict}
        words = {Verdict.HOLDS: "hold", Verdict.DOES_NOT: "do not"}
        if len(self.judgements) == 1:
            return str(self.judgements[0][1].verdict)
        return ", ".join(f"{count} {words.get(word, word) if count > 1 else word}" for word, count in counts.items() if count)


def read_results(library: Library, name: str, scale: str, files: CellFiles, seeds: Sequence[int] | None = None) -> Results:
    """The results of an experiment, from the cells that are there."""
    grid, cells = library.grids[name], library.cells(name, scale, seeds)
    records = {cell.id: record for cell in cells if (record := files.read(cell)) is not None}
    failures = {cell.id: reason for cell in cells if cell.id not in records and (reason := files.failure(cell)) is not None}
    targets = grid.scales[scale].targets if scale in grid.scales else {}
    runs = [
        RunNumbers(cell.env, cell.arm, cell.seed, cell.steps, {**curves, **bought(curves, targets.get(cell.env))})
        for cell in cells
        if cell.id in records
        for curves in [records[cell.id].curves]
    ]
    outcomes = Outcomes(runs, environments=list(dict.fromkeys(cell.env for cell in cells)))
    correlations = []
    for text in grid.correlations:
        rule = Correlation(kind="correlation", x=text, y=grid.correlate_with)
        correlations.append((text, rule.judge(outcomes)))
    judgements = [(claim, claim.rule.judge(outcomes)) for claim in grid.claims]
    return Results(name, scale, cells, records, failures, outcomes, _levels(grid.table, cells, outcomes), judgements, correlations)


def _levels(table: Sequence[str], cells: Sequence[Cell], outcomes: Outcomes) -> list[Level]:
    places = dict.fromkeys((cell.env, cell.arm) for cell in cells)
    found = []
    for env, arm in places:
        for text in table:
            quantity = Quantity.parse(text)
            values = outcomes.values(env, arm, quantity)
            if values:
                found.append(Level(env, arm, quantity, values, quantity.level(list(values.values()))))
    return found


def to_json(results: Results) -> str:
    """The results as a file: levels, verdicts and what is missing."""
    data: dict[str, Any] = {
        "experiment": results.name,
        "scale": results.scale,
        "cells": {"planned": len(results.cells), "done": len(results.records)},
        "claims": [
            {
                "text": claim.text,
                "verdict": judged.verdict,
                "findings": [
                    {"label": finding.label, "verdict": finding.verdict, **_estimate(finding.estimate)} for finding in judged.findings
                ],
            }
            for claim, judged in results.judgements
        ],
        "levels": [
            {
                "env": found.env,
                "arm": found.arm,
                "quantity": str(found.quantity),
                "by_seed": {str(seed): _rounded(value) for seed, value in found.values.items()},
                **_estimate(found.estimate),
            }
            for found in results.levels
        ],
        "correlations": [{"quantity": text, **_estimate(judged.findings[0].estimate)} for text, judged in results.correlations],
        "missing": results.missing,
        "failed": results.failures,
    }
    return json.dumps(data, indent=1) + "\n"


def _estimate(estimate: Estimate | None) -> dict[str, Any]:
    if estimate is None:
        return {}
    interval = [_rounded(estimate.low), _rounded(estimate.high)] if estimate.has_interval and estimate.error != 0 else None
    return {"value": _rounded(estimate.value), "interval": interval, "n": estimate.num, "how": estimate.how}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


# --------------------------------------------------------------------------------------------------------------- agreement


@dataclass(frozen=True, slots=True)
class Agreement:
    """A published level beside the same level from other runs."""

    published: Level
    again: Level
    difference: Estimate

    @property
    def agrees(self) -> bool | None:
        """Whether the interval of the difference holds zero; None where there is no interval."""
        return self.difference.low <= 0 <= self.difference.high if self.difference.has_interval else None


def compare(published: Results, again: Results) -> list[Agreement]:
    """The levels that both have. The difference is unpaired: on a GPU the same seed does not give the same run."""
    theirs = {(found.env, found.arm, str(found.quantity)): found for found in again.levels}
    pairs = [(ours, theirs.get((ours.env, ours.arm, str(ours.quantity)))) for ours in published.levels]
    return [Agreement(ours, other, _unpaired(ours, other)) for ours, other in pairs if other is not None]


def _unpaired(before: Level, after: Level) -> Estimate:
    """The difference of two sets of runs, under seeds that they do not share."""
    return contrast([(1.0, after.values), (-1.0, {-1 - seed: value for seed, value in before.values.items()})], before.quantity.bounds)
