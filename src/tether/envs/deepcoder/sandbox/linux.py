"""The kernel calls that Python's standard library does not wrap, through ctypes: namespaces, mounts, capabilities, prctl, file rules, filters.

Runs in the fork server and its sandboxes, so it imports the standard library only. Every call raises `OSError` naming the step that failed,
because that sentence is what a user sees where a machine refuses isolation.

**File rules** (Landlock) say which files a process may touch: what the weaker level of isolation has instead of a root folder of its own. They
need no privileges. Kernels from 5.13 have them where they are switched on.

**The system call filter** (seccomp) is a list of the calls a Python program needs; every other one fails with "not permitted". What is not on the
list does not have to be thought of: starting processes (`execve`, `fork`), sockets, pipes, tracing and signalling others, namespaces, mounts, memory
outside the process (`memfd_create`, shared segments), io_uring, keys, locks, new calls of later kernels. Some calls are let through by their
arguments: `clone` only to start a thread, `kill` only to signal oneself, `prlimit` only to read. As a program can start no process, the limits of
its one process are the limits of the program. The filter is assembled by hand into the kernel's classic BPF and installed with `prctl`, so it
needs neither a library nor privileges.
"""

import ctypes
import errno
import json
import os
import platform
import struct
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

LINUX = sys.platform == "linux"

NEW_MOUNTS = 0x00020000
NEW_CGROUP = 0x02000000
NEW_HOSTNAME = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
REMOUNT, BIND, RECURSIVE, PRIVATE = 32, 4096, 16384, 1 << 18

MAY_READ_ALL, MAY_KILL = 1 << 1, 1 << 5

_DETACH = 2
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _DROP_BOUNDING, _SET_NO_NEW_PRIVILEGES, _AMBIENT = 1, 4, 24, 38, 47
_AMBIENT_CLEAR_ALL = 4
_SET_CHILD_SUBREAPER = 36
_CAPABILITY_VERSION = 0x20080522
_ARENA_MAX = -8
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def machine() -> str:
    """The architecture, as the system call tables are named."""
    name = platform.machine()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name.lower(), name)


def _checked(step: str, function: Callable[..., int], *arguments: Any) -> int:
    result = function(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")
    return result


def system_call(step: str, number: int, *arguments: int) -> int:
    """One raw system call; arguments are integers (addresses included)."""
    return _checked(step, _libc.syscall, ctypes.c_long(number), *(ctypes.c_long(argument) for argument in arguments))


def unshare(step: str, flags: int) -> None:
    """Leave the namespaces named by `flags` for new ones."""
    _checked(step, _libc.unshare, flags)


def set_namespace(step: str, descriptor: int, kind: int) -> None:
    """Join the namespace behind an open descriptor (for process ids: the children will)."""
    _checked(step, _libc.setns, descriptor, kind)


def mount(step: str, source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    _checked(
        step, _libc.mount, os.fsencode(source), os.fsencode(target), kind.encode() if kind else None, ctypes.c_ulong(flags), data.encode()
    )


def bind_read_only(source: str, target: str) -> None:
    """Show `source` at `target`, where nothing can be written, and no set-uid bit or device counts."""
    step = f"showing {source} read-only"
    mount(step, source, target, None, BIND)
    kept = NO_EXEC if os.statvfs(target).f_flag & os.ST_NOEXEC else 0  # a user namespace may not lift this one
    device = not os.path.isdir(target)
    mount(step, "none", target, None, REMOUNT | BIND | READ_ONLY | NO_SETUID | kept | (0 if device else NO_DEVICES))


def pivot_into(root: str) -> None:
    """Make `root` (a mount) the root folder and let go of the old one."""
    os.chdir(root)
    if machine() not in _PIVOT_ROOT:
        raise OSError(f"changing the root folder: no system call table for {machine()}")
    dot = ctypes.create_string_buffer(b".")
    system_call("changing the root folder", _PIVOT_ROOT[machine()], ctypes.addressof(dot), ctypes.addressof(dot))
    _checked("letting go of the old root folder", _libc.umount2, b".", _DETACH)
    os.chdir("/")


def set_host_name(name: str) -> None:
    """The name programs see as this machine's."""
    _checked("setting the host name", _libc.sethostname, name.encode(), len(name))


def control_process(step: str, option: int, *arguments: int) -> int:
    """prctl(2)."""
    padded = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    return _checked(step, _libc.prctl, option, *padded)


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when the thread that made it ends."""
    control_process("tying a process to its parent", _SET_PARENT_DEATH_SIGNAL, signal_number)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent has ended."""
    control_process("adopting orphans", _SET_CHILD_SUBREAPER, 1)


def forbid_inspection() -> None:
    """No core dump, no tracing, no /proc entries for others of the same user."""
    control_process("forbidding inspection", _SET_DUMPABLE, 0)


def forbid_new_privileges() -> None:
    """No later program can gain rights; also what lets a process without rights install filters."""
    control_process("forbidding new privileges", _SET_NO_NEW_PRIVILEGES, 1)


def drop_capabilities() -> None:
    """Give up every capability, also for programs this process might start."""
    for capability in range(64):
        # Refused to a process that has no capabilities to give up, and beyond the last one the kernel knows.
        if _libc.prctl(_DROP_BOUNDING, capability, 0, 0, 0) == -1:
            break
    _libc.prctl(_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0)
    keep_capabilities(0)


def keep_capabilities(mask: int) -> None:
    """Give up every capability that is not in the mask (bit n stands for number n)."""
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION, 0))
    data = ctypes.create_string_buffer(struct.pack("6I", mask, mask, 0, 0, 0, 0))
    _checked("dropping capabilities", _libc.capset, header, data)


