"""Soft filtering: a group with little reward variance is weighed down instead of dropped."""

from collections.abc import Hashable, Mapping

from tether.algorithms.filters.scores import ZERO


def variance_weights(variances: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """RV / max RV for each group: the factor on its advantages.

    Where no group varies every weight is zero, as a filter keeps nothing there; zero means at most 1e-12.
    """
    largest = max(variances.values(), default=0.0)
    return {group: variance / largest if variance > ZERO else 0.0 for group, variance in variances.items()}
