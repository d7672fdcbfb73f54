"""An environment over rows of one's own, with tools: the agent calls tools, reads what they return, and finishes with an answer.

A subclass names its tools: methods that take the text between the brackets and return text. `lookup[A-17]` calls `lookup("A-17")`; `finish[...]`
answers, and ends the episode. The first line of a tool's docstring tells the agent what it does. `self.row` is the row being played.

    class OrderDesk(ToolEnv):
        name = "order_desk"
        task = "Answer the customer's question about an order."
        tools = ("lookup",)
        rows = [{"question": "What did A-17 cost?", "answer": "12", "orders": {"A-17": "a lamp for 12 dollars"}}]

        def lookup(self, number: str) -> str:
            \"\"\"What is known of an order, by its number.\"\"\"
            return self.row["orders"].get(number, "there is no such order")
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from tether.core.errors import BadInput
from tether.envs.base import Outcome, TextEnv, TurnOptions
from tether.envs.dataset import BadRows, Pool, Row, load_instances
from tether.envs.qa.dataset import Item, read_any, read_exact
from tether.envs.searchqa.reward import exact_match
from tether.envs.webshop.env import read_action

FINISH = "finish"


class ToolOptions(TurnOptions):
    """Options of an environment with tools."""

    max_turns: int = Field(default=5, ge=1)
    """Tools called and the answer, in all."""
    data: str | None = None
    """A file or data set of rows to use instead of the class's own."""
    bad_rows: BadRows = "error"
    """What to do with a malformed row of it."""
    fields: dict[str, str] = {}
    """Columns of it under other names, such as {question: Question, answer: Answer}."""


class ToolEnv(TextEnv[ToolOptions]):
    """Questions from rows, tools to answer them with."""

    Options = ToolOptions
    reward_range = (0.0, 1.0)
    metrics = ("calls",)
    owner_options = ("data",)
    tools: ClassVar[tuple[str, ...]] = ()
    """The names of the methods that an agent may call."""
    rows: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """The rows where the option `data` names no file: each with a question and, unless `grade` is overridden, an answer."""

    def __init__(self, options: ToolOptions) -> None:
        super().__init__(options)
        if not options.data and not self.rows:
            raise BadInput(f"{self.name} has no rows; give data=FILE, or the class an attribute `rows`")
        if unknown := [name for name in self.tools if not callable(getattr(self, name, None))]:
            raise BadInput(f"{self.name} has no method '{unknown[0]}', which `tools` names; write def {unknown[0]}(self, text: str) -> str")
        if options.data:
            items = load_instances(
                options.data,
                self._item,
                env=self.name,
                default="the rows of the class",
                bad_rows=options.bad_rows,
                fields=tuple(options.fields.items()),
            )
        else:
            items = [self._item(Row(dict(row), f"row {number}")) for number, row in enumerate(self.rows, 1)]
        self._make = Pool(items, env=self.name, source=options.data or "the rows of the class")

    # --- what a subclass may override ---

    def grade(self, answer: str) -> float:
        """What an answer is worth, from 0 to 1, which is a success: by default 1 if it is an accepted answer of the row."""
        return float(any(exact_match(answer, gold) for gold in self.item.gold))

    # --- the episode ---

    @property
    def row(self) -> dict[str, Any]:
        """Every column of the row being played."""
        return self.item.row

    def generate(self, seed: int) -> None:
        self.item: Item = self._make(seed, self.options.split)
        self._calls = 0

    @property
    def instance(self) -> str:
        return self.item.fingerprint

    def opening(self) -> str:
        return self.item.question

    def take(self, answer: str) -> Outcome:
        name, argument = read_action(answer)
        if name == FINISH:
            reward = self.grade(argument.strip())
            said = "That is right." if reward >= 1 else "That is wrong." if reward <= 0 else f"That is worth {reward:g}."
            return Outcome(said, reward, done=True, success=reward >= 1, info={"calls": self._calls})
        if name not in self.tools:
            return Outcome(f"Nothing was called. {self._how}", valid=False, info={"calls": self._calls})
        self._calls += 1
        return Outcome(str(getattr(self, name)(argument.strip())), info={"calls": self._calls})

    @property
    def format_rule(self) -> str:
        return f"{self._how}\n{super().format_rule}"

    @property
    def _how(self) -> str:
        """The tools with what they do, and how to answer."""
        told = {name: (inspect.getdoc(getattr(self, name)) or "").partition("\n")[0] for name in self.tools}
        lines = [f"{name}[...]: {does}" for name, does in told.items()]
        return "\n".join(["Answer with one of these, and nothing else:", *lines, f"{FINISH}[...]: your answer, which ends the task."])

    def _item(self, row: Row) -> Item:
        own_grade = type(self).grade is not ToolEnv.grade
        item = read_any(row) if own_grade else read_exact(row)
        return replace(item, row={name: row.value[name] for name in row.value})
