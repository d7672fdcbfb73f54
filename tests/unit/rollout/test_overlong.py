"""The soft overlong punishment of DAPO, equation 13, with its own numbers: 16,384 expected tokens and a buffer of 4,096."""

import pytest

from tether.rollout.episode import overlong_penalty


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0), (16_384, 0), (16_385, -1 / 4096), (17_408, -0.25), (18_432, -0.5), (20_479, -4095 / 4096), (20_480, -1), (25_000, -1)],
)
def test_linear_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_tokens=20_480, buffer=4_096) == penalty


def test_the_factor_scales_it() -> None:
    assert overlong_penalty(95, max_tokens=100, buffer=10, factor=0.5) == -0.25
    assert overlong_penalty(100, max_tokens=100, buffer=10, factor=3) == -3


def test_without_a_buffer_there_is_none() -> None:
    assert [overlong_penalty(length, max_tokens=100, buffer=0) for length in (50, 100, 101)] == [0, 0, 0]


def test_a_buffer_as_long_as_the_limit_punishes_every_token() -> None:
    assert [overlong_penalty(length, max_tokens=4, buffer=4) for length in range(5)] == [0, -0.25, -0.5, -0.75, -1]


def test_no_punishment_is_plain_zero() -> None:
    assert str(overlong_penalty(1, max_tokens=100, buffer=10)) == "0.0"
