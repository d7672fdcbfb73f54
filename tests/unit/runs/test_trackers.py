"""Trackers: the real packages, read back with their own readers. Those that are not installed are skipped; `make test-trackers` has them all."""

import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tether.core.errors import BadInput, MissingDependency, UnknownName
from tether.runs.trackers import TRACKERS, TrackedRun, check_tracker, flat, open_tracker, run_id

Read = Callable[[Path], dict[int, float]]
NAME = "validation/success"


def _installed(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed; make test-trackers runs this")


def _run(folder: Path, first_step: int = 0, notes: list[str] | None = None) -> TrackedRun:
    folder.mkdir(exist_ok=True)
    say = (notes if notes is not None else []).append
    return TrackedRun(folder, flat({"env": {"name": "sokoban"}, "seed": 3}), first_step, run_id(folder), say)


def _tensorboard(folder: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {event.step: round(event.value, 6) for event in events.Scalars(NAME)}


def _mlflow(folder: Path) -> dict[int, float]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.absolute().parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tether")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"env.name": "sokoban", "seed": "3"}
    assert run.info.status == "FINISHED"
    return {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, NAME)}


def _trackio(folder: Path) -> dict[int, float]:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("tether")
    return {row["step"]: row[NAME] for row in SQLiteStorage.get_logs("tether", name) if NAME in row}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the packages these are built on
@pytest.mark.parametrize(("name", "read"), [("tensorboard", _tensorboard), ("mlflow", _mlflow), ("trackio", _trackio)])
def test_numbers_arrive_and_a_resumed_run_continues_its_curve(
    name: str, read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    folder = tmp_path / "run"
    first = open_tracker(name, _run(folder))
    for step, value in ((0, 0.125), (1, 0.25), (2, 0.5)):
        first.log(step, {NAME: value})
    first.close()
    again = open_tracker(name, _run(folder, first_step=3))
    again.log(3, {NAME: 0.75})
    again.close()
    assert read(folder) == {0: 0.125, 1: 0.25, 2: 0.5, 3: 0.75}


def test_tensorboard_forgets_the_steps_that_a_resumed_run_plays_again(tmp_path: Path) -> None:
    _installed("tensorboard")
    first = open_tracker("tensorboard", _run(tmp_path / "run"))
    for step in range(5):
        first.log(step, {NAME: float(step)})
    first.close()
    again = open_tracker("tensorboard", _run(tmp_path / "run", first_step=3))
    again.log(3, {NAME: 30.0})
    again.close()
    assert _tensorboard(tmp_path / "run") == {0: 0.0, 1: 1.0, 2: 2.0, 3: 30.0}


def test_wandb_without_credentials_keeps_the_run_in_its_folder_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed("wandb")
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where credentials would be
    notes: list[str] = []
    tracker = open_tracker("wandb", _run(tmp_path / "run", notes=notes))
    tracker.log(0, {NAME: 0.25})
    tracker.close()
    assert notes == [
        "wandb: no credentials found (`wandb login`), so the run is tracked offline; later: "
        f"wandb sync {tmp_path / 'run'}/wandb/offline-run-*"
    ]
    (kept,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert run_id(tmp_path / "run") in kept.name
    deadline = time.monotonic() + 30  # a process of wandb's own writes the file
    while NAME.encode() not in kept.read_bytes():
        assert time.monotonic() < deadline, "the numbers never reached wandb's file"
        time.sleep(0.1)


def test_a_tracker_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    _installed("tensorboard")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "tensorboard").write_text("a file where the folder belongs")
    with pytest.raises(BadInput, match=r"^tracker 'tensorboard' cannot start: .*; check its settings, or leave it out$"):
        open_tracker("tensorboard", _run(folder))


def test_unknown_and_missing_trackers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName, match="unknown tracker 'wand': did you mean 'wandb'"):
        check_tracker("wand")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in TRACKERS:
        with pytest.raises(MissingDependency, match=rf"needs the package {name}, .* pip install 'tether-agents\[{name}\]'"):
            check_tracker(name)


def test_the_id_of_a_run_stays(tmp_path: Path) -> None:
    first = run_id(tmp_path)
    assert run_id(tmp_path) == first
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"id": first}
