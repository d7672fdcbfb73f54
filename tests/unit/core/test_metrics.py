"""Metrics: the catalogue, what a step refuses to log, and the Wilson interval against known answers."""

import math
import re

import pytest

from tether.core.errors import UnknownName
from tether.core.metrics import CATALOGUE, StepMetrics, is_catalogued, wilson_interval


def test_catalogue_names_and_explanations() -> None:
    sections = {name.partition("/")[0] for name in CATALOGUE}
    information = {f"information{what}{scope}" for what in ("", "_calls") for scope in ("", "_trajectory", "_turn")}
    assert sections == {"rollout", "prompts", "groups", "update", *information, "alarms", "gradients", "validation"}
    for name, meaning in CATALOGUE.items():
        assert re.fullmatch(r"[a-z_]+(/([a-z0-9_]|\{[a-z]+\})+)+", name)
        assert len(meaning) > 10, name


def test_put() -> None:
    metrics = StepMetrics()
    metrics.put("rollout", {"success": 0.5, "errors": 0})
    metrics.put("update", {"loss": -1.25})
    assert metrics == {"rollout/success": 0.5, "rollout/errors": 0.0, "update/loss": -1.25}
    assert [type(value) for value in metrics.values()] == [float, float, float]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("rollout/success", True),
        ("validation/pass_at_8", True),
        ("rollout/env/frozen_lake/success", True),
        ("validation/env/web.shop-2/score", True),
        ("information_turn/mi_seq", True),
        ("gradients/task_norm_6", True),
        ("gradients/task_norm_", False),
        ("gradients/task_norm", False),
        ("information_turns/mi_seq", False),
        ("validation/pass_at_", False),
        ("validation/pass_at_8/more", False),
        ("rollout/env/frozen_lake", False),
        ("rollout/env//success", False),
        ("rollout/env/a/b/c", False),
        ("more/rollout/env/a/b", False),
        ("update/env/frozen_lake/success", False),
        ("rollout/succes", False),
    ],
)
def test_families_of_names(name: str, known: bool) -> None:
    assert is_catalogued(name) is known


def test_a_family_can_be_put() -> None:
    metrics = StepMetrics()
    metrics.put("validation", {"pass_at_2": 0.75, "env/sokoban/success": 0.5})
    assert metrics == {"validation/pass_at_2": 0.75, "validation/env/sokoban/success": 0.5}


def test_unknown_metric() -> None:
    with pytest.raises(UnknownName, match=r"metric 'rollout/sucess' is not in core/metrics\.toml: did you mean 'rollout/success'\?"):
        StepMetrics().put("rollout", {"sucess": 1.0})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_could_not_be_computed_is_not_logged(value: float) -> None:
    metrics = StepMetrics()
    with pytest.raises(ValueError, match=f"metric 'update/loss' is {value}; a step must not log what it could not compute"):
        metrics.put("update", {"loss": value})
    assert metrics == {}


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # Solved from the definition, (rate - p)^2 = z^2 p (1 - p) / n, by bisection; z = 1.959964.
        (8, 10, 0.490162, 0.943318),
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (1, 2, 0.094531, 0.905469),
        (256, 512, 0.456852, 0.543148),
        (5, 512, 0.004178, 0.022654),
        (1, 1, 0.206549, 1.0),
        (0, 1, 0.0, 0.793451),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-6)


def test_wilson_interval_is_mirrored_and_stays_in_range() -> None:
    for successes in range(21):
        low, high = wilson_interval(successes, 20)
        other_low, other_high = wilson_interval(20 - successes, 20)
        assert (low, high) == pytest.approx((1 - other_high, 1 - other_low), abs=1e-12)
        assert 0 <= low <= successes / 20 <= high + 1e-12
        assert high <= 1


def test_wilson_interval_at_another_level() -> None:
    """90%: z = 1.644854, solved the same way."""
    assert wilson_interval(8, 10, z=1.644854) == pytest.approx((0.540793, 0.931442), abs=1e-6)
