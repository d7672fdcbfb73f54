"""A single-turn taskset of verifiers: `make_env("verifiers:my-taskset")`.

The prompt of a task is shown, the answer becomes the reply of a trace, and the task's own rewards score it. A taskset with tools, a container, an
environment of its own or a user that speaks first drives the agent itself: its rollouts run against `tether serve`, with verifiers' own client.
"""

import asyncio
import inspect
import json
import math
import os
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.graph import prepare_turn
from verifiers.v1.state import state_cls
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import AssistantMessage, Response, UserMessage
from verifiers.v1.utils.loaders import environment_class, taskset_class, taskset_config_type

from tether.core.errors import BadInput, UnknownName
from tether.core.importing import in_one_line
from tether.envs.base import TurnOptions, Work
from tether.envs.dataset import Pool
from tether.envs.qa.dataset import Item
from tether.envs.qa.env import Questions
from tether.envs.qa.prompt import OWN
from tether.envs.qa.rewards import Graded

INSTEAD = "run it against `tether serve`, with verifiers' own client"


class VerifiersOptions(TurnOptions):
    """Options of a taskset."""

    config: dict[str, Any] = {}
    """The taskset's own settings."""
    tasks: int = Field(default=10_000, ge=1)
    """The most tasks that are read of it; some tasksets never end."""
    success_reward: float = 1.0
    """An answer is a success from this reward on."""


class Verifiers(Questions[VerifiersOptions]):
    """A taskset of verifiers; subclasses have its id."""

    id: ClassVar[str]
    Options = VerifiersOptions
    owner_options = ("config",)

    def __init__(self, options: VerifiersOptions) -> None:
        tasks = _load(self.id, json.dumps(options.config, sort_keys=True), options.tasks)
        super().__init__(options, tasks, TraceReward(options.success_reward), OWN)


class TraceReward:
    """The rewards of a task, added up."""

    work: Work = "process"
    workers = os.cpu_count() or 1
    bounds = (-math.inf, math.inf)

    def __init__(self, success_reward: float) -> None:
        self._success = success_reward

    def __call__(self, item: Item, answer: str) -> Graded:
        task = item.row["task"]
        trace = Trace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=AgentInfo(config=AgentConfig()),
        )
        said = AssistantMessage(content=answer.encode("utf-8", "replace").decode())  # halves of surrogate pairs cannot be hashed
        reply = Response(id="tether", created=0, model="tether", message=said, finish_reason="stop")
        prepare_turn(trace, [UserMessage(content=item.question)]).commit(reply)
        asyncio.run(task.score(trace))
        reward = float(trace.reward)
        return Graded(reward, reward >= self._success)


@lru_cache(maxsize=8)
def _load(id: str, config: str, most: int) -> Pool[Item]:
    """The tasks of a taskset; read once in a process."""
    name = f"verifiers:{id}"
    try:
        settings = taskset_config_type(id).model_validate({**json.loads(config), "id": id})
        taskset = taskset_class(id)(settings)
        shared = taskset.toolsets(settings)
        tasks = list(taskset.take(most))
    except Exception as error:
        raise BadInput(f"{name}: the taskset cannot be loaded: {in_one_line(error)}") from error
    if not tasks:
        raise BadInput(f"{name} has no tasks; see its settings (config)")
    if reason := "tools" if shared else _beyond_one_turn(tasks[0]):
        raise BadInput(f"{name} has {reason}, so it is no single-turn taskset; {INSTEAD}")
    return Pool([_item(task) for task in tasks], env=name, source=id)


def _beyond_one_turn(task: Any) -> str:
    """What a task needs that one answer to its prompt has not; empty: nothing."""
    if type(task).toolsets(task.config):
        return "tools"
    if task.NEEDS_CONTAINER:
        return "tasks that need a container"
    if not task.data.prompt_text:
        return "tasks without a prompt"
    rewards = task.hooks("reward")
    if not rewards and not task.config.judges:
        return "no reward"
    parameters = [inspect.signature(reward).parameters.get("runtime") for reward in rewards]
    if any(parameter is not None and parameter.default is inspect.Parameter.empty for parameter in parameters):
        return "rewards that look into the agent's runtime"
    return ""


def _item(task: Any) -> Item:
    system = task.data.system_prompt
    return Item(f"{system}\n\n{task.data.prompt_text}" if system else task.data.prompt_text, row={"task": task})


@lru_cache(maxsize=64)
def env_class(id: str) -> type[Verifiers]:
    """The class of a taskset."""
    try:
        taskset_class(id)
        environment = environment_class(id)
    except ImportError as error:
        raise UnknownName(f"verifiers has no taskset '{id}': {in_one_line(error)}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise BadInput(f"verifiers:{id} is no taskset: {in_one_line(error)}") from error
    if environment is not SingleAgentEnv:
        raise BadInput(f"verifiers:{id} has an environment of its own ({environment.__name__}), so it is no single-turn taskset; {INSTEAD}")
    return type(id, (Verifiers,), {"name": f"verifiers:{id}", "id": id, "__module__": __name__})
