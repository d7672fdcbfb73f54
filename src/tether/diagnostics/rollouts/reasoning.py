"""The place of the reasoning in a response: between think tags, or where a pattern of the user matches.

By default the first closing tag decides. The text between the opening tag and it is the reasoning, character for character; where no tag
was opened before it, the prompt (or the chat template) opened it and the response starts inside. A doubled opening tag counts
as one: some frameworks put one in front of what the model wrote. Without a closing tag there is no reasoning, as in Tether's grammar.
"""

import dataclasses
import re
from dataclasses import dataclass

from tether.core.errors import BadInput
from tether.core.grammar import THINK_CLOSE, THINK_OPEN
from tether.diagnostics.rollouts.record import Rollout

WHOLE_RESPONSE = "(.*)"
"""The pattern for responses that are reasoning from end to end."""

_OPENING = re.compile(rf"{THINK_OPEN}(?:\s*{THINK_OPEN})*")


@dataclass(frozen=True, slots=True)
class Cut:
    """The place of the reasoning in a response, or why there is none."""

    start: int = 0
    end: int = 0
    implied: bool = False
    """The opening tag is not in the response."""
    missing: str | None = None


class ReasoningRule:
    """Think tags, or a regular expression with one group; "." matches line ends too.

    >>> ReasoningRule(r"Thought:(.*?)Action:").cut("Thought: go left\\nAction: left")
    Cut(start=8, end=17, implied=False, missing=None)
    """

    def __init__(self, pattern: str | None = None) -> None:
        self.pattern = pattern
        self._regex: re.Pattern[str] | None = None
        if pattern is None:
            return
        try:
            self._regex = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise BadInput(f"pattern {pattern!r} is no regular expression: {error}; mark the reasoning with one group (...)") from error
        if self._regex.groups != 1:
            raise BadInput(
                f"pattern {pattern!r} has {self._regex.groups} groups; mark the reasoning with exactly one (...), others as (?:...)"
            )

    def apply(self, rollout: Rollout) -> Rollout:
        """The rollout with its reasoning; as it is where the file already says what the reasoning is."""
        if rollout.missing is not None or rollout.reasoning_ids is not None:
            return rollout
        if rollout.reasoning is not None:
            return rollout if rollout.has_reasoning else dataclasses.replace(rollout, missing="blank")
        if rollout.response is None:
            return dataclasses.replace(rollout, missing="absent")
        cut = self.cut(rollout.response)
        if cut.missing is not None:
            return dataclasses.replace(rollout, missing=cut.missing)
        return dataclasses.replace(
            rollout,
            reasoning=rollout.response[cut.start : cut.end],
            lead=rollout.response[: cut.start],
            think_implied=cut.implied,
        )

    def cut(self, response: str) -> Cut:
        """Start and end of the reasoning in a response."""
        if self._regex is None:
            end = response.find(THINK_CLOSE)
            opening = _OPENING.search(response, 0, len(response) if end < 0 else end)
            if end < 0:
                return Cut(missing="unclosed" if opening else "untagged")
            cut = Cut(opening.end() if opening else 0, end, implied=opening is None)
        else:
            match = self._regex.search(response)
            if match is None or match.group(1) is None:
                return Cut(missing="unmatched")
            cut = Cut(match.start(1), match.end(1))
        return cut if response[cut.start : cut.end].strip() else Cut(missing="blank")
