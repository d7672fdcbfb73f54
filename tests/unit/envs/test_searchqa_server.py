"""Our own retrieval server over real HTTP: both shapes answer as the index does, and bad requests get one line."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from tether.core.http_client import close_connections
from tether.envs.searchqa import server as server_module
from tether.envs.searchqa.client import RemoteRetriever, RetrieverError
from tether.envs.searchqa.corpus import Document, of_documents
from tether.envs.searchqa.index import SearchIndex, open_index
from tether.envs.searchqa.server import create_app

DOCUMENTS = [
    Document("a", "Long Bridge", "It spans the river and was built by Henry Platt."),
    Document("b", "Henry Platt", "An engineer who built bridges."),
    Document("c", "", "Bridges without a title."),
    Document("d", "", '"Quoted"\nbridge'),
]


@contextmanager
def serving(index: SearchIndex, token: str | None = None) -> Iterator[str]:
    config = uvicorn.Config(create_app(index, token), port=0, log_level="warning", access_log=False, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        close_connections()
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SearchIndex]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TETHER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield open_index(of_documents(DOCUMENTS))


@pytest.fixture(scope="module")
def url(index: SearchIndex) -> Iterator[str]:
    with serving(index) as address:
        yield address


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url) as client:
        yield client


def test_both_shapes_give_what_the_index_gives(index: SearchIndex, url: str) -> None:
    for query in ("Who built the Long Bridge?", "bridges", "the of", "", "quoted bridge", 'tricky "signs" \\ ü'):
        for top_k in (1, 3, 10):
            expected = index.search(query, top_k)
            assert RemoteRetriever(url, "queries").search(query, top_k) == expected
            assert RemoteRetriever(url, "query").search(query, top_k) == expected


def test_queries_shape_exactly(index: SearchIndex, http: httpx.Client) -> None:
    best = index.search("Henry Platt", 1)[0]
    document = {"id": "b", "contents": '"Henry Platt"\nAn engineer who built bridges.'}
    reply = http.post("/retrieve", json={"queries": ["Henry Platt", "zzz"], "topk": 1, "return_scores": True})
    assert (reply.status_code, reply.json()) == (200, {"result": [[{"document": document, "score": best.score}], []]})
    reply = http.post("/retrieve", json={"queries": ["Henry Platt"], "topk": 1, "return_scores": False})
    assert reply.json() == {"result": [[document]]}
    assert http.post("/retrieve", json={"queries": ["Henry Platt"], "topk": 1}).json() == {"result": [[document]]}
    assert len(http.post("/retrieve", json={"queries": ["bridge"]}).json()["result"][0]) == 3
    assert http.post("/retrieve", json={"queries": [], "topk": None}).json() == {"result": []}


def test_query_shape_exactly(index: SearchIndex, http: httpx.Client) -> None:
    best = index.search("Henry Platt", 1)[0]
    result = {"id": "b", "content": '"Henry Platt"\nAn engineer who built bridges.', "score": best.score}
    reply = http.post("/retrieve", json={"query": "Henry Platt", "top_k": 1})
    assert (reply.status_code, reply.json()) == (200, {"query": "Henry Platt", "method": "bm25", "results": [result], "num_results": 1})
    assert http.post("/retrieve", json={"query": "bridge"}).json()["num_results"] == 4
    assert http.post("/retrieve", json={"query": ""}).json() == {"query": "", "method": "bm25", "results": [], "num_results": 0}


def test_health(http: httpx.Client) -> None:
    expected = {"status": "healthy", "corpus_size": 4, "index_type": "bm25", "index_loaded": True}
    assert http.get("/health").json() == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b"\xff", "the body is not JSON"),
        (b"[" * 100_000, "the body is nested too deeply"),
        (b"[]", "the body is a list; send a JSON object"),
        (b"{}", "missing 'queries' (a list) or 'query' (a text) in the request"),
        (b'"query"', "the body is a str"),
        (b'{"query": 5}', "key 'query': got 5; it should be an instance of str"),
        (b'{"queries": "q"}', "key 'queries': got 'q'; it should be a valid list"),
        (b'{"queries": ["q", 5]}', "key 'queries.1': got 5; it should be an instance of str"),
        (b'{"queries": ["q"], "topk": 0}', "key 'topk': got 0; it should be greater than or equal to 1"),
        (b'{"queries": ["q"], "topk": true}', "key 'topk': got True; it should be a valid integer"),
        (b'{"queries": ["q"], "topk": 1e99}', "key 'topk': got 1e+99; it should be a valid integer"),
        (b'{"query": "q", "top_k": "5"}', "key 'top_k': got '5'; it should be a valid integer"),
        (b'{"queries": ["q"], "return_scores": "yes"}', "key 'return_scores': got 'yes'; it should be a valid boolean"),
        (json.dumps({"queries": ["q"] * 5000}).encode(), "should have at most 4096 items"),
    ],
)
def test_bad_bodies(body: bytes, message: str, http: httpx.Client) -> None:
    reply = http.post("/retrieve", content=body)
    assert reply.status_code == 400
    assert set(reply.json()) == {"error"}
    assert message in reply.json()["error"] and "\n" not in reply.json()["error"]


def test_surrogates_in_a_query_are_harmless(http: httpx.Client) -> None:
    reply = http.post("/retrieve", content=b'{"queries": ["bridge \\ud800"]}')
    assert reply.status_code == 200 and len(reply.json()["result"][0]) == 3
    reply = http.post("/retrieve", content=b'{"query": "bridge \\ud800"}')
    assert reply.status_code == 200 and reply.json()["num_results"] == 4


def test_a_body_that_is_too_large(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_BODY_BYTES", 100)
    reply = http.post("/retrieve", json={"query": "x" * 100})
    assert (reply.status_code, reply.json()) == (413, {"error": "the body is longer than 100 bytes; send less at a time"})
    assert http.post("/retrieve", json={"query": "bridge"}).status_code == 200


def test_other_paths_and_methods(http: httpx.Client) -> None:
    assert (http.get("/nowhere").status_code, http.get("/nowhere").json()) == (404, {"error": "Not Found"})
    assert (http.get("/retrieve").status_code, http.get("/retrieve").json()) == (405, {"error": "Method Not Allowed"})
    assert http.get("/docs").status_code == 404 and http.get("/openapi.json").status_code == 404


def test_only_this_machine_is_answered_without_a_token(http: httpx.Client) -> None:
    reply = http.post("/retrieve", json={"query": "bridge"}, headers={"Host": "evil.example:8000"})
    assert reply.status_code == 403 and "only answers to the names of this machine" in reply.json()["error"]
    assert http.post("/retrieve", json={"query": "bridge"}, headers={"Host": "localhost"}).status_code == 200


def test_token(index: SearchIndex) -> None:
    with serving(index, "hush") as address, httpx.Client(base_url=address) as client:
        for given in (b"", b"Bearer hus", b"hush", b"Bearer hush2", b"\xff"):
            reply = client.post("/retrieve", json={"query": "bridge"}, headers={b"Authorization": given})
            assert reply.status_code == 401 and reply.headers["WWW-Authenticate"] == "Bearer"
            assert "wants its token" in reply.json()["error"]
        good: dict[str, Any] = {"Authorization": "Bearer hush", "Host": "elsewhere.example"}
        assert client.post("/retrieve", json={"query": "bridge"}, headers=good).status_code == 200
        assert client.get("/health").status_code == 200
        assert RemoteRetriever(address, token="hush").search("bridge", 1)
        with pytest.raises(RetrieverError, match="answered 401: this server wants its token"):
            RemoteRetriever(address).search("bridge", 1)


def test_more_documents_than_fit_into_memory_are_refused(http: httpx.Client) -> None:
    reply = http.post("/retrieve", json={"queries": ["bridge"] * 4096, "topk": 1000})
    assert reply.status_code == 400 and "ask for more than 50000 documents; send fewer at a time" in reply.json()["error"]


def test_many_at_once(url: str, index: SearchIndex) -> None:
    expected = index.search("bridges", 3)
    wrong: list[object] = []

    def work() -> None:
        for _ in range(10):
            if RemoteRetriever(url).search("bridges", 3) != expected:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close_connections()
    assert not wrong
