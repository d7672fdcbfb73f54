"""Requests to servers: pooled connections, deadlines, further attempts, and one model of what can go wrong.

Everything in Tether that asks a server over HTTP does so through `HttpClient`: models, environments, retrieval. A request ends with a `Reply`,
whatever its status, or with `Unanswered`: no reply came, or none but "later". Callers put their own words and error classes around both.

A request that may be sent again is sent again in one of two ways. With `delays`, each attempt has the whole time-out for itself; a `stranger`, who
has never replied, is tried again a few times only, unless it says that it is about to serve, and not after a time-out. Without, the time-out is
for all attempts together, the delays between them grow, and the outage of the address is noted: said once, however many requests
wait for it, and kept until somebody takes it for the record (`take_outages`). An address that has never answered is tried for a moment only: it
is more likely wrong than away.

Connections are shared by all clients of a process that have none of their own. A forked child starts without them, because two processes cannot
share a socket. A proxy that the environment variables name is not used for this machine's own addresses, which it could not reach.
"""

import atexit
import json
import logging
import os
import threading
import time
from calendar import timegm
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import parsedate
from typing import Literal, Self
from urllib.parse import urlsplit

import httpx

from tether.core.errors import TetherError
from tether.core.http import checked_token, is_loopback

_LOG = logging.getLogger(__name__)

LATER = (429, 502, 503)
"""Statuses after which a request is sent again."""
KEEP_ALIVE = 30.0
"""Seconds that an unused connection is kept; shorter than servers keep theirs, so that it is seldom found closed."""
MOST_KEPT = 128
"""Unused connections to a server."""
PIECE_BYTES = 2**20
"""A large body is handed over in pieces: of what it is given at once, httpx copies the whole rest after every write to the socket."""
FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0
STRANGER_SECONDS = 1.3
"""How long an address is tried that has never answered."""
STRANGER_ATTEMPTS = 4
"""Of a request with `delays`: a restart is over in seconds, and what fails for longer fails for ever."""
SAID_AFTER = 1.0
"""Seconds that an outage lasts before it is said: a connection that breaks now and then is none."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered."""

    status: int
    content: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def reason(self) -> str:
        """The message of an error in JSON, in one line; empty where there is none."""
        try:
            told = json.loads(self.content)
        except (ValueError, RecursionError):
            return ""
        error = told.get("error", told.get("detail", "")) if isinstance(told, dict) else ""
        said = error.get("message", error) if isinstance(error, dict) else error
        return " ".join(str(said).split())

    def __str__(self) -> str:
        return f"answered {self.status}{f': {self.reason[:300]}' if self.reason else ''}"


class Unanswered(TetherError):
    """A request without a reply that can be used. Its text says what happened to the last attempt.

    - slow: the time is up; `reply` is there where the server had begun to answer.
    - unreachable: nobody takes the connection.
    - broken: the connection ended before the reply did.
    - later: the server answered (`reply`) that it cannot serve the request now.
    - unusable: the address or the reply is none of HTTP, or the reply is longer than the client takes.
    - closed: the client's connections were closed by another thread.
    """

    def __init__(
        self, kind: Literal["slow", "unreachable", "broken", "later", "unusable", "closed"], said: str, reply: Reply | None = None
    ) -> None:
        super().__init__(said)
        self.kind, self.reply = kind, reply
        self.until_deadline = False
        """It was tried again until the time was up."""
        self.attempts = 1