def one_memory_arena() -> None:
    """Keep glibc from reserving 64 MiB of address space per thread, which would count against the program's memory."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_ARENA_MAX, 1)


# --- file rules: Landlock ---

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_ASK_VERSION, _PATH_RULE = 1, 1
_WRITE_FILE, _READ_FILE, _READ_FOLDER, _REMOVE_FILE, _MAKE_FILE, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8, 1 << 14

READ = _READ_FILE | _READ_FOLDER
READ_AND_WRITE_DEVICE = _READ_FILE | _WRITE_FILE
OWN_FOLDER = READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_FILE | _TRUNCATE


def landlock_version() -> int:
    """The kernel's Landlock version, 0 if it has none."""
    try:
        return system_call("asking for Landlock", _CREATE, 0, 0, _ASK_VERSION)
    except OSError:
        return 0


def restrict_files(rules: Iterable[tuple[str, int]]) -> None:
    """Forbid this process every file but those below the paths given, each with its rights; with them, every connection it knows of."""
    known = landlock_version()
    files = (1 << (13 + (known >= 2) + (known >= 3) + (known >= 5))) - 1  # 13 rights in version 1; one more each in 2, 3 and 5
    network, scopes = (3 if known >= 4 else 0), (3 if known >= 6 else 0)
    wanted = struct.pack("QQQ", files, network, scopes)[: 24 if known >= 6 else 16 if known >= 4 else 8]
    attributes = ctypes.create_string_buffer(wanted, len(wanted))
    ruleset = system_call("creating file rules", _CREATE, ctypes.addressof(attributes), len(wanted), 0)
    for path, rights in rules:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights & files, descriptor), 12)
        system_call("adding a file rule", _ADD_RULE, ruleset, _PATH_RULE, ctypes.addressof(rule), 0)
        os.close(descriptor)
    system_call("restricting files", _RESTRICT, ruleset, 0)
    os.close(ruleset)


# --- the system call filter: seccomp ---

TABLES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("data").joinpath("syscalls.json").read_bytes())
"""By architecture: the kernel's number for it (audit_architecture) and the numbers of its system calls. The file is read when the fork
server starts, before the jail hides it."""

ALLOWED = """
    read write futex mmap munmap mprotect brk madvise mremap msync clock_gettime
    openat close close_range fstat newfstatat statx lseek readv writev pread64 pwrite64 getdents64 dup dup3
    faccessat faccessat2 readlinkat unlinkat renameat renameat2 ftruncate fsync fdatasync getcwd chdir fchdir umask ppoll pselect6
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack restart_syscall
    set_robust_list rseq set_tid_address sched_yield sched_getaffinity exit exit_group
    getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgid getsid
    clock_getres clock_nanosleep nanosleep gettimeofday times getitimer setitimer getrusage getcpu getrandom uname
"""

