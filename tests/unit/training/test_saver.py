"""Checkpoints are written from a copy while training goes on: the same files, nothing of a later step in them, no failure passed over."""

import json
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tether.core.config import dump_yaml, merge, validate
from tether.core.errors import CheckpointError, EnvironmentFailure
from tether.runs.checkpoints import best_checkpoint, list_checkpoints
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.runs.timings import StepTimings
from tether.training import saver, snapshot
from tether.training.callbacks import Callback
from tether.training.checkpoint import load_state
from tether.training.loop import Trainer
from tether.training.saver import BackgroundWriter
from tether.training.settings import RunSettings
from tether.training.snapshot import HostMemory

SMALL: dict[str, Any] = {
    "env": {"name": "frozen_lake", "options": {"max_turns": 1}},
    "model": {"device": "cpu"},
    "rollout": {"num_groups": 2, "group_size": 2, "max_tokens": 20, "max_rows": 4},
    "learner": {"update_batch": 4},
    "filter": {"strategy": "all"},
    "diagnosis": {"every": 0},
    "evaluation": {"prompts": 1},
    "checkpoint": {"every": 1, "keep": 9},
    "steps": 2,
}


class _Notes(Callback):
    """Remembers what was said, and may act on it."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.notes: list[str] = []
        self.stages: list[tuple[str, int]] = []
        self._act = act

    def on_note(self, text: str) -> None:
        self.notes.append(text)
        if text.startswith("waiting for"):
            self._act()

    def on_stage_begin(self, name: str, total: int) -> None:
        self.stages.append((name, total))


class _AfterStep(Callback):
    """Does something at the end of every step."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def on_step_end(self, record: StepRecord, timings: StepTimings) -> None:
        self._act()


class _Gate:
    """Holds every write back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real, self.open, self.entered, self.written = saver.save_checkpoint, threading.Event(), threading.Event(), []

        def gated(folder: Path, step: int, *rest: Any) -> Path:
            self.entered.set()
            assert self.open.wait(60)
            self.written.append(step)
            return real(folder, step, *rest)

        monkeypatch.setattr(saver, "save_checkpoint", gated)


@pytest.fixture(autouse=True, scope="module")
def small_model(small_policy: Any) -> None:
    SMALL["model"]["name"] = small_policy(1)


def _trainer(folder: Path, *callbacks: Callback, **changes: Any) -> Trainer:
    settings = validate(RunSettings, merge(SMALL, changes))
    store = RunStore.open(folder) if folder.exists() else RunStore.create(folder, dump_yaml(settings), {})
    return Trainer(settings, store, callbacks)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return (one.dtype == other.dtype and torch.equal(one, other)) if isinstance(one, torch.Tensor) else bool(one == other)


VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "ppo": {"algorithm": {"name": "ppo"}},
    "ppo in bfloat16": {"model": {"dtype": "bfloat16"}, "algorithm": {"name": "ppo"}},
    "lora": {"lora": {"rank": 2}},
}


def _sums(manifest: Path) -> dict[str, Any]:
    return {name: entry for name, entry in json.loads(manifest.read_text())["files"].items() if name != "state.pt"}


@pytest.mark.parametrize("variant", [pytest.param(name, marks=pytest.mark.long) if "bfloat16" in name else name for name in VARIANTS])
def test_the_files_are_those_of_a_write_in_the_foreground(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte but for state.pt, in which objects that are one in memory may be two; its tensors are equal."""
    _trainer(tmp_path / "background", **VARIANTS[variant]).run()
    with monkeypatch.context() as full:
        full.setattr(snapshot, "available_memory", lambda device: 1000)
        heard = _Notes()
        _trainer(tmp_path / "foreground", heard, **VARIANTS[variant]).run()
    said = [note for note in heard.notes if "foreground" in note]
    assert len(said) == 1 and "would not fit into the host memory that is free" in said[0]  # once, not with every checkpoint
    one, other = (tmp_path / name / "checkpoints" for name in ("background", "foreground"))
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file()) and len(files) > 10
    for path in files:
        if path.name == "state.pt":
            assert _same(load_state((one / path).parent), load_state((other / path).parent)), path
        elif path.name == "manifest.json":  # holds the sum of state.pt
            assert _sums(one / path) == _sums(other / path)
        else:
            assert (one / path).read_bytes() == (other / path).read_bytes(), path


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.long) if name in ("ppo", "bfloat16") else name for name in VARIANTS]
)
def test_what_changes_after_the_copy_does_not_reach_the_file(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(tmp_path / "run", steps=1, **VARIANTS[variant])
    trainer.run()
    expected = {path.name: load_file(path) for path in (trainer.store.checkpoints / "step_000001" / "model").glob("*.safetensors")}
    expected_state = load_state(trainer.store.checkpoints / "step_000001")
    gate = _Gate(monkeypatch)
    trainer.step = 2  # as if one more step had changed nothing
    trainer.save()
    assert gate.entered.wait(60)
    state = trainer.learner.state()
    with torch.no_grad():  # everything a step changes, in place
        for tensor in (*trainer.policy.module.parameters(), *snapshot._tensors(state)):
            tensor.add_(1)
    trainer.alarm_actions.rolled_back.append((1, 2))
    gate.open.set()
    trainer.saver.finish()
    saved = {path.name: load_file(path) for path in (trainer.store.checkpoints / "step_000002" / "model").glob("*.safetensors")}
    assert _same(saved, expected) and expected
    assert _same(load_state(trainer.store.checkpoints / "step_000002"), {**expected_state, "step": 2})


def test_tensors_that_share_memory_share_it_in_the_copy(tiny: Any) -> None:
    whole = torch.arange(12.0)
    first, second = whole[:4], whole[4:].view(2, 4).t()
    taken = HostMemory(reuse=False).snapshot(tiny.model, {"a": first, "b": [second, first]})
    copies = [taken.state["a"], taken.state["b"][0], taken.state["b"][1]]
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    assert copies[0].untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    assert copies[1].stride() == second.stride() and copies[1].storage_offset() == 4
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, (first, second, first), strict=True))
    model = taken.model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight  # tied, as in the original
    assert model.get_input_embeddings().weight is not tiny.model.get_input_embeddings().weight


