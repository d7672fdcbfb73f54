"""The dashboard as an ASGI application: addresses to pages, errors to one line, nothing that writes.

Pages are rendered whole by jinja2 with everything escaped. Charts are fetched as JSON by the page's own script; so no data is embedded in a script
element, where a text of a model could end it. Work on files runs in the server's threads, never in its event loop.

Live updates are a stream of server-sent events that names the runs whose files have changed. The page then asks again for what it shows, so an event
carries no numbers, and a page that missed some is right after the next. Files are compared by inode, size and time twice a second: a watch on the
file system would not work on network drives, where run folders often lie.

`tether.core.http.AccessControl` decides who may read, as for every server: this machine only, or the token. A browser cannot send the token as a
header by itself, so with a token there is a form that asks for it once, and a cookie that stands for it from then on (`BrowserAccess`). Every
answer carries a content security policy that runs the dashboard's own script files and nothing else: no inline script, no evaluated text, nothing
from the network. Text of a model that would reach a page unescaped could still not run.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from functools import cache, partial
from http.cookies import CookieError, SimpleCookie
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode

from tether.core.errors import BadInput, StorageError
from tether.core.http import OPEN_PATHS, Refusal, make_server, run_server
from tether.core.telemetry import Telemetry
from tether.core.version import __version__
from tether.runs.dashboard import pages
from tether.runs.dashboard.catalogue import Catalogue, Stamp
from tether.runs.dashboard.charts import Charts, colours_of, lines_of
from tether.runs.dashboard.pages import StepTemplateSearch, Words
from tether.runs.figures import REGIME_TINTS, RUN_COLOURS
from tether.runs.files import as_written
from tether.runs.images import image_size, read_png
from tether.runs.pages import template_environment
from tether.runs.schema import choice_words
from tether.runs.verdict import number

if TYPE_CHECKING:
    from fastapi import FastAPI

SCRIPT, STYLE, PLOTLY = "dashboard.js", "dashboard.css", "plotly.js"
POLL_SECONDS = 0.5
HEARTBEAT_SECONDS = 15.0
"""A line is sent to a page at least this often: it shows both sides that the connection stands."""
LOGIN = "/login"
LONGEST_FORM = 4096
WRONG_TOKEN_SECONDS = 0.5
"""A wrong token is answered this late."""

# plotly.js makes an empty style element and fills it through the object model, which a policy does not limit: the hash is that of the empty text.
# The style of its maps, which are not drawn here, would be blocked, with an error in the browser's console: base.html keeps plotly from adding it.
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
_MAP_STYLE = re.compile(r'getElementById\("([0-9a-f]{64})"\)\)\{var \w+=document\.createElement\("style"\)')
_KINDS = {SCRIPT: "text/javascript", STYLE: "text/css", PLOTLY: "text/javascript"}


def make_app(catalogue: Catalogue, search_templates: StepTemplateSearch, token: str | None = None) -> "FastAPI":
    """The dashboard of a folder of runs; `app.state.stopping` ends the streams of live updates."""
    from fastapi import FastAPI, Request, Response
    from starlette.exceptions import HTTPException

    render = _renderer()

    def refused(request: Request, error: Exception) -> Response:
        status, message = 400 if isinstance(error, BadInput) else 422, str(error)  # a file of a run that cannot be read
        if isinstance(error, Refusal):
            status = error.status
        elif isinstance(error, HTTPException):
            status, message = error.status_code, "there is no such page" if error.status_code == 404 else str(error.detail)
        if "text/html" in request.headers.get("accept", ""):
            return Response(render("error.html", title="Error", message=message), status, media_type="text/html")
        from starlette.responses import JSONResponse

        return JSONResponse({"error": message}, status)

    handlers: dict[Any, Any] = dict.fromkeys((BadInput, StorageError, Refusal, HTTPException), refused)
    app = FastAPI(openapi_url=None, exception_handlers=handlers)
    app.state.stopping = threading.Event()
    _add_pages(app, catalogue, search_templates, render)
    _add_data(app, catalogue)
    Telemetry().add_to(app, token, lambda: {"status": "ok", "version": __version__})
    # The one that is added last is outermost.
    app.add_middleware(BrowserAccess, token=token, login_page=lambda wrong: render("login.html", title="Token", wrong=wrong))
    return app


def run(catalogue: Catalogue, search_templates: StepTemplateSearch, listener: Any, token: str | None) -> None:
    """Serve until the process is stopped."""
    app = make_app(catalogue, search_templates, token)
    threading.Thread(target=_read_ahead, args=(catalogue, app.state.stopping), name="reading runs", daemon=True).start()
    run_server(make_server(app, app.state.stopping.set, draining=app.state.telemetry.draining), listener)


def _read_ahead(catalogue: Catalogue, stopping: threading.Event) -> None:
    """Read what every run has recorded, the newest first, so that the first visit of a page need not."""
    Charts().get("success", [])  # loads plotly
    for run in sorted(catalogue.runs().values(), key=lambda run: run.stamp(), reverse=True):
        if stopping.is_set():
            return
        with contextlib.suppress(BadInput, StorageError), as_written(run.folder):  # the page of the runs says it
            run.records()
            run.index()


def _add_pages(app: "FastAPI", catalogue: Catalogue, search_templates: StepTemplateSearch, render: Callable[..., str]) -> None:
    from fastapi import Request
    from fastapi.responses import HTMLResponse

    def page(
        template: str, words: Words, title: str, values: dict[str, Any], run: Any = None, live: list[str] | None = None
    ) -> HTMLResponse:
        text = render(template, title=title, words=words, run=run, live=live, **values)
        return HTMLResponse(text, headers={"cache-control": "no-store"})

    @app.get("/")
    def runs(request: Request) -> HTMLResponse:
        words = _words(request)
        return page("runs.html", words, "Runs", pages.runs_page(catalogue, words), live=[])

    @app.get("/compare")
    def compare(request: Request) -> HTMLResponse:
        words = _words(request)
        with as_written(catalogue.root):
            values = pages.compare_page(catalogue, words)
            return page("compare.html", words, "Comparison", values, live=values["names"])

    def of_run(path: str, template: str, name: str, make: Callable[[Any, Words], dict[str, Any]], *, is_live: bool) -> None:
        """A page about one run."""

        @app.get(path, name=name)
        def answer(request: Request) -> HTMLResponse:
            words = _words(request)
            run = catalogue.get(words.text("run"))
            with as_written(run.folder):
                return page(template, words, f"{run.name} · {name}", make(run, words), run=run, live=[run.name] if is_live else None)

    of_run("/run", "run.html", "overview", lambda run, _: pages.run_page(run), is_live=True)
    of_run("/trajectories", "trajectories.html", "trajectories", pages.trajectories_page, is_live=True)
    of_run("/trajectory", "trajectory.html", "trajectory", pages.episode_page, is_live=False)
    of_run("/groups", "groups.html", "groups", pages.groups_page, is_live=False)
    of_run("/templates", "templates.html", "templates", pages.templates_page, is_live=False)
    of_run("/gradients", "gradients.html", "gradients", pages.gradients_page, is_live=True)
    found_templates = partial(pages.found_templates, search=search_templates)
    of_run("/templates/found", "found_templates.html", "templates found", found_templates, is_live=False)


def _add_data(app: "FastAPI", catalogue: Catalogue) -> None:
    from fastapi import Request, Response
    from fastapi.responses import StreamingResponse

    charts = Charts()

    @app.get("/figure")
    def figure(request: Request) -> Response:
        words = _words(request)
        runs = [catalogue.get(name) for name in words.every("run")]
        pool = words.text("pool") == "yes"
        with as_written(runs[0].folder if runs else catalogue.root):
            colours = colours_of(lines_of(runs, pool=pool), catalogue.places())
            made = charts.get(words.text("name"), runs, pool=pool, step=words.whole("step"), beside=words.whole("beside"), colours=colours)
        return Response(made, media_type="application/json", headers={"cache-control": "no-store"})

    @app.get("/image")
    def image(request: Request) -> Response:
        words = _words(request)
        run, digest = catalogue.get(words.text("run")), words.text("digest")
        if image_size(run.folder, digest) is None:  # no such file, or no PNG
            raise Refusal(404, f"run '{run.name}' has no picture {digest}")
        # The name is the digest of the pixels, so a browser may keep it.
        return Response(read_png(run.folder, digest), media_type="image/png", headers={"cache-control": "max-age=86400"})

    @app.get("/events")
    async def events(request: Request) -> StreamingResponse:
        names = frozenset(_words(request).every("run"))
        stream = changes(catalogue, names, app.state.stopping)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in _KINDS:
            raise Refusal(404, f"there is no file '{name}'")
        # The address carries the version of Tether, so a browser may keep the file.
        return Response(_static_file(name), media_type=_KINDS[name], headers={"cache-control": "max-age=86400"})


async def changes(catalogue: Catalogue, names: frozenset[str], stopping: threading.Event) -> AsyncIterator[str]:
    """Events for these runs, or for all runs of the folder where no name is given; a run that appears or vanishes is a change."""
    before = await asyncio.to_thread(_stamps, catalogue, names)
    silent = 0.0
    yield "retry: 1000\nevent: ready\ndata: {}\n\n"
    while not stopping.is_set():
        await asyncio.sleep(POLL_SECONDS)
        now = await asyncio.to_thread(_stamps, catalogue, names)
        changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        before, silent = now, silent + POLL_SECONDS
        if changed:
            yield f"event: change\ndata: {json.dumps({'runs': changed})}\n\n"
            silent = 0.0
        elif silent >= HEARTBEAT_SECONDS:
            yield ": still here\n\n"
            silent = 0.0


def _stamps(catalogue: Catalogue, names: frozenset[str]) -> dict[str, tuple[Stamp, bool]]:
    return {name: (run.stamp(), run.is_training()) for name, run in catalogue.runs().items() if not names or name in names}


def _words(request: Any) -> Words:
    return Words(request.query_params.multi_items())


@cache
def _static_file(name: str) -> bytes:
    if name == PLOTLY:
        from plotly.offline import get_plotlyjs

        return str(get_plotlyjs()).encode()
    text = resources.files("tether.runs.dashboard").joinpath("static", name).read_text(encoding="utf-8")
    if name == STYLE:  # with the colours of the charts: a style attribute would need a weaker policy
        text = template_environment().get_template("look.css").render() + text
        text += "".join(f".line-{place} {{ background: {colour}; }}\n" for place, colour in enumerate(RUN_COLOURS))
        text += "".join(f".{regime.name.lower()} {{ background: {tint}; }}\n" for regime, tint in REGIME_TINTS.items())
    return text.encode()


def _renderer() -> Callable[..., str]:
    environment = template_environment("dashboard/templates")
    environment.filters["number"] = lambda value: "—" if value is None else number(value)
    environment.filters["percent"] = lambda value: "—" if value is None else f"{value:.0%}"
    environment.filters["choice"] = choice_words
    environment.filters["words"] = lambda text: str(text).replace("_", " ")
    environment.globals["address"] = _address
    environment.globals["version"] = __version__
    environment.globals["map_styles"] = _MAP_STYLE.findall(_static_file(PLOTLY).decode())

    def render(template: str, **values: Any) -> str:
        values = {"words": Words([]), "run": None, "live": None, **values}
        return environment.get_template(template).render(**values)

    return render


def _address(path: str, **words: Any) -> str:
    """An address with its words; a list stands for several of one name, None and "" for none."""
    return (
        f"{path}?{urlencode({name: value for name, value in words.items() if value not in (None, '', [])}, doseq=True, errors='replace')}"
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

        if self._token is None or scope["path"] in OPEN_PATHS:
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
