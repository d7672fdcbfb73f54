"""What sequences begin with is computed once, and nothing else changes: layouts by hand, log-probs and gradients against the module."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from tether.models import packing
from tether.models.logprobs import AnyMicroBatch, cut_batch, forward, logprobs_and_entropy, token_logprobs
from tether.models.lora import add_lora
from tether.models.packing import FlatBatch, MicroBatch, Run, flat_batches
from tether.models.policy import Policy

Build = Callable[..., Any]
WORDS = 97


@pytest.fixture(autouse=True)
def short_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_SHARED", 3)


def _batch(*texts: list[int]) -> tuple[Tensor, Tensor]:
    width = max(len(text) for text in texts)
    return torch.tensor([text + [0] * (width - len(text)) for text in texts]), torch.tensor([len(text) for text in texts])


A, B = [7, 8, 9, 10], [20, 21, 22]
TEXTS = ([*A, 1, 2], [*B, 5], [*A, 1, 3, 4], [30, 31], [*A, 6], [*B, 6, 7])


def test_a_layout_by_hand() -> None:
    ids, lengths = _batch(*TEXTS)
    (micro,) = flat_batches(ids, lengths, 100)
    assert sorted(micro.runs) == [Run((0, 2, 4), 4), Run((1, 5), 3), Run((3,), 0)]
    assert (micro.num_tokens, micro.num_positions, micro.num_saved) == (4 + 2 + 3 + 1 + 3 + 1 + 2 + 2, 18, 8 + 3)
    assert micro.sequences == (0, 1, 2, 3, 4, 5) and micro.lengths_M == [6, 4, 7, 2, 5, 5]
    row, row_positions = micro.to_flat(ids)
    assert row.tolist() == [*A, *B, 1, 2, 1, 3, 4, 6, 5, 6, 7, 30, 31]
    assert row_positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5, 4, 5, 6, 4, 3, 3, 4, 0, 1]
    attention = micro.attention(1.0, ids.device)
    assert attention.texts.lengths == (4, 3, 2, 3, 1, 1, 2, 2) and attention.texts.cumulative.tolist() == [0, 4, 7, 9, 12, 13, 14, 16, 18]
    assert attention.shared is not None
    assert [texts.lengths for texts in attention.shared] == [(6, 3), (4, 3)]


def test_copies_of_one_sequence_are_one_text_that_nothing_continues() -> None:
    """No kernel is asked for texts without tokens."""
    ids, lengths = _batch(A, A, [*B, 1], [*B, 2], A)
    (micro,) = flat_batches(ids, lengths, 100)
    attention = micro.attention(1.0, ids.device)
    assert attention.texts.lengths == (3, 1, 1, 4) and micro.num_tokens == 9
    assert attention.shared is not None and [texts.lengths for texts in attention.shared] == [(2,), (3,)]
    assert flat_batches(*_batch(A, A), 100)[0].attention(1.0, ids.device).shared is None


def test_every_token_is_found_again() -> None:
    ids, lengths = _batch(*TEXTS)
    for micro in (*flat_batches(ids, lengths, 100), *flat_batches(ids, lengths, 9), *flat_batches(ids, lengths, 100, share=False)):
        row, row_positions = micro.to_flat(ids)
        for number, sequence in enumerate(micro.sequences):
            columns = torch.arange(int(lengths[sequence]))
            positions = micro.row_positions(torch.full_like(columns, number), columns)
            assert row[positions].tolist() == TEXTS[sequence] and row_positions[positions].tolist() == columns.tolist()


@pytest.mark.parametrize(
    ("texts", "runs"),
    [
        ([[1, 2, 3, 4], [1, 2, 3, 5]], [Run((0, 1), 3)]),
        ([[1, 2, 4, 4], [1, 2, 3, 5]], [Run((0,), 0), Run((1,), 0)]),  # two tokens in common are not worth it
        ([[1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4, 5]], [Run((0, 1, 2), 3)]),  # one is the beginning of the others: 2 x 3 saved, not 4
        ([[1, 2, 3, 4, 5, 6], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7]], [Run((0, 2), 6), Run((1,), 0)]),  # 6 either way: the smaller run
        ([[1, 2, 3, 4, 5, 6, 8], [1, 2, 3], [1, 2, 3, 4, 5, 6, 8]], [Run((0, 2), 7), Run((1,), 0)]),  # twice the same: 7 saved, not 6
        ([[1, 2, 3, *A], [1, 2, 3, *A, 1], [1, 2, 3, *B], [1, 2, 3, *B, 1]], [Run((0, 1), 7), Run((2, 3), 6)]),  # 13 saved, not 9
        ([[1, 2, 3]] * 3, [Run((0, 1, 2), 3)]),
        ([[5]], [Run((0,), 0)]),
    ],
)
def test_the_runs_that_save_most(texts: list[list[int]], runs: list[Run]) -> None:
    (micro,) = flat_batches(*_batch(*texts), 1000)
    assert micro.num_saved == sum(run.shared * (len(run.members) - 1) for run in runs)
    assert sorted(micro.runs) == sorted(runs)


def test_a_run_that_costs_too_much_is_cut_and_pays_its_beginning_again() -> None:
    ids, lengths = _batch(*([*A, n, n] for n in range(5)))
    batches = flat_batches(ids, lengths, 9)
    assert [micro.num_tokens for micro in batches] == [8, 8, 6]
    assert [micro.runs for micro in batches] == [(Run((0, 1), 4),), (Run((2, 3), 4),), (Run((4,), 0),)]


def test_every_sequence_once_within_the_budget() -> None:
    draw = random.Random(1)
    for _ in range(60):
        prompts = [[draw.randrange(3) for _ in range(draw.randint(1, 9))] for _ in range(3)]
        texts = [draw.choice(prompts) + [draw.randrange(3) for _ in range(draw.randint(1, 6))] for _ in range(draw.randint(1, 14))]
        ids, lengths = _batch(*texts)
        budget = draw.randint(1, 60)
        batches = flat_batches(ids, lengths, budget)
        assert sorted(row for micro in batches for row in micro.sequences) == list(range(len(texts)))
        assert all(micro.num_tokens <= budget or len(micro.sequences) == 1 for micro in batches)
        assert sum(micro.num_tokens + micro.num_saved for micro in batches) == int(lengths.sum())
        for micro in batches:
            for run in micro.runs:
                assert len({tuple(texts[member][: run.shared]) for member in run.members}) == 1


def test_a_budget_of_nothing() -> None:
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        flat_batches(*_batch([1]), 0)


# Against the module.


def _qwen3() -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 128}
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**size, num_attention_heads=4, num_key_value_heads=2, head_dim=8)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.copy_(torch.rand(8) + 2)
    return model


def _model(name: str, small_model: Build, tiny_model: Any) -> Any:
    if name == "tiny":
        return tiny_model
    if name == "lora":
        add_lora(tiny_model, 4, 8, seed=0)
        for key, parameter in tiny_model.named_parameters():
            if ".lora_B." in key:  # zero at the start, which would hide the gradient of the others
                parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 10
        return tiny_model
    model = _qwen3() if name == "qwen3" else small_model(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


def _groups() -> tuple[Tensor, Tensor, Tensor]:
    """Groups of 4, 2 and 1 with prompts of 9, 5 and 12 tokens, a prompt that goes on another, a copy, and a text of its own; every mask."""
    draw = random.Random(4)
    prompts = [[draw.randrange(WORDS) for _ in range(length)] for length in (9, 5, 12)]
    prompts.append([*prompts[0], 1, 2, 3])
    texts = []
    for prompt, members in zip(prompts, (4, 2, 1, 2), strict=True):
        texts += [prompt + [draw.randrange(WORDS) for _ in range(draw.randint(2, 8))] for _ in range(members)]
    texts += [texts[0], texts[1][:9], [draw.randrange(WORDS) for _ in range(6)]]
    ids, lengths = _batch(*texts)
    columns = torch.arange(ids.shape[1])
    mask = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.6) & (columns < lengths[:, None]) & (columns > 0)
    mask[0, 9] = True  # the first own token of a member: its beginning's last position predicts it
    return ids, mask, lengths


def _weighted(policy: Policy, cut: list[AnyMicroBatch], recompute: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of the batch in row order, and the gradient of a sum of them in which every token has a weight of its own."""
    ids, mask, _ = _groups()
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3))
    found = torch.zeros(ids.shape)
    policy.module.zero_grad()
    for micro in cut:
        index = micro.index_M
        logprobs, entropy = logprobs_and_entropy(policy, *forward(policy, ids, mask, micro, recompute=recompute), 0.8)
        (weights[index][mask[index]] * (logprobs + 0.1 * entropy)).sum().backward()
        found[index] = torch.zeros(len(index), ids.shape[1]).masked_scatter(mask[index], logprobs.detach())
    return found[mask], {name: p.grad for name, p in policy.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["tiny", "lora", "llama", "qwen2", "qwen3"])
