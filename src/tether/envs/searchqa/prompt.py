"""What an agent is told about searching: the task, how the two actions are written, examples of replies, and the paper's frame.

Both formats of actions share their examples: an action is written as `search[query]` between answer tags, or as Search-R1's tags.
"""

from typing import Literal

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
