"""Runs untrusted programs: `Sandbox.run` gives every task a sandbox process of its own and collects the reports.

Each task is sent to its sandbox over a connection of its own; closing that connection ends the sandbox. So a program that hangs, a sandbox
that dies, a fork server that is killed and a user who presses Ctrl-C have the same effect: the connection ends, and the task gets a report.
docs/sandbox.md describes the isolation. `describe_isolation` finds out what this machine supports by running a program.
"""

import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, get_args

from tether.core import codec
from tether.core.errors import BadInput
from tether.envs.deepcoder.sandbox import client, jobs
from tether.envs.deepcoder.sandbox.client import Isolation, running_fork_server
from tether.envs.deepcoder.sandbox.jobs import CallTask, Limits, Report, SandboxUnavailable, ScriptTask, StdinTask, Task

_GRACE_SECONDS = 40.0
"""Seconds beyond the wall limit for a sandbox to be prepared and to answer; its supervisor enforces the limits themselves."""
_LOOK_AGAIN = 0.05
_CHUNK = 1 << 16
_FACTS = 1 << 14
_ARGUMENTS = 1 << 26
_MOST = 1_000_000


class Sandbox:
    """A `ProgramRunner`. It is cheap to create and safe to use from several threads."""

    def __init__(self, limits: Limits | None = None, *, isolation: Isolation = "kernel", concurrency: int | None = None) -> None:
        """`concurrency`: tasks at a time, in this process, of all sandboxes that name the same number; by default one per core."""
        self.limits = limits or Limits()
        for name, value in asdict(self.limits).items():
            number = int | float if name.endswith("_seconds") else int
            if not isinstance(value, number) or not 0 < value <= _MOST:
                kind = "a number" if name.endswith("_seconds") else "a whole number"
                raise BadInput(f"limit {name}: got {value!r}; give {kind} above 0, at most {_MOST}")
        if isolation not in get_args(Isolation):
            raise BadInput(f"isolation: got {isolation!r}; give one of {', '.join(get_args(Isolation))}")
        if concurrency is not None and concurrency < 1:
            raise BadInput(f"concurrency: got {concurrency!r}; give a number above 0")
        self.isolation: Isolation = isolation
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.concurrency = concurrency or cores

    def run(self, code: str, tasks: Sequence[Task]) -> list[Report]:
        """One report per task, in order. `SandboxUnavailable` where the machine does not support the requested isolation."""
        return _Run(self, code, tasks).reports()


@lru_cache
def _slots(concurrency: int, process: int) -> threading.Semaphore:
    """Shared by this process's sandboxes: more programs than cores at a time would only reach their wall limits."""
    return threading.Semaphore(concurrency)


@dataclass(slots=True)
class _Exchange:
    """One task on its way: what is still to be sent, what has come."""

    index: int
    connection: socket.socket
    word: str
    outgoing: memoryview
    deadline: float
    incoming: bytearray = field(default_factory=bytearray)

    def send(self) -> bool:
        """Send some; True once there is no more to send."""
        try:
            self.outgoing = self.outgoing[self.connection.send(self.outgoing[:_CHUNK]) :]
        except ConnectionError:
            return True  # the sandbox has ended, but its answer may still be in the socket
        return not self.outgoing

    def receive(self, most: int) -> list[bytes] | None:
        """Receive some; the frames once they are complete. `ConnectionError` if they never will be."""
        part = self.connection.recv(_CHUNK)
        if not part:
            raise ConnectionResetError("the sandbox ended without an answer")
        self.incoming += part
        if len(self.incoming) > most:
            raise ConnectionAbortedError("the sandbox answered too much")
        return codec.unpack(self.incoming, 3)


