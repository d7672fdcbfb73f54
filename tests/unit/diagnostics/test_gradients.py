"""The decomposition against gradients worked out by hand, for a policy that is a table of logits; and which parameters are meant."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

from tether.algorithms.batch import Batch
from tether.algorithms.presets import Algorithm, preset
from tether.core.errors import BadInput, UnknownName
from tether.diagnostics.buckets import split_halves
from tether.diagnostics.gradients import Bound, GradientDecomposition, choose_parameters, decompose_gradients
from tether.models.policy import Policy

PLAIN = preset("dr_grpo", constant_length=False, entropy_coef=0.0)
"""Mean over trajectories of the sum over tokens, with A = R - mean: the gradient of the paper's section 3.2."""
ROOT8 = math.sqrt(1 / 8)


class Table(hf.PreTrainedModel):
    """A policy that sees one word back: the logits after word x are row x of a table."""

    config_class = hf.PretrainedConfig
    base_model_prefix = "backbone"

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        super().__init__(hf.PretrainedConfig(vocab_size=len(rows), tie_word_embeddings=False))
        self.backbone = OneHot(len(rows))
        self.lm_head = torch.nn.Linear(len(rows), len(rows), bias=False)
        self.lm_head.weight.data = torch.tensor(rows, dtype=torch.float32).T.contiguous()

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(self, **inputs: Any) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.backbone(**inputs).last_hidden_state))


class OneHot(torch.nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.register_buffer("eye", torch.eye(words))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self.eye[input_ids])


def pairs(rows: Sequence[tuple[int, int, int, float]], logprobs: Sequence[float], reference: Sequence[float] | None = None) -> Batch:
    """One-word answers: (group, prompt word, answer, reward); the advantage is the reward less its group's mean."""
    groups = torch.tensor([row[0] for row in rows])
    rewards = torch.tensor([row[3] for row in rows], dtype=torch.float64)
    means = torch.stack([rewards[groups == group].mean() for group in groups])

    def second(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.zeros_like(values), values], dim=1)

    return Batch(
        ids_BT=torch.tensor([[row[1], row[2]] for row in rows]),
        loss_mask_BT=second(torch.ones(len(rows), dtype=torch.bool)),
        behavior_logprobs_BT=second(torch.tensor(logprobs)),
        rewards_BT=second(rewards),
        turn_ends_BT=second(torch.ones(len(rows), dtype=torch.bool)),
        lengths_B=torch.full((len(rows),), 2),
        trajectory_index_B=torch.arange(len(rows)),
        groups_B=groups,
        advantages_BT=second((rewards - means).float()),
        reference_BT=None if reference is None else second(torch.tensor(reference)),
    )


def decomposed(model: Any, batch: Batch, algorithm: Algorithm = PLAIN, **more: Any) -> GradientDecomposition:
    variances = more.pop("variances", None) or {int(group): float(number) for number, group in enumerate(batch.groups_B.unique())}
    return decompose_gradients(Policy(model), batch, algorithm, variances, **{"temperature": 1.0, "micro_tokens": 64, **more})


def test_one_prompt_two_answers_by_hand() -> None:
    """A fair coin. s = (1/2, -1/2) for the one answer and its opposite for the other, A = 1/2 and -1/2: mean(A s) = (1/4, -1/4)."""
    batch = pairs([(3, 0, 0, 1.0), (3, 0, 1, 0.0)], [math.log(0.5)] * 2)

    (row,) = decomposed(Table([[0.0, 0.0], [0.0, 0.0]]), batch, variances={3: 0.5, 99: 1.0}).buckets

    assert row.bucket.groups == (3,)
    assert (row.bucket.rv_low, row.bucket.rv_mean, row.bucket.rv_high) == (0.5, 0.5, 0.5)
    assert (row.num_trajectories, row.num_tokens) == (2, 2)
    assert row.task_norm == pytest.approx(ROOT8)
    assert row.total_norm == pytest.approx(ROOT8)
    assert (row.kl_norm, row.entropy_norm, row.regulariser_norm, row.dominance) == (0.0, 0.0, 0.0, 0.0)
    assert row.with_bucket.task == row.with_batch.task == pytest.approx(1.0)
    assert row.with_bucket.kl is row.with_batch.entropy is row.task_with_regulariser is None
    # Each half is one answer, and both pull the same way as strongly: all signal, no noise.
    assert row.halves is not None
    assert (row.halves.signal, row.halves.noise) == (pytest.approx(1 / 8), pytest.approx(0.0, abs=1e-12))
    # E|s|^2 = 1/2 and mean(A^2) = 1/4: the bound is met with equality.
    assert row.bound is not None
    assert row.bound.mean_square_score == pytest.approx(0.5)
    assert row.bound.reward_variance == pytest.approx(0.25)
    assert row.bound.gradient_norm == pytest.approx(row.bound.limit) == pytest.approx(ROOT8)
    assert row.bound.holds
    assert row.bound.tightness == pytest.approx(1.0)


