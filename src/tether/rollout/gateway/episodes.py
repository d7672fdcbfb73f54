"""One episode of an agent: a session at the gateway, the agent's program, and what came of it as a trajectory."""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tether.core.enums import StopReason
from tether.core.http import serving_app
from tether.core.protocols import Sampling
from tether.core.types import AGENT, Trajectory
from tether.models.messages import AgentChat
from tether.rollout.episode import EpisodeRules, EpisodeSeeds
from tether.rollout.gateway.agents import Agent, AgentFailure, ModelAddress, Result
from tether.rollout.gateway.app import Gateway
from tether.rollout.gateway.session import Budgets, Session, grade, trajectory_of
from tether.rollout.gateway.trained import train_rule

LABEL = AGENT


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
    workers: int = 0
    """Processes that play the episodes; 0: this one."""
    train_calls: str = "all"
    """Name of the rule (`trained.train_rule`)."""


class EpisodePlayer:
    """A gateway, and the agent whose episodes it serves. Close it."""

    def __init__(self, agent: Agent, rules: AgentRules, chat: AgentChat) -> None:
        self._agent, self._rules = agent, rules
        self._is_trained = train_rule(rules.train_calls)
        self.gateway = Gateway(chat, "policy")
        self._resources = ExitStack()
        self._url = self._resources.enter_context(serving_app(self.gateway.app(), "gateway"))

    def close(self) -> None:
        self._resources.close()

    def take_notes(self) -> list[str]:
        """What is worth saying once."""
        notes, self.gateway.notes = list(self.gateway.notes), {}
        return notes

    async def play(self, task: dict[str, Any], seeds: EpisodeSeeds, sampling: Sampling, rules: EpisodeRules) -> Trajectory:
        """One episode; whatever fails in the agent is in its record."""
        gateway = self.gateway
        budgets = Budgets(
            1 if rules.first_turn_only else self._rules.max_calls, self._rules.max_tokens, rules.max_context, rules.max_tokens
        )
        secret, session = gateway.open(seeds.sampling, sampling, budgets, exact=self._rules.exact)
        llm = ModelAddress(f"{self._url}/sessions/{secret}/v1", secret, gateway.model)
        trajectory = Trajectory(seeds.group, seeds.member, seeds.instance, [], StopReason.ENV_ERROR, env=LABEL)
        try:
            result = await self._run(task, llm, session)
        except AgentFailure as failure:
            result, trajectory.error = None, str(failure).replace(secret, "SECRET")
        finally:
            gateway.close(secret)
        trajectory_of(session, trajectory, self._is_trained)
        if rules.first_turn_only and trajectory.turns:  # a probe looks at the first reply alone
            trajectory.stop_reason, trajectory.error = StopReason.TURN_LIMIT, None
        elif result is not None:
            grade(trajectory, session, result, rules.format_penalty)
        return trajectory

    async def _run(self, task: dict[str, Any], llm: ModelAddress, session: Session) -> Result:
        """What the agent returns; AgentFailure for everything that is no evidence."""

        async def guarded() -> Result:
            try:
                return await self._agent.play(task, llm)
            except (SystemExit, GeneratorExit) as error:  # in a task of its own these would end the event loop, and the run
                raise AgentFailure(f"agent raised {type(error).__name__}: {error}") from error

        try:
            result = await asyncio.wait_for(guarded(), self._rules.timeout)
        except AgentFailure:
            raise
        except TimeoutError:
            raise AgentFailure(f"agent ran for {self._rules.timeout:g} s without an end (agent.timeout)") from None
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
