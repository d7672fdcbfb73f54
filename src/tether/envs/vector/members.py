"""The vector of environments and its members.

A member is an Env that can also be asked without waiting for the answer. It holds a host (a live environment) while it plays an
episode and gives it back when the episode is over, so there are never more processes than episodes under way. A member whose
environment hung, crashed or raised answers every step with that failure until it is reset; a reset always gives it a sound one.
"""

import atexit
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, get_args

from tether.core.errors import BadInput, EnvironmentFailure
from tether.core.grammar import ANSWER_TAGS
from tether.core.protocols import Env
from tether.core.types import Observation, Step
from tether.envs.env_factory import EnvFactory, EnvSource, env_factory
from tether.envs.turns import Work
from tether.envs.vector.background import Background
from tether.envs.vector.calls import Begun, Call, Reset, Take, close_env
from tether.envs.vector.hosts import Host, InlineHost, ThreadHost
from tether.envs.vector.process import ProcessHost, fork_server

T = TypeVar("T")

STEP_SECONDS = 60.0
"""What a reset or a step may take by default."""


class _Phase(Enum):
    UNSET = "has not been reset"
    PLAYING = "is being played"
    OVER = "is over"
    BROKEN = "is broken"


class Member:
    """One environment of a vector."""

    def __init__(self, number: int, vector: "VectorEnv", like: Env) -> None:
        self.number = number
        self.name, self.max_turns, self.instructions = like.name, like.max_turns, like.instructions
        self.reply_tags: tuple[str, ...] = getattr(like, "reply_tags", ANSWER_TAGS)
        self._vector = vector
        self._host: Host | None = None
        self._phase = _Phase.UNSET
        self._failure: EnvironmentFailure | None = None
        self._busy = False

    @property
    def over(self) -> bool:
        """The episode has ended; a reset begins the next one."""
        return self._phase is _Phase.OVER

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        return self.submit_reset(seed, env_seed).result()

    def step(self, answer: str) -> Step:
        return self.submit_step(answer).result()

    def submit_reset(self, seed: int, env_seed: int | None = None) -> Future[Observation]:
        """Begin a reset; the future holds the observation or an EnvironmentFailure."""
        return self._submit(Reset(seed, env_seed), self._begun)

    def submit_step(self, answer: str) -> Future[Step]:
        """Begin a step; the future holds the step or an EnvironmentFailure."""
        if self._phase is _Phase.BROKEN and not self._busy:
            refused: Future[Step] = Future()
            refused.set_exception(EnvironmentFailure(f"step: the environment failed before ({self._failure}); reset it first"))
            return refused
        if self._phase is not _Phase.PLAYING and not self._busy:
            raise BadInput(f"{self.name}: step was called but the episode {self._phase.value}; call reset(seed) first")
        return self._submit(Take(answer), self._stepped)

    def _submit(self, call: Call, accept: Callable[[Any], Any]) -> Future[Any]:
        if self._busy:
            raise BadInput(f"{self.name}: {call.what} was called while member {self.number} is still at work; wait for its answer first")
        self._host = self._host or self._vector.lend_host()
        self._busy = True
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._host.submit(call).add_done_callback(lambda inner: self._settle(inner, accept, answer))
        return answer

    def _settle(self, inner: Future[Any], accept: Callable[[Any], Any], answer: Future[Any]) -> None:
        """The member's state changes before whoever waits for the answer hears of it."""
        failure = inner.exception()
        self._busy = False
        if isinstance(failure, EnvironmentFailure):
            self._phase, self._failure = _Phase.BROKEN, failure
            self._leave_host()
        if failure is not None:
            answer.set_exception(failure)
        else:
            answer.set_result(accept(inner.result()))

    def _begun(self, begun: Begun) -> Observation:
        self._phase, self.instructions = _Phase.PLAYING, begun.instructions
        return begun.observation

    def _stepped(self, step: Step) -> Step:
        if step.done:
            self._phase = _Phase.OVER
            self._leave_host()
        return step

    def _leave_host(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            self._vector.rollback(host)


class VectorEnv:
    """`count` environments of one kind that play at the same time. To be closed, best by `with`."""

    def __init__(
        self,
        make: EnvSource,
        count: int,
        *,
        options: Mapping[str, Any] | None = None,
        step_timeout: float = STEP_SECONDS,
        workers: int | None = None,
    ) -> None:
        """`workers` bounds how many members work at the same time; by default it is the environment's own `workers`, and where it has
        none, nobody queues. The clock of a call begins when the call does, not while it queues."""
        if count < 1 or step_timeout <= 0 or (workers is not None and workers < 1):
            raise BadInput(f"got count={count}, step_timeout={step_timeout}, workers={workers}; each has to be greater than zero")
        plan = env_factory(make, options)
        first = plan.make()
        self.work = work_of(first)
        self.members = [Member(number, self, first) for number in range(count)]
        self._idle: deque[Host] = deque()
        self._hosts: set[Host] = set()
        self._closed = False
        pickled = plan.pickled() if self.work == "process" else b""
        self._background = Background(workers or getattr(first, "workers", None)) if self.work != "inline" else None
        self._new_host = self._housing(plan, pickled, first, step_timeout)
        _OPEN.add(self)

    def __len__(self) -> int:
        return len(self.members)

    def reset(self, seeds: Sequence[int], lucks: Sequence[int | None] | None = None) -> list[Observation | EnvironmentFailure]:
        """Reset every member; a member that failed gives its failure."""
        pairs = zip(self._one_each("seed", seeds), self._one_each("luck", lucks or [None] * len(self)), strict=True)
        asked = [member.submit_reset(seed, env_seed) for member, (seed, env_seed) in zip(self.members, pairs, strict=True)]
        return [_outcome(future) for future in asked]

    def step(self, answers: Sequence[str | None]) -> list[Step | EnvironmentFailure | None]:
        """Step every member that has an answer and whose episode is not over; the others give None, one that failed its failure."""
        asked = [
            None if answer is None or member.over else member.submit_step(answer)
            for member, answer in zip(self.members, self._one_each("answer", answers), strict=True)
        ]
        return [None if future is None else _outcome(future) for future in asked]

    def close(self) -> None:
        """End everything: calls under way fail, processes and threads end (a thread that hangs is left behind, as a daemon)."""
        if self._closed:
            return
        self._closed = True
        _OPEN.discard(self)
        if self._background is not None:
            self._background.close()
        hosts = list(self._hosts)
        for host in hosts:
            host.hang_up()
        for host in hosts:
            host.see_off()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- for the members ---

    def lend_host(self) -> Host:
        """A live environment that nobody plays, or the place for a new one."""
        if self._closed:
            raise BadInput("the vector of environments is closed; make a new one")
        if self._idle:
            return self._idle.popleft()
        host = self._new_host()
        self._hosts.add(host)
        return host

    def rollback(self, host: Host) -> None:
        if not host.dead:
            self._idle.append(host)
        elif not self._closed:  # else `close` sees to it
            self._hosts.discard(host)
            host.hang_up()

    def _housing(self, plan: EnvFactory, pickled: bytes, first: Env, step_timeout: float) -> Callable[[], Host]:
        """What makes a host for this kind of work. The environment that is there already gets the first one, unless it has to move."""
        if self._background is None:
            spare: Host = InlineHost(plan.make, first)
            new_host: Callable[[], Host] = partial(InlineHost, plan.make)
        elif self.work == "wait":
            spare = ThreadHost(plan.make, self._background, step_timeout, first)
            new_host = partial(ThreadHost, plan.make, self._background, step_timeout)
        else:
            close_env(first)
            module = type(first).__module__
            context = fork_server(*[module] if module.startswith("tether.") else [])
            return partial(ProcessHost, pickled, plan.label, context, self._background, step_timeout)
        self._hosts.add(spare)
        self._idle.append(spare)
        return new_host

    def _one_each(self, what: str, values: Sequence[T]) -> Sequence[T]:
        if len(values) != len(self):
            raise BadInput(f"got {len(values)} {what}s for {len(self)} members; give one for each")
        return values


def work_of(env: Env) -> Work:
    """Where an environment's steps belong; one that does not say is taken to be quick."""
    work: Work = getattr(env, "work", "inline")
    if work not in get_args(Work):
        raise BadInput(f"environment '{env.name}' has work '{work}'; use one of {', '.join(get_args(Work))}")
    return work


def _outcome(future: Future[Any]) -> Any:
    failure = future.exception()
    return failure if isinstance(failure, EnvironmentFailure) else future.result()


_OPEN: set[VectorEnv] = set()


@atexit.register
def _close_all() -> None:
    """Processes end before multiprocessing, at its own exit, would wait for them."""
    for vector in list(_OPEN):
        vector.close()
