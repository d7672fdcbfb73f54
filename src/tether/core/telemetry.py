"""What every server shows to those who operate it: `/health`, `/ready` and `/metrics`, and what counts its requests.

/health   200 while the process does its work; 503 with the reason where it does not, which a restart mends. A server whose work waits and gets
          nowhere for STUCK_SECONDS is not healthy.
/ready    200 while new requests are taken; 503 with the reason otherwise: it drains, weights are being replaced, or it is not healthy.
/metrics  Prometheus' text format.

/health and /ready need no token; /metrics follows the server's rule for every other request. Labels hold the route of a request as it is
declared (`/v1/sessions/{name}/step`), never its path: paths of sessions hold secrets.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tether.core.http import DRAIN_SECONDS, AccessControl, Draining, Refusal

if TYPE_CHECKING:
    from fastapi import FastAPI

STUCK_SECONDS = 300.0
"""Without any progress while work waits; longer than the slowest single call of an engine, such as the first prefill of a large batch on a CPU."""
SECONDS_BUCKETS = (0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
PROBES = ("/health", "/ready", "/metrics")
OTHER = "other"
"""The route of requests that reach none: refused before, or to an unknown path."""

Problem = Callable[[], str | None]
"""One line about what is wrong; None while nothing is."""


class _Reading(NamedTuple):
    """A number that is read when /metrics is asked for; by the values of a label, where it has one."""

    kind: str
    name: str
    help: str
    read: Callable[[], float | Mapping[str, float]]
    label: str | None


class _Readings:
    """Gives the readings to a registry. Prometheus' own counters cannot be read from a function."""

    def __init__(self) -> None:
        self.all: list[_Reading] = []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        for reading in self.all:
            family = families[reading.kind](reading.name, reading.help, labels=[reading.label] if reading.label else [])
            value = reading.read()
            for label, number in value.items() if isinstance(value, Mapping) else [(None, value)]:
                family.add_metric([] if label is None else [label], number)
            yield family


