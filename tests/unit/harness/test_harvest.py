"""What is kept of a run: curves, and what only the trajectories tell."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.grid import Library
from harness.harvest import blocks, harvest, metric_curves, trajectory_curves
from tether.core.errors import BadInput
from tether.runs.quantities import is_measured
from tether.runs.schema import StepRecord

EXPERIMENTS = Path(__file__).parents[3] / "experiments"
Write = Callable[..., Path]


def test_a_finished_run_becomes_a_record(library: Library, finished_run: Write, tmp_path: Path) -> None:
    cell = library.own_cells("one", "tiny")[0]
    found = harvest(cell, finished_run(tmp_path / "run", cell, 0.5), commit="abc123")
    assert (found.id, found.planned, found.finished) == (cell.id, 30, "all 30 steps done")
    assert found.seconds == 62.0  # 31 records of 0.5 + 1.5 seconds
    assert found.curves["validation/success"] == {0: 0.1, 30: 0.5}
    assert found.curves["rollout/success"] == {10: 0.55, 20: 1.55, 30: 2.55}  # means over ten steps
    assert found.about["commit"] == "abc123" and found.about["machine"] == "a machine" and found.about["peak_memory_gb"] == 2.0
    assert len(found.to_json()) < 50_000
    assert all(is_measured(name) for name in found.curves)


def test_an_unfinished_run_is_refused(library: Library, finished_run: Write, tmp_path: Path) -> None:
    cell = library.own_cells("one", "tiny")[0]
    with pytest.raises(BadInput, match="not finished"):
        harvest(cell, finished_run(tmp_path / "run", cell, finished=False), commit="x")


def test_blocks_of_ten_stand_at_their_last_step() -> None:
    assert blocks({step: float(step) for step in range(1, 13)}) == {10: 5.5, 12: 11.5}


def test_only_named_metrics_are_kept() -> None:
    metrics = {
        "gradients/task_norm_6": 1.0,
        "gradients/task_cosine_6": 1.0,
        "information/mi_low": 1.0,
        "information/mi": 2.0,
        "update/ratio_max": 3.0,
    }
    kept = {name for name, curve in metric_curves([StepRecord(1, metrics)]).items() if curve}
    assert kept == {"gradients/task_norm_6", "information/mi"}


def test_every_metric_that_an_experiment_names_is_kept() -> None:
    grids = "".join(path.read_text("utf-8") for path in sorted(EXPERIMENTS.glob("*/grid.yaml")))
    named = set(re.findall(r"\b(?:information|information_trajectory|validation|update|groups|rollout)/\w+", grids))
    kept = {name for name, curve in metric_curves([StepRecord(1, dict.fromkeys(named, 1.0))]).items() if curve}
    assert {"information/image_swapped", "validation/success"} <= named == kept


def make(step: int, group: int, member: int, **changes: Any) -> dict[str, Any]:
    turn = {
        "observation": f"Turn 1 of 5, 10 actions left.\n{changes.pop('board', 'board')}",
        "response": f"thought </think> <answer>{changes.pop('answer', 'Up')}</answer>",
        "response_ids": [0] * changes.pop("tokens", 3),
        "logprobs": [-changes.pop("surprisal", 1.0)],
    }
    plain = {"step": step, "split": "train", "group": group, "member": member, "reward": 0.0, "success": False, "error": None, "kept": True}
    return {**plain, "turns": [turn], **changes}


def test_exploration_of_a_step() -> None:
    """Prompt 0: two boards, one answer, solved, kept. Prompt 1: one board, two answers, unsolved, dropped."""
    curves = trajectory_curves(
        [
            make(1, 0, 0, board="x", success=True),
            make(1, 0, 1, board="y"),
            make(1, 1, 0, board="z", answer="Up", kept=False),
            make(1, 1, 1, board="z", answer="Down", kept=False),
            make(1, 1, 2, board="w", error="the environment raised"),
        ]
    )
    assert curves["exploration/states"] == {1: 1.5}
    assert curves["exploration/states_trained"] == {1: 2}
    assert curves["exploration/answers"] == {1: 1.5}
    assert curves["exploration/solved_prompts"] == {1: 0.5}


def test_the_line_of_turns_is_no_part_of_a_state() -> None:
    first, second = make(1, 0, 0), make(1, 0, 1)
    second["turns"][0]["observation"] = "Turn 2 of 5, 8 actions left.\nboard"
    assert trajectory_curves([first, second])["exploration/states"] == {1: 1.0}


def test_validation_prompts_that_were_ever_solved() -> None:
    solved = {0: (True, False, False), 25: (False, True, False), 50: (False, False, False)}
    episodes = [make(step, group, 0, split="validation", success=one) for step, row in solved.items() for group, one in enumerate(row)]
    assert trajectory_curves(episodes)["exploration/solved_ever"] == pytest.approx({0: 1 / 3, 25: 2 / 3, 50: 2 / 3})


def test_distribution_of_the_reward_variance() -> None:
    """Rewards (0, 2), (0, 4), (0, 6): variances 2, 8, 18 with ddof 1, means 1, 2, 3; length falls, surprisal rises with them."""
    episodes = [
        make(1, group, member, reward=float(member * 2 * (group + 1)), tokens=9 - group, surprisal=group + 1.0)
        for group in range(3)
        for member in range(2)
    ]
    curves = trajectory_curves(episodes)
    assert curves["variance/quantile_50"] == {1: pytest.approx(8.0)}
    assert curves["variance/quantile_10"] == {1: pytest.approx(2 + 0.2 * 6)}  # 10% of the way between three values
    assert [curves[f"variance/with_{name}"][1] for name in ("reward", "length", "entropy")] == pytest.approx([1.0, -1.0, 1.0])
