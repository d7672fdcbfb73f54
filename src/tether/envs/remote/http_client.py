"""An environment on a server, used through the Env protocol like a local one.

`connect` asks the server for a description of its environment with these options. Each `reset` starts an episode in a session of the
server, and each `step` is one request. An environment that is garbage-collected leaves its session to the next one with the same options
in this process, so a training run needs as many sessions as it plays episodes at once. The server may drop a session between episodes
(`reset` opens another). A session that is lost during an episode ends that episode with an error.

Every request of the protocol can be sent again without harm (a step carries its turn). So a request is sent again, with growing delays and until
its deadline, when the connection breaks or the server answers that it is busy. A server that is slow, gone for longer, or does not follow the
protocol raises `HttpEnvError`. A request that the server refuses as the caller's mistake raises `BadInput` with the server's words.
"""

import atexit
import logging
import math
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, StrictInt, ValidationError

from tether.core.errors import BadInput, TetherError
from tether.core.grammar import ANSWER_TAGS
from tether.core.http import checked_token, token_for
from tether.core.http_client import HttpClient, Reply, Unanswered, check_address
from tether.core.types import Exchanges, Observation, Step
from tether.core.version import __version__
from tether.envs.base import EpisodePhase, Work, whole
from tether.envs.remote.wire import OLD_ENV_SEED, PROTOCOL, WireError, decode, encode, observation_read, step_read

_LOG = logging.getLogger(__name__)

DESCRIPTION_LIFE = 5.0
"""Seconds that a server's description is cached, so that building hundreds of environments asks once."""
MAX_REPLY = 64 * 2**20
"""Bytes of a reply; a large picture has a few million."""
CLOSING_SECONDS = 1.0
"""Seconds for closing a session, and for closing all of them when the process ends."""

SessionKey = tuple[str, str | None, bytes]
"""Sessions with equal keys are interchangeable: address, token and options."""


class HttpEnvError(TetherError):
    """An environment server failed: it is down, too slow, has lost the session, or does not follow the protocol."""


class SessionLost(HttpEnvError):
    """The server does not know the session (or the path) of a request."""


@dataclass(frozen=True, slots=True)
class EnvServer:
    """The address of a served environment, with the token and the deadline of requests."""

    base: str
    """The URL without a slash at its end; may hold a path."""
    token: str | None
    timeout: float
    """Seconds that one request may take, further attempts included."""

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Send a request; returns the JSON object of the reply."""
        try:
            reply = self._client().request(method, path, content=None if body is None else encode(body), query=query)
        except Unanswered as error:
            raise HttpEnvError(self._failure(error)) from None
        return self._object(reply)

    def end_session(self, session: str, timeout: float = CLOSING_SECONDS) -> None:
        """Tell the server that a session is not used any more; one attempt, because the server drops idle sessions by itself."""
        with suppress(Unanswered):
            self._client().request("DELETE", f"/v1/sessions/{session}", timeout=timeout, delays=())

    def _client(self) -> HttpClient:
        return HttpClient(self.base, token=self.token, timeout=self.timeout, most_bytes=MAX_REPLY)

    def _failure(self, error: Unanswered) -> str:
        if error.kind == "slow":
            return f"{self.base} did not answer within {self.timeout:g} s, the option timeout"
        if error.kind in ("unreachable", "broken"):
            said = f"nothing answers at {self.base} ({error}); start it with `tether serve-env NAME`, or check the address"
        else:
            said = f"{self.base} {error}" if error.reply is not None else f"{self.base} cannot be asked ({error})"
        return f"{said}, for {self.timeout:g} s, the option timeout" if error.until_deadline else said

    def _object(self, reply: Reply) -> dict[str, Any]:
        """The object of a reply; raises the error that the reply reports."""
        if reply.status in (401, 403):
            refused = f"{self.base} refused{f': {reply.reason}' if reply.reason else ''}"
            raise BadInput(f"{refused}; give the server's token as option token or in TETHER_TOKEN")
        if reply.status == 400 and reply.reason:
            raise BadInput(reply.reason)
        if reply.status == 404:
            raise SessionLost(f"{self.base} {reply}")
        if reply.status != 200:
            raise HttpEnvError(f"{self.base} {reply}")
        try:
            value = decode(reply.content)
        except WireError as error:
            raise self.garbled(error) from None
        if not isinstance(value, dict):
            raise self.garbled(f"is a {type(value).__name__}")
        return value

    def garbled(self, what: object) -> HttpEnvError:
        return HttpEnvError(f"{self.base} does not answer as an environment server does: the reply {what}")


_parked: defaultdict[SessionKey, deque[tuple[EnvServer, str]]] = defaultdict(deque)
"""Sessions that no environment of this process uses any more.

