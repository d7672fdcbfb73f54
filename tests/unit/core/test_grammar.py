"""The think/answer grammar: vectors of the original rule, positions in the text, and actions."""

import pytest

from tether.core.grammar import FORMAT_RULE, ActionsRead, ParsedResponse, match_actions, parse_response, read_actions, split_actions

NAMES = ["Up", "Down", "Left", "Right"]


@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "reasoning_end"),
    [
        # The plain case; the prompt has already written the opening think tag.
        (" go right </think> <answer> Right || Up </answer>", "go right", "Right || Up", 10),
        ("..</think><answer>Up||Down||Left</answer>", "..", "Up||Down||Left", 2),
        # Any whitespace may stand between the blocks, nothing else.
        ("a</think>\n\t <answer>Up</answer>", "a", "Up", 1),
        ("a</think> so <answer>Up</answer>", "a", None, 1),
        ("a</think><answer>Up", "a", None, 1),
        ("a</think>", "a", None, 1),
        # Valid tags, nothing in them.
        ("a</think><answer></answer>", "a", "", 1),
        ("</think><answer>Up</answer>", "", "Up", 0),
        # The dot matches newlines; what follows the answer is ignored.
        ("line 1\nline 2</think><answer>x\ny</answer> and more </answer>", "line 1\nline 2", "x\ny", 13),
        # Tags inside a part are deleted.
        ("<think>a</think><answer>Up</answer>", "a", "Up", 8),
        ("a <answer>b</answer> c</think><answer>Up<|im_end|></answer>", "a b c", "Up", 22),
        ("a</think><answer><answer><|im_start|> Up</answer>", "a", "Up", 1),
        # The first match decides, and the reasoning reaches up to it, over a closing tag that begins no answer.
        ("a</think><answer>Up</answer></think><answer>Down</answer>", "a", "Up", 1),
        ("a</think>b</think><answer>Up</answer>", "ab", "Up", 10),
        # Never closed.
        ("a <answer>Up</answer>", None, None, None),
        ("", None, None, None),
    ],
)
def test_parse(text: str, reasoning: str | None, answer: str | None, reasoning_end: int | None) -> None:
    parsed = parse_response(text)
    assert parsed == ParsedResponse(reasoning, answer, reasoning_end)
    assert parsed.well_formed is (answer is not None)
    if reasoning_end is not None:
        assert text[reasoning_end:].startswith("</think>")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The end of the turn closes an open answer ...
        (" a </think> <answer>\nUp || Left\n", ParsedResponse("a", "Up || Left", 3, unclosed=True)),
        # ... and changes nothing where it is closed, or where there is none.
        (" a </think> <answer> Up </answer> so", ParsedResponse("a", "Up", 3)),
        (" a </think> so <answer> Up", ParsedResponse("a", None, 3)),
        (" a <answer> Up", ParsedResponse(None, None, None)),
    ],
)
def test_the_end_of_a_turn_closes_an_answer(text: str, expected: ParsedResponse) -> None:
    assert parse_response(text, ended=True) == expected
    if expected.unclosed:
        assert not parse_response(text).well_formed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a</think> <search> who? </search>", "<search>who?</search>"),
        ("a</think><answer> me </answer> <search>x</search>", "<answer>me</answer>"),
        ("a</think><search>x</answer>", None),
        ("a</think><find>x</find>", None),
    ],
)
def test_with_other_tags_the_answer_says_what_it_is(text: str, answer: str | None) -> None:
    assert parse_response(text, ("search", "answer")).answer == answer


def test_the_rule_told_to_the_model_parses() -> None:
    reply = FORMAT_RULE.partition("<think>")[2]
    assert parse_response(reply) == ParsedResponse("your thoughts", "your answer", len(" your thoughts "))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Up||Down||Left", ["Up", "Down", "Left"]),
        (" Up || Down ", ["Up", "Down"]),
        ("|| Up |||| ", ["Up"]),
        ("", []),
        ("||", []),
        ("Up | Down", ["Up | Down"]),
    ],
)
def test_split_actions(answer: str, expected: list[str]) -> None:
    assert split_actions(answer) == expected


@pytest.mark.parametrize(
    ("answer", "found", "clean"),
    [
        ("Up || right", [0, 3], True),
        ("LEFT", [2], True),
        ("Up || jump || Down", [0, 1], False),
        ("jump", [], False),
        ("", [], False),
        ("Up Up", [], False),
    ],
)
def test_match_actions(answer: str, found: list[int], clean: bool) -> None:
    assert match_actions(answer, NAMES) == (found, clean)


