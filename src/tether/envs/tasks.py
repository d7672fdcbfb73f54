"""Tasks of an agent: rows of a file, which the agent's own program plays (rollout/gateway). Members of a group play the same row.

Rows are divided into splits by what they hold, as those of every other data file. A row is any JSON object; its `id`, where it has one, decides the
split, so that tasks of one family can be kept together.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from tether.core.errors import BadInput
from tether.envs.base import Outcome, TextEnv, TurnOptions
from tether.envs.dataset import BadRows, Pool, Row, RowError, load_instances
from tether.envs.wording import Example

DEFAULT = "nothing: an agent needs tasks"


@dataclass(frozen=True, slots=True)
class Task:
    """One row."""

    row: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return str(self.row["id"]) if "id" in self.row else json.dumps(self.row, sort_keys=True, ensure_ascii=False)


def read_task(row: Row) -> Task:
    if not isinstance(row.value, dict) or not row.value:
        raise RowError(f'is a {type(row.value).__name__}; a task is an object, such as {{"question": ..., "answer": ...}}')
    return Task({name: row.value[name] for name in row.value})


@lru_cache(maxsize=8)
def load(source: str, bad_rows: BadRows) -> Pool[Task]:
    return Pool(
        load_instances(source, read_task, env="agent", default=DEFAULT, option="tasks", bad_rows=bad_rows), env="agent", source=source
    )


class TasksOptions(TurnOptions):
    """Options of the tasks of an agent."""

    data: str
    """A file or data set of tasks."""
    bad_rows: BadRows = "error"
    """What to do with a malformed row."""


class Tasks(TextEnv[TasksOptions]):
    """Tasks that an agent's program plays."""

    name = "agent"
    Options = TasksOptions
    owner_options = ("data",)

    def __init__(self, options: TasksOptions) -> None:
        super().__init__(options)
        self._make = load(options.data, options.bad_rows)

    def draw(self, seed: int) -> dict[str, Any]:
        """The task of a seed; a copy, which an agent may change."""
        return json.loads(json.dumps(self._make(seed, self.options.split).row))

    @property
    def num_instances(self) -> int:
        return self._make.num_instances(self.options.split)

    def generate(self, seed: int) -> None:
        self._refuse()

    def take(self, answer: str) -> Outcome:
        self._refuse()

    def opening(self) -> str:
        self._refuse()

    @property
    def instance(self) -> str:
        self._refuse()

    @property
    def task(self) -> str:
        return "Tasks that an agent's program plays."

    @property
    def example(self) -> Example:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise BadInput("tasks are played by an agent's program: train with --agent module:function --tasks FILE")