`HttpEnv.__del__` appends here, and the garbage collector may call it at any point, also inside code that holds a lock. A lock could deadlock
then. Appending to a deque and popping from it are atomic, so no lock is needed.
"""

os.register_at_fork(after_in_child=_parked.clear)  # they are the parent's


@atexit.register
def _end_parked() -> None:
    """End the parked sessions, as far as that takes no longer than a moment."""
    deadline = time.monotonic() + CLOSING_SECONDS
    for waiting in _parked.values():
        while waiting and (left := deadline - time.monotonic()) > 0:
            server, session = waiting.pop()
            server.end_session(session, timeout=left)


def connect(url: str, *, token: str | None = None, timeout: float = 60.0, **options: Any) -> "HttpEnv":
    """The environment served at a URL. `token` (by default TETHER_TOKEN) and `timeout`, in seconds for a request, are the
    connection's; every other option goes to the environment."""
    parts = urlsplit(url) if check_address(url) else None
    if parts is None or parts.query or parts.fragment or parts.username is not None or any(letter.isspace() for letter in url):
        raise BadInput(f"'{url}' is not the address of an environment server; write it as http://HOST:PORT or https://HOST/PATH")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise BadInput(f"http option 'timeout': got {timeout!r}; give a number of seconds above 0")
    token = token or token_for(url)
    return HttpEnv(EnvServer(url.rstrip("/"), None if token is None else checked_token(token), float(timeout)), options)


class HttpEnv:
    """An Env whose episodes are played on a server."""

    work: Work = "wait"

    def __init__(self, place: EnvServer, options: dict[str, Any]) -> None:
        self._session: str | None = None
        self._place, self._wanted = place, options
        try:
            self._key: SessionKey = (place.base, place.token, encode(options))
        except WireError as error:
            raise BadInput(f"option {error}") from None
        served = _description(place, self._key)
        self._seed_field = served.seed_field
        self._pid = os.getpid()
        self._phase = EpisodePhase.UNSET
        self._turn = 0
        self.name, self.max_turns = served.name, served.max_turns
        self.options = served.options
        """The options as the server understood them, defaults included."""
        self.reward_range = served.reward_range
        """The smallest and the largest reward of one step."""
        self.reply_tags = served.reply_tags
        """The tags that an agent may put its answer into."""
        self.actions = served.actions
        """The names of actions, where answers consist of them."""
        self.shows_images = served.shows_images
        """Observations carry pictures, so that only a model that sees can play."""
        self._instructions = served.instructions
        self.few_shot: Exchanges = ()
        """Examples as turns in front of the first observation, known after a reset."""

    @property
    def instructions(self) -> str:
        """The rules of the task, for the system message."""
        return self._instructions

    @property
    def instance(self) -> str | None:
        """The whole instance being played as text; None where the server does not expose it."""
        session = self._own_session()
        if session is None:
            raise BadInput(f"{self.name}: there is no instance before the first reset; call reset(seed) first")
        told = self._place.call("GET", f"/v1/sessions/{session}/instance").get("instance")
        return told if isinstance(told, str) else None

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        request = {"seed": whole("seed", seed), self._seed_field: None if env_seed is None else whole("env_seed", env_seed)}
        session, self._session, self._phase = self._own_session(), None, EpisodePhase.UNSET
        if session is None:
            with suppress(IndexError):  # else one that another environment of this process has left
                session = _parked[self._key].popleft()[1]
        reply: dict[str, Any] | None = None
        if session is not None:
            try:
                reply = self._place.call("POST", f"/v1/sessions/{session}/reset", request)
            except SessionLost:
                session = None  # dropped between two episodes: no episode is lost
        if reply is None:
            reply = self._place.call("POST", "/v1/sessions", {**request, "options": self._wanted})
            session = reply.get("session")
        instructions = reply.get("instructions", self._instructions)
        few_shot = reply.get("few_shot", [])  # servers of earlier versions have none
        if not isinstance(session, str) or not isinstance(instructions, str):
            raise self._place.garbled("has no session and instructions")
        if not isinstance(few_shot, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in few_shot
        ):
            raise self._place.garbled("has no usable 'few_shot'")
        try:
            observation = observation_read(reply.get("observation"))
        except WireError as error:
            raise self._place.garbled(error) from None
        self._session, self._instructions, self._turn, self._pid = session, instructions, 0, os.getpid()
        self.few_shot = tuple((shown, text) for shown, text in few_shot)
        self._phase = EpisodePhase.PLAYING
        return observation

    def step(self, answer: str) -> Step:
        self._phase.require_playing(self.name)
        # Until the server has replied the episode counts as lost: whatever the request raises, the next reset opens another session.
        session, self._session, self._phase = self._own_session(), None, EpisodePhase.UNSET
        if session is None:
            raise HttpEnvError(f"{self.name}: the episode belongs to the process that this one was forked from; call reset(seed) first")
        try:
            step = step_read(self._place.call("POST", f"/v1/sessions/{session}/step", {"turn": self._turn + 1, "answer": answer}))
        except SessionLost as error:
            raise HttpEnvError(f"the server lost the episode: {error}") from None
        except WireError as error:
            raise self._place.garbled(error) from None
        self._session, self._turn = session, self._turn + 1
        self._phase = EpisodePhase.OVER if step.done else EpisodePhase.PLAYING
        return step

    def close(self) -> None:
        """End the session on the server. The environment can still be reset, which opens another."""
        session, self._session, self._phase = self._own_session(), None, EpisodePhase.UNSET
        if session is not None:
            self._place.end_session(session)

    def _own_session(self) -> str | None:
        """The session, unless it belongs to the process that this one was forked from."""
        return self._session if self._pid == os.getpid() else None

    def __del__(self) -> None:
        if self._session is not None and not sys.is_finalizing() and self._own_session() is not None:
            _parked[self._key].append((self._place, self._session))

    def __reduce__(self) -> Any:
        """A copy is a new environment with the same options; an episode cannot be continued by two environments."""
        return HttpEnv, (self._place, self._wanted)


