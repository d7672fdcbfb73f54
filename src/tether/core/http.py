"""What every server of Tether shares: who may use it, its place on a port, and one line for every refusal.

Environments (`tether serve-env`), search (`tether serve-search`) and models (`tether serve`) are ASGI applications behind the same access
control and the same limits on connections (connections.py). Without a token only this machine is served, and web pages open in a browser on
it are not: the Host header must name this machine, and neither Origin nor Sec-Fetch-Site may name another site.
"""

import hmac
import ipaddress
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tether.core.codec import CodecError
from tether.core.errors import BadInput

if TYPE_CHECKING:
    from tether.core.connections import ConnectionLimits

TOKEN_VARIABLE = "TETHER_TOKEN"
HOSTS_VARIABLE = "TETHER_TOKEN_HOSTS"
"""Where it is set (HOST or HOST:PORT, with commas between), the token goes to these hosts alone."""

KEEP_ALIVE = 75
"""Seconds that an unused connection stays open; longer than clients keep theirs, so that they seldom meet a closed one."""
SHUTDOWN_GRACE = 3
"""Seconds that calls in progress are waited for when the server stops."""
DRAIN_SECONDS = 15.0
"""Until a server that got SIGTERM stops with work unfinished; less than the 20 s after which `core.child` kills one, and Kubernetes' 30 s."""
OPEN_PATHS = ("/health", "/ready")
"""Probes send no token."""


class Refusal(Exception):
    """A request that is answered with an error: the HTTP status and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def status_of(error: Any) -> tuple[int, str]:
    """The HTTP status of an error, and one line for the client."""
    if isinstance(error, Refusal | BadInput):
        status, said = getattr(error, "status", 400), str(error)
    elif hasattr(error, "status_code"):  # of the framework: no such route, a wrong method
        status, said = int(error.status_code), str(getattr(error, "detail", error))
    else:
        status, said = 500, f"{type(error).__name__}: {error}"
    return status, " ".join(said.split())


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


def token_for(url: str, variable: str = TOKEN_VARIABLE) -> str | None:
    """The token of an environment variable, if it may be sent to this address."""
    token, hosts = os.environ.get(variable), os.environ.get(HOSTS_VARIABLE)
    if not token or hosts is None:
        return token or None
    parts = urlsplit(url)
    known = {host.strip().lower() for host in hosts.split(",")}
    return token if known & {(parts.hostname or "").lower(), parts.netloc.rpartition("@")[2].lower()} else None


class AccessControl:
    """Admits requests with the token; without a token, requests to this machine's names that no page of another site has sent.

    `opened`: paths that need no token, beside OPEN_PATHS, because they hold a secret of their own.
    """

    def __init__(self, app: Any, token: str | None, opened: re.Pattern[str] | None = None) -> None:
        self._app, self._opened = app, opened
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
            if sum(key == b"host" for key, _ in scope["headers"]) > 1:
                headers[b"host"] = ", ".join(value.decode("latin-1") for key, value in scope["headers"] if key == b"host")
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                await self._refuse(refusal, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, path: str, headers: dict[bytes, str]) -> Refusal | None:
        if self._expected is not None:
            if path in OPEN_PATHS or (self._opened is not None and self._opened.match(path)):
                return None
            if hmac.compare_digest(headers.get(b"authorization", "").encode("latin-1"), self._expected):
                return None
            return Refusal(401, "this server wants its token: send Authorization: Bearer TOKEN")
        host = headers.get(b"host", "")
        if not is_loopback(_host_name(host)):
            return Refusal(403, f"this server has no token, so it only answers to the names of this machine, not to '{host[:100]}'")
        origin = headers.get(b"origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return Refusal(403, f"this server has no token, so it answers no page of another site, such as '{origin[:100]}'")
        if headers.get(b"sec-fetch-site", "none") not in ("none", "same-origin"):
            return Refusal(403, "this server has no token, so it answers no page of another site")
        return None

    async def _refuse(self, refusal: Refusal, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import Response

        headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
        reply = Response(json.dumps({"error": str(refusal)}).encode(), refusal.status, headers, media_type="application/json")
        await reply(scope, receive, send)


_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9.-]+))(?::\d{1,5})?", re.IGNORECASE)


def _host_name(host: str) -> str:
    """The name in a Host header, without port and brackets; empty where the header is anything else than a name or an address with a port."""
    found = _HOST.fullmatch(host)
    return "" if found is None else found[1] or found[2]


async def read_body(request: Any, most: int) -> bytes:
    """The body of a request; refused (413) where it is longer than `most` bytes.

    It is read to its end even if it is too long, because a client does not read the reply while it is still sending. A connection that sends
    without end is closed (`ConnectionLimits.max_body`).
    """
    data = bytearray()
    async for chunk in request.stream():
        if len(data) <= most:
            data += chunk
    if len(data) > most:
        raise Refusal(413, f"the body is longer than {most} bytes; send less at a time")
    return bytes(data)


def declared_type(request: Any) -> str:
    """What the body of a request is said to be, such as application/json."""
    return str(request.headers.get("content-type", "").partition(";")[0].strip().lower())


async def read_json(request: Any, most: int, decode: Callable[[bytes], Any] = json.loads) -> dict[str, Any]:
    """The JSON object in the body of a request; anything else is refused."""
    if (declared := declared_type(request)) != "application/json":
        raise Refusal(415, f"the body is declared as '{declared}'; send JSON with Content-Type: application/json")
    return json_object(await read_body(request, most), "the body", decode)


def json_object(data: bytes, what: str, decode: Callable[[bytes], Any] = json.loads) -> dict[str, Any]:
    """The object that JSON holds; `what` names it in a refusal."""
    try:
        value = decode(data)
    except RecursionError:
        raise Refusal(400, f"{what} is nested too deeply") from None
    except ValueError as error:
        said = str(error) if isinstance(error, CodecError) else f"is not JSON ({error})"
        raise Refusal(400, f"{what} {said}") from error
    if not isinstance(value, dict):
        raise Refusal(400, f"{what} is a {type(value).__name__}; send a JSON object")
    return value


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
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise BadInput(
            f"cannot serve on port {port} of '{host}': {error.strerror}; choose another --port (0 takes a free one) or --host"
        ) from error
    return listener


def free_port(host: str) -> int:
    """A port of an address of this machine that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def address_of(listener: socket.socket) -> str:
    """The URL that clients use. A server on all addresses of the machine is named by the machine."""
    host, port = listener.getsockname()[:2]
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Draining:
    """How a server ends after SIGTERM: it takes nothing new, finishes what it has, and stops when that is done or `seconds` have passed."""

    def __init__(self, is_busy: Callable[[], bool], seconds: float = DRAIN_SECONDS) -> None:
        self._is_busy, self.seconds = is_busy, seconds
        self._since: float | None = None

    @property
    def has_begun(self) -> bool:
        return self._since is not None

    def begin(self) -> bool:
        """Whether it begins now: a second signal does not wait."""
        if self._since is not None:
            return False
        self._since = time.monotonic()
        return True

    @property
    def is_over(self) -> bool:
        return self._since is not None and (not self._is_busy() or time.monotonic() - self._since > self.seconds)


