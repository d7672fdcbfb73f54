"""Retrieval servers that are down, slow, or talk nonsense, played by real servers on this machine: each ends the step with its reason."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tether.core.http_client import close_connections
from tether.envs.searchqa import client
from tether.envs.searchqa.client import Api, RemoteRetriever, RetrieverError
from tether.envs.searchqa.corpus import Document, Hit, Question
from tether.envs.searchqa.env import SearchQA, SearchQAOptions

Respond = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Notes the request and leaves the answer to the server's `respond`."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, json.loads(body), self.headers.get("Authorization")))
        self.server.respond(self)

    def answer(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """A retrieval server whose manners are up to the test."""

    daemon_threads = True

    def __init__(self, respond: Respond) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.respond = respond
        self.requests: list[tuple[str, Any, str | None]] = []
        self.connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def get_request(self) -> Any:
        self.connections += 1
        return super().get_request()

    def handle_error(self, *_: object) -> None:
        pass  # clients that hang up are what these tests are about


@contextmanager
def serving(respond: Respond) -> Iterator[Server]:
    server = Server(respond)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        close_connections()
        server.shutdown()
        thread.join()
        server.server_close()


def saying(value: Any, status: int = 200) -> Respond:
    return lambda handler: handler.answer(value if isinstance(value, bytes) else json.dumps(value).encode(), status)


QUERIES = {
    "result": [[{"document": {"id": "7", "contents": '"T"\ntext'}, "score": 2.5}, {"document": {"id": 8, "contents": "plain"}, "score": 1}]]
}
QUERY = {"query": "q", "method": "dense", "results": [{"id": "doc_1", "content": '"T"\ntext', "score": 0.5}], "num_results": 1}


# --- the two shapes ---


def test_queries_shape() -> None:
    with serving(saying(QUERIES)) as server:
        hits = RemoteRetriever(server.url).search("who?", 3)
        assert hits == [Hit(Document("7", "T", "text"), 2.5), Hit(Document("8", "", "plain"), 1.0)]
        assert server.requests == [("/retrieve", {"queries": ["who?"], "topk": 3, "return_scores": True}, None)]


def test_query_shape() -> None:
    with serving(saying(QUERY)) as server:
        assert RemoteRetriever(server.url, "query").search("who?", 3) == [Hit(Document("doc_1", "T", "text"), 0.5)]
        assert server.requests == [("/retrieve", {"query": "who?", "top_k": 3}, None)]


@pytest.mark.parametrize(
    ("api", "answer", "hits"),
    [
        ("queries", {"result": [[{"id": "1", "contents": "a"}]]}, [Hit(Document("1", "", "a"), 0.0)]),  # without scores
        ("queries", {"result": [[{"document": {"title": "T", "text": "a"}, "score": 1.0}]]}, [Hit(Document("0", "T", "a"), 1.0)]),
        ("queries", {"result": [[]]}, []),
        ("query", {"results": []}, []),
        ("query", {"results": [{"content": "a"}]}, [Hit(Document("0", "", "a"), 0.0)]),
    ],
)
def test_leaner_answers_do_too(api: Api, answer: Any, hits: list[Hit]) -> None:
    with serving(saying(answer)) as server:
        assert RemoteRetriever(server.url, api).search("q", 3) == hits


def test_more_than_was_asked_for_is_cut() -> None:
    with serving(saying(QUERIES)) as server:
        assert [hit.document.id for hit in RemoteRetriever(server.url).search("q", 1)] == ["7"]


@pytest.mark.parametrize("ending", ["", "/", "/retrieve", "/retrieve/"])
def test_the_address_may_name_the_path(ending: str) -> None:
    with serving(saying(QUERIES)) as server:
        RemoteRetriever(server.url + ending).search("q", 1)
        assert server.requests[0][0] == "/retrieve"


def test_the_token_travels_as_bearer() -> None:
    with serving(saying(QUERIES)) as server:
        RemoteRetriever(server.url, token="hush").search("q", 1)
        assert server.requests[0][2] == "Bearer hush"


def test_connections_are_shared() -> None:
    with serving(saying(QUERIES)) as server:
        for _ in range(5):
            RemoteRetriever(server.url).search("q", 1)
        assert (len(server.requests), server.connections) == (5, 1)


def test_this_machine_is_not_reached_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused, serving(saying(QUERIES)) as server:
        unused.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert len(RemoteRetriever(server.url, timeout=2).search("q", 2)) == 2
        assert len(server.requests) == 1


# --- failures ---


def _slow(handler: Handler) -> None:
    time.sleep(3)  # far more than the client waits: on a busy machine a short one is over before the client looks
    handler.answer(json.dumps(QUERIES).encode())


def _trickle(handler: Handler) -> None:
    """Always a little, never all of it: no single wait is long."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(20):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def _hang_up(handler: Handler) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def _cut_short(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"result"')
    _hang_up(handler)