def test_memory_is_used_again(tiny: Any) -> None:
    memory = HostMemory(reuse=True)
    memory.prepare([4000, 4000])
    addresses = []
    for value in (1.0, 2.0, 3.0):
        taken = memory.snapshot(tiny.model, {"a": torch.full((1000,), value)})
        assert torch.equal(taken.state["a"], torch.full((1000,), value))
        addresses.append(taken.state["a"].data_ptr())
        memory.release()
    assert len(set(addresses[1:])) == 1


def test_one_is_in_flight_at_most_and_the_end_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate opens once the run says that it waits: before the second checkpoint is copied, while the first is written."""
    gate = _Gate(monkeypatch)
    heard = _Notes(gate.open.set)
    trainer = _trainer(tmp_path / "run", heard, evaluation={"every": 1})
    trainer.run()
    assert gate.written == [1, 2]
    assert heard.notes[-1].startswith("waiting for the checkpoint of step 1 (") and heard.notes[-1].endswith(" GB) to be written")
    assert ("checkpoint", 100) in heard.stages
    assert [path.name for path in list_checkpoints(trainer.store.checkpoints)] == ["step_000001", "step_000002"]
    assert best_checkpoint(trainer.store.checkpoints) is not None
    timings = {line["step"]: line for line in trainer.store.timings()}
    assert timings[2]["seconds"]["checkpoint"] >= saver.QUIET_SECONDS  # the wait is a stall of the second step
    assert sum(timings[step].get("background", {}).get("checkpoint", 0) for step in (1, 2)) >= saver.QUIET_SECONDS


@pytest.mark.parametrize(("failing", "steps", "recorded"), [(1, 3, [0, 1]), (2, 2, [0, 1, 2])])
def test_a_write_that_fails_ends_the_run(
    failing: int, steps: int, recorded: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next border of a step, or at the end; the best checkpoint of a step that has none is no second error."""
    real = saver.save_checkpoint

    def fail(folder: Path, step: int, *rest: Any) -> Path:
        if step == failing:
            raise CheckpointError(f"cannot write checkpoint of step {step}: No space left on device; free some space")
        return real(folder, step, *rest)

    monkeypatch.setattr(saver, "save_checkpoint", fail)
    trainer = _trainer(
        tmp_path / "run", _AfterStep(lambda: futures.wait(trainer.saver._writer._jobs)), steps=steps, evaluation={"every": 1}
    )
    with pytest.raises(CheckpointError, match=f"of step {failing}: No space left"):
        trainer.run()
    assert trainer.store.finished is None
    assert [record.step for record in trainer.store.steps()] == recorded
    assert [path.name for path in list_checkpoints(trainer.store.checkpoints)] == [f"step_{step:06d}" for step in range(1, failing)]
    monkeypatch.undo()
    resumed = _trainer(tmp_path / "run", steps=steps, evaluation={"every": 1})
    resumed.run()
    assert resumed.store.finished == f"all {steps} steps done"


def test_ctrl_c_and_other_errors_let_the_one_in_flight_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, error in enumerate((KeyboardInterrupt(), EnvironmentFailure("all broke"))):
        with monkeypatch.context() as patch:
            gate = _Gate(patch)
            trainer = _trainer(tmp_path / str(number), _Notes(gate.open.set))

            def stop(step: int, *rest: Any, error: BaseException = error, real: Any = trainer.rollouts.sample) -> Any:
                if step == 2:
                    raise error
                return real(step, *rest)

            patch.setattr(trainer.rollouts, "sample", stop)
            with pytest.raises(type(error)):
                trainer.run()
            assert gate.written == [1]  # nor is the step written twice
            assert [path.name for path in list_checkpoints(trainer.store.checkpoints)] == ["step_000001"]


def test_jobs_behind_one_that_failed_are_not_done() -> None:
    writer, gate, done = BackgroundWriter(), threading.Event(), []

    def fail() -> None:
        assert gate.wait(60)
        raise CheckpointError("no space")

    writer.submit(fail)
    writer.submit(lambda: done.append("behind"))
    assert not writer.wait(0)
    gate.set()
    with pytest.raises(CheckpointError, match="no space"):
        writer.wait()
    writer.submit(lambda: done.append("later"))
    assert writer.wait() and done == ["later"]
