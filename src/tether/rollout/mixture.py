"""The environments of a run, and which of them each group plays where a run mixes several by weight.

Systematic sampling: the environments lie side by side on a line, each as long as its share, and group g looks at (g + offset) / groups.
Every environment so gets its share of every step to within one group; with an offset drawn anew for each step it gets exactly its share
on average, and nothing has to be remembered from step to step.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tether.core.errors import BadInput


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """One environment of a run: where episodes are played."""

    name: str
    """A registered name, "module:Class", or the address of a served environment."""
    options: Mapping[str, Any] = field(default_factory=dict)
    step_timeout: float = 120.0
    """Seconds a reset or a step may take where environments run beside each other."""
    weight: float = 1.0
    """Its share of the groups, relative to the others' weights."""

    @property
    def label(self) -> str:
        """What records and metrics call it: the name, in letters, digits, dots and dashes."""
        return re.sub(r"[^\w.-]+", "_", self.name)


def spread_groups(weights: Sequence[float], num_groups: int, offset: float) -> list[int]:
    """The index of a stage for each group, in ascending order; `offset` lies in [0, 1)."""
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights) > 0:
        raise BadInput(f"the weights of the environments are {list(weights)}; give each 0 or more, and at least one more than 0")
    ends = np.cumsum(weights)
    places = (np.arange(num_groups) + offset) * ends[-1] / max(1, num_groups)
    last = max(index for index, weight in enumerate(weights) if weight > 0)
    return [min(int(index), last) for index in np.searchsorted(ends, places, side="right")]  # rounding may reach past the end
