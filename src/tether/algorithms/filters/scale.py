"""How much a filtered batch counts: one factor on the whole loss, so that it means the same for every aggregation.

`kept_ratio` makes the update the filtered objective over all groups instead of the kept ones (paper, definition G.1), `none` is section
3.3's mean over the kept ones, `sqrt` lies between.
"""

import math
from collections.abc import Callable

from tether.core.errors import UnknownName, did_you_mean

LOSS_SCALES: dict[str, Callable[[float], float]] = {"kept_ratio": lambda ratio: ratio, "sqrt": math.sqrt, "none": lambda ratio: 1.0}


def loss_scale(name: str, ratio: float) -> float:
    """The factor on the loss where `ratio` of the groups were kept."""
    if name not in LOSS_SCALES:
        raise UnknownName(f"unknown loss scale '{name}': {did_you_mean(name, LOSS_SCALES)}")
    return LOSS_SCALES[name](ratio)
