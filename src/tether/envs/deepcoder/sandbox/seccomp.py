"""The filter every program runs under: a list of the system calls a Python program needs; every other one fails with "not permitted".

What is not on the list does not have to be thought of: starting processes (`execve`, `fork`), sockets, pipes, tracing and signalling
others, namespaces, mounts, memory outside the process (`memfd_create`, shared segments), io_uring, keys, locks, new calls of later kernels.
Some calls are let through by their arguments: `clone` only to start a thread, `kill` only to signal oneself, `prlimit` only to read.
As a program can start no process, the limits of its one process are the limits of the program.

The filter is assembled by hand into the kernel's classic BPF and installed with `prctl`, so it needs neither a library nor privileges.
Imports the standard library only: it runs in the sandboxes.
"""

import ctypes
import errno
import json
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

from tether.envs.deepcoder.sandbox import linux

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
def assemble(machine: str, own_process: int) -> bytes:
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


def install(filter_code: bytes) -> None:
    """Put this process, and every thread it starts from now on, under the filter; there is no way back."""
    code = ctypes.create_string_buffer(filter_code, len(filter_code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filter_code) // 8, ctypes.addressof(code)))
    linux.control_process("filtering system calls", _SET_SECCOMP, _FILTER_MODE, ctypes.addressof(program))
