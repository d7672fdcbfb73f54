"""Trackers: the real packages, read back with their own readers. Those that are not installed are skipped; `make test-trackers` has them all."""

import importlib.util
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tether.core.config import flattened
from tether.core.errors import BadInput, MissingDependency, UnknownName
from tether.runs.trackers import TRACKERS, TrackedRun, check_tracker, open_tracker, run_id

Read = Callable[[Path], dict[int, float]]
NAME = "validation/success"


def _installed(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed; make test-trackers runs this")


def _run(folder: Path, first_step: int = 0, notes: list[str] | None = None) -> TrackedRun:
    folder.mkdir(exist_ok=True)
    say = (notes if notes is not None else []).append
    return TrackedRun(folder, flattened({"env": {"name": "sokoban"}, "seed": 3}), first_step, run_id(folder), say)


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

    return {row["step"]: row[NAME] for row in SQLiteStorage.get_logs("tether", _trackio_name(folder)) if NAME in row}


def _trackio_name(folder: Path) -> str:
    """The one run with the id of this folder. trackio reads TRACKIO_DIR when it is imported, so runs of earlier tests may be there, too."""
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = [known for known in SQLiteStorage.get_runs("tether") if known.endswith(run_id(folder))]
    return str(name)


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_mlflow_and_trackio_keep_both_values_of_a_step_that_is_played_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    first = open_tracker(name, _run(tmp_path / "run"))
    for step in range(3):
        first.log(step, {NAME: float(step)})
    first.close()
    again = open_tracker(name, _run(tmp_path / "run", first_step=2))
    again.log(2, {NAME: 20.0})
    again.close()
    assert sorted(_all_values(name, tmp_path / "run")) == [(0, 0.0), (1, 1.0), (2, 2.0), (2, 20.0)]


def _all_values(name: str, folder: Path) -> list[tuple[int, float]]:
    if name == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        run = _trackio_name(folder)
        return [(row["step"], row[NAME]) for row in SQLiteStorage.get_logs("tether", run) if NAME in row]
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.absolute().parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tether")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    return [(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, NAME)]


def _wandb_values(folder: Path) -> list[dict[int, float]]:
    """What each attempt's file holds, oldest first: W&B's records, in blocks as LevelDB logs them."""
    from wandb.proto import wandb_internal_pb2

    attempts = []
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        data, at, whole, found = path.read_bytes(), 7, b"", {}
        while at + 7 <= len(data):
            if (left := 2**15 - at % 2**15) < 7:  # the rest of a block, too short for a header
                at += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # a whole record, or the last part of one
                record = wandb_internal_pb2.Record.FromString(whole)
                values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                found |= {values["_step"]: values[NAME]} if NAME in values else {}
                whole = b""
        attempts.append(found)
    return attempts


def test_wandb_offline_keeps_each_attempt_in_a_file_of_its_own_with_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that are played again are in both files. Within an attempt, a step below the highest is dropped: W&B's steps only rise."""
    _installed("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "run"
    first = open_tracker("wandb", _run(folder))
    for step in range(4):
        first.log(step, {NAME: float(step)})
    first.log(2, {NAME: 99.0})
    first.close()
    while int(time.time()) <= max(int(path.stat().st_ctime) for path in (folder / "wandb").iterdir()):
        time.sleep(0.05)  # wandb names the folder of an attempt by its second
    again = open_tracker("wandb", _run(folder, first_step=3))
    for step, value in ((3, 30.0), (4, 40.0)):
        again.log(step, {NAME: value})
    again.close()
    deadline = time.monotonic() + 60  # a process of wandb's own writes the files
    while 4 not in _wandb_values(folder)[-1] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _wandb_values(folder) == [{0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}, {3: 30.0, 4: 40.0}]
    assert {path.name.rpartition("-")[2] for path in (folder / "wandb").glob("offline-run-*")} == {run_id(folder)}


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
