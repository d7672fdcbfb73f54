"""The four regimes: each axis is low once it has fallen below half of the run's start, and exactly half is not below."""

import math

import pytest

from tether import Regime, measure_information
from tether.diagnostics.regimes import Baseline, classify

START = Baseline(h_conditional=2.0, mi_seq=1.0)


@pytest.mark.parametrize(
    ("h_conditional", "mi_seq", "regime"),
    [
        (2.0, 1.0, Regime.DIVERSE),
        (5.0, 3.0, Regime.DIVERSE),
        (1.5, 0.1, Regime.TEMPLATE_COLLAPSE),
        (9.0, -0.5, Regime.TEMPLATE_COLLAPSE),
        (0.3, 0.9, Regime.COMPRESSED),
        (0.0, 0.6, Regime.COMPRESSED),
        (0.3, 0.1, Regime.LOW_ENTROPY_COLLAPSE),
        (0.0, 0.0, Regime.LOW_ENTROPY_COLLAPSE),
        # The boundary: exactly half is still high, on each axis.
        (1.0, 0.5, Regime.DIVERSE),
        (math.nextafter(1.0, 0), 0.5, Regime.COMPRESSED),
        (1.0, math.nextafter(0.5, 0), Regime.TEMPLATE_COLLAPSE),
        (math.nextafter(1.0, 0), math.nextafter(0.5, 0), Regime.LOW_ENTROPY_COLLAPSE),
    ],
)
def test_quadrants_and_boundary(h_conditional: float, mi_seq: float, regime: Regime) -> None:
    assert classify(h_conditional, mi_seq, START) is regime


@pytest.mark.parametrize("start", [0.0, -0.2])
def test_a_start_without_information_is_low_from_the_beginning(start: float) -> None:
    baseline = Baseline(2.0, start)
    assert classify(2.0, start, baseline) is Regime.TEMPLATE_COLLAPSE
    assert classify(0.5, start, baseline) is Regime.LOW_ENTROPY_COLLAPSE
    assert classify(2.0, start / 4, baseline) is Regime.TEMPLATE_COLLAPSE, "no information is low, whatever the start"
    assert classify(2.0, 0.4, baseline) is Regime.DIVERSE


def test_the_names_of_the_paper() -> None:
    assert [str(regime) for regime in Regime] == ["diverse reasoning", "template collapse", "compressed reasoning", "low-entropy collapse"]


def test_the_baseline_is_per_token_entropy_and_per_sequence_information() -> None:
    """p = [1/2 1/8; 1/8 1/2] over 2 tokens: H(Z|X) = log(2) / 2 and mi_seq = log(8/5)."""
    logs = [[math.log(1 / 2), math.log(1 / 8)], [math.log(1 / 8), math.log(1 / 2)]]
    baseline = Baseline.of(measure_information(logs, [2, 2], [0, 1]))
    assert baseline.h_conditional == pytest.approx(math.log(2) / 2, abs=1e-15)
    assert baseline.mi_seq == pytest.approx(math.log(8 / 5), abs=1e-15)
