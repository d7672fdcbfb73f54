"""Which text repeats itself, and which only quotes a repetitive prompt."""

import pytest

from tether.core.enums import FinishReason, StopReason
from tether.core.types import Group, Trajectory, Turn
from tether.diagnostics.alarms.repetition import repeated_part, rollout_repetition

SENSIBLE = "The player is left of the box and the target is right of it, so I push right twice and then look again."
BOARD = "# # # # # #\n# _ P X O #\n# # # # # #"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", 0.0),
        (" \n ", 0.0),
        (SENSIBLE, 0.0),
        ("!!!!!!", 1.0),
        ("!!!!!", 0.0),
        ("go !!!!!!", 0.75),
        ("hahahahahaha", 1.0),
        ("hahahahaha", 0.0),
        ("so " * 6, 1.0),
        ("so " * 5, 0.0),
        ("push the box " * 6, 1.0),
        ("push the box " * 5, 0.0),
        # Five rounds and two words of the sixth.
        ("push the box " * 5 + "push the", 0.0),
        # 2 x 3 plain characters, 6 x 2 in the loop.
        ("one " + "so " * 6 + "two", 12 / 18),
        # A loop that begins one word into another comparison.
        ("x " + "a b " * 6, 12 / 13),
        # The second loop begins where the first ends.
        ("a " * 6 + "b " * 6, 1.0),
        ("1 2 3 4 5 6 7 8 " * 6, 1.0),
        ("1 2 3 4 5 6 7 8 9 " * 6, 0.0),
        ("Up Right Down Left Up Up Right Right", 0.0),
    ],
)
def test_repeated_part(text: str, part: float) -> None:
    assert repeated_part(text) == pytest.approx(part)


def test_what_the_prompt_holds_is_quoted() -> None:
    assert repeated_part("# # # # # # is the wall") > 0.3
    assert repeated_part("# # # # # # is the wall", BOARD) == 0.0
    assert repeated_part("#\t#  # # # #", BOARD) == 0.0, "spacing does not matter"
    assert repeated_part("# " * 20, BOARD) == 1.0, "more of it than the prompt holds is not a quotation"
    assert repeated_part("------ !!!!!!", "------") == 0.5


def test_what_is_repeated_twice_over_counts_once() -> None:
    assert repeated_part("!!!!!! " * 6 + "go on now") == 36 / 43


def test_long_text_is_read_in_linear_time() -> None:
    assert repeated_part("ab" * 50_000) == 1.0
    assert repeated_part(" ".join(str(number) for number in range(20_000))) == 0.0


def _turn(text: str, observation: str = "") -> Turn:
    return Turn((1,), (2,), (-0.5,), FinishReason.STOP_TEXT, text, None, observation=observation)


def test_repetition_is_counted_over_the_reasonings() -> None:
    again = "go left go left go left go left go left go left"
    turns = [
        _turn(f"<think>{again}</think><answer>Left</answer>"),
        _turn("<think>The hole is right of me, so I walk down first.</think><answer>Down</answer>"),
        _turn("<answer>Down</answer>"),
        _turn(f"<think>{again}</think><answer>Left</answer>", observation=again),
        _turn("<think>!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!</think><answer>Up</answer>"),
    ]
    group = Group(0, 0, [Trajectory(0, 0, 0, turns[:2], StopReason.FAILURE), Trajectory(0, 1, 0, turns[2:], StopReason.FAILURE)])
    counted = rollout_repetition([group], 0.5)
    assert counted["reasonings"] == 4
    assert counted["repeated_text"] == pytest.approx(0.5), "a text that only repeats the observation is a quotation"
    assert rollout_repetition([], 0.5) == {"reasonings": 0, "repeated_text": 0}
