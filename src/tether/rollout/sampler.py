"""Sampling episodes: a plan lists them, a pool holds their environments, an engine plays them, and trajectories come back in groups.

Every random choice of a plan comes from core.seeding, so groups come back in plan order, members in member order, whatever the order in
which the episodes ended.

- **Mixtures.** A run may mix environments by weight. Systematic sampling: the environments lie side by side on a line, each as long as its
  share, and group g takes the environment at (g + offset) / groups. Each environment gets its share of every step to within one group; with
  an offset drawn for each step it gets exactly its share on average, without state from step to step.
- **Errors.** An episode that an environment error ended is played again with the same seeds, `error_retries` times. One that fails again is
  recorded in `Group.errored` and is no evidence: not for scores, baselines, loss or success rates.
- **Memory.** A rollout that runs out of memory is played once more from its start with half the rows. Every episode has its own seeds, so
  the trajectories are the same; only how many episodes live at a time is not. The smaller number holds for the rest of the process.
- **Servers.** Of several ranks the first publishes weights. Where another finds no server with them (all were started again), the ranks publish
  once more, together, and play the plan again.
- **Ranks.** Every rank of a run on several has the same plan and plays every size-th group of it; then all ranks get all groups. What is
  computed from the groups is therefore the same on every rank, and the same as on one.
"""

import dataclasses
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from tether.core.enums import StopReason
from tether.core.errors import BadInput, EnvironmentFailure, OutdatedEngine, OutOfMemory
from tether.core.http_client import is_healthy, take_outages
from tether.core.protocols import AsyncEngine, Communicator, Conversation, Engine, EngineStatistics, Env, Sampling, SingleProcess
from tether.core.seeding import env_seed, generator, instance_seed, sampling_seed, validation_seed
from tether.core.types import Group, Trajectory
from tether.envs.registry import find_class, is_address, make_env
from tether.envs.remote import WorkerPool, make_envs
from tether.models.chat import ChatFormat, PromptFormat
from tether.models.hardware import forget_failed, memory_boundary
from tether.rollout.early_decision import EarlyRules, Places, as_group
from tether.rollout.episode import Episode, EpisodeRules, EpisodeSeeds, Follow
from tether.rollout.gateway.player import LABEL as AGENT
from tether.rollout.gateway.player import AgentPlayer
from tether.runs.verdict import ENV_ERRORS

SINGLE_ENV = (1.0,)
"""The weights of a run with one environment."""

OUTDATED_ATTEMPTS = 3
"""How often a plan is played again because servers had lost the weights, before that ends the run."""

WORKER_SECONDS = 300.0
"""How long environments wait for one of their workers to come back."""

CENTRE = 0.5
"""The offset of validation prompts: it gives the nearest integers to the shares."""


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """One environment of a run."""

    name: str
    """A registered name, "module:Class", or the address of a served environment."""
    options: Mapping[str, Any] = field(default_factory=dict)
    step_timeout: float = 120.0
    """Seconds a reset or a step may take where environments run concurrently."""
    weight: float = 1.0
    """Its share of the groups, relative to the weights of the others."""
    workers: Callable[[], list[str]] | None = None
    """Where it is served, if it is not played here: the addresses of its workers now."""
    player: AgentPlayer | None = None
    """Plays its instances, where they are the tasks of an agent's program."""

    @property
    def label(self) -> str:
        """The name in records and metrics: letters, digits, dots and dashes."""
        if self.player is not None:
            return AGENT
        return re.sub(r"[^\w.-]+", "_", self.name)


# ---------------------------------------------------------------------------------------------------------------- plans


def spread_groups(weights: Sequence[float], num_groups: int, offset: float) -> list[int]:
    """The index of an environment for each group, in ascending order; `offset` lies in [0, 1)."""
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights) > 0:
        raise BadInput(f"the weights of the environments are {list(weights)}; give each 0 or more, and at least one more than 0")
    ends = np.cumsum(weights)
    positions = (np.arange(num_groups) + offset) * ends[-1] / max(1, num_groups)
    last = max(index for index, weight in enumerate(weights) if weight > 0)
    return [min(int(index), last) for index in np.searchsorted(ends, positions, side="right")]  # rounding may reach past the end