def check_address(url: str) -> bool:
    """Whether a URL is the address of a server: http or https, a host, and a port that may be one."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a broken IPv6 address
        return False


class HttpClient:
    """Requests to one server.

    Args:
        url: the server's address; it may hold a path.
        token: sent as a bearer token.
        timeout: seconds that a request may take, from connecting to the last byte.
        later: statuses after which a request is sent again.
        most_bytes: of a reply; None for any number.
        parallel: connections at a time, of a client that has its own; they live as long as it is open (use it as a context). None: it shares
            those of the process.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float,
        later: Sequence[int] = LATER,
        most_bytes: int | None = None,
        parallel: int | None = None,
    ) -> None:
        self.base, self.timeout = url.rstrip("/"), timeout
        self.token = None if not token else checked_token(token)
        self._later, self._most_bytes, self._parallel = tuple(later), most_bytes, parallel
        self._own: Connections | None = None

    def __enter__(self) -> Self:
        self._own = Connections(self.base, most=self._parallel)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the client's own connections; requests that other threads still wait for end with an error."""
        if self._own is not None:
            self._own.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
        timeout: float | None = None,
        delays: Sequence[float] | None = None,
        longest_pause: float = 0.0,
        stranger: bool = False,
        on_data: Callable[[bytearray], None] | None = None,
    ) -> Reply:
        """Send a request, and again where that may help.

        Args:
            method: GET, POST or DELETE.
            path: of the route, such as /v1/models.
            content: the body, and what it is.
            content_type: what the body is.
            query: of the address.
            timeout: seconds; None for the client's own.
            delays: seconds before each further attempt; None: attempts with growing delays until the time is up.
            longest_pause: the most seconds that are waited where a server asks for a pause.
            stranger: nobody has had a reply to such a request yet.
            on_data: gets what has come of a successful reply, whenever more has, and removes from it what it takes.
        """
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        waits = iter(delays) if delays is not None else growing_delays(self.base, deadline)
        problem: Unanswered | None = None
        attempt = 0
        while True:
            attempt += 1
            if delays is not None:
                deadline = time.monotonic() + seconds
            try:
                reply = self._attempt(method, path, content, content_type, query, deadline, on_data)
            except Unanswered as error:
                if error.kind in ("unusable", "closed"):
                    raise
                if error.kind == "slow" and delays is None:  # the time is up; what the attempt before met says more
                    problem = problem or error
                    problem.until_deadline = True
                    raise problem from None
                problem = error
            else:
                if reply.status not in self._later:
                    if delays is None:
                        note_answer(self.base)
                    return reply
                problem = Unanswered("later", str(reply), reply)
            problem.attempts = attempt
            delay = None if stranger and _hopeless(problem) else next(waits, None)
            if delay is not None and longest_pause and problem.reply is not None:
                delay = _asked_pause(problem.reply, delay, longest_pause)
            if delay is None:
                raise problem
            if delays is None:
                note_silence(self.base, f"status {problem.reply.status}" if problem.reply else "no connection", seconds)
            time.sleep(delay)

    def _attempt(
        self,
        method: str,
        path: str,
        content: bytes | None,
        content_type: str,
        query: Mapping[str, str] | None,
        deadline: float,
        on_data: Callable[[bytearray], None] | None,
    ) -> Reply:
        connections = self._own or _shared_connections(self.base)
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        body: bytes | Iterator[bytes] | None = content
        if content is not None:
            headers |= {"Content-Type": content_type, "Content-Length": str(len(content))}
            body = content if len(content) <= PIECE_BYTES else _pieces(content)
        left = max(0.001, deadline - time.monotonic())
        data, began = bytearray(), None
        try:
            with connections.one(left) as client:
                with client.stream(method, self.base + path, content=body, params=query, headers=headers, timeout=left) as response:
                    began = Reply(response.status_code, b"", response.headers)
                    for chunk in response.iter_bytes():
                        data += chunk
                        if on_data is not None and began.is_success:
                            on_data(data)
                        if self._most_bytes is not None and len(data) > self._most_bytes:
                            raise Unanswered("unusable", f"answered more than {self._most_bytes} bytes", began)
                        if time.monotonic() > deadline:
                            raise httpx.ReadTimeout("the reply takes too long")
                if client.is_closed:  # while it connected: httpx has forgotten this connection
                    response.extensions["network_stream"].close()
        except httpx.TimeoutException as error:
            raise Unanswered("slow", f"{type(error).__name__}: {error}", began) from error
        except (httpx.ConnectError, httpx.ProxyError) as error:
            raise Unanswered("unreachable", f"{type(error).__name__}: {error}") from error
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            raise Unanswered("broken", f"{type(error).__name__}: {error}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unanswered("unusable", f"{type(error).__name__}: {error}") from error
        except RuntimeError as error:
            if not connections.is_closed:
                raise
            raise Unanswered("closed", str(error)) from error
        return Reply(began.status, bytes(data), began.headers)


def is_healthy(address: str, timeout: float = 5.0) -> bool:
    """Whether the server at an address answers GET /health, asked once."""
    try:
        return HttpClient(address, timeout=timeout).request("GET", "/health", delays=()).is_success
    except Unanswered:
        return False


def _hopeless(problem: Unanswered) -> bool:
    """Whether a server that has never replied is not worth a further attempt; one that is starting says 429, 502 or 503."""
    starting = problem.reply is not None and problem.reply.status in LATER
    return problem.kind == "slow" or (problem.attempts >= STRANGER_ATTEMPTS and not starting)


def _asked_pause(reply: Reply, delay: float, longest: float) -> float | None:
    """Seconds until the next attempt: what the server asks for, as a number of seconds or as a date; None where that is too long."""
    asked = reply.headers.get("retry-after", "")
    try:
        wished = float(asked)
    except ValueError:
        date = parsedate(asked)
        wished = delay if date is None else timegm(date) - time.time()
    return max(wished, delay) if wished <= longest else None


def _pieces(content: bytes) -> Iterator[bytes]:
    view = memoryview(content)
    for start in range(0, len(view), PIECE_BYTES):
        yield bytes(view[start : start + PIECE_BYTES])


# --- connections ---


class Connections:
    """Connections to one server. Each is an httpx client that one request at a time uses: a client with many connections looks at all of them, under
    one lock, whenever a request begins or ends. One that was unused for too long is replaced when it is used again."""

    def __init__(self, base: str, most: int | None = None) -> None:
        """`most`: requests at a time; others wait. None: any number, of whose connections MOST_KEPT are kept."""
        parts = urlsplit(base)
        # Certificates are read once: it takes longer than a short request.
        self._certificates = httpx.create_ssl_context() if parts.scheme == "https" else False
        self._is_local = is_loopback(parts.hostname or "")
        self._kept = MOST_KEPT if most is None else most
        self._room = None if most is None else threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._clients: set[httpx.Client] = set()
        self._free: list[httpx.Client] = []
        self.is_closed = False

    @contextmanager
    def one(self, timeout: float) -> Iterator[httpx.Client]:
        """A client that nobody else uses meanwhile; the one that was used last, so that few are kept where few are needed."""
        if self._room is not None and not self._room.acquire(timeout=timeout):
            raise httpx.PoolTimeout("no connection became free")
        try:
            client = self._take()
            try:
                yield client
            finally:
                self._give_back(client)
        finally:
            if self._room is not None:
                self._room.release()

    def _take(self) -> httpx.Client:
        with self._lock:
            if self._free and not self.is_closed:
                return self._free.pop()
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEP_ALIVE)
        client = httpx.Client(limits=limits, trust_env=not self._is_local, verify=self._certificates)
        with self._lock:
            if self.is_closed:
                raise RuntimeError("the connections were closed")
            self._clients.add(client)
        return client

    def _give_back(self, client: httpx.Client) -> None:
        with self._lock:
            is_kept = not self.is_closed and len(self._free) < self._kept
            if is_kept:
                self._free.append(client)
            else:
                self._clients.discard(client)
        if not is_kept:
            client.close()

    def close(self) -> None:
        """End them all; requests that other threads still wait for end with an error."""
        with self._lock:
            self.is_closed = True
            clients = list(self._clients)
        for client in clients:
            client.close()


