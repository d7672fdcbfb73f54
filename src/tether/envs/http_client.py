"""An environment that is played somewhere else: the Env protocol over HTTP, as if it were local.

`connect` asks the server what it serves with these options; each `reset` then begins an episode in a session of the server, and each
`step` is one request. An environment that is no longer used leaves its session to the next one with the same options in this process,
so a training run keeps as many sessions as it plays episodes at once. The server may forget a session between episodes (reset opens
another); one that is lost in the middle of an episode is an error that ends that episode.
"""

import logging
import math
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from tether.core.errors import BadInput
from tether.core.grammar import ANSWER_TAGS
from tether.core.types import Observation, Step
from tether.core.version import __version__
from tether.envs.http_protocol import PROTOCOL, WireError, encode, observation_read, step_read
from tether.envs.http_transport import Endpoint, HttpEnvError, Place, SessionLost, endpoint, here
from tether.envs.turns import Work, whole

__all__ = ["HttpEnv", "HttpEnvError", "connect"]

_LOG = logging.getLogger(__name__)

DESCRIPTION_LIFE = 5.0
"""Seconds that a server's description is taken as still true, so that building hundreds of environments asks once."""

_UNSET, _PLAYING, _OVER = "has not been reset", "is being played", "is over"


def connect(url: str, *, token: str | None = None, timeout: float = 60.0, **options: Any) -> "HttpEnv":
    """The environment served at a URL. `token` (by default TETHER_TOKEN) and `timeout`, in seconds for a request, are the
    connection's; every other option goes to the environment."""
    return HttpEnv(endpoint(url, token or os.environ.get("TETHER_TOKEN") or None, timeout), options)


class HttpEnv:
    """An Env whose episodes are played on a server."""

    work: Work = "wait"

    def __init__(self, place: Endpoint, options: dict[str, Any]) -> None:
        self._session: str | None = None
        self._place, self._wanted = place, options
        try:
            self._key: Place = (place.base, place.token, encode(options))
        except WireError as error:
            raise BadInput(f"option {error}") from None
        described = _description(place, self._key)
        self._pid = os.getpid()
        self._state = _UNSET
        self._turn = 0
        self.name = described.name
        self.max_turns = described.max_turns
        self.options = described.options
        """The options as the server understood them, defaults included."""
        self.reward_range = described.reward_range
        """The least and the most that one step can pay."""
        self.reply_tags = described.reply_tags
        """The tags that an agent may put its answer into."""
        self.actions = described.actions
        """The names of actions, where answers are made of them."""
        self._instructions = described.instructions

    @property
    def instructions(self) -> str:
        """The rules of the task, for the system message."""
        return self._instructions

    @property
    def instance(self) -> str | None:
        """The whole instance being played as text; None where the server does not tell it."""
        session = self._own_session()
        if session is None:
            raise BadInput(f"{self.name}: there is no instance before the first reset; call reset(seed) first")
        told = self._place.call("GET", f"/v1/sessions/{session}/instance").get("instance")
        return told if isinstance(told, str) else None

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        request = {"seed": whole("seed", seed), "luck": None if env_seed is None else whole("luck", env_seed)}
        session, self._session, self._state = self._own_session() or _unparked(self._key), None, _UNSET
        reply: dict[str, Any] | None = None
        if session is not None:
            try:
                reply = self._place.call("POST", f"/v1/sessions/{session}/reset", request)
            except SessionLost:
                session = None  # dropped between two episodes: nothing is lost
        if reply is None:
            reply = self._place.call("POST", "/v1/sessions", {**request, "options": self._wanted})
            session = reply.get("session")
        instructions = reply.get("instructions", self._instructions)
        if not isinstance(session, str) or not isinstance(instructions, str):
            raise self._place.garbled("has no session and instructions")
        try:
            observation = observation_read(reply.get("observation"))
        except WireError as error:
            raise self._place.garbled(error) from None
        self._session, self._instructions, self._turn, self._state, self._pid = session, instructions, 0, _PLAYING, os.getpid()
        return observation

    def step(self, answer: str) -> Step:
        if self._state is not _PLAYING:
            raise BadInput(f"{self.name}: step was called but the episode {self._state}; call reset(seed) first")
        session, self._session, self._state = self._own_session(), None, _UNSET  # until the server has answered
        if session is None:
            raise HttpEnvError(f"{self.name}: the episode belongs to the process that this one was forked from; call reset(seed) first")
        try:
            step = step_read(self._place.call("POST", f"/v1/sessions/{session}/step", {"turn": self._turn + 1, "answer": answer}))
        except SessionLost as error:
            raise HttpEnvError(f"the server lost the episode: {error}") from None
        except WireError as error:
            raise self._place.garbled(error) from None
        self._session, self._turn, self._state = session, self._turn + 1, _OVER if step.done else _PLAYING
        return step

    def close(self) -> None:
        """End the session on the server. The environment can still be reset, which opens another."""
        session, self._session, self._state = self._own_session(), None, _UNSET
        if session is not None:
            try:
                self._place.call("DELETE", f"/v1/sessions/{session}")
            except HttpEnvError as error:  # the server drops it by itself, in time
                _LOG.debug("closing %s: %s", self.name, error)

    def _own_session(self) -> str | None:
        """The session, unless it belongs to the process that this one was forked from."""
        return self._session if self._pid == os.getpid() else None

    def __del__(self) -> None:
        if self._session is not None and not sys.is_finalizing() and self._own_session() is not None:
            here().parked[self._key].append((self._place, self._session))

    def __reduce__(self) -> Any:
        """A copy is a new environment with the same options; an episode cannot be played twice at once."""
        return HttpEnv, (self._place, self._wanted)


