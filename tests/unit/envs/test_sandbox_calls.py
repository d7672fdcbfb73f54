"""Programs that go around Python and ask the kernel directly: every call that is not on the list fails, whatever its arguments."""

import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tether.envs.deepcoder.sandbox import client, linux
from tether.envs.deepcoder.sandbox.jobs import Limits, Report, StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Isolation, Sandbox, describe_isolation

sys.path.append(str(Path(__file__).parent))

from hostile_programs import CALL, CRASH, FORBIDDEN, calling, forbidden_calls

needs_kernel = pytest.mark.skipif(describe_isolation().name != "kernel", reason="this machine gives no kernel isolation")
needs_filter = pytest.mark.skipif(not client.running_fork_server("process").facts["seccomp"], reason="this kernel filters no system calls")
BOTH = [pytest.param("kernel", marks=needs_kernel), pytest.param("process", marks=needs_filter)]


@pytest.fixture(params=BOTH)
def isolation(request: pytest.FixtureRequest) -> Iterator[Isolation]:
    level: Isolation = request.param
    yield level
    assert attack("print(6 * 7)", level).stdout == "42\n"


def attack(code: str, isolation: Isolation) -> Report:
    [report] = Sandbox(Limits(cpu_seconds=3, wall_seconds=10), isolation=isolation).run(code, [StdinTask("")])
    return report


def test_forbidden_calls(isolation: Isolation) -> None:
    calls = forbidden_calls()
    assert len(calls) > 100
    report = attack(calling(calls), isolation)
    assert report.ending == "ok"
    assert [line for line in report.stdout.splitlines() if not line.endswith(" EPERM")] == []


def test_every_call_that_is_not_listed_is_refused(isolation: Isolation) -> None:
    """All numbers there are, and some there are not yet, with arguments that would do no harm."""
    numbers = linux.TABLES[linux.machine()]["numbers"]
    # These two belong to the kernel's own probes: newer kernels let them past every filter and end whoever else calls them.
    probes = [335, 336] if linux.machine() == "x86_64" else []
    unlisted = [number for number in range(1024) if number not in numbers.values() and number not in probes]
    report = attack(CALL + f"print([number for number in {unlisted!r} if call(number, -1, -1, -1, -1, -1, -1) != 'EPERM'])", isolation)
    assert report.stdout == "[]\n", report.detail
    for number in probes:
        assert attack(CALL + f"print(call({number}))", isolation).detail in ("", "ended by SIGILL", "ended by SIGTRAP")


def test_clone_makes_threads_only(isolation: Isolation) -> None:
    number = {"x86_64": 56, "aarch64": 220}[linux.machine()]
    thread = 0x3D0F00
    flags = [
        17,
        0,
        0x4100 | 17,
        0x100,
        0x10000,
        0x10100,
        thread & ~0x100,
        thread & ~0x10000,
        thread | 0x10000000,
        thread | 0x20000000,
        thread | 0x2000,
    ]
    code = CALL + f"print({{call({number}, flags, 0, 0, 0, 0) for flags in {flags!r}}}, call(435, 0, 88))"
    assert attack(code, isolation).stdout == "{'EPERM'} ENOSYS\n"


def test_what_may_be_asked_of_oneself(isolation: Isolation) -> None:
    code = (
        CALL
        + """
import fcntl, resource, signal, threading
signal.signal(signal.SIGUSR1, lambda *_: print('signal'))
os.kill(os.getpid(), signal.SIGUSR1)
signal.raise_signal(signal.SIGUSR1)
signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
print(resource.getrlimit(resource.RLIMIT_NOFILE), fcntl.fcntl(0, fcntl.F_GETFD) >= 0, os.isatty(0), len(os.sched_getaffinity(0)) > 0)
"""
    )
    assert attack(code, isolation).stdout == "signal\nsignal\nsignal\n(64, 64) True False True\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only 64-bit x86 has other ways into the kernel")
def test_other_ways_into_the_kernel_are_closed(isolation: Isolation) -> None:
    """x32 numbers are refused; a call through the 32-bit door (int 0x80: getpid) ends the program."""
    assert attack(CALL + "print(call(0x40000000 + 39), call(0x40000000 + 57))", isolation).stdout == "EPERM EPERM\n"
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')
ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print('came back')
"""
    report = attack(code, isolation)
    assert (report.ending, report.detail, report.stdout) == ("killed", "ended by SIGSYS", "")


def test_crashes_stay_inside(isolation: Isolation) -> None:
    report = attack(CRASH, isolation)
    assert (report.ending, report.detail, report.stdout) == ("killed", "ended by SIGSEGV", "before\n")


# ----------------------------------------------------------------------------------------------------------------- tables


def test_tables_name_every_call_the_filter_speaks_of() -> None:
    listed = set(linux.ALLOWED.split()) | {"clone", "clone3", "kill", "tgkill", "fcntl", "ioctl", "prlimit64"}
    assert set(linux.TABLES["aarch64"]["numbers"]) == listed
    assert set(linux.TABLES["x86_64"]["numbers"]) == listed | set(linux.ALLOWED_ON_X86_64.split())
    assert len(set(linux.TABLES["x86_64"]["numbers"].values())) == len(linux.TABLES["x86_64"]["numbers"])


def test_no_forbidden_number_is_in_a_table() -> None:
    tables = {1: linux.TABLES["x86_64"]["numbers"], 2: linux.TABLES["aarch64"]["numbers"]}
    for entry in FORBIDDEN.replace("\n", "|").split("|"):
        words = entry.split()
        if words and words[0] not in ("kill", "tgkill", "prlimit64"):
            assert all(words[column] not in map(str, table.values()) for column, table in tables.items()), words[0]


HEADERS = {
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"#define __NR_(\w+)\s+(\d+)"),
}


@pytest.mark.parametrize("machine", HEADERS)
def test_tables_against_the_kernels_headers(machine: str) -> None:
    path, pattern = HEADERS[machine]
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    numbers = {name: int(number) for name, number in re.findall(pattern, path.read_text())}
    renamed = {"newfstatat": "fstatat"}
    table = linux.TABLES[machine]["numbers"]
    there = {name: numbers.get(name, numbers.get(renamed.get(name, ""))) for name in table}
    assert table == there


def test_an_architecture_without_a_table_is_refused() -> None:
    with pytest.raises(OSError, match="filtering system calls: no table for riscv64"):
        linux.assemble_filter("riscv64", os.getpid())
