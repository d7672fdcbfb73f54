"""The process of a program: it reads its job, gives up its rights, and only then runs the program in what looks like an ordinary interpreter.

The order matters. While the process still has rights, it places the input and opens the descriptors it needs. Then it closes every other
descriptor, sets the limits, changes the user, drops its capabilities and restricts files. The system call filter comes last, because it
forbids the calls that the steps before it need. The program can undo none of this.

A job is one of three kinds. *stdin*: the program is `__main__` with an input to read. *call*: it is defined as a module and one function is
called; the value travels on a descriptor of its own, as tagged JSON. *script*: it is defined, then a script runs in its namespace,
and a word that only Tether knows is sent back once the script has passed its last line.

All of this happens in the program's own process, so the program can forge every byte of the message. That gains it nothing for stdin
and call jobs, whose answers are compared outside: it could have printed or returned the same. A script that tests the program from the inside
can be deceived; see docs/sandbox.md. Imports the standard library only: it runs in the sandboxes.
"""

import _sitebuiltins
import atexit
import builtins
import contextlib
import errno
import fcntl
import gc
import io
import json
import math
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from tether.core import codec
from tether.envs.deepcoder.sandbox import linux, namespaces

FILE, SCRIPT = "solution.py", "test.py"

_write, _exit = os.write, os._exit
"""Bound here, because a program may replace them in `os`."""
_DETAIL = 300
_DIGITS = 50_000
"""Of an integer turned into text, where Python's own limit is 4300 and tests ask for more."""
_OUT_OF_MEMORY = json.dumps({"ending": "memory", "detail": "MemoryError"}).encode() + b"\n"


class CatchEnding(contextlib.AbstractContextManager["CatchEnding"]):
    """Records how the enclosed code ended: normally, or by the exception it raised. No exception passes through."""

    def __init__(self) -> None:
        self.ending, self.detail = "ok", ""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            self.detail = "exit"
        elif isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            self.ending = "memory"
        elif isinstance(error, codec.TooLarge):
            self.ending, self.detail = "output", str(error)
        elif error is not None:
            self.ending = "error"
            self.detail = _last_line(error, trace)
        return True


def _last_line(error: BaseException, trace: TracebackType | None) -> str:
    """What the last line of a traceback says, and the line of the program it happened on."""
    line, file = (error.lineno, error.filename) if isinstance(error, SyntaxError) else (None, FILE)
    text = str(error.msg) if isinstance(error, SyntaxError) else ""
    with contextlib.suppress(Exception):  # the program's own exception may fail to say what it is
        text = text or str(error)
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in (FILE, SCRIPT):
            line, file = trace.tb_lineno, trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:_DETAIL] + (f" ({file}, line {line})" if line else "")


def run(job: dict[str, Any], result: int, size: int) -> NoReturn:
    """Run the job, send the message, end the process."""
    code = 1
    try:
        message, code = _RUNNERS[job["kind"]](job, size)
        while message:
            message = message[_write(result, message) :]
    finally:
        _exit(code)


def prepare_interpreter() -> None:
    """Called once, in the fork server: adds what `site` would have added, and what programs written for online judges expect."""
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    sys.set_int_max_str_digits(_DIGITS)
    gc.collect()
    gc.freeze()  # what is shared by all sandboxes stays shared


def _as_program(job: dict[str, Any], size: int) -> tuple[bytes, int]:
    with CatchEnding() as end:
        _define(_fresh_module("__main__"), job["code"])
    _finish()
    return _message(end)


def _as_module_with_call(job: dict[str, Any], size: int) -> tuple[bytes, int]:
    returned, value = False, None
    with CatchEnding() as end:
        module = _fresh_module("solution")
        _define(module, job["code"])
        value = _function(module, job["function"])(*codec.decode(job["arguments"]))
        returned = True
    text = ""
    if returned:
        with CatchEnding() as end:
            text = codec.encode(value, size)
    elif end.ending == "ok":
        end.ending, end.detail = "error", "the program ended before it returned a value"
    _flush()
    return _message(end, value=text)


def _as_module_with_script(job: dict[str, Any], size: int) -> tuple[bytes, int]:
    word, passed = job.pop("word"), False
    with CatchEnding() as end:
        module = _fresh_module("solution")
        _define(module, job["code"])
        exec(compile(job["script"], SCRIPT, "exec", dont_inherit=True), module.__dict__)
        passed = True
    _flush()
    return _message(end, word=word if passed else "")  # an exit in the middle looks well, but for the word


_RUNNERS = {"stdin": _as_program, "call": _as_module_with_call, "script": _as_module_with_script}


def _message(end: CatchEnding, word: str = "", value: str = "") -> tuple[bytes, int]:
    """The bytes to send, and the exit code."""
    if end.ending == "memory":
        return _OUT_OF_MEMORY, 1  # made beforehand: there may be no room to make it now
    head = json.dumps({"ending": end.ending, "detail": end.detail, "word": word})
    return f"{head}\n{value}".encode(), 0 if end.ending == "ok" else 1


def _fresh_module(name: str) -> ModuleType:
    """A new module to run the program in, the streams as Python opens them, and none of our own modules in sight."""
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "tether"]:
        del sys.modules[loaded]
    atexit._clear()
    random.seed(0)
    sys.argv[:] = [FILE]
    sys.stdin = sys.__stdin__ = _stream(0, "r", "<stdin>")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "w", "<stdout>")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w", "<stderr>", "backslashreplace")  # type: ignore[misc]
    sys.modules["__main__"] = ModuleType("__main__")
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = FILE
    return module


def _stream(descriptor: int, mode: str, name: str, errors: str = "strict") -> io.TextIOWrapper:
    """A standard stream with what Python gives its own: the fast input and output of contest programs asks for `mode` and `name`."""
    raw = io.FileIO(descriptor, mode, closefd=False)
    raw.name = name
    buffer = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    stream = io.TextIOWrapper(buffer, "utf-8", errors, line_buffering=descriptor == 2)
    stream.mode = mode  # type: ignore[misc]
    return stream


def _define(module: ModuleType, code: str) -> None:
    exec(compile(code, FILE, "exec", dont_inherit=True), module.__dict__)


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    found = module.__dict__.get(name)
    if found is None and "Solution" in module.__dict__:
        found = getattr(module.__dict__["Solution"](), name, None)
    if not callable(found):
        raise NameError(f"the program defines no function {name!r}")
    return found


def _finish() -> None:
    """What the interpreter does at the end: wait for threads, run exit functions, flush."""
    with CatchEnding():
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
    with CatchEnding():
        atexit._run_exitfuncs()
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        with CatchEnding():
            if stream is not None:
                stream.flush()


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
    run(job, _RESULT, settings["output_kib"] * 1024)


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
        devices = [(path, linux.READ_AND_WRITE_DEVICE) for path in filter(os.path.exists, namespaces.DEVICES)]
        linux.restrict_files([*((path, linux.READ) for path in config.libraries), *devices, (folder, linux.OWN_FOLDER)])
    if config.seccomp:
        linux.install_filter(linux.assemble_filter(linux.machine(), os.getpid()))


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
