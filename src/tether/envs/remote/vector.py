"""A vector of environments, its members, and the pool of environments that training uses.

A member is an Env that also takes calls without blocking (`submit_reset`, `submit_step`). It holds a host (a live environment) while it
plays an episode and returns it when the episode is over, so there are never more processes than episodes in progress. If its environment
hung, crashed or raised, every further step of the member fails with that reason until the next reset, which always gets a working
environment.
"""

import atexit
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self, TypeVar, get_args

from tether.core.errors import BadInput, EnvironmentFailure
from tether.core.protocols import Env
from tether.core.types import Exchanges, Observation, Step
from tether.envs.base import EpisodePhase, TurnEnv, Work
from tether.envs.registry import MAIN_GUARD, EnvFactory, EnvSource, env_factory, main_is_guarded, refuse_while_main_is_imported
from tether.envs.remote.calls import Background, Begun, Call, EnvDescription, Reset, Take, close_env
from tether.envs.remote.hosts import Host, InlineHost, ProcessHost, ThreadHost, fork_server

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

STEP_SECONDS = 120.0
"""The default deadline of a reset or a step, that of the setting env.step_timeout."""


class Member:
    """One environment of a vector."""

    def __init__(self, number: int, vector: "VectorEnv", like: EnvDescription) -> None:
        self.number = number
        self.name, self.max_turns, self.instructions, self.reply_tags = like.name, like.max_turns, like.instructions, like.reply_tags
        self.few_shot: Exchanges = ()
        self._vector = vector
        self._host: Host | None = None
        self._phase = EpisodePhase.UNSET
        self._failure: EnvironmentFailure | None = None
        self._busy = False

    @property
    def over(self) -> bool:
        """The episode has ended; a reset starts the next one."""
        return self._phase is EpisodePhase.OVER

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        return self.submit_reset(seed, env_seed).result()

    def step(self, answer: str) -> Step:
        return self.submit_step(answer).result()

    def submit_reset(self, seed: int, env_seed: int | None = None) -> Future[Observation]:
        """Start a reset; the future holds the observation or an EnvironmentFailure."""
        return self._submit(Reset(seed, env_seed), self._begun)

    def submit_step(self, answer: str) -> Future[Step]:
        """Start a step; the future holds the step or an EnvironmentFailure."""
        if self._phase is EpisodePhase.BROKEN and not self._busy:
            refused: Future[Step] = Future()
            refused.set_exception(EnvironmentFailure(f"step: the environment failed before ({self._failure}); reset it first"))
            return refused
        if not self._busy:
            self._phase.require_playing(self.name)
        return self._submit(Take(answer), self._stepped)

    def _submit(self, call: Call, accept: Callable[[Any], Any]) -> Future[Any]:
        if self._busy:
            raise BadInput(f"{self.name}: {call.what} was called while member {self.number} is still at work; wait for its answer first")
        self._host = self._host or self._vector.lend_host()
        self._busy = True
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # from here on the caller cannot cancel it
        self._host.submit(call).add_done_callback(lambda inner: self._settle(inner, accept, answer))
        return answer

    def _settle(self, inner: Future[Any], accept: Callable[[Any], Any], answer: Future[Any]) -> None:
        # The state of the member must change before the caller sees the answer: the caller may submit the next call at once.
        failure = inner.exception()
        self._busy = False
        if isinstance(failure, EnvironmentFailure):
            self._phase, self._failure = EpisodePhase.BROKEN, failure
            self._leave_host()
        if failure is not None:
            answer.set_exception(failure)
        else:
            answer.set_result(accept(inner.result()))

    def _begun(self, begun: Begun) -> Observation:
        self._phase, self.instructions, self.few_shot = EpisodePhase.PLAYING, begun.instructions, begun.few_shot
        return begun.observation

    def _stepped(self, step: Step) -> Step:
        if step.done:
            self._phase = EpisodePhase.OVER
            self._leave_host()
        return step

    def _leave_host(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            self._vector.return_host(host)


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
        """`workers` limits how many calls run at the same time; the default is the environment's own attribute `workers`, or no limit. The
        deadline of a call starts when the call starts, not while it waits for its turn."""
        if count < 1 or step_timeout <= 0 or (workers is not None and workers < 1):
            raise BadInput(f"got count={count}, step_timeout={step_timeout}, workers={workers}; each has to be greater than zero")
        plan = env_factory(make, options)
        first = plan.make()
        self.work = work_of(first, plan)
        description = EnvDescription.of(first)
        self.members = [Member(number, self, description) for number in range(count)]
        self._idle: deque[Host] = deque()
        self._hosts: set[Host] = set()
        self._closed = False
        pickled = plan.pickled() if self.work == "process" else b""
        self._background = Background(workers or getattr(first, "workers", None)) if self.work != "inline" else None
        self._new_host = self._housing(plan, pickled, first, step_timeout)
        _OPEN.add(self)

    def __len__(self) -> int:
        return len(self.members)

    def reset(self, seeds: Sequence[int], env_seeds: Sequence[int | None] | None = None) -> list[Observation | EnvironmentFailure]:
        """Reset every member; a member that failed gives its failure."""
        pairs = zip(self._one_each("seed", seeds), self._one_each("env_seed", env_seeds or [None] * len(self)), strict=True)
        asked = [member.submit_reset(seed, env_seed) for member, (seed, env_seed) in zip(self.members, pairs, strict=True)]
        return [_outcome(future) for future in asked]

    def step(self, answers: Sequence[str | None]) -> list[Step | EnvironmentFailure | None]:
        """Step every member that has an answer and whose episode is not over; others give None, and a member that failed gives its failure."""
        asked = [
            None if answer is None or member.over else member.submit_step(answer)
            for member, answer in zip(self.members, self._one_each("answer", answers), strict=True)
        ]
        return [None if future is None else _outcome(future) for future in asked]

    def close(self) -> None:
        """End everything: calls in progress fail, processes and threads end (a thread that hangs is left behind, as a daemon)."""
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
            host.wait_for_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for the members ---

    def lend_host(self) -> Host:
        """A live environment that no member uses, or the host of a new one."""
        if self._closed:
            raise BadInput("the vector of environments is closed; make a new one")
        if self._idle:
            return self._idle.popleft()
        host = self._new_host()
        self._hosts.add(host)
        return host

    def return_host(self, host: Host) -> None:
        """Take a host back; a dead one is dropped."""
        if not host.dead:
            self._idle.append(host)
        elif not self._closed:  # `close` ends the hosts otherwise
            self._hosts.discard(host)
            host.hang_up()

    def _housing(self, plan: EnvFactory, pickled: bytes, first: Env, step_timeout: float) -> Callable[[], Host]:
        """The function that makes a host for this kind of work. The first environment gets the first host, unless it must move to a process."""
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


def work_of(env: Env, plan: EnvFactory | None = None) -> Work:
    """Where an environment's steps run.

    One that does not say (`work`) and is not Tether's own runs in a process, so that a step that hangs, crashes or exits ends an episode and
    not the run. Where another process cannot build it, it runs in a thread: then a hang still ends at `step_timeout`.
    """
    kind = type(env)
    says_where = kind.__module__.startswith("tether.") or getattr(kind, "work", None) is not TurnEnv.work
    work: Work | None = getattr(env, "work", None) if says_where else None
    if work is None:
        problem = None if plan is None else _unfit_for_processes(plan)
        if problem is None:
            return "process"
        _LOG.warning("environment '%s' runs in threads of this process: %s", env.name, problem)
        return "wait"
    if work not in get_args(Work):
        raise BadInput(f"environment '{env.name}' has work '{work}'; use one of {', '.join(get_args(Work))}")
    return work


def _unfit_for_processes(plan: EnvFactory) -> str | None:
    """Why another process could not build this environment; None if it could."""
    try:
        plan.pickled()
        refuse_while_main_is_imported()
    except BadInput as error:
        return str(error)
    return None if main_is_guarded() else f"worker processes would run your script again; {MAIN_GUARD}"


def _outcome(future: Future[Any]) -> Any:
    failure = future.exception()
    return failure if isinstance(failure, EnvironmentFailure) else future.result()


_OPEN: set[VectorEnv] = set()


@atexit.register
def _close_all() -> None:
    """multiprocessing waits for its processes at exit; this function runs earlier and ends them."""
    for vector in list(_OPEN):
        vector.close()


class WorkerPool:
    """Environments that are used and closed together: plain ones, or the members of a vector."""

    def __init__(self, envs: list[Env], vector: VectorEnv | None = None) -> None:
        self.envs = envs
        self._vector = vector

    def close(self) -> None:
        if self._vector is not None:
            self._vector.close()
        else:
            for env in self.envs:
                close_env(env)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_envs(name: str, options: Mapping[str, Any], count: int, step_timeout: float = STEP_SECONDS) -> WorkerPool:
    """`count` environments of this name and these options: plain objects where steps run inline, else members of a vector."""
    plan = env_factory(name, options)
    first = plan.make()
    if work_of(first, plan) == "inline":
        return WorkerPool([first, *(plan.make() for _ in range(count - 1))])
    close_env(first)
    vector = VectorEnv(name, count, options=options, step_timeout=step_timeout)
    return WorkerPool(list(vector.members), vector)
