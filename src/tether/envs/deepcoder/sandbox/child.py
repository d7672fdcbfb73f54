"""The process of a program: it reads its job, gives up its rights, and reads the program only after that.

The order matters. While the process still has rights, it places the input and opens the descriptors it needs. Then it closes every other
descriptor, sets the limits, changes the user, drops its capabilities and restricts files. The system call filter comes last, because it
forbids the calls that the steps before it need. The program can undo none of this. Imports the standard library only: it runs in the
sandboxes.
"""

import fcntl
import json
import math
import os
import resource
import signal
import socket
from typing import Any, NoReturn

from tether.envs.deepcoder.sandbox import codec, landlock, linux, namespaces, program, seccomp

NOT_STARTED = 113
"""The exit code of a sandbox that could not be prepared."""
STARTED = b"+"
"""The first byte of the result: the program's time starts here."""

_RESULT = 3
_STACK = 128 * 2**20
"""Bytes: deep recursion through C code (sorted, lru_cache) needs it; the kernel leaves at least so much room below the stack."""
_DESCRIPTORS = 64
_PENDING_SIGNALS = 64


def main(connection: socket.socket, settings: dict[str, Any], config: namespaces.SandboxConfig, folder: str, pipes: list[int]) -> NoReturn:
    """Run the job that comes over the connection; never returns."""
    result = pipes[-1]
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        job = json.loads(codec.receive(connection))
        given = codec.receive(connection)
        source = namespaces.place_input(folder, given) if config.kernel else _input_file(folder, given)
        os.chdir(folder)
        _keep_only([source, *pipes])
        connection.detach()
        result = _RESULT
        _lock_in(settings, config, folder)
    except OSError as error:
        os.write(result, str(error).encode())
        os._exit(NOT_STARTED)
    os.write(_RESULT, STARTED)
    program.run(job, _RESULT, settings["output_kib"] * 1024)


def _input_file(folder: str, given: bytes) -> int:
    """The input as a file that has no name any more, open for reading."""
    path = os.path.join(folder, ".input")
    with open(path, "wb") as file:
        file.write(given)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.unlink(path)
    return descriptor


def _keep_only(descriptors: list[int]) -> None:
    """Make these descriptors 0, 1, 2 and 3, and close every other one."""
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, len(descriptors)) for descriptor in descriptors]
    for target, descriptor in enumerate(aside):
        os.dup2(descriptor, target, inheritable=False)
    highest, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # the fork server lowered it before it opened any descriptor
    os.closerange(len(descriptors), highest)


def _lock_in(settings: dict[str, Any], config: namespaces.SandboxConfig, folder: str) -> None:
    supervisor = os.getppid()
    _limit(settings, config)
    _become_nobody(settings, config)
    if not linux.LINUX:
        return
    linux.die_with_parent(signal.SIGKILL)
    if os.getppid() != supervisor:  # the supervisor ended before the line above took effect
        os._exit(NOT_STARTED)
    linux.forbid_inspection()
    linux.forbid_new_privileges()
    if config.landlock:
        devices = [(path, landlock.READ_AND_WRITE_DEVICE) for path in filter(os.path.exists, namespaces.DEVICES)]
        landlock.restrict([*((path, landlock.READ) for path in config.libraries), *devices, (folder, landlock.OWN_FOLDER)])
    if config.seccomp:
        seccomp.install(seccomp.assemble(linux.machine(), os.getpid()))


def _limit(settings: dict[str, Any], config: namespaces.SandboxConfig) -> None:
    seconds = math.ceil(settings["cpu_seconds"]) + 1  # the supervisor is more exact; this limit applies if it is slow
    memory = config.address_space + settings["memory_mib"] * 2**20
    limits = {
        "RLIMIT_AS": memory,
        "RLIMIT_CPU": seconds,
        "RLIMIT_FSIZE": settings["file_kib"] * 1024,
        "RLIMIT_STACK": _STACK,
        "RLIMIT_NOFILE": _DESCRIPTORS,
        "RLIMIT_SIGPENDING": _PENDING_SIGNALS,
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_MEMLOCK": 0,
    }
    for name, value in limits.items():
        if hasattr(resource, name):
            _set_limit(getattr(resource, name), value)


def _set_limit(kind: int, value: int) -> None:
    _, highest = resource.getrlimit(kind)
    if highest != resource.RLIM_INFINITY:
        value = min(value, highest)
    resource.setrlimit(kind, (value, value))


def _become_nobody(settings: dict[str, Any], config: namespaces.SandboxConfig) -> None:
    """Change to the unprivileged user where there is one, drop every capability, and limit the threads of this program alone."""
    if config.program_user:
        user = namespaces.PROGRAM_USER if config.kernel else namespaces.OUTSIDE_USER
        if not config.kernel:
            os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if config.threads_counted:
        linux.unshare("counting threads", linux.NEW_USER)  # from Linux 5.14 on, each user namespace counts for itself
        _set_limit(resource.RLIMIT_NPROC, settings["threads"])
    if linux.LINUX:
        linux.drop_capabilities()