def make_server(
    app: Any, on_stop: Callable[[], None] = lambda: None, limits: "ConnectionLimits | None" = None, draining: Draining | None = None
) -> Any:
    """A uvicorn server of an ASGI application; `run_server` serves until the process is stopped.

    `on_stop` is called when Ctrl-C or SIGTERM stops it, before calls in progress are waited for. With `draining`, SIGTERM stops it after that, and
    the probes are answered meanwhile.
    """
    import uvicorn

    from tether.core.connections import ConnectionLimits, quiet_accepts, server_config

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            quiet_accepts()
            await super().startup(sockets)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if sig == signal.SIGTERM and draining is not None and draining.begin():
                return
            on_stop()
            super().handle_exit(sig, frame)

        async def on_tick(self, counter: int) -> bool:  # ten times a second
            if draining is not None and draining.is_over and not self.should_exit:
                self.handle_exit(signal.SIGTERM, None)
            return await super().on_tick(counter)

    return Server(server_config(app, limits or ConnectionLimits(), KEEP_ALIVE, SHUTDOWN_GRACE))


def run_server(server: Any, listener: socket.socket) -> None:
    """Serve until the process is stopped. When everything is closed, Ctrl-C raises KeyboardInterrupt and SIGTERM ends the program (143)."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)  # uvicorn holds the signal back until it has closed everything, and raises it then
    try:
        server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def serving_app(app: Any, name: str, limits: "ConnectionLimits | None" = None) -> Iterator[str]:
    """An ASGI application served in the background of this program, on a free port of this machine; yields the URL."""
    listener = bind("127.0.0.1", 0)
    server = make_server(app, limits=limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True, name=f"serving {name}")
    thread.start()
    try:
        yield address_of(listener)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
