"""Who may read the dashboard with a browser, and what the browser may do with what it reads.

`tether.core.http.AccessControl` decides as for every server: this machine only, or the token. A browser cannot send the token as a header by
itself, so with a token there is a form that asks for it once, and a cookie that stands for it from then on: HttpOnly, only for this site, and
not the token itself. The server only reads run folders; there is no request that changes anything.

Every answer carries a content security policy that runs the dashboard's own script files and nothing else: no inline script, no evaluated text,
nothing from the network. Text of a model that would reach a page unescaped could still not run.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

LOGIN = "/login"
LONGEST_FORM = 4096
WRONG_TOKEN_SECONDS = 0.5
"""A wrong token is answered this late."""

# plotly.js makes an empty style element and fills it through the object model, which a policy does not limit: the hash is that of the empty text.
# The style of its maps stays blocked, and there are no maps; the browser's console says so once a page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='; img-src 'self' data: blob:; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class BrowserAccess:
    """Puts the headers on every answer and, where there is a token, lets a browser in that has given it. Wraps `AccessControl`."""

    def __init__(self, app: Any, token: str | None, login_page: Callable[[str], str]) -> None:
        """`login_page` makes the form, with a line about what was wrong."""
        self._app, self._token, self._login_page = app, token, login_page
        digest = hashlib.sha256((token or "").encode()).hexdigest()
        # Cookies do not tell ports apart: two dashboards of one machine have names of their own.
        self._cookie = f"tether_{digest[:8]}"
        self._value = hmac.new((token or "").encode(), b"dashboard cookie", "sha256").hexdigest()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *HEADERS]}
            await send(message)

        if self._token is None or scope["path"] == "/health":
            await self._app(scope, receive, send_with_headers)
        elif scope["path"] == LOGIN and scope["method"] == "POST":
            await self._log_in(scope, receive, send_with_headers)
        elif self._has_cookie(scope):
            headers = [pair for pair in scope["headers"] if pair[0] != b"authorization"]
            bearer = (b"authorization", f"Bearer {self._token}".encode())
            await self._app({**scope, "headers": [*headers, bearer]}, receive, send_with_headers)
        elif b"authorization" not in dict(scope["headers"]) and b"text/html" in dict(scope["headers"]).get(b"accept", b""):
            await self._answer(401, "", scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)

    def _has_cookie(self, scope: Any) -> bool:
        try:
            cookies = SimpleCookie(dict(scope["headers"]).get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return False
        return self._cookie in cookies and hmac.compare_digest(cookies[self._cookie].value.encode(), self._value.encode())

    async def _log_in(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import RedirectResponse

        body = b""
        async for part in Request(scope, receive).stream():
            body += part
            if len(body) > LONGEST_FORM:
                await self._answer(413, "That is too long for a token.", scope, receive, send)
                return
        given = parse_qs(body.decode("latin-1")).get("token", [""])[0]
        if not hmac.compare_digest(given.encode(), (self._token or "").encode()):
            await asyncio.sleep(WRONG_TOKEN_SECONDS)
            await self._answer(401, "That is not the token of this dashboard.", scope, receive, send)
            return
        response = RedirectResponse("/", status_code=303)
        response.set_cookie(self._cookie, self._value, httponly=True, samesite="strict", path="/")
        await response(scope, receive, send)

    async def _answer(self, status: int, wrong: str, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import HTMLResponse

        await HTMLResponse(self._login_page(wrong), status)(scope, receive, send)
