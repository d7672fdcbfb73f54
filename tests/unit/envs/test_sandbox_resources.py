"""Programs that try to use up the machine: each is stopped by its own limit, and the next program runs as if nothing had been."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tether.envs.deepcoder.sandbox.jobs import Limits, Report, StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Isolation, Sandbox, describe_isolation

sys.path.append(str(Path(__file__).parent))

from hostile_programs import FILES, LIMITS_LIFTED, MEMORY, OUTPUT, PROCESSES, PROCESSOR_TIME, THREAD_BOMB, WALL_TIME

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


@pytest.mark.parametrize("code", PROCESSOR_TIME.values(), ids=PROCESSOR_TIME)
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


@pytest.mark.parametrize("code", WALL_TIME.values(), ids=WALL_TIME)
def test_wall_time(code: str, isolation: Isolation) -> None:
    report = attack(code, isolation, Limits(wall_seconds=0.15))
    assert (report.ending, report.detail) == ("timeout", "more than 0.15 s")
    assert report.seconds < 3


@pytest.mark.parametrize("code", MEMORY.values(), ids=MEMORY)
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
    assert attack(LIMITS_LIFTED, isolation).stdout == "refused\n" * 17


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("lines", "standard output"),
        ("bytes", "standard output"),
        ("one line", "standard output"),
        ("errors", "standard error"),
        ("result", "value"),
    ],
)
def test_output(name: str, what: str, isolation: Isolation) -> None:
    report = attack(OUTPUT[name], isolation)
    assert (report.ending, report.detail) == ("output", f"more than 64 KiB of {what}")
    assert len(report.stdout) <= 64 * 1024


def test_output_up_to_the_limit_is_kept(isolation: Isolation) -> None:
    report = attack("print('x' * (64 * 1024 - 1))", isolation)
    assert (report.ending, len(report.stdout)) == ("ok", 64 * 1024)


@pytest.mark.parametrize("code", PROCESSES.values(), ids=PROCESSES)
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
    assert attack(THREAD_BOMB, isolation).ending in ("error", "memory", "timeout")


FILE_ERRORS = {
    "one file": ("OSError: [Errno 27] File too large",),
    "sparse file": ("OSError: [Errno 27] File too large",),
    "total": ("OSError: [Errno 28] No space left on device", "more than 1088 KiB of files"),
    "many files": ("OSError: [Errno 28] No space left on device", "more than 1088 KiB"),
    "descriptors": ("OSError: [Errno 24] Too many open files",),
    "pipes": ("PermissionError: [Errno 1] Operation not permitted",),
    "memory file": ("PermissionError: [Errno 1] Operation not permitted",),
    "shared memory": ("PermissionError", "FileNotFoundError", "OSError"),
}


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, isolation: Isolation) -> None:
    report = attack(FILES[name], isolation)
    assert report.ending in ("error", "output") and report.detail.startswith(FILE_ERRORS[name])


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
