"""Sessions for programs that drive themselves: they open one for every episode, in Python or over HTTP, and finish it with its reward.

The counterpart of `player.py`, which runs the programs itself. Sessions of the same task are the members of one group. A session that is not finished
in time, that its program gives up, or that asked nothing is no evidence: its trajectory holds the cause.
"""

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tether.core.enums import StopReason
from tether.core.errors import BadInput
from tether.core.http import Refusal, read_json
from tether.core.protocols import Sampling
from tether.core.seeding import sampling_seed
from tether.core.text import unusable
from tether.core.types import Trajectory
from tether.models.chat import ChatFormat
from tether.models.messages import AgentChat
from tether.rollout.engines.native import NativeEngine
from tether.rollout.episode import EpisodeRules
from tether.rollout.gateway.agents import AgentFailure, ModelAddress, Result, read_result
from tether.rollout.gateway.app import MAX_JSON, Gateway
from tether.rollout.gateway.episodes import LABEL, AgentRules
from tether.rollout.gateway.session import Budgets, Session, grade, trajectory_of
from tether.rollout.gateway.trained import train_rule
from tether.rollout.serving.chat import json_response
from tether.rollout.serving.engine_thread import EngineThread

if TYPE_CHECKING:
    from fastapi import FastAPI

STEP = 1
"""Of all records: the weights do not change."""


class OpenSession:
    """One episode: where its model is, and, once it is finished, its trajectory."""

    def __init__(
        self, server: "GatewayServer", task: Mapping[str, Any], address: ModelAddress, record: Session, trajectory: Trajectory
    ) -> None:
        self.id = secrets.token_urlsafe(24)
        """Finishes the session over HTTP; the program that asks the model need not know it."""
        self.task, self.base_url, self.api_key, self.model = task, address.base_url, address.api_key, address.model
        self.began, self.is_over = time.monotonic(), False
        self.record, self._server, self._trajectory = record, server, trajectory

    @property
    def trajectory(self) -> Trajectory:
        if not self.is_over:
            raise BadInput("the session is not finished; call finish(reward=...) first")
        return self._trajectory

    def finish(self, reward: Any, success: bool | None = None, measures: Mapping[str, float] | None = None) -> Trajectory:
        """End the episode with its reward; `success` is by default whether the reward is at least 1."""
        try:
            result = read_result(Result(reward, success, measures or {}))  # type: ignore[arg-type]
        except AgentFailure as error:
            raise BadInput(str(error).replace("agent returned", "finish got").replace("return ", "give ")) from error
        return self._server.end(self, self._trajectory, result)

    def fail(self, error: str) -> Trajectory:
        """End the episode without a reward: it is recorded with the cause, and no evidence."""
        return self._server.end(self, self._trajectory, error)


