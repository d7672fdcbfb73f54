"""A body reaches the server whole, in pieces, also when it is sent again; no connection outlives the endpoint."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tether.core.http_client import PIECE_BYTES
from tether.models.endpoint import ModelEndpoint, ServerUnreachable


class _Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []
        self.refusals = 0


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(503 if len(self.server.bodies) <= self.server.refusals else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 2 * PIECE_BYTES + 7])
@pytest.mark.parametrize("refusals", [0, 1])
def test_the_body_arrives_whole(server: _Server, size: int, refusals: int) -> None:
    server.refusals = refusals
    content = random.Random(size).randbytes(size)
    with ModelEndpoint(f"http://127.0.0.1:{server.server_address[1]}", token=None) as endpoint:
        endpoint.call("POST", "/update_weights", content=content, delays=(0.0,))
    assert server.bodies == [content] * (refusals + 1)


def test_a_reply_without_end_is_not_read_to_its_end(server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tether.models.endpoint.MOST_REPLY_BYTES", 1)
    with (
        ModelEndpoint(f"http://127.0.0.1:{server.server_address[1]}", token=None) as endpoint,
        pytest.raises(ServerUnreachable, match="answered more than 1 bytes"),
    ):
        endpoint.call("POST", "/v1/completions", {})


def test_a_connection_made_while_the_endpoint_is_closed_is_closed_too() -> None:
    """The queue of the server is full, so that connecting lasts until after the endpoint was closed; nothing is left open then."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        first = stack.enter_context(socket.create_connection(server.getsockname()))
        endpoint = stack.enter_context(ModelEndpoint("http://{}:{}".format(*server.getsockname()), token=None))
        answers: list[object] = []
        thread = threading.Thread(target=lambda: answers.append(endpoint.call("GET", "/v1/models", delays=())))
        thread.start()
        time.sleep(0.2)
        endpoint.close()
        stack.enter_context(server.accept()[0])  # of `first`: the kernel lets the other connect at its next try, after a second
        first.close()
        connection = stack.enter_context(server.accept()[0])
        connection.settimeout(10.0)
        assert connection.recv(4096).startswith(b"GET /v1/models")
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        thread.join()
        assert answers == [{}]
        assert connection.recv(4096) == b""  # the client's end is closed
