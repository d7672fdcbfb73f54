"""The kernel calls that Python's standard library does not wrap, through ctypes: namespaces, mounts, capabilities, prctl.

Runs in the fork server and its sandboxes, so it imports the standard library only. Every call raises `OSError` naming the step that failed,
because that sentence is what a user sees where a machine refuses isolation.
"""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Callable
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
