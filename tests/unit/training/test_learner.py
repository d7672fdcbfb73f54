"""An update does what policy gradients promise, is the same however memory cuts it, and what is not finite changes nothing."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tether.algorithms.batch import Batch
from tether.algorithms.presets import Algorithm, preset
from tether.core.errors import CheckpointError
from tether.models.critic import Critic
from tether.models.logprobs import token_logprobs
from tether.models.policy import Policy
from tether.models.reference import reference_for
from tether.training.estimate import AdvantageEstimator
from tether.training.learner import Learner, Rates
from tether.training.settings import CriticSettings, LearnerSettings

TEMPERATURE = 0.8
RATES = Rates(policy=1e-3, critic=1e-3)
NO_BONUS = preset("grpo", entropy_coef=0.0)
PLAIN_PPO = preset("ppo")

Build = Callable[..., Any]


@pytest.fixture
def small_llama(small_llama: Build, device: str) -> Build:
    """The model where updates are computed: on the GPU if there is one."""
    return lambda seed=0: small_llama(seed).to(device)


def _learner(model: Any, algorithm: Algorithm = NO_BONUS, critic: Critic | None = None, **settings: Any) -> Learner:
    split = critic.policy if critic is not None and critic.shared else Policy(model)
    chosen = LearnerSettings(**{"learning_rate": 1e-3, **settings})
    shared = CriticSettings(shared=critic is not None and critic.shared)
    return Learner(split, algorithm, chosen, temperature=TEMPERATURE, max_tokens=50, critic=critic, critic_settings=shared)


def _update(learner: Learner, batch: Batch, scale: float = 1.0, rates: Rates = RATES) -> dict[str, float]:
    return learner.update(batch, [_order(batch, range(batch.num_trajectories))], scale, rates)


def _order(batch: Batch, trajectories: Iterable[int]) -> Tensor:
    return torch.tensor(list(trajectories), device=batch.ids_BT.device)


def _with_advantages(batch: Batch, advantages: list[float]) -> Batch:
    """One advantage a trajectory, at all its tokens."""
    return dataclasses.replace(
        batch, advantages_BT=torch.tensor(advantages, device=batch.ids_BT.device)[batch.trajectory_index_B, None] * batch.loss_mask_BT
    )


def _two_rows(model: Any, advantages: tuple[float, float]) -> Batch:
    """Two texts of 7 and 8 tokens, of which the last 3 and 5 were sampled, by this very model."""
    with model.device:
        ids = torch.tensor([[5, 9, 2, 7, 30, 31, 32, 0], [8, 1, 4, 40, 41, 42, 43, 44]])
        mask = torch.tensor([[False] * 4 + [True] * 3 + [False], [False] * 3 + [True] * 5])
        lengths, index, groups = torch.tensor([7, 8]), torch.tensor([0, 1]), torch.tensor([0, 0])
        logprobs, zeros, ends = torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.bool)
    logprobs[mask] = token_logprobs(Policy(model), ids, mask, lengths, TEMPERATURE, max_tokens=100)
    batch = Batch(ids, mask, logprobs, zeros, ends, lengths, index, groups)
    return _with_advantages(batch, list(advantages))


def _row_means(model: Any, batch: Batch) -> list[float]:
    values = token_logprobs(Policy(model), batch.ids_BT, batch.loss_mask_BT, batch.lengths_B, TEMPERATURE, max_tokens=100)
    return [float(part.mean()) for part in values.split(batch.loss_mask_BT.sum(dim=1).tolist())]


def _weights(model: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _equal(before: list[Tensor], model: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_good_tokens_become_likelier_and_bad_ones_less(small_llama: Build) -> None:
    model = small_llama()
    batch = _two_rows(model, (1.0, -1.0))
    before = _row_means(model, batch)
    metrics = _update(_learner(model), batch)
    after = _row_means(model, batch)
    assert after[0] > before[0] + 1e-3 and after[1] < before[1] - 1e-3
    assert (metrics["num_updates"], metrics["nonfinite"], metrics["tokens_trained"]) == (1, 0, 3 + 5)
    assert metrics["learning_rate"] == 1e-3


def test_the_numbers_of_a_first_update_by_hand(small_llama: Build) -> None:
    """Ratios are 1, so the loss is minus the mean advantage; GRPO averages within rows first, Dr. GRPO divides by the budget of 50."""
    model = small_llama()
    batch = _two_rows(model, (1.0, -0.5))
    metrics = _update(_learner(copy.deepcopy(model)), batch, scale=0.5)
    assert metrics["loss"] == pytest.approx(-0.125, abs=1e-5)  # -(1 - 0.5) / 2 * 0.5
    assert metrics["policy_loss"] == pytest.approx(-0.0625, abs=1e-5)  # -(3 * 1 - 5 * 0.5) / 8
    assert (metrics["ratio_mean"], metrics["ratio_max"], metrics["ratio_min"]) == pytest.approx((1.0, 1.0, 1.0), abs=1e-4)
    assert metrics["ratio_std"] < 1e-3
    assert (metrics["clip_low"], metrics["clip_high"], metrics["clip_dual"]) == (0, 0, 0)
    assert metrics["mismatch"] < 1e-5 and abs(metrics["kl_sampled"]) < 1e-6
    assert not {"kl_reference", "value_loss", "value_clip", "critic_grad_norm"} & metrics.keys()
    metrics = _update(_learner(model, preset("dr_grpo", entropy_coef=0.0)), batch)
    assert metrics["loss"] == pytest.approx(-0.005, abs=1e-6)  # -(3 * 1 - 5 * 0.5) / 50 / 2


def test_a_model_that_knows_nothing(small_llama: Build) -> None:
    """Without a head every word of the 61 has the same chance: log p = -log 61 = -4.110874, and that is the entropy, whatever the text."""
    model = small_llama()
    torch.nn.init.zeros_(model.lm_head.weight)
    batch = _two_rows(model, (1.0, -1.0))
    sampled = torch.where(
        batch.loss_mask_BT, torch.tensor([[-4.610874], [-3.610874]], device=model.device), 0.0
    )  # half a nat less and more than the model says
    batch = dataclasses.replace(batch, behavior_logprobs_BT=sampled)
    metrics = _update(_learner(model, preset("dapo", entropy_coef=0.1)), batch)
    assert metrics["entropy"] == pytest.approx(4.110874, abs=1e-5)
    assert metrics["mismatch"] == pytest.approx(0.5, abs=1e-5)
    assert (metrics["ratio_max"], metrics["ratio_min"]) == pytest.approx((1.648721, 0.606531), abs=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(0.997352, abs=1e-5)  # (3 * 1.648721 + 5 * 0.606531) / 8
    assert metrics["ratio_std"] == pytest.approx(0.504574, abs=1e-4)  # 1.042191 * sqrt(15) / 8
    assert (metrics["clip_high"], metrics["clip_low"]) == (3 / 8, 5 / 8)
    assert metrics["policy_loss"] == pytest.approx(0.02, abs=1e-5)  # (-1.28 * 3 + 0.8 * 5) / 8
    assert metrics["loss"] == pytest.approx(-0.391087, abs=1e-5)  # 0.02 - 0.1 * 4.110874
    # k3 of KL(sampled || new): r - 1 - log r with r = 1.648721 three times and 0.606531 five times
    assert metrics["kl_sampled"] == pytest.approx(0.122352, abs=1e-5)


def test_clipped_tokens_have_no_gradient(small_llama: Build) -> None:
    model = small_llama()
    batch = _two_rows(model, (1.0, -1.0))
    shift = torch.tensor([[-math.log(3)], [math.log(3)]], device=model.device)
    batch = dataclasses.replace(batch, behavior_logprobs_BT=batch.behavior_logprobs_BT + shift * batch.loss_mask_BT)
    before = _weights(model)
    metrics = _update(_learner(model), batch)
    assert (metrics["clip_high"], metrics["clip_low"]) == pytest.approx((3 / 8, 5 / 8))
    assert metrics["loss"] == pytest.approx((-1.28 + 0.8) / 2, abs=1e-5)
    assert metrics["grad_norm"] == 0 and _equal(before, model)


def test_a_long_gradient_is_shortened_and_logged_as_it_was(small_llama: Build) -> None:
    model = small_llama()
    batch = _two_rows(model, (300.0, -500.0))
    learner = _learner(model, max_grad_norm=0.5)
    metrics = _update(learner, batch)
    moments: Any = learner.state()["optimizers"]
    total = sum(float((state["exp_avg"] / 0.1).square().sum()) for state in moments["policy"]["adam"]["state"].values())
    assert metrics["grad_norm"] > 5
    assert math.sqrt(total) == pytest.approx(0.5, rel=1e-4)


# Memory: how a minibatch is cut, packed or recomputed changes nothing.

ALGORITHMS = {
    "ppo separate": preset("ppo", kl_coef=0.05, kl_mode="reward", gae_lambda=0.9),
    "ppo shared": preset("ppo", advantages="bilevel_gae", gamma=0.9),
    "grpo": preset("grpo", kl_coef=0.05),
    "dapo": preset("dapo"),
    "dr_grpo": preset("dr_grpo", dual_clip=1.3),
}
PLAIN = {"micro_tokens": 8192, "packing": False, "gradient_checkpointing": False}
CUTS: list[dict[str, Any]] = [
    {"micro_tokens": 64, "packing": False, "gradient_checkpointing": False},
    {"micro_tokens": 64, "packing": True, "gradient_checkpointing": True},
    {"micro_tokens": 512, "packing": True, "gradient_checkpointing": False},
    {"micro_tokens": 512, "packing": False, "gradient_checkpointing": True},
    {"micro_tokens": 8192, "packing": True, "gradient_checkpointing": False},
]


def _whole_update(name: str, build: Build, hand_made: Build, rows: int, cut: dict[str, Any]) -> tuple[dict[str, float], list[Tensor]]:
    """Estimates and two updates: the numbers, and the weights of policy and critic after them."""
    model, algorithm = build(), ALGORITHMS[name]
    split = Policy(model)
    critic = None
    if algorithm.has_critic:
        critic = Critic(split, shared=True) if name == "ppo shared" else Critic(Policy(build(1)), shared=False)
        drawn = torch.randn(critic.head.linear.weight.shape, generator=torch.Generator().manual_seed(4))
        critic.head.linear.weight.data.copy_(0.2 * drawn)
    reference = reference_for(Policy(build(2))) if algorithm.has_reference else None
    estimator = AdvantageEstimator(algorithm, critic, reference, temperature=TEMPERATURE, micro_tokens=cut["micro_tokens"])
    batch, estimates = estimator.complete(hand_made(model, rows))
    learner = _learner(model, algorithm, critic, update_batch=4, **cut)
    metrics = learner.update(batch, [_order(batch, [3, 5, 0, 4, 1, 2])], 0.7, Rates(1e-5, 1e-5))
    for name in ("padding", "micro_tokens", "recompute"):
        metrics.pop(name)
    return {**metrics, **estimates}, [*_weights(model), *(p.detach() for p in (critic.parameters() if critic else []))]


@pytest.mark.parametrize(("name", "rows"), [*((name, 1) for name in ALGORITHMS), ("ppo shared", 3), ("grpo", 3), ("dr_grpo", 3)])
def test_memory_settings_do_not_change_the_update(name: str, rows: int, small_llama: Build, hand_made: Build) -> None:
    """Rows of whole histories, and of single turns as the context modes last_k and single_turn make them."""
    expected, weights = _whole_update(name, small_llama, hand_made, rows, PLAIN)
    assert expected["num_updates"] == 2 and expected["grad_norm"] > 0.01
    for cut in CUTS:
        metrics, after = _whole_update(name, small_llama, hand_made, rows, cut)
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5), cut
        for got, want in zip(after, weights, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_a_rate_large_enough_to_see_a_difference(small_llama: Build, hand_made: Build) -> None:
    """Were the updates above left out, or made in another order of minibatches, their weights would be further apart than is allowed."""
    model = small_llama()
    start = _weights(model)
    _, after = _whole_update("grpo", small_llama, hand_made, 1, PLAIN)
    assert max(float((a - b).abs().max()) for a, b in zip(start, after, strict=True)) > 1.9e-5


@pytest.mark.parametrize(("cut", "padding"), [((20, False), 1 / 16), ((8, False), 0.0), ((16, True), 0.0)])
def test_padding_is_counted(cut: tuple[int, bool], padding: float, small_llama: Build) -> None:
    """Texts of 7 and 8 tokens: side by side they take 2 x 8 places, one by one 7 and 8, in a flat row 15."""
    model = small_llama()
    metrics = _update(_learner(model, micro_tokens=cut[0], packing=cut[1]), _two_rows(model, (1.0, -1.0)))
    assert metrics["padding"] == pytest.approx(padding)


def test_rows_of_a_trajectory_count_as_one_sequence(small_llama: Build, hand_made: Build) -> None:
    """Cut into rows, GRPO still averages over six trajectories: with ratios of 1 the loss is minus their mean advantage."""
    model = small_llama()
    batch = _with_advantages(hand_made(model, rows=3, noise=0.0), [1.0, -2.0, 0.5, 4.0, 0.0, 0.25])
    assert len(batch) > 6
    assert _update(_learner(model), batch)["loss"] == pytest.approx(-3.75 / 6, abs=1e-5)


# Minibatches and epochs.


def test_minibatches_make_one_update_each_in_the_given_order(small_llama: Build, hand_made: Build) -> None:
    model = small_llama()
    batch = _with_advantages(hand_made(model), [1.0, -1.0, 0.5, 0.2, 2.0, -0.3])
    by_hand = copy.deepcopy(model)
    metrics = _learner(model, update_batch=4).update(batch, [_order(batch, [5, 0, 3, 1, 2, 4])], 1.0, RATES)
    assert metrics["num_updates"] == 2
    learner = _learner(by_hand)
    parts = [batch.trajectories(_order(batch, chosen)) for chosen in ([0, 1, 3, 5], [2, 4])]
    losses = [_update(learner, part)["loss"] for part in parts]
    assert metrics["loss"] == pytest.approx(sum(losses) / 2, abs=1e-6) and abs(sum(losses)) > 0.1
    for got, want in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-7)


def test_epochs_go_over_the_batch_again(small_llama: Build) -> None:
    model = small_llama()
    batch = _two_rows(model, (1.0, -1.0))
    metrics = _learner(model, learning_rate=1e-4).update(batch, [_order(batch, [0, 1]), _order(batch, [1, 0])], 1.0, Rates(1e-4))
    assert (metrics["num_updates"], metrics["tokens_trained"]) == (2, 16)
    assert metrics["mismatch"] < 1e-5  # of the first minibatch alone, before anything was updated
    assert metrics["ratio_max"] > 1.001 and metrics["ratio_min"] < 0.999


# The critic.


def _for_a_critic(batch: Batch) -> Batch:
    """Returns of 1 everywhere, expected were 0."""
    ones = batch.loss_mask_BT.float()
    return dataclasses.replace(batch, returns_BT=ones, values_BT=torch.zeros_like(ones), reference_BT=None)


@pytest.mark.parametrize("shared", [True, False])
def test_only_the_critic_learns_where_the_policy_has_no_rate(shared: bool, small_llama: Build) -> None:
    model = small_llama()
    batch = _for_a_critic(_two_rows(model, (1.0, -1.0)))
    critic = Critic(Policy(model if shared else small_llama(1)), shared=shared)
    learner = _learner(model, PLAIN_PPO, critic)
    before = _weights(model)
    metrics = _update(learner, batch, rates=Rates(0.0, 1e-3))
    assert _equal(before, model) and metrics["learning_rate"] == 0
    assert metrics["value_loss"] == pytest.approx(0.5) and metrics["critic_grad_norm"] > 0
    assert metrics["loss"] == pytest.approx(0.25 if shared else 0.0)
    assert float(critic.head.linear.weight.detach().abs().max()) == pytest.approx(1e-3, rel=1e-2)
    _update(learner, batch)
    assert not _equal(before, model)


def test_a_critic_learns_what_it_is_taught(small_llama: Build) -> None:
    model, critic = small_llama(), Critic(Policy(small_llama(1)), shared=False)
    batch = _for_a_critic(_two_rows(model, (0.0, 0.0)))
    learner = _learner(model, PLAIN_PPO, critic)
    for _ in range(30):
        metrics = _update(learner, batch, rates=Rates(0.0, 1e-2))
    values = critic.values(batch.ids_BT, batch.loss_mask_BT, batch.lengths_B, 100)
    assert (values > 0.5).all() and metrics["value_clip"] > 0  # no gain beyond 0.5 away from what it said before


# What is not finite.


def _poisoned(batch: Batch, value: float) -> Batch:
    assert batch.advantages_BT is not None
    spoilt = batch.advantages_BT.clone()
    spoilt[1, 4] = value
    return dataclasses.replace(batch, advantages_BT=spoilt)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_update_that_is_not_finite_is_left_out_and_counted(value: float, small_llama: Build) -> None:
    model = small_llama()
    batch = _two_rows(model, (1.0, -1.0))
    learner = _learner(model)
    _update(learner, batch)
    before, state = _weights(model), copy.deepcopy(learner.state())
    metrics = _update(learner, _poisoned(batch, value))
    assert (metrics["num_updates"], metrics["nonfinite"], metrics["nonfinite_streak"], metrics["tokens_trained"]) == (0, 1, 1, 0)
    assert _equal(before, model) and all(parameter.grad is None for parameter in model.parameters())
    _assert_same_moments(learner.state(), state)
    assert all(math.isfinite(number) for number in metrics.values()), metrics


def _assert_same_moments(got: Any, want: Any) -> None:
    for name, optimizer in want["optimizers"].items():
        for index, moments in optimizer["adam"]["state"].items():
            for key, tensor in moments.items():
                assert torch.equal(got["optimizers"][name]["adam"]["state"][index][key], tensor), (name, index, key)


@pytest.mark.parametrize("where", ["policy", "critic"])
def test_weights_that_are_not_finite(where: str, small_llama: Build) -> None:
    """A broken critic holds the policy's update back too: its advantages were the critic's."""
    model, critic = small_llama(), Critic(Policy(small_llama(1)), shared=False)
    batch = _for_a_critic(_two_rows(model, (1.0, -1.0)))
    learner = _learner(model, PLAIN_PPO, critic)
    with torch.no_grad():
        (model.lm_head.weight if where == "policy" else critic.head.linear.weight).view(-1)[0] = math.nan
    policy, head = _weights(model), critic.head.linear.bias.detach().clone()
    metrics = _update(learner, batch)
    assert (metrics["num_updates"], metrics["nonfinite"]) == (0, 1)
    assert torch.equal(head, critic.head.linear.bias)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(policy, model.parameters(), strict=True))
    assert all(math.isfinite(number) for number in metrics.values()), metrics


def test_a_finite_loss_with_a_gradient_that_is_not(small_llama: Build) -> None:
    """Advantages near the end of float32: their loss is finite, their gradient is not."""
    model = small_llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(1000.0)  # so that it is infinite whatever the order of the sums
    batch = _with_advantages(_two_rows(model, (1.0, -1.0)), [3e38, -3e38])
    before = _weights(model)
    metrics = _update(_learner(model), batch)
    assert metrics["nonfinite"] == 1 and _equal(before, model)


@pytest.mark.parametrize("distance", [100.0, math.inf])
def test_what_is_only_reported_does_not_hold_an_update_back(distance: float, small_llama: Build) -> None:
    """The sampler called one of 8 tokens impossible that the policy finds likely: exp(new - behavior) is infinite in float32. The ratio of the
    loss is against the old policy, and the correction is capped, so loss and gradient are finite. The log-ratio is reported as 20."""
    model = small_llama()
    batch = _two_rows(model, (1.0, -1.0))
    behavior = batch.behavior_logprobs_BT.clone()
    behavior[1, 4] -= distance
    batch = dataclasses.replace(batch, behavior_logprobs_BT=behavior, old_logprobs_BT=batch.behavior_logprobs_BT)
    before = _weights(model)
    metrics = _update(_learner(model, preset("grpo", importance_cap=2.0)), batch)
    assert (metrics["num_updates"], metrics["nonfinite"]) == (1, 0) and not _equal(before, model)
    assert metrics["importance_weight"] == pytest.approx(9 / 8, abs=1e-4)  # seven tokens of weight 1, one of weight 2
    assert metrics["mismatch"] == pytest.approx(20 / 8, abs=1e-4)
    assert metrics["mismatch_ratio_max"] == pytest.approx(math.exp(20), rel=1e-4)
    assert all(math.isfinite(number) for number in metrics.values()), metrics


@pytest.mark.parametrize("kl_mode", ["loss", "reward"])
def test_a_gradient_that_is_finite_of_a_loss_that_is_not(kl_mode: str, small_llama: Build) -> None:
    """A word that the reference rules out: k1 is infinite there, its gradient is 1. In the reward the divergence is no part of the loss: its
    mean is on the record alone, as (0 + ... + 20) / 8."""
    model = small_llama()
    batch = _two_rows(model, (1.0, -1.0))
    reference = batch.behavior_logprobs_BT.clone()
    reference[1, 4] = -math.inf
    before = _weights(model)
    algorithm = preset("grpo", kl_coef=0.1, divergence="k1", kl_mode=kl_mode)
    metrics = _update(_learner(model, algorithm), dataclasses.replace(batch, reference_BT=reference))
    if kl_mode == "loss":
        assert metrics["nonfinite"] == 1 and _equal(before, model)
    else:
        assert metrics["nonfinite"] == 0 and not _equal(before, model)
        assert metrics["kl_reference"] == pytest.approx(20 / 8, abs=1e-4)
    assert all(math.isfinite(number) for number in metrics.values()), metrics


def test_what_is_left_out_does_not_spoil_the_numbers_nor_the_rest(small_llama: Build) -> None:
    model = small_llama()
    batch = _two_rows(model, (1.0, -1.0))
    alone = copy.deepcopy(model)
    metrics = _update(_learner(model, update_batch=1), _poisoned(batch, math.inf))
    assert (metrics["num_updates"], metrics["nonfinite"], metrics["tokens_trained"], metrics["nonfinite_streak"]) == (1, 1, 3, 1)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert metrics["loss"] == pytest.approx(-1.0, abs=1e-5)
    _update(_learner(alone), batch.trajectories(_order(batch, [0])))
    assert _equal(_weights(alone), model)


def test_a_streak_ends_with_an_update(small_llama: Build) -> None:
    model = small_llama()
    batch = _two_rows(model, (1.0, -1.0))
    learner = _learner(model)
    streaks = [_update(learner, part)["nonfinite_streak"] for part in (_poisoned(batch, math.nan), _poisoned(batch, math.inf), batch)]
    assert streaks == [1, 2, 0]


# Going on.


@pytest.mark.parametrize("kind", ["none", "separate", "shared"])
def test_a_restored_learner_goes_on_as_the_first_would_have(kind: str, small_llama: Build, tmp_path: Any) -> None:
    learners = []
    for _ in range(2):
        model = small_llama()
        critic = None if kind == "none" else Critic(Policy(model if kind == "shared" else small_llama(1)), shared=kind == "shared")
        learners.append((model, _learner(model, NO_BONUS if critic is None else PLAIN_PPO, critic)))
    (model, learner), (again, other) = learners
    batch = _for_a_critic(_two_rows(model, (1.0, -1.0)))
    _update(learner, batch)
    _update(learner, _poisoned(batch, math.nan))
    torch.save(learner.state(), tmp_path / "state.pt")
    again.load_state_dict(model.state_dict())
    other.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.nonfinite_streak == 1
    assert _update(learner, batch) == _update(other, batch)
    assert _equal(_weights(model), again)
    if learner.critic is not None and other.critic is not None:
        assert all(torch.equal(a, b) for a, b in zip(learner.critic.parameters(), other.critic.parameters(), strict=True))


def test_the_state_of_another_learner_is_refused(small_llama: Build) -> None:
    plain = _learner(small_llama())
    with_critic = _learner(small_llama(), PLAIN_PPO, Critic(Policy(small_llama(1)), shared=False))
    with pytest.raises((KeyError, ValueError, CheckpointError)):
        with_critic.restore(plain.state())
    with pytest.raises(ValueError, match="the learner's state has another form"):
        plain.restore({"optimizers": [], "critic": {}, "nonfinite_streak": 0})


@pytest.mark.parametrize("update_batch", [0, 64])
def test_the_ratio_is_taken_against_the_old_policy_and_the_weight_against_the_sampler(
    update_batch: int, small_llama: Build, hand_made: Build
) -> None:
    """Before its first update the policy is the old one: every ratio is 1, and the weights are min(old / behavior, cap). Where the step makes that one
    update, it computes the old log-probs itself."""
    model, cap = small_llama(), 1.2
    algorithm = preset("grpo", importance_cap=cap, entropy_coef=0.0)
    common: dict[str, Any] = {"temperature": TEMPERATURE, "micro_tokens": 100, "policy": Policy(model)}
    batch, _ = AdvantageEstimator(algorithm, None, None, **common).complete(hand_made(model))
    completed, _ = AdvantageEstimator(algorithm, None, None, update_batch=update_batch, **common).complete(hand_made(model))
    assert (completed.old_logprobs_BT is None) == (update_batch > 0)
    metrics = _update(_learner(model, algorithm, update_batch=64), completed)
    assert batch.old_logprobs_BT is not None and metrics["num_updates"] == 1
    weights = torch.exp(batch.old_logprobs_BT - batch.behavior_logprobs_BT)[batch.loss_mask_BT]
    assert float(weights.min()) < 0.8 and float(weights.max()) > cap + 0.3
    assert metrics["importance_weight"] == pytest.approx(float(weights.clamp(max=cap).mean()), abs=1e-4)
    assert [metrics[f"ratio_{name}"] for name in ("min", "mean", "max")] == pytest.approx([1, 1, 1], abs=1e-4)
    assert metrics["mismatch_ratio_max"] == pytest.approx(float(weights.max()), abs=1e-3)


def test_an_update_finds_its_kernels_compiled(gpu: str) -> None:
    """Of a width that no other test has, whose kernels are compiled by `warm_up` or not at all."""
    knobs = pytest.importorskip("triton").knobs
    sizes = {"hidden_size": 1040, "num_attention_heads": 13, "num_key_value_heads": 13, "intermediate_size": 1040, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60, pad_token_id=0, **sizes)).to(gpu, torch.bfloat16)
    batch, learner = _two_rows(model, (1.0, -1.0)), _learner(model)
    assert learner.policy.backbone is not None
    learner.warm_up()
    missed: list[str] = []
    knobs.runtime.jit_cache_hook = lambda **call: missed.append(call["fn"].name)
    try:
        _update(learner, batch)
    finally:
        knobs.runtime.jit_cache_hook = None
    assert not missed
