"""Group-relative advantages: GRPO (mean, then std with ddof 1 plus 1e-6) and Dr. GRPO (mean only), with numbers worked by hand."""

import math

import pytest
import torch

from tether.algorithms.advantages import group_relative, trajectory_advantages


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_grpo_by_hand() -> None:
    """1 2 3 6: mean 3, deviations -2 -1 0 3, squares 14, over 3: std 2.1602469 (ddof 0 would give 1.8708)."""
    std = math.sqrt(14 / 3) + 1e-6
    result = group_relative(double(1, 2, 3, 6), scale_by_std=True).tolist()
    assert result == pytest.approx([-2 / std, -1 / std, 0, 3 / std], rel=1e-14)
    assert result == pytest.approx([-0.925820, -0.462910, 0, 1.388730], abs=1e-6)


def test_success_or_failure() -> None:
    """1 0 0 0: mean 1/4, std sqrt((9/16 + 3/16) / 3) = 1/2, so 1.5 and -0.5."""
    assert group_relative(double(1, 0, 0, 0), scale_by_std=True).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=4e-6)


def test_the_floor_of_the_std() -> None:
    """0 and 1e-6: std is 1e-6 / sqrt 2, so the advantage is 0.5 / (1 / sqrt 2 + 1) = 1 / (2 + sqrt 2)."""
    assert group_relative(double(0, 1e-6), scale_by_std=True).tolist() == pytest.approx([-0.2928932188, 0.2928932188], rel=1e-9)


def test_dr_grpo_by_hand() -> None:
    assert group_relative(double(1, 2, 3, 6), scale_by_std=False).tolist() == [-2, -1, 0, 3]
    assert group_relative(double(0, 1e-6), scale_by_std=False).tolist() == pytest.approx([-5e-7, 5e-7], rel=1e-12)


@pytest.mark.parametrize("scale_by_std", [True, False])
def test_no_signal(scale_by_std: bool) -> None:
    assert group_relative(double(7.5), scale_by_std).tolist() == [0]
    assert group_relative(double(2, 2, 2, 2), scale_by_std).tolist() == [0, 0, 0, 0]
    # Rounding of the mean, at most an ulp of 0.1, over the floor.
    assert group_relative(double(0.1, 0.1, 0.1), scale_by_std).tolist() == pytest.approx([0, 0, 0], abs=2e-11)


@pytest.mark.parametrize("scale_by_std", [True, False])
def test_shifting_rewards_changes_nothing_and_the_sum_is_zero(scale_by_std: bool) -> None:
    base = group_relative(double(1, 2, 3, 6), scale_by_std)
    assert group_relative(double(101, 102, 103, 106), scale_by_std).tolist() == pytest.approx(base.tolist(), rel=1e-12)
    assert float(base.sum()) == pytest.approx(0, abs=1e-14)


def test_groups_are_separate_uneven_and_in_order() -> None:
    """[0 2] has mean 1, [10] is alone, [3 4 8] has mean 5."""
    groups = [[0.0, 2.0], [10.0], [3.0, 4.0, 8.0]]
    assert trajectory_advantages(groups, scale_by_std=False) == [-1, 1, 0, -2, -1, 3]
    std_a, std_c = math.sqrt(2) + 1e-6, math.sqrt(7) + 1e-6  # (1 + 1) / 1 and (4 + 1 + 9) / 2
    expected = [-1 / std_a, 1 / std_a, 0, -2 / std_c, -1 / std_c, 3 / std_c]
    assert trajectory_advantages(groups, scale_by_std=True) == pytest.approx(expected, rel=1e-14)


def test_double_precision() -> None:
    """In float32 the ulp at 2^24 is 2: the odd reward would be lost."""
    assert trajectory_advantages([[2.0**24, 2.0**24 + 1]], scale_by_std=False) == [-0.5, 0.5]


def test_nothing_in_nothing_out() -> None:
    assert trajectory_advantages([], scale_by_std=True) == []
