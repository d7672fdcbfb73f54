"""Running chosen side by side: real processes that write real run folders, without a model."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tether.core.errors import BadInput
from tether.training import side_by_side
from tether.training.side_by_side import Observer, SweepState, progress, sweep, train_command
from tether.training.sweep import Trial, sweep_trials, variants

SCRIPT = textwrap.dedent(
    """
    import json, os, sys, time
    from pathlib import Path
    from tether.core.child import end_with_parent
    from tether.runs.schema import StepRecord
    from tether.runs.store import RunStore
    end_with_parent()
    folder, seconds, mode = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    if mode == "fail":
        print("the model does not fit")
        sys.exit(3)
    resumed = (folder / "run.json").is_file()
    store = RunStore.open(folder) if resumed else RunStore.create(folder, "steps: 30", {"env": "sokoban"})
    (folder / "began.txt").open("a").write(f"{time.monotonic()} {'resumed' if resumed else 'new'}\\n")
    (folder / "environment.json").write_text(json.dumps(dict(os.environ)))
    store.append(StepRecord(1, {"rollout/success": 0.5}))
    store.append(StepRecord(30, {"validation/success": 0.5}))
    store.append_timings(30, {"seconds": {"update": 2.0}})
    (folder / "checkpoints" / "step_000030").mkdir(exist_ok=True)
    (folder / "report.html").write_text("x")
    time.sleep(seconds)
    (folder / "ended.txt").write_text(str(time.monotonic()))
    store.finish("all 30 steps done")
    """
)


class Log(Observer):
    def __init__(self) -> None:
        self.done: list[str] = []
        self.failed: dict[str, str] = {}
        self.most = 0

    def on_change(self, state: SweepState) -> None:
        self.most = max(self.most, len(state.running))

    def on_finished(self, trial: Trial, folder: Path) -> None:
        self.done.append(trial.id)

    def on_failed(self, trial: Trial, reason: str) -> None:
        self.failed[trial.id] = reason


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "POLL_SECONDS", 0.05)


def trials(seeds: int = 2) -> list[Trial]:
    return sweep_trials({"env": {"name": "sokoban"}, "steps": 30}, variants(["filter.strategy=all,top_p"]), range(seeds))


def command(seconds: float, failing: str = "") -> Callable[[Trial, Path, Path], list[str]]:
    def words(trial: Trial, folder: Path, settings: Path) -> list[str]:
        assert settings.is_file()
        return [sys.executable, "-c", SCRIPT, str(folder), str(seconds), "fail" if failing and failing in trial.id else "work"]

    return words


def run(
    folder: Path, jobs: int = 2, seconds: float = 0.3, failing: str = "", log: Log | None = None, seeds: int = 1, **options: Any
) -> tuple[SweepState, Log]:
    log = log or Log()
    return sweep(trials(seeds), folder / "runs", jobs=jobs, observer=log, command=command(seconds, failing), **options), log


def test_runs_go_side_by_side(tmp_path: Path) -> None:
    state, log = run(tmp_path, jobs=2, seeds=2)
    assert sorted(log.done) == sorted(trial.id for trial in trials()) and log.most == 2
    assert (state.failed, state.stopped, state.waiting, state.running) == ({}, None, [], [])
    assert all((tmp_path / "runs" / trial.id / "checkpoints").is_dir() for trial in trials())
    assert not list((tmp_path / "runs").glob("*.lock"))
    found = json.loads((tmp_path / "runs" / trials()[0].id / "environment.json").read_text())
    assert found["TETHER_SHARES_CARD"] and found["OMP_NUM_THREADS"] == "1", "each leaves the others their cores"


def test_an_observer_that_cannot_read_a_run_makes_it_a_failure(tmp_path: Path) -> None:
    class Refuses(Log):
        def on_finished(self, trial: Trial, folder: Path) -> None:
            raise BadInput("no numbers in it")

    state, log = run(tmp_path, log=Refuses())
    assert set(state.failed.values()) == {"cannot be read: no numbers in it"} and state.failed == log.failed and state.done == []


def test_a_finished_trial_is_never_run_again(tmp_path: Path) -> None:
    run(tmp_path)
    left = tmp_path / "runs" / f"{trials()[0].id}.lock"
    left.touch()  # a scheduler was killed before it removed it
    state, log = run(tmp_path, failing="seed")  # every process would fail
    assert log.done == [] and state.present == 2 and state.failed == {} and not left.exists()


def test_a_failure_is_recorded_and_does_not_stop_the_others(tmp_path: Path) -> None:
    state, log = run(tmp_path, failing="top_p-seed0")
    assert len(log.done) == 1 and list(state.failed) == list(log.failed)
    assert list(log.failed.values()) == ["exit code 3: the model does not fit"]
    state, log = run(tmp_path)  # the next call tries it again
    assert state.failed == {} and len(log.done) == 1


@pytest.mark.long
def test_the_deadline_interrupts_and_the_next_call_resumes(tmp_path: Path) -> None:
    state, log = run(tmp_path, seconds=30, max_minutes=4 / 60)
    assert state.stopped is not None and log.done == [] and state.failed == {} and len(state.waiting) == 2
    started = [line for path in (tmp_path / "runs").glob("*/began.txt") for line in path.read_text().splitlines()]
    assert started, "no process began within the time"
    state, log = run(tmp_path, seconds=0.1)
    assert len(log.done) == 2
    assert any("resumed" in path.read_text() for path in (tmp_path / "runs").glob("*/began.txt"))


def test_a_run_that_ended_without_a_scheduler_is_only_taken_in(tmp_path: Path) -> None:
    trial = trials()[0]
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "runs" / trial.id), "0", "work"], check=True)
    state, log = run(tmp_path, failing="seed", is_done=lambda _: False)  # every process would fail
    assert log.done == [trial.id] and len(log.failed) == 1 and [done.id for done in state.done] == [trial.id]


def test_a_folder_that_a_kill_left_half_made_is_made_again(tmp_path: Path) -> None:
    trial = trials()[0]
    (tmp_path / "runs" / trial.id / "checkpoints").mkdir(parents=True)
    _, log = run(tmp_path)
    assert trial.id in log.done


def test_a_trial_that_another_process_runs_is_waited_for(tmp_path: Path) -> None:
    """The lock is held by a process that is not a child of this scheduler, as an orphan's would be."""
    trial = trials()[0]
    (tmp_path / "runs").mkdir()
    holder = (tmp_path / "runs" / f"{trial.id}.lock").open("wb")
    fcntl.flock(holder, fcntl.LOCK_EX)

    class Stops(Log):
        def on_change(self, state: SweepState) -> None:
            if len(self.done) == 1:
                raise KeyboardInterrupt

    state, log = run(tmp_path, log=Stops())
    assert trial.id not in log.done and len(log.done) == 1 and [left.id for left in state.waiting] == [trial.id]
    holder.close()
    _, log = run(tmp_path)
    assert log.done == [trial.id]