def test_temperature_divides_the_score() -> None:
    batch = pairs([(3, 0, 0, 1.0), (3, 0, 1, 0.0)], [math.log(0.5)] * 2)

    (row,) = decomposed(Table([[0.0, 0.0], [0.0, 0.0]]), batch, temperature=2.0).buckets

    assert row.task_norm == pytest.approx(ROOT8 / 2)
    assert row.bound is not None
    assert row.bound.mean_square_score == pytest.approx(0.5 / 4)


def test_only_an_algorithm_of_constant_length_divides_by_max_tokens() -> None:
    batch, model = pairs([(3, 0, 0, 1.0), (3, 0, 1, 0.0)], [math.log(0.5)] * 2), Table([[0.0, 0.0], [0.0, 0.0]])

    (plain,) = decomposed(model, batch, max_tokens=40).buckets
    (divided,) = decomposed(model, batch, PLAIN.model_copy(update={"constant_length": True}), max_tokens=40).buckets

    assert (plain.task_norm, divided.task_norm) == pytest.approx((ROOT8, ROOT8 / 40))


def test_three_terms_by_hand() -> None:
    """p = (3/4, 1/4) after word 0. With d = (1, -1) every gradient is a number times d:

    task: A = 1/2, -1/2 and s = d/4, -3d/4, so the loss has -(d/8 + 3d/8)/2 = -d/4;
    entropy: dH/dlogits = -p (log p + H) = -(3/16) log(3) d, and the loss subtracts 0.1 H;
    KL (k3): 1 - r per unit of log p, r = p_ref / p = (2/3, 2): 0.2 ((1/3) d/4 + (-1)(-3d/4))/2 = d/12.
    """
    algorithm = PLAIN.model_copy(update={"entropy_coef": 0.1, "kl_coef": 0.2})
    batch = pairs([(3, 0, 0, 1.0), (3, 0, 1, 0.0)], [math.log(0.75), math.log(0.25)], [math.log(0.5)] * 2)

    found = decomposed(Table([[math.log(3.0), 0.0], [0.0, 0.0]]), batch, algorithm)

    (row,), unit = found.buckets, math.sqrt(2.0)
    entropy = 0.1 * 3 / 16 * math.log(3.0)
    assert row.task_norm == pytest.approx(unit / 4)
    assert row.entropy_norm == pytest.approx(unit * entropy)
    assert row.kl_norm == pytest.approx(unit / 12)
    assert row.regulariser_norm == pytest.approx(unit * (entropy + 1 / 12))
    assert (row.total_norm, found.total_norm) == pytest.approx((unit * (1 / 4 - entropy - 1 / 12),) * 2)
    assert row.dominance == pytest.approx((entropy + 1 / 12) / (entropy + 1 / 12 + 1 / 4))
    assert dataclasses.astuple(row.with_bucket) == pytest.approx((1.0, -1.0, -1.0))
    assert dataclasses.astuple(row.with_batch) == pytest.approx((1.0, -1.0, -1.0))
    assert row.task_with_regulariser == pytest.approx(-1.0)
    # The halves: -A s is -d/8 for the one answer, -3d/8 for the other.
    assert row.halves is not None
    assert (row.halves.signal, row.halves.noise) == (pytest.approx(2 * 3 / 64), pytest.approx(2 * (1 / 4) ** 2 / 4))
    assert row.snr == pytest.approx(math.sqrt(3.0))
    assert row.snr_regularised == pytest.approx(math.sqrt(6 / 64) / (unit / 8 + unit * (entropy + 1 / 12)))


