"""Requests to an environment server: pooled connections, deadlines, retries, and one line for every failure.

All environments of a process that use the same server share its connections. A forked child starts without connections, because two
processes cannot share a socket. Every request of the protocol can be sent again without harm (a step carries its turn). So a request is
sent again, with growing delays and until its deadline, when the connection breaks or the server answers that it is busy. A server that is
slow, gone for longer, or does not follow the protocol raises `HttpEnvError`. A request that the server refuses as the caller's mistake raises `BadInput`
with the server's words.
"""

import atexit
import os
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from tether.core.errors import BadInput, TetherError
from tether.core.http import checked_token, is_loopback
from tether.core.outages import delays, note_answer, note_silence
from tether.envs.remote.wire import WireError, decode, encode

RETRY_STATUSES = (429, 502, 503)
MAX_REPLY = 64 * 2**20
"""Bytes of a reply; a large picture has a few million."""
KEEP_ALIVE = 30.0
"""Seconds that an unused connection is kept; shorter than servers keep theirs, so that it is seldom found closed."""
CLOSING_SECONDS = 1.0
"""Seconds for closing a session, and for closing all of them when the process ends."""


class HttpEnvError(TetherError):
    """An environment server failed: it is down, too slow, has lost the session, or does not follow the protocol."""


class SessionLost(HttpEnvError):
    """The server does not know the session (or the path) of a request."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a served environment, with the token and the deadline of requests."""

    base: str
    """The URL without a slash at its end; may hold a path."""
    token: str | None
    timeout: float
    """Seconds that one request may take, further attempts included."""

    def end_session(self, session: str) -> None:
        """Tell the server that a session is not used any more; one attempt, because the server drops idle sessions by itself."""
        status, data = 0, b""
        try:
            status, data = self._attempt("DELETE", f"/v1/sessions/{session}", None, None, time.monotonic() + CLOSING_SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise HttpEnvError(f"{self.base} cannot be asked ({error})") from error
        self._read_reply(status, data)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Send a request; returns the JSON object of the reply."""
        deadline = time.monotonic() + self.timeout
        content = None if body is None else encode(body)
        waits = delays(self.base, deadline)
        problem = ""
        while True:
            status, data = 0, b""
            try:
                status, data = self._attempt(method, path, content, query, deadline)
            except httpx.TimeoutException:  # with the last attempt the time is up; what the one before it met says more
                raise HttpEnvError(f"{problem}, for {self.timeout:g} s, the option timeout") if problem else self._too_slow() from None
            except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError) as error:
                problem = f"nothing answers at {self.base} ({error}); start it with `tether serve-env NAME`, or check the address"
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise HttpEnvError(f"{self.base} cannot be asked ({error})") from error
            if status and status not in RETRY_STATUSES:
                note_answer(self.base)
                return self._read_reply(status, data)
            if status:
                problem = f"{self.base} answered {status}{_reason(data)}"
            delay = next(waits, None)
            if delay is None:
                raise HttpEnvError(problem)
            note_silence(self.base, f"status {status}" if status else "no connection", self.timeout)
            time.sleep(delay)

    def _attempt(
        self, method: str, path: str, content: bytes | None, query: Mapping[str, str] | None, deadline: float
    ) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if content is not None else {}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        left = max(0.001, deadline - time.monotonic())
        data = bytearray()
        client = _state.client(self.base)
        with client.stream(method, self.base + path, content=content, params=query, headers=headers, timeout=left) as response:
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > MAX_REPLY:
                    raise HttpEnvError(f"{self.base} answered with more than {MAX_REPLY} bytes; is it an environment server?")
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the reply takes too long")
        return response.status_code, bytes(data)

    def _read_reply(self, status: int, data: bytes) -> dict[str, Any]:
        """The object of a reply; raises the error that the reply reports."""
        if status in (401, 403):
            raise BadInput(f"{self.base} refused{_reason(data)}; give the server's token as option token or in TETHER_TOKEN")
        if status == 400 and _reason(data):
            raise BadInput(_reason(data).removeprefix(": "))
        if status == 404:
            raise SessionLost(f"{self.base} answered 404{_reason(data)}")
        if status != 200:
            raise HttpEnvError(f"{self.base} answered {status}{_reason(data)}")
        try:
            value = decode(data)
        except WireError as error:
            raise self.garbled(error) from None
        if not isinstance(value, dict):
            raise self.garbled(f"is a {type(value).__name__}")
        return value

    def garbled(self, what: object) -> HttpEnvError:
        return HttpEnvError(f"{self.base} does not answer as an environment server does: the reply {what}")

    def _too_slow(self) -> HttpEnvError:
        return HttpEnvError(f"{self.base} did not answer within {self.timeout:g} s, the option timeout")


def endpoint(url: str, token: str | None, timeout: float) -> Endpoint:
    """The endpoint of a URL, checked before the first request."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a broken IPv6 address
        known = False
    if not known or parts.query or parts.fragment or parts.username is not None or any(letter.isspace() for letter in url):
        raise BadInput(f"'{url}' is not the address of an environment server; write it as http://HOST:PORT or https://HOST/PATH")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise BadInput(f"http option 'timeout': got {timeout!r}; give a number of seconds above 0")
    return Endpoint(url.rstrip("/"), None if token is None else checked_token(token), float(timeout))


def _reason(data: bytes) -> str:
    """The message of an error reply with a colon before it; empty where there is none."""
    try:
        value = decode(data)
    except WireError:
        return ""
    said = value.get("error") if isinstance(value, dict) else None
    return f": {said}" if isinstance(said, str) and said else ""


# --- what the environments of one process share ---

SessionKey = tuple[str, str | None, bytes]
"""Sessions with equal keys are interchangeable: address, token and options."""


class _ProcessState:
    """The connections of this process, and the sessions that no environment uses any more."""

    def __init__(self, inherited: "_ProcessState | None" = None) -> None:
        self._clients: dict[str, httpx.Client] = {}
        # `HttpEnv.__del__` appends here, and the garbage collector may call it at any point, also inside code that holds a lock. A lock
        # could deadlock then. Appending to a deque and popping from it are atomic, so no lock is needed.
        self.parked: defaultdict[SessionKey, deque[tuple[Endpoint, str]]] = defaultdict(deque)
        self._inherited = inherited  # its sockets belong to the parent process; this reference keeps them from being closed here

    def client(self, base: str) -> httpx.Client:
        parts = urlsplit(base)
        origin = f"{parts.scheme}://{parts.netloc}"
        client = self._clients.get(origin)
        if client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=128, keepalive_expiry=KEEP_ALIVE)
            # A proxy that the environment variables name cannot reach this machine's own servers.
            made = httpx.Client(limits=limits, trust_env=not is_loopback(parts.hostname or ""), verify=parts.scheme == "https")
            client = self._clients.setdefault(origin, made)  # if another thread was faster, `made` is dropped; it holds no connection
        return client

    def close(self) -> None:
        """End the parked sessions, as far as that takes no longer than a moment, and close the connections."""
        deadline = time.monotonic() + CLOSING_SECONDS
        for waiting in self.parked.values():
            while waiting and time.monotonic() < deadline:
                place, session = waiting.pop()
                try:
                    self.client(place.base).delete(
                        f"{place.base}/v1/sessions/{session}", headers=_bearer(place), timeout=CLOSING_SECONDS / 2
                    )
                except httpx.HTTPError:  # the server drops idle sessions by itself
                    break
        for client in self._clients.values():
            client.close()


def _bearer(place: Endpoint) -> dict[str, str]:
    return {} if place.token is None else {"Authorization": f"Bearer {place.token}"}


_state = _ProcessState()


def process_state() -> _ProcessState:
    """What the environments of this process share."""
    return _state


def _start_from_scratch() -> None:
    global _state
    _state = _ProcessState(inherited=_state)


os.register_at_fork(after_in_child=_start_from_scratch)
atexit.register(lambda: _state.close())
