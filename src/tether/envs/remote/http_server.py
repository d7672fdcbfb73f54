"""Serves an environment over HTTP, for clients on this machine or, with a token, on others.

`make_app` is the API as a FastAPI application, `bind` and `run` put it on a port, and `serving` does both in the background of a Python
program. Requests are checked field by field, and a wrong one is answered with {"error": one line}. Clients may choose the options that the
server allows (by default `split` alone): other options can name files and addresses, or weaken a sandbox. Who is served at all,
core/http.py says.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import BaseModel, InstanceOf, StrictInt, model_validator

from tether.core.config import Settings, merge, validate
from tether.core.errors import BadInput, TetherError, environment_boundary
from tether.core.http import Refusal, json_object, make_server, read_json, run_server, server_token, serving_app, status_of
from tether.core.protocols import Env
from tether.core.telemetry import Telemetry
from tether.core.version import __version__
from tether.envs.registry import find_class, is_address, make_env
from tether.envs.remote.calls import EnvDescription, close_in_thread
from tether.envs.remote.sessions import SessionLimits, SessionTable
from tether.envs.remote.wire import ENV_SEED, OLD_ENV_SEED, PROTOCOL, decode, encode

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

MAX_BODY = 4 * 2**20
"""Bytes of a request; an answer of a model is a few kilobytes."""


B = TypeVar("B", bound=Settings)

ANY = "*"
"""In an allow-list: every option. For clients that may do on the server what its user may."""
CLIENT_OPTIONS = frozenset({"split"})
"""What clients may choose unless the server says otherwise."""


@dataclass(frozen=True)
class Service:
    """What is served, to whom, within which limits."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """The environment's options; those that clients may choose override them."""
    token: str | None = None
    allowed: frozenset[str] = CLIENT_OPTIONS
    """The options that clients may choose."""
    limits: SessionLimits = field(default_factory=SessionLimits)

    def build(self, wanted: Mapping[str, Any]) -> Env:
        """An environment with a client's options."""
        if ANY not in self.allowed and (locked := sorted(set(wanted) - self.allowed)):
            raise BadInput(
                f"option '{locked[0]}' is locked by the server; clients may choose: {', '.join(sorted(self.allowed)) or 'none'} "
                f"(tether serve-env --allow-option {locked[0]} would allow it)"
            )
        owned = () if is_address(self.name) else getattr(find_class(self.name), "owner_options", ())
        if chosen := [name for name in owned if name in wanted and wanted[name] != self.options.get(name)]:
            raise BadInput(f"option '{chosen[0]}' decides what the server runs or reads; set it where the server is started (--set)")
        return make_env(self.name, **merge(self._own_options(wanted), wanted))

    def _own_options(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The server's options under a client's. Its secrets were given for its own addresses: with an address of the client's they stay here."""
        known = {} if is_address(self.name) else getattr(find_class(self.name).Options, "model_fields", {})
        secret = {key for key, described in known.items() if not described.repr}
        if not secret or not any("://" in str(value) for value in wanted.values()):
            return dict(self.options)
        return {**self.options, **dict.fromkeys(secret, "")}

    def describe(self, wanted: Mapping[str, Any]) -> bytes:
        """The answer to GET /v1/env."""
        env = self.build(wanted)
        described = {
            "protocol": PROTOCOL,
            "version": f"tether {__version__}",
            **asdict(EnvDescription.of(env)),
            "options": _options(env, merge(self.options, wanted)),
            "client_options": sorted(self.allowed),
            "seed_field": ENV_SEED,
        }
        close_in_thread(env)
        return encode(described)


def _options(env: Env, given: Mapping[str, Any]) -> Any:
    """The options of an environment, defaults included. Options that are never printed (tokens) are left out."""
    options = getattr(env, "options", None)
    if not isinstance(options, BaseModel):
        return given
    return options.model_dump(mode="json", exclude={key for key, field in type(options).model_fields.items() if not field.repr})


def make_app(service: Service) -> "FastAPI":
    """The API of one environment as an ASGI application."""
    from fastapi import FastAPI, Request, Response
    from starlette.exceptions import HTTPException

    table = SessionTable(service.limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(table.keep_dropping_idle())
        yield
        sweeping.cancel()
        table.close_all()

    async def refused(_: Request, error: Any) -> Response:
        status, said = status_of(error)
        headers = {"Retry-After": "1"} if status == 429 else None
        return Response(encode({"error": said}), status, headers, media_type="application/json")

    app = FastAPI(lifespan=lifespan, openapi_url=None, exception_handlers=dict.fromkeys((Refusal, BadInput, HTTPException), refused))
    telemetry = Telemetry(
        health=table.problem,
        is_busy=lambda: table.num_playing > 0,
        begins="/v1/sessions(/[^/]+/reset)?",
        drain_seconds=service.limits.drain_seconds,
    )
    telemetry.gauge("tether_sessions", "Sessions that are open.", lambda: len(table))
    telemetry.gauge("tether_playing_sessions", "Sessions in an episode.", lambda: table.num_playing)
    telemetry.counter("tether_late_calls_total", "Calls of environments that ran past --step-timeout.", lambda: table.num_late)
    telemetry.add_to(app, service.token, lambda: {"status": "ok", "sessions": len(table)})

    def answer(content: bytes) -> Response:
        return Response(content, media_type="application/json")

    @app.get("/v1/env")
    async def describe(request: Request) -> Response:
        wanted = json_object(request.query_params.get("options", "{}").encode(), "the query's options", decode)
        return answer(await table.run(lambda: service.describe(wanted)))

    @app.post("/v1/sessions")
    async def open_session(request: Request) -> Response:
        body = await _read(request, OpenBody)
        return answer(await table.open(lambda: service.build(body.options), *body.seeds))

    @app.post("/v1/sessions/{name}/reset")
    async def reset(name: str, request: Request) -> Response:
        return answer(await table.reset(name, *(await _read(request, ResetBody)).seeds))

    @app.post("/v1/sessions/{name}/step")
    async def step(name: str, request: Request) -> Response:
        body = await _read(request, StepBody)
        return answer(await table.step(name, body.turn, body.answer))

    @app.get("/v1/sessions/{name}/instance")
    async def instance(name: str) -> Response:
        return answer(await table.instance(name))

    @app.delete("/v1/sessions/{name}")
    async def close(name: str) -> Response:
        table.close(name)
        return answer(encode({}))

    return app


# --- the bodies of requests ---


class ResetBody(Settings):
    """Which episode to play."""

    seed: StrictInt
    env_seed: StrictInt | None = None
    luck: StrictInt | None = None
    """What clients of tether 0.1 call `env_seed`."""

    @model_validator(mode="after")
    def _one_name(self) -> Self:
        if self.env_seed is not None and self.luck is not None:
            raise ValueError(f"got both '{ENV_SEED}' and its old name '{OLD_ENV_SEED}'; give {ENV_SEED} alone")
        return self

    @property
    def seeds(self) -> tuple[int, int | None]:
        return self.seed, self.env_seed if self.luck is None else self.luck


class OpenBody(ResetBody):
    """The first episode of a session, and the options of its environment."""

    options: InstanceOf[dict] = {}  # pydantic would refuse some texts that JSON can hold


class StepBody(Settings):
    turn: StrictInt
    answer: InstanceOf[str]


async def _read(request: "Request", kind: type[B]) -> B:
    """The body of a request, checked field by field."""
    value = await read_json(request, MAX_BODY, decode)
    return validate(kind, {key: given for key, given in value.items() if given is not None}, "request")


def check(service: Service) -> None:
    """Build and reset the environment once. So errors are reported before the server listens, and its data is loaded once."""
    try:
        with environment_boundary(f"environment '{service.name}' cannot be served"):
            service.describe({})
            env = service.build({})
            with suppress(BadInput):  # such as no instance in this split; clients may choose another
                env.reset(0)
            close_in_thread(env)
    except TetherError as error:
        raise (error.__cause__ if isinstance(error.__cause__, TetherError) else error) from None


def run(service: Service, listener: socket.socket) -> None:
    """Serve until the process is stopped (Ctrl-C raises KeyboardInterrupt once everything is closed)."""
    app = make_app(service)
    run_server(make_server(app, draining=app.state.telemetry.draining), listener)


@contextmanager
def serving(
    name: str, *, token: str | None = None, limits: SessionLimits | None = None, allow: Iterable[str] = CLIENT_OPTIONS, **options: Any
) -> Iterator[str]:
    """An environment served in the background of this program, on a free port of this machine; yields the URL.

    `allow` names the options that clients may choose, "*" for all.
    """
    service = Service(name, options, server_token(token, "localhost"), frozenset(allow), limits or SessionLimits())
    check(service)
    with serving_app(make_app(service), name) as url:
        yield url
