"""Real slowness, real crashes, real endless loops: each ends its own member's call with its reason, the others go on, a reset mends it."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tether.core.errors import EnvironmentFailure
from tether.core.types import Observation, Step
from tether.envs.remote import VectorEnv, hosts

sys.path.append(str(Path(__file__).parent))

from troubled_environments import Awaiting, Troubled, WrongReply

PROCESS_TROUBLE = [
    ("loop", "step: timed out after 1 s"),
    ("exit 3", "step: the process of the environment ended with exit code 3"),
    ("signal 11", "step: the process of the environment was killed by SIGSEGV"),
    ("signal 9", "step: the process of the environment was killed by SIGKILL"),
    ("quit", "step: SystemExit: 7"),
    ("raise", "step: KeyError: 'no such shelf'"),
    ("raise unpicklable", "step: Unpicklable: one and two"),
    ("send unpicklable", "step: the result cannot leave the worker process: TypeError: cannot pickle '_thread.lock' object"),
]
THREAD_TROUBLE = [
    ("sleep 30", "step: timed out after 1 s"),
    ("quit", "step: SystemExit: 7"),
    ("raise", "step: KeyError: 'no such shelf'"),
    ("raise unpicklable", "step: Unpicklable: one and two"),
]


def _pid(observation: Observation | EnvironmentFailure) -> int:
    assert isinstance(observation, Observation)
    return int(observation.text.rpartition(" ")[2])


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _eventually(condition: object, seconds: float = 10) -> bool:
    """Ends of processes and threads are not instant."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert _eventually(lambda: not set(threading.enumerate()) - before)


@pytest.mark.parametrize(("work", "trouble"), [("process", PROCESS_TROUBLE), ("wait", THREAD_TROUBLE)])
def test_each_trouble_is_told_and_nobody_else_notices(work: str, trouble: list[tuple[str, str]]) -> None:
    count = len(trouble) + 2
    with VectorEnv(Troubled, count, options={"work": work}, step_timeout=1) as vector:
        vector.reset(range(count))
        results = vector.step([*(command for command, _ in trouble), "x", "sleep 0.5"])
        assert [str(result) for result in results[:-2]] == [message for _, message in trouble]
        assert all(isinstance(result, EnvironmentFailure) for result in results[:-2])
        assert [isinstance(result, Step) and result.reward for result in results[-2:]] == [1.0, 1.0]
        # Broken until the next reset, and sound after it.
        refused = vector.step(["x"] * count)
        assert str(refused[0]) == f"step: the environment failed before ({trouble[0][1]}); reset it first"
        assert all(isinstance(result, EnvironmentFailure) for result in refused[:-2])
        assert all(isinstance(result, Observation) for result in vector.reset(range(count)))
        assert all(isinstance(step, Step) and step.reward == 1 for step in vector.step(["x"] * count))


@pytest.mark.usefixtures("_no_thread_is_left")
def test_one_hanging_member_does_not_hold_up_the_others() -> None:
    with VectorEnv(Troubled, 3, step_timeout=2) as vector:
        vector.reset([0, 1, 2])
        hanging = vector.members[0].submit_step("loop")
        start = time.monotonic()
        for member in vector.members[1:]:
            for answer in ("a", "b"):
                assert member.step(answer).observation.text.endswith(f"heard {answer}")
        assert time.monotonic() - start < 1.9 and not hanging.done()
        with pytest.raises(EnvironmentFailure, match="timed out after 2 s"):
            hanging.result()


@pytest.mark.usefixtures("_no_thread_is_left")
def test_a_hung_process_is_killed_and_replaced() -> None:
    with VectorEnv(Troubled, 1, step_timeout=1) as vector:
        hung = _pid(vector.reset([0])[0])
        vector.step(["loop"])
        assert _eventually(lambda: not _runs(hung))
        assert _pid(vector.reset([0])[0]) != hung


def test_a_reset_has_the_same_deadline() -> None:
    with VectorEnv(Troubled, 2, step_timeout=0.5) as vector:
        late, fine = vector.reset([-30, 1])
        assert str(late) == "reset: timed out after 0.5 s"
        assert isinstance(fine, Observation)
        assert isinstance(vector.members[0].reset(2), Observation)


def test_a_late_answer_of_an_abandoned_thread_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """The sleeper wakes up in the middle of the next episode, which it must not touch."""
    before = set(threading.enumerate())
    with VectorEnv(Troubled, 1, options={"work": "wait"}, step_timeout=0.3) as vector:
        vector.reset([1])
        assert str(vector.step(["sleep 0.6"])[0]) == "step: timed out after 0.3 s"
        vector.reset([2])
        for reward in (1, 2):
            step = vector.step(["sleep 0.2"])[0]
            assert isinstance(step, Step) and step.reward == reward and "seed 2" in step.observation.text
        assert _eventually(lambda: {thread.name for thread in set(threading.enumerate()) - before} == {"tether-vector"})
        vector.step(["end"])
    assert caplog.records == []  # asyncio would log what goes wrong in its loop


def test_an_environment_whose_call_returns_late_is_closed() -> None:
    """Its host is dead by then, so nobody else closes it; while the call runs it must not be closed."""
    closed: list[int] = []

    class Closable(Troubled):
        def close(self) -> None:
            closed.append(self.seed)

    with VectorEnv(Closable, 1, options={"work": "wait"}, step_timeout=0.3) as vector:
        vector.reset([5])
        assert str(vector.step(["sleep 0.6"])[0]) == "step: timed out after 0.3 s"
        assert closed == []
        assert _eventually(lambda: closed == [5])
        vector.reset([6])
    assert closed == [5, 6]