def _flood(handler: Handler) -> None:
    handler.answer(b" " * 5000)


@pytest.mark.parametrize(
    ("respond", "message"),
    [
        (_slow, "did not answer within 0.3 s; raise retriever_timeout"),
        (_trickle, "did not finish within 0.3 s; raise retriever_timeout"),
        (_hang_up, "broke off ("),
        (_cut_short, "broke off ("),
        (_flood, "answered more than 2000 bytes"),
        (saying(b"<html>hello</html>"), "answered something that is not JSON: b'<html>hello</html>'"),
        (saying(b"\xff\xfe"), "answered something that is not JSON"),
        (saying({"error": "index\nnot loaded"}, 500), "answered 500: index not loaded"),
        (saying(b"Internal Server Error", 500), "answered 500"),
        (saying({"error": "no"}, 401), "answered 401: no"),
        (saying({}, 404), "answered 404"),
        (saying(b"", 302), "answered 302"),
        (saying(QUERY), 'in another shape than retriever_api=queries (no usable \'result\' in {"query": "q"'),
        (saying([]), "in another shape than retriever_api=queries (no usable 'result' in [])"),
        (saying(None), "in another shape"),
        (saying({"result": None}), "in another shape"),
        (saying({"result": []}), "in another shape"),
        (saying({"result": [[], []]}), "in another shape"),
        (saying({"result": ["x"]}), "in another shape"),
        (saying({"result": [[{"document": {"id": "1"}, "score": 1}]]}), "in another shape"),
        (saying({"result": [[{"document": {"contents": 5}, "score": 1}]]}), "in another shape"),
        (saying({"result": [[{"document": {"contents": "a"}, "score": "high"}]]}), "in another shape"),
        (saying({"result": [[{"document": "text", "score": 1}]]}), "in another shape"),
        (saying({"result": [[5]]}), "in another shape"),
    ],
)
def test_what_goes_wrong_ends_the_step_with_its_reason(respond: Respond, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 2000)
    seconds = 0.3 if respond in (_slow, _trickle) else 30.0  # a busy machine must not turn another answer into a late one
    with serving(respond) as server:
        env = SearchQA(
            SearchQAOptions(retriever=server.url, retriever_timeout=seconds), generator=lambda seed, split: Question("q?", ("a",))
        )
        env.reset(0)
        with pytest.raises(RetrieverError) as caught:
            env.step("search[anything]")
    assert str(caught.value).startswith(f"searchqa: the retriever {server.url} ")
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "answer", [QUERIES, {"results": {}}, {"results": [{"id": "1"}]}, {"results": ["a"]}, {"results": [{"content": None}]}]
)
def test_another_shape_than_query(answer: Any) -> None:
    with serving(saying(answer)) as server, pytest.raises(RetrieverError, match="retriever_api=query "):
        RemoteRetriever(server.url, "query").search("q", 3)


def test_a_server_that_is_down() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(
        RetrieverError, match=rf"the retriever http://127.0.0.1:{port} cannot be reached \(.*start it \(tether serve-search\)"
    ):
        RemoteRetriever(f"http://127.0.0.1:{port}", timeout=2).search("q", 3)
    close_connections()


def test_the_next_search_may_work_again() -> None:
    with serving(saying(b"", 500)) as server:
        with pytest.raises(RetrieverError):
            RemoteRetriever(server.url).search("q", 1)
        server.respond = saying(QUERIES)
        assert len(RemoteRetriever(server.url).search("q", 2)) == 2


def test_tokens_from_the_environment_and_from_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(saying(QUERIES)) as server:
        monkeypatch.setenv("TETHER_TOKEN", "outer")
        for token in (None, "inner"):
            env = SearchQA(
                SearchQAOptions(retriever=server.url, retriever_token=token), generator=lambda seed, split: Question("q?", ("a",))
            )
            env.reset(0)
            env.step("search[x]")
        assert [request[2] for request in server.requests] == ["Bearer outer", "Bearer inner"]