# --- what is served ---


class ServedEnv(BaseModel):
    """A server's description of its environment, checked. What it leaves out, or gives as null, has its default."""

    name: str
    max_turns: Annotated[StrictInt, Field(ge=1)]
    instructions: str = ""
    options: dict[str, Any] = {}
    reward_range: tuple[float, float] = (-math.inf, math.inf)
    reply_tags: Annotated[tuple[str, ...], Field(min_length=1)] = ANSWER_TAGS
    actions: tuple[str, ...] = ()
    shows_images: bool = False
    seed_field: Literal["env_seed", "luck"] = OLD_ENV_SEED
    """The name of the field for `env_seed` in requests. Servers before tether 0.2 know it as `luck`, and refuse any other name."""


_described: dict[SessionKey, tuple[float, ServedEnv]] = {}


def _description(place: EnvServer, key: SessionKey) -> ServedEnv:
    """The server's description of its environment with these options."""
    known = _described.get(key)
    if known is not None and time.monotonic() - known[0] < DESCRIPTION_LIFE:
        return known[1]
    try:
        told = place.call("GET", "/v1/env", query={"options": key[2].decode("ascii")})
    except SessionLost as error:
        raise HttpEnvError(f"{error}; no environment is served at this address, check its path") from None
    described = _checked(place, told)
    _described[key] = (time.monotonic(), described)
    return described


def _checked(place: EnvServer, told: dict[str, Any]) -> ServedEnv:
    if told.get("protocol") != PROTOCOL:
        raise HttpEnvError(
            f"{place.base} speaks version {told.get('protocol')} of the protocol ({told.get('version')}), "
            f"this client version {PROTOCOL} (tether {__version__}); install matching versions"
        )
    version = str(told.get("version", ""))
    if version.startswith("tether ") and version != f"tether {__version__}":
        _LOG.warning("%s runs %s, this is tether %s: an environment may differ between versions", place.base, version, __version__)
    try:
        return ServedEnv.model_validate({key: value for key, value in told.items() if value is not None})
    except ValidationError as error:
        raise place.garbled(f"has no usable '{error.errors()[0]['loc'][0]}'") from None
