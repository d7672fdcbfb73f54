"""Nothing is left behind and nothing hangs: fork servers that die, processes that fork or are killed, many programs, some at a time."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tether.envs.deepcoder.sandbox import client
from tether.envs.deepcoder.sandbox.jobs import Limits, Report, StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Isolation, Sandbox, describe_isolation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
needs_kernel = pytest.mark.skipif(describe_isolation().name != "kernel", reason="this machine gives no kernel isolation")
both_levels = pytest.mark.parametrize("isolation", [pytest.param("kernel", marks=needs_kernel), "process"])

SOURCE = str(Path(client.__file__).parents[4])
SLEEP = "import time\ntime.sleep(1000)"


def descendants(process: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if parent == process:
            found += [int(path.parent.name), *descendants(int(path.parent.name))]
    return found


def wait_for(condition: object, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def quiet_fork_server(isolation: Isolation) -> tuple[int, int]:
    """The fork server's process, and the one of its processes that makes sandboxes, with no sandbox left from before."""
    fork_server = client.running_fork_server(isolation).process_id
    assert wait_for(lambda: len(descendants(fork_server)) == (1 if isolation == "kernel" else 0))
    return fork_server, (descendants(fork_server)[0] if isolation == "kernel" else fork_server)


def in_thread(isolation: Isolation, code: str = SLEEP, count: int = 1) -> tuple[threading.Thread, list[Report]]:
    """Start programs and come back at once."""
    reports: list[Report] = []
    sandbox = Sandbox(Limits(wall_seconds=20), isolation=isolation, concurrency=8)
    thread = threading.Thread(target=lambda: reports.extend(sandbox.run(code, [StdinTask("")] * count)))
    thread.start()
    return thread, reports


@both_levels
def test_a_killed_fork_server_ends_its_runs_and_is_replaced(isolation: Isolation) -> None:
    fork_server, server = quiet_fork_server(isolation)
    thread, reports = in_thread(isolation, count=2)
    assert wait_for(lambda: len(descendants(server)) == 4)
    family = [fork_server, *descendants(fork_server)]
    os.kill(fork_server, signal.SIGKILL)
    thread.join(10)
    assert [report.ending for report in reports] == ["killed", "killed"]
    assert reports[0].detail == "the sandbox ended without an answer"
    assert wait_for(lambda: not any(map(alive, family)))
    assert Sandbox(isolation=isolation).run("print(1)", [StdinTask("")])[0].stdout == "1\n"
    assert client.running_fork_server(isolation).process_id != fork_server


@both_levels
def test_a_killed_supervisor_ends_its_program(isolation: Isolation) -> None:
    fork_server, server = quiet_fork_server(isolation)
    thread, reports = in_thread(isolation)
    assert wait_for(lambda: len(descendants(server)) == 2)
    family = descendants(server)
    os.kill(family[0], signal.SIGKILL)
    thread.join(10)
    assert [report.ending for report in reports] == ["killed"]
    assert wait_for(lambda: not any(map(alive, family)))
    assert client.running_fork_server(isolation).process_id == fork_server


RUN_FOREVER = f"""
import sys
from tether.envs.deepcoder.sandbox import client
from tether.envs.deepcoder.sandbox.jobs import Limits, StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Sandbox
sandbox = Sandbox(Limits(wall_seconds=100), isolation=sys.argv[1], concurrency=2)
fork_server = client.running_fork_server(sandbox.isolation)
print(fork_server.process_id, fork_server.facts["folder"], flush=True)
sandbox.run({SLEEP!r}, [StdinTask("")] * 2)
"""


@both_levels
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_when_tether_is_killed_everything_goes(isolation: Isolation, number: signal.Signals) -> None:
    command = [sys.executable, "-c", RUN_FOREVER, isolation]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as tether:
        assert tether.stdout is not None
        fork_server, *folders = tether.stdout.readline().split()
        assert wait_for(lambda: len(descendants(int(fork_server))) == (5 if isolation == "kernel" else 4))
        family = [int(fork_server), *descendants(int(fork_server))]
        assert [Path(folder).is_dir() for folder in folders] == ([] if isolation == "kernel" else [True])
        tether.send_signal(number)
        tether.wait(10)
        assert wait_for(lambda: not any(map(alive, family)))
    assert not any(Path(folder).exists() for folder in folders)


