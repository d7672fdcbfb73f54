"""What operators see of every server: /health, /ready and /metrics; a server that is stuck, one that drains, and no secret in any label."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tether.core.http import serving_app
from tether.core.telemetry import Telemetry, error_kind


def samples(text: str) -> dict[str, float]:
    """The samples of /metrics by name and labels, read by Prometheus' own parser."""
    return {
        f"{sample.name}{{{','.join(f'{key}={value}' for key, value in sorted(sample.labels.items()))}}}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@contextmanager
def client_of(app: Any, **headers: str) -> Iterator[httpx.Client]:
    with serving_app(app, "test") as url, httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=30) as client:
        yield client


def app_of(telemetry: Telemetry, token: str | None = None, *, held: threading.Event | None = None) -> Any:
    from fastapi import FastAPI
    from starlette.responses import JSONResponse

    from tether.core.http import Refusal, status_of

    async def refused(_: Any, error: Exception) -> JSONResponse:
        status, said = status_of(error)
        return JSONResponse({"error": said}, status)

    app = FastAPI(openapi_url=None, exception_handlers={Refusal: refused})

    @app.get("/sessions/{secret}")
    async def session(secret: str) -> dict[str, str]:
        while held is not None and not held.is_set():
            await asyncio.sleep(0.02)
        if secret == "no":
            raise Refusal(504, "too slow")
        return {}

    @app.post("/sessions")
    def begin() -> dict[str, str]:
        return {}

    telemetry.add_to(app, token, lambda: {"status": "ok"})
    return app


def test_requests_are_counted_by_route_and_never_by_path() -> None:
    telemetry = Telemetry()
    telemetry.counter("tether_things_total", "By kind.", lambda: {"a": 2, "b": 3}, "kind")
    with client_of(app_of(telemetry)) as client:
        for secret in ("s3cret-1", "s3cret-2", "no"):
            client.get(f"/sessions/{secret}")
        assert client.get("/nowhere/s3cret-3").status_code == 404
        reply = client.get("/metrics")
        found = samples(reply.text)
    assert reply.headers["content-type"].startswith("text/plain; version=") and "s3cret" not in reply.text
    assert found["tether_requests_total{path=/sessions/{secret},status=200}"] == 2
    assert found["tether_requests_total{path=/sessions/{secret},status=504}"] == 1
    assert found["tether_requests_total{path=other,status=404}"] == 1
    assert found["tether_errors_total{kind=timeout}"] == 1 and found["tether_errors_total{kind=client}"] == 1
    assert found["tether_request_seconds_count{path=/sessions/{secret}}"] == 3
    assert found["tether_things_total{kind=b}"] == 3 and found["tether_requests_in_flight{}"] == 0 and found["tether_healthy{}"] == 1


def test_a_stream_is_waited_for_until_its_end() -> None:
    """A server that drains must not stop with half of it."""
    from starlette.responses import StreamingResponse

    telemetry, more = Telemetry(), threading.Event()
    app = app_of(telemetry)

    async def pieces() -> AsyncIterator[str]:
        yield "one"
        await asyncio.to_thread(more.wait)
        yield "two"

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(pieces())

    with client_of(app) as client, client.stream("GET", "/stream") as reply:
        read = reply.iter_text()
        assert next(read) == "one"
        telemetry.draining.begin()
        assert not telemetry.draining.is_over and samples(httpx.get(f"{client.base_url}/metrics").text)["tether_requests_in_flight{}"] == 1
        more.set()
        assert next(read) == "two" and not list(read)
        deadline = time.monotonic() + 10
        while not telemetry.draining.is_over:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_request_that_is_cut_off_is_no_error_of_the_server() -> None:
    """A publisher that is killed in the middle of its weights is `gone`; an alert on `server` must not ring."""
    from fastapi import Request

    telemetry = Telemetry()
    app = app_of(telemetry)

    @app.post("/upload")
    async def upload(request: Request) -> None:
        await request.body()

    with client_of(app) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port)) as sending:
            sending.sendall(b"POST /upload HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nhalf")
        deadline = time.monotonic() + 10
        while not (errors := {key: n for key, n in samples(client.get("/metrics").text).items() if key.startswith("tether_errors_total")}):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert errors == {"tether_errors_total{kind=gone}": 1}


