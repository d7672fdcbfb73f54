"""Plays a plan with an agent: a session for every episode, the agents' programs beside each other, one engine behind the gateway.

plan -> session -> the agent's program -> requests -> prompts on the sampled tokens -> engine -> replies -> reward -> trajectory. What comes back are
trajectories like those of environments, so filter, advantages, update, diagnosis and records are the same. Programs and gateway run in this process, or
in workers (workers.py): a reply costs milliseconds of clients and HTTP, for which a GPU would wait.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tether.core.errors import BadInput
from tether.core.protocols import Engine, Sampling
from tether.core.types import Trajectory
from tether.models.chat import ChatFormat
from tether.models.messages import AgentChat
from tether.rollout.engines.native import NativeEngine
from tether.rollout.episode import EpisodeRules, EpisodeSeeds, Follow
from tether.rollout.gateway.agents import Agent
from tether.rollout.gateway.episodes import LABEL, AgentRules, EpisodePlayer
from tether.rollout.gateway.workers import AgentWorkers, NotSendable
from tether.rollout.serving.engine_thread import EngineThread

__all__ = ["LABEL", "AgentPlayer", "AgentRules"]


class AgentPlayer:
    """Plays episodes with one agent. Close it, best by `with`."""

    def __init__(self, agent: Agent, rules: AgentRules) -> None:
        self.agent, self.rules = agent, rules
        self._here: EpisodePlayer | None = None
        self._workers: AgentWorkers | None = None
        self._notes: list[str] = []

    def close(self) -> None:
        for player in (self._here, self._workers):
            if player is not None:
                player.close()
        self._here = self._workers = None

    def play(
        self,
        tasks: Callable[[EpisodeSeeds], dict[str, Any]],
        plan: Sequence[EpisodeSeeds],
        engine: Engine,
        chat: ChatFormat,
        sampling: Sampling,
        rules: EpisodeRules,
        on_finished: Callable[[], None] | None,
        follow: Follow | None = None,
    ) -> list[Trajectory]:
        """An episode for every entry of the plan, in its order, and what `follow` says behind them."""
        if not isinstance(engine, NativeEngine):
            raise BadInput(f"agents are played with rollout.engine=native, not with '{engine.backend}'")
        self._open(chat)
        engine.forget()  # the weights may have changed since
        thread = EngineThread(engine)
        try:
            if self._workers is not None:
                found = self._workers.play(thread, tasks, plan, sampling, rules, on_finished, follow)
            else:
                found = self._play_here(thread, tasks, plan, sampling, rules, on_finished, follow)
        finally:
            thread.close()
        engine.statistics = thread.statistics
        return found

    def take_notes(self) -> list[str]:
        """What is worth saying once."""
        notes, self._notes = self._notes, []
        for player in (self._here, self._workers):
            notes += player.take_notes() if player is not None else []
        return notes

    def _open(self, chat: ChatFormat) -> None:
        if self._here is not None or self._workers is not None:
            return
        if self.rules.workers:
            try:
                self._workers = AgentWorkers(self.agent, self.rules, chat)
                return
            except NotSendable as error:
                self._notes.append(f"the agent is played in this process, which is slower: it cannot be sent to others: {error}")
        self._here = EpisodePlayer(self.agent, self.rules, AgentChat(chat, self.rules.tool_format))

    def _play_here(
        self,
        thread: EngineThread,
        tasks: Callable[[EpisodeSeeds], dict[str, Any]],
        plan: Sequence[EpisodeSeeds],
        sampling: Sampling,
        rules: EpisodeRules,
        on_finished: Callable[[], None] | None,
        follow: Follow | None,
    ) -> list[Trajectory]:
        player = self._here
        assert player is not None
        player.gateway.submit, player.gateway.failure = thread.submit, None

        async def play_all() -> list[Trajectory]:
            places = asyncio.Semaphore(self.rules.concurrency)

            async def each(seeds: Sequence[EpisodeSeeds]) -> list[Trajectory]:
                return [trajectory for played in await asyncio.gather(*map(one, seeds)) for trajectory in played]

            async def one(seeds: EpisodeSeeds) -> list[Trajectory]:
                async with places:
                    trajectory = await player.play(tasks(seeds), seeds, sampling, rules)
                if on_finished is not None:
                    on_finished()
                return [trajectory, *(await each(follow(trajectory)) if follow is not None else ())]

            return await each(plan)

        try:
            found = asyncio.run(play_all())
        finally:
            player.gateway.submit = None
            player.gateway.forget()
        if player.gateway.failure is not None:
            raise player.gateway.failure
        return found
