"""Degenerate text: "!!!!!!", "the the the the", one phrase over and over.

A stretch counts as repeated where one unit (up to eight characters without a space, or up to eight words) stands six times or more in
a row. A stretch that the prompt itself holds is a quotation, not a repetition: a copied row of walls is as repetitive as text gets.
"""

import re
from collections.abc import Iterable, Sequence

from tether.core.grammar import parse_response
from tether.core.types import Group

LONGEST_UNIT = 8
FEWEST_REPEATS = 6
_CHARACTERS = re.compile(rf"(\S{{1,{LONGEST_UNIT}}}?)\1{{{FEWEST_REPEATS - 1},}}")


def rollout_repetition(groups: Sequence[Group], limit: float) -> dict[str, float]:
    """The "rollout/" metrics on repeated text of Tether's own groups; the observation of a turn is what its reasoning may quote."""
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    return repetition_metrics(((parse_response(turn.text).reasoning or "", turn.observation) for turn in turns), limit)


def repetition_metrics(reasonings: Iterable[tuple[str, str]], limit: float) -> dict[str, float]:
    """How many reasonings there are, and which share of them is degenerate.

    Args:
        reasonings: (reasoning, prompt) texts; an empty reasoning is not counted.
        limit: a reasoning is degenerate where `repeated_part` is above it (`alarms.rules.repeated_part`).
    """
    written = [(text, prompt) for text, prompt in reasonings if text.strip()]
    degenerate = sum(repeated_part(text, prompt) > limit for text, prompt in written)
    return {"reasonings": len(written), "repeated_text": degenerate / max(1, len(written))}


def repeated_part(text: str, prompt: str = "") -> float:
    """Share of the characters, spaces apart, that lie in repeated stretches which the prompt does not hold.

    >>> repeated_part("go !!!!!!")
    0.75
    >>> repeated_part("######", prompt="the board: ######")
    0.0
    """
    words = text.split()
    total = sum(len(word) for word in words)
    if not total:
        return 0.0
    plain_prompt = " ".join(prompt.split())
    looped = _looped_words(words, plain_prompt)
    repeated = sum(len(words[place]) for place in looped)
    for place, word in enumerate(words):
        if len(word) >= FEWEST_REPEATS and place not in looped:
            repeated += sum(len(found.group()) for found in _CHARACTERS.finditer(word) if found.group() not in plain_prompt)
    return repeated / total


def _looped_words(words: list[str], prompt: str) -> set[int]:
    """Positions of the words that belong to a repeated phrase."""
    looped: set[int] = set()
    for unit in range(1, min(LONGEST_UNIT, len(words) // FEWEST_REPEATS) + 1):
        begin = 0
        for place in range(unit, len(words) + 1):
            if place < len(words) and words[place] == words[place - unit]:
                continue
            # words[begin:place] has period `unit`; the next such stretch may share all but one unit of it.
            if place - begin >= FEWEST_REPEATS * unit and " ".join(words[begin:place]) not in prompt:
                looped.update(range(begin, place))
            begin = place - unit + 1
    return looped
