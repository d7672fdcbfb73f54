"""Token weights: literal numbers for each rule, sequences of several rows, values from verl 0.9.1, and the same loss and gradient however
a minibatch is cut into micro-batches."""

import pytest
import torch
from torch import Tensor

from tether.algorithms.objective import AGGREGATIONS, sequence_mean_token_mean, sequence_mean_token_sum, token_mean

# 2, 1 and 4 tokens in the loss, 7 in all
MASK = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)
every_rule = pytest.mark.parametrize("rule", sorted(AGGREGATIONS))


def per_row(weights_BT: Tensor, mask_BT: Tensor) -> list[float]:
    """The one weight of each row's tokens; everything else must be zero."""
    assert weights_BT.shape == mask_BT.shape and weights_BT.dtype == torch.float32
    assert not weights_BT[~mask_BT].any()
    rows = [row[flags].unique().tolist() for row, flags in zip(weights_BT, mask_BT, strict=True)]
    assert all(len(row) == 1 for row in rows)
    return [row[0] for row in rows]


@pytest.mark.parametrize(
    ("rule", "owners", "expected", "total"),
    [
        ("token_mean", [0, 1, 2], (1 / 7, 1 / 7, 1 / 7), 1),
        ("sequence_mean_token_mean", [0, 1, 2], (1 / 6, 1 / 3, 1 / 12), 1),  # 1/3 for the sequence, shared by its tokens
        ("sequence_mean_token_sum", [0, 1, 2], (1 / 30, 1 / 30, 1 / 30), 7 / 30),  # 3 sequences, constant length 10
        # The first two rows are one trajectory of 3 tokens, so there are two sequences.
        ("token_mean", [0, 0, 1], (1 / 7, 1 / 7, 1 / 7), 1),
        ("sequence_mean_token_mean", [0, 0, 1], (1 / 6, 1 / 6, 1 / 8), 1),
        ("sequence_mean_token_sum", [0, 0, 1], (1 / 20, 1 / 20, 1 / 20), 7 / 20),
        # Numbers of trajectories may have gaps and rows may stand anywhere: here the outer two belong together, 6 tokens.
        ("sequence_mean_token_mean", [9, 4, 9], (1 / 12, 1 / 2, 1 / 12), 1),
        ("sequence_mean_token_sum", [9, 4, 9], (1 / 20, 1 / 20, 1 / 20), 7 / 20),
    ],
)
def test_by_hand(rule: str, owners: list[int], expected: tuple[float, ...], total: float) -> None:
    weights_BT = AGGREGATIONS[rule](MASK, torch.tensor(owners), 10.0)
    assert per_row(weights_BT, MASK) == pytest.approx(expected, rel=1e-6)
    assert float(weights_BT.sum()) == pytest.approx(total, rel=1e-6)


@every_rule
def test_only_one_rule_reads_the_constant_length(rule: str) -> None:
    trajectory_index_B = torch.arange(3)
    short, long = AGGREGATIONS[rule](MASK, trajectory_index_B, 10.0), AGGREGATIONS[rule](MASK, trajectory_index_B, 20.0)
    assert torch.allclose(short, long * (2 if rule == "sequence_mean_token_sum" else 1))


@pytest.mark.parametrize("rule", ["sequence_mean_token_mean", "sequence_mean_token_sum", "token_mean"])
def test_cutting_a_trajectory_into_rows_changes_no_token(rule: str) -> None:
    """The third row, cut after its second token."""
    cut = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 0, 0]], dtype=torch.bool)
    whole = per_row(AGGREGATIONS[rule](MASK, torch.arange(3), 10.0), MASK)
    assert per_row(AGGREGATIONS[rule](cut, torch.tensor([0, 1, 2, 2]), 10.0), cut) == [*whole, whole[2]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float64])
@every_rule
def test_masks_of_any_type(rule: str, dtype: torch.dtype) -> None:
    assert torch.equal(AGGREGATIONS[rule](MASK.to(dtype), torch.arange(3), 10.0), AGGREGATIONS[rule](MASK, torch.arange(3), 10.0))