ALLOWED_ON_X86_64 = "open stat lstat access dup2 poll select getdents readlink unlink rename alarm pause time getpgrp getrlimit"
"""Older spellings of the same, which 64-bit ARM never had."""

_THREAD_FLAGS = 0x003D0F00  # what pthread_create passes: memory, files, signal handlers and thread group are all shared
_UNUSED_FLAG = 0x00400000  # CLONE_DETACHED, set by musl, ignored by the kernel
_FILE_COMMANDS = (0, 1, 2, 3, 4, 1030)  # fcntl: duplicate, get and set flags; no locks, leases, owners or pipe sizes
_DEVICE_COMMANDS = (0x5401, 0x802C542A, 0x5450, 0x5451, 0x5421, 0x541B)  # ioctl: is it a terminal, close-on-exec, blocking, bytes to read

_LOAD, _AND, _IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_SET_SECCOMP, _FILTER_MODE = 22, 2

Instruction = tuple[int, int, int, int]


def _give(value: int) -> Instruction:
    return (_RETURN, 0, 0, value)


_REFUSE = _give(_ERROR | errno.EPERM)


def _load_argument(index: int, high_half: bool = False) -> Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index + 4 * high_half)


def _only_if_one_of(index: int, values: tuple[int, ...]) -> list[Instruction]:
    """Allow if the argument's low half, the only part the kernel reads for these calls, is one of `values`."""
    tests = [step for value in values for step in ((_IF_EQUAL, 0, 1, value & 0xFFFFFFFF), _give(_ALLOW))]
    return [_load_argument(index), *tests, _REFUSE]


def _conditions(own_process: int) -> dict[str, list[Instruction]]:
    """The calls that depend on their arguments; each list ends in a decision."""
    return {
        "clone": [_load_argument(0), (_AND, 0, 0, 0xFFFFFFFF ^ _UNUSED_FLAG), (_IF_EQUAL, 0, 1, _THREAD_FLAGS), _give(_ALLOW), _REFUSE],
        # Its flags lie in memory, where no filter can look; without it, the C library falls back to clone.
        "clone3": [_give(_ERROR | errno.ENOSYS)],
        "kill": _only_if_one_of(0, (own_process,)),
        "tgkill": _only_if_one_of(0, (own_process,)),
        "fcntl": _only_if_one_of(1, _FILE_COMMANDS),
        "ioctl": _only_if_one_of(1, _DEVICE_COMMANDS),
        # New limits (third argument, an address) must be absent, and the process oneself.
        "prlimit64": [
            _load_argument(2),
            (_IF_EQUAL, 1, 0, 0),
            _REFUSE,
            _load_argument(2, high_half=True),
            (_IF_EQUAL, 1, 0, 0),
            _REFUSE,
            *_only_if_one_of(0, (0, own_process)),
        ],
    }


@lru_cache
def assemble_filter(machine: str, own_process: int) -> bytes:
    """The filter for an architecture and a process id, as the kernel takes it."""
    if machine not in TABLES:
        raise OSError(errno.ENOSYS, f"filtering system calls: no table for {machine}")
    architecture, numbers = TABLES[machine]["audit_architecture"], TABLES[machine]["numbers"]
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_IF_EQUAL, 1, 0, architecture), _give(_KILL), (_LOAD, 0, 0, _NUMBER)]
    for name in (ALLOWED + (ALLOWED_ON_X86_64 if machine == "x86_64" else "")).split():
        program += [(_IF_EQUAL, 0, 1, numbers[name]), _give(_ALLOW)]
    for name, decision in _conditions(own_process).items():
        program += [(_IF_EQUAL, 0, len(decision), numbers[name]), *decision]
    program.append(_REFUSE)
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def install_filter(filter_code: bytes) -> None:
    """Put this process, and every thread it starts from now on, under the filter; there is no way back."""
    code = ctypes.create_string_buffer(filter_code, len(filter_code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filter_code) // 8, ctypes.addressof(code)))
    control_process("filtering system calls", _SET_SECCOMP, _FILTER_MODE, ctypes.addressof(program))
