"""The names that settings may use are those of the functions behind them, and are known without torch."""

import subprocess
import sys
from collections.abc import Iterable

import pytest

from tether.algorithms import aggregate, divergence, estimators, names, presets
from tether.training.settings import RunSettings


@pytest.mark.parametrize(
    ("listed", "known"),
    [
        (names.ALGORITHMS, presets.PRESETS),
        (names.ESTIMATORS, estimators.ESTIMATORS),
        (names.AGGREGATIONS, aggregate.AGGREGATIONS),
        (names.DIVERGENCES, divergence.DIVERGENCES),
    ],
)
def test_a_list_names_what_there_is(listed: tuple[str, ...], known: Iterable[str]) -> None:
    assert list(listed) == list(known)


def test_sections_are_of_known_algorithms_and_hold_known_settings() -> None:
    assert set(names.SECTIONS) <= set(names.ALGORITHMS)
    for sections in names.SECTIONS.values():
        for section, values in sections.items():
            known = RunSettings.model_fields[section].annotation
            assert known is not None and set(values) <= set(known.model_fields)


def test_no_torch() -> None:
    code = "import sys, tether.algorithms.presets, tether.training.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
