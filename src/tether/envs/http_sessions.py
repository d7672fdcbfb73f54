"""The sessions of an environment server: one environment each, one call at a time, none able to hold up another.

Environments are ordinary blocking Python, so every call runs in a thread of its own, off the event loop, under a time limit. A call
that is still running when its time is up is left behind with its session (a thread cannot be ended from outside); the others do not
notice. Whatever a call raises ends its session too, with the reason. The reply to the last step is kept, so that a client whose
connection broke can ask for the same turn again and never plays it twice.
"""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tether.core.errors import BadInput, EnvironmentFailure, environment_boundary
from tether.core.protocols import Env
from tether.envs.http_protocol import encode, observation_written, step_written

_LOG = logging.getLogger(__name__)
_LONGEST_MESSAGE = 2_000

CONFLICT, TIMED_OUT = 409, 504
"""HTTP statuses that decide what becomes of a session."""

T = TypeVar("T")


class Refusal(Exception):
    """A request that is answered with an error: the HTTP status and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server grants its clients."""

    max_sessions: int = 1024
    idle_timeout: float = 600.0
    """Seconds without a request after which a session is dropped."""
    step_timeout: float = 60.0
    """Seconds that building, resetting or stepping an environment may take."""


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
    """Every session of a server. All methods run on the event loop; only the environments' own code runs elsewhere."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._opening = 0

    def __len__(self) -> int:
        return len(self._sessions)

    async def open(self, build: Callable[[], Env], seed: int, env_seed: int | None) -> bytes:
        """A new session and the first observation of its first episode."""
        self._make_room()
        self._opening += 1
        try:
            session = Session(await self.run(build), self._clock())
            name = secrets.token_urlsafe(24)  # a secret, so not from the seeded streams
            try:
                reply = await self._begin(session, seed, env_seed, {"session": name})
            except Refusal as refusal:
                if refusal.status != TIMED_OUT:
                    dispose(session.env)
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
        """One turn. The turn just played may be asked for again with the same answer: that gets the same reply."""
        async with self._held(name) as session:
            if turn == session.turn and answer == session.answer:
                return session.reply
            if not session.playing:
                raise Refusal(CONFLICT, "the episode of this session is over; reset the session first")
            if turn != session.turn + 1:
                raise Refusal(CONFLICT, f"turn {turn} was asked for, but {session.turn} turns of this episode have been played")
            done, reply = await self.run(lambda: _stepped(session.env, answer), session.env)
            session.turn, session.answer, session.reply, session.playing = turn, answer, reply, not done
            return reply

    async def instance(self, name: str) -> bytes:
        """The instance being played as text, or null where the environment does not tell it."""
        async with self._held(name) as session:
            return await self.run(lambda: _instance(session.env), session.env)

    def close(self, name: str) -> None:
        """End a session. One that is gone already is no error: a client may ask twice."""
        session = self._sessions.pop(name, None)
        if session is not None and not session.lock.locked():  # else whoever holds it disposes of it
            dispose(session.env)

    def close_all(self) -> None:
        for name in list(self._sessions):
            self.close(name)

    def drop_idle(self) -> None:
        """Drop the sessions that no request has come for in a while."""
        oldest = self._clock() - self.limits.idle_timeout
        for name, session in list(self._sessions.items()):
            if session.last_used < oldest and not session.lock.locked():
                self.close(name)

    async def run(self, call: Callable[[], T], env: Env | None = None) -> T:
        """The result of a call that runs environment code. Should it come back too late, `env` (or what it built) is disposed of."""
        try:
            return await _beside(call, self.limits.step_timeout, env)
        except TimeoutError:
            limit = self.limits.step_timeout
            raise Refusal(TIMED_OUT, f"the environment took longer than {limit:g} s, the server's --step-timeout") from None
        except EnvironmentFailure as failure:
            raise _refused(failure) from _cause(failure)

    # --- inside ---

    def _find(self, name: str) -> Session:
        session = self._sessions.get(name)
        if session is None:
            raise Refusal(404, "there is no such session; it may have ended with an error, been closed, or been dropped for being idle")
        return session

    def _make_room(self) -> None:
        """A place for one more session: those left idle go first, then the one whose episode ended longest ago."""
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
        reply = await self.run(lambda: encode({**head, **_begun(session.env, seed, env_seed)}), session.env)
        session.playing = True
        return reply

    @asynccontextmanager
    async def _held(self, name: str, keep_after: type[Exception] | None = None) -> AsyncIterator[Session]:
        """A session for one request at a time. If the environment fails the session ends, unless the failure is of the kind it is kept
        after; a request that did not fit the state of the session changes nothing."""
        session = self._find(name)
        async with session.lock:
            self._find(name)  # it may have ended while this request waited for its turn
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
                if name not in self._sessions and not stuck:  # a stuck one is disposed of when its call comes back
                    dispose(session.env)


def _begun(env: Env, seed: int, env_seed: int | None) -> dict[str, Any]:
    observation = env.reset(seed, env_seed=env_seed)
    return {"instructions": str(env.instructions), "observation": observation_written(observation)}


def _stepped(env: Env, answer: str) -> tuple[bool, bytes]:
    step = env.step(answer)
    return bool(step.done), encode(step_written(step))


def _instance(env: Env) -> bytes:
    return encode({"instance": getattr(env, "instance", None)})


async def _beside(call: Callable[[], T], time_limit: float, env: Env | None) -> T:
    """Run a blocking call in a thread of its own and wait for it. The thread is a daemon: a stuck one does not keep the server from ending."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, failure: EnvironmentFailure | None) -> None:
        if answer.done():  # nobody waits any more
            dispose(value if env is None else env)
        elif failure is not None:
            answer.set_exception(failure)
        else:
            answer.set_result(value)

    def work() -> None:
        value: Any = None
        failure: EnvironmentFailure | None = None
        try:
            with environment_boundary("call"):
                value = call()
        except EnvironmentFailure as error:
            failure = error
        except SystemExit as error:  # it may end its session, not the server
            failure = EnvironmentFailure(f"SystemExit: {error}")
        with suppress(RuntimeError):  # the event loop is closed: the server has stopped
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=work, daemon=True, name="environment call").start()
    return await asyncio.wait_for(answer, time_limit)


def dispose(env: object) -> None:
    """Close an environment, if it has anything to close, without waiting for it."""
    close = getattr(env, "close", None)
    if close is None:
        return

    def work() -> None:
        try:
            with environment_boundary("closing an environment"):
                close()
        except EnvironmentFailure as failure:
            _LOG.warning("%s", failure)

    threading.Thread(target=work, daemon=True, name="environment close").start()


def _cause(failure: EnvironmentFailure) -> BaseException:
    """What an environment raised, without the words that the boundary put around it."""
    return failure.__cause__ or failure


def _refused(failure: EnvironmentFailure) -> Refusal:
    """A mistake in what was asked for is the client's (400, its own words); anything else is the environment's (500, with its kind)."""
    cause = _cause(failure)
    if isinstance(cause, BadInput):
        return Refusal(400, str(cause))
    kind = "" if isinstance(cause, EnvironmentFailure) else f"{type(cause).__name__}: "
    return Refusal(500, " ".join(f"{kind}{cause}".split())[:_LONGEST_MESSAGE])
