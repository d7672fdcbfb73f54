"""What an answer asks the environment to do: search, or finish. Two ways to write it; whatever is neither is no action.

brackets: `search[query]` and `finish[answer]`, from the first bracket to the last, so that either may hold brackets itself.
tags: `<search> query </search>` and `<answer> answer </answer>` as in Search-R1; the first complete tag decides.
"""

import re
from dataclasses import dataclass
from typing import Literal

Format = Literal["brackets", "tags"]

_BRACKETS = re.compile(r"\s*(search|finish)\s*\[(.*)\]\s*", re.DOTALL | re.IGNORECASE)
_TAGS = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Action:
    """One action with its words."""

    name: Literal["search", "finish"]
    text: str
    """The query or the answer, never empty."""


def parse(answer: str, format: Format) -> Action | None:
    """The action of an answer; None if it is not one, or an empty one."""
    match = _BRACKETS.fullmatch(answer) if format == "brackets" else _TAGS.search(answer)
    text = " ".join(match.group(2).split()) if match else ""
    if match is None or not text:
        return None
    return Action("search" if match.group(1).lower() == "search" else "finish", text)
