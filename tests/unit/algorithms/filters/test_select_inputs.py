"""select_groups, what goes in: lists, numpy and torch give the same selection; bad input is a ValueError that says what and where."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from tether import BadInput, Selection, select_groups

REWARDS = [0, 4, 1, 1, -1, 1, 0.5, 2.5]  # exact in bfloat16
GROUPS = [3, 3, 5, 5, 4, 4, 9, 9]
EXPECTED = select_groups(REWARDS, GROUPS, keep=0.8)


def same(a: Selection, b: Selection) -> None:
    assert a.mask.tolist() == b.mask.tolist()
    for name in ("kept", "dropped", "scores", "kept_ratio", "zero_variance", "rv_mean", "rv_std", "rv_ratio"):
        assert getattr(a, name) == getattr(b, name), name


def test_expected() -> None:
    """Variances 8, 0, 2, 2 of total 12: 8 + 2 reaches 0.8 * 12 = 9.6, and the tie goes to group 4, seen first."""
    assert EXPECTED.kept == [3, 4]
    assert EXPECTED.dropped == [9, 5]


@pytest.mark.parametrize(
    "convert",
    [
        tuple,
        lambda v: np.array(v),
        lambda v: np.array(v, dtype=np.float32),
        lambda v: np.array(v, dtype=object),
        lambda v: np.array([v, v]).T[:, 0],  # strided
        lambda v: torch.tensor(v),
        lambda v: torch.tensor(v, dtype=torch.float64),
        lambda v: torch.tensor(v, dtype=torch.float16),
        lambda v: torch.tensor(v, dtype=torch.bfloat16),
        lambda v: torch.tensor(v, requires_grad=True),
        lambda v: torch.tensor(v, dtype=torch.bfloat16, requires_grad=True) * 1,
    ],
    ids=["tuple", "numpy", "float32", "object", "strided", "torch", "float64", "float16", "bfloat16", "grad", "bfloat16-grad"],
)
def test_rewards_of_any_kind(convert: Any) -> None:
    same(select_groups(convert(REWARDS), GROUPS, keep=0.8), EXPECTED)
    columns = {"entropies": convert(REWARDS)}
    same(select_groups(REWARDS, GROUPS, keep=0.8, score="entropy_variance", **columns), EXPECTED)


@pytest.mark.parametrize("convert", [tuple, iter, np.array, torch.tensor, lambda v: torch.tensor(v, dtype=torch.int32)])
def test_ids_of_any_kind(convert: Any) -> None:
    selection = select_groups(REWARDS, convert(GROUPS), keep=0.8)
    same(selection, EXPECTED)
    assert all(type(group) is int for group in selection.kept), "plain numbers, not numpy's or torch's"


def test_text_ids_from_numpy() -> None:
    selection = select_groups([0, 1, 0, 0], np.array(["left", "left", "right", "right"]))
    assert (selection.kept, selection.dropped) == (["left"], ["right"])


def test_float32_is_widened_before_the_arithmetic() -> None:
    """4096 and 4097 squared do not fit float32's 24 bits; the variance is exactly 0.5 all the same."""
    assert select_groups(torch.tensor([4096.0, 4097.0]), [0, 0]).scores == {0: 0.5}
    assert select_groups(np.array([4096, 4097], dtype=np.float32), [0, 0]).scores == {0: 0.5}


def test_float64_is_not_narrowed() -> None:
    """2^24 + 1 is odd and has no float32."""
    assert select_groups(torch.tensor([2.0**24, 2.0**24 + 1], dtype=torch.float64), [0, 0]).scores == {0: 0.5}


def test_successes_may_be_bools() -> None:
    for successes in ([True, False, True, True], np.array([True, False, True, True]), torch.tensor([True, False, True, True])):
        assert select_groups([0] * 4, list("aabb"), score="outcome_variance", successes=successes).kept == ["a"]