def test_cosine_with_the_batch_is_not_that_with_the_bucket() -> None:
    """Two prompts whose rewards differ by 1 and by 3 pull at their own rows of the table: (1, 0) and (0, 3), the batch at half their sum."""
    rows = [(0, 0, 0, 1.0), (0, 0, 1, 0.0), (1, 1, 0, 0.0), (1, 1, 1, 3.0)]

    found = decomposed(Table([[0.0, 0.0], [0.0, 0.0]]), pairs(rows, [math.log(0.5)] * 4))

    low, high = found.buckets
    assert found.total_norm == pytest.approx(ROOT8 * math.sqrt(10.0) / 2)
    assert (low.with_bucket.task, high.with_bucket.task) == (pytest.approx(1.0), pytest.approx(1.0))
    assert (low.with_batch.task, high.with_batch.task) == (pytest.approx(1 / math.sqrt(10.0)), pytest.approx(3 / math.sqrt(10.0)))


def test_task_norm_grows_with_reward_variance_and_entropy_does_not() -> None:
    """The same answers to the same word in six groups, paid 0, 1, ... 5 times as much: Figure 3 in its purest form."""
    rows = [(group, 0, answer, float(group * (answer == 0))) for group in range(6) for answer in (0, 1, 0, 1)]
    logprobs = [math.log(0.75) if row[2] == 0 else math.log(0.25) for row in rows]
    algorithm = PLAIN.model_copy(update={"entropy_coef": 0.1, "kl_coef": 0.1})

    found = decomposed(Table([[math.log(3.0), 0.0], [0.0, 0.0]]), pairs(rows, logprobs, [math.log(0.5)] * 24), algorithm)

    assert [row.task_norm for row in found.buckets] == pytest.approx([math.sqrt(2.0) / 4 * group for group in range(6)])
    assert [row.entropy_norm for row in found.buckets] == pytest.approx([found.buckets[0].entropy_norm] * 6)
    assert [row.kl_norm for row in found.buckets] == pytest.approx([found.buckets[0].kl_norm] * 6)
    assert found.buckets[0].entropy_norm > 0
    dominances = [row.dominance for row in found.buckets]
    assert dominances[0] == 1.0
    assert all(one is not None and other is not None and one > other for one, other in itertools.pairwise(dominances))
    flat = found.buckets[0]
    assert flat.bound is not None
    assert (flat.bound.limit, flat.bound.tightness, flat.bound.holds) == (0.0, 0.0, True)
    assert (flat.snr, flat.with_bucket.task) == (0.0, None)


def test_nothing_at_all_has_no_dominance() -> None:
    (row,) = decomposed(Table([[0.0, 0.0], [0.0, 0.0]]), pairs([(0, 0, 0, 1.0), (0, 0, 1, 1.0)], [math.log(0.5)] * 2)).buckets

    assert (row.task_norm, row.dominance, row.snr, row.snr_regularised) == (0.0, None, 0.0, None)


def test_bfloat16_is_summed_in_float32() -> None:
    """In either half one answer pulls 600 times as strongly as the 39 after it, which bfloat16 would all lose to rounding."""
    halves = split_halves([0] * 80, seed=0)
    batch = pairs([(0, 0, 0, 0.0)] * 80, [math.log(0.5)] * 80)
    strength = torch.tensor([1.0 if member in (halves.first[0], halves.second[0]) else 1 / 600 for member in range(80)])
    batch = dataclasses.replace(batch, advantages_BT=batch.loss_mask_BT * strength[:, None])
    model = Table([[0.0, 0.0], [0.0, 0.0]]).bfloat16()

    found = decomposed(model, batch, micro_tokens=2, with_bound=False)

    expected = math.sqrt(0.5) * (2 + 78 / 600) / 80
    assert found.total_norm == pytest.approx(expected, rel=0.01)
    assert found.buckets[0].task_norm == pytest.approx(expected, rel=0.01)


def test_members_alone_have_no_halves() -> None:
    batch = pairs([(0, 0, 0, 1.0), (1, 0, 1, 0.0)], [math.log(0.5)] * 2)
    batch = dataclasses.replace(batch, advantages_BT=torch.tensor([[0.0, 1.0], [0.0, 0.5]]))  # as a critic's would be

    low, high = decomposed(Table([[0.0, 0.0], [0.0, 0.0]]), batch).buckets

    assert low.halves is low.snr is low.snr_regularised is high.halves is None
    assert (low.task_norm, high.task_norm) == (pytest.approx(math.sqrt(0.5)), pytest.approx(math.sqrt(0.5) / 2))


