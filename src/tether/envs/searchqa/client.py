"""Search over HTTP, in the two request formats of public retrieval servers.

queries (Search-R1): POST /retrieve {"queries": [q], "topk": k, "return_scores": true} -> {"result": [[{"document", "score"}, ...]]}
query (rllm and upstream): POST /retrieve {"query": q, "top_k": k} -> {"results": [{"id", "content", "score"}, ...]}

A server that is down or restarts is waited for, up to the time-out. One that stays away, is slow, or replies in another format raises
`RetrieverError`, which ends the episode with its reason; a failure is never reported as a search without results.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from tether.core.errors import TetherError
from tether.core.http_client import HttpClient, Unanswered
from tether.envs.searchqa.corpus import Document, Hit

Api = Literal["queries", "query"]
T = TypeVar("T")

TOKEN_VARIABLES = ("TETHER_RETRIEVER_TOKEN", "TETHER_TOKEN")
"""Where the token of a retrieval server comes from, the first that is set."""
MAX_ANSWER_BYTES = 32_000_000


class RetrieverError(TetherError):
    """The retrieval server failed."""


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
        base = self.url.rstrip("/").removesuffix("/retrieve")  # Search-R1's own settings name the whole path, ours the server
        client = HttpClient(base, token=self.token, timeout=self.timeout, most_bytes=MAX_ANSWER_BYTES)
        try:
            reply = client.request("POST", "/retrieve", content=json.dumps(body).encode())
        except Unanswered as error:
            raise self._error(self._failure(error)) from None
        if reply.status != 200:
            raise self._error(str(reply))
        try:
            return json.loads(reply.content)
        except (ValueError, RecursionError):
            raise self._error(f"answered something that is not JSON: {reply.content[:60]!r}") from None

    def _failure(self, error: Unanswered) -> str:
        if error.kind == "slow":
            ended = "finish" if error.reply else "answer"
            return f"did not {ended} within {self.timeout:g} s; raise retriever_timeout, or fix the server"
        if error.kind == "unreachable":
            return f"cannot be reached ({error}); start it (tether serve-search), or correct retriever"
        return f"broke off ({error})" if error.reply is None else str(error)

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
    (items,) = _checked(result, list)
    return [_batch_hit(_checked(item, dict), number) for number, item in enumerate(_checked(items, list))]


def _batch_hit(item: dict[str, Any], number: int) -> Hit:
    document, score = (_checked(item["document"], dict), float(item["score"])) if "document" in item else (item, 0.0)
    id = str(document.get("id", number))
    if "contents" not in document:
        return Hit(Document(id, _checked(document.get("title", ""), str), _checked(document["text"], str)), score)
    return Hit(Document.of_contents(id, _checked(document["contents"], str)), score)


def _single_hits(results: Any) -> list[Hit]:
    items = [_checked(item, dict) for item in _checked(results, list)]
    return [
        Hit(Document.of_contents(str(item.get("id", number)), _checked(item["content"], str)), float(item.get("score", 0.0)))
        for number, item in enumerate(items)
    ]


def _checked(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError
    return value
