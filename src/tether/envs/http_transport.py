"""Requests to an environment server: pooled connections, time limits, retries, and every failure as one clear line.

All environments of a process that talk to the same server share its connections; a forked child begins with none, because two
processes cannot share a socket. Every request of the protocol can be sent again without harm (a step carries its turn), so broken
connections and servers that say "later" are tried a few times within the time limit. A server that is slow, gone, or answers anything
else than the protocol raises `HttpEnvError`; what it refuses as the caller's mistake is a `BadInput` with the server's words.
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
from tether.envs.http_protocol import WireError, checked_token, decode, encode, is_loopback

RETRY_DELAYS = (0.1, 0.3, 0.9)
"""Seconds before each further attempt."""
RETRY_STATUSES = (429, 502, 503)
MAX_REPLY = 64 * 2**20
"""Bytes of a reply; a large picture has a few million."""
KEEP_ALIVE = 30.0
"""Seconds that an unused connection is kept; shorter than servers keep theirs, so that it is seldom found closed."""
FAREWELL = 1.0
"""Seconds that telling servers goodbye may take when the process ends."""


class HttpEnvError(TetherError):
    """An environment server failed: it is gone, too slow, lost the session, or does not speak the protocol."""


class SessionLost(HttpEnvError):
    """The server does not know the session (or the path) that was asked for."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an environment is served, and how to ask there."""

    base: str
    """The URL without a slash at its end; may hold a path."""
    token: str | None
    timeout: float
    """Seconds that one request may take, further attempts included."""

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The object that the server answers with."""
        deadline = time.monotonic() + self.timeout
        content = None if body is None else encode(body)
        delays = iter(RETRY_DELAYS)
        while True:
            status, data, problem = 0, b"", ""
            try:
                status, data = self._attempt(method, path, content, query, deadline)
            except httpx.TimeoutException:
                raise self._too_slow() from None
            except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError) as error:
                problem = f"nothing answers at {self.base} ({error}); start it with `tether serve-env NAME`, or check the address"
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise HttpEnvError(f"{self.base} cannot be asked ({error})") from error
            if status and status not in RETRY_STATUSES:
                return self._opened(status, data)
            delay = next(delays, None)
            if delay is None or time.monotonic() + delay > deadline:
                raise HttpEnvError(problem or f"{self.base} answered {status}{_reason(data)}")
            time.sleep(delay)

    def _attempt(
        self, method: str, path: str, content: bytes | None, query: Mapping[str, str] | None, deadline: float
    ) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if content is not None else {}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        left = max(0.001, deadline - time.monotonic())
        data = bytearray()
        client = _here.client(self.base)
        with client.stream(method, self.base + path, content=content, params=query, headers=headers, timeout=left) as response:
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > MAX_REPLY:
                    raise HttpEnvError(f"{self.base} answered with more than {MAX_REPLY} bytes; is it an environment server?")
                if time.monotonic() > deadline:
                    raise self._too_slow()
        return response.status_code, bytes(data)

    def _opened(self, status: int, data: bytes) -> dict[str, Any]:
        """The object of a reply, or the error that it tells of."""
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
    """Where a URL points, checked before anything is asked there."""
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
    """What an error reply says, with a colon before it; nothing where it says nothing."""
    try:
        value = decode(data)
    except WireError:
        return ""
    said = value.get("error") if isinstance(value, dict) else None
    return f": {said}" if isinstance(said, str) and said else ""


# --- what the environments of one process share ---

Place = tuple[str, str | None, bytes]
"""A kind of session: address, token and options."""


class _Here:
    """This process's connections, and sessions that no environment uses any more."""

    def __init__(self, inherited: "_Here | None" = None) -> None:
        self._clients: dict[str, httpx.Client] = {}
        # A deque takes and gives items in one go, so no lock is held while garbage is collected in the middle of it.
        self.parked: defaultdict[Place, deque[tuple[Endpoint, str]]] = defaultdict(deque)
        self._inherited = inherited  # its sockets belong to the parent: kept alive so that nobody closes them here

    def client(self, base: str) -> httpx.Client:
        parts = urlsplit(base)
        origin = f"{parts.scheme}://{parts.netloc}"
        client = self._clients.get(origin)
        if client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=128, keepalive_expiry=KEEP_ALIVE)
            # A proxy that the environment variables name cannot reach this machine's own servers.
            made = httpx.Client(limits=limits, trust_env=not is_loopback(parts.hostname or ""), verify=parts.scheme == "https")
            client = self._clients.setdefault(origin, made)  # if another thread was faster, this one is never used and holds nothing
        return client

    def close(self) -> None:
        """Give parked sessions back, as far as that can be done at once, and close the connections."""
        deadline = time.monotonic() + FAREWELL
        for waiting in self.parked.values():
            while waiting and time.monotonic() < deadline:
                place, session = waiting.pop()
                try:
                    self.client(place.base).delete(f"{place.base}/v1/sessions/{session}", headers=_bearer(place), timeout=FAREWELL / 2)
                except httpx.HTTPError:  # the server drops what is left by itself, in time
                    break
        for client in self._clients.values():
            client.close()


def _bearer(place: Endpoint) -> dict[str, str]:
    return {} if place.token is None else {"Authorization": f"Bearer {place.token}"}


_here = _Here()


def here() -> _Here:
    """What the environments of this process share."""
    return _here


def _begin_afresh() -> None:
    global _here
    _here = _Here(inherited=_here)


os.register_at_fork(after_in_child=_begin_afresh)
atexit.register(lambda: _here.close())
