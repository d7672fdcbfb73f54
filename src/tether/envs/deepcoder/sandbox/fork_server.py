"""The fork server: started once per process of Tether, it forks a sandbox for every task and never reads what runs in it.

It is a bare interpreter (no site, no environment variables, one descriptor) with the usual modules loaded, inside the jail it has built
(namespaces.py). Tether sends it one byte and one socket per task. It forks a supervisor for that socket and waits for the next. It is
single-threaded, because forking a process with threads is unsafe. It ends when Tether's end of its socket closes, for whatever reason, and
every sandbox ends with it. Imports the standard library, and of Tether only the modules of this folder, the codec and temporary folders.
"""

import contextlib
import fcntl
import importlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable
from typing import NoReturn

from tether.core.temporary import temporary_folder
from tether.envs.deepcoder.sandbox import linux, namespaces, program, supervisor

PRELOADED = """
    array ast base64 bisect bz2 calendar cmath collections contextlib copy csv ctypes datetime decimal enum fractions functools hashlib heapq
    inspect io itertools json keyword lzma math mmap numbers operator os pathlib pickle pprint pyexpat random re secrets select signal sqlite3
    statistics string struct sys tempfile textwrap time timeit traceback types typing unicodedata uuid warnings weakref zlib
"""
"""Modules that programs import often, and modules that need shared libraries, which cannot be opened inside the jail. `threading` and the
modules that import it are left out: they add half a millisecond to every fork."""

_DESCRIPTORS = 256
_COUNTS_PER_NAMESPACE = (5, 14)
"""The first Linux that counts a user's threads per user namespace."""
_SWITCHES = {
    "user/max_user_namespaces": "0",
    "kernel/unprivileged_userns_clone": "0",
    "kernel/apparmor_restrict_unprivileged_userns": "1",
}
"""Kernel settings that forbid user namespaces, with the value that forbids them."""
_ADDRESS_SPACE = 256 * 2**20
"""Bytes of address space assumed for the interpreter where the system does not report them."""


def main(descriptor: int, isolation: str, folder_prefix: str) -> NoReturn:
    """Prepare, report the result, then serve until Tether is gone."""
    # The inherited descriptor has an arbitrary number. Sandboxes close every descriptor below a bound (`_DESCRIPTORS`), so this one is moved
    # to a low number.
    control = socket.socket(fileno=fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3))
    os.close(descriptor)
    _reset_process()
    for name in PRELOADED.split():
        with contextlib.suppress(ImportError):  # Python may have been built without it
            importlib.import_module(name)
    program.prepare_interpreter()
    held = contextlib.ExitStack()
    try:
        config, process_ids = _jailed() if isolation == "kernel" else (_without_jail(folder_prefix, held), -1)
    except OSError as error:
        reason = error.strerror or str(error)
        # The kernel setting that forbids user namespaces, if it is one of the known ones.
        for path, value in _SWITCHES.items():
            with contextlib.suppress(OSError), open(f"/proc/sys/{path}", encoding="ascii") as file:
                if file.read().strip() == value:
                    reason += f"; sysctl {path.replace('/', '.')} is {value}"
                    break
        _say(control, {"missing": f"{error.filename}: {reason}" if error.filename else reason})
        os._exit(1)
    _say(control, {"seccomp": config.seccomp, "landlock": config.landlock, "threads": config.threads_counted, "folder": config.folder})
    _serve(control, config, process_ids)
    for _ in range(10 if config.folder else 0):  # the last programs are just being ended
        shutil.rmtree(config.folder, ignore_errors=True)
        if not os.path.exists(config.folder):
            break
        time.sleep(0.1)
    os._exit(0)


def _say(control: socket.socket, facts: dict[str, bool | str]) -> None:
    control.sendall(json.dumps(facts).encode() + b"\n")


