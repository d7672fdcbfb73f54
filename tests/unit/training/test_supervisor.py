"""`tether train --restarts`: what is started again, what is not, how long it waits, and that a further attempt continues its run.

The attempts are small programs in processes of their own; scripts/kill_supervised.py kills whole runs.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tether
from tether.core.child import Attempt, this_attempt
from tether.core.errors import BadInput, EngineUnavailable, ModelUnavailable, TetherError
from tether.runs.lock import RunLock
from tether.runs.store import RunStore
from tether.training import supervisor
from tether.training.supervisor import supervise

ROOT = Path(__file__).parents[3]
SMALL: dict[str, Any] = {
    "env.options.max_turns": 1,
    "rollout.num_groups": 2,
    "rollout.group_size": 2,
    "rollout.max_tokens": 16,
    "learner.update_batch": 2,
    "diagnosis.every": 0,
    "evaluation.prompts": 0,
    "early_stop.invalid_steps": 0,
    "checkpoint.every": 1,
    "model.device": "cpu",
}


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str], list[Any]]]:
    """`attempts(program, restarts)`: the exit code, what was said, and what every attempt was told. The program sees its number as `number`."""
    monkeypatch.setattr(supervisor, "FIRST_WAIT", 0.01)

    def run(program: str, restarts: int) -> tuple[int, list[str], list[Any]]:
        told = tmp_path / "told.jsonl"
        head = f"""
            import json, os, pathlib, signal, sys
            told = os.environ.get("TETHER_ATTEMPT", "null")
            open({str(told)!r}, "a").write(told + chr(10))
            number = (json.loads(told) or {{"attempt": 1}})["attempt"]
            folder = pathlib.Path({str(tmp_path / "run")!r})
        """
        said: list[str] = []
        command = [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(program)]
        try:
            code = supervise(command, restarts, tmp_path / "run", said.append)
        except TetherError as error:
            code = error.exit_code
            said.append(str(error))
        return code, said, [json.loads(line) for line in told.read_text().splitlines()]

    return run


def test_what_is_killed_is_started_again_and_told_why(attempts: Any, capfd: pytest.CaptureFixture[str]) -> None:
    code, said, told = attempts(
        """
        if number == 1: os.kill(os.getpid(), signal.SIGKILL)
        if number == 2: sys.exit(print("loading", file=sys.stderr) or print("tether: the last server is gone", file=sys.stderr) or 1)
        print("done")
        """,
        5,
    )
    killed = "its process was killed by SIGKILL (a machine that is out of memory does that)"
    assert code == 0
    assert told == [None, {"attempt": 2, "cause": killed}, {"attempt": 3, "cause": "the last server is gone"}]
    assert said[:2] == [
        f"attempt 1 ended: {killed}",
        "attempt 2 of 6 begins in 0.01 s and starts from scratch, as there is no checkpoint yet",
    ]
    shown = capfd.readouterr()
    assert shown.out == "done\n" and "loading\ntether: the last server is gone\n" in shown.err


@pytest.mark.parametrize("code", [0, 2, 130, 143, 129, 141])
def test_what_ended_was_refused_or_stopped_is_not(code: int, attempts: Any) -> None:
    assert attempts(f"sys.exit({code})", 3) == (code, [], [None])


def test_it_gives_up_with_the_last_cause(attempts: Any) -> None:
    code, said, told = attempts("sys.exit(f'tether: no memory, time {number}')", 2)
    assert (code, len(told)) == (1, 3)
    assert said[-1] == "gave up after 2 restarts; the last attempt ended with: no memory, time 3"
    code, said, told = attempts("sys.exit(1)", 0)
    assert said == ["gave up after 0 restarts; the last attempt ended with: exit code 1"]
    assert attempts("", -1)[:2] == (2, ["--restarts is -1; give 0 or more"])


def test_the_wait_doubles_up_to_a_limit_and_begins_anew_after_a_checkpoint(attempts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_WAIT", 0.04)
    _, said, _ = attempts(
        """
        if number == 5:
            (folder / "checkpoints" / "step_000007").mkdir(parents=True)
            (folder / "checkpoints" / "step_000007" / "state.pt").touch()
        sys.exit(number < 7)
        """,
        9,
    )
    waits = [line.partition(" begins in ")[2].partition(" ")[0] for line in said[1::2]]
    assert waits == ["0.01", "0.02", "0.04", "0.04", "0.01", "0.02"]
    assert said[9].endswith("attempt 6 of 10 begins in 0.01 s and continues from step 7")


def test_the_next_attempt_waits_until_nobody_writes_the_folder(attempts: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    holder = f"""
        import time
        from pathlib import Path
        from tether.runs.lock import RunLock
        lock = RunLock.acquire(Path({str(tmp_path / "run")!r}))
        print("locked", flush=True)
        time.sleep(1)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(holder)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"locked\n"
    code, said, _ = attempts("sys.exit(number == 1)", 1)
    process.communicate()
    assert code == 0 and said[2].startswith(f"waiting for process {process.pid} on {socket.gethostname()}")
    RunLock.acquire(tmp_path / "run").release()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_is_passed_on_and_is_the_end(number: signal.Signals, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    inner = f"""
        import pathlib, signal, sys, time
        signal.signal(signal.{number.name}, lambda *_: sys.exit(1))  # whatever it ends with
        pathlib.Path({str(ready)!r}).touch()
        time.sleep(60)
    """
    outer = f"""
        import sys
        from pathlib import Path
        from tether.training.supervisor import supervise
        sys.exit(supervise([sys.executable, "-c", {textwrap.dedent(inner)!r}], 9, Path({str(tmp_path)!r}), print))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(outer)], stdout=subprocess.PIPE)
    while not ready.exists():
        time.sleep(0.02)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert (process.returncode, printed) == (1, b"")


def test_which_attempt_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TETHER_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert this_attempt() == (1, "") and Attempt(1, "").variables() == {}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert this_attempt() == (3, "torchrun started the ranks again, whose last lines say why")
    for name, value in Attempt(4, 'rank 1 said "no"').variables().items():
        monkeypatch.setenv(name, value)
    assert this_attempt() == (4, 'rank 1 said "no"')


# ------------------------------------------------------------------------------------------------- a further attempt continues


def test_a_further_attempt_continues_the_run_of_the_first(tmp_path: Path, small_policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"

    def attempt(**more: Any) -> tether.Run:
        return tether.train("frozen_lake", small_policy(1), filter="all", steps=3, out=out, **{**SMALL, **more})

    def dies(*_: Any) -> None:
        raise EngineUnavailable("the last server is gone")

    with monkeypatch.context() as context:
        context.setattr("tether.training.stages.check_sampler", lambda run, step, *_: dies() if step == 2 else {})
        with pytest.raises(EngineUnavailable):
            attempt()
    for name, value in Attempt(2, "the last server is gone").variables().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match="whose settings are no longer those of the run"):
        attempt(seed=8)
    run = attempt()
    note = "attempt 2, from step 1; the one before ended: the last server is gone"
    assert [note in record.notes for record in run.records] == [False, True, False]
    (entry,) = run.store.attempts()
    assert (entry["attempt"], entry["cause"], entry["from_step"]) == (2, "the last server is gone", 1)
    assert run.finished == "all 3 steps done"
    monkeypatch.delenv("TETHER_ATTEMPT")
    with pytest.raises(BadInput, match="exists; resume it with --resume"):
        attempt()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(BadInput, match="attempt 2 of a command that does not say which run to continue; give it --out"):
        tether.train("frozen_lake", small_policy(1), steps=3, **SMALL)


def test_attempts_find_the_modules_that_the_command_finds(tmp_path: Path) -> None:
    """`python -m` looks into the current folder first, where a file may hide an installed module; the command `tether` does not."""
    (tmp_path / "yaml.py").write_text("print('a file of the current folder was run')")
    words = ["-P", "-m", "tether", "train", "nowhere", "--restarts", "1", "--out", "run"]
    ended = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and ended.stdout == "" and "nowhere" in ended.stderr


def test_what_a_kill_left_before_the_run_was_one_is_no_obstacle(tmp_path: Path) -> None:
    for name in ("config.yaml", "run.lock"):
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        (tmp_path / name).touch()
    store = RunStore.create(tmp_path, "steps: 1\n", {})
    assert store.config() == {"steps": 1}
    store.close()
    (tmp_path / "run.json").unlink()
    (tmp_path / "checkpoints" / "step_000001").mkdir()
    with pytest.raises(BadInput, match="exists; resume it"):
        RunStore.create(tmp_path, "steps: 1\n", {})


@pytest.mark.long
def test_a_server_that_was_there_before_is_worth_a_further_attempt(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tether.models.policy import Policy
    from tether.rollout.engines.server import ServerEngine

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    policy = Policy(tiny.model, tiny.tokenizer, max_positions=64)
    with pytest.raises(ModelUnavailable):
        ServerEngine([address], policy)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(EngineUnavailable, match="start one with: tether serve MODEL"):
        ServerEngine([address], policy)


# ------------------------------------------------------------------------------------------------------------------ whole runs


@pytest.mark.long
@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_killed_ranks_and_servers_lose_nothing(sharding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("kill_supervised", ROOT / "scripts" / "kill_supervised.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    part = script.Part("restarts", 1.0, 5, tmp_path)
    keeper = script.Keeper(tmp_path / "server.log")
    try:
        reference = script._undisturbed(part, sharding, keeper)
        script.disturb(part, script.Supervised(tmp_path / "run", sharding, keeper), reference)
    finally:
        keeper.close()
    assert part.counts["kills"] >= 3 and part.failures == []


@pytest.mark.long
def test_ranks_that_torchrun_starts_again_continue_by_themselves(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=9", "--monitor-interval=0.1", "-m", "tether", "train", "frozen_lake"]
    words += ["--steps", "4", "--filter", "all", "--quiet", "--out", str(out)]
    words += [word for pair in SMALL.items() for word in ("--set", "=".join(map(str, pair)))]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *words]
    running = subprocess.Popen(torchrun, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while running.poll() is None and not (out / "checkpoints" / "step_000001").exists():
        time.sleep(0.02)
    ranks = [int(pid) for pid in Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()]
    second = next(pid for pid in ranks if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(second, signal.SIGKILL)
    printed, _ = running.communicate(timeout=300)
    assert running.returncode == 0, printed
    store = RunStore.open(out)
    (entry,) = store.attempts()  # the first that followed came through
    assert entry["attempt"] == 2 and entry["from_step"] >= 1
    assert store.finished == "all 4 steps done" and [record.step for record in store.steps()] == [1, 2, 3, 4]
