"""The sessions of an environment server: one environment each, one call at a time, and no session blocks another.

Environments are blocking Python, so every call runs in a thread beside the event loop, under a deadline (`calls`). A call that is
still running at its deadline is left behind together with its session; other sessions are not affected. An exception of the environment
ends its session too, and the reply says why. The reply to the last step is kept: a client whose connection broke can ask for the same turn
again, and the turn is not played twice.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tether.core.errors import BadInput, EnvironmentFailure, environment_boundary
from tether.core.http import DRAIN_SECONDS, Refusal
from tether.core.protocols import Env
from tether.envs.remote.calls import Begun, Reset, Take, close_in_thread, in_thread, perform, within
from tether.envs.remote.wire import encode, observation_written, step_written

_LONGEST_MESSAGE = 2_000

CONFLICT, TIMED_OUT = 409, 504
"""HTTP statuses that decide whether a session continues."""

STUCK_CALLS = 8
"""So many calls in a row past their deadline, and none that ended between them: the server is stuck. One slow environment is no reason to end others."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a server grants its clients."""

    max_sessions: int = 1024
    idle_timeout: float = 600.0
    """Seconds without a request after which a session is dropped."""
    step_timeout: float = 60.0
    """Seconds that building, resetting or stepping an environment may take."""
    drain_seconds: float = DRAIN_SECONDS
    """Seconds that episodes get to end when SIGTERM stops the server."""


@dataclass(slots=True, eq=False)
class Session:
    """One client's environment."""

    env: Env
    last_used: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    playing: bool = False
    turn: int = 0
    """Steps taken in this episode."""
    answer: str | None = None
    """The answer of the last step, whose reply is kept."""
    reply: bytes = b""


