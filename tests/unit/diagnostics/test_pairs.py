"""first_turn_pairs: x and z are the trajectory's own ids, equal prompts are one column, and what holds no reasoning is counted."""

from typing import Any

from tether.diagnostics.pairs import first_turn_pairs


def test_by_hand(turn: Any, group: Any) -> None:
    groups = [
        group(0, [[turn((1, 2), (10, 11, 12, 90), (0, 3))], [turn((1, 2), (13, 90, 91), (0, 1))]]),
        group(1, [[turn((3,), (90, 14, 15, 91), (1, 3))]]),
    ]
    pairs = first_turn_pairs(groups)
    assert pairs.prompts == [(1, 2), (3,)]
    assert pairs.reasonings == [(10, 11, 12), (13,), (14, 15)], "the span, tags excluded"
    assert pairs.source == [0, 0, 1]
    assert pairs.lengths == [3, 1, 2]
    assert pairs.num_empty == 0


def test_only_the_first_turn(turn: Any, group: Any) -> None:
    pairs = first_turn_pairs([group(0, [[turn((1,), (10, 90), (0, 1)), turn((5, 6), (11, 12, 90), (0, 2))]])])
    assert (pairs.prompts, pairs.reasonings, pairs.source) == ([(1,)], [(10,)], [0])


def test_two_groups_with_the_same_puzzle_are_one_column(turn: Any, group: Any) -> None:
    groups = [group(n, [[turn(context, (10 + n, 90), (0, 1))]]) for n, context in enumerate([(7, 8), (9,), (7, 8), (7,)])]
    pairs = first_turn_pairs(groups)
    assert pairs.prompts == [(7, 8), (9,), (7,)]
    assert pairs.source == [0, 1, 0, 2]


def test_no_reasoning_is_counted_not_scored(turn: Any, group: Any) -> None:
    """Never closed, empty, and a trajectory that has no turn at all; a prompt without reasoning is no column."""
    groups = [
        group(0, [[turn((1,), (10, 11), None)], [turn((1,), (90, 12), (0, 0))], [turn((1,), (), None)], []]),
        group(1, [[turn((2,), (13, 90), (0, 1))]]),
    ]
    pairs = first_turn_pairs(groups)
    assert pairs.num_empty == 3
    assert (pairs.prompts, pairs.reasonings, pairs.source) == ([(2,)], [(13,)], [0])


def test_nothing() -> None:
    pairs = first_turn_pairs([])
    assert (pairs.prompts, pairs.reasonings, pairs.source, pairs.lengths, pairs.num_empty) == ([], [], [], [], 0)
