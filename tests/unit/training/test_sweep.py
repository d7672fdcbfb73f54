"""Sweeps: the cross product, ids that resume, the table over seeds; and the verb with real runs, one of which fails."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tether.cli.main import main
from tether.cli.side_by_side import end
from tether.core.errors import BadInput, ConfigError
from tether.runs.quantities import Quantity, estimate_words
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.training import side_by_side
from tether.training.side_by_side import SweepState
from tether.training.sweep import Trial, identity_of, split_values, sweep_trials, table_rows, to_json, variants

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


def test_trials_come_seed_by_seed_and_their_ids_follow_from_the_settings() -> None:
    chosen = variants(["learner.learning_rate=1e-5,1e-4"])
    trials = sweep_trials(BASE, chosen, [0, 1])
    assert [(trial.seed, trial.name) for trial in trials] == [(seed, variant.name) for seed in (0, 1) for variant in chosen]
    assert [trial.id for trial in trials] == [trial.id for trial in sweep_trials(BASE, chosen, [0, 1])]
    assert not {trial.id for trial in trials} & {trial.id for trial in sweep_trials({**BASE, "steps": 4}, chosen, [0, 1])}
    with pytest.raises(BadInput, match=r"1e-05|learning_rate"):
        sweep_trials(BASE, variants(["learner.learning_rate=-1,1"]), [0])
    with pytest.raises(BadInput, match="1000 are the most"):
        sweep_trials(BASE, chosen, range(501))


def finished_run(folder: Path, trial: Trial, success: float) -> None:
    """The folder of a finished run of a trial, whose last validation success is as given."""
    store = RunStore.create(folder / trial.id, "steps: 3\n", {"env": "frozen_lake"})
    for step, value in ((0, 0.1), (trial.steps, success)):
        store.append(StepRecord(step, {"validation/success": value}))
    store.finish("all steps done")
    store.close()


def test_the_table_has_intervals_over_seeds_and_paired_differences(tmp_path: Path) -> None:
    chosen = variants(["learner.learning_rate=1e-5,1e-4"])
    trials = sweep_trials(BASE, chosen, [0, 1, 2])
    success = {(0, 0): 0.2, (0, 1): 0.3, (0, 2): 0.4, (1, 0): 0.5, (1, 1): 0.7}  # the last run is missing
    for (variant, seed), value in success.items():
        finished_run(tmp_path, next(trial for trial in trials if (trial.name, trial.seed) == (chosen[variant].name, seed)), value)
    first, second = table_rows(trials, tmp_path, chosen, [LAST])
    assert (first.done, first.planned, second.done, second.planned) == (3, 3, 2, 3)
    level = first.levels[str(LAST)]
    assert level.value == pytest.approx(0.3)
    # On the logit: ln(3/7) +- 4.3027 x 0.1 / sqrt(3) / 0.21, which is -0.8473 +- 1.1829.
    assert (level.low, level.high) == pytest.approx((1 / (1 + math.exp(2.0302)), 1 / (1 + math.exp(-0.3356))), abs=1e-4)
    assert 0 < second.levels[str(LAST)].low < second.levels[str(LAST)].high < 1  # 0.6 +- 1.27 before the logit
    assert first.difference is None and second.difference is not None
    assert second.difference.value == pytest.approx(0.35) and second.difference.how == "paired"  # seeds 0 and 1: 0.3 and 0.4
    data = json.loads(to_json([first, second], {"a": "why"}))
    assert data["rows"][1]["quantities"][str(LAST)]["by_seed"] == {"0": 0.5, "1": 0.7} and data["failed"] == {"a": "why"}


def test_seeds_that_agree_get_no_interval(tmp_path: Path) -> None:
    chosen = variants([])
    trials = sweep_trials(BASE, chosen, [0, 1])
    for trial in trials:
        finished_run(tmp_path, trial, 0.5)
    (row,) = table_rows(trials, tmp_path, chosen, [LAST])
    assert estimate_words(row.levels[str(LAST)], LAST) == "50.0, n = 2, all equal"
    assert json.loads(to_json([row], {}))["rows"][0]["quantities"][str(LAST)]["interval"] is None


# --------------------------------------------------------------------------------------------------------------------- ids

PLAIN = {"env": {"name": "sokoban"}, "filter": {"strategy": "all"}, "seed": 1}


def test_a_default_that_is_spelled_out_is_the_same_trial() -> None:
    spelled = {**PLAIN, "model": {"name": "tiny"}, "rollout": {"num_groups": 8, "temperature": 1.0}, "learner": {"learning_rate": 1e-4}}
    assert identity_of(PLAIN) == identity_of(spelled)


def test_defaults_of_an_algorithm_are_not_part_of_an_identity() -> None:
    dapo = identity_of({"env": {"name": "sokoban"}, "algorithm": {"name": "dapo"}})
    assert not any(key.startswith("filter.") for key in dapo)


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"steps": 7}, {"algorithm": {"kl_coef": 0.1}}, {"env": {"name": "sokoban", "options": {"boxes": 2}}}]
)
def test_what_decides_the_result_makes_another_trial(change: dict) -> None:
    assert identity_of(PLAIN) != identity_of({**PLAIN, **change})


@pytest.mark.parametrize(
    "change",
    [{"checkpoint": {"every": 3, "best": False}}, {"rollout": {"max_rows": 7, "cache_gb": 1.0}}, {"learner": {"micro_tokens": 99}}],
)
def test_speed_memory_and_disk_do_not(change: dict) -> None:
    assert identity_of(PLAIN) == identity_of({**PLAIN, **change})


def test_whether_a_models_folder_is_there_changes_no_identity(tmp_path: Path) -> None:
    """The folder says how the model was asked when it was trained, which its runs take over; the id of a run that says it itself stays."""
    folder = tmp_path / "model"
    settings = {"env": {"name": "sokoban", "options": {"observation": "grid_coordinates"}}, "model": {"name": f"merged:{folder}"}}
    absent = identity_of(settings)
    assert absent["env.options.observation"] == "grid_coordinates"
    folder.mkdir()
    terms = {"version": 1, "environments": {"sokoban": {"observation": "grid_coordinates"}}, "rollout": {}}
    (folder / "agent.json").write_text(json.dumps(terms))
    assert identity_of(settings) == absent


def test_a_wrong_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'filter\.keep'"):
        identity_of({**PLAIN, "filter": {"kep": 0.5}})


# --------------------------------------------------------------------------------------------------------------- the verb


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
    state = SweepState(total=3, present=1, stopped="interrupted", waiting=sweep_trials(BASE, variants([]), [0, 1]))
    with pytest.raises(SystemExit) as ended:
        end(state, Console(), "runs")
    assert ended.value.code == 130
    assert "2 runs are left, and the same command continues them" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.long
def test_a_sweep_names_what_failed_and_never_runs_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "POLL_SECONDS", 0.1)
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


@pytest.mark.parametrize("section", ["algorithm", "env"])
def test_a_plain_value_for_a_section_is_one_line(section: str) -> None:
    given = {"env": {"name": "frozen_lake"}, section: "ppo"}
    with pytest.raises(ConfigError, match=f"config key '{section}' holds settings: got 'ppo'; set one of them, such as '{section}.name'"):
        identity_of(given)
