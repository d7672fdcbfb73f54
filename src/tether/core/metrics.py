"""Every number a run logs, named and explained once.

metrics.toml is the single list of metric names: `StepMetrics` refuses a name that is not in it, and docs/metrics.md is written from it. Rates
carry a Wilson interval, because success over a few hundred episodes is not exact.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from tether.core.errors import UnknownName, did_you_mean

_SECTIONS = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))
CATALOGUE: dict[str, str] = {f"{section}/{name}": meaning for section, names in _SECTIONS.items() for name, meaning in names.items()}
"""The name of every metric, and what it means."""

_FAMILIES = [re.compile(re.sub(r"\{\w+\}", "[^/]+", name)) for name in CATALOGUE if "{" in name]


def is_catalogued(name: str) -> bool:
    """Whether a metric's name is in the catalogue, or belongs to a family of it such as validation/pass_at_{k}."""
    return name in CATALOGUE or any(family.fullmatch(name) for family in _FAMILIES)


class StepMetrics(dict[str, float]):
    """The numbers of one step; only catalogued names and finite values go in."""

    def put(self, section: str, values: Mapping[str, float]) -> None:
        """Add `values` under "section/"."""
        for name, value in values.items():
            key = f"{section}/{name}"
            if not is_catalogued(key):
                raise UnknownName(f"metric '{key}' is not in core/metrics.toml: {did_you_mean(key, CATALOGUE)}")
            if not math.isfinite(value):
                raise ValueError(f"metric '{key}' is {value}; a step must not log what it could not compute")
            self[key] = float(value)


def wilson_interval(successes: float, trials: float, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of a rate (95% by default); (0, 1) where nothing was tried."""
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    centre = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    margin = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return max(0.0, centre - margin), min(1.0, centre + margin)