_shared: dict[str, Connections] = {}
"""Those of this process, by server."""
_inherited: list[Connections] = []
"""Their sockets belong to the parent process; these references keep them from being closed here."""


def _shared_connections(base: str) -> Connections:
    parts = urlsplit(base)
    origin = f"{parts.scheme}://{parts.netloc}"
    connections = _shared.get(origin)
    if connections is None:  # if another thread is faster, what is made here is dropped; it holds no connection
        connections = _shared.setdefault(origin, Connections(base))
    return connections


def close_connections() -> None:
    """Close every connection that the clients of this process share; the next request opens new ones."""
    while _shared:
        _shared.popitem()[1].close()


def _start_from_scratch() -> None:
    _inherited.extend(_shared.values())
    _shared.clear()


os.register_at_fork(after_in_child=_start_from_scratch)
atexit.register(close_connections)


# --- outages ---

_lock = threading.Lock()
_begun: dict[str, tuple[float, bool]] = {}
"""Since when an address does not answer, and whether that was said."""
_ended: dict[str, None] = {}
_known: set[str] = set()


def growing_delays(address: str, deadline: float) -> Iterator[float]:
    """Seconds to wait before each further attempt, as long as there is time for one before the deadline (of time.monotonic)."""
    delay = FIRST_DELAY
    if address not in _known:
        deadline = min(deadline, time.monotonic() + STRANGER_SECONDS)
    while (left := deadline - time.monotonic()) > 0:
        yield min(delay, left)
        delay = min(2 * delay, LONGEST_DELAY)


def note_silence(address: str, problem: str, timeout: float) -> None:
    """An attempt has failed; said once for an address that has been silent for a moment."""
    with _lock:
        since, said = _begun.setdefault(address, (time.monotonic(), False))
        if said or time.monotonic() - since < SAID_AFTER:
            return
        _begun[address] = since, True
    _LOG.warning("%s does not answer (%s); trying again for up to %g s", address, problem, timeout)


def note_answer(address: str) -> None:
    """It has answered."""
    _known.add(address)
    if address not in _begun:  # the usual case, without the lock
        return
    with _lock:
        since, said = _begun.pop(address, (0.0, False))
        if said:
            _ended[address] = None
    if said:
        _LOG.warning("%s answers again, after %.1f s", address, time.monotonic() - since)


def take_outages() -> list[str]:
    """The addresses that were away and came back since the last call."""
    with _lock:
        found = list(_ended)
        _ended.clear()
    return found
