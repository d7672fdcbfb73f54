"""A model server's address: requests with a token, a deadline and retries, and one line for every failure.

What may pass (too many requests, a restarting server, a lost connection) is tried again after a pause; what the server refuses as the
caller's mistake is not. Scorers and engines that work over HTTP share this.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Self

from tether.core.errors import BadInput, ModelUnavailable, did_you_mean
from tether.core.http_client import HttpClient, Reply, Unanswered, check_address

RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each further attempt."""
PASSING_STATUSES = (408, 425, 429, 500, 502, 503, 504)
LONGEST_PAUSE = 30.0
"""Seconds; a server that asks for more patience than this is not waited for, unless the caller has more."""
MOST_REPLY_BYTES = 2**28
"""A longer reply is none of a model: a server must not fill the memory."""
MOST_LISTED = 20
"""Models that a message names."""


class ServerUnreachable(ModelUnavailable):
    """Nothing answers, or nothing but errors that may pass; another server may do. `cause`: what happened to the last attempt."""

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause or message


class Forbidden(ModelUnavailable):
    """The server answered 403: to this key, or because the route is switched off."""


class NoSuchRoute(BadInput):
    """The server answered 404: it has no such route, or no such model."""


class Conflict(BadInput):
    """The server answered 409: what the request belongs to is over, or another client's."""


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
        if not check_address(url):
            raise BadInput(f"'{url}' is not a server's address; give one such as http://localhost:8000")
        if parallel < 1 or not timeout > 0:
            raise BadInput(f"parallel must be at least 1 and timeout above 0 seconds, got {parallel} and {timeout}")
        self.base = url.rstrip("/").removesuffix("/v1")
        self._client = HttpClient(
            self.base, token=token, timeout=timeout, later=PASSING_STATUSES, parallel=parallel, most_bytes=MOST_REPLY_BYTES
        )
        self._token_source, self._longest_pause = token_source, longest_pause

    @property
    def token(self) -> str | None:
        return self._client.token

    def __enter__(self) -> Self:
        self._client.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connections; requests that other threads still wait for end with an error."""
        self._client.close()

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        content: bytes | None = None,
        content_type: str = "application/octet-stream",
        delays: Sequence[float] | None = None,
        timeout: float | None = None,
        stranger: bool = False,
        on_data: Callable[[bytearray], None] | None = None,
    ) -> dict[str, Any]:
        """The object that the server answers with; what may pass is tried again after each of the delays.

        Args:
            method: GET or POST.
            path: of the route, such as /v1/models.
            body: sent as JSON.
            content: sent as it is, instead of a body, and what it is.
            content_type: what the content is.
            delays: seconds before each further attempt; None for RETRY_DELAYS.
            timeout: seconds for this request; None for the endpoint's own.
            stranger: no such request has been answered yet, so that fewer attempts are made.
            on_data: takes the answer from the bytes that have come, piece by piece (HttpClient.request).
        """
        delays = RETRY_DELAYS if delays is None else delays
        kind = "application/json" if content is None else content_type
        if body is not None:
            content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        try:
            reply = self._client.request(
                method,
                path,
                content=content,
                content_type=kind,
                timeout=timeout,
                delays=delays,
                longest_pause=self._longest_pause,
                stranger=stranger,
                on_data=on_data,
            )
        except Unanswered as error:
            if error.kind == "closed":
                raise ServerUnreachable(f"the request to the server at {self.base} was given up ({error})") from error
            problem = self._words(error.reply) if error.kind == "later" and error.reply is not None else str(error)
            attempts = f"{error.attempts} attempt{'s' * (error.attempts > 1)}"
            raise ServerUnreachable(
                f"the server at {self.base} cannot be used, {attempts}: {problem}; check that it runs and is not overloaded", problem
            ) from error
        if not reply.is_success:
            raise self._refusal(reply.status, self._words(reply))
        return self._decoded(reply)

    def _refusal(self, status: int, problem: str) -> BadInput:
        if status in (401, 403):
            kind = Forbidden if status == 403 else ModelUnavailable
            return kind(f"the server at {self.base} refuses the key ({problem}); {self._token_source}")
        refused = {404: NoSuchRoute, 409: Conflict}.get(status, BadInput)
        return refused(f"the server at {self.base} refuses the request ({problem})")

    def _words(self, reply: Reply) -> str:
        """What the server says is wrong, in one line. A server may quote the key that it was sent; no message shows it."""
        said = reply.reason or " ".join(self._text(reply).split())
        return f"HTTP {reply.status}: {self._without_key(said)[:300] or 'no words'}"

    def _without_key(self, text: str) -> str:
        return text.replace(self._client.token, "[the key]") if self._client.token else text

    @staticmethod
    def _text(reply: Reply) -> str:
        return reply.content.decode("utf-8", "replace")

    def _decoded(self, reply: Reply) -> dict[str, Any]:
        if not reply.content:
            return {}
        try:
            answer = json.loads(reply.content)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ModelUnavailable(
                f"the server at {self.base} answers no JSON object but '{self._without_key(self._text(reply))[:80]}'; check the address"
            )
        return answer

    def find_model(self, wanted: str | None, root: str = "/v1") -> dict[str, Any]:
        """The entry of a model in the server's list; None: the only one. A server that lists nothing is believed to have what is wanted."""
        entries = self.call("GET", f"{root}/models").get("data")
        listed = {str(entry["id"]): entry for entry in entries or () if isinstance(entry, dict) and "id" in entry}
        if wanted is not None and (not listed or wanted in listed):
            return listed.get(wanted, {"id": wanted})
        if wanted is None and len(listed) == 1:
            return next(iter(listed.values()))
        more = f" and {len(listed) - MOST_LISTED} more" if len(listed) > MOST_LISTED else ""
        names = ", ".join([*listed][:MOST_LISTED]) + more if listed else "none"
        if wanted is None:
            raise BadInput(f"the server at {self.base} has {len(listed)} models; name one behind a #: {names}")
        raise ModelUnavailable(
            f"the server at {self.base} has no model '{wanted}': {f'it has {names}' if more else did_you_mean(wanted, listed)}"
        )
