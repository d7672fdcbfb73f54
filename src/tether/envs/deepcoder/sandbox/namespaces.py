"""Isolation by namespaces: one jail per fork server, entered once; inside it one sandbox per task, made in well under a millisecond.

**The jail** is a set of new namespaces (users, mounts, process ids, network, IPC, host name, cgroups) around the fork server. Its root folder
is a read-only tmpfs with Python's standard library (read-only, without site-packages), five harmless devices and an empty folder to mount
work folders on. There is no /proc, /sys, /etc or home. The old root folder is unmounted, for the fork server as well. The network has no
interfaces.

**A sandbox** is a child of the fork server in a process-id and a mount namespace of its own, with a small tmpfs as its work folder. When its
first process ends, the kernel ends everything in it and drops its files.

If the fork server runs as root, the jail has two users: 0 sets things up, and 1, which is an unprivileged user outside, runs the programs. An
ordinary user can map only itself; then each program gets a nested user namespace in which it has no rights.
Imports the standard library only: it runs in the fork server.
"""

import os
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from tether.envs.deepcoder.sandbox import linux

INPUT = "/dev/stdin"
PROGRAM_USER = 1
"""The id in the jail that programs run under where the fork server is root."""
OUTSIDE_USER = 65534
"""The id of that user outside the jail: nobody."""

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
FILES = 256
"""How many files a program may have in its work folder."""

_SCRATCH = ("/mnt", "/media", "/srv", "/tmp", "/var/tmp")
_WORK = ("/tmp", "/work", "/box")
_HIDDEN = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class SandboxConfig:
    """What the fork server has prepared once, for all its sandboxes."""

    kernel: bool
    """In a jail of namespaces (isolation=kernel); otherwise a plain process."""
    libraries: tuple[str, ...]
    program_user: bool
    """Programs run under a user of their own."""
    threads_counted: bool
    """The kernel counts the threads of each program separately."""
    seccomp: bool
    landlock: bool
    address_space: int
    """Bytes of address space of the interpreter before any program runs."""
    work: str
    """In a jail: the work folder."""
    folder: str
    """Without a jail: the folder that work folders are made in."""


def library_folders() -> list[str]:
    """The folders of the standard library: what the fork server, started without site, has on its path."""
    found = [os.path.abspath(path) for path in sys.path if os.path.isdir(path)]
    return [path for path in dict.fromkeys(found) if not any(path.startswith(other + "/") for other in found)]


def two_users() -> bool:
    """Whether the fork server may map a second user: it is root, and that user exists in the namespace it is in."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/uid_map", encoding="ascii") as lines:
        ranges = [[int(number) for number in line.split()] for line in lines]
    return any(first <= OUTSIDE_USER < first + count for first, _, count in ranges)


def enter_namespaces(with_program_user: bool) -> None:
    """New namespaces for this process and, for process ids, its children; ids mapped."""
    outside = os.geteuid(), os.getegid()
    if with_program_user:
        os.setgroups([])
    writer, go = _map_writer(os.getpid()) if with_program_user else (None, None)
    kinds = linux.NEW_MOUNTS | linux.NEW_PIDS | linux.NEW_NETWORK | linux.NEW_IPC | linux.NEW_HOSTNAME | linux.NEW_CGROUP
    linux.unshare("creating namespaces", linux.NEW_USER | kinds)
    if writer is None or go is None:
        _write_maps("self", *(f"0 {name} 1\n" for name in outside))
    else:
        go.close()
        if os.waitpid(writer, 0)[1]:
            raise OSError("mapping users: not permitted")
    linux.set_host_name("sandbox")


def _map_writer(process: int) -> tuple[int, socket.socket]:
    """A child that stays outside the new namespaces and maps two users for `process` once the socket is closed.

    A process inside a new user namespace may map only its own user. Mapping a second one takes a process outside with the right to do so.
    """
    wait, go = socket.socketpair()
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            go.close()
            wait.recv(1)
            lines = f"0 0 1\n{PROGRAM_USER} {OUTSIDE_USER} 1\n"
            _write_maps(str(process), lines, lines)
            failed = 0
        finally:
            os._exit(failed)
    wait.close()
    return child, go


def _write_maps(process: str, users: str, groups: str) -> None:
    for name, content in (("setgroups", "deny"), ("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/{process}/{name}", "w", encoding="ascii") as file:
            file.write(content)


def build_root(libraries: list[str]) -> str:
    """Make the jail's root folder and enter it; returns the path to mount work folders on. Needs all rights in new namespaces."""
    linux.mount("keeping mounts private", "none", "/", None, linux.RECURSIVE | linux.PRIVATE)
    root = _without_libraries(filter(os.path.isdir, _SCRATCH), libraries)
    work = _without_libraries(_WORK, libraries)
    quiet = linux.NO_SETUID | linux.NO_DEVICES
    linux.mount("making a root folder", "tmpfs", root, "tmpfs", quiet, "size=256k,nr_inodes=128,mode=0755")
    for library in libraries:
        os.makedirs(root + library, mode=0o755)
        linux.bind_read_only(library, root + library)
        for hidden in _HIDDEN:
            if os.path.isdir(f"{root}{library}/{hidden}"):
                flags = quiet | linux.READ_ONLY | linux.NO_EXEC
                linux.mount("hiding site-packages", "tmpfs", f"{root}{library}/{hidden}", "tmpfs", flags, "size=4k,nr_inodes=2,mode=0555")
    os.makedirs(root + "/dev", mode=0o755)
    for device in filter(os.path.exists, DEVICES):
        os.close(os.open(root + device, os.O_CREAT | os.O_WRONLY, 0o444))
        linux.bind_read_only(device, root + device)
    os.close(os.open(root + INPUT, os.O_CREAT | os.O_WRONLY, 0o444))
    os.mkdir(root + work, 0o755)
    linux.pivot_into(root)
    linux.mount("closing the root folder", "none", "/", None, linux.REMOUNT | linux.BIND | linux.READ_ONLY | quiet)
    return work


def _without_libraries(folders: Iterable[str], libraries: list[str]) -> str:
    """The first folder that can be mounted over without hiding a library."""
    for folder in folders:
        if not any(f"{library}/".startswith(f"{folder}/") for library in libraries):
            return folder
    raise OSError(f"making a root folder: there is none to use beside {', '.join(libraries)}")


def make_work_folder(path: str, kib: int, owner: int) -> None:
    """In a sandbox: a mount namespace of its own, and an empty work folder of bounded size."""
    linux.unshare("creating a sandbox", linux.NEW_MOUNTS)
    flags = linux.NO_SETUID | linux.NO_DEVICES | linux.NO_EXEC
    options = f"size={kib}k,nr_inodes={FILES},mode=0700,uid={owner},gid={owner}"
    linux.mount("making a work folder", "tmpfs", path, "tmpfs", flags, options)


def place_input(folder: str, content: bytes) -> int:
    """In a sandbox: the standard input as a file at /dev/stdin, so that it can be opened again by name; open for reading."""
    path = f"{folder}/.input"
    with open(path, "wb") as file:
        file.write(content)
    linux.mount("placing the input", path, INPUT, None, linux.BIND)
    os.unlink(path)
    os.chmod(INPUT, 0o444)
    return os.open(INPUT, os.O_RDONLY | os.O_CLOEXEC)
