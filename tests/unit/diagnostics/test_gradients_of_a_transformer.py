"""The decomposition of a small transformer against plain backward passes, row by row; which parameters; and that the model is left alone."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers as hf

from tether.algorithms.batch import Batch
from tether.algorithms.objective import AGGREGATIONS
from tether.algorithms.presets import Algorithm, preset
from tether.core.errors import BadInput, DivergedModel
from tether.diagnostics.buckets import split_halves
from tether.diagnostics.gradients import GradientDecomposition, agreement, decompose_gradients
from tether.models.logprobs import checkpointed
from tether.models.lora import add_lora
from tether.models.policy import Policy
from tether.training.learner import Learner, Rates
from tether.training.settings import LearnerSettings

WORDS = 23
VARIANCES = {5: 0.3, 2: 0.1, 9: 0.2}
GROUPS = (5, 5, 5, 2, 2, 9, 9, 9, 9)
ROW_OWNERS = (0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 8)
TEMPERATURE = 0.8


@pytest.fixture
def llama() -> Callable[[], Any]:
    """Two layers of width 16 whose weights are large enough that log-probs differ."""

    def build() -> Any:
        torch.manual_seed(0)
        config = hf.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        model = hf.LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(6)
        return model

    return build


def log_table(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(model(input_ids=ids[None]).logits[0].float() / TEMPERATURE, dim=-1)


def hand_made(model: Any) -> Batch:
    """Nine trajectories of three groups, two of them in two rows; the sampler was another, so that some ratios are clipped."""
    draw = torch.Generator().manual_seed(5)
    shape = (len(ROW_OWNERS), 12)
    lengths = torch.randint(6, 13, (shape[0],), generator=draw)
    ids = torch.randint(0, WORDS, shape, generator=draw)
    places = torch.arange(12)
    mask = (places >= 2) & (places < lengths[:, None]) & (torch.rand(shape, generator=draw) < 0.7)
    mask[:, 3] = True
    last = (places == 3).expand(shape)
    noise, rewards = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw).double() * last
    advantages, reference = torch.randn(shape, generator=draw) * mask, torch.randn(shape, generator=draw)
    logprobs = torch.zeros(shape)
    with torch.no_grad():
        for row, length in enumerate(lengths.tolist()):
            logprobs[row, 1:length] = log_table(model, ids[row, :length])[:-1].gather(1, ids[row, 1:length, None])[:, 0]
    owners = torch.tensor(ROW_OWNERS)
    return Batch(
        ids,
        mask,
        (logprobs + 0.4 * noise) * mask,
        rewards,
        last & mask,
        lengths,
        owners,
        torch.tensor(GROUPS)[owners],
        advantages_BT=advantages,
        reference_BT=(logprobs + 0.5 * reference) * mask,
    )


RULES = tuple(AGGREGATIONS)
BUDGET = 40


def weights_of(batch: Batch, members: Sequence[int], rule: str) -> list[float]:
    """The weight of every row's tokens in a minibatch of these trajectories; 0 for others."""
    counts = {owner: int(batch.loss_mask_BT[batch.trajectory_index_B == owner].sum()) for owner in members}
    each = {
        "token_mean": dict.fromkeys(members, 1 / sum(counts.values())),
        "sequence_mean_token_mean": {owner: 1 / count / len(members) for owner, count in counts.items()},
        "sequence_mean_token_sum": dict.fromkeys(members, 1 / BUDGET / len(members)),
    }[rule]
    return [each.get(owner, 0.0) for owner in batch.trajectory_index_B.tolist()]


