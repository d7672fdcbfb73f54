"""The gradient of an update against the papers' formulas, written out here token by token; nothing of tether.algorithms computes them.

Six trajectories of uneven length, with advantages, values, returns and reference log-probs drawn at random. The expected gradient comes
from autograd on this file's own loss, one row at a time, without packing or micro-batches.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tether.algorithms.batch import Batch
from tether.algorithms.presets import Algorithm, preset
from tether.models.critic import Critic
from tether.models.policy import Policy
from tether.training.learner import Learner, Rates
from tether.training.settings import CriticSettings, LearnerSettings

TEMPERATURE = 0.8
BUDGET = 50
FREE = 1e9
"""A bound on the gradient that is never reached."""
BOTH = Rates(policy=1e-3, critic=1e-3)


@pytest.fixture
def small_llama(small_llama: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The model where updates are computed: on the GPU if there is one."""
    return lambda seed=0: small_llama(seed).to(device)


class Token(NamedTuple):
    """A sampled token, and what its row's model says of it."""

    trajectory: int
    logprob: Tensor
    entropy: Tensor
    feature: Tensor
    sampled: float
    advantage: float
    before: float
    returned: float
    reference: float


def _filled(batch: Batch) -> Batch:
    """The batch with columns drawn at random; no formula may rely on advantages that are the same all along a trajectory."""
    draw = torch.Generator().manual_seed(1)
    mask = batch.loss_mask_BT

    def column(scale: float) -> Tensor:
        return scale * torch.randn(mask.shape, generator=draw).to(mask.device) * mask

    return dataclasses.replace(
        batch,
        advantages_BT=column(1.5),
        returns_BT=column(1.0),
        values_BT=column(1.0),
        reference_BT=(batch.behavior_logprobs_BT + column(0.5)) * mask,
    )


def _tokens(model: Any, backbone: Any, batch: Batch) -> list[Token]:
    """Every sampled token, its numbers from a forward pass over its own row alone; `trunk` gives the critic's features."""
    found = []
    fields = [batch.behavior_logprobs_BT, batch.advantages_BT, batch.values_BT, batch.returns_BT, batch.reference_BT]
    for row, length in enumerate(batch.lengths_B.tolist()):
        ids = batch.ids_BT[row : row + 1, :length]
        logits = model(input_ids=ids, use_cache=False).logits[0] / TEMPERATURE
        features = backbone.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        for place in range(length):
            if batch.loss_mask_BT[row, place]:
                weights = torch.exp(logits[place - 1]) / torch.exp(logits[place - 1]).sum()
                numbers = [float(field[row, place]) for field in fields if field is not None]
                entropy = -(weights * weights.log()).sum()
                logprob = weights[batch.ids_BT[row, place]].log()
                found.append(Token(int(batch.trajectory_index_B[row]), logprob, entropy, features[place - 1], *numbers))
    return found


def _policy_loss(token: Token, low: float, high: float, dual: float | None) -> Tensor:
    """PPO's clipped surrogate by cases: gains are capped at 1 + high, losses floored at 1 - low, and capped at the dual clip."""
    ratio = torch.exp(token.logprob - token.sampled)
    if token.advantage >= 0:
        return -token.advantage * (ratio if ratio < 1 + high else ratio.detach() * 0 + 1 + high)
    if ratio < 1 - low:
        ratio = ratio.detach() * 0 + 1 - low
    if dual is not None and ratio > dual:
        ratio = ratio.detach() * 0 + dual
    return -token.advantage * ratio


def _divergence(token: Token, name: str) -> Tensor:
    difference = token.logprob - token.reference
    return {"k1": difference, "k2": difference * difference / 2, "k3": torch.exp(-difference) - 1 + difference}[name]


def _value_loss(token: Token, head: Any, clip: float) -> Tensor:
    """Half the square, of the value or of the bound it has crossed, whichever is further from the return."""
    value = (head.linear.weight[0] * token.feature).sum() + head.linear.bias[0]
    free = (value - token.returned) ** 2
    bound = token.before + math.copysign(clip, value.item() - token.before)
    if abs(value.item() - token.before) > clip and (bound - token.returned) ** 2 > free.item():
        free = free.detach() * 0 + (bound - token.returned) ** 2
    return free / 2


def _aggregated(losses: Sequence[Tensor], tokens: Sequence[Token], rule: str) -> Tensor:
    owners = sorted({token.trajectory for token in tokens})
    each = [[loss for loss, token in zip(losses, tokens, strict=True) if token.trajectory == owner] for owner in owners]
    if rule == "token_mean":
        return torch.stack(list(losses)).mean()
    if rule == "sequence_mean_token_mean":
        return torch.stack([torch.stack(part).mean() for part in each]).mean()
    return torch.stack([torch.stack(part).sum() / (BUDGET if rule == "constant" else 1) for part in each]).mean()


