"""The four reasoning regimes: (H(Z|X), MI) relative to the run's own start (paper, figure 1).

Absolute values differ between models and tasks, so each axis is called low when it has fallen below half of its value at the
run's start. MI here is MI-Seq-Est, whose scale (at most log P) does not move with the length of the reasoning.
"""

from dataclasses import dataclass

from tether.core.enums import REGIME_FRACTION, Regime
from tether.diagnostics.information import Information


@dataclass(frozen=True, slots=True)
class Baseline:
    """The run's start on both axes."""

    h_conditional: float
    mi_seq: float

    @classmethod
    def of(cls, information: Information) -> "Baseline":
        return cls(information.h_conditional, information.mi_seq)


def classify(h_conditional: float, mi_seq: float, start: Baseline) -> Regime:
    """The regime of one measurement; a start at or below zero information counts as low from the beginning."""
    diverse = h_conditional >= REGIME_FRACTION * start.h_conditional
    informed = mi_seq > 0 and mi_seq >= REGIME_FRACTION * start.mi_seq
    if informed:
        return Regime.DIVERSE if diverse else Regime.COMPRESSED
    return Regime.TEMPLATE_COLLAPSE if diverse else Regime.LOW_ENTROPY_COLLAPSE
