"""A child process: what it says is read line by line, it ends with its socket, and a guarded command ends with its guard."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tether.core.child import Child, signal_name

ECHO = "import sys\nfor line in sys.stdin: print(line.strip().upper(), flush=True)"
PYTHON = [sys.executable, "-c"]


def _gone(process: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{process}/stat").exists() and Path(f"/proc/{process}/stat").read_text().split()[2] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_lines_there_and_back() -> None:
    child = Child([*PYTHON, ECHO], "stdio")
    assert child.send(b"one\ntwo\n")
    assert (child.read_line(60), child.read_line(60)) == (b"ONE\n", b"TWO\n")
    assert child.read_line(0.01) is None and child.exit_code is None
    child.close()
    assert child.exit_code == 0


def test_a_child_that_ended_says_nothing_more() -> None:
    child = Child([*PYTHON, "print('bye')"], "stdio")
    assert (child.read_line(60), child.read_line(60)) == (b"bye\n", b"")
    assert child.wait() == 0
    child.kill()  # nothing left to kill


def test_one_that_does_not_end_by_itself_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tether.core.child.END_SECONDS", 0.1)
    child = Child([*PYTHON, "import time; print('here', flush=True); time.sleep(1000)"], "stdio")
    assert child.read_line(60) == b"here\n"
    child.close()
    assert child.exit_code == -signal.SIGKILL


def test_no_such_command() -> None:
    with pytest.raises(FileNotFoundError):
        Child(["/no/such/command"], "stdio")


def test_a_guarded_command_gets_ctrl_c_and_ends_with_the_socket(tmp_path: Path) -> None:
    code = "import os, time\nprint(os.getpid(), flush=True)\ntry: time.sleep(1000)\nexcept KeyboardInterrupt: print('interrupted', flush=True)\ntime.sleep(1000)"
    log = tmp_path / "log"
    with log.open("wb") as output:
        child = Child([*PYTHON, code], "guard", stdout=output)
    while not log.read_text().endswith("\n"):
        time.sleep(0.05)
    process = int(log.read_text())
    assert child.send(b"INT\n")
    while "interrupted" not in log.read_text():
        time.sleep(0.05)
    child.close()
    assert _gone(process)


def test_a_guard_does_not_take_a_file_of_the_current_folder_for_a_module(tmp_path: Path) -> None:
    (tmp_path / "subprocess.py").write_text("raise SystemExit('a file of the current folder was run')")
    child = Child(["touch", "done"], "guard", folder=str(tmp_path))
    deadline = time.monotonic() + 60
    while child.exit_code is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert child.exit_code == 0 and (tmp_path / "done").exists()
    child.close()


def test_a_child_ends_with_its_parent_also_when_that_is_killed() -> None:
    code = (
        "import sys, time; from tether.core.child import Child\n"
        f"child = Child([sys.executable, '-c', {ECHO!r}], 'stdio'); print(child.process_id, flush=True); time.sleep(1000)"
    )
    parent = subprocess.Popen([*PYTHON, code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    process = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert _gone(process)


def test_names_of_signals() -> None:
    assert (signal_name(9), signal_name(200)) == ("SIGKILL", "signal 200")