def by_hand(model: Any, batch: Batch, weights: Sequence[float], names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """Gradients of PPO's clipped loss, k2, entropy and log-prob, token by token, from the model's own forward pass of each row."""
    sums: dict[str, Any] = dict.fromkeys(("task", "kl", "entropy", "score"), torch.zeros(()))
    assert batch.advantages_BT is not None
    assert batch.reference_BT is not None
    for row, (length, weight) in enumerate(zip(batch.lengths_B.tolist(), weights, strict=True)):
        if not weight:
            continue
        table = log_table(model, batch.ids_BT[row, :length])
        for place in batch.loss_mask_BT[row].nonzero()[:, 0].tolist():
            new, advantage = table[place - 1, batch.ids_BT[row, place]], float(batch.advantages_BT[row, place])
            ratio = (new - batch.behavior_logprobs_BT[row, place]).exp()
            sums["task"] = sums["task"] - weight * min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            sums["kl"] = sums["kl"] + weight * 0.3 * (new - batch.reference_BT[row, place]).square() / 2
            sums["entropy"] = sums["entropy"] + weight * 0.05 * (table[place - 1].exp() * table[place - 1]).sum()
            sums["score"] = sums["score"] + weight * new
    parameters = [parameter for name, parameter in model.named_parameters() if names is None or name in names]
    return {
        name: torch.cat([part.flatten() for part in torch.autograd.grad(value, parameters, retain_graph=True)])
        for name, value in sums.items()
    }


def cosine(one: torch.Tensor, other: torch.Tensor) -> Any:
    return pytest.approx(float(one @ other / one.norm() / other.norm()), abs=1e-4)


def full(rule: str) -> Algorithm:
    """An algorithm with all three terms."""
    constant = rule == "sequence_mean_token_sum"
    return preset("dr_grpo", aggregation=rule, constant_length=constant, entropy_coef=0.05, kl_coef=0.3, divergence="k2")


def decomposed(model: Any, batch: Batch, algorithm: Algorithm | None = None, **more: Any) -> GradientDecomposition:
    options = {"temperature": TEMPERATURE, "micro_tokens": 64, "max_tokens": BUDGET, **more}
    variances = options.pop("variances", VARIANCES)
    return decompose_gradients(Policy(model), batch, algorithm or full("token_mean"), variances, **options)


@pytest.mark.parametrize("rule", RULES)
def test_against_plain_backward_passes(llama: Callable[[], Any], rule: str) -> None:
    model = llama()
    batch = hand_made(model)

    found = decomposed(model, batch, full(rule), num_buckets=2, seed=4)

    whole = by_hand(model, batch, weights_of(batch, range(9), rule))
    total = whole["task"] + whole["kl"] + whole["entropy"]
    assert found.total_norm == pytest.approx(float(total.norm()), rel=1e-4)
    assert (found.has_kl, found.has_entropy, found.num_parameters) == (True, True, len(total))
    assert [row.bucket.groups for row in found.buckets] == [(2, 9), (5,)]
    for row, members in zip(found.buckets, ([3, 4, 5, 6, 7, 8], [0, 1, 2]), strict=True):
        own = by_hand(model, batch, weights_of(batch, members, rule))
        regulariser = own["kl"] + own["entropy"]
        expected = [own["task"], own["kl"], own["entropy"], regulariser, own["task"] + regulariser]
        norms = [row.task_norm, row.kl_norm, row.entropy_norm, row.regulariser_norm, row.total_norm]
        assert norms == pytest.approx([float(vector.norm()) for vector in expected], rel=1e-4)
        assert row.with_bucket.task == cosine(own["task"], expected[-1])
        assert row.with_bucket.kl == cosine(own["kl"], expected[-1])
        assert row.with_bucket.entropy == cosine(own["entropy"], expected[-1])
        assert row.with_batch.task == cosine(own["task"], total)
        assert row.with_batch.kl == cosine(own["kl"], total)
        assert row.with_batch.entropy == cosine(own["entropy"], total)
        assert row.task_with_regulariser == cosine(own["task"], regulariser)
        assert row.num_trajectories == len(members)
        assert row.num_tokens == int(batch.loss_mask_BT[torch.isin(batch.trajectory_index_B, torch.tensor(members))].sum())


def test_the_total_is_the_gradient_of_the_learners_step(llama: Callable[[], Any]) -> None:
    model = llama()
    batch = hand_made(model)

    found = decomposed(model, batch)

    settings = LearnerSettings(update_batch=9)
    learner = Learner(Policy(model), full("token_mean"), settings, temperature=TEMPERATURE, max_tokens=BUDGET)
    assert learner.update(batch, [torch.arange(9)], 1.0, Rates(1e-9))["grad_norm"] == pytest.approx(found.total_norm, rel=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_halves_against_plain_backward_passes(llama: Callable[[], Any], rule: str) -> None:
    """Each half is its own minibatch; the odd member of a group of three is in neither, but counts in how much the bucket holds."""
    model = llama()
    batch = hand_made(model)

    row = decomposed(model, batch, full(rule), num_buckets=2, seed=4).buckets[1]

    halves = split_halves([5, 5, 5], seed=4)
    one, other = (by_hand(model, batch, weights_of(batch, half, rule))["task"] for half in (halves.first, halves.second))
    tokens = [int(batch.loss_mask_BT[batch.trajectory_index_B == owner].sum()) for owner in range(3)]
    mass = tokens if rule == "token_mean" else [1, 1, 1]
    shares = [sum(mass[owner] for owner in half) / sum(mass) for half in (halves.first, halves.second)]
    noise = float((one - other).square().sum()) * shares[0] * shares[1] / sum(shares)
    assert row.halves is not None
    assert row.halves.signal == pytest.approx(float(one @ other), rel=1e-3, abs=1e-6)
    assert row.halves.noise == pytest.approx(noise, rel=1e-3)


def test_the_bound_against_plain_backward_passes(llama: Callable[[], Any]) -> None:
    model = llama()
    batch = hand_made(model)

    found = decomposed(model, batch, num_buckets=1).buckets[0].bound

    rewards = torch.zeros(9, dtype=torch.float64).index_add_(0, batch.trajectory_index_B, batch.rewards_BT.sum(dim=1))
    groups = torch.tensor(GROUPS)
    advantages = rewards - torch.stack([rewards[groups == group].mean() for group in groups])
    scores = [by_hand(model, batch, (batch.trajectory_index_B == owner).float().tolist())["score"] for owner in range(9)]
    assert found is not None
    assert found.reward_variance == pytest.approx(float(advantages.square().mean()))
    assert found.mean_square_score == pytest.approx(sum(float(score @ score) for score in scores) / 9, rel=1e-4)
    mean = sum(float(advantage) * score for advantage, score in zip(advantages, scores, strict=True)) / 9
    assert found.gradient_norm == pytest.approx(float(mean.norm()), rel=1e-4)
    assert found.limit == pytest.approx(math.sqrt(found.reward_variance * found.mean_square_score))
    assert found.tightness == pytest.approx(found.gradient_norm / found.limit)


def test_without_bound_there_is_none(llama: Callable[[], Any]) -> None:
    model = llama()

    assert [row.bound for row in decomposed(model, hand_made(model), with_bound=False).buckets] == [None] * 3


def numbers(found: GradientDecomposition) -> list[float]:
    def flat(value: Any) -> list[float]:
        if isinstance(value, dict):
            return [number for part in value.values() for number in flat(part)]
        return [number for part in value for number in flat(part)] if isinstance(value, tuple | list) else [float(value)]

    return flat(dataclasses.asdict(found))


@pytest.mark.parametrize("micro_tokens", [1, 30, 1000])
def test_micro_tokens_change_nothing(llama: Callable[[], Any], micro_tokens: int) -> None:
    model = llama()
    batch = hand_made(model)

    found = [numbers(decomposed(model, batch, micro_tokens=micro, seed=2)) for micro in (micro_tokens, 64)]

    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-6)


def test_gradient_checkpointing_changes_nothing(llama: Callable[[], Any]) -> None:
    model = llama()
    batch = hand_made(model)

    plain = decomposed(model, batch)
    with checkpointed(model):
        recomputed = decomposed(model, batch)

    assert numbers(recomputed) == pytest.approx(numbers(plain), rel=1e-4, abs=1e-7)


def test_the_seed_moves_the_halves_alone(llama: Callable[[], Any]) -> None:
    model = llama()
    batch = hand_made(model)

    found = [decomposed(model, batch, num_buckets=1, with_bound=False, seed=seed).buckets[0] for seed in (0, 0, 1)]

    assert found[0] == found[1]
    assert found[0].halves != found[2].halves
    assert found[2].task_norm == pytest.approx(found[0].task_norm, rel=1e-5)


@pytest.mark.parametrize("parameters", ["all", "last"])
def test_the_model_is_left_as_it_was(llama: Callable[[], Any], parameters: str) -> None:
    model = llama().train()
    batch = hand_made(model)
    frozen, *others = dict(model.named_parameters()).values()
    frozen.requires_grad_(False)
    for number, parameter in enumerate(others):
        if number % 2:
            parameter.grad = torch.full_like(parameter, 0.5 * number)
    gradients = [(parameter.grad, None if parameter.grad is None else parameter.grad.clone()) for parameter in model.parameters()]
    weights = [parameter.detach().clone() for parameter in model.parameters()]

    with torch.no_grad():
        decomposed(model, batch, parameters=parameters)
        assert not torch.is_grad_enabled()

    for parameter, (was, copy) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is was
        assert was is None or (copy is not None and torch.equal(was, copy))
    assert all(torch.equal(parameter, weight) for parameter, weight in zip(model.parameters(), weights, strict=True))
    assert [parameter.requires_grad for parameter in model.parameters()] == [False] + [True] * len(others)
    assert model.training


def test_the_model_is_left_as_it_was_after_an_error(llama: Callable[[], Any]) -> None:
    model = llama().train()
    batch = hand_made(model)
    batch = dataclasses.replace(batch, behavior_logprobs_BT=batch.behavior_logprobs_BT.masked_fill(batch.loss_mask_BT, math.nan))

    with pytest.raises(DivergedModel, match=r"gradients of groups \(2,\) are not finite"):
        decomposed(model, batch, parameters="last")

    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert model.training


def test_dropout_is_off(llama: Callable[[], Any]) -> None:
    model = llama()
    batch = hand_made(model)
    found = []
    for rate in (0.0, 0.5):
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = rate
        found.append(numbers(decomposed(model.train(), batch, parameters="last")))

    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "reference"),
    [({"kl_coef": 0.3}, False), ({"kl_coef": 0.0}, True), ({"kl_coef": 0.3, "kl_mode": "reward"}, True)],
    ids=["no reference", "no weight", "in the reward"],
)
def test_without_kl(llama: Callable[[], Any], changes: dict[str, Any], reference: bool) -> None:
    model = llama()
    batch = hand_made(model)
    batch = batch if reference else dataclasses.replace(batch, reference_BT=None)

    found = decomposed(model, batch, full("token_mean").model_copy(update=changes), parameters="last")

    assert (found.has_kl, found.has_entropy) == (False, True)
    for row in found.buckets:
        assert (row.kl_norm, row.with_bucket.kl, row.with_batch.kl) == (0.0, None, None)
        assert row.regulariser_norm == row.entropy_norm > 0


