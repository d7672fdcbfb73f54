"""A model server's address: requests with a token, a deadline and retries, and one line for every failure.

What may pass (too many requests, a restarting server, a lost connection) is tried again after a pause; what the server refuses as the
caller's mistake is not. Scorers and engines that work over HTTP share this client.
"""

import time
from calendar import timegm
from collections.abc import Iterator, Sequence
from email.utils import parsedate
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from tether.core.errors import BadInput, ModelUnavailable
from tether.core.http import checked_token, is_loopback

RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each further attempt."""
PASSING_STATUSES = (408, 425, 429, 500, 502, 503, 504)
LONGEST_PAUSE = 30.0
"""Seconds; a server that asks for more patience than this is not waited for, unless the caller has more."""
PIECE_BYTES = 2**20
"""A body is handed over in pieces: of what it is given at once, the HTTP client copies the whole rest after every write to the socket."""


class ServerUnreachable(ModelUnavailable):
    """Nothing answers, or nothing but errors that may pass; another server may do. `cause`: what happened to the last attempt."""

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause or message


class Forbidden(ModelUnavailable):
    """The server answered 403: to this key, or because the route is switched off."""


class ModelEndpoint:
    """Requests to one server. Use it as a context: connections live as long as the block.

    Args:
        url: the server's address, with or without /v1 at its end.
        token: sent as a bearer token.
        token_source: where the token comes from, in words, for the message about a refused one.
        timeout: seconds that one request may take.
        parallel: requests at the same time.
        longest_pause: seconds; a server that asks for a longer pause between two attempts is not waited for.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        token_source: str = "set OPENAI_API_KEY",
        timeout: float = 120.0,
        parallel: int = 8,
        longest_pause: float = LONGEST_PAUSE,
    ) -> None:
        try:
            parts = urlsplit(url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number, a broken IPv6 address
            known = False
        if not known:
            raise BadInput(f"'{url}' is not a server's address; give one such as http://localhost:8000")
        if parallel < 1 or not timeout > 0:
            raise BadInput(f"parallel must be at least 1 and timeout above 0 seconds, got {parallel} and {timeout}")
        self.base = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {checked_token(token)}"} if token else {}
        self._token, self._token_source, self._timeout, self._longest_pause = token, token_source, timeout, longest_pause
        self._limits = httpx.Limits(max_connections=parallel, max_keepalive_connections=parallel)
        # A proxy that the environment variables name cannot reach this machine's own servers.
        self._trust_env = not is_loopback(parts.hostname or "")
        self._verify = parts.scheme == "https"  # reading the certificates takes longer than a short request
        self._client: httpx.Client | None = None

    def __enter__(self) -> Self:
        self._client = httpx.Client(
            headers=self._headers, timeout=self._timeout, limits=self._limits, trust_env=self._trust_env, verify=self._verify
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the connections; requests that other threads still wait for end with an error."""
        if self._client is not None:
            self._client.close()

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        content: bytes | None = None,
        delays: Sequence[float] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """The object that the server answers with; what may pass is tried again after each of the delays.

        Args:
            method: GET or POST.
            path: of the route, such as /v1/models.
            body: sent as JSON.
            content: sent as it is, instead of a body.
            delays: seconds before each further attempt; None for RETRY_DELAYS.
            timeout: seconds for this request; None for the endpoint's own.
        """
        assert self._client is not None  # used as a context
        headers = None if content is None else {"Content-Type": "application/octet-stream", "Content-Length": str(len(content))}
        limit = httpx.USE_CLIENT_DEFAULT if timeout is None else timeout
        delays = RETRY_DELAYS if delays is None else delays
        for delay in (*delays, None):
            try:
                pieces = None if content is None else _pieces(content)
                reply = self._client.request(method, self.base + path, json=body, content=pieces, headers=headers, timeout=limit)
                if self._client.is_closed:  # while it connected: the pool has forgotten this connection
                    reply.extensions["network_stream"].close()
            except httpx.TransportError as error:
                problem, pause = f"{type(error).__name__}: {error}", delay
            except RuntimeError as error:  # the client was closed while this thread paused
                raise ServerUnreachable(f"the request to the server at {self.base} was given up ({error})") from error
            else:
                if reply.is_success:
                    return self._decoded(reply)
                problem, pause = f"HTTP {reply.status_code}: {self._words(reply)}", delay
                if reply.status_code not in PASSING_STATUSES:
                    raise self._refusal(reply.status_code, problem)
                if delay is not None:
                    pause = _asked_pause(reply, delay, self._longest_pause)
            if pause is None:
                break
            time.sleep(pause)
        attempts = f"{len(delays) + 1} attempts" if delays else "1 attempt"
        raise ServerUnreachable(
            f"the server at {self.base} cannot be used, {attempts}: {problem}; check that it runs and is not overloaded", problem
        )

    def _refusal(self, status: int, problem: str) -> BadInput:
        if status in (401, 403):
            kind = Forbidden if status == 403 else ModelUnavailable
            return kind(f"the server at {self.base} refuses the key ({problem}); {self._token_source}")
        if status == 404:
            return NoSuchRoute(f"the server at {self.base} refuses the request ({problem})")
        return BadInput(f"the server at {self.base} refuses the request ({problem})")

    def _words(self, reply: httpx.Response) -> str:
        """What the server says is wrong, in one line. A server may quote the key that it was sent; no message shows it."""
        try:
            answer = reply.json()
        except ValueError:
            answer = reply.text
        error = answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
        said = error.get("message", error) if isinstance(error, dict) else error
        return self._without_key(" ".join(str(said).split()))[:300] or "no words"

    def _without_key(self, text: str) -> str:
        return text.replace(self._token, "[the key]") if self._token else text

    def _decoded(self, reply: httpx.Response) -> dict[str, Any]:
        if not reply.content:
            return {}
        try:
            answer = reply.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ModelUnavailable(
                f"the server at {self.base} answers no JSON object but '{self._without_key(reply.text)[:80]}'; check the address"
            )
        return answer

    def models(self) -> list[dict[str, Any]]:
        """What GET /v1/models lists."""
        answer = self.call("GET", "/v1/models")
        entries = answer.get("data")
        return [entry for entry in entries if isinstance(entry, dict) and "id" in entry] if isinstance(entries, list) else []


class NoSuchRoute(BadInput):
    """The server answered 404: it has no such route, or no such model."""


def _asked_pause(reply: httpx.Response, delay: float, longest: float) -> float | None:
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
