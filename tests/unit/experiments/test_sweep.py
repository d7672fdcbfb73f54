"""Sweeps: the cross product, ids that resume, the table over seeds; and the verb with real runs, one of which fails."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tether.cli.main import main
from tether.cli.side_by_side import end
from tether.core.errors import BadInput, ConfigError
from tether.experiments import schedule
from tether.experiments.cells import CellFiles
from tether.experiments.harvest import harvest
from tether.experiments.quantities import Quantity
from tether.experiments.schedule import State
from tether.experiments.sweep import SCALE, split_values, sweep_cells, table_rows, to_json, variants, words

BASE = {"env": {"name": "frozen_lake"}, "steps": 3}
LAST = Quantity("last", "validation/success")


def test_values_are_separated_by_commas_outside_brackets_and_quotes() -> None:
    assert split_values("a, b") == ["a", "b"]
    assert split_values("{question: Q, answer: A},{}") == ["{question: Q, answer: A}", "{}"]
    assert split_values("'http://a,http://b',native") == ["'http://a,http://b'", "native"]


def test_every_combination_once_the_last_key_fastest() -> None:
    chosen = variants(["learner.learning_rate=1e-6,3e-6", "steps=5", "filter.strategy=top_p,all"])
    assert [tuple(variant.values.values()) for variant in chosen] == [
        ("1e-6", "top_p"),
        ("1e-6", "all"),
        ("3e-6", "top_p"),
        ("3e-6", "all"),
    ]
    assert chosen[1].settings == {"learner": {"learning_rate": "1e-6"}, "steps": 5, "filter": {"strategy": "all"}}
    assert chosen[0].name == "learning_rate=1e-6-strategy=top_p"
    (alone,) = variants([])
    assert (alone.name, alone.settings) == ("base", {})


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (["steps"], "write it as key=value or key=value,value"),
        (["steps=1,"], "write it as key=value or key=value,value"),
        (["steps=1,2,1"], "has a value twice (1,2,1)"),
        (["steps=1", "steps=2"], "was given twice; give its values with commas between"),
    ],
)
def test_slips(pairs: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        variants(pairs)
    assert said in str(caught.value)


def test_cells_come_seed_by_seed_and_their_ids_follow_from_the_settings() -> None:
    chosen = variants(["learner.learning_rate=1e-5,1e-4"])
    cells = sweep_cells(BASE, chosen, [0, 1])
    assert [(cell.seed, cell.arm) for cell in cells] == [(seed, variant.name) for seed in (0, 1) for variant in chosen]
    assert [cell.id for cell in cells] == [cell.id for cell in sweep_cells(BASE, chosen, [0, 1])]
    assert not {cell.id for cell in cells} & {cell.id for cell in sweep_cells({**BASE, "steps": 4}, chosen, [0, 1])}
    with pytest.raises(BadInput, match=r"1e-05|learning_rate"):
        sweep_cells(BASE, variants(["learner.learning_rate=-1,1"]), [0])
    with pytest.raises(BadInput, match="1000 are the most"):
        sweep_cells(BASE, chosen, range(501))


def test_the_table_has_intervals_over_seeds_and_paired_differences(tmp_path: Path, finished_run: Callable[..., Path]) -> None:
    chosen = variants(["learner.learning_rate=1e-5,1e-4"])
    cells = sweep_cells(BASE, chosen, [0, 1, 2])
    files = CellFiles(tmp_path, SCALE)
    success = {(0, 0): 0.2, (0, 1): 0.3, (0, 2): 0.4, (1, 0): 0.5, (1, 1): 0.7}  # the last run is missing
    for (variant, seed), value in success.items():
        cell = next(cell for cell in cells if (cell.arm, cell.seed) == (chosen[variant].name, seed))
        files.write(cell, harvest(cell, finished_run(tmp_path / cell.id, cell, value), commit="x"))
    first, second = table_rows(cells, chosen, files, [LAST])
    assert (first.done, first.planned, second.done, second.planned) == (3, 3, 2, 3)
    level = first.levels[str(LAST)]
    assert level.value == pytest.approx(0.3)
    assert (level.low, level.high) == pytest.approx((0.3 - 4.303 * 0.1 / 3**0.5, 0.3 + 4.303 * 0.1 / 3**0.5), abs=1e-4)
    assert second.levels[str(LAST)].high == 1.0  # 0.6 +- 1.27: a share ends at 1
    assert first.difference is None and second.difference is not None
    assert second.difference.value == pytest.approx(0.35) and second.difference.how == "paired"  # seeds 0 and 1: 0.3 and 0.4
    data = json.loads(to_json([first, second], {"a": "why"}))
    assert data["rows"][1]["quantities"][str(LAST)]["by_seed"] == {"0": 0.5, "1": 0.7} and data["failed"] == {"a": "why"}


def test_seeds_that_agree_get_no_interval(tmp_path: Path, finished_run: Callable[..., Path]) -> None:
    chosen = variants([])
    cells, files = sweep_cells(BASE, chosen, [0, 1]), CellFiles(tmp_path, SCALE)
    for cell in cells:
        files.write(cell, harvest(cell, finished_run(tmp_path / cell.id, cell, 0.5), commit="x"))
    (row,) = table_rows(cells, chosen, files, [LAST])
    assert words(row.levels[str(LAST)], LAST) == "50.0, n = 2, all equal"
    assert json.loads(to_json([row], {}))["rows"][0]["quantities"][str(LAST)]["interval"] is None


def _call(*given: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *given])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["sokoban/ppoo"], "unknown config 'sokoban/ppoo', and no such file: did you mean 'sokoban/ppo'?"),
        (["frozenlake"], "did you mean 'frozen_lake'?"),
        (["frozen_lake", "--seeds", "x"], "write them as 0-2"),
        (["frozen_lake", "--set", "learner.learning_rat=1,2"], "did you mean 'learner.learning_rate'?"),
        (["frozen_lake", "--metric", "final validation/success"], "has no window 'final'"),
        (["frozen_lake", "--jobs", "0"], "--jobs is 0"),
        (["frozen_lake", "--max-minutes", "0"], "--max-minutes is 0"),
    ],
)
def test_mistakes_are_one_line(given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(*given, "--out", str(tmp_path / "sweep")) == 2
    assert said in capsys.readouterr().err


def test_ctrl_c_ends_with_130_and_says_how_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    state = State(total=3, present=1, stopped="interrupted", waiting=sweep_cells(BASE, variants([]), [0, 1]))
    with pytest.raises(SystemExit) as ended:
        end(state, Console(), "runs")
    assert ended.value.code == 130
    assert "2 runs are left, and the same command continues them" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.long
def test_a_sweep_names_what_failed_and_never_runs_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "POLL_SECONDS", 0.1)
    small: list[str] = [
        *("--set", "rollout.num_groups=2", "--set", "rollout.group_size=2", "--set", "rollout.max_tokens=16"),
        *("--set", "evaluation.prompts=2", "--set", "server.patience=0"),
    ]
    given = ["frozen_lake", "--seeds", "0", "--steps", "1", "--jobs", "2", "--out", str(tmp_path / "sweep"), *small]
    engines = ["--set", "rollout.engine=native,http://127.0.0.1:9"]  # nothing listens on port 9
    assert _call(*given, *engines, "--json") == 1
    told = capsys.readouterr()
    table: dict[str, Any] = json.loads(told.out)
    assert [row["done"] for row in table["rows"]] == [1, 0]
    ((failed, reason),) = table["failed"].items()
    assert "engine=http" in failed and "127.0.0.1:9" in reason and f"failed: {failed}" in told.err
    (run,) = (tmp_path / "sweep").glob("*native*/run.json")
    before = run.stat().st_mtime_ns
    assert (run.parent / "report.html").is_file() and (run.parent / "checkpoints").is_dir()  # a sweep keeps its runs
    assert _call(*given, *engines, "--max-minutes", "1e-6") == 0
    assert "1 of 1" in (again := capsys.readouterr().out) and "1 runs are left, and the same command continues them" in again
    assert run.stat().st_mtime_ns == before