def test_the_bound_holds_on_random_cases() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(10):
        table = torch.randn(4, 4, generator=draw) * 2
        answers, words = torch.randint(0, 4, (12,), generator=draw), torch.randint(0, 4, (3,), generator=draw)
        rewards = torch.randn(12, generator=draw)
        rows = [(n // 4, int(words[n // 4]), int(answers[n]), float(rewards[n])) for n in range(12)]
        found = decomposed(Table(table.tolist()), pairs(rows, [-1.0] * 12))
        assert all(row.bound is not None and row.bound.holds and 0 < row.bound.tightness <= 1 + 1e-6 for row in found.buckets)


def test_a_half_without_a_word_in_the_loss_says_nothing() -> None:
    batch = pairs([(3, 0, 0, 1.0), (3, 0, 1, 0.0)], [math.log(0.5)] * 2)
    batch = dataclasses.replace(batch, loss_mask_BT=torch.tensor([[False, True], [False, False]]))

    (row,) = decomposed(Table([[0.0, 0.0], [0.0, 0.0]]), batch, with_bound=False).buckets

    assert row.halves is None
    assert row.task_norm == pytest.approx(ROOT8 / 2)


def test_a_bound_that_is_passed_does_not_hold() -> None:
    bound = Bound(gradient_norm=2.0, reward_variance=0.25, mean_square_score=16.0)

    assert (bound.limit, bound.holds) == (2.0, True)
    assert not dataclasses.replace(bound, gradient_norm=2.002).holds


def llama() -> Any:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, pad_token_id=None)
    )


def names_of(model: Any, which: str | Sequence[str]) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in choose_parameters(model, which)]


def test_the_last_layer_and_its_norm() -> None:
    chosen = names_of(llama(), "last")

    assert chosen[0] == "model.layers.1.self_attn.q_proj.weight"
    assert chosen[-1] == "model.norm.weight"
    assert all(name.startswith("model.layers.1.") for name in chosen[:-1])
    assert len(chosen) == 10  # four projections of attention, three of the feed-forward part, two norms, the last norm


def test_the_last_layer_of_a_tied_model() -> None:
    config = hf.GPT2Config(vocab_size=7, n_embd=8, n_layer=12, n_head=2, n_positions=16)

    chosen = names_of(hf.GPT2LMHeadModel(config), "last")

    assert {name.rpartition(".h.")[2].partition(".")[0] for name in chosen if ".h." in name} == {"11"}  # the highest, not the first of "9"
    assert [name for name in chosen if ".h." not in name] == ["transformer.ln_f.weight", "transformer.ln_f.bias"]


def test_named_parameters() -> None:
    model = llama()

    assert len(names_of(model, "all")) == len(list(model.parameters())) == len(names_of(model, ["model", "lm_head"]))
    assert names_of(model, "model.norm") == ["model.norm.weight"]
    assert names_of(model, ["model.norm.weight", "lm_head", "model.norm"]) == ["model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("which", "error", "words"),
    [
        ("lst", UnknownName, "did you mean 'last'"),
        (["model.norm.wait"], UnknownName, "did you mean 'model.norm.weight'"),
        (["model.layers.1", "xyz"], UnknownName, "named 'xyz': take 'all', 'last', or names"),
        ([], BadInput, "empty"),
    ],
)
def test_wrong_names(which: str | list[str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        choose_parameters(llama(), which)


def test_a_name_that_only_begins_alike_is_another() -> None:
    with pytest.raises(UnknownName, match=r"model\.nor'"):
        choose_parameters(llama(), "model.nor")


def test_a_frozen_model() -> None:
    model = llama()
    for parameter in model.parameters():
        parameter.requires_grad_(False)

    with pytest.raises(BadInput, match="no parameter of the model requires a gradient"):
        choose_parameters(model, "all")


def test_the_cheap_mode_keeps_nothing_for_a_backward_pass_through_the_rest() -> None:
    model, seen = llama(), []
    model.model.layers[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].requires_grad))

    decomposed(model, pairs([(3, 0, 0, 1.0), (3, 0, 1, 0.0)], [-1.0] * 2), parameters="last", with_bound=False)

    assert seen[-1] is False


def test_layers_without_numbers_have_no_last() -> None:
    with pytest.raises(BadInput, match="does not number its layers"):
        choose_parameters(Table([[0.0]]), "last")