def test_without_entropy(llama: Callable[[], Any]) -> None:
    model = llama()

    found = decomposed(model, hand_made(model), full("token_mean").model_copy(update={"entropy_coef": 0.0}), parameters="last")

    assert (found.has_kl, found.has_entropy) == (True, False)
    assert all(row.entropy_norm == 0.0 and row.regulariser_norm == row.kl_norm > 0 for row in found.buckets)


def test_adapters_are_all_there_is(llama: Callable[[], Any]) -> None:
    model = llama()
    add_lora(model, rank=2, alpha=4, targets=["q_proj"])

    found = decomposed(model, hand_made(model), with_bound=False)
    last = decomposed(model, hand_made(model), with_bound=False, parameters="last")
    assert (found.num_parameters, last.num_parameters) == (2 * 2 * (16 + 16), 2 * (16 + 16))
    assert all(row.task_norm > 0 for row in found.buckets)


def test_some_parameters_against_plain_backward_passes(llama: Callable[[], Any]) -> None:
    model = llama()
    batch = hand_made(model)

    (row,) = decomposed(model, batch, num_buckets=1, parameters="last").buckets

    last = [name for name, _ in model.named_parameters() if name.startswith("model.layers.1.") or name == "model.norm.weight"]
    own = by_hand(model, batch, weights_of(batch, range(9), "token_mean"), last)
    assert [row.task_norm, row.kl_norm] == pytest.approx([float(own[name].norm()) for name in ("task", "kl")], rel=1e-4)


