"""A sweep: every combination of some settings, each under the same seeds, as cells of one folder, and the table of their results.

    OUT/ID/            the run folder of a run, which `tether report` and `tether eval` read; its log and settings beside it
    OUT/cells/sweep/   one small file per finished run: what makes a repeated call resume
    OUT/sweep.json     the table

The id of a run is its combination and a hash of its settings: the same command resumes, and a folder may hold several sweeps.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from tether.core.config import merge, parse_overrides
from tether.core.errors import BadInput, ConfigError
from tether.experiments.cells import Cell, CellFiles
from tether.experiments.claims import Outcomes, RunNumbers
from tether.experiments.page import estimate_words
from tether.experiments.quantities import Quantity, shown
from tether.experiments.statistics import Estimate, contrast, level

SCALE = "sweep"
RESULT = "sweep.json"
MOST_RUNS = 1000
"""More than this is surely a slip of the keys."""
_OPENING, _CLOSING = "[{(", "]})"
_LONGEST_NAME = 80


@dataclass(frozen=True, slots=True)
class Variant:
    """One combination. Example: Variant({"learner.learning_rate": "1e-6"}, {"learner": {"learning_rate": 1e-06}})."""

    values: dict[str, str]
    """The settings that the sweep varies, as they were written."""
    settings: dict[str, Any]
    """Everything that was set."""

    @property
    def name(self) -> str:
        """For ids and file names."""
        words = "-".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.values.items())
        return re.sub(r"[^\w.=+-]+", "_", words)[:_LONGEST_NAME] or "base"


def split_values(text: str) -> list[str]:
    """The values of `a,b,c`; commas inside brackets or quotes do not separate.

    >>> split_values("1e-6,3e-6"), split_values("[1, 2],[3]"), split_values('"a,b"')
    (['1e-6', '3e-6'], ['[1, 2]', '[3]'], ['"a,b"'])
    """
    values, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        depth += (not quote) * ((sign in _OPENING) - (sign in _CLOSING))
        if sign == "," and not quote and depth <= 0:
            values.append("")
        else:
            values[-1] += sign
    return [value.strip() for value in values]


def variants(pairs: Iterable[str]) -> list[Variant]:
    """The cross product of `key=value,value` pairs, the last key varying fastest."""
    choices: list[list[tuple[str, str, bool]]] = []
    for pair in pairs:
        key, equals, raw = pair.partition("=")
        values = split_values(raw)
        if not equals or not key.strip() or (len(values) > 1 and "" in values):
            raise ConfigError(f"--set got '{pair}'; write it as key=value or key=value,value, for example learner.learning_rate=1e-6,3e-6")
        if len(set(values)) < len(values):
            raise ConfigError(f"--set {key.strip()} has a value twice ({raw}); give each once")
        choices.append([(key.strip(), value, len(values) > 1) for value in values])
    keys = [options[0][0] for options in choices]
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise ConfigError(f"--set {twice[0]} was given twice; give its values with commas between")
    return [
        Variant(
            {key: value for key, value, varies in combination if varies},
            parse_overrides(f"{key}={value}" for key, value, _ in combination),
        )
        for combination in itertools.product(*choices)
    ]


def sweep_cells(base: Mapping[str, Any], chosen: Sequence[Variant], seeds: Sequence[int]) -> list[Cell]:
    """The runs of a sweep, seed by seed, so that whole comparisons finish early. Every setting is checked on the way."""
    if len(chosen) * len(seeds) > MOST_RUNS:
        raise BadInput(f"the sweep has {len(chosen)} x {len(seeds)} runs; {MOST_RUNS} are the most")
    cells = []
    for seed in seeds:
        for variant in chosen:
            settings: dict[str, Any] = reduce(merge, [variant.settings, {"seed": seed}], dict(base))
            name = str((settings.get("env") or {}).get("name", ""))
            cells.append(Cell.of(SCALE, re.sub(r"\W+", "_", name) or "run", variant.name, seed, settings))
    ids = [cell.id for cell in cells]
    if twice := next((cell.id for cell in cells if ids.count(cell.id) > 1), None):
        raise BadInput(f"two combinations are the same run ({twice}); give values that differ")
    return cells


@dataclass(frozen=True, slots=True)
class Row:
    """One variant in the table."""

    values: dict[str, str]
    done: int
    planned: int
    levels: dict[str, Estimate]
    """By quantity, over the seeds that are done."""
    by_seed: dict[str, dict[int, float]]
    difference: Estimate | None
    """Of the first quantity to that of the first row, within seeds where both have two of them."""


def table_rows(cells: Sequence[Cell], chosen: Sequence[Variant], files: CellFiles, quantities: Sequence[Quantity]) -> list[Row]:
    """The table from the runs that are finished."""
    records = {cell.id: record for cell in cells if (record := files.read(cell)) is not None}
    outcomes = Outcomes(
        [RunNumbers(SCALE, cell.arm, cell.seed, cell.steps, records[cell.id].curves) for cell in cells if cell.id in records]
    )
    rows: list[Row] = []
    for variant in chosen:
        own = [cell for cell in cells if cell.arm == variant.name]
        values = {str(quantity): outcomes.values(SCALE, variant.name, quantity) for quantity in quantities}
        first, lead = str(quantities[0]), rows[0].by_seed if rows else None
        pair = [(1.0, values[first]), (-1.0, lead[first])] if lead is not None and lead[first] and values[first] else None
        rows.append(
            Row(
                variant.values,
                sum(cell.id in records for cell in own),
                len(own),
                {str(quantity): _level(quantity, list(values[str(quantity)].values())) for quantity in quantities if values[str(quantity)]},
                values,
                contrast(pair) if pair else None,
            )
        )
    return rows


def _level(quantity: Quantity, values: Sequence[float]) -> Estimate:
    """The mean with its interval; that of a share ends where shares do."""
    found = level(values)
    if quantity.is_share and quantity.window != "change" and found.has_interval:
        return replace(found, low=max(0.0, found.low), high=min(1.0, found.high))
    return found


def words(estimate: Estimate, quantity: Quantity, *, signed: bool = False) -> str:
    """A cell of the table, such as "62.5 [51.0, 74.0], n = 3". Seeds that all agree have no interval: they share their prompts' noise."""
    if estimate.has_interval and estimate.error == 0:
        paired = " paired" if estimate.how == "paired" else ""
        return f"{shown(quantity, estimate.value, signed=signed)}, n = {estimate.num}{paired}, all equal"
    return estimate_words(estimate, quantity, signed=signed)


def to_json(rows: Sequence[Row], failed: Mapping[str, str]) -> str:
    """The table as a file."""

    def values(estimate: Estimate) -> dict[str, Any]:
        interval = [estimate.low, estimate.high] if estimate.has_interval and estimate.error else None
        return {"value": estimate.value, "interval": interval, "n": estimate.num, "how": estimate.how}

    data = {
        "rows": [
            {
                "settings": row.values,
                "done": row.done,
                "planned": row.planned,
                "quantities": {
                    name: {**values(found), "by_seed": {str(seed): value for seed, value in row.by_seed[name].items()}}
                    for name, found in row.levels.items()
                },
                "against_first_row": values(row.difference) if row.difference is not None else None,
            }
            for row in rows
        ],
        "failed": dict(failed),
    }
    return json.dumps(data, indent=1) + "\n"
