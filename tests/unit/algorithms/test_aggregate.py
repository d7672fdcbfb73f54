"""Token weights: literal numbers for each rule, and the same loss and gradient however a minibatch is cut into micro-batches."""

import pytest
import torch

from tether.algorithms.aggregate import AGGREGATIONS, token_weights
from tether.algorithms.batch import Batch

# 2, 1 and 4 tokens in the loss, 7 in all
MASK = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("rule", "per_row", "total"),
    [
        ("token_mean", (1 / 7, 1 / 7, 1 / 7), 1),
        ("sequence_mean_token_mean", (1 / 6, 1 / 3, 1 / 12), 1),  # 1/3 for the sequence, shared by its tokens
        ("sequence_mean_token_sum", (1 / 30, 1 / 30, 1 / 30), 7 / 30),  # 3 sequences, constant length 10
    ],
)
def test_by_hand(rule: str, per_row: tuple[float, ...], total: float) -> None:
    weights_BT = token_weights(MASK, rule, max_tokens=10)
    expected = [[weight if flag else 0.0 for flag in row] for row, weight in zip(MASK.tolist(), per_row, strict=True)]
    for row, wanted in zip(weights_BT.tolist(), expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-6)
    assert float(weights_BT.sum()) == pytest.approx(total, rel=1e-6)


def test_only_one_rule_reads_the_constant_length() -> None:
    for rule in AGGREGATIONS:
        short, long = token_weights(MASK, rule, 10), token_weights(MASK, rule, 20)
        factor = 2 if rule == "sequence_mean_token_sum" else 1
        assert torch.allclose(short, long * factor)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float64])
def test_masks_of_any_type(dtype: torch.dtype) -> None:
    weights_BT = token_weights(MASK.to(dtype), "token_mean", 10)
    assert weights_BT.dtype == torch.float32
    assert torch.equal(weights_BT, token_weights(MASK, "token_mean", 10))


def test_unknown_rule() -> None:
    with pytest.raises(ValueError, match=r"unknown aggregation 'token_means': did you mean 'token_mean'\?"):
        token_weights(MASK, "token_means", 10)


def _batch(num_rows: int) -> Batch:
    generator = torch.Generator().manual_seed(3)
    lengths_B = torch.randint(2, 12, (num_rows,), generator=generator)
    inside_BT = torch.arange(int(lengths_B.max())) < lengths_B[:, None]
    mask_BT = inside_BT & (torch.rand(inside_BT.shape, generator=generator) < 0.6)
    mask_BT[:, 1] = True
    zeros = torch.zeros(inside_BT.shape)
    ids_BT = torch.arange(inside_BT.numel()).view(inside_BT.shape) * inside_BT
    return Batch(ids_BT, mask_BT, zeros, zeros, lengths_B)


@pytest.mark.parametrize("rule", sorted(AGGREGATIONS))
def test_loss_and_gradient_do_not_depend_on_the_cut(rule: str) -> None:
    """The token loss is the square of a parameter per token id, so the gradient names every token that was counted."""
    batch = _batch(9)
    weights_BT = token_weights(batch.loss_mask_BT, rule, max_tokens=12)
    results = []
    for budget in (1, 15, 30, 10_000):
        table = torch.linspace(-1, 1, batch.ids_BT.numel(), dtype=torch.float64).requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for index, micro in batch.microbatches(budget):
            mask_BT = micro.loss_mask_BT
            loss = loss + (weights_BT[index][:, : mask_BT.shape[1]][mask_BT] * table[micro.ids_BT[mask_BT]] ** 2).sum()
        loss.backward()
        assert table.grad is not None
        results.append((float(loss.detach()), table.grad))
    plain = sum(
        float(weights_BT[b, t]) * (-1 + 2 * int(batch.ids_BT[b, t]) / (batch.ids_BT.numel() - 1)) ** 2
        for b in range(9)
        for t in range(batch.ids_BT.shape[1])
        if batch.loss_mask_BT[b, t]
    )
    for loss_value, gradient in results:
        assert loss_value == pytest.approx(plain, rel=1e-12)
        assert torch.allclose(gradient, results[-1][1], rtol=1e-12)


def test_a_row_without_loss_tokens_weighs_nothing() -> None:
    """The loss is a sum over all weights; a row that the mask empties must not turn it into nan."""
    weights_BT = token_weights(torch.tensor([[0, 1, 1], [0, 0, 0]]), "sequence_mean_token_mean", 10)
    assert weights_BT.tolist() == [[0, 0.25, 0.25], [0, 0, 0]]
