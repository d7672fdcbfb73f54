"""What servers sampled, held against the learner's log-probs: which differences are a defect, and which rows take part."""

import dataclasses

import pytest
import torch

from tether.algorithms.batch import Batch
from tether.core.enums import FinishReason, StopReason
from tether.core.types import Group, Trajectory, Turn
from tether.training.sampler_check import Comparison, compare, is_current


def _batch(differences: list[list[float]], groups: list[int]) -> Batch:
    """Rows whose first token is context and whose others differ by these numbers."""
    shape = (len(differences), 1 + max(map(len, differences)))
    mask_BT, old_BT = torch.zeros(shape, dtype=torch.bool), torch.full(shape, -1.0)
    for b, row in enumerate(differences):
        mask_BT[b, 1 : 1 + len(row)] = True
        old_BT[b, 1 : 1 + len(row)] += torch.tensor(row)
    zeros_BT, lengths_B = torch.zeros(shape), torch.tensor([1 + len(row) for row in differences])
    batch = Batch(
        zeros_BT.long(), mask_BT, torch.full(shape, -1.0), zeros_BT, mask_BT, lengths_B, torch.arange(shape[0]), torch.tensor(groups)
    )
    return dataclasses.replace(batch, old_logprobs_BT=old_BT)


def test_the_rows_of_several_batches_are_compared() -> None:
    found = compare([_batch([[0.5, -1.0], [0.25]], [0, 1]), _batch([[2.0]], [2]), _batch([[9.0]], [3])], {0, 1, 2})
    assert found == Comparison(4, 3, (0.5 + 1.0 + 0.25 + 2.0) / 4, 1.0, 2.0)
    assert found.metrics() == {"checked_tokens": 4, "checked_difference": 0.9375, "checked_difference_max": 2.0}
    assert compare([_batch([[9.0]], [3])], {0}) is None and compare([], {0}) is None


# Of 16 rows with 40 tokens each.
FLOAT32, BFLOAT16 = 0.001, 0.05


@pytest.mark.parametrize(
    ("mean", "typical", "largest", "tolerance", "said"),
    [
        (3e-7, 2e-6, 4e-6, FLOAT32, None),
        (4e-5, 4e-4, 2e-3, FLOAT32, None),  # vLLM beside the learner
        (0.7 / 640, 1e-6, 0.7, FLOAT32, "0.7 at the worst token (at most 0.5)"),
        (0.3 / 40, 0.3, 0.3, FLOAT32, "0.3 at the worst token of a typical row (at most 0.1)"),
        (0.02, 0.05, 0.05, FLOAT32, "0.02 on average (at most 0.01)"),
        (0.0126, 0.137, 0.816, BFLOAT16, None),  # tiny in bfloat16 beside float32, measured
        (0.026, 0.319, 0.67, BFLOAT16, None),  # with weights in float8, measured
        (0.05, 0.5, 4.0, BFLOAT16, None),
        (1.3, 12.0, 14.0, BFLOAT16, "1.3 on average (at most 0.5), 12 at the worst token of a typical row (at most 5)"),
        (0.03, 12.0, 14.0, BFLOAT16, "12 at the worst token of a typical row (at most 5)"),  # one wrong token in 400
        (1.3, 12.0, 16.0, 1.0, "1.3 on average (at most 1)"),  # whatever the tolerance is
        (float("inf"), 1e-6, float("nan"), FLOAT32, "inf on average (at most 0.01), nan at the worst token (at most 0.5)"),
    ],
)
def test_what_rounding_explains(mean: float, typical: float, largest: float, tolerance: float, said: str | None) -> None:
    complaint = Comparison(640, 16, mean, typical, largest).complaint(tolerance)
    assert (complaint is None) == (said is None), complaint
    if said is not None and complaint is not None:
        assert complaint.startswith("over 640 tokens of 16 rows the learner's log-probs differ from the server's by ") and said in complaint


def test_a_logprob_that_is_no_number_is_never_explained() -> None:
    found = compare([_batch([[0.0, float("nan")]], [0])], {0})
    assert found is not None and found.complaint(1.0) is not None


def test_only_groups_of_the_present_weights_take_part() -> None:
    def group(*versions: tuple[int, ...]) -> Group:
        turns = [Turn((1,), (2,) * len(v), (-1.0,) * len(v), FinishReason.END_OF_TURN, "", None, versions=v) for v in versions]
        return Group(0, 0, [Trajectory(0, 0, 0, turns, StopReason.SUCCESS)])

    assert is_current(group((3, 3), (3,)), 3)
    assert not is_current(group((3, 2), (3,)), 3) and not is_current(group((2, 2)), 3), "older weights"
    unversioned = group((3,))
    unversioned.trajectories[0].turns[0] = dataclasses.replace(unversioned.trajectories[0].turns[0], versions=())
    assert not is_current(unversioned, 3), "a server that claims nothing"
