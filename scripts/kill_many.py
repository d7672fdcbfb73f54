"""Kill training runs, resume them, and compare what they end with, bit for bit, with a run that was never stopped.

    python scripts/kill_many.py 40                       forty kills (SIGKILL) at random moments
    python scripts/kill_many.py 3 --points --algo ppo    and one at every chosen point, such as the middle of a checkpoint's write
    python scripts/kill_many.py 9 --set lora.rank=2      of runs with other settings

A run is killed, resumed, killed again, until it ends. After each kill every checkpoint that counts must be readable and none may be lost;
at the end records, trajectories, weights and optimiser state must equal the reference. Each attempt is `tether train` in a process of its
own, forked from this one after its imports, which cost more than the run. Prints a line per kill and per run; exit code 1 if any differs.
"""

import argparse
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the order of a sum must not depend on the machine's mood

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import tether.training.loop  # noqa: F401 - what a run needs is imported once, before the forks
from tether.cli.main import main as tether_main
from tether.core.errors import CheckpointError
from tether.core.seeding import generator
from tether.models import tensor_files
from tether.runs import index, store
from tether.runs.checkpoints import BEST, MANIFEST, MODEL, STATE_FILES, check_checkpoint, list_checkpoints
from tether.runs.index import TRAJECTORIES
from tether.runs.report import write_report  # noqa: F401 - likewise
from tether.runs.store import METRICS, RunStore
from tether.training import checkpoint
from tether.training.checkpoint import load_state

SETTINGS = {
    "model.device": "cpu",
    "env.options.max_turns": 1,
    "rollout.num_groups": 2,
    "rollout.group_size": 2,
    "rollout.max_tokens": 40,
    "filter.strategy": "all",
    "learner.learning_rate": 0.001,
    "learner.update_batch": 2,
    "diagnosis.every": 1,
    "evaluation.every": 2,
    "evaluation.prompts": 2,
    "checkpoint.every": 1,
    "steps": 3,
}
KILLED = -signal.SIGKILL


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, when: Callable[..., bool] = lambda *args, **kwargs: True, nth: int = 1) -> Callable[[], None]:
    """Die instead of the nth call for which `when` holds."""
    return _replacing(owner, name, when, nth, lambda real, *args, **kwargs: die())


