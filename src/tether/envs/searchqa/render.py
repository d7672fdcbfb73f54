"""The two formats of actions, and the replies to them: the results of a search, and why an answer was no action.

brackets: `search[query]` and `finish[answer]`, from the first bracket to the last, so that either may contain brackets.
tags: `<search> query </search>` and `<answer> answer </answer>` as in Search-R1; the first complete tag decides.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tether.envs.searchqa.corpus import Document
from tether.envs.searchqa.prompt import WAYS, ActionFormat

_BRACKETS = re.compile(r"\s*(search|finish)\s*\[(.*)\]\s*", re.DOTALL | re.IGNORECASE)
_TAGS = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SearchAction:
    """One action with its words."""

    name: Literal["search", "finish"]
    text: str
    """The query or the answer, never empty."""


def parse(answer: str, format: ActionFormat) -> SearchAction | None:
    """The action of an answer; None if it is not one, or an empty one."""
    match = _BRACKETS.fullmatch(answer) if format == "brackets" else _TAGS.search(answer)
    text = " ".join(match.group(2).split()) if match else ""
    if match is None or not text:
        return None
    return SearchAction("search" if match.group(1).lower() == "search" else "finish", text)


def invalid(format: ActionFormat) -> str:
    search, finish = WAYS[format]
    return f"That was neither a search nor an answer. To search, write {search}; to answer, write {finish}."


def no_results(query: str, format: ActionFormat) -> str:
    return _wrapped(f"No document was found for '{query}'. Use other words; very common ones are not looked up.", format)


def results(
    query: str, documents: Sequence[Document], format: ActionFormat, *, document_chars: int, results_chars: int
) -> tuple[str, list[str]]:
    """The documents as text, and the titles of those shown. Each is cut to `document_chars`, all of them to `results_chars`."""
    lines: list[str] = []
    room = results_chars
    for number, document in enumerate(documents, 1):
        if room <= 0:
            break
        text = _cut(" ".join(document.text.split()), min(document_chars, room))
        room -= len(text)
        if format == "tags":
            lines.append(f"Doc {number}(Title: {document.title}) {text}")
        else:
            lines.append(f"[{number}] {document.title}: {text}" if document.title else f"[{number}] {text}")
    head = "" if format == "tags" else f"Results for '{query}':\n"
    return head + _wrapped("\n".join(lines), format), [document.title for document in documents[: len(lines)]]


def reply_to_answer(answer: str, right: bool, gold: str) -> str:
    return f"Your answer '{answer}' is right." if right else f"Your answer was '{answer}', the right one is '{gold}'."


def _wrapped(text: str, format: ActionFormat) -> str:
    return f"<information>{text}</information>" if format == "tags" else text


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: max(0, limit - 3)].rstrip()}..."