def training_plan(
    run: int,
    step: int,
    num_groups: int,
    group_size: int,
    first_group: int = 0,
    weights: Sequence[float] = SINGLE_ENV,
    choose: Callable[[int, int], int] | None = None,
    tries: int = 1,
) -> list[EpisodeSeeds]:
    """The episodes of one training step: a group shares its instance; each member has its own env seed and sampling seed.

    A further round of the same step continues counting from `first_group`, so no round repeats another's episodes. `choose` gives the instance of
    a group and the index of its environment (prompt_memory.py); without it instances are drawn. With several `tries` every group has as many prompts, of its
    environment, to choose from (early_decision.py): first one of each group, then the next of each.
    """
    env_indices = spread_groups(weights, num_groups, generator("mixture", run, step, first_group).random())
    placed = list(enumerate(env_indices * tries, start=first_group))
    instances = {g: instance_seed(run, step, g) if choose is None else choose(g, env_index) for g, env_index in placed}
    return [
        EpisodeSeeds(g, m, instances[g], env_seed(run, step, g, m), sampling_seed(run, step, g, m), env_index)
        for g, env_index in placed
        for m in range(group_size)
    ]


def validation_plan(
    num_prompts: int, group_size: int = 1, weights: Sequence[float] = SINGLE_ENV, sizes: Sequence[int | None] | None = None
) -> list[EpisodeSeeds]:
    """The fixed validation episodes: the same for every run and every step, env seeds and sampling seeds included.

    Each environment of a mixture plays its own first prompts, the same that it would play alone. One whose instances are a list of `sizes`
    entries plays them in order, none twice; its prompts beyond the last are left out.
    """
    env_indices = spread_groups(weights, num_prompts, CENTRE)
    numbers = [group - env_indices.index(env_index) for group, env_index in enumerate(env_indices)]
    sizes = sizes or [None] * len(weights)
    played = [(i, index) for i, index in zip(numbers, env_indices, strict=True) if (size := sizes[index]) is None or i < size]
    return [
        EpisodeSeeds(
            g, m, validation_seed(i) if sizes[env_index] is None else i, env_seed(0, -1, i, m), sampling_seed(0, -1, i, m), env_index
        )
        for g, (i, env_index) in enumerate(played)
        for m in range(group_size)
    ]


# ----------------------------------------------------------------------------------------------------------------- pool