def test_a_folder_that_outlived_everybody_is_removed_by_the_next_fork_server() -> None:
    """Both are killed at once, as by a machine without memory: nobody is left to remove it. That of a living fork server stays."""
    with subprocess.Popen(
        [sys.executable, "-c", RUN_FOREVER, "process"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as tether:
        assert tether.stdout is not None
        fork_server, folder = tether.stdout.readline().split()
        family = [int(fork_server), *descendants(int(fork_server))]
        tether.send_signal(signal.SIGSTOP)  # it would remove the folder
        os.kill(int(fork_server), signal.SIGKILL)
        tether.kill()
        assert wait_for(lambda: not any(map(alive, family)))
    assert Path(folder).is_dir()
    living = client.running_fork_server("process").facts["folder"]
    client.ForkServer("process").close()
    assert not Path(folder).exists() and Path(living).is_dir()


@both_levels
def test_many_programs_leak_nothing(isolation: Isolation) -> None:
    sandbox = Sandbox(Limits(wall_seconds=20), isolation=isolation, concurrency=2)
    fork_server, server = quiet_fork_server(isolation)

    def state() -> tuple[int, int, int, int, int]:
        gc.collect()
        mounts = len(Path(f"/proc/{server}/mountinfo").read_text().splitlines())
        descriptors = [
            len(os.listdir(f"/proc/{process}/fd")) if os.access(f"/proc/{process}/fd", os.R_OK) else 0 for process in (os.getpid(), server)
        ]
        return len(descendants(fork_server)), mounts, *descriptors, threading.active_count()  # type: ignore[return-value]

    before = state()
    rounds = 10 if isolation == "kernel" else 5
    reports = [sandbox.run(code, [StdinTask("")] * 2) for _ in range(rounds) for code in ("print(1)", "1 / 0", "open('x', 'w').write('y')")]
    assert [report.ending for pair in reports for report in pair] == ["ok", "ok", "error", "error", "ok", "ok"] * rounds
    assert wait_for(lambda: state() == before), (before, state())


@needs_kernel
def test_what_the_kernel_says_about_a_running_program() -> None:
    _, server = quiet_fork_server("kernel")
    thread, _ = in_thread("kernel", "import time\ntime.sleep(0.7)")
    assert wait_for(lambda: len(descendants(server)) == 2)
    supervisor, program = descendants(server)
    assert wait_for(lambda: "Seccomp:\t2" in Path(f"/proc/{program}/status").read_text())
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{program}/status").read_text().splitlines())
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1" and status["NSpid"].split()[-1] == "2"
    root = os.getuid() == 0
    assert set(status["Uid"].split() + status["Gid"].split()) == ({"65534"} if root else {str(os.getuid()), str(os.getgid())})
    assert dict(line.split(":\t", 1) for line in Path(f"/proc/{supervisor}/status").read_text().splitlines())["NSpid"].split()[-1] == "1"
    mounts = {line.split()[4]: line.split()[5] for line in Path(f"/proc/{program}/mountinfo").read_text().splitlines()}
    library = os.path.dirname(os.__file__)
    assert set(mounts) <= {"/", "/tmp", "/dev/stdin", library, f"{library}/site-packages", f"{library}/dist-packages"} | {
        f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")
    }
    assert all("nosuid" in options for options in mounts.values())
    assert [mount for mount, options in mounts.items() if options.startswith("rw")] == ["/tmp", "/dev/stdin"]
    if root:  # only root may look at these
        for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
            assert os.readlink(f"/proc/{program}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
        assert os.readlink(f"/proc/{program}/ns/mnt") != os.readlink(f"/proc/{server}/ns/mnt")
        assert os.listdir(f"/proc/{server}/root/") and set(os.listdir(f"/proc/{server}/root/")) == set(os.listdir(f"/proc/{program}/root/"))
    thread.join()


@both_levels
def test_tasks_run_at_the_same_time_up_to_the_number(isolation: Isolation) -> None:
    code = "import time\nprint(time.time())\ntime.sleep(0.3)\nprint(time.time())"
    reports = Sandbox(isolation=isolation, concurrency=3).run(code, [StdinTask("")] * 6)
    spans = [tuple(map(float, report.stdout.split())) for report in reports]
    at_once = [sum(begin <= moment < end for begin, end in spans) for moment, _ in spans]
    assert max(at_once) == 3


def test_the_number_holds_for_the_whole_process() -> None:
    spans: list[tuple[float, float]] = []

    def one() -> None:
        code = "import time\nprint(time.time())\ntime.sleep(0.1)\nprint(time.time())"
        for report in Sandbox(isolation=describe_isolation().name or "process", concurrency=5).run(code, [StdinTask("")] * 3):
            begin, end = map(float, report.stdout.split())
            spans.append((begin, end))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(spans) == 12
    assert 1 < max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans) <= 5


def test_an_interrupted_run_frees_its_places() -> None:
    level = describe_isolation().name or "process"
    sandbox = Sandbox(Limits(wall_seconds=20), isolation=level, concurrency=1)
    _, server = quiet_fork_server(level)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        sandbox.run(SLEEP, [StdinTask("")] * 3)
    timer.join()
    assert wait_for(lambda: not descendants(server))
    assert sandbox.run("print(1)", [StdinTask("")])[0].stdout == "1\n"


MANY_DESCRIPTORS = '''
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (min(1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
for _ in range(500): os.set_inheritable(os.open("/dev/null", os.O_RDONLY), True)
from tether.envs.deepcoder.sandbox.jobs import StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Sandbox
look = """
import os
for number in range(2000):
    try: os.fstat(number), print(number)
    except OSError: pass
"""
print(Sandbox(isolation=sys.argv[1]).run(look, [StdinTask("")])[0].stdout.split())
'''


@both_levels
def test_descriptors_of_tether_stay_there(isolation: Isolation) -> None:
    """Also when they are many and meant to be inherited, and the fork server's own has a high number."""
    done = subprocess.run([sys.executable, "-c", MANY_DESCRIPTORS, isolation], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("['0', '1', '2', '3']\n", "")


def test_a_forked_process_has_a_fork_server_of_its_own() -> None:
    code = """
import os, sys
from tether.envs.deepcoder.sandbox import client
from tether.envs.deepcoder.sandbox.jobs import StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Sandbox
sandbox = Sandbox(isolation=sys.argv[1])
sandbox.run("1", [StdinTask("")])
ours = client.running_fork_server(sandbox.isolation).process_id
child = os.fork()
print(sandbox.run("print(6 * 7)", [StdinTask("")])[0].stdout.strip(), (client.running_fork_server(sandbox.isolation).process_id == ours) == (child != 0), flush=True)
if child == 0: os._exit(0)
os.waitpid(child, 0)
print(sandbox.run("print(6 * 7)", [StdinTask("")])[0].stdout.strip())
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code, describe_isolation().name or "process"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (sorted(done.stdout.splitlines()), done.stderr) == (["42", "42 True", "42 True"], "")


@both_levels
def test_the_fork_server_never_had_the_environment(isolation: Isolation) -> None:
    """Not even in memory that a program could read through."""
    fork_server, server = quiet_fork_server(isolation)
    for process in {fork_server, server}:
        path = Path(f"/proc/{process}/environ")
        if os.access(path, os.R_OK):
            assert {name.partition(b"=")[0] for name in path.read_bytes().split(b"\0")} <= {
                b"",
                b"PYTHONHASHSEED",
                b"LD_LIBRARY_PATH",
                b"PYTHONHOME",
            }


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give itself groups")
@needs_kernel
def test_groups_of_root_are_left_behind() -> None:
    code = """
from tether.envs.deepcoder.sandbox.jobs import StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Sandbox
print(Sandbox().run("import os; print(os.getgroups())", [StdinTask("")])[0].stdout)
"""
    done = subprocess.run([sys.executable, "-c", code], extra_groups=[4242], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n\n"


UNPRIVILEGED = """
import json, os, sys
from tether.envs.deepcoder.sandbox.jobs import Limits, StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Sandbox
assert os.getuid() == 65534 and os.getgroups() in ([], [65534])
sandbox = Sandbox(Limits(cpu_seconds=2, wall_seconds=10, memory_mib=64, threads=4), isolation=sys.argv[1])
print(json.dumps([[report.ending, report.stdout, report.detail] for code in json.load(sys.stdin) for report in sandbox.run(code, [StdinTask("")])]))
"""

CORE_ATTACKS = {
    "print(6 * 7)": ("ok", "42\n", ""),
    "import os\nwhile True: os.fork()": ("error", "", "PermissionError: [Errno 1] Operation not permitted (solution.py, line 2)"),
    "x = [0]\nwhile True: x += x": ("memory", "", "MemoryError"),
    "while True: print('x' * 1000)": ("output", None, "more than 1024 KiB of standard output"),
    "print(len(open('/etc/passwd').read()))": ("error", "", ("FileNotFoundError", "PermissionError")),
    "import os\nprint(len(os.listdir('/proc')))": ("error", "", ("FileNotFoundError", "PermissionError")),
    "import socket\nsocket.socket()": ("error", "", ("PermissionError",)),
    "import os\nos.kill(os.getppid(), 9)": ("error", "", ("PermissionError",)),
    "import os\nos.kill(-1, 9)": ("error", "", ("PermissionError",)),
    "import os\nos.setuid(0)": ("error", "", ("PermissionError",)),
    "import ctypes\nprint(ctypes.CDLL(None).unshare(0x10000000), ctypes.CDLL(None).ptrace(16, 1, 0, 0))": ("ok", "-1 -1\n", ""),
    "import os\nopen(os.__file__, 'a')": ("error", "", ("OSError", "PermissionError")),
    "open('x', 'wb').write(bytes(10**7))": ("error", "", ("OSError: [Errno 27]",)),
    "import shutil\nshutil.rmtree('/', ignore_errors=True)\nprint(1)": ("ok", "1\n", ""),
    "import ctypes\nctypes.string_at(0)": ("killed", "", "ended by SIGSEGV"),
}


def _readable_python() -> str | None:
    """A Python that the user nobody may run and that can import the sandbox."""
    for python in (
        sys.executable,
        *filter(None, map(shutil.which, ("python3", "python3.11", "python3.12", "python3.13"))),
        "/usr/bin/python3",
    ):
        try:
            code = "import sys, tether.envs.deepcoder.sandbox.sandbox; sys.exit(sys.version_info < (3, 11))"
            done = subprocess.run(
                [python, "-c", code],
                env={"PYTHONPATH": SOURCE},
                user=65534,
                group=65534,
                extra_groups=[],
                cwd="/",
                check=False,
                capture_output=True,
            )
        except OSError:
            continue
        if done.returncode == 0:
            return python
    return None


@pytest.mark.skipif(os.getuid() != 0, reason="without root, every other test runs as an ordinary user anyway")
@both_levels
def test_an_ordinary_user_is_protected_as_well(isolation: Isolation) -> None:
    python = _readable_python()
    if python is None:
        pytest.skip("no Python here that an ordinary user may run")
    done = subprocess.run(
        [python, "-B", "-c", UNPRIVILEGED, isolation],
        input=json.dumps(list(CORE_ATTACKS)),
        env={"PYTHONPATH": SOURCE},
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for (code, (ending, stdout, detail)), (got_ending, got_stdout, got_detail) in zip(
        CORE_ATTACKS.items(), json.loads(done.stdout), strict=True
    ):
        assert (got_ending, got_stdout) == (ending, got_stdout if stdout is None else stdout), code
        assert got_detail.startswith(detail), code
