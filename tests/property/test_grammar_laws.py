"""The think/answer grammar on random text: what is written can be read back, and no text breaks the parser."""

import re
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tether.core.grammar import match_actions, parse_response, read_actions, split_actions

laws = settings(derandomize=True, max_examples=150, deadline=None, database=None)

TAG = re.compile(r"</?(think|answer)>|<\|im_(start|end)\|>")
PIECES = [
    "</think>",
    "<think>",
    "<answer>",
    "</answer>",
    "<|im_start|>",
    "<|im_end|>",
    "||",
    " ",
    "\n",
    "a",
    "Up",
    "<",
    ">",
    "/",
    "é",
    "答",
]
SPACE = st.text(alphabet=" \t\n", max_size=4)
NAMES = ["Up", "Down", "Left", "Right"]
plain = (
    st.lists(st.sampled_from([*PIECES[6:], "<b>", "1 < 2"]) | st.text(alphabet="xyz \t.,;|答\u2003", max_size=3), max_size=8)
    .map("".join)
    .filter(lambda text: not TAG.search(text))
)


@laws
@given(plain, SPACE, plain, st.lists(st.sampled_from(PIECES), max_size=5).map("".join))
def test_round_trip(reasoning: str, space: str, answer: str, tail: str) -> None:
    """Whatever follows the answer does not matter; reasoning_end counts the characters before the closing tag."""
    parsed = parse_response(f"{reasoning}</think>{space}<answer>{answer}</answer>{tail}")
    assert (parsed.reasoning, parsed.answer, parsed.reasoning_end) == (reasoning.strip(), answer.strip(), len(reasoning))
    assert parsed.well_formed


@laws
@given(plain, plain, plain)
def test_words_between_the_blocks_are_malformed(reasoning: str, between: str, answer: str) -> None:
    assume(between.strip())
    parsed = parse_response(f"{reasoning}</think>{between}<answer>{answer}</answer>")
    assert (parsed.reasoning, parsed.answer, parsed.reasoning_end) == (reasoning.strip(), None, len(reasoning))
    assert not parsed.well_formed


@laws
@given(plain)
def test_never_closed(text: str) -> None:
    parsed = parse_response(text)
    assert (parsed.reasoning, parsed.answer, parsed.reasoning_end) == (None, None, None)


@laws
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_any_text_parses(text: str) -> None:
    parsed = parse_response(text)
    assert (parsed.reasoning is None) == ("</think>" not in text) == (parsed.reasoning_end is None)
    assert parsed.well_formed == bool(re.search(r"</think>\s*<answer>.*</answer>", text, re.DOTALL))
    if parsed.reasoning_end is not None:
        assert text[parsed.reasoning_end :].startswith("</think>")
        assert parsed.reasoning == parsed.reasoning.strip() if parsed.reasoning else True
    assert len(parsed.answer or "") <= len(text)


@laws
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([str, str.lower, str.upper]), SPACE), min_size=1, max_size=6))
def test_actions_round_trip(actions: list[tuple[int, Any, str]]) -> None:
    """Any spelling, any space around the separators, empty parts dropped."""
    answer = "||".join(space + spell(NAMES[index]) + space for index, spell, space in actions)
    assert match_actions(answer, NAMES) == ([index for index, _, _ in actions], True)
    assert match_actions(f"|| {answer} || ||", NAMES) == ([index for index, _, _ in actions], True)
    assert match_actions(f"{answer} || jump", NAMES) == ([index for index, _, _ in actions], False)


@laws
@given(st.lists(st.text(alphabet="abc| \n", max_size=5), max_size=6))
def test_split_actions(parts: list[str]) -> None:
    """No part holds a separator or is empty; joining and splitting again changes nothing."""
    split = split_actions("||".join(parts))
    assert all(part == part.strip() and part and "||" not in part for part in split)
    assert split_actions(" || ".join(split)) == split


WORDS = [
    *NAMES,
    "up",
    "LEFT",
    "then",
    "and",
    "move",
    "not",
    "or",
    "jump",
    "1.",
    "2.",
    "3)",
    "2",
    "||",
    "|",
    ",",
    ".",
    "->",
    "-",
    "(",
    ")",
    "\n",
    " ",
]


@laws
@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=10), st.sampled_from(["", " "]))
def test_the_lenient_reading(pieces: list[str], space: str) -> None:
    """What is strictly valid reads the same in both modes, and every action that is read is named in the text, in that order."""
    answer = space.join(pieces)
    strict, loose = (read_actions(answer, NAMES, lenient=lenient) for lenient in (False, True))
    assert not strict.lenient
    if strict.valid or not loose.valid:
        assert loose == strict
    else:
        assert loose.lenient
        named = [NAMES.index(word.capitalize()) for word in re.findall(r"(?<!\w)(?:up|down|left|right)(?!\w)", answer, re.IGNORECASE)]
        assert list(loose.indices) == named
