"""Trackers of a run: what they get, and what happens when one fails."""

from collections.abc import Mapping
from pathlib import Path

import pytest

import tether.training.callbacks as tracking
from tether.core.config import Settings
from tether.runs.checkpoints import checkpoint_name
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.runs.timings import StepTimings
from tether.runs.trackers import TrackedRun
from tether.training.callbacks import Callback, Tracking


class Chosen(Settings):
    seed: int = 7


class Notes(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_note(self, text: str) -> None:
        self.texts.append(text)


class Recording:
    """A tracker of a user's own: the protocol is all it takes."""

    errors = (ConnectionError,)

    def __init__(self, run: TrackedRun, fails_at: int | None = None) -> None:
        self.run, self.fails_at = run, fails_at
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("the server\n went away")
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


def _store(tmp_path: Path) -> RunStore:
    return RunStore.create(tmp_path / "run", "seed: 7\n", {})


def _record(step: int, **metrics: float) -> StepRecord:
    return StepRecord(step, {name.replace("__", "/"): value for name, value in metrics.items()}, None, [])


def test_every_step_is_sent_once_and_only_changes_of_an_amended_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recording] = []
    monkeypatch.setattr(tracking, "open_tracker", lambda name, run: made.append(Recording(run)) or made[-1])
    followed = Tracking(["tensorboard"], Chosen(), _store(tmp_path), [])
    with followed.running():
        followed.on_step_end(_record(1, rollout__success=0.5), StepTimings({"rollout": 2.0}, 900.0))
        followed.on_step_end(_record(1, rollout__success=0.5, validation__success=0.25), StepTimings({"rollout": 2.0}, 900.0))
        followed.on_step_end(_record(2, rollout__success=0.5), StepTimings({"rollout": 2.0}))
    (tracker,) = made
    assert tracker.rows == [
        (1, {"rollout/success": 0.5, "seconds/rollout": 2.0, "rollout/tokens_per_second": 900.0}),
        (1, {"validation/success": 0.25}),
        (2, {"rollout/success": 0.5, "seconds/rollout": 2.0}),
    ]
    assert tracker.closed == 1
    assert dict(tracker.run.config) == {"seed": 7} and tracker.run.first_step == 0


def test_a_resumed_run_begins_behind_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recording] = []
    monkeypatch.setattr(tracking, "open_tracker", lambda name, run: made.append(Recording(run)) or made[-1])
    store = _store(tmp_path)
    checkpoint = store.checkpoints / checkpoint_name(4)
    checkpoint.mkdir()
    (checkpoint / "state.pt").write_bytes(b"")
    with Tracking(["mlflow"], Chosen(), store, []).running():
        pass
    assert made[0].run.first_step == 5


def test_a_tracker_that_fails_is_said_and_left_out_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Recording] = {}

    def opened(name: str, run: TrackedRun) -> Recording:
        made[name] = Recording(run, fails_at=2 if name == "wandb" else None)
        return made[name]

    monkeypatch.setattr(tracking, "open_tracker", opened)
    notes = Notes()
    followed = Tracking(["wandb", "mlflow"], Chosen(), _store(tmp_path), [notes])
    with followed.running():
        for step in (1, 2, 3):
            followed.on_step_end(_record(step, rollout__success=0.5), StepTimings())
    assert [step for step, _ in made["mlflow"].rows] == [1, 2, 3]
    assert [step for step, _ in made["wandb"].rows] == [1]
    assert made["wandb"].closed == 0 and made["mlflow"].closed == 1
    assert notes.texts == ["tracker wandb failed and gets nothing more (the server went away); metrics.jsonl holds every number"]