RULES = {"ppo": "token_mean", "grpo": "sequence_mean_token_mean", "dapo": "token_mean", "dr_grpo": "constant"}
ENTROPY = {"ppo": 0.001, "grpo": 0.001, "dapo": 0.0, "dr_grpo": 0.001}


class Case(NamedTuple):
    """An algorithm, departures from it, and what the formulas then say."""

    name: str
    changes: dict[str, Any] = {}
    scale: float = 1.0
    rule: str = ""
    low: float = 0.2
    high: float = 0.28
    dual: float | None = None
    kl: tuple[float, str] = (0.0, "k3")
    entropy: float | None = None


CASES = {
    "ppo": Case("ppo"),
    "grpo": Case("grpo"),
    "dapo": Case("dapo"),
    "dr_grpo": Case("dr_grpo"),
    "scaled": Case("grpo", scale=0.375),
    "scaled dapo": Case("dapo", scale=0.375),
    "other clips": Case("dapo", {"clip_low": 0.05, "clip_high": 0.4}, low=0.05, high=0.4),
    "dual clip": Case("grpo", {"dual_clip": 1.2}, dual=1.2),
    "k1": Case("grpo", {"kl_coef": 0.3, "divergence": "k1"}, kl=(0.3, "k1")),
    "k2": Case("dr_grpo", {"kl_coef": 0.3, "divergence": "k2"}, kl=(0.3, "k2")),
    "k3": Case("dapo", {"kl_coef": 0.3}, kl=(0.3, "k3")),
    "kl in the reward is not in the loss": Case("grpo", {"kl_coef": 0.3, "kl_mode": "reward"}),
    "entropy": Case("dapo", {"entropy_coef": 0.7}, entropy=0.7),
    "sum without a constant": Case("dr_grpo", {"constant_length": False}, rule="sequence_mean_token_sum"),
    "another rule": Case("ppo", {"aggregation": "sequence_mean_token_mean"}, rule="sequence_mean_token_mean"),
}


def _expected_policy_loss(tokens: Sequence[Token], case: Case) -> Tensor:
    entropy = ENTROPY[case.name] if case.entropy is None else case.entropy
    losses = [
        _policy_loss(token, case.low, case.high, case.dual) - entropy * token.entropy + case.kl[0] * _divergence(token, case.kl[1])
        for token in tokens
    ]
    return case.scale * _aggregated(losses, tokens, case.rule or RULES[case.name])


def _learner(model: Any, algorithm: Algorithm, critic: Critic | None = None, **critic_settings: Any) -> Learner:
    settings = LearnerSettings(learning_rate=1e-3, max_grad_norm=FREE)
    chosen = CriticSettings(**critic_settings)
    return Learner(Policy(model), algorithm, settings, temperature=TEMPERATURE, max_tokens=BUDGET, critic=critic, critic_settings=chosen)


def _update(learner: Learner, batch: Batch, scale: float = 1.0, rates: Rates = BOTH) -> dict[str, float]:
    return learner.update(batch, [torch.arange(batch.num_trajectories, device=batch.ids_BT.device)], scale, rates)


def _gradients(learner: Learner, name: str) -> list[Tensor]:
    """Of the first update: Adam's first moment is then a tenth of the gradient."""
    state: Any = learner.state()["optimizers"]
    moments = state[name]["adam"]["state"]
    return [moments[index]["exp_avg"] / 0.1 for index in sorted(moments)]


def _autograd(loss: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    return [part for part in torch.autograd.grad(loss, list(parameters), allow_unused=True) if part is not None]


def _norm(parts: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(part.square().sum()) for part in parts))


def _assert_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    size = _norm(want)
    assert size > 1e-3
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-6 * size)


WHOLE_OR_CUT = [(name, 1) for name in CASES] + [(name, 3) for name in ("dapo", "grpo", "dr_grpo", "sum without a constant")]


@pytest.mark.parametrize(("name", "rows"), WHOLE_OR_CUT)
def test_the_policys_gradient(name: str, rows: int, small_llama: Callable[..., Any], hand_made: Callable[..., Batch]) -> None:
    case, model = CASES[name], small_llama()
    batch = _filled(hand_made(model, rows))
    other = copy.deepcopy(model)
    loss = _expected_policy_loss(_tokens(other, other, batch), case)
    expected = _autograd(loss, other.parameters())
    learner = _learner(model, preset(case.name, **case.changes))
    metrics = _update(learner, batch, case.scale)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    _assert_same(_gradients(learner, "policy"), expected)
    assert metrics["grad_norm"] == pytest.approx(_norm(expected), rel=1e-4)


