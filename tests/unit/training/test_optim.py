"""The optimiser steps as Adam's paper says, in float32 whatever the model computes in; the learning rate follows its schedule."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tether.training.optim import SCHEDULES, FP32MasterAdamW, learning_rate

BF16, F32 = torch.bfloat16, torch.float32


def _adam(*parameters: nn.Parameter, **settings: Any) -> FP32MasterAdamW:
    return FP32MasterAdamW(parameters, **{"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, **settings})


def _weights(*values: float, dtype: torch.dtype = F32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def _backward(parameter: nn.Parameter, *gradient: float) -> None:
    (parameter * torch.tensor(gradient, dtype=parameter.dtype)).sum().backward()


def _masters(optimizer: FP32MasterAdamW) -> list[list[float]]:
    return [master.tolist() for master in optimizer.state_dict()["masters"]]


# Gradients 0.5, then -0.25, betas 0.9 and 0.99, rate 0.1. Step 1: m / (1 - 0.9) = 0.5, sqrt(v / (1 - 0.99)) = 0.5: one whole rate down.
# Step 2: m = 0.9 * 0.05 - 0.025 = 0.02, over 0.19: 0.1052632; v = 0.99 * 0.0025 + 0.000625 = 0.0031, over 0.0199: 0.1557789, whose root
# is 0.3946883; 0.1 * 0.1052632 / 0.3946883 = 0.0266699 down. Decay 0.5 first takes 0.1 * 0.5 of the weight, each time.
@pytest.mark.parametrize(("decay", "after_one", "after_two"), [(0.0, 0.9, 0.8733301), (0.5, 0.85, 0.85 * 0.95 - 0.0266699)])
def test_two_steps_by_hand(decay: float, after_one: float, after_two: float) -> None:
    weights = _weights(1.0)
    optimizer = _adam(weights, weight_decay=decay)
    for gradient, expected in ((0.5, after_one), (-0.25, after_two)):
        _backward(weights, gradient)
        optimizer.step()
        optimizer.zero_grad()
        assert weights.item() == pytest.approx(expected, abs=2e-7)


def test_the_rate_is_that_of_the_next_step() -> None:
    weights = _weights(1.0)
    optimizer = _adam(weights)
    assert optimizer.rate == 0.1
    optimizer.set_rate(0.25)
    assert optimizer.rate == 0.25
    _backward(weights, 3.0)
    optimizer.step()
    assert weights.item() == pytest.approx(0.75, abs=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_clipping_by_hand(dtype: torch.dtype) -> None:
    """Gradients (3, 4) and 12 make a norm of 13."""
    one, two = _weights(0.0, 0.0, dtype=dtype), _weights(0.0, dtype=dtype)
    optimizer = _adam(one, two, beta1=0.0)
    for _ in range(2):
        _backward(one, 1.5, 2.0)
        _backward(two, 6.0)
    assert optimizer.clip(20.0) == 13.0
    assert optimizer.clip(6.5) == 13.0
    optimizer.step()
    moments = [state["exp_avg"].tolist() for state in optimizer.state_dict()["adam"]["state"].values()]
    assert moments == [pytest.approx([1.5, 2.0]), pytest.approx([6.0])]


def test_the_norm_of_huge_gradients_is_finite() -> None:
    """Their squares are beyond float32."""
    weights = _weights(0.0, 0.0)
    optimizer = _adam(weights)
    weights.grad = torch.tensor([3e30, 4e30])
    assert optimizer.clip(1.0) == pytest.approx(5e30)
    optimizer.step()
    (state,) = optimizer.state_dict()["adam"]["state"].values()
    assert state["exp_avg"].tolist() == pytest.approx([0.06, 0.08])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_changes_nothing(bad: float, dtype: torch.dtype) -> None:
    weights, other = _weights(1.0, 2.0, dtype=dtype), _weights(3.0, dtype=dtype)
    optimizer = _adam(weights, other)
    _backward(weights, bad, 8.0)
    _backward(other, 5.0)
    norm = optimizer.clip(1.0)
    assert not math.isfinite(norm)
    optimizer.step(norm.isfinite())
    optimizer.zero_grad()
    assert (weights.tolist(), other.tolist()) == ([1.0, 2.0], [3.0])
    assert weights.grad is None
    states = optimizer.state_dict()["adam"]["state"].values()
    assert [[state[name].abs().max().item() for name in ("step", "exp_avg", "exp_avg_sq")] for state in states] == [[0.0, 0.0, 0.0]] * 2
    _backward(weights, 8.0, 8.0)  # the next update is the first that counts: one whole rate down
    optimizer.step(optimizer.clip(100.0).isfinite())
    assert weights.tolist() == pytest.approx([0.9, 1.9], abs=0.01 if dtype == BF16 else 2e-7)
    assert optimizer.state_dict()["adam"]["state"][0]["exp_avg"].tolist() == pytest.approx([0.8, 0.8])  # a tenth of it, not scaled up


def test_the_norm_does_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from tether.training import optim

    monkeypatch.setattr(optim, "PIECE", 3)
    weights = _weights(*[0.0] * 7)
    optimizer = _adam(weights)
    _backward(weights, 1.0, 2.0, 2.0, 4.0, 0.0, 0.0, 12.0)
    assert optimizer.clip(1.0) == 13.0


def test_masters_track_float32_where_bfloat16_stands_still() -> None:
    """A thousand steps of 1e-6 on weights near 1, whose next bfloat16 below is 1 - 1/256."""
    values = (1.0, 1.5, -0.75)
    plain, exact, rounded = _weights(*values, dtype=BF16), _weights(*values), _weights(*values, dtype=BF16)
    settings = {"learning_rate": 1e-6, "beta2": 0.999}
    optimizers = [torch.optim.AdamW([plain], lr=1e-6, weight_decay=0.0), _adam(exact, **settings), _adam(rounded, **settings)]
    for _ in range(1000):
        for weights, optimizer in zip((plain, exact, rounded), optimizers, strict=True):
            _backward(weights, 0.5, -0.25, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert plain.tolist() == list(values)
    assert exact.tolist() == pytest.approx([0.999, 1.501, -0.751], abs=1e-4)  # float32 itself rounds each step by up to 6e-8
    assert _masters(optimizers[2]) == [exact.tolist()]
    assert rounded.tolist() == exact.to(BF16).tolist()


def test_the_parameter_is_the_master_rounded() -> None:
    """From 1 down by 0.0005 a step: after five the nearest bfloat16 is 1 - 1/256."""
    weights = _weights(1.0, dtype=BF16)
    optimizer = _adam(weights, learning_rate=5e-4)
    seen = []
    for _ in range(5):
        _backward(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(weights.item())
    assert seen == [1.0, 1.0, 1.0, 0.99609375, 0.99609375]  # 1 - 0.0015 is still nearer to 1, 1 - 0.002 no longer
    assert _masters(optimizer)[0] == pytest.approx([0.9975], abs=1e-6)


def test_gradients_add_up_in_float32_and_are_freed() -> None:
    """256 + 1 is 256 in bfloat16."""
    weights = _weights(0.0, dtype=BF16)
    optimizer = _adam(weights)
    for gradient in (256.0, 1.0, 1.0, 1.0):
        _backward(weights, gradient)
        assert weights.grad is None
    assert optimizer.clip(1e9) == 259.0


def test_it_casts_without_rounding_its_masters() -> None:
    weights, before = _weights(1 / 3), 1 / 3
    optimizer = _adam(weights, compute_dtype=BF16)
    module = nn.Module()
    module.weights = weights
    module.to(BF16)  # what a learner does for the rest of the model
    assert module.weights is weights and weights.dtype == BF16
    assert _masters(optimizer) == [[pytest.approx(before, rel=1e-7)]]
    _backward(weights, 1.0)
    assert weights.grad is None and optimizer.clip(9.0) == 1.0
    optimizer.step()
    assert _masters(optimizer) == [[pytest.approx(before - 0.1, rel=1e-6)]]
    assert weights.item() == torch.tensor(before - 0.1).to(BF16).item()


def test_it_casts_up_as_well() -> None:
    weights = _weights(1.0, dtype=BF16)
    optimizer = _adam(weights, learning_rate=1e-6, compute_dtype=F32)
    assert weights.dtype == F32 and _masters(optimizer) == []
    _backward(weights, 1.0)
    optimizer.step()
    assert weights.item() == pytest.approx(1 - 1e-6, abs=1e-7) and weights.item() < 1


def test_a_float32_parameter_is_its_own_master() -> None:
    weights, half = _weights(1.0), _weights(1.0, dtype=BF16)
    optimizer = _adam(weights, half)
    _backward(weights, 2.0)
    assert weights.grad is not None
    assert optimizer.clip(9.0) == 2.0
    assert len(_masters(optimizer)) == 1


def _save_in_full(optimizer: FP32MasterAdamW, weights: nn.Parameter) -> None:
    with optimizer.full_precision():
        assert weights.dtype == F32 and weights.item() == pytest.approx(1 / 3, rel=1e-7)
        raise OSError("the disk is full")


def test_full_precision_inside_the_block_only() -> None:
    weights = _weights(1 / 3)
    optimizer = _adam(weights, compute_dtype=BF16)
    with pytest.raises(OSError, match="full"):
        _save_in_full(optimizer, weights)
    assert weights.dtype == BF16 and weights.item() == pytest.approx(1 / 3, rel=1e-2)
    _backward(weights, 1.0)
    optimizer.step()
    assert _masters(optimizer)[0] == pytest.approx([1 / 3 - 0.1])


def test_a_saved_model_holds_the_masters(tmp_path: Path, tiny_model: Any) -> None:
    """Tied weights included; read back in float32 they are what they were before the cast."""
    from transformers import AutoModelForCausalLM

    exact = copy.deepcopy(tiny_model)
    optimizer = FP32MasterAdamW(tiny_model.parameters(), learning_rate=1e-6, beta1=0.9, beta2=0.999, weight_decay=0.0, compute_dtype=BF16)
    assert tiny_model.dtype == BF16
    with optimizer.full_precision():
        tiny_model.save_pretrained(tmp_path)
    assert tiny_model.dtype == BF16
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == F32
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), exact.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_going_on_from_a_saved_state_is_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    gradients = [(0.5, 1.0), (-2.0, 0.25), (1.0, 1.0), (0.125, -4.0)]

    def train(weights: nn.Parameter, optimizer: FP32MasterAdamW, part: slice) -> None:
        for gradient in gradients[part]:
            _backward(weights, *gradient)
            optimizer.step()
            optimizer.zero_grad()

    whole = _weights(1.0, 2.0, dtype=dtype)
    never_stopped = _adam(whole, learning_rate=1e-3)
    train(whole, never_stopped, slice(0, 4))
    first = _weights(1.0, 2.0, dtype=dtype)
    stopped = _adam(first, learning_rate=1e-3)
    train(first, stopped, slice(0, 2))
    torch.save(stopped.state_dict(), tmp_path / "state.pt")
    # bfloat16 parameters come back with the masters; float32 ones are saved with the model.
    second = nn.Parameter(torch.zeros_like(first) if dtype == BF16 else first.detach().clone())
    resumed = _adam(second, learning_rate=7.0)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(second, first) and resumed.rate == 1e-3
    train(second, resumed, slice(2, 4))
    assert torch.equal(second, whole)
    assert _masters(resumed) == _masters(never_stopped)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([_weights(1.0, 2.0, 3.0)], r"moments have shapes \[\(3,\)\], this model's have \[\(2,\)\]"),
        ([_weights(1.0, 2.0, dtype=BF16)], r"masters have shapes \[\(2,\)\], this model's have \[\]"),
        ([_weights(1.0, 2.0), _weights(1.0)], "parameter group"),
    ],
)
def test_a_state_of_other_parameters_is_refused(other: list[nn.Parameter], said: str) -> None:
    source = _adam(*other)
    for parameter in other:
        (parameter.sum() * 2).backward()
    source.step()
    weights = _weights(1.0, 2.0)
    optimizer = _adam(weights)
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(source.state_dict())
    assert weights.tolist() == [1.0, 2.0]


def test_a_state_from_before_the_fused_update_goes_on_as_fused() -> None:
    """Saved groups say how the update was computed then; here it is fused, with the same numbers up to rounding."""
    weights, twin = _weights(1.0, 2.0), _weights(1.0, 2.0)
    old = torch.optim.AdamW([twin], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0, foreach=False, fused=False)
    optimizer = _adam(weights)
    _backward(twin, 0.5, -1.0)
    old.step()
    twin.grad = None
    weights.data.copy_(twin.data)
    optimizer.load_state_dict({"adam": copy.deepcopy(old.state_dict()), "masters": []})
    assert optimizer.state_dict()["adam"]["param_groups"][0]["fused"] is True
    for parameter, updated in ((twin, old), (weights, optimizer)):
        _backward(parameter, 2.0, 0.25)
        updated.step()
    assert weights.tolist() == pytest.approx(twin.tolist(), abs=1e-6)


def test_what_the_next_update_will_take() -> None:
    """Of 3 + 1 float32 numbers: gradients of 16 bytes, moments of 32."""
    half, full = _weights(1.0, 2.0, 3.0, dtype=BF16), _weights(1.0)
    optimizer = _adam(half, full)
    assert optimizer.bytes_to_come == 16 + 32
    _backward(half, 1.0, 1.0, 1.0)
    assert optimizer.bytes_to_come == 4 + 32
    _backward(full, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.bytes_to_come == 16


def test_gradients_of_a_pass_that_broke_off_are_forgotten() -> None:
    weights = _weights(1.0, dtype=BF16)
    optimizer = _adam(weights)
    weights.grad = torch.ones_like(weights)
    optimizer.zero_grad()
    assert weights.grad is None


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_nothing_of_the_size_of_the_model_is_allocated(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own count of allocations, from the second update on; the first makes the moments."""
    from tether.training import optim

    monkeypatch.setattr(optim, "PIECE", 1024)
    weights = nn.Parameter(torch.ones(1000, 100, dtype=dtype))
    optimizer = _adam(weights)
    largest = []
    for _ in range(2):
        (weights.float() ** 2).sum().backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            assert optimizer.clip(1.0) > 1
            optimizer.step()
        largest.append(max(event.self_cpu_memory_usage for event in profile.events()))
        optimizer.zero_grad()
    assert largest[0] >= weights.numel() * 4  # the count sees what it should see
    assert largest[1] <= 1024 * 8


