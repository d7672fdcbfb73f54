"""What an agent is told about searching: the task, the two formats of actions, examples of replies, the results of a search.

brackets: `search[query]` and `finish[answer]` between answer tags, from the first bracket to the last, so that either may contain brackets.
tags: `<search> query </search>` and `<answer> answer </answer>` as in Search-R1; the first complete tag decides.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tether.envs.searchqa.corpus import Document
from tether.envs.wording import PAPERS_FORM, Example, in_papers_frame

ActionFormat = Literal["brackets", "tags"]

TAGS_RULE = (
    "Always reply as: <think> your thoughts </think> and then either <search> your query </search> or <answer> your answer </answer>"
)

WAYS = {
    "brackets": ("search[your query]", "finish[your answer]"),
    "tags": ("<search> your query </search>", "<answer> your answer </answer>"),
}
"""How a search and an answer are written."""

_REFUSED = {
    "brackets": (
        "When a document tells the answer, finish in the same form: <think> Document 1 says she was born in Port Amber. </think> "
        "<answer> finish[Port Amber] </answer>\n"
        "Between the answer tags write one search[...] or one finish[...] and nothing else. Stop after </answer>."
    ),
    "tags": (
        "When a document tells the answer, finish: <think> Document 1 says she was born in Port Amber. </think> <answer> Port Amber </answer>\n"
        "After </think> write one search or one answer, never both, and nothing else. Stop after the closing tag."
    ),
}

_QUESTION = 'Question: In which town was the painter of "The Grey Heron" born?'
_RIVER = "Question: How long is the river that flows through Stellmoor?"
_PAINTING = ("The Grey Heron", '"The Grey Heron" is a painting by Ilse Varn. It hangs in the town hall.')
_PAINTER = ("Ilse Varn", "Ilse Varn, a painter, was born in Port Amber and died in Stellmoor.")
_LENNE = ("River Lenne", "The River Lenne flows through Stellmoor to the sea. It is 212 kilometres long.")


def task(format: ActionFormat, top_k: int, search_cost: float) -> str:
    search, finish = WAYS[format]
    shown = "the best document" if top_k == 1 else f"the {top_k} best documents"
    cost = f" The first search is free, each further one costs {search_cost:g} of the reward." if search_cost else ""
    return (
        "Answer the question with the help of a search engine. "
        f"Each turn do one of two things: {search} shows {shown} for a query; {finish} ends the game. "
        f"Give the bare answer: a name, a date, a number, yes or no.{cost}"
    )


def example(format: ActionFormat) -> Example:
    return _search(format, _QUESTION, "I need to know who painted The Grey Heron. I search for the painting.", "The Grey Heron painting")


def refused(format: ActionFormat) -> str:
    return _REFUSED[format]


def paper(format: ActionFormat, top_k: int, search_cost: float) -> str:
    return in_papers_frame(task(format, top_k, search_cost), form=TAGS_RULE if format == "tags" else PAPERS_FORM)


def worked(format: ActionFormat) -> list[Example]:
    """Two games, turn by turn."""
    found = [
        _found(format, *document)
        for document in (("Stellmoor river", _LENNE), ("The Grey Heron painting", _PAINTING), ("Ilse Varn", _PAINTER))
    ]
    return [
        _search(format, _RIVER, "I do not know which river flows through Stellmoor, so I search for the town.", "Stellmoor river"),
        _finish(
            format,
            found[0],
            "Document 1 says that the River Lenne flows through Stellmoor and is 212 kilometres long.",
            "212 kilometres",
            2,
        ),
        example(format),
        _search(format, found[1], "Document 1 says that Ilse Varn painted it. I search for her.", "Ilse Varn", 2),
        _finish(format, found[2], "Document 1 says that Ilse Varn was born in Port Amber.", "Port Amber", 3),
    ]


def _found(format: ActionFormat, query: str, document: tuple[str, str]) -> str:
    """One document as the results of a search show it."""
    title, text = document
    if format == "tags":
        return f"<information>Doc 1(Title: {title}) {text}</information>"
    return f"Results for '{query}':\n[1] {title}: {text}"


def _search(format: ActionFormat, state: str, reasoning: str, query: str, turn: int = 1) -> Example:
    tag, answer = ("search", query) if format == "tags" else ("answer", f"search[{query}]")
    return Example(state, reasoning, answer, tag, turn=turn)


def _finish(format: ActionFormat, state: str, reasoning: str, answer: str, turn: int) -> Example:
    return Example(state, reasoning, answer if format == "tags" else f"finish[{answer}]", turn=turn)


_BRACKETS = re.compile(r"\s*(search|finish)\s*\[(.*)\]\s*", re.DOTALL | re.IGNORECASE)
_TAGS = re.compile(r"<(/?)(search|answer)>", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SearchAction:
    """One action with its words."""

    name: Literal["search", "finish"]
    text: str
    """The query or the answer, never empty."""


def parse(answer: str, format: ActionFormat) -> SearchAction | None:
    """The action of an answer; None if it is not one, or an empty one."""
    if format == "tags":
        name, inside = _tagged(answer)
    else:
        match = _BRACKETS.fullmatch(answer)
        name, inside = match.groups() if match else ("", "")
    text = " ".join(inside.split())
    return SearchAction("search" if name.lower() == "search" else "finish", text) if text else None


def _tagged(answer: str) -> tuple[str, str]:
    """The first tag that is closed, and what it holds; every tag of the answer is looked at once."""
    closings: dict[str, list[int]] = {}
    openings: list[re.Match[str]] = []
    for tag in _TAGS.finditer(answer):
        if tag[1]:
            closings.setdefault(tag[2].lower(), []).append(tag.start())
        else:
            openings.append(tag)
    for opening in openings:
        ends = closings.get(opening[2].lower(), [0])
        if ends[-1] >= opening.end():
            return opening[2], answer[opening.end() : next(end for end in ends if end >= opening.end())]
    return "", ""


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