class EnvPool:
    """Every environment that a run plays in.

    Environments are built when a plan first needs them and are kept from step to step; a plan that needs more of a kind than there are
    replaces that kind by as many. Environments with workers are played there, by turns; a worker that does not answer is left out before a plan is
    played, so an episode that ended with its worker is played again elsewhere. Close the pool, best by `with`.
    """

    def __init__(self, specs: Sequence[EnvSpec]) -> None:
        self.specs = tuple(specs)
        self._pools: dict[int, list[WorkerPool]] = {}
        self._addresses: dict[int, list[str]] = {}
        """The addresses that the environments of a spec with workers are served at."""
        self._tasks: Any = None
        """Of an agent."""

    @property
    def weights(self) -> tuple[float, ...]:
        """For the plans."""
        return tuple(spec.weight for spec in self.specs)

    def play(
        self,
        plan: Sequence[EpisodeSeeds],
        engine: Engine,
        chat: ChatFormat,
        sampling: Sampling,
        rules: EpisodeRules,
        on_finished: Callable[[], None] | None,
        follow: Follow | None = None,
        num_open: Mapping[int, int] | None = None,
    ) -> list[Trajectory]:
        """The trajectory of every entry of the plan: played here, or by the program of an agent. `follow` says what to play after an episode, of each
        environment at most `num_open` at a time; it has seen the trajectories that are not of the plan."""
        spec = self.specs[0]
        if spec.player is not None:  # a run of an agent has no other environment
            self._tasks = self._tasks or make_env(spec.name, **spec.options)
            draw = self._tasks.draw
            return spec.player.play(lambda seeds: draw(seeds.instance), plan, engine, chat, sampling, rules, on_finished, follow)
        if follow is not None and num_open is not None:
            stream = _EpisodeStream(self, num_open, chat, rules, follow)
            engine.run(stream.open(plan), sampling, on_finished, stream)
            return []
        episodes = self.episodes(plan, chat, rules)
        engine.run(episodes, sampling, on_finished)
        return [episode.trajectory for episode in episodes]

    def episodes(self, plan: Sequence[EpisodeSeeds], chat: ChatFormat, rules: EpisodeRules) -> list[Episode]:
        """An episode for every entry of the plan, each with an environment of its own."""
        counts = Counter(seeds.env_index for seeds in plan)
        envs = {index: iter(self._environments(index, count)) for index, count in counts.items()}
        return [self._episode(next(envs[seeds.env_index]), seeds, chat, rules) for seeds in plan]

    def episode(self, seeds: EpisodeSeeds, chat: PromptFormat, rules: EpisodeRules, slot: int, num_slots: int) -> Episode:
        """One episode in the environment of a slot: players that take one episode after the other keep an environment each."""
        return self._episode(self._environments(seeds.env_index, num_slots)[slot], seeds, chat, rules)

    def _episode(self, env: Env, seeds: EpisodeSeeds, chat: PromptFormat, rules: EpisodeRules) -> Episode:
        spec = self.specs[seeds.env_index]
        return Episode(env, chat, seeds, rules, spec.label, _metrics_of(spec.name))

    def close(self) -> None:
        for index in list(self._pools):
            self._close(index)

    def _close(self, index: int) -> None:
        for pool in self._pools.pop(index, []):
            pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _environments(self, index: int, count: int) -> list[Env]:
        """At least `count` environments of one spec."""
        spec = self.specs[index]
        addresses = [] if spec.workers is None else present_workers(spec.name, spec.workers)
        pools = self._pools.get(index, [])
        if sum(len(pool.envs) for pool in pools) < count or addresses != self._addresses.get(index, []):
            self._close(index)
            names = addresses or [spec.name]
            each = -(-count // len(names))
            self._addresses[index] = addresses
            pools = self._pools[index] = [make_envs(name, spec.options, each, spec.step_timeout) for name in names]
        return [env for turn in zip(*(pool.envs for pool in pools), strict=True) for env in turn]


class _EpisodeStream:
    """Episodes that follow one another (core.protocols.FollowUp): one begins in the environment of another that has ended."""

    def __init__(self, pool: EnvPool, num_open: Mapping[int, int], chat: ChatFormat, rules: EpisodeRules, follow: Follow) -> None:
        self._free = {index: deque(pool._environments(index, count)[:count]) for index, count in num_open.items()}
        self._pool, self._chat, self._rules, self._follow = pool, chat, rules, follow
        self.num_open = sum(num_open.values())
        self._taken: dict[Conversation, tuple[int, Env, Episode]] = {}
        self._waiting: deque[EpisodeSeeds] = deque()
        """Episodes that wait for an environment."""

    def __call__(self, ended: Conversation) -> list[Episode]:
        index, env, episode = self._taken.pop(ended)
        self._free[index].append(env)
        return self.open(self._follow(episode.trajectory))

    def open(self, plan: Sequence[EpisodeSeeds]) -> list[Episode]:
        """The episodes that can begin; the others wait."""
        waiting, self._waiting, opened = [*self._waiting, *plan], deque(), list[Episode]()
        for seeds in waiting:
            if free := self._free[seeds.env_index]:
                env = free.popleft()
                opened.append(episode := self._pool._episode(env, seeds, self._chat, self._rules))
                self._taken[episode] = (seeds.env_index, env, episode)
            else:
                self._waiting.append(seeds)
        return opened


def present_workers(name: str, workers: Callable[[], list[str]]) -> list[str]:
    """The workers of an environment that answer; waits for one where none does."""
    deadline = time.monotonic() + WORKER_SECONDS
    while True:
        addresses = workers()
        found = [address for address in addresses if is_healthy(address, timeout=10.0)]
        if found:
            return found
        if time.monotonic() > deadline:
            raise EnvironmentFailure(
                f"no worker of {name} answered for {WORKER_SECONDS:g} s (last at: {', '.join(addresses) or 'nowhere'})"
            )
        time.sleep(0.5)


def _metrics_of(name: str) -> tuple[str, ...]:
    """The numbers that an environment declares worth averaging; a served environment declares none."""
    return () if is_address(name) else getattr(find_class(name), "metrics", ())


# -------------------------------------------------------------------------------------------------------------- playing


def play_plan(
    pool: EnvPool,
    plan: Sequence[EpisodeSeeds],
    engine: Engine,
    chat: ChatFormat,
    sampling: Sampling,
    rules: EpisodeRules,
    on_finished: Callable[[], None] | None = None,
    *,
    error_retries: int = 1,
    early: EarlyRules | None = None,
) -> list[Group]:
    """Play every episode of the plan and group the trajectories by prompt; see the module docstring on errors. `early`: play what it chooses."""
    if early is not None:
        places = Places(plan, early, error_retries)
        pool.play(places.begin(), engine, chat, sampling, rules, on_finished, places.take, places.num_open)
        return places.groups()
    done: dict[int, Trajectory] = {}
    for attempt in range(1 + error_retries):
        left = [n for n in range(len(plan)) if n not in done or done[n].stop_reason is StopReason.ENV_ERROR]
        if not left:
            break
        played = pool.play([plan[n] for n in left], engine, chat, sampling, rules, None if attempt else on_finished)
        for n, trajectory in zip(left, played, strict=True):
            trajectory.retries = attempt
            done[n] = trajectory
    return group_trajectories(done[n] for n in range(len(plan)))


def group_trajectories(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Trajectories by prompt, in the order in which the prompts appear; errored ones apart."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    return [as_group(members) for members in groups.values()]


def error_note(groups: Sequence[Group]) -> str | None:
    """One sentence about the errored rollouts of a step, with the commonest cause; None where nothing failed and nothing was retried."""
    errored = [trajectory for group in groups for trajectory in group.errored]
    retried = sum(1 for group in groups for trajectory in group.trajectories if trajectory.retries)
    if not errored:
        return f"{retried} episodes failed in their environment and succeeded when played again" if retried else None
    cause, count = Counter(trajectory.error or "unknown" for trajectory in errored).most_common(1)[0]
    total = sum(len(group.trajectories) + len(group.errored) for group in groups)
    share = "all with" if count == len(errored) else f"{count} of them with"
    return f"{len(errored)} of {total} {ENV_ERRORS}, {share}: {cause}"


def check_resets(groups: Sequence[Group], what: str) -> None:
    """Raise EnvironmentFailure, with the commonest error, if not one of these episodes could begin: playing on would only repeat it."""
    if any(group.trajectories for group in groups):
        return
    errored = [trajectory for group in groups for trajectory in group.errored]
    if errored and not any(trajectory.turns for trajectory in errored):
        failure = EnvironmentFailure(f"no episode of {what} could begin: {error_note(groups)}")
        failure.common = True  # every rank has all groups
        raise failure


class Sampler:
    """Plays what a run trains on and what it is validated on, with the engine of the run, within memory."""

    def __init__(
        self,
        specs: Sequence[EnvSpec],
        build_engine: Callable[[int], Engine],
        chat: ChatFormat,
        rules: EpisodeRules,
        *,
        max_rows: int,
        device: torch.device,
        error_retries: int = 1,
        on_stage: Callable[[str, int], None] = lambda stage, total: None,
        on_finished: Callable[[], None] | None = None,
        ranks: Communicator | None = None,
    ) -> None:
        """`build_engine` makes an engine of so many rows; `on_stage` and `on_finished` report progress (stage and its episodes; one done);
        `ranks` share the episodes, by default there is one."""
        self.chat, self.rules = chat, rules
        self._ranks: Communicator = ranks or SingleProcess()
        self.statistics = EngineStatistics()
        """Of the latest plan: what the engines of all ranks did."""
        self.pool = EnvPool(specs)
        self.max_rows = max_rows
        self._build_engine, self._device, self._error_retries = build_engine, device, error_retries
        self._on_stage, self._on_finished = on_stage, on_finished
        self.engine = build_engine(max_rows)
        self._notes: list[str] = []

    def collect(
        self,
        plan: Sequence[EpisodeSeeds],
        sampling: Sampling,
        *,
        stage: str = "rollout",
        pool: EnvPool | None = None,
        first_turn_only: bool = False,
        quiet: bool = False,
        early: EarlyRules | None = None,
    ) -> list[Group]:
        """Play a plan, each rank its groups; where memory runs out on any rank, once more from the start with half the rows on all.

        Returns the groups of all ranks, in plan order. `quiet`: progress is not reported. `early`: which of the plan is played is decided meanwhile.
        """
        pool, rules = pool or self.pool, dataclasses.replace(self.rules, first_turn_only=first_turn_only)
        numbers = list(dict.fromkeys(seeds.group for seeds in plan))
        num_places = len(numbers) if early is None else early.num_places
        own = {number for n, number in enumerate(numbers) if n % num_places % self._ranks.size == self._ranks.rank}
        own_plan = [seeds for seeds in plan if seeds.group in own]
        num_expected = len(own_plan) * num_places // max(1, len(numbers))

        def play() -> tuple[list[Group], EngineStatistics]:
            if not quiet:
                self._on_stage(stage, num_expected)
            with memory_boundary(stage, f"lower rollout.max_rows (now {self.max_rows})"):
                on_finished = None if quiet else self._on_finished
                retries = self._error_retries
                groups = play_plan(pool, own_plan, self.engine, self.chat, sampling, rules, on_finished, error_retries=retries, early=early)
            return groups, self.engine.statistics

        halved, num_outdated = False, 0
        while True:
            outdated = ""
            try:
                parts = self._ranks.share(play)
                break
            except OutOfMemory:
                if halved or self.max_rows == 1:
                    raise
            except OutdatedEngine as error:
                if num_outdated == OUTDATED_ATTEMPTS:
                    raise
                outdated = str(error)
            # Outside the handlers: the tensors of a failed attempt live as long as its error does.
            pool.close()  # environments may be in the middle of an episode
            if outdated:
                self._notes.append(f"weights were published again and the {stage} was played again: {outdated}")
                num_outdated += 1
                assert isinstance(self.engine, AsyncEngine)  # no other raises this
                self.engine.republish()
            else:
                halved = True
                del self.engine
                forget_failed(self._device)
                before, self.max_rows = self.max_rows, self.max_rows // 2
                self.engine = self._build_engine(self.max_rows)
                self._notes.append(f"out of memory in the {stage} with rollout.max_rows={before}; played again with {self.max_rows}")
        self.statistics = sum((found for _, found in parts), EngineStatistics())
        position = {number: n for n, number in enumerate(numbers)}
        return sorted((group for groups, _ in parts for group in groups), key=lambda group: position[group.index])

    def take_notes(self) -> list[str]:
        """What happened since the last call."""
        notes, self._notes = self._notes, []
        notes += self.engine.take_notes() if isinstance(self.engine, AsyncEngine) else []
        notes += [note for spec in self.pool.specs if spec.player is not None for note in spec.player.take_notes()]
        return notes + [f"{address} did not answer for a while; its episodes waited, or were played again" for address in take_outages()]

    def close(self) -> None:
        self.pool.close()
        for spec in self.pool.specs:
            if spec.player is not None:
                spec.player.close()