def _unparked(key: Place) -> str | None:
    """A session that another environment of this process has left."""
    try:
        return here().parked[key].popleft()[1]
    except IndexError:
        return None


# --- what is served ---


@dataclass(frozen=True, slots=True)
class Description:
    """What a server says of its environment."""

    name: str
    max_turns: int
    instructions: str
    options: dict[str, Any]
    reward_range: tuple[float, float]
    reply_tags: tuple[str, ...]
    actions: tuple[str, ...]


_described: dict[Place, tuple[float, Description]] = {}


def _description(place: Endpoint, key: Place) -> Description:
    """What the server says it serves with these options, checked."""
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


def _checked(place: Endpoint, told: dict[str, Any]) -> Description:
    if told.get("protocol") != PROTOCOL:
        raise HttpEnvError(
            f"{place.base} speaks version {told.get('protocol')} of the protocol ({told.get('version')}), "
            f"this client version {PROTOCOL} (tether {__version__}); install matching versions"
        )
    version = str(told.get("version", ""))
    if version.startswith("tether ") and version != f"tether {__version__}":
        _LOG.warning("%s runs %s, this is tether %s: an environment may differ between versions", place.base, version, __version__)
    optional: dict[str, Any] = {
        "instructions": "",
        "options": {},
        "reward_range": [-math.inf, math.inf],
        "reply_tags": list(ANSWER_TAGS),
        "actions": [],
    }
    fields: dict[str, Any] = {key: optional.get(key) if told.get(key) is None else told[key] for key in ("name", "max_turns", *optional)}
    span = fields["reward_range"]
    right = {
        "name": isinstance(fields["name"], str),
        "max_turns": isinstance(fields["max_turns"], int) and fields["max_turns"] >= 1,
        "instructions": isinstance(fields["instructions"], str),
        "options": isinstance(fields["options"], dict),
        "reward_range": isinstance(span, list) and len(span) == 2 and all(isinstance(end, int | float) for end in span),
        "reply_tags": _are_texts(fields["reply_tags"]) and bool(fields["reply_tags"]),
        "actions": _are_texts(fields["actions"]),
    }
    for key in right:
        if not right[key]:
            raise place.garbled(f"has no usable '{key}'")
    tuples = {
        "reward_range": (float(span[0]), float(span[1])),
        "reply_tags": tuple(fields["reply_tags"]),
        "actions": tuple(fields["actions"]),
    }
    return Description(**{**fields, **tuples})


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
