"""The think/answer grammar, in one place for environments, rollout and diagnosis.

A response is what the model writes after the opening think tag, which the prompt already ends with:

    response = reasoning "</think>" space* "<answer>" answer "</answer>" anything

The first match decides. A model that ends its turn inside the answer has closed it, too: that is unambiguous, and some chat models do it
after a code fence. Tags inside either part are deleted, both are stripped. Anything else is malformed: it has no answer,
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

    unclosed: bool = False
    """The answer has no closing tag; the end of the turn closed it."""

    @property
    def well_formed(self) -> bool:
        return self.answer is not None


def parse_response(text: str, tags: tuple[str, ...] = ANSWER_TAGS, *, ended: bool = False) -> ParsedResponse:
    """Take apart what the model wrote after the opening think tag. With other tags than the answer's alone, the answer keeps its own.

    `ended`: the model ended its turn behind this text; that closes an answer that is still open.
    """
    found = _find_answer(text, tags)
    unclosed = found is None and ended
    if unclosed and (opening := _opening_pattern(tags).search(text)):
        found = opening, len(text)
    end = found[0].start() if found else text.find(THINK_CLOSE)
    if end < 0:
        return ParsedResponse(None, None, None)
    reasoning = _TAGS.sub("", text[:end]).strip()
    if found is None:
        return ParsedResponse(reasoning, None, end)
    tag, answer = found[0][1], _TAGS.sub("", text[found[0].end() : found[1]]).strip()
    return ParsedResponse(reasoning, answer if tags == ANSWER_TAGS else f"<{tag}>{answer}</{tag}>", end, unclosed)


def answer_end(text: str, tags: tuple[str, ...] = ANSWER_TAGS) -> int | None:
    """Number of characters up to the end of the first well-formed answer; None where there is none.

    >>> answer_end("</think> <answer> Up </answer> and then")
    30
    """
    found = _find_answer(text, tags)
    return found[1] + len(f"</{found[0][1]}>") if found else None


def _find_answer(text: str, tags: tuple[str, ...]) -> tuple[re.Match[str], int] | None:
    """The opening of the first answer that is closed, and where its closing tag begins.

    A tag that is not closed behind one opening is closed behind no later one, either: so the text is searched once per tag, however many
    openings it has.
    """
    unclosed: set[str] = set()
    for opening in _opening_pattern(tags).finditer(text):
        if opening[1] not in unclosed:
            end = text.find(f"</{opening[1]}>", opening.end())
            if end >= 0:
                return opening, end
            unclosed.add(opening[1])
    return None


@lru_cache(maxsize=16)
def _opening_pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"</think>\s*<({'|'.join(map(re.escape, tags))})>")


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


# ------------------------------------------------------------------------------------------------------- the lenient reading


@dataclass(frozen=True, slots=True)
class ActionsRead:
    """The named actions of an answer. Example: "up, then left." gives indices (0, 2), valid and lenient."""

    indices: tuple[int, ...]
    """Of the actions to execute, in order."""
    valid: bool
    """At least one action, and nothing in the answer that is not understood."""
    lenient: bool
    """The answer is valid only because of the lenient reading."""


_FILLERS = frozenset(["then", "and", "move", "moves", "go", "walk", "step", "push", "action", "actions", "to", "the"])
"""Words that change nothing about which actions are meant, nor in which order."""

_SEPARATORS = re.compile(
    r"\s+|\|+|[,;:.!\"'`*()\[\]{}<>&+\u2018\u2019\u201c\u201d]|(?:(?<!-)-+|=)>|\u2192|(?<!\w)[-\u2013\u2014\u2022]|[-\u2013\u2014\u2022](?!\w)"
)
"""What may stand between actions. A slash may mean "or", a hyphen within a word makes a diagonal of two directions, a question mark is a
doubt: none of them is here. An arrow is looked for at the first of its hyphens only, so that a long row of them is read once."""

_COMPASS = {"north": "up", "south": "down", "west": "left", "east": "right"}
"""Other names of the four directions, as on a map."""

_NUMBERING = re.compile(r"(\d{1,3})\s*[.):](?!\d)")
_WORD = re.compile(r"\w+")


def read_actions(answer: str, names: Sequence[str], *, lenient: bool) -> ActionsRead:
    """The named actions of an answer. An answer in the exact form reads the same in both modes.

    The lenient reading takes an answer whose every word is the name of an action, a filler ("move", "then", "and") or the number of a list
    that counts 1, 2, 3, with ordinary punctuation between them. Where the actions are the four directions, the points of the compass are too.
    "Up, Left", "1. Up 2. Left", "Move up, then left." and "North || West" are read; "not Left", "Left or Up", "Left 2" and "up-left" are not. An
    answer it does not take is read strictly: known actions are found, and it is not valid.
    """
    found, clean = match_actions(answer, names)
    if clean or not lenient:
        return ActionsRead(tuple(found), clean, False)
    loose = _scan_actions(answer, names)
    return ActionsRead(loose, True, True) if loose else ActionsRead(tuple(found), False, False)


def _scan_actions(answer: str, names: Sequence[str]) -> tuple[int, ...]:
    """The actions of an answer from its start to its end; nothing if any part of it is not understood."""
    table, pattern = _spellings(tuple(names)), _name_pattern(tuple(names))
    found: list[int] = []
    numbered, at = 0, 0
    while at < len(answer):
        if match := pattern.match(answer, at):
            index = table.get(" ".join(match.group().lower().split()))
            if index is None:  # equal to a name only by a rule of letter case that `lower` does not know
                return ()
            found.append(index)
        elif match := _NUMBERING.match(answer, at):
            # The number of a list item stands before its action, and the list counts from 1.
            if int(match.group(1)) != len(found) + 1 or numbered != len(found):
                return ()
            numbered += 1
        elif match := _WORD.match(answer, at):
            if match.group().lower() not in _FILLERS:
                return ()
        elif not (match := _SEPARATORS.match(answer, at)):
            return ()
        at = match.end()
    return tuple(found) if numbered in (0, len(found)) else ()


@lru_cache(maxsize=64)
def _spellings(names: tuple[str, ...]) -> dict[str, int]:
    """The actions by their names, and the four directions also by the points of the compass, unless these are actions themselves."""
    table = _indices(names)
    directions = _COMPASS if set(_COMPASS.values()) <= table.keys() and not _COMPASS.keys() & table.keys() else {}
    return table | {point: table[name] for point, name in directions.items()}


@lru_cache(maxsize=64)
def _name_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Any spelling of the names as whole words, the longest first, so that "pick up" is not read as "up"."""
    spelled = (r"\s+".join(map(re.escape, name.split())) for name in sorted(_spellings(names), key=len, reverse=True))
    return re.compile(rf"(?<!\w)(?:{'|'.join(spelled)})(?!\w)", re.IGNORECASE)
