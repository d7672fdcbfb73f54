"""The fork server: started once per process of Tether, it makes a sandbox for every task and never sees what runs in it.

It is a bare interpreter (no site, no environment, no descriptors but one), has the usual modules loaded, and sits inside the jail it built
(namespaces.py). Tether sends it one byte and one socket per task; it forks a supervisor for that socket and goes back to waiting. It stays
single-threaded, reads no program and no output, and ends when Tether's end of its socket is closed, for whatever reason, taking every
sandbox along. Imports the standard library only, and nothing of Tether but its neighbours here.
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
import tempfile
import time
from collections.abc import Callable
from typing import NoReturn

from tether.envs.deepcoder.sandbox import landlock, linux, namespaces, program, seccomp, supervisor, wire

PRELOADED = """
    array ast base64 bisect bz2 calendar cmath collections contextlib copy csv ctypes datetime decimal enum fractions functools hashlib heapq
    inspect io itertools json keyword lzma math mmap numbers operator os pathlib pickle pprint pyexpat random re secrets select signal sqlite3
    statistics string struct sys tempfile textwrap time timeit traceback types typing unicodedata uuid warnings weakref zlib
"""
"""What programs import, so that it is there at once; and what needs shared libraries, which cannot be opened from inside the jail.
Not threading, nor what imports it: it would add half a millisecond to every fork."""

_DESCRIPTORS = 256
_COUNTS_PER_NAMESPACE = (5, 14)
"""The first Linux that counts a user's threads per user namespace."""
_SWITCHES = {
    "user/max_user_namespaces": "0",
    "kernel/unprivileged_userns_clone": "0",
    "kernel/apparmor_restrict_unprivileged_userns": "1",
}
"""Settings that forbid user namespaces, by the value that does."""
_ADDRESS_SPACE = 256 * 2**20
"""Of the interpreter, where the system does not say."""


def main(descriptor: int, isolation: str) -> NoReturn:
    """Prepare, say so (or why not), then serve until Tether is gone."""
    # Its number is whatever was free in Tether; sandboxes close everything below a bound, so it must be low.
    control = socket.socket(fileno=fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3))
    os.close(descriptor)
    _reset_process()
    for name in PRELOADED.split():
        with contextlib.suppress(ImportError):  # Python may have been built without it
            importlib.import_module(name)
    program.prepare_interpreter()
    try:
        config, process_ids = _jailed() if isolation == "kernel" else (_beside(), -1)
    except OSError as error:
        reason = error.strerror or str(error)
        _say(control, {"missing": (f"{error.filename}: {reason}" if error.filename else reason) + _setting_to_blame()})
        os._exit(1)
    _say(control, {"seccomp": config.seccomp, "landlock": config.landlock, "threads": config.threads_counted, "folder": config.folder})
    _serve(control, config, process_ids)
    if config.folder:
        _remove(config.folder)
    os._exit(0)


def _say(control: socket.socket, facts: dict[str, bool | str]) -> None:
    control.sendall(json.dumps(facts).encode() + b"\n")


def _setting_to_blame() -> str:
    """The switch a system administrator turned, if it is one of those that are known."""
    for path, value in _SWITCHES.items():
        with contextlib.suppress(OSError), open(f"/proc/sys/{path}", encoding="ascii") as file:
            if file.read().strip() == value:
                return f"; sysctl {path.replace('/', '.')} is {value}"
    return ""


def _reset_process() -> None:
    """Forget whatever was inherited that a program could notice."""
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
            file.write("1000")  # if memory runs out, programs go before the training run


def _jailed() -> tuple[namespaces.SandboxConfig, int]:
    """Build the jail and move in: the process that returns is its first. Also a descriptor of its process-id namespace."""
    if not linux.LINUX:
        raise OSError("namespaces: this is not Linux")
    seccomp.assemble(linux.machine(), supervisor.PROGRAM)  # kept for the sandboxes; says so if there is no table
    if not _works(_install_filter):
        raise OSError("filtering system calls: not permitted, or not known to this kernel")
    libraries, program_user, space = namespaces.library_folders(), namespaces.two_users(), _address_space()
    namespaces.enter_namespaces(program_user)
    inner = os.fork()
    if inner:
        os.closerange(0, _DESCRIPTORS)
        os.waitpid(inner, 0)
        os._exit(0)
    linux.die_with_parent(signal.SIGKILL)
    process_ids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    work = namespaces.build_root(libraries)
    linux.forbid_inspection()
    counted = _kernel_version() >= _COUNTS_PER_NAMESPACE and _works(lambda: linux.unshare("counting threads", linux.NEW_USER))
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


def _beside() -> namespaces.SandboxConfig:
    """No jail: a plain process, with whatever the kernel gives a process without rights."""
    libraries = namespaces.library_folders()
    files = linux.LINUX and landlock.version() > 0
    program_user = os.geteuid() == 0 and _works(lambda: _read_as_nobody(libraries))
    if os.geteuid() == 0 and not program_user and not files:
        raise OSError(
            "running as root: programs could read everything, for nobody else may read this Python and the kernel has no Landlock"
        )
    folder = tempfile.mkdtemp(prefix=wire.FOLDER_PREFIX)
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
    """Whether an action succeeds, found out in a child."""
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
    seccomp.install(seccomp.assemble(linux.machine(), os.getpid()))


def _read_as_nobody(folders: list[str]) -> None:
    os.setgroups([])
    os.setresgid(namespaces.OUTSIDE_USER, namespaces.OUTSIDE_USER, namespaces.OUTSIDE_USER)
    os.setresuid(namespaces.OUTSIDE_USER, namespaces.OUTSIDE_USER, namespaces.OUTSIDE_USER)
    for folder in folders:
        os.listdir(folder)


def _kernel_version() -> tuple[int, int]:
    major, minor = re.findall(r"\d+", os.uname().release)[:2]
    return int(major), int(minor)


def _address_space() -> int:
    """Bytes of address space this process has, which no program is charged for."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return _ADDRESS_SPACE


def _serve(control: socket.socket, config: namespaces.SandboxConfig, process_ids: int) -> None:
    """A sandbox for every socket that comes; returns when there will be no more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    while True:
        try:
            mark, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        except OSError:
            return
        if not mark:
            return
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # no room for another process: Tether sees its socket closed
                _start_sandbox(control, descriptor, config)
            os.close(descriptor)
            if config.kernel:  # children belong here again, or the next one could not be given a namespace of its own
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


def _remove(folder: str) -> None:
    for _ in range(10):  # the last programs are just being ended
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.1)
