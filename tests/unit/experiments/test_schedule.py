"""Running cells side by side: real processes that write real run folders, without a model."""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tether.experiments import schedule
from tether.experiments.capacity import Capacity
from tether.experiments.cells import Cell, CellFiles, CellRecord
from tether.experiments.grid import Library
from tether.experiments.schedule import State, run_cells, train_command

SCRIPT = textwrap.dedent(
    """
    import json, sys, time
    from pathlib import Path
    from tether.runs.schema import StepRecord
    from tether.runs.store import RunStore
    folder, seconds, mode = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    if mode == "fail":
        print("the model does not fit")
        sys.exit(3)
    resumed = (folder / "run.json").is_file()
    store = RunStore.open(folder) if resumed else RunStore.create(folder, "steps: 30", {"env": "sokoban"})
    (folder / "began.txt").open("a").write(f"{time.monotonic()} {'resumed' if resumed else 'new'}\\n")
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


class Log:
    def __init__(self) -> None:
        self.done: list[str] = []
        self.failed: dict[str, str] = {}
        self.most = 0

    def on_change(self, state: State) -> None:
        self.most = max(self.most, len(state.running))

    def on_done(self, cell: Cell, record: CellRecord) -> None:
        self.done.append(cell.id)

    def on_failed(self, cell: Cell, reason: str) -> None:
        self.failed[cell.id] = reason


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "POLL_SECONDS", 0.05)


def command(seconds: float, failing: str = "") -> object:
    def words(cell: Cell, folder: Path, settings: Path) -> list[str]:
        assert settings.is_file()
        return [sys.executable, "-c", SCRIPT, str(folder), str(seconds), "fail" if failing and failing in cell.id else "work"]

    return words


def run(library: Library, tmp_path: Path, jobs: int = 2, seconds: float = 0.3, failing: str = "", **options: float) -> tuple[State, Log]:
    log = Log()
    cells = library.own_cells("one", "tiny", [0, 1])
    state = run_cells(
        cells,
        CellFiles(tmp_path, "tiny"),
        tmp_path / "runs",
        Capacity.fixed(jobs),
        log,
        commit="abc",
        command=command(seconds, failing),  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )
    return state, log


def test_cells_run_side_by_side_and_are_harvested(library: Library, tmp_path: Path) -> None:
    state, log = run(library, tmp_path, jobs=2)
    cells = library.own_cells("one", "tiny", [0, 1])
    assert sorted(log.done) == sorted(cell.id for cell in cells) and log.most == 2
    assert (state.failed, state.stopped, state.waiting, state.running) == ({}, None, [], [])
    for cell in cells:
        assert CellFiles(tmp_path, "tiny").read(cell).about["commit"] == "abc"  # type: ignore[union-attr]
        left = {path.name for path in (tmp_path / "runs" / cell.id).iterdir()}
        assert not left & {"checkpoints", "report.html", "trajectories.jsonl"} and "metrics.jsonl" in left


def test_a_finished_cell_is_never_run_again(library: Library, tmp_path: Path) -> None:
    run(library, tmp_path)
    state, log = run(library, tmp_path, failing="seed")  # every process would fail
    assert log.done == [] and state.present == 4 and state.failed == {}


def test_a_failure_is_recorded_and_does_not_stop_the_others(library: Library, tmp_path: Path) -> None:
    state, log = run(library, tmp_path, failing="top_p-seed0")
    assert len(log.done) == 3 and list(state.failed) == list(log.failed)
    assert list(log.failed.values()) == ["exit code 3: the model does not fit"]
    state, log = run(library, tmp_path)  # the next call tries it again
    assert state.failed == {} and len(log.done) == 1


def test_the_deadline_interrupts_and_the_next_call_resumes(library: Library, tmp_path: Path) -> None:
    state, log = run(library, tmp_path, seconds=30, max_seconds=4.0)
    assert state.stopped is not None and log.done == [] and state.failed == {} and len(state.waiting) == 4
    started = [line for path in (tmp_path / "runs").glob("*/began.txt") for line in path.read_text().splitlines()]
    assert started, "no process began within the time"
    state, log = run(library, tmp_path, seconds=0.1)
    assert len(log.done) == 4
    assert any("resumed" in path.read_text() for path in (tmp_path / "runs").glob("*/began.txt"))


def test_a_run_that_ended_without_a_scheduler_is_only_harvested(library: Library, tmp_path: Path) -> None:
    cell = library.own_cells("one", "tiny", [0])[0]
    folder = tmp_path / "runs" / cell.id
    subprocess.run([sys.executable, "-c", SCRIPT, str(folder), "0", "work"], check=True)
    _, log = run(library, tmp_path, failing=cell.id)
    assert cell.id in log.done and cell.id not in log.failed


def test_a_folder_that_a_kill_left_half_made_is_made_again(library: Library, tmp_path: Path) -> None:
    cell = library.own_cells("one", "tiny", [0])[0]
    (tmp_path / "runs" / cell.id / "checkpoints").mkdir(parents=True)
    _, log = run(library, tmp_path)
    assert cell.id in log.done


def test_a_cell_that_another_process_runs_is_waited_for(library: Library, tmp_path: Path) -> None:
    """The lock is held by a process that is not a child of this scheduler, as an orphan's would be."""
    cell = library.own_cells("one", "tiny", [0])[0]
    (tmp_path / "runs").mkdir()
    holder = (tmp_path / "runs" / f"{cell.id}.lock").open("wb")
    fcntl.flock(holder, fcntl.LOCK_EX)
    state, log = run(library, tmp_path, max_seconds=3.0)
    assert cell.id not in log.done and len(log.done) == 3 and [left.id for left in state.waiting] == [cell.id]
    holder.close()
    _, log = run(library, tmp_path)
    assert log.done == [cell.id]


def test_the_process_itself_holds_the_lock(library: Library, tmp_path: Path) -> None:
    """What a killed scheduler leaves behind: its end of the lock is closed, the process still runs, and nobody else gets the lock."""
    answers = []

    class Closer(Log):
        def on_change(self, state: State) -> None:
            for job in state.running:
                job.lock.close()
                if not (job.folder / "ended.txt").is_file():
                    again = schedule._locked(tmp_path / "runs" / f"{job.cell.id}.lock")
                    answers.append(again is None)
                    if again is not None:
                        again.close()

    cells = library.own_cells("one", "tiny", [0])[:1]
    run_cells(cells, CellFiles(tmp_path, "tiny"), tmp_path / "runs", Capacity.fixed(1), Closer(), commit="x", command=command(0.5))  # type: ignore[arg-type]
    assert answers and sum(answers) >= len(answers) - 1  # the last look may come just after the end


def test_sigterm_ends_it_as_ctrl_c_does(library: Library, tmp_path: Path) -> None:
    class Kill(Log):
        def on_change(self, state: State) -> None:
            if any((job.folder / "began.txt").is_file() for job in state.running):
                os.kill(os.getpid(), signal.SIGTERM)

    cells = library.own_cells("one", "tiny", [0])
    begin = time.monotonic()
    files = CellFiles(tmp_path, "tiny")
    state = run_cells(cells, files, tmp_path / "runs", Capacity.fixed(1), Kill(), commit="x", command=command(60))  # type: ignore[arg-type]
    assert state.stopped == "interrupted" and time.monotonic() - begin < 30
    assert len(state.waiting) == 2 and not files.has(cells[0])


def test_the_command_of_a_cell(library: Library, tmp_path: Path) -> None:
    cell, settings = library.own_cells("one", "tiny")[0], tmp_path / "cell.yaml"
    words = [sys.executable, "-m", "tether", "train"]
    assert train_command(cell, tmp_path / "run", settings) == [*words, "--config", str(settings), "--out", str(tmp_path / "run")]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    assert train_command(cell, tmp_path / "run", settings) == [*words, "--resume", "--out", str(tmp_path / "run")]


def test_time_left_is_steps_over_pace(library: Library) -> None:
    cells = library.own_cells("one", "tiny", [0, 1])
    state = State(total=4, present=0, waiting=cells[2:])
    assert state.seconds_left() is None
    job = schedule.Job(cells[0], Path(), None, None, step=10, step_seconds=0.5)  # type: ignore[arg-type]
    other = schedule.Job(cells[1], Path(), None, None, step=20, step_seconds=1.0)  # type: ignore[arg-type]
    state.running = [job, other]
    assert state.seconds_left() == pytest.approx((60 + 20 + 10) / 3)
