"""Which isolation there is, and what happens where there is less: a refusal in one line, never a weaker sandbox in silence."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tether.core.errors import TetherError
from tether.envs.deepcoder.sandbox import client
from tether.envs.deepcoder.sandbox.jobs import SandboxUnavailable, ScriptTask, StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Sandbox, describe_isolation

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="restricts a process with Linux's own means")
needs_kernel = pytest.mark.skipif(describe_isolation().name != "kernel", reason="this machine gives no kernel isolation")

# A process in which user namespaces are forbidden, the way containers do it: unshare fails, everything else goes on.
FORBID_NAMESPACES = """
import ctypes, struct
from tether.envs.deepcoder.sandbox import linux
number = {"x86_64": 272, "aarch64": 97}[linux.machine()]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
linux.forbid_new_privileges()
linux.install_filter(b"".join(struct.pack("HBBI", *step) for step in steps))
"""
# A user namespace that allows no other: what an administrator does with a sysctl.
NO_MORE_NAMESPACES = """
import os
from tether.envs.deepcoder.sandbox import linux, namespaces
outside = os.geteuid(), os.getegid()
linux.unshare("", linux.NEW_USER)
namespaces._write_maps("self", *(f"0 {name} 1" for name in outside))
with open("/proc/sys/user/max_user_namespaces", "w") as file: file.write("0")
"""
# A kernel without the filter and the file rules.
NO_FILTERS = """
from tether.envs.deepcoder.sandbox import client
client._BOOTSTRAP = client._BOOTSTRAP.replace("main(int", '''
from tether.envs.deepcoder.sandbox import linux
def fail(code): raise OSError(22, "filtering system calls: Invalid argument")
linux.install_filter, linux.landlock_version = fail, lambda: 0
main(int''')
"""
# Another system: no Linux calls at all.
NOT_LINUX = """
from tether.envs.deepcoder.sandbox import client
client._BOOTSTRAP = "import sys; sys.platform = 'darwin'\\n" + client._BOOTSTRAP
"""
ASK = """
from tether.core.errors import TetherError
from tether.envs.deepcoder.sandbox.jobs import StdinTask
from tether.envs.deepcoder.sandbox.sandbox import describe_isolation
from tether.envs.deepcoder.sandbox.sandbox import Sandbox
level = describe_isolation()
print(level.name, level.strong, level.detail, sep=" | ")
try: print(Sandbox().run("print(1)", [StdinTask("")])[0].ending)
except TetherError as error: print(type(error).__name__, error.exit_code, error, sep=" | ")
try: print(Sandbox(isolation="process").run("import socket\\nsocket.socket()", [StdinTask("")])[0])
except TetherError as error: print(error)
"""


def asked(circumstances: str) -> list[str]:
    done = subprocess.run([sys.executable, "-W", "error", "-c", circumstances + ASK], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@needs_kernel
def test_this_machine() -> None:
    level = describe_isolation()
    assert (level.name, level.strong) == ("kernel", True)
    assert level.detail.startswith("namespaces, a root folder of its own, system call filter, limits")
    assert describe_isolation() is level


@linux_only
@needs_kernel
@pytest.mark.parametrize(
    ("circumstances", "why"),
    [
        (FORBID_NAMESPACES, "creating namespaces: Operation not permitted"),
        (NO_MORE_NAMESPACES, "creating namespaces: No space left on device; sysctl user.max_user_namespaces is 0"),
    ],
    ids=["container", "sysctl"],
)
def test_where_namespaces_are_forbidden(circumstances: str, why: str) -> None:
    level, refused, weaker = asked(circumstances)
    name, strong, detail = level.split(" | ")
    assert (name, strong) == ("process", "False")
    assert detail.startswith("a process with system call filter, ") and detail.endswith("with the environment's option isolation=process")
    kind, code, message = refused.split(" | ")
    assert (kind, code) == ("SandboxUnavailable", "2")
    assert message == (
        f"kernel isolation for programs is not available here ({why}); allow user namespaces (docs/sandbox.md), "
        "or accept weaker isolation with the environment's option isolation=process"
    )
    assert "PermissionError" in weaker  # the filter is still there


@linux_only
@needs_kernel
def test_where_system_calls_cannot_be_filtered() -> None:
    level, refused, weaker = asked(NO_FILTERS)
    if os.getuid() == 0 and "running as root" in level:
        assert level.startswith("None | False | programs cannot be run here even with isolation=process: running as root")
    else:
        assert level.startswith(
            "process | False | a process with limits; programs can reach this machine's network and files; kernel isolation"
        )
        assert "ending='ok'" in weaker
    assert "(filtering system calls: not permitted, or not known to this kernel)" in refused


def test_another_system() -> None:
    """What a Mac goes through, as far as Linux can play one."""
    level, refused, weaker = asked(NOT_LINUX)
    assert "(namespaces: this is not Linux)" in refused
    if os.getuid() == 0 and "running as root" in level:
        assert "running as root: programs could read everything" in weaker
    else:
        assert level.startswith("process | False | a process with limits; programs can reach this machine's network and files")
        assert "ending='ok'" in weaker


def test_a_fork_server_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(SandboxUnavailable, match=r"isolation=process: starting /nonexistent/python: No such file or directory"):
        client.ForkServer("process")


def test_a_fork_server_that_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_BOOTSTRAP", "raise SystemExit(3)")
    with pytest.raises(SandboxUnavailable, match="the sandbox's own process ended while it started"):
        client.ForkServer("kernel")


def test_a_fork_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_BOOTSTRAP", "import time; time.sleep(100)")
    monkeypatch.setattr(client, "_START_SECONDS", 0.2)
    monkeypatch.setattr("tether.core.child.END_SECONDS", 0.2)
    with pytest.raises(SandboxUnavailable, match=r"did not start within 0\.2 s"):
        client.ForkServer("kernel")


def test_the_error_is_tethers_own() -> None:
    assert issubclass(SandboxUnavailable, TetherError) and SandboxUnavailable.exit_code == 2


def test_processes_leave_no_folder_behind() -> None:
    fork_server = client.ForkServer("process")
    folder = Path(fork_server.facts["folder"])
    assert folder.is_dir() and folder.stat().st_mode & 0o777 == 0o711
    os.kill(fork_server.process_id, signal.SIGKILL)  # so that it cannot clear up itself
    fork_server.close()
    assert not folder.exists()


def test_programs_cannot_look_into_each_others_folders() -> None:
    code = "import os, time\nopen('mine', 'w').write('secret')\ntime.sleep(0.3)\nfor name in os.listdir('..'): print(name)"
    reports = Sandbox(isolation="process", concurrency=2).run(code, [StdinTask("")] * 2)
    assert {(report.ending, report.stdout) for report in reports} == {("error", "")}


def test_scripts_run_at_the_weaker_level_too() -> None:
    assert Sandbox(isolation="process").run("x = 1", [ScriptTask("assert x == 1")])[0].ending == "ok"


# A kernel without the filter alone: a program can start processes, and is one that outlives it.
LEAVES = """
import os, time
for new_session in (False, True):
    if os.fork() == 0:
        if new_session: os.setsid()
        print(os.getpid(), flush=True)
        if new_session and os.fork():
            os._exit(0)
        if new_session: print(os.getpid(), flush=True)
        time.sleep(60)
time.sleep(0.5)
"""
LEFT = """
import os
from tether.envs.deepcoder.sandbox import client
client._BOOTSTRAP = client._BOOTSTRAP.replace("main(int", '''
from tether.envs.deepcoder.sandbox import linux
def fail(code): raise OSError(22, "filtering system calls: Invalid argument")
linux.install_filter = fail
main(int''')
from tether.envs.deepcoder.sandbox.jobs import StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Sandbox
report = Sandbox(isolation="process").run(PROGRAM, [StdinTask("")])[0]
print(report.ending, len(report.stdout.split()), [pid for pid in report.stdout.split() if os.path.exists(f"/proc/{pid}")])
"""


@linux_only
def test_no_process_outlives_its_program_where_there_is_no_filter() -> None:
    script = LEFT.replace("PROGRAM", repr(LEAVES))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    if "even with isolation=process" in done.stderr:
        pytest.skip("this machine runs no programs without the filter")
    assert done.stdout == "ok 3 []\n", done.stdout + done.stderr
