"""Estimates of a batch: values and reference at their tokens, advantages against formulas written out here, literal explained variance."""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tether.algorithms.batch import Batch
from tether.algorithms.presets import Algorithm, preset
from tether.core.errors import BadInput
from tether.models.critic import Critic
from tether.models.policy import Policy
from tether.models.reference import reference_for
from tether.training.estimate import AdvantageEstimator

TEMPERATURE = 0.8
Build = Callable[..., Any]


def _complete(
    batch: Batch, algorithm: Algorithm, critic: Critic | None = None, reference: Any = None, micro_tokens: int = 40
) -> tuple[Batch, dict[str, float]]:
    return AdvantageEstimator(algorithm, critic, reference, temperature=TEMPERATURE, micro_tokens=micro_tokens).complete(batch)


def _of(batch: Batch, field_BT: Tensor | None) -> list[list[float]]:
    """The sampled tokens' part of a field, a list for each trajectory."""
    assert field_BT is not None
    found: list[list[float]] = [[] for _ in range(batch.num_trajectories)]
    for row, owner in enumerate(batch.trajectory_index_B.tolist()):
        found[owner] += [float(field_BT[row, t]) for t in range(field_BT.shape[1]) if batch.loss_mask_BT[row, t]]
    return found


def _outside(batch: Batch, field_BT: Tensor | None) -> float:
    assert field_BT is not None
    return float(field_BT.masked_fill(batch.loss_mask_BT, 0).abs().max())


def _critic(model: Any) -> Critic:
    critic = Critic(Policy(model), shared=False)
    torch.nn.init.normal_(critic.head.linear.weight, std=0.3, generator=torch.Generator().manual_seed(4))
    return critic


def _values(critic: Critic, batch: Batch) -> list[list[float]]:
    """Row by row, through the Hugging Face model alone."""
    weight, bias = critic.head.linear.weight[0], critic.head.linear.bias[0]
    found: list[list[float]] = [[] for _ in range(batch.num_trajectories)]
    with torch.inference_mode():
        for row, length in enumerate(batch.lengths_B.tolist()):
            features = critic.policy.module.base_model(input_ids=batch.ids_BT[row : row + 1, :length]).last_hidden_state[0]
            places = [t for t in range(length) if batch.loss_mask_BT[row, t]]
            found[int(batch.trajectory_index_B[row])] += [float((weight * features[t - 1]).sum() + bias) for t in places]
    return found


def _group_relative(groups: list[int], returns: list[float], *, by_std: bool) -> list[float]:
    advantages = []
    for group, own in zip(groups, returns, strict=True):
        peers = [value for other, value in zip(groups, returns, strict=True) if other == group]
        spread = statistics.stdev(peers) + 1e-6 if by_std and len(peers) > 1 else 1.0
        advantages.append((own - statistics.fmean(peers)) / spread)
    return advantages


GROUPS = [5, 5, 5, 2, 2, 9]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("name", "by_std"), [("grpo", True), ("dapo", True), ("dr_grpo", False)])
def test_advantages_within_a_group(name: str, by_std: bool, rows: int, small_llama: Build, hand_made: Build) -> None:
    batch = hand_made(small_llama(), rows)
    done, summary = _complete(batch, preset(name))
    rewards, advantages = _of(batch, batch.rewards_BT), _of(done, done.advantages_BT)
    expected = _group_relative(GROUPS, [sum(own) for own in rewards], by_std=by_std)
    for got, want in zip(advantages, expected, strict=True):
        assert got == pytest.approx([want] * len(got), abs=1e-6)
    assert advantages[5][0] == 0.0  # alone in its group
    assert _outside(done, done.advantages_BT) == 0
    assert done.returns_BT is None and done.values_BT is None and done.reference_BT is None
    everything = [value for own in advantages for value in own]
    assert summary == {"advantage_std": pytest.approx(statistics.pstdev(everything), rel=1e-5)}