def test_the_process_itself_holds_the_lock(tmp_path: Path) -> None:
    """What a killed scheduler leaves behind: its end of the lock is closed, the process still runs, and nobody else gets the lock."""
    answers = []

    class Closer(Log):
        def on_change(self, state: SweepState) -> None:
            for job in state.running:
                job.lock.close()
                if not (job.folder / "ended.txt").is_file():
                    again = side_by_side._locked(tmp_path / "runs" / f"{job.trial.id}.lock")
                    answers.append(again is None)
                    if again is not None:
                        again.close()

    chosen = trials(1)[:1]
    sweep(chosen, tmp_path / "runs", jobs=1, observer=Closer(), command=command(0.5))
    assert answers and sum(answers) >= len(answers) - 1  # the last look may come just after the end


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_a_killed_scheduler_leaves_no_run_behind(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path; from test_side_by_side import command, sweep, trials\n"
        f"sweep(trials(1)[:1], Path({str(tmp_path)!r}) / 'runs', jobs=1, command=command(120))"
    )
    scheduler = subprocess.Popen([sys.executable, "-c", program])
    began = tmp_path / "runs" / trials(1)[0].id / "began.txt"
    deadline = time.monotonic() + 120
    while not began.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    scheduler.kill()
    scheduler.wait()
    lock = side_by_side._lock_file(tmp_path / "runs", trials(1)[0])
    while (free := side_by_side._locked(lock)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert free is not None, "the run goes on without its scheduler"
    free.close()
    assert not (began.parent / "ended.txt").exists()


def test_a_command_whose_parent_was_gone_before_it_began_ends() -> None:
    done = subprocess.run([sys.executable, "-m", "tether", "--version"], env=os.environ | {"TETHER_PARENT": "1"}, capture_output=True)
    assert done.returncode == (-signal.SIGTERM if sys.platform == "linux" else 0)


def test_sigterm_ends_it_as_ctrl_c_does(tmp_path: Path) -> None:
    class Kill(Log):
        def on_change(self, state: SweepState) -> None:
            if any((job.folder / "began.txt").is_file() for job in state.running):
                os.kill(os.getpid(), signal.SIGTERM)

    chosen = trials(1)
    begin = time.monotonic()
    state = sweep(chosen, tmp_path / "runs", jobs=1, observer=Kill(), command=command(60))
    assert state.stopped == "interrupted" and time.monotonic() - begin < 30
    assert len(state.waiting) == 2


def test_the_command_of_a_trial(tmp_path: Path) -> None:
    trial, settings = trials()[0], tmp_path / "trial.yaml"
    words = [sys.executable, "-P", "-m", "tether", "train"]
    assert train_command(trial, tmp_path / "run", settings) == [*words, "--config", str(settings), "--out", str(tmp_path / "run")]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    assert train_command(trial, tmp_path / "run", settings) == [*words, "--resume", "--out", str(tmp_path / "run")]


def test_time_left_is_steps_over_pace() -> None:
    chosen = trials()
    state = SweepState(total=4, present=0, waiting=chosen[2:])
    assert state.seconds_left() is None
    job = side_by_side.Job(chosen[0], Path(), None, None, step=10, step_seconds=0.5)  # type: ignore[arg-type]
    other = side_by_side.Job(chosen[1], Path(), None, None, step=20, step_seconds=1.0)  # type: ignore[arg-type]
    state.running = [job, other]
    assert state.seconds_left() == pytest.approx((60 + 20 + 10) / 3)


def test_progress_of_a_run(tmp_path: Path) -> None:
    assert progress(tmp_path / "nothing") == (0, None, None)
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "run"), "0", "work"], check=True)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "metr')  # being written
    assert progress(tmp_path / "run") == (30, 0.5, 2.0)