def test_flat_rows_and_shared_prompts_give_the_gradients_of_padded_rows(name: str, small_model: Build, tiny_model: Any) -> None:
    policy = Policy(_model(name, small_model, tiny_model))
    assert policy.backbone is not None
    ids, _, lengths = _groups()
    padded = cut_batch(policy, ids, lengths, 1000, packing=False)
    assert all(isinstance(micro, MicroBatch) and not micro.shares_rows for micro in padded)
    want, want_grad = _weighted(policy, padded)
    for budget, share, recompute in ((1000, True, False), (1000, False, False), (40, True, False), (60, True, True), (1, False, False)):
        cut = cut_batch(policy, ids, lengths, budget, share_prompts=share)
        assert all(isinstance(micro, FlatBatch) for micro in cut)
        assert (sum(micro.num_saved for micro in cut) > 30) is (share and budget > 1)
        got, got_grad = _weighted(policy, cut, recompute)
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-5)
        assert got_grad.keys() == want_grad.keys()
        for key, expected in want_grad.items():
            assert float((got_grad[key] - expected).norm()) <= 1e-5 * float(expected.norm()), (budget, share, recompute, key)


def test_log_probs_without_gradient_share_too(small_model: Build) -> None:
    policy = Policy(small_model("llama"))
    ids, mask, lengths = _groups()
    plain = []
    for row, length in enumerate(lengths.tolist()):
        with torch.no_grad():
            table = (policy.module(input_ids=ids[row : row + 1, :length]).logits[0] / 0.8).log_softmax(-1)
        plain += [float(table[t - 1, ids[row, t]]) for t in mask[row].nonzero()[:, 0].tolist()]
    got = token_logprobs(policy, ids, mask, lengths, 0.8, max_tokens=60)
    torch.testing.assert_close(got, torch.tensor(plain), rtol=0, atol=2e-5)