class GatewayServer:
    """Opens sessions at one model. Close it after its last request, best by `tether.gateway`."""

    def __init__(
        self,
        engine: NativeEngine,
        chat: ChatFormat,
        sampling: Sampling,
        rules: EpisodeRules,
        agents: AgentRules,
        *,
        name: str = "policy",
        seed: int = 0,
        on_ended: Callable[[Trajectory, Mapping[str, Any]], None] = lambda trajectory, task: None,
    ) -> None:
        """`on_ended` gets every episode with its task, one at a time."""
        self.url = ""
        """Set by what serves `app`."""
        self._sampling, self._rules, self._agents, self._seed, self._on_ended = sampling, rules, agents, seed, on_ended
        self._is_trained = train_rule(agents.train_calls)
        self._gateway = Gateway(AgentChat(chat, agents.tool_format), name)
        self._thread = EngineThread(engine)
        self._gateway.submit = self._thread.submit
        self._lock = threading.RLock()
        self._open: dict[str, OpenSession] = {}
        self._tasks: dict[str, int] = {}
        """Groups by task."""
        self._said: set[str] = set()
        self._members: list[int] = []
        """Sessions that were opened, by group."""

    def stop(self) -> None:
        """Let requests in work fail; for signal handlers."""
        self._thread.stop()

    def close(self) -> None:
        """End the sessions that are open, and the engine."""
        for session in list(self._open.values()):
            session.fail("the gateway was closed before the session was finished")
        self._thread.close()

    def open(self, task: Mapping[str, Any]) -> OpenSession:
        """A session for an episode of a task; tasks with one `id`, or else with equal fields, are one group."""
        if not isinstance(task, Mapping) or not task:
            raise BadInput('a task is an object that is not empty, such as {"id": "1", "question": "..."}')
        if (problem := unusable(dict(task))) is not None:
            raise BadInput(f"the task {problem}")
        self._end_late()
        with self._lock:
            key = str(task["id"]) if "id" in task else json.dumps(dict(task), sort_keys=True, ensure_ascii=False)
            group = self._tasks.setdefault(key, len(self._tasks))
            self._members += [0] * (group + 1 - len(self._members))
            member = self._members[group]
            self._members[group] += 1
            budgets = Budgets(self._agents.max_calls, self._agents.max_tokens, self._rules.max_context, self._rules.max_tokens)
            seed = sampling_seed(self._seed, STEP, group, member)
            secret, session = self._gateway.open(seed, self._sampling, budgets, exact=self._agents.exact)
            address = ModelAddress(f"{self.url}/sessions/{secret}/v1", secret, self._gateway.model)
            trajectory = Trajectory(group, member, group, [], StopReason.ENV_ERROR, env=LABEL)
            opened = OpenSession(self, task, address, session, trajectory)
            self._open[opened.id] = opened
        return opened

    def end(self, opened: OpenSession, trajectory: Trajectory, outcome: Result | str) -> Trajectory:
        """End a session with its result, or with why there is none."""
        session = opened.record
        with self._lock:
            if opened.is_over:
                raise BadInput(f"the session is over{f' ({trajectory.error})' if trajectory.error else ''}; open another")
            opened.is_over = True
            del self._open[opened.id]
            self._gateway.close(opened.api_key)
            trajectory_of(session, trajectory, self._is_trained)
            if session.failure is not None:
                outcome = f"the engine failed: {session.failure}"
            elif not trajectory.turns and isinstance(outcome, Result):
                outcome = "the session got no request at its base_url"
            if isinstance(outcome, Result):
                grade(trajectory, session, outcome, self._rules.format_penalty)
            else:
                trajectory.error = " ".join(outcome.split()).replace(opened.api_key, "SECRET")
            self._gateway.forget()
            for note in self._gateway.notes.keys() - self._said:
                logging.getLogger(__name__).warning(note)
            self._said |= self._gateway.notes.keys()
            self._on_ended(trajectory, opened.task)
        return trajectory

    def _end_late(self) -> None:
        with self._lock:
            for session in list(self._open.values()):
                if time.monotonic() - session.began > self._agents.timeout:
                    session.fail(f"the session was open for {self._agents.timeout:g} s without an end (agent.timeout)")

    def app(self, token: str | None = None) -> "FastAPI":
        """The routes of the sessions, and those that open and finish them, which need the token where there is one."""
        from fastapi import Request, Response

        app = self._gateway.app(token, self._thread.problem)
        self._thread.report(app.state.telemetry)

        @app.post("/sessions")
        async def begin(request: Request) -> Response:
            body = await read_json(request, MAX_JSON)
            _check_fields(body, ("task",))
            opened = self.open(body.get("task", {}))
            return json_response({"id": opened.id, "base_url": opened.base_url, "api_key": opened.api_key, "model": opened.model})

        @app.post("/sessions/{number}/finish")
        async def finish(number: str, request: Request) -> Response:
            body = await read_json(request, MAX_JSON)
            _check_fields(body, ("reward", "success", "measures", "error"))
            self._end_late()
            opened = self._open.get(number)
            if opened is None:
                raise Refusal(404, "there is no open session of this id: it was finished, or was open for too long (agent.timeout)")
            if "error" in body:
                ended = opened.fail(str(body["error"])[:1000])
            else:
                ended = opened.finish(body.get("reward"), body.get("success"), body.get("measures"))
            return json_response(
                {"stop_reason": str(ended.stop_reason), "error": ended.error, "reward": ended.reward, "measures": ended.measures}
            )

        return app


def _check_fields(body: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = sorted(set(body) - set(known))
    if unknown:
        raise BadInput(f"unknown field '{unknown[0]:.60}'; send {', '.join(known)}")
