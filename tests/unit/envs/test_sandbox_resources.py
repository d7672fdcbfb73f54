"""Programs that try to use up the machine: each is stopped by its own limit, and the next program runs as if nothing had been."""

from collections.abc import Iterator

import pytest

from tether.envs.deepcoder.sandbox.jobs import Limits, Report, StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Isolation, Sandbox, describe_isolation

LIMITS = Limits(cpu_seconds=3, wall_seconds=10, memory_mib=128, output_kib=64, file_kib=256, threads=8)

needs_kernel = pytest.mark.skipif(describe_isolation().name != "kernel", reason="this machine gives no kernel isolation")
BOTH = [pytest.param("kernel", marks=needs_kernel), "process"]


@pytest.fixture(params=BOTH)
def isolation(request: pytest.FixtureRequest) -> Iterator[Isolation]:
    """Whatever the test did, the sandbox is well afterwards."""
    level: Isolation = request.param
    yield level
    assert attack("print(6 * 7)", level).stdout == "42\n"


def attack(code: str, isolation: Isolation, limits: Limits = LIMITS) -> Report:
    [report] = Sandbox(limits, isolation=isolation).run(code, [StdinTask("")])
    return report


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
        "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        "import threading\nfor _ in range(4): threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "9 ** 9 ** 9",
        "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')",
    ],
    ids=["loop", "ignored signals", "blocked signals", "threads", "caught", "one long operation", "regular expression"],
)
def test_processor_time(code: str, isolation: Isolation) -> None:
    report = attack(code, isolation, Limits(cpu_seconds=0.1, wall_seconds=30))
    assert (report.ending, report.detail) == ("timeout", "more than 0.1 s of processor time")
    assert report.seconds < 15


def test_fractions_of_a_second_count(isolation: Isolation) -> None:
    """The kernel's own limit knows whole seconds only and would have come at 2."""
    code = (
        "import time\nsaid = 0\nwhile True:\n    if time.process_time() > said + 0.05: said = time.process_time(); print(said, flush=True)"
    )
    report = attack(code, isolation, Limits(cpu_seconds=0.2, wall_seconds=30))
    assert report.ending == "timeout" and 0.1 < float(report.stdout.split()[-1]) < 1.5


def test_a_program_that_ends_just_beyond_its_time_was_too_slow(isolation: Isolation) -> None:
    code = "import time\nwhile time.process_time() < 0.06: pass"
    report = attack(code, isolation, Limits(cpu_seconds=0.05, wall_seconds=30))
    assert (report.ending, report.detail) == ("timeout", "more than 0.05 s of processor time")
    assert attack(code, isolation, Limits(cpu_seconds=0.5, wall_seconds=30)).ending == "ok"


@pytest.mark.parametrize(
    "code",
    [
        "import time\ntime.sleep(1000)",
        "import signal\nsignal.pause()",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import threading\nthreading.Event().wait()",
        "import os\nos.close(0), os.close(1), os.close(2), os.close(3)\nimport time\ntime.sleep(1000)",
        "import atexit, time\natexit.register(time.sleep, 1000)",
        "import select\nselect.select([], [], [])",
    ],
    ids=["sleep", "pause", "stopped", "lock", "closed descriptors", "exit function", "select"],
)
def test_wall_time(code: str, isolation: Isolation) -> None:
    report = attack(code, isolation, Limits(wall_seconds=0.15))
    assert (report.ending, report.detail) == ("timeout", "more than 0.15 s")
    assert report.seconds < 3


@pytest.mark.parametrize(
    "code",
    [
        "x = [0]\nwhile True: x += x",
        "x = bytearray(10**12)",
        "x = []\nwhile True: x.append(bytearray(2**20))",
        "x = []\nwhile True: x.append(object())",
        "x = 'a'\nwhile True: x += x",
        "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 2**24))",
        "import mmap\nx = mmap.mmap(-1, 2**40)",
        "def f():\n    x = []\n    while True: x.append([x] * 1000)\nf()",
    ],
    ids=["doubling", "at once", "blocks", "objects", "text", "maps", "one map", "inside a function"],
)
def test_memory(code: str, isolation: Isolation) -> None:
    report = attack(code, isolation, Limits(memory_mib=64, wall_seconds=30))
    assert (report.ending, report.detail) == ("memory", "MemoryError")


def test_runaway_recursion(isolation: Isolation) -> None:
    """How CPython goes down here depends on its version."""
    report = attack("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", isolation, Limits(cpu_seconds=0.5, memory_mib=16))
    assert report.ending in ("memory", "error", "killed", "timeout")


def test_memory_that_is_caught_stays_bounded(isolation: Isolation) -> None:
    code = """
import resource
held = []
while True:
    try: held.append(bytearray(2**20))
    except MemoryError: break
print(len(held) < 135, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 250 * 1024)
"""
    assert attack(code, isolation).stdout == "True True\n"


def test_a_program_can_use_what_it_is_given(isolation: Isolation) -> None:
    assert attack("x = bytearray(100 * 2**20)\nprint(len(x))", isolation).stdout == "104857600\n"