class Telemetry:
    """Health, readiness and metrics of one server."""

    def __init__(
        self,
        *,
        health: Problem | None = None,
        ready: Problem = lambda: None,
        is_busy: Callable[[], bool] = lambda: False,
        begins: str = "",
        drain_seconds: float = DRAIN_SECONDS,
        stuck_after: float = STUCK_SECONDS,
    ) -> None:
        """`health`: the server's own rule; without one, requests wait and none is answered for `stuck_after` seconds. `ready`: why no request is
        taken now, beside draining. `is_busy`: whether something runs between two requests that draining waits for, such as an episode. `begins`:
        a pattern of the paths whose requests begin something new, which are refused while the server drains."""
        from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

        self._health, self._ready, self._begins, self._stuck_after = health or self._unanswered, ready, re.compile(begins), stuck_after
        self.draining = Draining(lambda: self._waiting > 0 or is_busy(), drain_seconds)
        self._waiting = 0
        """Requests without an answer."""
        self._last_answer = 0.0
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests = Counter("tether_requests_total", "Requests by route and HTTP status.", ["path", "status"], registry=self._registry)
        self._errors = Counter("tether_errors_total", "Requests that failed, by kind.", ["kind"], registry=self._registry)
        self._seconds = Histogram(
            "tether_request_seconds", "Time to the end of the answer, by route.", ["path"], buckets=SECONDS_BUCKETS, registry=self._registry
        )
        self._readings = _Readings()
        readings: Any = self._readings  # a collector by its method
        self._registry.register(readings)
        self.gauge("tether_requests_in_flight", "Requests that wait for their answer.", lambda: self._waiting)
        self.gauge("tether_healthy", "1 while /health answers 200.", lambda: float(self.unhealthy() is None))
        self.gauge("tether_ready", "1 while /ready answers 200.", lambda: float(self.unready() is None))

    def gauge(self, name: str, help: str, read: Callable[[], float | Mapping[str, float]], label: str | None = None) -> None:
        """A number that goes up and down."""
        self._readings.all.append(_Reading("gauge", name, help, read, label))

    def counter(self, name: str, help: str, read: Callable[[], float | Mapping[str, float]], label: str | None = None) -> None:
        """A number that only grows."""
        self._readings.all.append(_Reading("counter", name, help, read, label))

    def unhealthy(self) -> str | None:
        """Why the server does not work; None while it does."""
        return self._health()

    def unready(self) -> str | None:
        """Why the server takes no requests; None while it does."""
        if self.draining.has_begun:
            return "the server is stopping: it finishes what it has and takes nothing new"
        return self.unhealthy() or self._ready()

    def _unanswered(self) -> str | None:
        silent = time.monotonic() - self._last_answer
        if not self._waiting or silent < self._stuck_after:
            return None
        return f"{self._waiting} requests wait, and none was answered for {silent:.0f} s; restart the server"

    def add_to(self, app: "FastAPI", token: str | None, describe: Callable[[], Mapping[str, Any]], opened: Any = None) -> None:
        """Put the three routes, the access control (`token`, `opened`) and the counting on an application. `describe`: what /health says."""
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
        from starlette.responses import JSONResponse, Response

        @app.get("/health")
        async def health() -> JSONResponse:
            if (problem := self.unhealthy()) is not None:
                raise Refusal(503, problem)
            return JSONResponse(dict(describe()))

        @app.get("/ready")
        async def ready() -> JSONResponse:
            if (problem := self.unready()) is not None:
                raise Refusal(503, problem)
            return JSONResponse({"status": "ready"})

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

        app.add_middleware(AccessControl, token=token, opened=opened)
        app.add_middleware(_Counting, telemetry=self)
        app.state.telemetry = self

    async def count(self, app: Any, scope: Any, receive: Any, send: Any) -> None:
        """Run one request of an ASGI application, and count it."""
        if scope["type"] != "http" or scope["path"] in PROBES:
            await app(scope, receive, send)
            return
        if self.draining.has_begun and self._begins.fullmatch(scope["path"]):
            app = _stopping
        began, status, is_gone = time.monotonic(), 0, False
        if not self._waiting:
            self._last_answer = began
        self._waiting += 1

        async def receive_noting() -> Any:
            nonlocal is_gone
            message = await receive()
            is_gone = is_gone or message["type"] == "http.disconnect"
            return message

        async def send_counted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = 499 if is_gone else int(message["status"])  # of what was cut off, the framework makes a 500
            await send(message)

        try:
            await app(scope, receive_noting, send_counted)
        finally:
            self._waiting -= 1
            self._last_answer = time.monotonic()
            status = status or (499 if is_gone else 500)  # no answer: an unforeseen error, or the server was stopped
            path = getattr(scope.get("route"), "path", OTHER)
            self._requests.labels(path, str(status)).inc()
            self._seconds.labels(path).observe(self._last_answer - began)
            if (kind := error_kind(status)) is not None:
                self._errors.labels(kind).inc()


class _Counting:
    """The middleware of a `Telemetry`."""

    def __init__(self, app: Any, telemetry: Telemetry) -> None:
        self._app, self._telemetry = app, telemetry

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._telemetry.count(self._app, scope, receive, send)


async def _stopping(scope: Any, receive: Any, send: Any) -> None:
    from starlette.responses import JSONResponse

    headers = {"Retry-After": "1", "Connection": "close"}
    await JSONResponse({"error": "the server is stopping; ask another one"}, 503, headers)(scope, receive, send)


def error_kind(status: int) -> str | None:
    """What an HTTP status counts as in tether_errors_total; None where it is no error.

    >>> [error_kind(status) for status in (200, 303, 400, 401, 408, 429, 499, 500, 503, 504)]
    [None, None, 'client', 'access', 'timeout', 'overload', 'gone', 'server', 'overload', 'timeout']
    """
    if status < 400:
        return None
    kinds = {401: "access", 403: "access", 408: "timeout", 504: "timeout", 429: "overload", 503: "overload", 499: "gone"}
    return kinds.get(status, "client" if status < 500 else "server")