@pytest.mark.parametrize("rows", [1, 3])
def test_values_and_generalised_advantages(rows: int, small_llama: Build, hand_made: Build) -> None:
    """A_t = sum over l of (gamma lam)^l delta_(t+l), the sum written out; the critic is taught A + V."""
    batch, critic = hand_made(small_llama(), rows), _critic(small_llama(1))
    gamma, gae_lambda = 0.9, 0.8
    done, summary = _complete(batch, preset("ppo", gamma=gamma, gae_lambda=gae_lambda, whiten=False), critic)
    values, rewards = _values(critic, batch), _of(batch, batch.rewards_BT)
    returns = []
    for got_values, got_advantages, got_returns, value, reward in zip(
        _of(done, done.values_BT), _of(done, done.advantages_BT), _of(done, done.returns_BT), values, rewards, strict=True
    ):
        assert got_values == pytest.approx(value, abs=1e-5)
        after = [*value[1:], 0.0]
        errors = [reward[t] + gamma * after[t] - value[t] for t in range(len(value))]
        advantages = [sum((gamma * gae_lambda) ** (k - t) * errors[k] for k in range(t, len(value))) for t in range(len(value))]
        assert got_advantages == pytest.approx(advantages, abs=2e-5)
        assert got_returns == pytest.approx([a + v for a, v in zip(advantages, value, strict=True)], abs=2e-5)
        returns += [a + v for a, v in zip(advantages, value, strict=True)]
    expected = [v for own in values for v in own]
    missed = statistics.pvariance([r - v for r, v in zip(returns, expected, strict=True)])
    assert summary["return_mean"] == pytest.approx(statistics.fmean(returns), abs=1e-5)
    assert summary["value_mean"] == pytest.approx(statistics.fmean(expected), abs=1e-5)
    assert summary["explained_variance"] == pytest.approx(1 - missed / statistics.pvariance(returns), abs=1e-4)
    assert max(_outside(done, field) for field in (done.values_BT, done.advantages_BT, done.returns_BT)) == 0


@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_follows_a_truncated_episode(rows: int, bootstrap: bool, small_llama: Build, hand_made: Build) -> None:
    """With gamma and lambda 1 every return of a truncated trajectory is what came plus what the critic expects after its last token, which is
    the state of the last hidden states of its last row; of the others it is what came."""
    batch, critic = hand_made(small_llama(), rows), _critic(small_llama(1))
    truncated = [1, 3, 4]
    last_rows = [max(row for row, owner in enumerate(batch.trajectory_index_B.tolist()) if owner == each) for each in truncated]
    cut = dataclasses.replace(batch, truncated_B=torch.isin(torch.arange(len(batch)), torch.tensor(last_rows)))
    algorithm = preset("ppo", whiten=False, bootstrap_truncated=bootstrap)
    done, _ = _complete(cut, algorithm, critic)
    weight, bias = critic.head.linear.weight[0], critic.head.linear.bias[0]
    for owner, (returns, reward) in enumerate(zip(_of(done, done.returns_BT), _of(batch, batch.rewards_BT), strict=True)):
        after = 0.0
        if owner in truncated and bootstrap:
            row = last_rows[truncated.index(owner)]
            with torch.no_grad():
                features = critic.policy.module.base_model(input_ids=batch.ids_BT[row : row + 1, : batch.lengths_B[row]]).last_hidden_state
            after = float((weight * features[0, -1]).sum().detach() + bias.detach())
            assert abs(after) > 0.01
        assert returns == pytest.approx([sum(reward[t:]) + after for t in range(len(reward))], abs=2e-5)
    plain, _ = _complete(batch, algorithm, critic)
    assert torch.allclose(done.values_BT, plain.values_BT, atol=1e-6) and done.values_BT.shape == plain.values_BT.shape  # type: ignore[arg-type,union-attr]