@pytest.mark.parametrize(
    ("answer", "indices"),
    [
        # Another separator, or none.
        ("Up, Left", (0, 2)),
        ("Up,Left", (0, 2)),
        ("up left", (0, 2)),
        ("Up Left", (0, 2)),
        ("Up | Left", (0, 2)),
        ("Up; Left", (0, 2)),
        ("Up\nLeft", (0, 2)),
        ("Up -> Left", (0, 2)),
        ("Up --> Left", (0, 2)),
        ("Up => Left", (0, 2)),
        ("Up → Left", (0, 2)),
        ("Up & Left", (0, 2)),
        ("Up + Left", (0, 2)),
        ("Up - Left", (0, 2)),
        ("Up || Left, Down", (0, 2, 1)),
        # Words that change nothing.
        ("Up and Left", (0, 2)),
        ("Up, and then Left", (0, 2)),
        ("Move up, then left.", (0, 2)),
        ("North || West", (0, 2)),
        ("go south, then Right", (1, 3)),
        ("Go up. Move to the left.", (0, 2)),
        ("Push Right", (3,)),
        ("Actions: Up, Left", (0, 2)),
        # Lists.
        ("1. Up 2. Left", (0, 2)),
        ("1) Up\n2) Left", (0, 2)),
        ("(1) Up (2) Left", (0, 2)),
        ("Step 1: Up, Step 2: Left", (0, 2)),
        ("- Up\n- Left", (0, 2)),
        ("• Up\n• Left", (0, 2)),
        # Quotes, brackets, emphasis, punctuation at the end.
        ('"Up" || "Left"', (0, 2)),
        ("“Up”, ‘Left’", (0, 2)),
        ("[Up, Left]", (0, 2)),
        ("(Up)", (0,)),
        ("<Up>", (0,)),
        ("**Up**", (0,)),
        ("`Up`", (0,)),
        ("Up.", (0,)),
        ("Up!", (0,)),
    ],
)
def test_the_lenient_reading_takes(answer: str, indices: tuple[int, ...]) -> None:
    assert read_actions(answer, NAMES, lenient=True) == ActionsRead(indices, valid=True, lenient=True)
    assert not read_actions(answer, NAMES, lenient=False).valid


@pytest.mark.parametrize(
    "answer",
    [
        # What is meant is not certain.
        "not Left",
        "don't go up",
        "Left or Up",
        "Left/Up",
        "up-left",
        "Up?",
        "Left 2",
        "2 Left",
        "1 Up 2 Left",
        "Up x2",
        "Up twice",
        "Left, but first Up",
        "Up after Left",
        "2. Up 1. Left",
        "Up 2. Left",
        "1. Up Left",
        "1. Up 2.",
        "1.5 Up",
        "(1, 2)",
        # Other words.
        "I go Up",
        "The answer is Up",
        "Up Left jump",
        "Upward",
        "UpLeft",
        "Wait",
        "North-West",
        "Northward",
        # No action.
        "",
        "...",
        "1.",
        "go",
        "then",
    ],
)
def test_the_lenient_reading_refuses(answer: str) -> None:
    strict = read_actions(answer, NAMES, lenient=False)
    assert not strict.valid
    assert read_actions(answer, NAMES, lenient=True) == strict


def test_an_answer_that_is_not_read_leniently_keeps_its_known_actions() -> None:
    assert read_actions("Up || jump || Down", NAMES, lenient=True) == ActionsRead((0, 1), valid=False, lenient=False)


def test_names_of_several_words_are_read_whole() -> None:
    names = ["Up", "Pick up", "Go"]
    assert read_actions("pick  UP, up", names, lenient=True).indices == (1, 0)
    assert read_actions("go, up", names, lenient=True).indices == (2, 0)  # the name of an action is no filler
    assert not read_actions("Puſh", ["Push"], lenient=True).valid  # a long s: equal without regard to case, but not by `lower`


def test_the_compass_names_directions_and_nothing_else() -> None:
    assert not read_actions("North", ("Up", "Down"), lenient=True).valid  # not the four directions
    assert not read_actions("North", ("Left", "Right", "Jump"), lenient=True).valid
    own = ("Up", "Down", "Left", "Right", "North")  # an action of the environment's own
    assert read_actions("go north", own, lenient=True) == ActionsRead((4,), True, True)
    assert not read_actions("south", own, lenient=True).valid