def test_probes_need_no_token_and_metrics_does() -> None:
    with client_of(app_of(Telemetry(), "t0ken")) as client:
        assert [client.get(path).status_code for path in ("/health", "/ready", "/metrics", "/sessions/a")] == [200, 200, 401, 401]
        admitted = client.get("/metrics", headers={"Authorization": "Bearer t0ken"})
        assert samples(admitted.text)["tether_requests_total{path=other,status=401}"] == 1  # probes and /metrics are not counted
        assert client.get("/health", headers={"Host": "evil.example"}).status_code == 200
    with client_of(app_of(Telemetry())) as client:  # without a token this machine alone is answered
        assert [client.get(path, headers={"Host": "evil.example"}).status_code for path in ("/ready", "/metrics")] == [403, 403]


def test_requests_that_nobody_answers_make_a_server_unhealthy() -> None:
    held, telemetry = threading.Event(), Telemetry(stuck_after=0.2)
    with client_of(app_of(telemetry, held=held)) as client, ThreadPoolExecutor(1) as pool:
        assert client.get("/health").json() == {"status": "ok"}
        waiting = pool.submit(client.get, "/sessions/s3cret")
        deadline = time.monotonic() + 10
        while client.get("/health").status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        unhealthy = client.get("/health")
        assert unhealthy.status_code == 503 and re.match(r"1 requests wait, and none was answered for \d+ s", unhealthy.json()["error"])
        assert client.get("/ready").status_code == 503 and samples(client.get("/metrics").text)["tether_healthy{}"] == 0
        held.set()
        assert waiting.result().status_code == 200 and client.get("/health").status_code == client.get("/ready").status_code == 200


def test_a_draining_server_begins_nothing_and_answers_the_rest() -> None:
    telemetry = Telemetry(is_busy=lambda: True, begins="/sessions")
    with client_of(app_of(telemetry)) as client:
        assert client.post("/sessions").status_code == 200
        assert telemetry.draining.begin() and not telemetry.draining.begin()
        assert "is stopping" in client.get("/ready").json()["error"] and client.get("/health").status_code == 200
        refused = client.post("/sessions")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert client.get("/sessions/a").status_code == 200 and not telemetry.draining.is_over
        telemetry.draining.seconds = 0
        assert telemetry.draining.is_over


def test_kinds_of_errors() -> None:
    found = [error_kind(status) for status in (200, 303, 400, 401, 408, 429, 499, 500, 503, 504)]
    assert found == [None, None, "client", "access", "timeout", "overload", "gone", "server", "overload", "timeout"]


SERVER = """
import sys, threading
sys.path.insert(0, {folder!r})
from test_telemetry import Telemetry, app_of
from tether.core.http import address_of, bind, make_server, run_server
held, telemetry = threading.Event(), Telemetry(begins="/sessions")
app = app_of(telemetry, held=held)
threading.Thread(target=lambda: (sys.stdin.readline(), held.set()), daemon=True).start()
listener = bind("127.0.0.1", 0)
print(address_of(listener), flush=True)
run_server(make_server(app, draining=telemetry.draining), listener)
"""


@pytest.mark.parametrize("finishes", [True, False])
def test_sigterm_waits_for_what_runs_and_no_longer_than_it_may(finishes: bool) -> None:
    code = SERVER.format(folder=str(Path(__file__).parent))
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        try:
            _drained(process, finishes)
        finally:
            process.kill()


def _drained(process: "subprocess.Popen[str]", finishes: bool) -> None:
    assert process.stdin is not None and process.stdout is not None
    url = process.stdout.readline().strip()
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get, "/sessions/s3cret")
        while samples(client.get("/metrics").text)["tether_requests_in_flight{}"] < 1:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        while client.get("/ready").status_code == 200:
            time.sleep(0.02)
        assert client.get("/health").status_code == 200 and client.post("/sessions").status_code == 503
        if finishes:
            process.stdin.write("\n")
            process.stdin.flush()
            assert waiting.result().status_code == 200
        else:  # a second signal does not wait; the request is cut off
            process.send_signal(signal.SIGTERM)
            assert waiting.result().status_code == 503
    assert process.wait(timeout=30) == 143