@pytest.mark.parametrize("command", ["sleep 30", "stubborn 0.6"])
def test_coroutines_that_take_too_long(command: str) -> None:
    with VectorEnv(Awaiting, 2, step_timeout=0.3) as vector:
        vector.reset([1, 2])
        late, fine = vector.step([command, "hello"])
        assert str(late) == "step: timed out after 0.3 s"
        assert isinstance(fine, Step)
        assert vector.members[0].reset(3).text == "seed 3, env_seed None"
        assert str(vector.step(["raise", None])[0]) == "step: KeyError: 'no such shelf'"


@pytest.mark.parametrize("work", ["inline", "wait", "process"])
def test_a_reply_that_is_no_step(work: str) -> None:
    with VectorEnv(WrongReply, 1, options={"work": work}) as vector:
        vector.reset([0])
        assert str(vector.step(["x"])[0]).startswith("step: TypeError: it gave 'done' where a Step belongs; return tether.Step(")


@pytest.mark.parametrize("work", ["inline", "wait"])
def test_a_bad_seed_is_a_failure_of_its_member(work: str) -> None:
    with VectorEnv(Troubled, 2, options={"work": work}) as vector:
        bad, fine = vector.reset(["one", 1])  # type: ignore[list-item]
        assert str(bad) == "reset: BadInput: reset got seed 'one'; give a whole number"
        assert isinstance(fine, Observation)


class _OnlyHere(Troubled):
    """Can be built in the process that made the vector, nowhere else."""

    def __init__(self, options: object = None) -> None:
        super().__init__(options)  # type: ignore[arg-type]
        if os.environ.get("TETHER_TEST_HERE") != str(os.getpid()):
            raise RuntimeError("not here")


def test_what_cannot_be_built_in_the_worker_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_TEST_HERE", str(os.getpid()))
    module = sys.modules["troubled_environments"]
    monkeypatch.setattr(_OnlyHere, "__module__", module.__name__)
    monkeypatch.setattr(module, "_OnlyHere", _OnlyHere, raising=False)
    with VectorEnv(_OnlyHere, 1) as vector:
        (failure,) = vector.reset([0])
        assert "start: the worker process cannot import the environment (AttributeError: " in str(failure)
        assert "define it in a module that can be imported from anywhere" in str(failure)


def test_building_in_the_worker_has_a_deadline_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower than a step may be, and fine; slower than building may be, and told."""
    with VectorEnv(Troubled, 2, options={"work": "wait", "build_seconds": 0.6}, step_timeout=0.3) as vector:
        assert all(isinstance(result, Observation) for result in vector.reset([0, 1]))
    monkeypatch.setattr(hosts, "START_SECONDS", 0.2)
    with VectorEnv(Troubled, 2, options={"work": "wait", "build_seconds": 0.6}) as vector:
        fine, late = vector.reset([0, 1])
        assert isinstance(fine, Observation)  # built by the vector itself
        assert str(late) == "start: timed out after 0.2 s"


def test_workers_see_today_s_environment_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server that forks them may be older than a change of the environment or of the current folder."""
    with VectorEnv(Troubled, 1) as vector:
        vector.reset([0])
    monkeypatch.setenv("TETHER_TEST_HERE", "set later")
    monkeypatch.chdir(tmp_path)
    with VectorEnv("troubled_environments:Curious", 1) as vector:
        assert vector.members[0].reset(0).text.endswith(f"set later {tmp_path}")


@pytest.mark.usefixtures("_no_thread_is_left")
def test_closing_ends_every_process_and_fails_what_is_under_way() -> None:
    vector = VectorEnv(Troubled, 4)
    pids = [_pid(observation) for observation in vector.reset(range(4))]
    vector.step(["end", None, None, None])
    looping = vector.members[1].submit_step("loop")
    start = time.monotonic()
    vector.close()
    assert time.monotonic() - start < 10
    assert str(looping.exception(timeout=5)) == "step: the vector of environments was closed meanwhile"
    assert _eventually(lambda: not any(map(_runs, pids)))
    vector.close()


@pytest.mark.usefixtures("_no_thread_is_left")
def test_closing_while_processes_start() -> None:
    vector = VectorEnv(Troubled, 4)
    futures = [member.submit_reset(0) for member in vector.members]
    vector.close()
    for future in futures:
        assert future.exception(timeout=5) is None or "closed" in str(future.exception())


SCRIPT = """
    import os, signal, sys, time
    sys.path.append({folder!r})
    from tether.envs.remote import VectorEnv
    from troubled_environments import Troubled

    if __name__ == "__main__":
        vector = VectorEnv(Troubled, 3)
        print(*(observation.text.rpartition(" ")[2] for observation in vector.reset([0, 1, 2])), flush=True)
        vector.members[0].submit_step("loop")
        time.sleep(0.5)  # until it is well into it
        {ending}
"""


@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_worker_outlives_the_process_it_works_for(ending: str, tmp_path: Path) -> None:
    """A script that forgets to close, or that is killed, while one worker is in an endless loop."""
    script = tmp_path / "forgetful.py"
    script.write_text(textwrap.dedent(SCRIPT).format(folder=str(Path(__file__).parent), ending=ending))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (-signal.SIGKILL if "KILL" in ending else 0), done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3
    assert _eventually(lambda: not any(map(_runs, pids)))


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
        "from tether.envs.remote import VectorEnv\n"
        "with VectorEnv('troubled_environments:Troubled', 1) as vector:\n    print(vector.reset([0])[0])\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert "__name__" in done.stdout, done.stdout + done.stderr


def test_ctrl_c_leaves_the_workers_alone() -> None:
    with VectorEnv(Troubled, 1) as vector:
        os.kill(_pid(vector.reset([0])[0]), signal.SIGINT)
        assert isinstance(vector.step(["x"])[0], Step)
