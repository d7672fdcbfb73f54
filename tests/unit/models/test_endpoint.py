"""A body reaches the server whole, in pieces, also when it is sent again."""

import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tether.models.endpoint import PIECE_BYTES, ModelEndpoint


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
