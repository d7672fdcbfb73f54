"""Memory that runs out in an update makes it smaller, not wrong; what cannot be made smaller stops, and says what was changed by then."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tether.algorithms.batch import Batch
from tether.algorithms.presets import preset
from tether.core.errors import OutOfMemory
from tether.models import packing as packing_module
from tether.models.critic import Critic
from tether.models.logprobs import kept_bytes
from tether.models.policy import Policy
from tether.training import memory
from tether.training.learner import Learner, Rates
from tether.training.memory import MicroBudget
from tether.training.settings import CriticSettings, LearnerSettings

Build = Callable[..., Any]
GRPO = preset("grpo")
PPO = preset("ppo")
ROOM = 600_000
LENGTHS = (12, 30, 7, 25, 18, 30)


def _learner(model: Any, critic: Critic | None = None, **settings: Any) -> Learner:
    chosen = LearnerSettings(**{"learning_rate": 1e-3, "max_grad_norm": 1e9, "micro_tokens": 4096, **settings})
    algorithm = GRPO if critic is None else PPO
    return Learner(Policy(model), algorithm, chosen, temperature=0.8, max_tokens=50, critic=critic, critic_settings=CriticSettings())


def _batch(prompt: int = 0) -> Batch:
    """Six trajectories, the first `prompt` tokens alike; all tokens but the first were sampled."""
    source = torch.Generator().manual_seed(0)
    lengths = torch.tensor(LENGTHS)
    ids = torch.randint(0, 61, (len(LENGTHS), 30), generator=source)
    ids[:, :prompt] = ids[0, :prompt]
    mask = (torch.arange(30) < lengths[:, None]) & (torch.arange(30) >= max(1, prompt))
    values = torch.randn(3, *mask.shape, generator=source) * mask
    owners = torch.arange(len(LENGTHS))
    zeros = torch.zeros(mask.shape, dtype=torch.float64)
    batch = Batch(ids, mask, values[0] - 4.0 * mask, zeros, zeros.bool(), lengths, owners, owners // 3)
    return dataclasses.replace(batch, advantages_BT=values[1], returns_BT=values[2], values_BT=torch.zeros(mask.shape))


def _update(learner: Learner, batch: Batch, updates: int = 1) -> dict[str, float]:
    return learner.update(batch, [torch.arange(batch.num_trajectories)] * updates, 1.0, Rates(1e-3, 1e-3))


def _weights(model: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@contextmanager
def _room_for(num_bytes: int, *models: Any) -> Iterator[None]:
    """Inside the block a forward pass may keep so many bytes for its backward pass: what is saved is counted, and refused beyond that."""
    kept = 0

    def begin(*_: Any) -> None:
        nonlocal kept
        kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += 0 if isinstance(tensor, torch.nn.Parameter) else tensor.nbytes
        if kept > num_bytes:
            raise torch.OutOfMemoryError(f"tried to keep {tensor.nbytes} bytes, {kept} of {num_bytes} are taken")
        return tensor

    hooks = [model.get_input_embeddings().register_forward_pre_hook(begin) for model in models]
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("packing", [True, False])
def test_smaller_parts_give_the_same_update(packing: bool, small_llama: Build) -> None:
    model, limited = small_llama(), small_llama()
    batch = _batch()
    plain = _learner(model, packing=packing, gradient_checkpointing=False)
    expected = _update(plain, batch)
    learner = _learner(limited, packing=packing, gradient_checkpointing=False)
    with _room_for(ROOM, limited):
        metrics = _update(learner, batch)
        again = _update(learner, batch)
    assert expected["memory_retries"] == 0 and expected["micro_tokens"] == 4096
    assert metrics["memory_retries"] > 0 and 30 < metrics["micro_tokens"] < 100 and metrics["recompute"] == 0
    assert (again["memory_retries"], again["micro_tokens"]) == (0, metrics["micro_tokens"])  # what was short stays short
    same = {"loss", "grad_norm", "entropy", "ratio_mean", "tokens_trained", "mismatch", "num_updates"}
    assert {name: metrics[name] for name in same} == pytest.approx({name: expected[name] for name in same}, rel=1e-5)
    _update(plain, batch)
    _assert_close(_weights(limited), _weights(model))


@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.long)])
def test_then_activations_are_computed_again(packing: bool, small_llama: Build) -> None:
    model, limited = small_llama(), small_llama()
    batch = _batch()
    expected = _update(_learner(model), batch)
    with _room_for(120_000, limited):  # less than the longest sequence keeps, more than its layers' inputs
        metrics = _update(_learner(limited, packing=packing), batch)
    assert (metrics["recompute"], metrics["micro_tokens"]) == (1, 30)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    _assert_close(_weights(limited), _weights(model))


def test_what_cannot_be_made_smaller_stops_before_any_change(small_llama: Build) -> None:
    model = small_llama()
    before = _weights(model)
    learner = _learner(model)
    said = r"with 30 tokens at a time, where the longest sequence has 30, and activations computed again \(tried to keep.*no weight was changed"
    with _room_for(500, model), pytest.raises(OutOfMemory, match=said):
        _update(learner, _batch())
    assert learner.updates_applied == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert _update(learner, _batch())["num_updates"] == 1  # and goes on where there is room


def test_updates_that_were_applied_are_counted(small_llama: Build) -> None:
    model = small_llama()
    learner = _learner(model, update_batch=3)
    passes = 0

    def fail_in_the_second_minibatch(*_: Any) -> None:
        nonlocal passes
        passes += torch.is_grad_enabled()
        if passes > 1:
            torch.empty(2**55)  # the allocator itself says no

    hook = model.get_input_embeddings().register_forward_hook(fail_in_the_second_minibatch)
    with pytest.raises(OutOfMemory, match="1 of this step's updates had been applied"):
        _update(learner, _batch())
    assert learner.updates_applied == 1
    hook.remove()
    _update(learner, _batch())
    assert learner.updates_applied == 2


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so, once
def test_half_a_gradient_is_dropped(dtype: torch.dtype | None, small_llama: Build) -> None:
    """The pass fails at the very end of its way back, when all gradients but one are there."""
    models = small_llama(), small_llama()
    learners = [
        Learner(Policy(model), GRPO, LearnerSettings(micro_tokens=64, max_grad_norm=1e9), temperature=0.8, max_tokens=50, dtype=dtype)
        for model in models
    ]
    fails = iter([True])

    def fail_once(gradient: Tensor) -> None:
        if next(fails, False):
            raise torch.OutOfMemoryError("no room for the gradient of the embedding")

    def watch(module: Any, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail_once)

    hook = models[1].get_input_embeddings().register_forward_hook(watch)
    batch = _batch()
    expected, metrics = (_update(learner, batch) for learner in learners)
    hook.remove()
    assert metrics["memory_retries"] == 1 and metrics["micro_tokens"] == 32
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5 if dtype is None else 0.02)


def test_other_failures_are_not_taken_for_it(small_llama: Build) -> None:
    model = small_llama()

    def break_down(*_: Any) -> None:
        raise RuntimeError("shapes do not match")

    model.get_input_embeddings().register_forward_pre_hook(break_down)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        _update(_learner(model, packing=False), _batch())


def test_a_critic_that_does_not_fit_makes_both_smaller(small_llama: Build) -> None:
    model, critic_model = small_llama(), small_llama(1)
    critic = Critic(Policy(critic_model), shared=False)
    with _room_for(ROOM, model, critic_model):
        metrics = _update(_learner(model, critic), _batch())
    assert metrics["memory_retries"] > 0 and metrics["num_updates"] == 1


# Deciding by the memory that is free.


@pytest.mark.parametrize(("free", "recompute"), [(None, 0), (10**12, 0), (10**6, 1)])
def test_activations_are_kept_where_they_fit(free: int | None, recompute: int, small_llama: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda device: free)
    assert _update(_learner(small_llama()), _batch())["recompute"] == recompute
    assert _update(_learner(small_llama(), gradient_checkpointing=bool(recompute)), _batch())["recompute"] == recompute


def test_the_decision_counts_what_is_to_come(small_llama: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The border is activations with a margin, logits, gradients and moments; it is decided once."""
    policy = Policy(small_llama())
    needed = int(1.3 * kept_bytes(policy.module, 100, fused=False)) + 2 * 2**26 + 5000
    for free, recompute in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(memory, "available_memory", lambda device, free=free: free)
        budget = MicroBudget(100, None)
        budget.decide([policy], 5000, packing=True)
        assert budget.recompute is recompute
        monkeypatch.setattr(memory, "available_memory", lambda device: 0)
        budget.decide([policy], 5000, packing=True)
        assert budget.recompute is recompute