class _Run:
    """One call of `Sandbox.run`."""

    def __init__(self, sandbox: Sandbox, code: str, tasks: Sequence[Task]) -> None:
        self._sandbox, self._code, self._tasks = sandbox, code, tasks
        self._slots = _slots(sandbox.concurrency, os.getpid())
        self._selector = selectors.DefaultSelector()
        self._active: set[int] = set()
        self._done: dict[int, Report] = {}

    def reports(self) -> list[Report]:
        waiting = deque(range(len(self._tasks)))
        try:
            while waiting or self._active:
                # Block for a slot only while no task of this call runs: otherwise two calls that wait for each other's slots could deadlock.
                while waiting and self._slots.acquire(blocking=not self._active):
                    self._active.add(waiting[0])
                    self._start(waiting.popleft())
                for key, events in self._selector.select(_LOOK_AGAIN):
                    self._advance(key.data, events)
                now = time.monotonic()
                for key in list(self._selector.get_map().values()):
                    if now > key.data.deadline:
                        self._finish(key.data, Report("killed", detail="the sandbox did not answer in time"))
        finally:
            for key in list(self._selector.get_map().values()):
                key.data.connection.close()
            self._selector.close()
            for _ in self._active:
                self._slots.release()
        return [self._done[index] for index in range(len(self._tasks))]

    def _start(self, index: int) -> None:
        word = secrets.token_hex(16)
        request = _request(self._code, self._tasks[index], self._sandbox.limits, word)
        connection = client.connect(self._sandbox.isolation)
        deadline = time.monotonic() + self._sandbox.limits.wall_seconds + _GRACE_SECONDS
        exchange = _Exchange(index, connection, word, memoryview(request), deadline)
        self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, exchange)

    def _advance(self, exchange: _Exchange, events: int) -> None:
        most = 2 * self._sandbox.limits.output_kib * 1024 + _FACTS
        if events & selectors.EVENT_WRITE and exchange.send():
            self._selector.modify(exchange.connection, selectors.EVENT_READ, exchange)
        try:
            frames = exchange.receive(most) if events & selectors.EVENT_READ else None
        except ConnectionError as error:
            self._finish(exchange, Report("killed", detail=str(error)))
            return
        if frames is not None:
            task = self._tasks[exchange.index]
            self._finish(exchange, jobs.read_report(task, exchange.word, frames))

    def _finish(self, exchange: _Exchange, report: Report) -> None:
        self._selector.unregister(exchange.connection)
        exchange.connection.close()
        self._done[exchange.index] = report
        self._active.discard(exchange.index)
        self._slots.release()


def _request(code: str, task: Task, limits: Limits, word: str) -> bytes:
    """The three frames a sandbox is given."""
    given = task.stdin.encode("utf-8", "replace") if isinstance(task, StdinTask) else b""
    settings = asdict(limits) | {"folder_kib": 4 * limits.file_kib + len(given) // 1024 + 64}
    return codec.pack([json.dumps(settings).encode(), json.dumps(_job(code, task, word)).encode(), given])


def _job(code: str, task: Task, word: str) -> dict[str, str]:
    match task:
        case StdinTask():
            return {"kind": "stdin", "code": code}
        case ScriptTask():
            return {"kind": "script", "code": code, "script": task.script, "word": word}
        case CallTask():
            try:
                arguments = codec.encode(list(task.args), _ARGUMENTS)
            except ValueError as error:
                raise BadInput(f"arguments for {task.function}: {error}") from None
            return {"kind": "call", "code": code, "function": task.function, "arguments": arguments}


@dataclass(frozen=True, slots=True)
class IsolationLevel:
    """The isolation that this machine supports."""

    name: Isolation | None
    """The strongest isolation there is; None if programs cannot be run at all."""
    strong: bool
    detail: str


@lru_cache(maxsize=1)
def describe_isolation() -> IsolationLevel:
    """The strongest level this machine gives; tried once per process."""
    try:
        facts = _tried("kernel")
    except SandboxUnavailable as refusal:
        return _weaker(str(refusal))
    threads = "" if facts["threads"] else "; before Linux 5.14 threads are bounded by memory only"
    return IsolationLevel("kernel", True, f"namespaces, a root folder of its own, system call filter, limits{threads}")


def _weaker(refusal: str) -> IsolationLevel:
    try:
        facts = _tried("process")
    except SandboxUnavailable as second:
        return IsolationLevel(None, False, str(second))
    given = [name for name, there in (("system call filter", facts["seccomp"]), ("file rules (Landlock)", facts["landlock"])) if there]
    missing = [name for name, there in (("network", facts["seccomp"]), ("files", facts["landlock"])) if not there]
    open_to = f"; programs can reach this machine's {' and '.join(missing)}" if missing else ""
    return IsolationLevel("process", False, f"a process with {', '.join([*given, 'limits'])}{open_to}; {refusal}")


def _tried(isolation: Isolation) -> dict[str, Any]:
    [report] = Sandbox(isolation=isolation, concurrency=1).run("print(6 * 7)", [StdinTask("")])
    if (report.ending, report.stdout) != ("ok", "42\n"):
        raise SandboxUnavailable(f"isolation={isolation}: a first program did not run ({report.detail or report.ending})")
    return running_fork_server(isolation).facts