def after(owner: Any, name: str, when: Callable[..., bool] = lambda *args, **kwargs: True, nth: int = 1) -> Callable[[], None]:
    """Die once the nth call for which `when` holds has returned."""

    def act(real: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        die()

    return _replacing(owner, name, when, nth, act)


def half_written(name: str, nth: int = 1) -> Callable[[], None]:
    """Die when half of the nth addition to a file of the run folder is on the disk."""

    def act(real: Callable[..., Any], path: Path, content: bytes, **options: Any) -> None:
        start = path.stat().st_size if path.exists() else 0
        real(path, content, **options)
        os.truncate(path, (start + path.stat().st_size) // 2)
        die()

    return _replacing(store, "append_whole", lambda path, content, **options: path.name == name, nth, act)


def half_saved(
    owner: Any, name: str, path_of: Callable[..., Path], when: Callable[..., bool] = lambda *args, **kwargs: True
) -> Callable[[], None]:
    """Die when half of a checkpoint's file is on the disk."""

    def act(real: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        os.truncate(path_of(*args), path_of(*args).stat().st_size // 2)
        die()

    return _replacing(owner, name, when, 1, act)


def a_step_later(path_of: Callable[..., Path], when: Callable[..., bool], step: int) -> Callable[[], None]:
    """Die when half of a checkpoint's file is on the disk and the run, which trains on meanwhile, has recorded a later step."""

    def act(real: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        os.truncate(path_of(*args), path_of(*args).stat().st_size // 2)
        threading.Event().wait()  # the run's own thread dies for both

    def install() -> None:
        _replacing(tensor_files, "write_file", when, 1, act)()
        after(RunStore, "append", lambda _, record: record.step == step)()

    return install


def _replacing(owner: Any, name: str, when: Callable[..., bool], nth: int, act: Callable[..., None]) -> Callable[[], None]:
    def install() -> None:
        real, calls = getattr(owner, name), itertools.count(1)

        def patched(*args: Any, **kwargs: Any) -> Any:
            if when(*args, **kwargs) and next(calls) == nth:
                act(real, *args, **kwargs)
            return real(*args, **kwargs)

        setattr(owner, name, patched)

    return install


def _is_validation(_: RunStore, records: Sequence[Any], **__: Any) -> bool:
    return records[0]["split"] == "validation"


def _of_model(file: tensor_files.TensorFile) -> bool:
    return file.path.parent.name == MODEL


def _of_state(file: tensor_files.TensorFile) -> bool:
    return file.path.name.startswith(STATE_FILES)


def _to_step(path: Path, target: Path) -> bool:
    return target.name.startswith("step_") and target.parent.name == "checkpoints"


def _holds_a_step(path: Path, **_: Any) -> bool:
    return any(Path(path).glob("step_*"))


# In the order in which a run of three steps, with a checkpoint each, comes to them: each is reached from where the one before left it.
POINTS: dict[str, Callable[[], None]] = {
    "step 0 played, not recorded": after(RunStore, "append_trajectories", _is_validation),
    "half the record of step 1": half_written(METRICS, nth=2),
    "half the weights": half_saved(tensor_files, "write_file", lambda file: file.path, _of_model),
    "half the moments": half_saved(tensor_files, "write_file", lambda file: file.path, _of_state),
    "half the state": half_saved(torch, "save", lambda state, path: path),
    "half the weights, a step later": a_step_later(lambda file: file.path, _of_model, step=2),
    "before the manifest": before(checkpoint, "write_manifest"),
    "before the checkpoint is in place": before(Path, "rename", _to_step),
    "after the checkpoint is in place": after(Path, "rename", _to_step),
    "half the trajectories of step 2": half_written(TRAJECTORIES),
    "rows of the index, not committed": after(index, "_insert"),
    "between two updates of step 2": after(torch.optim.AdamW, "step"),
    "before the best is kept": before(os, "link"),
    "step 3 recorded, not saved": after(RunStore, "append", lambda _, record: record.step == 3),
    "while an old checkpoint is deleted": before(shutil, "rmtree", _holds_a_step),
    "before the run is called finished": before(RunStore, "finish"),
}


def attempt(words: Sequence[str], log: Path, point: Callable[[], None] | None = None, delay: float | None = None) -> int:
    """`tether train` in a process of its own; returns its exit code, KILLED if it was killed at the point or after the delay."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _become_tether(words, log, point)
    deadline = time.monotonic() + (3600 if delay is None else delay)
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _become_tether(words: Sequence[str], log: Path, point: Callable[[], None] | None) -> None:
    code = 1
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        if point is not None:
            point()
        tether_main(list(words))
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:  # never back into the parent's code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def differences(reference: Path, run: Path) -> list[str]:
    """What is not the same in two runs, in words; times aside."""
    ours, theirs = RunStore.open(run), RunStore.open(reference)
    found = []
    if ours.steps() != theirs.steps():
        found.append("records")
    if _without_attempt(ours) != _without_attempt(theirs):
        found.append("trajectories")
    if ours.finished != theirs.finished:
        found.append("how it ended")
    names = [sorted(path.name for path in each.checkpoints.iterdir()) for each in (ours, theirs)]
    if names[0] != names[1]:
        return [*found, f"checkpoints: {names[0]} instead of {names[1]}"]
    for name in names[0]:
        pair = ours.checkpoints / name, theirs.checkpoints / name
        files = [path for path in pair[0].rglob("*") if path.name != MANIFEST and not path.name.startswith(STATE_FILES)]
        if any(not _same_bytes(path, pair[1] / path.relative_to(pair[0])) for path in files):
            found.append(f"{name}: model")
        if name != BEST and not _same(load_state(pair[0]), load_state(pair[1])):
            found.append(f"{name}: state")
    return found


def _without_attempt(run: RunStore) -> list[dict[str, Any]]:
    return sorted(({**record, "attempt": 0} for record in run.trajectories()), key=repr)


def _same_bytes(one: Path, two: Path) -> bool:
    return one.is_dir() or (two.is_file() and one.read_bytes() == two.read_bytes())


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(_same, one, two))
    return bool(one == two)


def unreadable(folder: Path) -> list[str]:
    """Checkpoints that count, and yet cannot be read."""
    bad = []
    for path in list_checkpoints(folder):
        try:
            check_checkpoint(path)
            load_state(path)
            load_file(next((path / MODEL).glob("*.safetensors")))
        except (CheckpointError, SafetensorError, OSError, StopIteration) as error:
            bad.append(f"{path.name}: {error}")
    return bad


class Trial:
    """One algorithm: its reference run, and runs that are killed."""

    def __init__(self, folder: Path, algo: str, seed: int, settings: Sequence[str]) -> None:
        self.folder, self.algo, self.kills, self.failures = folder, algo, 0, 0
        self._numbers = itertools.count(1)
        pairs = [*(f"{key}={value}" for key, value in SETTINGS.items()), *settings]
        self._settings = [word for pair in pairs for word in ("--set", pair)]
        self._shares = generator("kill", algo, seed)
        self.reference = folder / f"{algo}-reference"
        start = time.monotonic()
        code = attempt(self._start(self.reference), folder / f"{algo}-reference.log")
        self.seconds = time.monotonic() - start
        if code:
            sys.exit(f"the reference run ended with code {code}: {(folder / f'{algo}-reference.log').read_text()[-2000:]}")
        self._say(f"reference: {self.seconds:.1f} s")

    def chain(self, kills: Iterator[tuple[str, Callable[[], None] | None, float | None]]) -> None:
        """One run: killed by each of the kills in turn, then let go; then compared."""
        run = self.folder / f"{self.algo}-{next(self._numbers)}"
        newest = 0
        for name, point, delay in itertools.chain(kills, [("to the end", None, None)]):
            begun = (run / "run.json").is_file()
            words = ["train", "--resume", "--out", str(run)] if begun else self._start(run)
            if not begun:
                shutil.rmtree(run, ignore_errors=True)  # killed before it was a run
            code = attempt(words, run.with_suffix(".log"), point, delay)
            bad = unreadable(run / "checkpoints")
            steps = [int(path.name[5:]) for path in list_checkpoints(run / "checkpoints")]
            if max(steps, default=0) < newest:
                bad.append(f"step {newest} is lost")
            newest = max(steps, default=0)
            expected = (0,) if point is None and delay is None else (KILLED,) if delay is None else (KILLED, 0)
            if bad or code not in expected:
                self._fail(f"{name}: exit code {code}, expected {expected}; {bad}; {run.with_suffix('.log').read_text()[-2000:]}")
                return
            self._say(f"{'killed' if code else 'ended'}: {name}; checkpoints {steps}")
            if code == 0:
                break
            self.kills += 1
        found = differences(self.reference, run)
        if found:
            self._fail(f"{run.name} differs in: {', '.join(found)}")
        else:
            self._say(f"equal: {run.name}")

    def points(self) -> None:
        """One run, killed at every chosen point."""
        self.chain((name, point, None) for name, point in POINTS.items())

    def moments(self, count: int) -> None:
        """As many runs as it takes for `count` kills at random moments."""
        enough = self.kills + count
        while self.kills < enough and not self.failures:
            self.chain(self._random(enough))

    def _random(self, enough: int) -> Iterator[tuple[str, Callable[[], None] | None, float | None]]:
        while self.kills < enough:
            share = float(self._shares.uniform(0.02, 0.9))
            yield f"after {share:.0%} of the time", None, share * self.seconds

    def _start(self, run: Path) -> list[str]:
        return ["train", "frozen_lake", "--algo", self.algo, "--out", str(run), *self._settings]

    def _fail(self, what: str) -> None:
        self.failures += 1
        self._say(f"FAILED {what}")

    def _say(self, what: str) -> None:
        print(f"{self.algo}: {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kills", type=int, help="how many kills at random moments")
    parser.add_argument("--points", action="store_true", help="and one at every chosen point")
    parser.add_argument("--algo", action="append", help="an algorithm; may be given several times (default grpo)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the runs, such as lora.rank=2")
    arguments = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for algo in arguments.algo or ["grpo"]:
            trial = Trial(Path(folder), algo, arguments.seed, arguments.set)
            if arguments.points:
                trial.points()
            trial.moments(arguments.kills)
            failures += trial.failures
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