LOSSES = torch.tensor([[-1.28, 0.4, -2.0], [4.5, 0.7736196425529535, 50.0]], dtype=torch.float64)
LOSS_MASK = torch.tensor([[True, True, True], [True, True, False]])


@pytest.mark.parametrize(
    ("rule", "loss"),
    [("token_mean", 0.478723929), ("sequence_mean_token_mean", 0.838404911), ("sequence_mean_token_sum", 1.196809821)],
)
def test_values_of_verl(rule: str, loss: float) -> None:
    """agg_loss of compute_policy_loss, verl 0.9.1 (which adds 1e-8 to the length of a sequence); length 1 is its seq-mean-token-sum."""
    weights_BT = AGGREGATIONS[rule](LOSS_MASK, torch.arange(2), 1.0)
    assert float((weights_BT.double() * LOSSES).sum()) == pytest.approx(loss, abs=1e-7)


def test_values_of_trl() -> None:
    """The three lines of TRL 1.16.0's GRPOTrainer._compute_loss for loss_type grpo, bnpo (dapo on one process) and dr_grpo:

    ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)
    (per_token_loss * mask).sum() / (per_token_loss.size(0) * self.max_completion_length)

    The row sums are -2.88 and 5.2736196426 over 3 and 2 tokens.
    """
    expected = {
        "sequence_mean_token_mean": (-2.88 / 3 + 5.2736196425529535 / 2) / 2,
        "token_mean": (-2.88 + 5.2736196425529535) / 5,
        "sequence_mean_token_sum": (-2.88 + 5.2736196425529535) / (2 * 400),
    }
    for rule, loss in expected.items():
        weights_BT = AGGREGATIONS[rule](LOSS_MASK, torch.arange(2), 400.0)
        assert float((weights_BT.double() * LOSSES).sum()) == pytest.approx(loss, rel=1e-6)


@every_rule
def test_loss_and_gradient_do_not_depend_on_the_cut(rule: str) -> None:
    """The token loss is the square of a parameter per token, so the gradient names every token that was counted."""
    generator = torch.Generator().manual_seed(3)
    mask_BT = torch.rand(9, 12, generator=generator) < 0.6
    mask_BT[:, 1] = True
    weights_BT = AGGREGATIONS[rule](mask_BT, torch.tensor([0, 0, 1, 2, 3, 3, 3, 4, 5]), 12.0).double()
    results = []
    for rows in (1, 2, 4, 9):
        table_BT = torch.linspace(-1, 1, mask_BT.numel(), dtype=torch.float64).view(mask_BT.shape).requires_grad_()
        for start in range(0, 9, rows):
            micro = slice(start, start + rows)
            (weights_BT[micro] * table_BT[micro] ** 2)[mask_BT[micro]].sum().backward()
        assert table_BT.grad is not None
        results.append(table_BT.grad)
    for gradient in results:
        assert torch.equal(gradient, results[0])
        assert torch.equal(gradient != 0, mask_BT)


def test_a_sequence_without_loss_tokens_counts_but_weighs_nothing() -> None:
    """The loss is a sum over all weights; a row that the mask empties must not turn it into nan."""
    mask_BT = torch.tensor([[False, True, True], [False, False, False]])
    assert sequence_mean_token_mean(mask_BT, torch.arange(2), 10.0).tolist() == [[0, 0.25, 0.25], [0, 0, 0]]
    assert sequence_mean_token_sum(mask_BT, torch.arange(2), 1.0).tolist() == [[0, 0.5, 0.5], [0, 0, 0]]
    assert token_mean(~mask_BT & mask_BT, torch.arange(2), 1.0).tolist() == [[0, 0, 0], [0, 0, 0]]


@every_rule
def test_an_empty_minibatch(rule: str) -> None:
    nothing = AGGREGATIONS[rule](torch.zeros(0, 5, dtype=torch.bool), torch.zeros(0, dtype=torch.long), 10.0)
    assert nothing.shape == (0, 5)