def test_the_input_is_left_alone() -> None:
    rewards = np.array(REWARDS)
    groups = list(GROUPS)
    select_groups(rewards, groups, order="smallest")
    assert rewards.tolist() == REWARDS
    assert groups == GROUPS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "topp"}, ["strategy", "'topp'", "did you mean 'top_p'"]),
        ({"strategy": "zzz"}, ["strategy", "all, band, min_p, top_k, top_p"]),
        ({"score": "reward_varience"}, ["score", "did you mean 'reward_variance'"]),
        ({"score": ""}, ["score", "entropy_variance"]),
        ({"order": "smalest"}, ["order", "did you mean 'smallest'"]),
        ({"keep": 0}, ["keep is 0", "(0, 1]"]),
        ({"keep": -0.5}, ["keep is -0.5", "(0, 1]"]),
        ({"keep": 1.0001}, ["keep is 1.0001", "(0, 1]"]),
        ({"keep": float("nan")}, ["keep is nan", "(0, 1]"]),
        ({"keep": float("inf")}, ["keep is inf", "(0, 1]"]),
        ({"keep": 0, "strategy": "all"}, ["keep is 0"]),
        ({"eps": -0.01}, ["eps is -0.01"]),
        ({"eps": float("nan")}, ["eps is nan"]),
        ({"eps": float("inf")}, ["eps is inf"]),
        ({"strategy": "band"}, ["band=(low, high)"]),
        ({"strategy": "band", "band": (0.5, 0.5)}, ["(0.5, 0.5)", "0 <= low < high <= 1"]),
        ({"strategy": "band", "band": (0.75, 0.25)}, ["(0.75, 0.25)"]),
        ({"strategy": "band", "band": (-0.1, 0.5)}, ["(-0.1, 0.5)"]),
        ({"strategy": "band", "band": (0.5, 1.1)}, ["(0.5, 1.1)"]),
        ({"strategy": "band", "band": (float("nan"), 1)}, ["(nan, 1)"]),
        ({"score": "outcome_variance"}, ["successes"]),
        ({"score": "entropy"}, ["entropies"]),
        ({"score": "entropy_variance"}, ["entropies"]),
        ({"score": "length"}, ["lengths"]),
        ({"score": "length", "lengths": [1]}, ["lengths has 1 values", "groups has 4"]),
        ({"successes": [1, 0, 1, float("nan")]}, ["successes[3] is nan"]),
        ({"entropies": [[1], [2], [3], [4]]}, ["entropies", "(4, 1)", "one-dimensional"]),
        ({"lengths": 5}, ["lengths", "()", "one-dimensional"]),
    ],
)
def test_bad_options(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        select_groups([0, 1, 2, 4], [0, 0, 1, 1], **options)
    for word in words[1:]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("all_equal", [[0, 1], [1, 1]])
def test_names_are_checked_whatever_the_rewards(all_equal: list[int]) -> None:
    for options in ({"strategy": "nope"}, {"score": "nope"}, {"order": "nope"}, {"keep": 2}, {"score": "length"}):
        with pytest.raises(ValueError, match=r"unknown|keep|lengths"):
            select_groups(all_equal, [0, 0], **options)


@pytest.mark.parametrize(
    ("rewards", "groups", "words"),
    [
        ([], [], ["empty"]),
        (np.zeros(0), np.zeros(0), ["empty"]),
        ([1, 2, 3], [0, 0], ["rewards has 3 values", "groups has 2"]),
        ([1, 2], [0, 0, 1], ["rewards has 2 values", "groups has 3"]),
        ([1], [], ["empty"]),
        ([0, float("nan"), 1], [0, 0, 0], ["rewards[1] is nan"]),
        ([0, 1, float("inf")], [0, 0, 0], ["rewards[2] is inf"]),
        ([float("-inf"), 1, float("nan")], [0, 0, 0], ["rewards[0] is -inf", "2 non-finite"]),
        (torch.tensor([0, float("nan")]), [0, 0], ["rewards[1] is nan"]),
        ([[0, 1], [2, 3]], [0, 1], ["rewards has shape (2, 2)", "one-dimensional"]),
        (torch.zeros(2, 1), [0, 1], ["rewards has shape (2, 1)"]),
        (1.0, [0], ["rewards has shape ()"]),
        ([[0, 1], [2]], [0, 1], ["rewards", "numbers"]),
        (["low", "high"], [0, 0], ["rewards", "numbers"]),
        ([None, 1], [0, 0], ["rewards[0]"]),
        ([0, 1], np.zeros((2, 1)), ["groups", "dimension"]),
        ([0, 1], torch.zeros(2, 2), ["groups", "dimension"]),
    ],
)
def test_bad_batches(rewards: Any, groups: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        select_groups(rewards, groups)
    for word in words[1:]:
        assert word in str(caught.value)
    assert isinstance(caught.value, BadInput)
    assert "\n" not in str(caught.value)


def test_a_missing_band_is_told_whatever_the_rewards() -> None:
    with pytest.raises(ValueError, match="band"):
        select_groups([1, 1], [0, 0], strategy="band")


def test_a_list_of_torch_scalars_as_ids() -> None:
    same(select_groups(REWARDS, list(torch.tensor(GROUPS)), keep=0.8), EXPECTED)


@pytest.mark.parametrize("groups", [[0, [1]], np.array(0), 5, None], ids=str)
def test_ids_that_are_no_ids(groups: Any) -> None:
    with pytest.raises(ValueError, match="groups"):
        select_groups([0, 1], groups)


def test_a_missing_column_is_bad_input() -> None:
    with pytest.raises(BadInput, match="lengths"):
        select_groups([0, 1], [0, 0], score="length")
