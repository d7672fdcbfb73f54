"""Every parser of a model's text takes time in proportion to the text, whatever the text is: four times as much text, not sixteen times the time."""

import itertools
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from tether.core.grammar import answer_end, parse_response, read_actions
from tether.envs.deepcoder.assemble import assemble, extract
from tether.envs.deepcoder.parsing import NotPython
from tether.envs.metamathqa.dataset import last_box
from tether.envs.metamathqa.latex import MAX_LENGTH, canonical, structure
from tether.envs.registry import make_env
from tether.envs.searchqa.prompt import parse

UNITS = (
    *("-", "=", "<", ">", "|", "||", "`", "```", "~", " ", "\n", "\t", "(", ")", "[", "]", "{", "}", "$", "\\", "'", '"', "#", "*", "."),
    *(
        "</think>",
        "</think><answer>",
        "<answer>",
        "</answer>",
        "<search>",
        "</search>",
        "<search>a</search>",
        "search[",
        "]search[",
        "click[",
    ),
    *(
        "-a",
        "->",
        "--",
        "- ",
        "1. ",
        "1, ",
        "1,000,",
        "up ",
        "pick up ",
        "a ",
        "9",
        "9.9",
        "1/",
        "+1",
        "the ",
        "####",
        "and ",
        "the answer is ",
    ),
    *(
        "\\frac{",
        "\\text{",
        "\\text{a} ",
        "\\sqrt(",
        "\\boxed{",
        "\\left",
        "\\pm",
        "\\cup",
        "{ ",
        "^{",
        "~ ",
        "\\!",
        "; ",
        "\\begin{array}",
    ),
    *("lambda:", "f(", "a.", "not ", "def f():\n", "```\n", "``` ", "~~~\n", "python1."),
)
FRAMES = (("", ""), ("</think><answer>", "1"), ("```python", "`x"), ("1", "</answer>"), ("(", "\n"))
ACTIONS = ("Up", "Down", "Left", "Right", "pick up", "pick up the")


def _assembled(text: str) -> None:
    with suppress(NotPython):
        assemble(extract(text).code, "def f(a):\n", "f")


def _played(name: str, **options: object) -> Callable[[str], None]:
    def play(text: str) -> None:
        env.reset(0)
        env.step(text)

    env = make_env(name, **options)
    return play


PARSERS: dict[str, Callable[[], Callable[[str], object]]] = {
    "response": lambda: lambda text: (parse_response(text, ended=True), answer_end(text)),
    "tagged response": lambda: lambda text: parse_response(text, ("search", "answer"), ended=True),
    "actions": lambda: lambda text: read_actions(text, ACTIONS, lenient=True),
    "search": lambda: lambda text: (parse(text, "tags"), parse(text, "brackets")),
    "fences": lambda: extract,
    "program": lambda: _assembled,
    "box": lambda: last_box,
    **{name: lambda name=name: _played(name) for name in ("frozen_lake", "countdown", "webshop", "qa")},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", PARSERS)
def test_reading_takes_time_in_proportion_to_the_text(name: str) -> None:
    read = PARSERS[name]()
    read("warm")
    for unit, (head, tail) in itertools.product(UNITS, FRAMES):

        def seconds(characters: int) -> float:
            text = head + unit * (characters // len(unit)) + tail  # noqa: B023
            begun = time.process_time()
            read(text)
            return time.process_time() - begun

        long = seconds(8000)
        if long > 0.05:  # worth a second look: a quadratic parser takes a quarter of a second or more for so much
            short = min(seconds(2000) for _ in range(3))
            assert min(long, seconds(8000)) < 9 * short + 0.05, f"{name}: {head!r} + {unit!r} * n + {tail!r}"


def test_an_answer_of_mathematics_is_bounded_in_length_and_in_time() -> None:
    for unit, (head, tail) in itertools.product(UNITS, FRAMES):
        text = (head + unit * MAX_LENGTH)[: MAX_LENGTH - len(tail)] + tail
        begun = time.process_time()
        structure(canonical(text))
        taken = time.process_time() - begun
        assert taken < 0.2, f"{head!r} + {unit!r} * n + {tail!r}: {taken:.2f} s"
