"""What every server of Tether shares: who may use it, its place on a port, and one line for every refusal.

Environments (`tether serve-env`), search (`tether serve-search`) and models (`tether serve`) are ASGI applications behind the same access
control. Without a token only this machine is served, and web pages open in a browser on it are not: the Host header must name this
machine, and bodies must be declared as JSON (or as bytes), which a page of another site may not do.
"""

import hmac
import ipaddress
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tether.core.errors import BadInput

KEEP_ALIVE = 75
"""Seconds that an unused connection stays open; longer than clients keep theirs, so that they seldom meet a closed one."""
SHUTDOWN_GRACE = 3
"""Seconds that calls in progress are waited for when the server stops."""


class Refusal(Exception):
    """A request that is answered with an error: the HTTP status and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def is_loopback(host: str) -> bool:
    """Whether a host is this machine and can be reached from it alone.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_token(token: str) -> str:
    """A token that fits into a header."""
    if not all("!" <= letter <= "~" for letter in token):
        raise BadInput("the token may only hold letters, digits and signs of ASCII, without spaces; choose another")
    return token


class AccessControl:
    """Admits requests with the token; without a token, requests whose Host header names this machine."""

    def __init__(self, app: Any, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            headers = dict(scope["headers"])
            refusal = self._refusal(headers.get(b"authorization", b""), headers.get(b"host", b"").decode("latin-1"))
            if refusal is not None:
                await self._refuse(refusal, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, authorization: bytes, host: str) -> Refusal | None:
        if self._expected is not None:
            if hmac.compare_digest(authorization, self._expected):
                return None
            return Refusal(401, "this server wants its token: send Authorization: Bearer TOKEN")
        if is_loopback(host.rpartition("]")[0].lstrip("[") or host.partition(":")[0]):
            return None
        return Refusal(403, f"this server has no token, so it only answers to the names of this machine, not to '{host}'")

    async def _refuse(self, refusal: Refusal, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import Response

        await Response(json.dumps({"error": str(refusal)}).encode(), refusal.status, media_type="application/json")(scope, receive, send)


def server_token(token: str | None, host: str) -> str | None:
    """The token of a server on this host; it is required where other machines can reach the server."""
    if not token and not is_loopback(host):
        raise BadInput(
            f"host '{host}' can be reached from other machines, so clients need a token; set TETHER_TOKEN or --token to a long secret"
        )
    return checked_token(token) if token else None


def bind(host: str, port: int) -> socket.socket:
    """A listening socket."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise BadInput(f"host '{host}' is not an address of this machine ({error}); use 127.0.0.1, or 0.0.0.0 for all") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise BadInput(
            f"cannot serve on port {port} of '{host}': {error.strerror}; choose another --port (0 takes a free one) or --host"
        ) from error
    return listener


def address_of(listener: socket.socket) -> str:
    """The URL that clients use. A server on all addresses of the machine is named by the machine."""
    host, port = listener.getsockname()[:2]
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: Any, on_stop: Callable[[], None] = lambda: None) -> Any:
    """A uvicorn server of an ASGI application; `.run(sockets=[listener])` serves until the process is stopped.

    `on_stop` is called in the signal handler of Ctrl-C and SIGTERM, before calls in progress are waited for.
    """
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            on_stop()
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        ws="none",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=SHUTDOWN_GRACE,
    )
    return Server(config)


@contextmanager
def serving_app(app: Any, name: str) -> Iterator[str]:
    """An ASGI application served in the background of this program, on a free port of this machine; yields the URL."""
    listener = bind("127.0.0.1", 0)
    server = make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True, name=f"serving {name}")
    thread.start()
    try:
        yield address_of(listener)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