def _reset_process() -> None:
    """Reset everything inherited from Tether that a program could notice: signals, environment, umask, limits."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # a few are the C library's own
            signal.signal(number, signal.SIG_IGN if number in (signal.SIGPIPE, signal.SIGXFSZ) else signal.SIG_DFL)
    os.environ.clear()
    os.umask(0o022)
    _, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS if highest == resource.RLIM_INFINITY else min(_DESCRIPTORS, highest), highest))
    linux.one_memory_arena()
    if linux.LINUX:
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # if memory runs out, the kernel kills programs before the training run


def _jailed() -> tuple[namespaces.SandboxConfig, int]:
    """Build the jail and enter it. The process that returns is the first process of the jail; the descriptor is its process-id namespace."""
    if not linux.LINUX:
        raise OSError("namespaces: this is not Linux")
    linux.assemble_filter(linux.machine(), supervisor.PROGRAM)  # cached for the sandboxes; raises if there is no table for this machine
    if not _works(_install_filter):
        raise OSError("filtering system calls: not permitted, or not known to this kernel")
    # All of this reads /proc or the old root folder, which are gone once the jail is entered.
    libraries, program_user, space = namespaces.library_folders(), namespaces.two_users(), _address_space()
    namespaces.enter_namespaces(program_user)
    # A process cannot move into a new process-id namespace itself, only its children can. So this process forks the first process of the
    # jail and then does nothing but wait for it.
    inner = os.fork()
    if inner:
        os.closerange(0, _DESCRIPTORS)
        os.waitpid(inner, 0)
        os._exit(0)
    linux.die_with_parent(signal.SIGKILL)
    process_ids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    work = namespaces.build_root(libraries)
    linux.forbid_inspection()
    major, minor = map(int, re.findall(r"\d+", os.uname().release)[:2])
    counted = (major, minor) >= _COUNTS_PER_NAMESPACE and _works(lambda: linux.unshare("counting threads", linux.NEW_USER))
    config = namespaces.SandboxConfig(
        kernel=True,
        libraries=tuple(libraries),
        program_user=program_user,
        threads_counted=counted,
        seccomp=True,
        landlock=False,
        address_space=space,
        work=work,
        folder="",
    )
    return config, process_ids


def _without_jail(folder_prefix: str, held: contextlib.ExitStack) -> namespaces.SandboxConfig:
    """isolation=process: a plain process, with the protections that the kernel offers to a process without rights."""
    libraries = namespaces.library_folders()
    files = linux.LINUX and linux.landlock_version() > 0
    program_user = os.geteuid() == 0 and _works(lambda: _read_as_nobody(libraries))
    if os.geteuid() == 0 and not program_user and not files:
        raise OSError(
            "running as root: programs could read everything, for nobody else may read this Python and the kernel has no Landlock"
        )
    folder = str(held.enter_context(temporary_folder(folder_prefix)))  # and what kills left of earlier ones is removed
    os.chmod(folder, 0o711)
    return namespaces.SandboxConfig(
        kernel=False,
        libraries=tuple(libraries),
        program_user=program_user,
        threads_counted=False,
        seccomp=linux.LINUX and _works(_install_filter),
        landlock=files,
        address_space=_address_space(),
        work="",
        folder=folder,
    )


def _works(action: Callable[[], None]) -> bool:
    """Whether an action succeeds; it is tried in a forked child, because filters and namespaces cannot be undone."""
    tried = os.fork()
    if tried == 0:
        failed = 1
        try:
            action()
            failed = 0
        finally:
            os._exit(failed)
    _, status = os.waitpid(tried, 0)
    return status == 0


def _install_filter() -> None:
    linux.forbid_new_privileges()
    linux.install_filter(linux.assemble_filter(linux.machine(), os.getpid()))


def _read_as_nobody(folders: list[str]) -> None:
    os.setgroups([])
    os.setresgid(namespaces.OUTSIDE_USER, namespaces.OUTSIDE_USER, namespaces.OUTSIDE_USER)
    os.setresuid(namespaces.OUTSIDE_USER, namespaces.OUTSIDE_USER, namespaces.OUTSIDE_USER)
    for folder in folders:
        os.listdir(folder)


def _address_space() -> int:
    """Bytes of address space of this process; they do not count against a program's memory limit."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return _ADDRESS_SPACE


def _serve(control: socket.socket, config: namespaces.SandboxConfig, process_ids: int) -> None:
    """Start a sandbox for every socket received; return when Tether has closed the connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended sandboxes
    while True:
        try:
            mark, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        except OSError:
            return
        if not mark:
            return
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # the system has no more processes: Tether sees that its socket was closed
                _start_sandbox(control, descriptor, config)
            os.close(descriptor)
            if config.kernel:  # undo the unshare of `_start_sandbox`; the next one would fail otherwise
                linux.set_namespace("leaving a sandbox", process_ids, linux.NEW_PIDS)


def _start_sandbox(control: socket.socket, descriptor: int, config: namespaces.SandboxConfig) -> None:
    if config.kernel:
        linux.unshare("creating a sandbox", linux.NEW_PIDS)
    if os.fork() == 0:
        try:
            control.close()
            if linux.LINUX:
                linux.die_with_parent(signal.SIGKILL)
            supervisor.main(socket.socket(fileno=descriptor), config)
        finally:
            os._exit(1)
