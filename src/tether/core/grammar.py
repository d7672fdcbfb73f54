"""The think/answer grammar, in one place for environments, rollout and diagnosis.

A response is what the model writes after the opening think tag, which the prompt already ends with:

    response = reasoning "</think>" space* "<answer>" answer "</answer>" anything

The first match decides. Tags inside either part are deleted, both are stripped. Anything else is malformed: it has no answer,
and its reasoning is what stands before the first closing think tag, if there is one. Named actions are separated by "||".
An environment may take other tags beside the answer's (Search-R1's <search>); the answer then keeps its tags, which say what it is.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
ACTION_SEPARATOR = "||"

ANSWER_TAGS = ("answer",)

_TAGS = re.compile(r"</?think>|</?answer>|<\|im_start\|>|<\|im_end\|>")

FORMAT_RULE = "Always reply as: <think> your thoughts </think> <answer> your answer </answer>"


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A response taken apart.

    Example: " go right </think> <answer> Right || Up </answer>" gives reasoning "go right", answer "Right || Up",
    reasoning_end 10 (the characters before the closing tag).
    """

    reasoning: str | None
    """The thoughts, stripped and without tags; None if the think tag was never closed."""
    answer: str | None
    """The answer, stripped and without tags; None if the response is malformed."""
    reasoning_end: int | None
    """Number of characters before the closing think tag; None if there is none."""

    @property
    def well_formed(self) -> bool:
        return self.answer is not None


def parse_response(text: str, tags: tuple[str, ...] = ANSWER_TAGS) -> ParsedResponse:
    """Take apart what the model wrote after the opening think tag. With other tags than the answer's alone, the answer keeps its own."""
    match = _answer_pattern(tags).search(text)
    end = match.start() if match else text.find(THINK_CLOSE)
    if end < 0:
        return ParsedResponse(None, None, None)
    answer = _TAGS.sub("", match.group(2)).strip() if match else None
    if match and tags != ANSWER_TAGS:
        answer = f"<{match.group(1)}>{answer}</{match.group(1)}>"
    return ParsedResponse(_TAGS.sub("", text[:end]).strip(), answer, end)


@lru_cache(maxsize=16)
def _answer_pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"</think>\s*<({'|'.join(map(re.escape, tags))})>(.*?)</\1>", re.DOTALL)


def split_actions(answer: str) -> list[str]:
    """The named actions of an answer, in order; empty parts are dropped."""
    return [part for piece in answer.split(ACTION_SEPARATOR) if (part := piece.strip())]


def match_actions(answer: str, names: Sequence[str]) -> tuple[list[int], bool]:
    """Indices of the actions in `names` (case-insensitive), and whether the answer was clean: at least one action, none unknown."""
    table = _indices(tuple(names))
    parts = split_actions(answer)
    found = [index for part in parts if (index := table.get(part.lower())) is not None]
    return found, bool(found) and len(found) == len(parts)


@lru_cache(maxsize=64)
def _indices(names: tuple[str, ...]) -> dict[str, int]:
    return {name.lower(): index for index, name in enumerate(names)}