def test_a_model_that_cannot_compute_layers_again_keeps_them(monkeypatch: pytest.MonkeyPatch, small_llama: Build) -> None:
    model = small_llama()
    monkeypatch.setattr(memory, "available_memory", lambda device: 0)
    monkeypatch.setattr(memory, "can_recompute", lambda model: False)
    policy = Policy(model)
    monkeypatch.setattr(Policy, "backbone", None)  # as for an architecture of another kind
    budget = MicroBudget(100, None)
    budget.decide([policy], 0, packing=True)
    assert not budget.recompute and not budget.reduce([policy], [100])


def test_reducing_by_hand(small_llama: Build) -> None:
    policy = Policy(small_llama())
    budget = MicroBudget(1000, None)
    seen = []
    while budget.reduce([policy], [300, 200, 300, 300]):
        seen.append((budget.tokens, budget.recompute))
    assert seen == [(500, False), (300, False), (300, True)]
    assert budget.reduce([policy], [100] * 9) and budget.tokens == 150  # a minibatch of shorter sequences
    budget = MicroBudget(8192, None)
    assert budget.reduce([policy], [100] * 9) and budget.tokens == 450  # half of what there was to compute
    assert budget.retries == 1


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so, once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flat", [True, False])
def test_the_estimate_is_what_is_kept(flat: bool, dtype: torch.dtype, small_llama: Build) -> None:
    """By counting the storages that a forward pass keeps: the estimate is about that much."""
    tokens, model = 120, small_llama().to(dtype)
    policy = Policy(model)
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no storage is freed and its place taken by another
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        if tensor.untyped_storage().data_ptr() not in own:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids_1T = _batch().ids_BT.flatten()[None, :tokens]
    assert policy.backbone is not None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if flat:
            micro = packing_module.flat_batches(ids_1T, torch.tensor([tokens]), tokens)[0]
            policy.backbone.features(*micro.to_flat(ids_1T), micro.attention(policy.backbone.scale, ids_1T.device))
        else:
            policy.features(input_ids=ids_1T, use_cache=False)
    ratio = kept_bytes(model, tokens, fused=False) / sum(storages.values())
    assert 0.9 < ratio < 1.4, ratio