class SessionTable:
    """Every session of a server. All methods run on the event loop; only the environments' own code runs in threads."""

    def __init__(self, limits: SessionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._opening = 0
        self.num_late = 0
        """Calls that ran past their deadline."""
        self._late_in_a_row = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_playing(self) -> int:
        """Sessions in an episode."""
        return sum(session.playing for session in self._sessions.values())

    def problem(self) -> str | None:
        """Why the server does not work, in one line; None while it does."""
        if self._late_in_a_row < STUCK_CALLS:
            return None
        return f"the last {self._late_in_a_row} calls of the environment ran past --step-timeout, and none ended; restart the server"

    async def open(self, build: Callable[[], Env], seed: int, env_seed: int | None) -> bytes:
        """A new session and the first observation of its first episode."""
        self._make_room()
        self._opening += 1
        try:
            session = Session(await self.run(build, on_late=close_in_thread), self._clock())
            name = secrets.token_urlsafe(24)  # a secret, so not from the seeded streams
            try:
                reply = await self._begin(session, seed, env_seed, {"session": name})
            except Refusal as refusal:
                if refusal.status != TIMED_OUT:
                    close_in_thread(session.env)
                raise
        finally:
            self._opening -= 1
        self._sessions[name] = session
        return reply

    async def reset(self, name: str, seed: int, env_seed: int | None) -> bytes:
        """A new episode in a session."""
        async with self._held(name, keep_after=BadInput) as session:
            return await self._begin(session, seed, env_seed, {})

    async def step(self, name: str, turn: int, answer: str) -> bytes:
        """One turn. The turn just played may be requested again with the same answer; it gets the same reply."""
        async with self._held(name) as session:
            if turn == session.turn and answer == session.answer:
                return session.reply
            if not session.playing:
                raise Refusal(CONFLICT, "the episode of this session is over; reset the session first")
            if turn != session.turn + 1:
                raise Refusal(CONFLICT, f"turn {turn} was asked for, but {session.turn} turns of this episode have been played")
            done, reply = await self._call(session, lambda env: _stepped(env, answer))
            session.turn, session.answer, session.reply, session.playing = turn, answer, reply, not done
            return reply

    async def instance(self, name: str) -> bytes:
        """The instance being played as text, or null where the environment does not expose it."""
        async with self._held(name) as session:
            return await self._call(session, _instance)

    def close(self, name: str) -> None:
        """End a session. A session that does not exist is no error: a client may ask twice."""
        session = self._sessions.pop(name, None)
        if session is not None and not session.lock.locked():  # otherwise the request that holds it closes the environment
            close_in_thread(session.env)

    def close_all(self) -> None:
        for name in list(self._sessions):
            self.close(name)

    def drop_idle(self) -> None:
        """Drop the sessions without a request for `idle_timeout` seconds."""
        oldest = self._clock() - self.limits.idle_timeout
        for name, session in list(self._sessions.items()):
            if session.last_used < oldest and not session.lock.locked():
                self.close(name)

    async def keep_dropping_idle(self) -> None:
        while True:
            await asyncio.sleep(min(15.0, self.limits.idle_timeout / 4))
            self.drop_idle()

    async def run(self, call: Callable[[], T], on_late: Callable[[T | None], None] | None = None) -> T:
        """The result of a function that runs environment code; `on_late` gets a result that comes after the deadline."""

        def work() -> T:
            with environment_boundary("call"):
                return call()

        return await self._within_limit(work, on_late)

    # --- inside ---

    async def _call(self, session: Session, call: Callable[[Env], T]) -> T:
        """A call of a session's environment. If it returns after the deadline, the session is gone and its environment is closed."""
        return await self._within_limit(lambda: call(session.env), lambda _: close_in_thread(session.env))

    async def _within_limit(self, work: Callable[[], T], on_late: Callable[[T | None], None] | None) -> T:
        try:
            result = await within(self.limits.step_timeout, in_thread("call", work, on_late))
            self._late_in_a_row = 0
            return result
        except TimeoutError:
            self.num_late += 1
            self._late_in_a_row += 1
            limit = self.limits.step_timeout
            raise Refusal(TIMED_OUT, f"the environment took longer than {limit:g} s, the server's --step-timeout") from None
        except EnvironmentFailure as failure:
            self._late_in_a_row = 0
            raise _refused(failure) from _cause(failure)

    def _find(self, name: str) -> Session:
        session = self._sessions.get(name)
        if session is None:
            raise Refusal(404, "there is no such session; it may have ended with an error, been closed, or been dropped for being idle")
        return session

    def _make_room(self) -> None:
        """Room for one more session: idle sessions are dropped first, then the one whose episode ended longest ago."""
        self.drop_idle()
        if len(self._sessions) + self._opening < self.limits.max_sessions:
            return
        ended = [name for name, session in self._sessions.items() if not session.playing and not session.lock.locked()]
        if not ended:
            raise Refusal(
                429, f"all {self.limits.max_sessions} sessions of the server are being played; try later, or raise --max-sessions"
            )
        self.close(min(ended, key=lambda name: self._sessions[name].last_used))

    async def _begin(self, session: Session, seed: int, env_seed: int | None, head: dict[str, Any]) -> bytes:
        session.playing, session.turn, session.answer = False, 0, None
        reply = await self._call(session, lambda env: _begun(env, seed, env_seed, head))
        session.playing = True
        return reply

    @asynccontextmanager
    async def _held(self, name: str, keep_after: type[Exception] | None = None) -> AsyncIterator[Session]:
        """A session for one request at a time.

        If the environment fails, the session ends, except after a failure of the kind `keep_after`. A request that does not fit the state
        of the session (409) changes nothing.
        """
        session = self._find(name)
        async with session.lock:
            self._find(name)  # it may have ended while this request waited for the lock
            stuck = False
            try:
                yield session
            except Refusal as refusal:
                stuck = refusal.status == TIMED_OUT
                kept = refusal.status == CONFLICT or (keep_after is not None and isinstance(refusal.__cause__, keep_after))
                if not kept:
                    self._sessions.pop(name, None)
                raise
            finally:
                session.last_used = self._clock()
                if name not in self._sessions and not stuck:  # the environment of a stuck call is closed when the call returns
                    close_in_thread(session.env)


def _begun(env: Env, seed: int, env_seed: int | None, head: dict[str, Any]) -> bytes:
    begun: Begun = perform(env, Reset(seed, env_seed))
    with environment_boundary("reset"):
        few_shot = {"few_shot": begun.few_shot} if begun.few_shot else {}
        return encode({**head, "instructions": begun.instructions, **few_shot, "observation": observation_written(begun.observation)})


def _stepped(env: Env, answer: str) -> tuple[bool, bytes]:
    step = perform(env, Take(answer))
    with environment_boundary("step"):
        return bool(step.done), encode(step_written(step))


def _instance(env: Env) -> bytes:
    with environment_boundary("instance"):
        return encode({"instance": getattr(env, "instance", None)})


def _cause(failure: EnvironmentFailure) -> BaseException:
    """The exception of the environment, without the words that `environment_boundary` added."""
    return failure.__cause__ or failure


def _refused(failure: EnvironmentFailure) -> Refusal:
    """A mistake in the request is the client's (400, in its own words); anything else is the environment's (500, with its type)."""
    cause = _cause(failure)
    if isinstance(cause, BadInput):
        return Refusal(400, str(cause))
    kind = "" if isinstance(cause, EnvironmentFailure) else f"{type(cause).__name__}: "
    said = str(cause).removeprefix("call: ")  # the name that `in_thread` gave a call that ended its thread
    return Refusal(500, " ".join(f"{kind}{said}".split())[:_LONGEST_MESSAGE])
