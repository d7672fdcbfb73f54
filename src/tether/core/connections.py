"""Connections that cannot be held open for nothing: uvicorn's HTTP protocol with deadlines, and a limit on how many there are.

A client has `header_seconds` for the head of a request and a floor on the speed of its body, and it must read its answer. A connection that
misses one of these is closed. When all connections are taken, a new one takes the place of the oldest that is between two requests or has
not finished asking; only where all of them are being answered it is refused (503). So half-open connections never keep others out. The
limit leaves files for everything else: a process without files left could not even accept, and asyncio would log that thousands of times.
"""

import asyncio
import contextlib
import logging
import resource
import time
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_LOG = logging.getLogger(__name__)

BACKLOG = 128
"""Connections that the system holds until they are accepted, and the most that are accepted at once."""
RESERVED_FILES = BACKLOG + 128
"""Files that no connection may take: those accepted at once, and what Python and the server itself hold."""
WANTED_FILES = 65_536
REPEAT_SECONDS = 60.0
"""The same line of a server's log is written once in this time."""

Stage = Literal["head", "body", "answer", "idle"]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a server grants each connection, and how many."""

    max_connections: int = 2048
    header_seconds: float = 10.0
    """For the head of a request, from its first byte (the first one of a connection: from its start)."""
    body_seconds: float = 30.0
    """For a body, beside the time that `body_rate` gives for what has come."""
    body_rate: float = 16 * 1024
    """Bytes a second that a body must come with, on average."""
    max_body: int = 64 * 2**20
    """Bytes of a body; a connection that sends more is closed. Routes refuse far less, with a line."""
    write_seconds: float = 60.0
    """A client that reads nothing of its answer for so long is left."""


def raise_file_limit() -> int:
    """Take as many open files as this process may have; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return WANTED_FILES if soft == resource.RLIM_INFINITY else soft


def affordable_connections(wanted: int, files: int) -> int:
    """How many connections fit into a limit of open files; half of it is left to whatever the requests need.

    >>> affordable_connections(2048, 65536), affordable_connections(2048, 1024)
    (2048, 384)
    """
    return max(8, min(wanted, (files - RESERVED_FILES) // 2))


def guarded_protocol(limits: ConnectionLimits) -> type[H11Protocol]:
    """The protocol class of one server; its connections know each other."""
    files = raise_file_limit()
    most = affordable_connections(limits.max_connections, files)
    if most < limits.max_connections:
        _LOG.warning("this process may open %d files (ulimit -n), so at most %d connections are served at a time", files, most)
    return type("GuardedProtocol", (_GuardedProtocol,), {"limits": limits, "most": most, "open": {}})


class _GuardedProtocol(H11Protocol):
    """One connection and its deadline."""

    limits: ClassVar[ConnectionLimits]
    most: ClassVar[int]
    open: "ClassVar[dict[_GuardedProtocol, None]]"
    """Every connection of the server, the oldest first."""

    stage: Stage = "head"
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _since = 0.0
    _received = 0

    # --- what uvicorn and asyncio call ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.open) >= self.most and not self._make_room():
            self.transport = transport
            self._refuse(b"503 Service Unavailable")
            return
        self.open[self] = None
        super().connection_made(transport)
        self._enter("head")

    def connection_lost(self, exc: Exception | None) -> None:
        self.open.pop(self, None)
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._write_timer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._received += len(data)
        super().data_received(data)
        self._follow()
        if self.stage == "body" and self._received > self.limits.max_body:
            self._refuse(b"413 Content Too Large")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def shutdown(self) -> None:
        if self.stage == "body":  # whoever has not finished asking is not waited for
            self._refuse(b"503 Service Unavailable")
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self._write_timer or self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # --- deadlines ---

    def _follow(self) -> None:
        """Note which stage of a request the connection is in."""
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            stage: Stage = "body"
        elif state is h11.IDLE:
            stage = "head" if self.conn.trailing_data[0] else "idle"
        else:
            stage = "answer"
        if stage != self.stage:
            self._enter(stage)

    def _enter(self, stage: Stage) -> None:
        self.stage, self._since, self._received = stage, time.monotonic(), 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if stage == "head":
            self._timer = self.loop.call_later(self.limits.header_seconds, self._refuse, b"408 Request Timeout")
        elif stage == "body":
            self._timer = self.loop.call_later(self.limits.body_seconds, self._check_body)

    def _check_body(self) -> None:
        if self.flow.read_paused:  # the server does not read: that is not the client's delay
            self._since, self._received = time.monotonic(), 0
        due = self._since + self.limits.body_seconds + self._received / self.limits.body_rate
        left = due - time.monotonic()
        if left <= 0:
            self._refuse(b"408 Request Timeout")
        else:
            self._timer = self.loop.call_later(max(left, 0.05), self._check_body)

    def _refuse(self, status: bytes) -> None:
        """End the connection; with a status, unless an answer has begun."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()

    def _make_room(self) -> bool:
        """End the oldest connection that has not finished asking, or else the oldest that is idle."""
        for stage in ("head", "body", "idle"):
            oldest = next((other for other in self.open if other.stage == stage), None)
            if oldest is not None:
                del self.open[oldest]
                oldest.transport.abort()
                return True
        return False


class WithoutRepeats(logging.Filter):
    """Lets a line of a log pass once in a while: what clients do wrong thousands of times is said once."""

    def __init__(self, seconds: float = REPEAT_SECONDS) -> None:
        super().__init__()
        self._seconds, self._said = seconds, dict[str, float]()

    def filter(self, record: logging.LogRecord) -> bool:
        kind = type(record.exc_info[1]).__name__ if record.exc_info else ""
        line, now = f"{record.getMessage()}{kind}", time.monotonic()
        if now - self._said.get(line, -self._seconds) < self._seconds:
            return False
        if len(self._said) > 1000:
            self._said.clear()
        self._said[line] = now
        return True


class Patient:
    """An application whose clients may leave in the middle of a request, and that may be stopped in one; neither is an error of the server's."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import ClientDisconnect
        from starlette.responses import PlainTextResponse

        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:  # the server stops, and its grace time is over
            if scope["type"] != "http":
                raise
            with contextlib.suppress(RuntimeError):  # the answer has begun
                await PlainTextResponse("the server stops", 503)(scope, receive, send)


def server_config(app: Any, limits: ConnectionLimits, keep_alive: int, grace: int) -> uvicorn.Config:
    """The settings of a guarded server."""
    config = uvicorn.Config(
        Patient(app),
        http=guarded_protocol(limits),
        log_level="warning",
        access_log=False,
        ws="none",
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=grace,
    )
    errors = logging.getLogger("uvicorn.error")
    if not any(isinstance(known, WithoutRepeats) for known in errors.filters):
        errors.addFilter(WithoutRepeats())
    return config


def quiet_accepts() -> None:
    """On the running event loop: one line, not a traceback for each attempt, when no connection can be accepted for want of files."""
    silent = WithoutRepeats()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not str(context.get("message", "")).startswith("socket.accept() out of system resource"):
            loop.default_exception_handler(context)
            return
        record = _LOG.makeRecord(_LOG.name, logging.WARNING, "", 0, f"no connection can be accepted: {context.get('exception')}", (), None)
        if silent.filter(record):
            _LOG.handle(record)

    asyncio.get_running_loop().set_exception_handler(handle)
