"""Verdicts of `tether.audit` on rollouts that can be read in one look: what was written for which prompt, and the verdict it deserves.

The embedded model scores them. It has never seen such text, so what is told is told by words as much as by the model. Generated rollouts of the same
kinds, on prompts of real environments, are in test_audit_verdicts.py.
"""

from collections.abc import Callable
from typing import Any

import pytest

import tether

PLACES = ("attic", "cellar", "garden", "harbour", "kitchen", "library", "market", "orchard", "palace", "quarry", "stable", "tower")
GERMAN = ("Dach", "Keller", "Beet", "Hafen", "Herd", "Buch", "Markt", "Baum", "Schloss", "Stein", "Stall", "Turm")
LOOKS = ("careful", "quick", "simple", "patient", "bold", "clever", "safe")
STEPS = ("check everything", "think twice", "plan ahead", "compare the ways", "go on")
THINGS = ("key", "lamp", "rope", "map", "coin", "bell", "ring", "sword", "crown", "drum", "saddle", "flag")
pytestmark = pytest.mark.long

Write = Callable[[int, int], str | None]
"""From the number of the prompt and of the sample to the reasoning; None is a response that was cut off while it reasoned."""


def tied(n: int, k: int) -> str:
    return f"The key must be in the {PLACES[n]}, so I {STEPS[(n + k) % 5]} there."


def template(n: int, k: int) -> str:
    return f"I take a {LOOKS[(3 * n + 5 * k) % 7]} approach, then I {STEPS[(2 * n + 3 * k) % 5]} and {STEPS[(n + 2 * k) % 5]}."


def words_in_any_order(n: int, k: int) -> str:
    words = tied(n, k).split()
    return " ".join(words[(5 * place + n + k) % len(words)] if len(words) % 5 else words[-place - 1] for place in range(len(words)))


def one_in(count: int, rare: Write, common: Write) -> Write:
    """The first sample of every `count` is written by `rare`."""
    return lambda n, k: rare(n, k) if k % count == 0 else common(n, k)


CASES: list[tuple[str, Write, int, int, str]] = [
    # what it is, how it is written, prompts, samples of each, the verdict
    ("about its prompt", tied, 12, 4, "tied"),
    ("about its prompt, one sample each", tied, 12, 1, "tied"),
    ("the prompt again", lambda n, k: f"Where is the key of the {PLACES[n]}?", 12, 4, "tied"),
    ("words in any order", words_in_any_order, 12, 4, "tied"),
    ("in German, several samples", lambda n, k: f"Ich suche beim {GERMAN[n]}, Versuch {k}.", 12, 4, "tied"),
    ("a template with noise in its slots", template, 12, 4, "template_collapse"),
    ("one fixed text", lambda n, k: "I think about it and then I answer.", 12, 4, "low_entropy_collapse"),
    ("half of it a template", one_in(2, tied, template), 12, 4, "weakly_tied"),
    ("nine in ten blank", one_in(10, tied, lambda n, k: " "), 12, 10, "weakly_tied"),
    ("all but one in twenty blank", one_in(20, tied, lambda n, k: " "), 12, 20, "low_entropy_collapse"),
    ("nine in ten cut off", one_in(10, tied, lambda n, k: None), 12, 10, "cannot_be_told"),
    ("a template, three prompts", template, 3, 3, "cannot_be_told"),
    ("a template, one sample each", template, 12, 1, "cannot_be_told"),
]


@pytest.mark.parametrize(("write", "prompts", "samples", "verdict"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_verdict(write: Write, prompts: int, samples: int, verdict: str, tiny: Any) -> None:
    rows = [
        {
            "prompt": f"Where is the key of the {PLACES[n]}?",
            "response": f"<think>{thought}</think> here" if thought is not None else "<think> so",
        }
        for n in range(prompts)
        for k in range(samples)
        for thought in [write(n, k)]
    ]
    found = tether.audit(rows, model=tiny, bootstrap=100)
    assert found.verdict.code == verdict, found.verdict


def test_reasoning_about_the_neighbouring_prompt_is_misplaced(tiny: Any) -> None:
    """It can be predicted from its prompt, and names the thing and the place of another. A single word would not be enough to say so."""
    rows = [
        {
            "prompt": f"Where is the {THINGS[n]} of the {PLACES[n]}?",
            "response": f"<think>The {THINGS[n - 1]} must be in the {PLACES[n - 1]}, so I {STEPS[(n + k) % 5]} there.</think> here",
        }
        for n in range(12)
        for k in range(4)
    ]
    found = tether.audit(rows, model=tiny, bootstrap=100)
    assert found.verdict.code == "misplaced", found.verdict
