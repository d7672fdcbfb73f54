"""Soft reweighting: the share of the largest variance, and batches without any."""

from collections.abc import Hashable

import pytest

from tether.algorithms.filters.select import variance_weights


def test_a_share_of_the_largest() -> None:
    assert variance_weights({"a": 0.5, "b": 2.0, (3, 4): 0.0, -1: 1.0}) == {"a": 0.25, "b": 1.0, (3, 4): 0.0, -1: 0.5}


def test_order_is_kept() -> None:
    assert list(variance_weights({"z": 1.0, "a": 3.0, "m": 2.0})) == ["z", "a", "m"]


@pytest.mark.parametrize("variances", [{}, {0: 0.0, 1: 0.0}, {0: 1e-13, 1: 1e-12}])
def test_where_nothing_varies_nothing_weighs(variances: dict[Hashable, float]) -> None:
    assert variance_weights(variances) == dict.fromkeys(variances, 0.0)


def test_rounding_is_no_variance() -> None:
    assert variance_weights({0: 1e-12, 1: 4e-12}) == {0: 0.0, 1: 1.0}
