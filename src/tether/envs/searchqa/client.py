"""Search over HTTP, in the two request formats of public retrieval servers.

queries (Search-R1): POST /retrieve {"queries": [q], "topk": k, "return_scores": true} -> {"result": [[{"document", "score"}, ...]]}
query (rllm and upstream): POST /retrieve {"query": q, "top_k": k} -> {"results": [{"id", "content", "score"}, ...]}

A server that is down or restarts is waited for, up to the time-out. One that stays away, is slow, or replies in another format raises
`RetrieverError`, which ends the episode with its reason; a failure is never reported as a search without results. Environments of one process that use the same server share one pool of connections.
"""

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import httpx

from tether.core.errors import TetherError
from tether.core.outages import delays, note_answer, note_silence
from tether.envs.searchqa.corpus import Document, Hit

Api = Literal["queries", "query"]

TOKEN_VARIABLES = ("TETHER_RETRIEVER_TOKEN", "TETHER_TOKEN")
"""Where the token of a retrieval server comes from, the first that is set."""
RETRY_STATUSES = (429, 502, 503)
MAX_ANSWER_BYTES = 32_000_000


class RetrieverError(TetherError):
    """The retrieval server failed."""


class Gone(RetrieverError):
    """Nothing answers at the moment; a search changes nothing, so it can be sent again."""


class Retriever(Protocol):
    """An object that finds documents."""

    def search(self, query: str, top_k: int) -> list[Hit]:
        """The best documents first."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteRetriever:
    """A retrieval server, by its address."""

    url: str
    api: Api = "queries"
    timeout: float = 30.0
    """Seconds for one search, from connecting to the last byte."""
    token: str | None = None

    def search(self, query: str, top_k: int) -> list[Hit]:
        if self.api == "queries":
            answer = self._post({"queries": [query], "topk": top_k, "return_scores": True})
            return self._read(answer, "result", _batch_hits, top_k)
        answer = self._post({"query": query, "top_k": top_k})
        return self._read(answer, "results", _single_hits, top_k)

    def _post(self, body: dict[str, Any]) -> Any:
        deadline = time.monotonic() + self.timeout
        waits = delays(self.url, deadline)
        while True:
            status, content, problem = 0, b"", None
            try:
                status, content = self._attempt(body, deadline)
            except Gone as gone:
                problem = gone
            if status and status not in RETRY_STATUSES:
                break
            delay = next(waits, None)
            if delay is None:
                raise problem or self._error(f"answered {status}{_reason(content)}")
            note_silence(self.url, f"status {status}" if status else "no connection", self.timeout)
            time.sleep(delay)
        note_answer(self.url)
        if status != 200:
            raise self._error(f"answered {status}{_reason(content)}")
        try:
            return json.loads(content)
        except ValueError:
            raise self._error(f"answered something that is not JSON: {content[:60]!r}") from None

    def _attempt(self, body: dict[str, Any], deadline: float) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        with self._failures():
            # Search-R1's own settings name the whole path, ours the server.
            base = self.url.rstrip("/").removesuffix("/retrieve")
            left = max(0.001, deadline - time.monotonic())
            with _client(base).stream("POST", f"{base}/retrieve", json=body, headers=headers, timeout=left) as response:
                return response.status_code, self._body(response, deadline)

    def _body(self, response: httpx.Response, deadline: float) -> bytes:
        """The whole answer; the client's own time limit is per read, so a server that trickles has to be cut off here."""
        content = bytearray()
        for part in response.iter_bytes():
            content += part
            if time.monotonic() > deadline:
                raise self._error(f"did not finish within {self.timeout:g} s; raise retriever_timeout, or fix the server")
            if len(content) > MAX_ANSWER_BYTES:
                raise self._error(f"answered more than {MAX_ANSWER_BYTES} bytes")
        return bytes(content)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException:
            raise self._error(f"did not answer within {self.timeout:g} s; raise retriever_timeout, or fix the server") from None
        except httpx.ConnectError as error:
            raise Gone(str(self._error(f"cannot be reached ({error}); start it (tether serve-search), or correct retriever"))) from None
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            raise Gone(str(self._error(f"broke off ({type(error).__name__}: {error})"))) from None
        except httpx.HTTPError as error:
            raise self._error(f"broke off ({type(error).__name__}: {error})") from None

    def _read(self, answer: Any, key: str, hits: Any, top_k: int) -> list[Hit]:
        try:
            found: list[Hit] = hits(answer[key])
        except (KeyError, TypeError, ValueError, IndexError):
            shape = json.dumps(answer)[:80]
            raise self._error(f"answered in another shape than retriever_api={self.api} (no usable '{key}' in {shape})") from None
        return found[:top_k]

    def _error(self, what: str) -> RetrieverError:
        return RetrieverError(f"searchqa: the retriever {self.url} {what}")


def _batch_hits(result: Any) -> list[Hit]:
    """Search-R1's: one list per query; its items are documents with or without a score around them."""
    (items,) = _list(result)
    return [_batch_hit(_object(item), number) for number, item in enumerate(_list(items))]


def _batch_hit(item: dict[str, Any], number: int) -> Hit:
    document, score = (_object(item["document"]), float(item["score"])) if "document" in item else (item, 0.0)
    id = str(document.get("id", number))
    if "contents" not in document:
        return Hit(Document(id, _text(document.get("title", "")), _text(document["text"])), score)
    return Hit(Document.of_contents(id, _text(document["contents"])), score)


def _single_hits(results: Any) -> list[Hit]:
    return [
        Hit(Document.of_contents(str(item.get("id", number)), _text(item["content"])), float(item.get("score", 0.0)))
        for number, item in enumerate(map(_object, _list(results)))
    ]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return value


def _reason(content: bytes) -> str:
    """What a server says about its refusal, in one line."""
    try:
        said = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return ""
    return f": {' '.join(str(said).split())[:200]}"


_clients: dict[tuple[int, str], httpx.Client] = {}
"""By process and address: a forked child must not share its parent's connections."""
_lock = threading.Lock()


def _client(url: str) -> httpx.Client:
    key = (os.getpid(), url)
    with _lock:
        if key not in _clients:
            _clients[key] = httpx.Client(limits=httpx.Limits(max_connections=64, max_keepalive_connections=16))
        return _clients[key]


@atexit.register
def close_clients() -> None:
    """Close every connection of this process; the next search opens new ones."""
    for key in [key for key in _clients if key[0] == os.getpid()]:
        _clients.pop(key).close()