def test_whitened_advantages_leave_the_returns_alone(small_llama: Build, hand_made: Build) -> None:
    batch, critic = hand_made(small_llama()), _critic(small_llama(1))
    plain, _ = _complete(batch, preset("ppo", whiten=False), critic)
    white, summary = _complete(batch, preset("ppo"), critic)
    values = [value for own in _of(white, white.advantages_BT) for value in own]
    assert statistics.fmean(values) == pytest.approx(0, abs=1e-6) and statistics.stdev(values) == pytest.approx(1, abs=1e-5)
    assert _of(white, white.returns_BT) == _of(plain, plain.returns_BT)
    assert summary["advantage_std"] == pytest.approx(statistics.pstdev(values), rel=1e-5)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_a_divergence_in_the_reward(name: str, small_llama: Build, hand_made: Build) -> None:
    """0.3 times the divergence is taken from the reward of each token, so a trajectory's return is less by 0.3 times its sum."""
    model, other = small_llama(), small_llama(2)
    batch = hand_made(model)
    algorithm = preset("dr_grpo", kl_coef=0.3, kl_mode="reward", divergence=name)
    done, _ = _complete(batch, algorithm, reference=reference_for(Policy(other)))
    expected: list[list[float]] = [[] for _ in GROUPS]
    with torch.inference_mode():
        for row, length in enumerate(batch.lengths_B.tolist()):
            table = torch.log_softmax(other(input_ids=batch.ids_BT[row : row + 1, :length]).logits[0] / TEMPERATURE, dim=-1)
            places = [t for t in range(length) if batch.loss_mask_BT[row, t]]
            expected[row] += [float(table[t - 1, batch.ids_BT[row, t]]) for t in places]
    got = _of(done, done.reference_BT)
    returns = []
    for own, reference, want, reward in zip(
        _of(batch, batch.behavior_logprobs_BT), got, expected, _of(batch, batch.rewards_BT), strict=True
    ):
        assert reference == pytest.approx(want, abs=1e-5)
        apart = torch.tensor(own, dtype=torch.float64) - torch.tensor(want, dtype=torch.float64)
        divergence = {"k1": apart, "k2": apart**2 / 2, "k3": torch.exp(-apart) - 1 + apart}[name]
        returns.append(sum(reward) - 0.3 * float(divergence.sum()))
    advantages = _group_relative(GROUPS, returns, by_std=False)
    assert [own[0] for own in _of(done, done.advantages_BT)] == pytest.approx(advantages, abs=1e-3)
    assert _of(done, done.rewards_BT) == _of(batch, batch.rewards_BT)  # what was earned stays on record


def test_rewards_at_the_end_and_a_divergence_at_its_tokens(small_llama: Build, hand_made: Build) -> None:
    """What a trajectory earned stands at its last token, what it pays for its divergence (k1, by 0.3) where it diverged."""
    batch, critic = hand_made(small_llama(), rows=3), _critic(small_llama(1))
    changes = {
        "gamma": 0.9,
        "gae_lambda": 1.0,
        "whiten": False,
        "reward_placement": "trajectory",
        "kl_coef": 0.3,
        "kl_mode": "reward",
        "divergence": "k1",
    }
    done, _ = _complete(batch, preset("ppo", **changes), critic, reference_for(Policy(small_llama(2))))
    columns = (_of(done, field) for field in (batch.rewards_BT, batch.behavior_logprobs_BT, done.reference_BT, done.returns_BT))
    for reward, own, reference, returns in zip(*columns, strict=True):
        paid = [0.3 * (r - o) for o, r in zip(own, reference, strict=True)]
        paid[-1] += sum(reward)
        discounted = [sum(0.9 ** (k - t) * paid[k] for k in range(t, len(paid))) for t in range(len(paid))]
        assert returns == pytest.approx(discounted, abs=2e-5)  # with lam 1 the critic is taught what came


def test_a_divergence_in_the_loss_leaves_the_advantages(small_llama: Build, hand_made: Build) -> None:
    batch = hand_made(small_llama())
    plain, _ = _complete(batch, preset("grpo"))
    judged, _ = _complete(batch, preset("grpo", kl_coef=0.3), reference=reference_for(Policy(small_llama(2))))
    assert _of(judged, judged.advantages_BT) == _of(plain, plain.advantages_BT)
    assert judged.reference_BT is not None and _outside(judged, judged.reference_BT) == 0


class _Says(Critic):
    """A critic that says given numbers."""

    def __init__(self, numbers: list[float]) -> None:
        self._numbers = numbers

    def values(self, ids_BT: Tensor, mask_BT: Tensor, lengths_B: Tensor, max_tokens: int) -> Tensor:
        return torch.tensor(self._numbers)


