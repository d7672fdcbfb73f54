"""Buckets and halves: who stands where; signal and noise from halves, against their definitions."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from tether.core.errors import BadInput
from tether.diagnostics.buckets import Agreement, Bucket, SignalNoise, dot, split_halves, variance_buckets


def test_buckets_are_of_equal_size_and_ascending() -> None:
    variances = dict(enumerate([0.9, 0.1, 0.5, 0.0, 0.7, 0.3]))

    assert variance_buckets(variances, 3) == [
        Bucket((3, 1), 0.0, 0.1, 0.05),
        Bucket((5, 2), 0.3, 0.5, 0.4),
        Bucket((4, 0), 0.7, 0.9, 0.8),
    ]


def test_six_buckets_unless_told_otherwise() -> None:
    assert [bucket.groups for bucket in variance_buckets({group: float(group) for group in range(12)})] == [
        (0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)
    ]  # fmt: skip


def test_what_does_not_divide_makes_the_first_buckets_larger() -> None:
    sizes = [len(bucket.groups) for bucket in variance_buckets({group: float(group) for group in range(16)}, 6)]

    assert sizes == [3, 3, 3, 3, 2, 2]


def test_fewer_prompts_than_buckets() -> None:
    assert [bucket.groups for bucket in variance_buckets({4: 1.0, 2: 0.5}, 6)] == [(2,), (4,)]


def test_ties_keep_the_order_they_came_in() -> None:
    assert [bucket.groups for bucket in variance_buckets({9: 0.0, 1: 0.0, 5: 0.0, 3: 0.0}, 2)] == [(9, 1), (5, 3)]


@pytest.mark.parametrize(
    ("variances", "count", "words"),
    [
        ({}, 6, "no groups"),
        ({1: math.nan}, 6, "group 1 is nan"),
        ({1: 0.0, 2: math.inf}, 6, "group 2 is inf"),
        ({1: -0.5}, 6, "group 1 is -0.5"),
        ({1: 0.5}, 0, "at least 1, got 0"),
    ],
)
def test_bad_input(variances: dict[int, float], count: int, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        variance_buckets(variances, count)


def test_halves_hold_as_many_members_of_every_prompt() -> None:
    groups = [5, 5, 2, 5, 2, 5, 5, 9, 2, 2]  # five members of 5, four of 2, one of 9

    halves = split_halves(groups, seed=3)

    assert Counter(groups[i] for i in halves.first) == Counter(groups[i] for i in halves.second) == {5: 2, 2: 2}
    assert Counter(groups[i] for i in halves.left_over) == {5: 1, 9: 1}
    assert sorted(halves.first + halves.second + halves.left_over) == list(range(10))
    assert all(part == tuple(sorted(part)) for part in (halves.first, halves.second, halves.left_over))


def test_halves_follow_the_seed_and_the_group_alone() -> None:
    alone, among_others = split_halves([7] * 8, seed=1), split_halves([7] * 8 + [1] * 4, seed=1)

    assert alone == split_halves([7] * 8, seed=1)
    assert [i for i in among_others.first if i < 8] == list(alone.first)
    assert len({split_halves([7] * 8, seed=seed).first for seed in range(20)}) > 10
    assert len({split_halves([group] * 8, seed=1).first for group in range(20)}) > 10


def test_every_member_is_left_over_as_often() -> None:
    counts = Counter(split_halves([0, 0, 0], seed=seed).left_over[0] for seed in range(300))

    assert all(70 <= counts[member] <= 130 for member in range(3))


def test_signal_and_noise_by_hand() -> None:
    first, second = [torch.tensor([3.0, 0.0]), torch.tensor([[1.0]])], [torch.tensor([1.0, 2.0]), torch.tensor([[1.0]])]

    measured = SignalNoise.from_halves(first, second, 0.25, 0.5)

    assert measured.signal == 4.0  # 3 * 1 + 0 * 2 + 1 * 1
    assert measured.noise == pytest.approx(8.0 / 6.0)  # |(2, -2, 0)|^2 = 8, times 0.125 / 0.75
    assert measured.snr == pytest.approx(math.sqrt(3.0))


def test_signal_and_noise_of_whole_halves_add_up() -> None:
    first, second = [torch.tensor([0.3, -1.2, 2.0])], [torch.tensor([1.1, 0.4, 0.7])]
    mean = [(first[0] + second[0]) / 2]

    measured = SignalNoise.from_halves(first, second, 0.5, 0.5)

    assert measured.signal + measured.noise == pytest.approx(dot(mean, mean))


@pytest.mark.parametrize(("signal", "noise", "snr"), [(-1.0, 2.0, 0.0), (0.0, 0.0, 0.0), (4.0, 0.0, math.inf), (9.0, 4.0, 1.5)])
def test_snr_at_the_edges(signal: float, noise: float, snr: float) -> None:
    assert SignalNoise(signal, noise).snr == snr


@pytest.mark.parametrize("sizes", [(8, 8, 0), (6, 6, 2), (4, 12, 0)])
def test_signal_and_noise_are_unbiased(sizes: tuple[int, int, int]) -> None:
    """Synthetic gradients: mean g with |g|^2 = 4.25, every sample off by a deviation of 3 in each of 5 directions."""
    draw = np.random.Generator(np.random.PCG64(1))
    true, count = np.array([1.0, -1.0, 1.5, 0.0, 0.0]), sum(sizes)
    samples = true + 3.0 * draw.standard_normal((6_000, count, 5))
    first, second = samples[:, : sizes[0]].mean(axis=1), samples[:, sizes[0] : sizes[0] + sizes[1]].mean(axis=1)

    found = [
        SignalNoise.from_halves([one], [other], sizes[0] / count, sizes[1] / count)
        for one, other in zip(torch.from_numpy(first), torch.from_numpy(second), strict=True)
    ]

    assert np.mean([one.signal for one in found]) == pytest.approx(4.25, rel=0.05)
    assert np.mean([one.noise for one in found]) == pytest.approx(9.0 * 5 / count, rel=0.05)


@pytest.mark.parametrize("rewards", [(1.0, 0.0, 0.3), (0.7, 0.7, 0.7)])
def test_a_shared_mean_reward_makes_no_signal_out_of_nothing(rewards: tuple[float, ...]) -> None:
    """All outcomes of four draws of a softmax policy over three actions: E[g_1 . g_2] = |g|^2 ((G-1)^2 + 1) / G^2, as the docstring says."""
    policy = np.array([0.5, 0.2, 0.3])
    scores = np.eye(3) - policy
    gradient = sum(policy[a] * rewards[a] * scores[a] for a in range(3))
    expected = 0.0
    for actions in itertools.product(range(3), repeat=4):
        advantages = np.array([rewards[a] for a in actions]) - np.mean([rewards[a] for a in actions])
        halves = [torch.tensor(np.mean([advantages[i] * scores[actions[i]] for i in half], axis=0)) for half in ((0, 1), (2, 3))]
        expected += float(np.prod([policy[a] for a in actions])) * SignalNoise.from_halves([halves[0]], [halves[1]], 0.5, 0.5).signal

    assert expected == pytest.approx(float(gradient @ gradient) * (9 + 1) / 16, abs=1e-12)


def test_agreement_by_hand() -> None:
    found = Agreement.between([1.0, 2.0, 4.0], [0.5, 1.5, 2.0])

    assert found.ratio == pytest.approx((0.5 + 0.75 + 0.5) / 3)
    assert found.ratio_spread == pytest.approx(math.sqrt(1 / 72) / (1.75 / 3))  # ratios are off their mean by -1/12, 1/6, -1/12
    assert found.correlation == pytest.approx(np.corrcoef([1.0, 2.0, 4.0], [0.5, 1.5, 2.0])[0, 1])


def test_agreement_leaves_out_what_has_no_value() -> None:
    found = Agreement.between([1.0, None, 2.0, math.inf, 3.0, 4.0], [2.0, 7.0, 4.0, 1.0, 6.0, None])

    assert (found.correlation, found.ratio, found.ratio_spread) == (pytest.approx(1.0), 2.0, 0.0)


@pytest.mark.parametrize(
    ("exact", "cheap", "ratio"), [([], [], None), ([2.0], [1.0], 0.5), ([1.0, 1.0], [1.0, 3.0], 2.0), ([0.0, 0.0], [0.0, 0.0], None)]
)
def test_no_correlation_without_two_values_that_differ(exact: list[float], cheap: list[float], ratio: float | None) -> None:
    found = Agreement.between(exact, cheap)

    assert found.correlation is None
    assert found.ratio == ratio


def test_agreement_with_nothing_but_zeros_has_no_spread() -> None:
    assert Agreement.between([1.0, 2.0], [0.0, 0.0]) == Agreement(None, 0.0, None)
