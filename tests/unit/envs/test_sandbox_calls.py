"""Programs that go around Python and ask the kernel directly: every call that is not on the list fails, whatever its arguments."""

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tether.envs.deepcoder.sandbox import client, linux, seccomp
from tether.envs.deepcoder.sandbox.jobs import Limits, Report, StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Isolation, Sandbox, describe_isolation

needs_kernel = pytest.mark.skipif(describe_isolation().name != "kernel", reason="this machine gives no kernel isolation")
needs_filter = pytest.mark.skipif(not client.running_fork_server("process").facts["seccomp"], reason="this kernel filters no system calls")
BOTH = [pytest.param("kernel", marks=needs_kernel), pytest.param("process", marks=needs_filter)]

# Of calls that must fail: name, number on x86_64, number on aarch64, arguments.
FORBIDDEN = """
    execve 59 221 | execveat 322 281 | fork 57 - | vfork 58 - | ptrace 101 117 0 1 | process_vm_readv 310 270 1 | process_vm_writev 311 271 1
    socket 41 198 2 1 | socketpair 53 199 1 1 | connect 42 203 | bind 49 200 | sendto 44 206 | sendmsg 46 211 | pipe2 293 59
    unshare 272 97 268435456 | unshare 272 97 131072 | setns 308 268 0 | mount 165 40 | umount2 166 39 | pivot_root 155 41 | chroot 161 51
    move_mount 429 429 | open_tree 428 428 | fsopen 430 430 | mount_setattr 442 442 | memfd_create 319 279 | memfd_secret 447 447
    shmget 29 194 0 4096 | shmat 30 196 | semget 64 190 | msgget 68 186 | mq_open 240 180 | io_setup 206 0 | io_uring_setup 425 425 8
    userfaultfd 323 282 | perf_event_open 298 241 | bpf 321 280 | keyctl 250 219 | add_key 248 217 | request_key 249 218
    kexec_load 246 104 | reboot 169 142 | init_module 175 105 | finit_module 313 273 | swapon 167 224 | syslog 103 116 3 | acct 163 89
    open_by_handle_at 304 265 | name_to_handle_at 303 264 | setuid 105 146 0 | setresuid 117 147 0 0 0 | setgid 106 144 0 | capset 126 91
    prctl 157 167 15 | prctl 157 167 1 0 | prctl 157 167 4 1 | prctl 157 167 22 0 | seccomp 317 277 1 | personality 135 92 65536
    setpriority 141 140 0 0 -20 | sched_setscheduler 144 119 | sched_setaffinity 203 122 | ioprio_set 251 30 1 0 | sethostname 170 161
    pidfd_open 434 434 1 | pidfd_getfd 438 438 | pidfd_send_signal 424 424 | process_madvise 440 440 | tkill 200 130 1 9 | rt_sigqueueinfo 129 138 1 9
    kill 62 129 1 9 | kill 62 129 -1 9 | kill 62 129 0 9 | tgkill 234 131 1 1 9 | mlockall 151 230 3 | mlock 149 228 4096 4096
    inotify_init1 294 26 | fanotify_init 300 262 | eventfd2 290 19 | epoll_create1 291 20 | timerfd_create 283 85 | timer_create 222 107
    signalfd4 289 74 | splice 275 76 | vmsplice 278 75 | tee 276 77 | sendfile 40 71 | sync 162 81 | settimeofday 164 170 | clock_settime 227 112
    mkdirat 258 34 | symlinkat 266 36 | linkat 265 37 | mknodat 259 33 | fchmodat 268 53 | fchownat 260 54 | setxattr 188 5 | quotactl 179 60
    setrlimit 160 164 | prlimit64 302 261 0 9 4096 | landlock_create_ruleset 444 444 0 0 1 | wait4 61 260 -1 | sysinfo 99 179 | modify_ldt 154 -
    mbind 237 235 | migrate_pages 256 238 | move_pages 279 239 | kcmp 312 272 | get_robust_list 274 100 1 | set_mempolicy 238 237 | ioperm 173 -
"""


def forbidden() -> list[tuple[str, int, list[int]]]:
    found = []
    for entry in FORBIDDEN.replace("\n", "|").split("|"):
        if entry.strip():
            name, x86, arm, *arguments = entry.split()
            number = x86 if linux.machine() == "x86_64" else arm
            found += [(name, int(number), [int(argument) for argument in arguments])] if number != "-" else []
    return found


@pytest.fixture(params=BOTH)
def isolation(request: pytest.FixtureRequest) -> Iterator[Isolation]:
    level: Isolation = request.param
    yield level
    assert attack("print(6 * 7)", level).stdout == "42\n"


def attack(code: str, isolation: Isolation) -> Report:
    [report] = Sandbox(Limits(cpu_seconds=3, wall_seconds=10), isolation=isolation).run(code, [StdinTask("")])
    return report


CALL = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(argument) for argument in arguments))
    return errno.errorcode[ctypes.get_errno()] if result == -1 else f'returned {result}'
"""


def test_forbidden_calls(isolation: Isolation) -> None:
    calls = forbidden()
    assert len(calls) > 100
    report = attack(CALL + f"for name, number, arguments in {calls!r}: print(name, call(number, *arguments))", isolation)
    assert report.ending == "ok"
    assert [line for line in report.stdout.splitlines() if not line.endswith(" EPERM")] == []


def test_every_call_that_is_not_listed_is_refused(isolation: Isolation) -> None:
    """All numbers there are, and some there are not yet, with arguments that would do no harm."""
    numbers = seccomp.TABLES[linux.machine()]["numbers"]
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
    report = attack("print('before', flush=True)\nimport ctypes\nctypes.string_at(0)", isolation)
    assert (report.ending, report.detail, report.stdout) == ("killed", "ended by SIGSEGV", "before\n")


# ----------------------------------------------------------------------------------------------------------------- tables


def test_tables_name_every_call_the_filter_speaks_of() -> None:
    listed = set(seccomp.ALLOWED.split()) | {"clone", "clone3", "kill", "tgkill", "fcntl", "ioctl", "prlimit64"}
    assert set(seccomp.TABLES["aarch64"]["numbers"]) == listed
    assert set(seccomp.TABLES["x86_64"]["numbers"]) == listed | set(seccomp.ALLOWED_ON_X86_64.split())
    assert len(set(seccomp.TABLES["x86_64"]["numbers"].values())) == len(seccomp.TABLES["x86_64"]["numbers"])


def test_no_forbidden_number_is_in_a_table() -> None:
    tables = {1: seccomp.TABLES["x86_64"]["numbers"], 2: seccomp.TABLES["aarch64"]["numbers"]}
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
    table = seccomp.TABLES[machine]["numbers"]
    there = {name: numbers.get(name, numbers.get(renamed.get(name, ""))) for name in table}
    assert table == there


def test_an_architecture_without_a_table_is_refused() -> None:
    with pytest.raises(OSError, match="filtering system calls: no table for riscv64"):
        seccomp.assemble("riscv64", os.getpid())