def test_limits_cannot_be_lifted(isolation: Isolation) -> None:
    code = """
import resource
for name in ('AS', 'CPU', 'NPROC', 'FSIZE', 'NOFILE', 'STACK', 'CORE', 'DATA'):
    kind = getattr(resource, 'RLIMIT_' + name)
    for wanted in ((resource.RLIM_INFINITY,) * 2, resource.getrlimit(kind)):
        try: resource.setrlimit(kind, wanted)
        except (ValueError, OSError): print('refused')
try: resource.prlimit(1, resource.RLIMIT_AS)
except (PermissionError, ProcessLookupError): print('refused')
"""
    assert attack(code, isolation).stdout == "refused\n" * 17


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("while True: print('x' * 1000)", "more than 64 KiB of standard output"),
        ("import os\nwhile True: os.write(1, b'x')", "more than 64 KiB of standard output"),
        ("print('x' * 10_000_000)", "more than 64 KiB of standard output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "more than 64 KiB of standard error"),
        ("import os\nwhile True: os.write(3, b'x' * 1000)", "more than 64 KiB of value"),
    ],
    ids=["lines", "bytes", "one line", "errors", "result"],
)
def test_output(code: str, detail: str, isolation: Isolation) -> None:
    report = attack(code, isolation)
    assert (report.ending, report.detail) == ("output", detail)
    assert len(report.stdout) <= 64 * 1024


def test_output_up_to_the_limit_is_kept(isolation: Isolation) -> None:
    report = attack("print('x' * (64 * 1024 - 1))", isolation)
    assert (report.ending, len(report.stdout)) == ("ok", 64 * 1024)


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "import os\nwhile True: os.forkpty()",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        "import subprocess\nsubprocess.run(['/bin/true'])",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
        "import os\nos.popen('true')",
        "import pty\npty.spawn('/bin/sh')",
    ],
)
def test_no_process_can_be_started(code: str, isolation: Isolation) -> None:
    report = attack(code, isolation)
    assert report.ending == "error" and report.detail.split(":")[0] in ("PermissionError", "OSError", "FileNotFoundError")


def test_os_system_starts_nothing(isolation: Isolation) -> None:
    assert attack("import os\nprint(os.system('echo out') != 0)", isolation).stdout == "True\n"


@needs_kernel
def test_threads_are_counted() -> None:
    code = """
import threading
barrier, started = threading.Event(), 0
try:
    while True:
        threading.Thread(target=barrier.wait, daemon=True).start()
        started += 1
except RuntimeError as error:
    print(started, error)
barrier.set()
"""
    assert attack(code, "kernel").stdout == "7 can't start new thread\n"
    twice = Sandbox(LIMITS, concurrency=2).run(code, [StdinTask("")] * 2)
    assert [report.stdout for report in twice] == ["7 can't start new thread\n"] * 2


def test_a_thread_bomb_is_bounded_by_memory_at_least(isolation: Isolation) -> None:
    code = "import threading, time\nthreading.stack_size(32768)\nwhile True: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    assert attack(code, isolation).ending in ("error", "memory", "timeout")


@pytest.mark.parametrize(
    ("code", "details"),
    [
        ("open('big', 'wb').write(bytes(2**20))", ("OSError: [Errno 27] File too large",)),
        ("open('big', 'wb').truncate(2**40)", ("OSError: [Errno 27] File too large",)),
        (
            "for n in range(10**6): open(str(n), 'wb').write(bytes(200_000))",
            ("OSError: [Errno 28] No space left on device", "more than 1088 KiB of files"),
        ),
        (
            "for n in range(10**6): open(str(n), 'wb')\nimport time\ntime.sleep(1)",
            ("OSError: [Errno 28] No space left on device", "more than 1088 KiB"),
        ),
        ("x = [open('/dev/null') for _ in range(100)]", ("OSError: [Errno 24] Too many open files",)),
        ("import os\nx = [os.pipe() for _ in range(100)]", ("PermissionError: [Errno 1] Operation not permitted",)),
        ("import os\nos.memfd_create('x')", ("PermissionError: [Errno 1] Operation not permitted",)),
        (
            "from multiprocessing import shared_memory\nshared_memory.SharedMemory(create=True, size=2**30)",
            ("PermissionError", "FileNotFoundError", "OSError"),
        ),
    ],
    ids=["one file", "sparse file", "total", "many files", "descriptors", "pipes", "memory file", "shared memory"],
)
def test_files(code: str, details: tuple[str, ...], isolation: Isolation) -> None:
    report = attack(code, isolation)
    assert report.ending in ("error", "output") and report.detail.startswith(details)


def test_hidden_files_count_too(isolation: Isolation) -> None:
    code = """
import os
held = []
try:
    for n in range(60):
        held.append(open(str(n), 'wb', buffering=0))
        os.remove(str(n))
        held[-1].write(bytes(250_000))
except OSError as error:
    print(error.errno)
"""
    report = attack(code, isolation)
    assert report.stdout == ("28\n" if isolation == "kernel" else "")


def test_an_input_larger_than_the_file_limit_arrives() -> None:
    [report] = Sandbox(LIMITS, isolation="process").run("print(len(input()))", [StdinTask("x" * 2**21)])
    assert report.stdout == f"{2**21}\n"
