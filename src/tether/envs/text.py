"""What environments with free-text answers share: the answer is taken whole, and each turn is shown as a line about the turns and a text.

A subclass supplies the task (`_task`), an instance (`_generate`), the text that opens it (`_opening`) and the effect of an answer
(`_take`). Nothing is split or cleaned on the way: a program or a query reaches `_take` as the agent wrote it.
"""

from abc import abstractmethod

from tether.core.grammar import FORMAT_RULE
from tether.core.types import Observation
from tether.envs.turns import OptionsT, TurnEnv


class TextEnv(TurnEnv[OptionsT]):
    """An Env whose answers are free text."""

    @property
    @abstractmethod
    def _task(self) -> str:
        """The goal and the rules; the format of a reply is added."""

    @abstractmethod
    def _opening(self) -> str:
        """The text of the first observation: the question, the problem, the first page."""

    @property
    def instructions(self) -> str:
        return f"{self._task}\n{FORMAT_RULE}"

    def _observe(self, head: str, body: str | None = None) -> Observation:
        return Observation(f"{head}\n{self._opening() if body is None else body}")
