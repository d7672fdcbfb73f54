"""Checkpoints are written from a copy while training goes on: the same files, nothing of a later step in them, no failure passed over."""

import errno
import json
import shutil
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
from tether.models import tensor_files
from tether.models.load import load_model
from tether.runs.checkpoints import best_checkpoint, damage, file_sum, list_checkpoints, write_manifest
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.runs.timings import StepTimings
from tether.training import saver, snapshot
from tether.training.callbacks import Callback
from tether.training.checkpoint import load_state, save_best
from tether.training.loop import Trainer
from tether.training.masters import joined
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
        real, self.open, self.entered = saver.save_checkpoint, threading.Event(), threading.Event()
        self.written: list[int] = []
        self.last: list[int] = []

        def gated(folder: Path, step: int, *rest: Any, last: bool) -> Path:
            self.entered.set()
            assert self.open.wait(60)
            self.written.append(step)
            self.last += [step] * last
            return real(folder, step, *rest, last=last)

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
    assert gate.written == [1, 2] and gate.last == [2]
    assert heard.notes[-1].startswith("waiting for the checkpoint of step 1 (") and heard.notes[-1].endswith(" GB) to be written")
    assert ("checkpoint", 100) in heard.stages
    assert [path.name for path in list_checkpoints(trainer.store.checkpoints)] == ["step_000001", "step_000002"]
    assert best_checkpoint(trainer.store.checkpoints) is not None
    timings = {line["step"]: line for line in trainer.store.timings()}
    assert timings[2]["seconds"]["checkpoint"] >= saver.QUIET_SECONDS  # the wait is a stall of the second step
    assert sum(timings[step].get("background", {}).get("checkpoint", 0) for step in (1, 2)) >= saver.QUIET_SECONDS


def test_that_training_is_over_is_told_before_the_last_checkpoint_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All records are there, the checkpoint is not: it is held back until then."""
    gate = _Gate(monkeypatch)

    class Trained(Callback):
        told = 0

        def on_trained(self) -> None:
            self.told += 1
            assert [record.step for record in trainer.store.steps()] == [0, 1] and not list_checkpoints(trainer.store.checkpoints)
            gate.open.set()

    callback = Trained()
    trainer = _trainer(tmp_path / "run", callback, steps=1)
    trainer.run()
    assert callback.told == 1 and [path.name for path in list_checkpoints(trainer.store.checkpoints)] == ["step_000001"]


@pytest.mark.parametrize(("failing", "steps", "recorded"), [(1, 3, [0, 1]), (2, 2, [0, 1, 2])])
def test_a_write_that_fails_ends_the_run(
    failing: int, steps: int, recorded: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next border of a step, or at the end; the best checkpoint of a step that has none is no second error."""
    real = saver.save_checkpoint

    def fail(folder: Path, step: int, *rest: Any, **how: Any) -> Path:
        if step == failing:
            raise CheckpointError(f"cannot write checkpoint of step {step}: No space left on device; free some space")
        return real(folder, step, *rest, **how)

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


def _bytes_below(folder: Path) -> int:
    files = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return sum(files.values())


@pytest.mark.parametrize("variant", ["float32", pytest.param("bfloat16", marks=pytest.mark.long), "lora"])
def test_the_best_are_weights_alone_and_no_third_copy_is_on_the_disk(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluated at every step, saved at the last: the best of step 1 is written without a checkpoint, as the weights compute."""
    most, real = [0], tensor_files.write_file

    def counted(file: tensor_files.TensorFile) -> Any:
        done = real(file)
        most.append(_bytes_below(tmp_path / "run" / "checkpoints"))
        return done

    monkeypatch.setattr(tensor_files, "write_file", counted)
    kept = {"every": 9, "keep": 1}
    trainer = _trainer(tmp_path / "run", steps=3, evaluation={"every": 1}, **merge(VARIANTS[variant], {"checkpoint": kept}))
    played = {}
    monkeypatch.setattr(trainer.callbacks, "on_step_end", lambda record, _: played.update({record.step: _weights_of(trainer)}))
    trainer.run()
    checkpoints = trainer.store.checkpoints
    best = best_checkpoint(checkpoints)
    assert best is not None and best.step == 1  # of equals the earliest
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best", "step_000003"]
    assert sorted(path.name for path in (checkpoints / "best").iterdir()) == ["best.json", "manifest.json", "model"]
    assert damage(checkpoints / "best") == []
    loaded = load_model(str(checkpoints / "best" / "model"), device="cpu").model
    saved = {name: value for name, value in loaded.named_parameters() if name in played[1]}
    assert all(torch.equal(played[1][name].float(), saved[name]) for name in played[1]) and not _same(played[1], played[3])
    assert max(most) <= _bytes_below(checkpoints)  # never more than lies there at the end


def _weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.policy.module.named_parameters() if value.requires_grad}


def test_killed_while_the_best_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier best stays; a resumed run plays on, and makes the best again."""
    settings: dict[str, Any] = {"evaluation": {"every": 1}, "checkpoint": {"every": 9, "last": False}}
    trainer = _trainer(tmp_path / "run", steps=1, **settings)
    trainer.run()
    checkpoints = trainer.store.checkpoints
    (checkpoints / "best" / "best.json").write_text('{"step": 1, "success": -1.0}')  # so that the next one is better
    loaded = load_model("tiny", device="cpu")
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *args, **kwargs: None)

        def die(file: Any) -> None:
            file.path.write_bytes(b"half")
            raise KeyboardInterrupt

        killed.setattr(tensor_files, "write_file", die)
        with pytest.raises(KeyboardInterrupt):
            save_best(checkpoints, 2, 0.5, loaded.model, loaded.tokenizer)
    assert best_checkpoint(checkpoints) == (1, -1.0) and damage(checkpoints / "best") == []
    assert any(path.name.startswith(".unfinished-") for path in checkpoints.iterdir())
    _trainer(tmp_path / "run", steps=2, **settings).run()
    found = best_checkpoint(checkpoints)
    assert [path.name for path in checkpoints.iterdir()] == ["best"] and found is not None and found.success >= 0