def test_the_cases_reach_every_branch(small_llama: Callable[..., Any], hand_made: Callable[..., Batch]) -> None:
    """The data is on both sides of each clip, so that a clip in the wrong place would be seen."""
    model = small_llama()
    batch = _filled(hand_made(model))
    metrics = _update(_learner(model, preset("grpo", dual_clip=1.2)), batch)
    assert min(metrics["clip_low"], metrics["clip_high"], metrics["clip_dual"]) > 0.05
    assert metrics["clip_low"] + metrics["clip_high"] + metrics["clip_dual"] < 0.8
    assert metrics["kl_reference"] > 0.01


def _with_head(model: Any) -> Critic:
    """A critic whose head says something."""
    critic = Critic(Policy(model), shared=False)
    with torch.no_grad():
        critic.head.linear.weight.copy_(0.3 * torch.randn(1, 32, generator=torch.Generator().manual_seed(2)))
        critic.head.linear.bias.fill_(0.25)
    return critic


@pytest.mark.parametrize("clip", [0.1, 0.5, 50.0])
def test_the_gradient_of_a_critic_of_its_own(clip: float, small_llama: Callable[..., Any], hand_made: Callable[..., Batch]) -> None:
    """The plain mean over tokens, whatever the policy's aggregation and loss scale; the policy's gradient knows nothing of it."""
    policy, backbone = small_llama(0), small_llama(1)
    batch = _filled(hand_made(policy))
    critic = _with_head(backbone)
    other, head, judged = copy.deepcopy(backbone), copy.deepcopy(critic.head), copy.deepcopy(policy)
    tokens = _tokens(judged, other, batch)
    losses = [_value_loss(token, head, clip) for token in tokens]
    value_loss = torch.stack(losses).mean()
    expected = _autograd(value_loss, [*other.model.parameters(), *head.parameters()])
    learner = _learner(policy, preset("ppo", aggregation="sequence_mean_token_sum"), critic, value_clip=clip, coef=3.0)
    metrics = _update(learner, batch, scale=0.5)
    assert metrics["value_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    _assert_same([*_gradients(learner, "critic"), *_gradients(learner, "head")], expected)
    assert metrics["critic_grad_norm"] == pytest.approx(_norm(expected), rel=1e-4)
    case = Case("ppo", scale=0.5, rule="sequence_mean_token_sum")
    new_context = copy.deepcopy(judged)
    policy_loss = _expected_policy_loss(_tokens(new_context, new_context, batch), case)
    _assert_same(_gradients(learner, "policy"), _autograd(policy_loss, new_context.parameters()))
    assert metrics["loss"] == pytest.approx(policy_loss.item(), rel=1e-4)


@pytest.mark.parametrize(("scale", "warming_up"), [(0.5, False), (0.5, True)])
def test_the_gradient_of_a_shared_trunk(
    scale: float, warming_up: bool, small_llama: Callable[..., Any], hand_made: Callable[..., Batch]
) -> None:
    """The value loss is added with its coefficient; in the critic's first steps it is all there is."""
    model = small_llama()
    batch = _filled(hand_made(model))
    split = Policy(model)
    critic = Critic(split, shared=True)
    critic.head.load_state_dict(_with_head(small_llama()).head.state_dict())
    other, head = copy.deepcopy(model), copy.deepcopy(critic.head)
    tokens = _tokens(other, other, batch)
    value_loss = torch.stack([_value_loss(token, head, 0.5) for token in tokens]).mean()
    loss = 0.25 * value_loss + (0.0 if warming_up else _expected_policy_loss(tokens, Case("ppo", scale=scale)))
    expected = _autograd(loss, [*head.parameters(), *other.parameters()])
    settings = LearnerSettings(learning_rate=1e-3, max_grad_norm=FREE)
    learner = Learner(
        split,
        preset("ppo"),
        settings,
        temperature=TEMPERATURE,
        max_tokens=BUDGET,
        critic=critic,
        critic_settings=CriticSettings(shared=True, coef=0.25),
    )
    metrics = _update(learner, batch, scale, Rates(0.0 if warming_up else 1e-3, 1e-3))
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["value_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    _assert_same(_gradients(learner, "head"), expected[:2])
    if not warming_up:
        _assert_same(_gradients(learner, "policy"), expected[2:])
