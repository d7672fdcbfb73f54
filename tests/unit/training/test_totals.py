"""Sums over the tokens of an update: what minibatches merge to, by hand."""

import math

import pytest
import torch

from tether.training.totals import TokenTotals, update_metrics


def _part(ratios: list[float], mismatches: list[float], loss: float) -> TokenTotals:
    """A minibatch with these ratios to the old policy and to the sampler."""
    part = TokenTotals()
    part.add_ratios(torch.tensor(ratios))
    part.add_mismatch(torch.tensor(mismatches).log())
    part.add(entropy=torch.tensor([0.5] * len(ratios)))
    part.add_loss(torch.tensor(loss))
    part.count_micro(len(ratios), 10, 16, 3, 30)
    part.settle()
    part.norms = [{"policy": loss}]
    return part


def test_extremes_of_minibatches_merge() -> None:
    """The largest of the largest, the smallest of the smallest, whichever minibatch they come from."""
    first, second = _part([0.5, 1.25, 1.0], [1.0, 2.0, 0.5], 3.0), _part([0.75, 1.5], [0.25, 1.75], 4.0)
    assert (first.ratio_max, first.ratio_min, first.mismatch_ratio_max) == (1.25, 0.5, pytest.approx(2.0))
    assert first.mismatch_max == pytest.approx(math.log(2)) and second.mismatch_max == pytest.approx(math.log(4)), "of 0.25"
    assert (second.ratio_max, second.ratio_min, second.mismatch_ratio_max) == (1.5, 0.75, pytest.approx(1.75))
    for parts in ((first, second), (second, first)):
        totals = TokenTotals()
        for part in parts:
            totals.merge(part)
        assert (totals.ratio_max, totals.ratio_min, totals.mismatch_ratio_max) == (1.5, 0.5, pytest.approx(2.0))
        assert totals.mismatch_max == pytest.approx(math.log(4))
        assert sorted(totals.losses) == [3.0, 4.0] and totals.norms == [part.norms[0] for part in parts]
        assert (totals.count, totals.tokens, totals.positions, totals.saved) == (5, 20, 32, 6)
        assert totals.sums["ratio"] == 0.5 + 1.25 + 1.0 + 0.75 + 1.5 and totals.mean("ratio") == 1.0
        assert totals.mean("mismatch_ratio") == pytest.approx(5.5 / 5) and totals.mean("entropy") == 0.5


def test_micro_batches_of_a_minibatch() -> None:
    """Extremes are kept over several calls before anything is read."""
    part = TokenTotals()
    for ratios in ([1.0, 2.0], [0.25, 1.0], [1.5]):
        part.add_ratios(torch.tensor(ratios))
        part.add_mismatch((torch.tensor(ratios) / 2).log())
    part.settle()
    assert (part.ratio_max, part.ratio_min, part.mismatch_ratio_max) == (2.0, 0.25, 1.0)


def test_the_metrics_of_a_step() -> None:
    totals = TokenTotals()
    for part in (_part([0.5, 1.25, 1.0], [1.0, 2.0, 0.5], 3.0), _part([0.75, 1.5], [0.25, 1.75], 4.0)):
        totals.merge(part)
    metrics = update_metrics(totals, totals.mismatch, rate=1e-4, nonfinite_streak=0)
    assert (metrics["ratio_max"], metrics["ratio_min"], metrics["ratio_mean"], metrics["mismatch_ratio_max"]) == (
        1.5,
        0.5,
        1.0,
        pytest.approx(2.0),
    )
    squares = (0.25 + 1.5625 + 1.0 + 0.5625 + 2.25) / 5
    assert metrics["ratio_std"] == pytest.approx(math.sqrt(squares - 1))
    assert metrics["grad_norm"] == 3.5 and metrics["num_updates"] == 2 and metrics["tokens_trained"] == 5
    assert metrics["padding"] == 1 - 20 / 32


def test_a_step_without_updates_has_finite_extremes() -> None:
    metrics = update_metrics(TokenTotals(), TokenTotals().mismatch, rate=0.0, nonfinite_streak=1)
    assert metrics["ratio_max"] == metrics["ratio_min"] == metrics["mismatch_ratio_max"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
