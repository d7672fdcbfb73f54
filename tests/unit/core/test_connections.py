"""Hostile clients of a real server: half-open, slow, endless and too many connections never keep others out, and the log stays short."""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tether.core.connections import ConnectionLimits, WithoutRepeats, affordable_connections
from tether.core.http import AccessControl, read_body, serving_app, token_for

QUICK = ConnectionLimits(max_connections=12, header_seconds=0.3, body_seconds=0.3, body_rate=1e6, max_body=200_000, write_seconds=0.3)


async def _echo(request: Request) -> Response:
    return PlainTextResponse(str(len(await read_body(request, 1_000_000))))


async def _flood(request: Request) -> Response:
    return PlainTextResponse("x" * 50_000_000)


def _app(token: str | None = None) -> Starlette:
    routes = [Route("/", _echo, methods=["GET", "POST"]), Route("/health", _echo), Route("/flood", _flood)]
    app = Starlette(routes=routes)
    app.add_middleware(AccessControl, token=token)
    return app


@pytest.fixture
def url() -> Iterator[str]:
    with serving_app(_app(), "echo", QUICK) as address:
        yield address


@contextmanager
def _connected(url: str, sent: bytes = b"") -> Iterator[socket.socket]:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(sent)
        yield connection


def _all(connection: socket.socket) -> bytes:
    """Whatever the server says until it closes the connection."""
    said = b""
    while True:
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            return said
        if not part:
            return said
        said += part


def _send_often(connection: socket.socket, data: bytes, pause: float) -> None:
    for _ in range(1000):
        connection.sendall(data)
        time.sleep(pause)


HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", HEAD + b"Content-Length: 9\r\n\r\nabc"],
    ids=["silent", "half a line", "half a head", "half a body"],
)
def test_a_half_open_connection_is_closed(url: str, sent: bytes) -> None:
    begun = time.monotonic()
    with _connected(url, sent) as connection:
        assert b" 408 " in _all(connection)
    assert 0.2 < time.monotonic() - begun < 3


def test_the_head_of_a_second_request_has_a_deadline_too(url: str) -> None:
    with _connected(url, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
        assert b"200 OK" in connection.recv(65536)
        connection.sendall(b"GET / HT")
        assert b" 408 " in _all(connection)


def test_a_body_that_trickles_is_cut_off_and_a_steady_one_is_not(url: str) -> None:
    with _connected(url, HEAD + b"Content-Length: 1000\r\n\r\n") as connection:
        begun = time.monotonic()
        with pytest.raises(ConnectionError):
            _send_often(connection, b"x", 0.05)
        assert time.monotonic() - begun < 4
    slower = ConnectionLimits(body_seconds=0.2, body_rate=10_000)
    with (
        serving_app(_app(), "echo", slower) as address,
        _connected(address, HEAD + b"Content-Length: 20000\r\nConnection: close\r\n\r\n") as slow,
    ):
        for _ in range(10):
            slow.sendall(b"x" * 2000)
            time.sleep(0.05)
        assert b"20000" in _all(slow)


def test_a_body_without_end_is_cut_off(url: str) -> None:
    with _connected(url, HEAD + b"Transfer-Encoding: chunked\r\n\r\n") as connection, pytest.raises(ConnectionError):
        _send_often(connection, b"2710\r\n" + b"x" * 10_000 + b"\r\n", 0.001)


def test_a_client_that_does_not_read_its_answer_is_left(url: str) -> None:
    with _connected(url, b"GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
        time.sleep(1.0)
        assert len(_all(connection)) < 50_000_000


def test_half_open_connections_never_keep_others_out(url: str, caplog: pytest.LogCaptureFixture) -> None:
    slow = [socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) for _ in range(60)]
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(5):
                assert httpx.post(url, content=b"abc").text == "3"
    finally:
        for connection in slow:
            connection.close()
    assert caplog.text == ""


def test_clients_that_leave_and_garbage_fill_no_log(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            with _connected(url, HEAD + b"Content-Length: 9\r\n\r\nabc"):
                pass
            with _connected(url, b"\x00\xff garbage\r\n\r\n") as connection:
                _all(connection)
        assert httpx.post(url, content=b"abc").text == "3"
    assert "Traceback" not in caplog.text and len(caplog.records) <= 1


def test_a_line_of_the_log_is_said_once_in_a_while() -> None:
    record = logging.makeLogRecord({"msg": "Invalid HTTP request received."})
    once = WithoutRepeats()
    assert [once.filter(record) for _ in range(3)] == [True, False, False]
    assert WithoutRepeats(seconds=0).filter(record)


def test_connections_leave_files_for_the_rest() -> None:
    assert affordable_connections(2048, 1024) == 384
    assert affordable_connections(2048, 256) == 8


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "{url}"}, 200),
        ({"Host": "rebound.example"}, 403),
        *(
            ({"Host": host}, 403)
            for host in (
                "[::1].evil.com",
                "localhost:80@evil.com",
                "localhost.evil.com",
                "user@localhost",
                "[::1]evil.com",
                "localhost:80:80",
                "localhost:port",
                "[::1%25lo]",
                "127.0.0.1.nip.io",
                "localhost.",
                "127.1",
                "0x7f000001",
                "[::1",
                "::1",
                "localhost/evil.com",
                "localhost:999999",
            )
        ),
        *(({"Host": host}, 200) for host in ("localhost", "LOCALHOST:80", "127.0.0.1:8050", "127.9.9.9", "[::1]", "[::1]:8050")),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:3000"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 200),
    ],
)
@pytest.mark.parametrize("path", ["/", "/health"])
def test_pages_of_other_sites_are_refused(url: str, headers: dict[str, str], status: int, path: str) -> None:
    sent = {key: value.format(url=url) for key, value in headers.items()}
    assert httpx.get(f"{url}{path}", headers=sent).status_code == status


def test_a_token_is_asked_for_and_pages_do_not_know_it() -> None:
    with serving_app(_app("s3cret"), "echo") as url:
        assert httpx.get(url).status_code == 401 and httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(url, headers={"Authorization": "Bearer s3cre\xe9".encode("latin-1")}).status_code == 401  # type: ignore[dict-item]
        assert httpx.get(url, headers={"Authorization": "Bearer s3cret", "Host": "gpu-7"}).status_code == 200


def test_a_token_goes_to_the_hosts_it_was_meant_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_TOKEN", "s3cret")
    assert token_for("http://anywhere:8000") == "s3cret"
    monkeypatch.setenv("TETHER_TOKEN_HOSTS", "gpu-7, localhost:8010")
    assert [token_for(url) for url in ("http://gpu-7:1/x", "http://GPU-7", "http://localhost:8010")] == ["s3cret"] * 3
    assert [token_for(url) for url in ("http://localhost:8011", "http://evil", "http://gpu-7@evil", "http://gpu-7.evil")] == [None] * 4