def test_a_disk_that_is_full_while_the_best_is_written_ends_the_run_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensor_files, "write_file", full)
    trainer = _trainer(tmp_path / "run", evaluation={"every": 1}, checkpoint={"every": 9})
    with pytest.raises(
        CheckpointError,
        match=r"cannot write checkpoint '.*/(best|step_000002)': .*No space left.* free some space and continue with --resume",
    ):
        trainer.run()
    assert list(trainer.store.checkpoints.iterdir()) == []


@pytest.mark.long  # tests/e2e/test_old_run.py continues a run of 0.1
def test_a_checkpoint_of_the_form_before_is_continued(tmp_path: Path) -> None:
    """Float32 weights in model/, everything else in state.pt, master weights whole; best/ a whole checkpoint. The end is the same, bit for bit."""
    sections = merge(VARIANTS["ppo in bfloat16"], {"steps": 2, "evaluation": {"every": 1}})
    _trainer(tmp_path / "new", **sections).run()
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    checkpoints = tmp_path / "old" / "checkpoints"
    shutil.rmtree(checkpoints / "step_000002")
    for name in ("best", "step_000001"):
        _as_before(checkpoints / name, checkpoints / "step_000001")
    assert best_checkpoint(checkpoints) is not None
    assert load_model(str(checkpoints / "best" / "model"), device="cpu").model.dtype == torch.float32
    _trainer(tmp_path / "old", **sections).run()
    one, two = (load_state(tmp_path / name / "checkpoints" / "step_000002") for name in ("new", "old"))
    assert _same(one["learner"], two["learner"])
    same = [(tmp_path / name / "checkpoints" / "step_000002" / "model" / "model.safetensors").read_bytes() for name in ("new", "old")]
    assert same[0] == same[1]


def _as_before(folder: Path, source: Path) -> None:
    """A checkpoint as the version before wrote it."""
    state, model = load_state(source), load_model(str(source / "model"), device="cpu")
    weights = [parameter.bfloat16() for parameter in model.model.parameters()]
    for name, optimizer in state["learner"]["optimizers"].items():
        critic = [tensor for key, tensor in state["learner"]["critic"].items() if key.startswith("trunk.")]
        rounded = weights if name == "policy" else critic
        optimizer["masters"] = [joined(tensor, saved) for tensor, saved in zip(rounded, optimizer["masters"], strict=False)]
    with torch.no_grad():
        for parameter, master in zip(model.model.parameters(), state["learner"]["optimizers"]["policy"]["masters"], strict=True):
            parameter.copy_(master)
    facts = (folder / "best.json").read_text() if folder.name == "best" else None
    shutil.rmtree(folder)
    folder.mkdir()
    model.model.save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    torch.save(state, folder / "state.pt")
    write_manifest(folder, 1, {str(file.relative_to(folder)): file_sum(file) for file in folder.rglob("*") if file.is_file()})
    if facts is not None:
        (folder / "best.json").write_text(facts)


def test_with_rounded_moments_a_resumed_run_is_equal_within_bounds(tmp_path: Path) -> None:
    """Moments come back within 2^-9 of what they were; of what the weights then move, a hundredth is another way at most."""
    sections: dict[str, Any] = {"steps": 3, "learner": {"learning_rate": 1e-3}, "checkpoint": {"moments": "bfloat16"}}
    _trainer(tmp_path / "straight", **sections).run()
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step_{step:06d}")
    resumed = _trainer(tmp_path / "resumed", **sections)
    assert resumed.step == 1
    resumed.run()
    final, start = ((tmp_path / name / "checkpoints" / f"step_{step:06d}") for name, step in (("straight", 3), ("straight", 1)))
    weights = [
        load_file(path / "model" / "model.safetensors") for path in (final, tmp_path / "resumed" / "checkpoints" / "step_000003", start)
    ]
    moved = torch.cat([(weights[0][name] - weights[2][name]).flatten() for name in weights[0]])
    apart = torch.cat([(weights[0][name] - weights[1][name]).flatten() for name in weights[0]])
    assert 0 < apart.norm() < 0.01 * moved.norm() and apart.abs().max() < 0.02 * moved.abs().max()
    moments = load_state(final)["learner"]["optimizers"]["policy"]["adam"]["state"]
    assert all(kept[name].dtype == torch.bfloat16 for kept in moments.values() for name in ("exp_avg", "exp_avg_sq"))


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
