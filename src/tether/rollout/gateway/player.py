"""Plays a plan with an agent: a session for every episode, the agents' programs beside each other, one engine behind the gateway.

plan -> session -> the agent's program -> requests -> prompts on the sampled tokens -> engine -> replies -> reward -> trajectory. What comes back are
trajectories like those of environments, so filter, advantages, update, diagnosis and records are the same.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tether.core.enums import StopReason
from tether.core.errors import BadInput
from tether.core.http import serving_app
from tether.core.protocols import Engine, EngineStatistics, Sampling
from tether.core.types import Trajectory
from tether.models.chat import ChatFormat
from tether.models.messages import AgentChat
from tether.rollout.engines.native import NativeEngine
from tether.rollout.episode import EpisodeRules, EpisodeSeeds
from tether.rollout.gateway.agents import Agent, AgentFailure, ModelAddress, Result
from tether.rollout.gateway.app import Gateway
from tether.rollout.gateway.session import Budgets, Session, trajectory_of
from tether.rollout.serving.engine_thread import EngineThread

LABEL = "agent"
"""How records call the environment of an agent."""
METRICS = ("calls", "contexts", "tool_calls", "unparsed_calls", "late_calls")
"""Numbers of every episode."""


@dataclass(frozen=True, slots=True)
class AgentRules:
    """How agents are run."""

    timeout: float = 600.0
    """Seconds of an episode."""
    concurrency: int = 64
    """Episodes at a time."""
    max_calls: int = 64
    """Of an episode."""
    max_tokens: int | None = None
    """Sampled in an episode; None for any number."""
    exact: bool = True
    """Continue on the sampled tokens; else every request is rendered whole."""
    tool_format: str = "auto"


class AgentPlayer:
    """Plays episodes with one agent. Close it, best by `with`."""

    def __init__(self, agent: Agent, rules: AgentRules) -> None:
        self.agent, self.rules = agent, rules
        self.statistics = EngineStatistics()
        self._resources = ExitStack()
        self._gateway: Gateway | None = None
        self._url = ""

    def close(self) -> None:
        self._resources.close()
        self._gateway = None

    def play(
        self,
        tasks: Callable[[EpisodeSeeds], dict[str, Any]],
        plan: Sequence[EpisodeSeeds],
        engine: Engine,
        chat: ChatFormat,
        sampling: Sampling,
        rules: EpisodeRules,
        on_finished: Callable[[], None] | None,
    ) -> list[Trajectory]:
        """An episode for every entry of the plan, in its order."""
        if not isinstance(engine, NativeEngine):
            raise BadInput(f"agents are played with rollout.engine=native, not with '{engine.backend}'")
        gateway = self._open(chat)
        engine.forget()  # the weights may have changed since
        thread = EngineThread(engine)
        gateway.submit, gateway.failure = thread.submit, None
        try:
            found = asyncio.run(self._play_all(gateway, tasks, plan, sampling, rules, on_finished))
        finally:
            gateway.submit = None
            thread.close()
            gateway.forget()
        if gateway.failure is not None:
            raise gateway.failure
        engine.statistics = thread.statistics
        return found

    def take_notes(self) -> list[str]:
        """What is worth saying once."""
        if self._gateway is None:
            return []
        notes, self._gateway.notes = list(self._gateway.notes), {}
        return notes

    def _open(self, chat: ChatFormat) -> Gateway:
        if self._gateway is None:
            self._gateway = Gateway(AgentChat(chat, self.rules.tool_format), "policy")
            self._url = self._resources.enter_context(serving_app(self._gateway.app(), "gateway"))
        return self._gateway

    async def _play_all(
        self,
        gateway: Gateway,
        tasks: Callable[[EpisodeSeeds], dict[str, Any]],
        plan: Sequence[EpisodeSeeds],
        sampling: Sampling,
        rules: EpisodeRules,
        on_finished: Callable[[], None] | None,
    ) -> list[Trajectory]:
        places = asyncio.Semaphore(self.rules.concurrency)

        async def one(seeds: EpisodeSeeds) -> Trajectory:
            async with places:
                trajectory = await self._play_one(gateway, tasks(seeds), seeds, sampling, rules)
            if on_finished is not None:
                on_finished()
            return trajectory

        return list(await asyncio.gather(*(one(seeds) for seeds in plan)))

    async def _play_one(
        self, gateway: Gateway, task: dict[str, Any], seeds: EpisodeSeeds, sampling: Sampling, rules: EpisodeRules
    ) -> Trajectory:
        budgets = Budgets(1 if rules.first_turn_only else self.rules.max_calls, self.rules.max_tokens, rules.max_context, rules.max_tokens)
        secret, session = gateway.open(seeds.sampling, sampling, budgets, exact=self.rules.exact)
        llm = ModelAddress(f"{self._url}/sessions/{secret}/v1", secret, gateway.model)
        trajectory = Trajectory(seeds.group, seeds.member, seeds.instance, [], StopReason.ENV_ERROR, env=LABEL)
        try:
            result = await self._run(task, llm, session)
        except AgentFailure as failure:
            result, trajectory.error = None, str(failure).replace(secret, "SECRET")
        finally:
            gateway.close(secret)
        trajectory_of(session, trajectory)
        if rules.first_turn_only and trajectory.turns:  # a probe looks at the first reply alone
            trajectory.stop_reason, trajectory.error = StopReason.TURN_LIMIT, None
        elif result is not None:
            self._reward(trajectory, session, result, rules)
        return trajectory

    async def _run(self, task: dict[str, Any], llm: ModelAddress, session: Session) -> Result:
        """What the agent returns; AgentFailure for everything that is no evidence."""

        async def guarded() -> Result:
            try:
                return await self.agent.play(task, llm)
            except (SystemExit, GeneratorExit) as error:  # in a task of its own these would end the event loop, and the run
                raise AgentFailure(f"agent raised {type(error).__name__}: {error}") from error

        try:
            result = await asyncio.wait_for(guarded(), self.rules.timeout)
        except AgentFailure:
            raise
        except TimeoutError:
            raise AgentFailure(f"agent ran for {self.rules.timeout:g} s without an end (agent.timeout)") from None
        except asyncio.CancelledError:
            task_now = asyncio.current_task()
            if task_now is not None and task_now.cancelling():
                raise
            raise AgentFailure("agent cancelled itself") from None
        except Exception as error:
            status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
            if session.stop is not None and status == 400:  # the refusal of a call beyond the budget, which the agent did not catch
                return Result(0.0, success=False)
            raise AgentFailure(f"agent raised {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
        if not any(call.completion is not None for call in session.calls):
            raise AgentFailure("the agent made no request to its address (llm.base_url, or TETHER_BASE_URL for a command)")
        return result

    def _reward(self, trajectory: Trajectory, session: Session, result: Result, rules: EpisodeRules) -> None:
        success = result.reward >= 1.0 if result.success is None else result.success
        trajectory.success, trajectory.measures = success, {**trajectory.measures, **result.measures}
        if not trajectory.turns:
            trajectory.error = "no reply of the agent's calls was complete"
            return
        last = trajectory.turns[-1]
        last.reward = result.reward
        for turn in trajectory.turns:
            turn.penalty = 0.0 if turn.valid else rules.format_penalty
        ended = StopReason.SUCCESS if success else session.stop or StopReason.FAILURE
        trajectory.stop_reason = ended