# Prompts that are shared.


def test_members_of_a_group_share_their_prompt(small_llama: Build) -> None:
    shared, apart = small_llama(), small_llama()
    plain = small_llama()
    original, packing_module.MIN_SHARED = packing_module.MIN_SHARED, 4
    try:
        batch = _batch(prompt=5)
        metrics = [
            _update(_learner(shared), batch),
            _update(_learner(apart, share_prompts=False), batch),
            _update(_learner(plain, packing=False), batch),
        ]
    finally:
        packing_module.MIN_SHARED = original
    assert [found["tokens_shared"] for found in metrics] == [25, 0, 0]
    assert [found["padding"] for found in metrics] == [0, 0, pytest.approx(1 - sum(LENGTHS) / 180)]
    for found in metrics[1:]:
        assert found["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=1e-5)
    _assert_close(_weights(shared), _weights(plain))
    _assert_close(_weights(apart), _weights(plain))


def test_trajectories_without_anything_to_learn_from_are_not_computed(small_llama: Build) -> None:
    model = small_llama()
    batch = _batch()
    batch.loss_mask_BT[1:] = False
    sizes: list[int] = []

    def count(module: Any, inputs: tuple[Tensor]) -> None:
        sizes.append(inputs[0].numel() * torch.is_grad_enabled())

    model.get_input_embeddings().register_forward_pre_hook(count)
    metrics = _update(_learner(model, micro_tokens=30), batch)
    assert metrics["tokens_trained"] == 11 and sum(sizes) == 12 + 18  # 18 shares its row


def test_the_mismatch_with_the_sampler(small_llama: Build) -> None:
    """Half the tokens half a nat above what the sampler said, half below; of the first minibatch, before its update."""
    model = small_llama()
    torch.nn.init.zeros_(model.lm_head.weight)
    batch = _batch()
    sign = torch.where(torch.arange(30) % 2 == 0, 0.5, -0.5)
    batch = dataclasses.replace(batch, behavior_logprobs_BT=torch.where(batch.loss_mask_BT, -4.110874 - sign, 0.0))
    metrics = _update(_learner(model), batch, updates=2)
    up = int((batch.loss_mask_BT & (sign > 0)).sum())
    down = int(batch.loss_mask_BT.sum()) - up
    assert metrics["mismatch"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["mismatch_ratio_mean"] == pytest.approx((up * 1.648721 + down * 0.606531) / (up + down), abs=1e-5)
    assert metrics["mismatch_ratio_max"] == pytest.approx(1.648721, abs=1e-5)