@pytest.mark.parametrize(
    ("rewards", "said", "explained"),
    [
        ([1.0, 3.0], [1.0, 3.0], 1.0),
        ([1.0, 3.0], [0.0, 0.0], 0.0),
        ([1.0, 3.0], [5.0, 5.0], 0.0),  # the same for all explains nothing, wherever it lies
        ([1.0, 3.0], [1.5, 2.5], 0.75),  # misses by -0.5 and 0.5: a variance of 0.25, of the returns' 1
        ([1.0, 3.0], [3.0, 1.0], -3.0),  # misses by -2 and 2: a variance of 4
        ([2.0, 2.0], [0.0, 1.0], 0.0),  # nothing to explain
    ],
)
def test_explained_variance_by_hand(rewards: list[float], said: list[float], explained: float) -> None:
    """Two trajectories of a single token: the return of each is its reward, whatever the critic says."""
    ids = torch.tensor([[4, 7], [4, 8]])
    mask = torch.tensor([[False, True], [False, True]])
    paid = torch.zeros(2, 2, dtype=torch.float64)
    paid[:, 1] = torch.tensor(rewards, dtype=torch.float64)
    order = torch.tensor([0, 1])
    batch = Batch(ids, mask, torch.zeros(2, 2), paid, mask, torch.tensor([2, 2]), order, order)
    done, summary = _complete(batch, preset("ppo", whiten=False), _Says(said))
    assert summary["explained_variance"] == pytest.approx(explained)
    assert summary["value_mean"] == pytest.approx(sum(said) / 2) and summary["return_mean"] == pytest.approx(sum(rewards) / 2)
    assert done.returns_BT is not None and done.returns_BT[:, 1].tolist() == pytest.approx(rewards)
    assert done.values_BT is not None and done.values_BT[:, 1].tolist() == pytest.approx(said)
    assert dataclasses.replace(done, advantages_BT=None, returns_BT=None, values_BT=None) == batch


# Truncated importance sampling.


@pytest.mark.parametrize("rows", [1, 3])
def test_old_logprobs_are_the_policys_and_behavior_logprobs_the_samplers(rows: int, small_llama: Build, hand_made: Build) -> None:
    """The sampler's log-probs are off by up to 0.6; those of the policy are computed row by row through the Hugging Face model."""
    model = small_llama()
    batch = hand_made(model, rows)
    corrected = preset("grpo", importance_cap=2.0)
    estimator = AdvantageEstimator(corrected, None, None, temperature=TEMPERATURE, micro_tokens=40, policy=Policy(model))
    completed, _ = estimator.complete(batch)
    expected = torch.zeros(batch.ids_BT.shape)
    with torch.inference_mode():
        for row, length in enumerate(batch.lengths_B.tolist()):
            table = torch.log_softmax(model(input_ids=batch.ids_BT[row : row + 1, :length]).logits[0].float() / TEMPERATURE, dim=-1)
            for place in range(1, length):
                expected[row, place] = table[place - 1, batch.ids_BT[row, place]] * batch.loss_mask_BT[row, place]
    assert completed.old_logprobs_BT is not None and completed.old_BT is completed.old_logprobs_BT
    torch.testing.assert_close(completed.old_logprobs_BT, expected, rtol=0, atol=1e-4)
    assert torch.equal(completed.behavior_logprobs_BT, batch.behavior_logprobs_BT) and _outside(completed, completed.old_BT) == 0
    assert float((completed.old_BT - completed.behavior_logprobs_BT).abs().max()) > 0.3
    plain, _ = _complete(batch, preset("grpo"))
    assert plain.old_logprobs_BT is None and plain.old_BT is plain.behavior_logprobs_BT


def test_the_correction_needs_the_policy() -> None:
    with pytest.raises(BadInput, match=r"algorithm\.importance_cap needs the policy"):
        AdvantageEstimator(preset("grpo", importance_cap=2.0), None, None, temperature=1.0, micro_tokens=40)
