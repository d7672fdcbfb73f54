"""Environments get their share of every step to within one group, on average exactly, and the same draw for the same step."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.core.errors import BadInput
from tether.core.seeding import validation_seed
from tether.rollout.sampler import EnvSpec, spread_groups, training_plan, validation_plan


def test_by_hand() -> None:
    """Shares 1/2, 1/3 and 1/6 end at 0.5, 0.8333 and 1; four groups look at (0, 1, 2, 3) / 4 plus a quarter of the offset."""
    assert spread_groups([3, 2, 1], 4, 0.0) == [0, 0, 1, 1]
    assert spread_groups([3, 2, 1], 4, 0.5) == [0, 0, 1, 2]
    assert spread_groups([3, 2, 1], 6, 0.25) == [0, 0, 0, 1, 1, 2]
    assert spread_groups([0.2], 3, 0.9) == [0, 0, 0]
    assert spread_groups([0, 1, 0, 1, 0], 4, 0.0) == [1, 1, 3, 3], "no weight, no group"
    assert spread_groups([1, 1], 0, 0.5) == []


def test_rounding_does_not_reach_past_the_last_environment() -> None:
    """1 plus the largest number below 1 is 2 in floating point: the second of two groups looks at the very end."""
    for weights in ([1, 1], [1, 1, 0]):
        assert spread_groups(weights, 2, math.nextafter(1, 0)) == [0, 1]


@given(
    st.lists(st.floats(0, 1e3), min_size=1, max_size=6).filter(lambda weights: sum(weights) > 1e-3),
    st.integers(1, 64),
    st.floats(0, 1, exclude_max=True),
)
def test_shares_to_within_one_group(weights: list[float], num_groups: int, offset: float) -> None:
    spread = spread_groups(weights, num_groups, offset)
    assert len(spread) == num_groups and spread == sorted(spread)
    for index, weight in enumerate(weights):
        assert abs(spread.count(index) - num_groups * weight / sum(weights)) < 1 + 1e-6
        assert weight > 0 or index not in spread


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -0.5], [float("nan")], [float("inf"), 1.0]])
def test_weights_that_mean_nothing(weights: list[float]) -> None:
    with pytest.raises(BadInput, match="the weights of the environments are"):
        spread_groups(weights, 4, 0.5)


def test_a_training_step_draws_its_offset() -> None:
    weights = (0.7, 0.2, 0.1)
    steps = [[seeds.env_index for seeds in training_plan(0, step, 8, 1, weights=weights)] for step in range(400)]
    counts = Counter(env_index for step in steps for env_index in step)
    assert {env_index: counts[env_index] / 3200 for env_index in range(3)} == pytest.approx({0: 0.7, 1: 0.2, 2: 0.1}, abs=0.01)
    assert {step.count(2) for step in steps} == {0, 1} and {step.count(0) for step in steps} == {5, 6}
    assert [seeds.env_index for seeds in training_plan(0, 5, 8, 1, weights=weights)] == steps[5]
    assert len({tuple(step) for step in steps}) > 1
    others = [[[seeds.env_index for seeds in training_plan(1, step, 8, 1, weights=weights)] for step in range(400)]]
    others += [[[seeds.env_index for seeds in training_plan(0, step, 8, 1, first_group=8, weights=weights)] for step in range(400)]]
    for other in others:
        assert sum(one == another for one, another in zip(steps, other, strict=True)) < 390, "another run and another round draw their own"


def test_members_of_a_group_play_the_same() -> None:
    plan = training_plan(0, 1, 4, 3, first_group=10, weights=(1, 1))
    assert [(seeds.group, seeds.member, seeds.env_index) for seeds in plan] == [(10 + g, m, g // 2) for g in range(4) for m in range(3)]


def test_validation_prompts_of_a_mixture_are_those_of_the_environment_alone() -> None:
    plan = validation_plan(8, group_size=2, weights=(3, 1))
    assert [(seeds.group, seeds.member, seeds.env_index) for seeds in plan] == [(g, m, int(g >= 6)) for g in range(8) for m in range(2)]
    assert [seeds.instance for seeds in plan[::2]] == [validation_seed(index) for index in (0, 1, 2, 3, 4, 5, 0, 1)]
    for prompts, first in ((12, 1), (16, 2)):  # a tenth of them is 1.2 and 1.6
        assert [seeds.env_index for seeds in validation_plan(prompts, weights=(1, 9))].count(0) == first
    alone = [(seeds.instance, seeds.env_seed, seeds.sampling) for seeds in validation_plan(2, group_size=2)]
    assert [(seeds.instance, seeds.env_seed, seeds.sampling) for seeds in plan[12:]] == alone


@pytest.mark.parametrize(
    ("name", "label"),
    [("frozen_lake", "frozen_lake"), ("my.module:Env-2", "my.module_Env-2"), ("http://host:80/a/b", "http_host_80_a_b")],
)
def test_a_label_has_no_slash_and_no_colon(name: str, label: str) -> None:
    """It becomes a part of metric names."""
    assert EnvSpec(name).label == label