def test_agreement_of_cheap_with_exact(llama: Callable[[], Any]) -> None:
    model = llama()
    batch = hand_made(model)
    exact = decomposed(model, batch, with_bound=False)
    cheap = decomposed(model, batch, parameters="last", with_bound=False)

    found = agreement(exact, cheap)

    assert list(found) == ["task_norm", "regulariser_norm", "dominance", "snr"]
    ratios = [other.task_norm / one.task_norm for one, other in zip(exact.buckets, cheap.buckets, strict=True)]
    assert found["task_norm"].ratio == pytest.approx(sum(ratios) / 3)
    assert 0 < sum(ratios) / 3 < 1
    assert agreement(exact, exact)["dominance"].correlation == pytest.approx(1.0)
    with pytest.raises(BadInput, match="other buckets"):
        agreement(exact, dataclasses.replace(cheap, buckets=cheap.buckets[:2]))


def test_bad_batches(llama: Callable[[], Any]) -> None:
    model = llama()
    batch = hand_made(model)

    with pytest.raises(BadInput, match="with its advantages"):
        decomposed(model, dataclasses.replace(batch, advantages_BT=None))
    with pytest.raises(BadInput, match="at least one trajectory"):
        decomposed(model, batch.rows(torch.tensor([], dtype=torch.long)), variances={1: 1.0})
    with pytest.raises(BadInput, match="no reward variance was given for group 2"):
        decomposed(model, batch, variances={5: 0.1, 9: 0.2})
    with pytest.raises(BadInput, match="'dr_grpo' divides by the token budget of a response; give max_tokens"):
        decomposed(model, batch, preset("dr_grpo"), max_tokens=None)