def test_closed_it_lets_go() -> None:
    weights = _weights(1.0, dtype=BF16)
    optimizer = _adam(weights)
    optimizer.close()
    _backward(weights, 2.0)
    assert weights.grad is not None and weights.grad.item() == 2.0
    assert optimizer.clip(1.0) == 0.0


WARM_UP = {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}


@pytest.mark.parametrize(
    ("schedule", "warmup", "final", "expected"),
    [
        ("constant", 0, 0.0, {1: 1.0, 7: 1.0, 12: 1.0}),
        ("constant", 4, 0.0, {**WARM_UP, 5: 1.0, 12: 1.0}),
        ("linear", 4, 0.0, {**WARM_UP, 5: 0.875, 8: 0.5, 11: 0.125, 12: 0.0}),
        ("linear", 4, 0.2, {**WARM_UP, 8: 0.6, 12: 0.2, 13: 0.2}),
        ("linear", 0, 0.0, {1: 1.0, 12: 0.0, 2: 10 / 11}),
        ("linear", 1, 0.0, {1: 1.0, 12: 0.0, 2: 10 / 11}),
        ("cosine", 4, 0.0, {**WARM_UP, 6: (1 + math.sqrt(0.5)) / 2, 8: 0.5, 10: (1 - math.sqrt(0.5)) / 2, 12: 0.0}),
        ("cosine", 4, 0.1, {8: 0.55, 12: 0.1}),
        ("linear", 12, 0.0, {6: 0.5, 12: 1.0}),
        ("cosine", 20, 0.0, {12: 0.6}),
    ],
)
def test_schedules_by_hand(schedule: str, warmup: int, final: float, expected: dict[int, float]) -> None:
    for step, share in expected.items():
        assert learning_rate(1e-3, step, 12, schedule, warmup, final) == pytest.approx(1e-3 * share, abs=1e-12), step


def test_a_run_of_one_step_trains_at_the_base_rate() -> None:
    assert [learning_rate(2.0, 1, 1, name, 0, 0.0) for name in SCHEDULES] == [2.0, 2.0, 2.0]