def test_models_of_other_kinds_get_rows(small_model: Build) -> None:
    ids, mask, lengths = _groups()
    for name in ("gpt2", "mistral"):  # another architecture, and a window of attention
        policy = Policy(small_model(name))
        assert policy.backbone is None
        assert all(isinstance(micro, MicroBatch) for micro in cut_batch(policy, ids, lengths, 60))
    with pytest.raises(ValueError, match="models of type 'mistral' have no pass over flat tokens"):
        forward(policy, ids, mask, flat_batches(ids, lengths, 60)[0])


def test_sequences_beyond_the_model_s_positions_get_rows(small_model: Build) -> None:
    policy = Policy(small_model("llama"))
    for length, kind in ((128, FlatBatch), (129, MicroBatch)):
        (micro,) = cut_batch(policy, torch.ones(1, length, dtype=torch.long), torch.tensor([length]), 1000)
        assert isinstance(micro, kind)


def test_a_mask_that_selects_what_it_must_not(small_model: Build) -> None:
    policy = Policy(small_model("llama"))
    ids, lengths = _batch([*A, 1], [*A])
    (micro,) = flat_batches(ids, lengths, 100)
    with pytest.raises(ValueError, match="first token of a row"):
        forward(policy, ids, torch.tensor([[True] + [False] * 4, [False] * 5]), micro)
    with pytest.raises(ValueError, match="selects padding"):
        forward(policy, ids, torch.tensor([[False] * 5, [False] * 4 + [True]]), micro)
