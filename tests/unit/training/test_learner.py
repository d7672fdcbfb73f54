"""One update does what policy gradients promise, is the same however memory cuts it, and a gradient that is not finite changes nothing."""

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch

from tether.algorithms.batch import Batch
from tether.algorithms.presets import preset
from tether.models.head import SplitModel
from tether.models.logprobs import token_logprobs
from tether.training.learner import Learner
from tether.training.settings import LearnerSettings

NO_BONUS = dataclasses.replace(preset("grpo"), entropy_coef=0.0)


def _batch(model: Any, advantages: list[float]) -> Batch:
    """Rows of 6, 9, 12, ... tokens, of which the last half was sampled, by this very model."""
    lengths = [6 + 3 * row for row in range(len(advantages))]
    shape = (len(lengths), max(lengths))
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(10, 400, (length,), generator=torch.Generator().manual_seed(row))
        mask[row, length // 2 : length] = True
    logprobs = torch.zeros(shape)
    with torch.inference_mode():
        logprobs[mask] = token_logprobs(SplitModel(model), ids, mask, 0.8)[0]
    return Batch(ids, mask, logprobs.clone(), mask * torch.tensor(advantages)[:, None], torch.tensor(lengths))


def _learner(model: Any, algorithm: Any = NO_BONUS, **settings: Any) -> Learner:
    return Learner(SplitModel(model), algorithm, LearnerSettings(**{"learning_rate": 1e-4, **settings}), temperature=0.8, max_tokens=50)


def _row_means(model: Any, batch: Batch) -> list[float]:
    with torch.inference_mode():
        values, _ = token_logprobs(SplitModel(model), batch.ids_BT, batch.loss_mask_BT, 0.8)
    return [float(part.mean()) for part in values.split(batch.loss_mask_BT.sum(dim=1).tolist())]


def test_good_tokens_become_likelier_and_bad_ones_less(tiny_model: Any) -> None:
    batch = _batch(tiny_model, [1.0, -1.0])
    before = _row_means(tiny_model, batch)
    metrics = _learner(tiny_model).update(batch, torch.arange(2), loss_scale=1.0)
    after = _row_means(tiny_model, batch)
    assert after[0] > before[0] + 1e-3 and after[1] < before[1] - 1e-3
    assert (metrics["num_updates"], metrics["nonfinite"], metrics["tokens_trained"]) == (1, 0, 3 + 5)
    assert metrics["learning_rate"] == 1e-4


def test_the_numbers_of_a_first_update_by_hand(tiny_model: Any) -> None:
    """Ratios are 1, so the loss is minus the mean advantage; GRPO averages within rows first, Dr. GRPO divides by the budget."""
    batch = _batch(tiny_model, [1.0, -0.5])
    metrics = _learner(copy.deepcopy(tiny_model)).update(batch, torch.arange(2), loss_scale=0.5)
    assert metrics["loss"] == pytest.approx(-0.25 * 0.5, abs=1e-5)
    assert metrics["policy_loss"] == pytest.approx(-(3 * 1.0 - 5 * 0.5) / 8, abs=1e-5)
    assert (metrics["ratio_mean"], metrics["ratio_max"]) == pytest.approx((1.0, 1.0), abs=1e-4)
    assert (metrics["clip_low"], metrics["clip_high"]) == (0, 0)
    assert metrics["mismatch"] < 1e-5 and abs(metrics["kl_sampled"]) < 1e-6
    dr = dataclasses.replace(preset("dr_grpo"), entropy_coef=0.0)
    metrics = _learner(tiny_model, dr).update(batch, torch.arange(2), loss_scale=1.0)
    assert metrics["loss"] == pytest.approx(-(3 * 1.0 - 5 * 0.5) / 50 / 2, abs=1e-6)


def test_the_entropy_bonus_is_subtracted(tiny_model: Any) -> None:
    batch = _batch(tiny_model, [0.0, 0.0])
    algorithm = dataclasses.replace(preset("dr_grpo"), entropy_coef=0.5)
    metrics = _learner(tiny_model, algorithm).update(batch, torch.arange(2), loss_scale=1.0)
    assert metrics["loss"] == pytest.approx(-0.5 * metrics["entropy"] * 8 / 50 / 2, rel=1e-5)


def test_clipping_is_counted(tiny_model: Any) -> None:
    """The sampler was a third as sure of the first row's tokens and three times as sure of the second's: both are beyond the clips."""
    batch = _batch(tiny_model, [1.0, -1.0])
    shift = torch.tensor([[-math.log(3)], [math.log(3)]])
    batch = dataclasses.replace(batch, logprobs_BT=batch.logprobs_BT + shift * batch.loss_mask_BT)
    before = _row_means(tiny_model, batch)
    metrics = _learner(tiny_model).update(batch, torch.arange(2), loss_scale=1.0)
    assert (metrics["clip_high"], metrics["clip_low"]) == pytest.approx((3 / 8, 5 / 8))
    assert (metrics["ratio_max"], metrics["ratio_mean"]) == pytest.approx((3.0, (3 * 3 + 5 / 3) / 8), rel=1e-4)
    assert metrics["mismatch"] == pytest.approx(math.log(3), abs=1e-4)
    assert metrics["loss"] == pytest.approx((-1.28 + 0.8) / 2, abs=1e-5)
    assert _row_means(tiny_model, batch) == pytest.approx(before, abs=1e-6)  # beyond the clip there is no gradient


def test_micro_batches_do_not_change_the_update(tiny_model: Any) -> None:
    batch = _batch(tiny_model, [1.0, -1.0, 0.3, 2.0, -0.7])
    order = torch.tensor([3, 0, 4, 1, 2])
    runs = []
    for micro_tokens in (1, 20, 100_000):
        learner = _learner(copy.deepcopy(tiny_model), preset("grpo"), micro_tokens=micro_tokens, update_batch=5)
        metrics = learner.update(batch, order, loss_scale=0.7)
        # After one step Adam's first moment is a tenth of the (clipped) gradient.
        runs.append((metrics, [state["exp_avg"] for state in learner.optimizer.state.values()]))
    for metrics, moments in runs[1:]:
        assert metrics == pytest.approx(runs[0][0], rel=1e-5, abs=1e-6)
        for got, want in zip(moments, runs[0][1], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_minibatches_make_one_update_each_in_the_given_order(tiny_model: Any) -> None:
    batch = _batch(tiny_model, [1.0, -1.0, 0.5])
    whole = copy.deepcopy(tiny_model)
    metrics = _learner(whole, update_batch=2).update(batch, torch.tensor([2, 0, 1]), loss_scale=1.0)
    assert metrics["num_updates"] == 2
    by_hand = copy.deepcopy(tiny_model)
    learner = _learner(by_hand, update_batch=2)
    learner.update(batch.rows(torch.tensor([2, 0])), torch.arange(2), loss_scale=1.0)
    learner.update(batch.rows(torch.tensor([1])), torch.arange(1), loss_scale=1.0)
    for got, want in zip(whole.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-7)


def test_a_gradient_that_is_not_finite_is_left_out_and_counted(tiny_model: Any) -> None:
    batch = _batch(tiny_model, [1.0, math.inf])
    before = [parameter.detach().clone() for parameter in tiny_model.parameters()]
    metrics = _learner(tiny_model).update(batch, torch.arange(2), loss_scale=1.0)
    assert (metrics["num_updates"], metrics["nonfinite"]) == (0, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, tiny_model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in tiny_model.parameters())


def test_what_is_left_out_does_not_spoil_the_numbers(tiny_model: Any) -> None:
    """The record of a step refuses what is not finite, so one bad minibatch must not reach it."""
    batch = _batch(tiny_model, [1.0, math.inf])
    metrics = _learner(tiny_model, update_batch=1).update(batch, torch.arange(2), loss_scale=1.0)
    assert (metrics["num_updates"], metrics["nonfinite"]) == (1, 1)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert metrics["loss"] == pytest.approx(-1.0, abs=1e-5)
