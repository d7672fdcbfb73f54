"""Pairs: x and z are the trajectory's own ids, equal prompts are one column, what holds no reasoning is counted, and what pairs cost."""

from typing import Any

import numpy as np

from tether.core.types import AGENT
from tether.diagnostics.pairs import (
    context_of,
    differing_prompts_note,
    first_turn_pairs,
    probe_rows,
    rollout_rows,
    trajectory_pairs,
    turn_pairs,
)


def test_by_hand(turn: Any, group: Any, rows: Any) -> None:
    groups = [
        group(0, [[turn((1, 2), (10, 11, 12, 90), (0, 3))], [turn((1, 2), (13, 90, 91), (0, 1))]]),
        group(1, [[turn((3,), (90, 14, 15, 91), (1, 3))]]),
    ]
    pairs = first_turn_pairs(rows(groups))
    assert pairs.prompts == [(1, 2), (3, 90)]  # what is sampled before the reasoning belongs to x
    assert pairs.reasonings == [(10, 11, 12), (13,), (14, 15)], "the span, tags excluded"
    assert pairs.source == [0, 0, 1]
    assert pairs.lengths == [3, 1, 2]
    assert pairs.num_empty == 0


def test_only_the_first_turn(turn: Any, group: Any, rows: Any) -> None:
    pairs = first_turn_pairs(rows([group(0, [[turn((1,), (10, 90), (0, 1)), turn((5, 6), (11, 12, 90), (0, 2))]])]))
    assert (pairs.prompts, pairs.reasonings, pairs.source) == ([(1,)], [(10,)], [0])


def test_two_groups_with_the_same_puzzle_are_one_column(turn: Any, group: Any, rows: Any) -> None:
    groups = [group(n, [[turn(context, (10 + n, 90), (0, 1))]]) for n, context in enumerate([(7, 8), (9,), (7, 8), (7,)])]
    pairs = first_turn_pairs(rows(groups))
    assert pairs.prompts == [(7, 8), (9,), (7,)]
    assert pairs.source == [0, 1, 0, 2]


def test_no_reasoning_is_counted_not_scored(turn: Any, group: Any, rows: Any) -> None:
    """Never closed, empty, and a trajectory that has no turn at all; a prompt without reasoning is no column."""
    groups = [
        group(0, [[turn((1,), (10, 11), None)], [turn((1,), (90, 12), (0, 0))], [turn((1,), (), None)], []]),
        group(1, [[turn((2,), (13, 90), (0, 1))]]),
    ]
    pairs = first_turn_pairs(rows(groups))
    assert pairs.num_empty == 3
    assert (pairs.prompts, pairs.reasonings, pairs.source) == ([(2,)], [(13,)], [0])


def test_nothing(rows: Any) -> None:
    pairs = first_turn_pairs(rows([]))
    assert (pairs.prompts, pairs.reasonings, pairs.source, pairs.lengths, pairs.num_empty) == ([], [], [], [], 0)


def test_a_later_turn_saw_all_that_came_before(turn: Any, group: Any) -> None:
    (trajectory,) = group(0, [[turn((1, 2), (10, 90), (0, 1)), turn((3,), (11, 90), (0, 1)), turn((4,), (12, 90), (0, 1))]]).trajectories
    assert [context_of(trajectory, number) for number in range(3)] == [(1, 2), (1, 2, 10, 90, 3), (1, 2, 10, 90, 3, 11, 90, 4)]


def test_a_fresh_turn_saw_only_its_own_context(turn: Any, group: Any) -> None:
    (trajectory,) = group(0, [[turn((1, 2), (10, 90), (0, 1)), turn((3,), (11, 90), (0, 1)), turn((4,), (12, 90), (0, 1))]]).trajectories
    trajectory.turns[1].new_context = True
    assert [context_of(trajectory, number) for number in range(3)] == [(1, 2), (3,), (3, 11, 90, 4)]


def test_every_drawn_context_is_a_column(turn: Any, group: Any, rows: Any) -> None:
    """Two members think the same way through their first turn and part after it: their second contexts differ."""
    members = [[turn((1,), (10 + n, 90), (0, 1)), turn((5,), (20 + n, 90), (0, 1))] for n in range(2)]
    pairs = turn_pairs(rows([group(0, members)]), 10, np.random.default_rng(0))
    assert pairs.prompts == [(1,), (1, 10, 90, 5), (1, 11, 90, 5)]
    assert pairs.reasonings == [(10,), (20,), (11,), (21,)] and pairs.source == [0, 1, 0, 2]


def test_draws_are_uniform_over_trajectories_or_over_turns(turn: Any, group: Any, rows: Any) -> None:
    """One episode of one turn and one of three: the lone turn is half of the draws by trajectory, a quarter by turn."""
    groups = [group(0, [[turn((1,), (10, 90), (0, 1))]]), group(1, [[turn((2,), (20 + n, 90), (0, 1)) for n in range(3)]])]
    rng = np.random.default_rng(0)
    by_trajectory = [trajectory_pairs(rows(groups), 1, rng).reasonings[0] for _ in range(2000)]
    by_turn = [turn_pairs(rows(groups), 1, rng).reasonings[0] for _ in range(2000)]
    assert abs(by_trajectory.count((10,)) / 2000 - 1 / 2) < 0.04 and abs(by_turn.count((10,)) / 2000 - 1 / 4) < 0.04
    assert abs(by_trajectory.count((22,)) / 2000 - 1 / 6) < 0.04 and abs(by_turn.count((22,)) / 2000 - 1 / 4) < 0.04


def test_no_trajectory_is_drawn_twice_and_the_empty_are_counted(turn: Any, group: Any, rows: Any) -> None:
    groups = [group(0, [[turn((1,), (10 + n, 90), (0, 1) if n else None)] for n in range(5)])]
    for draw in (trajectory_pairs, turn_pairs):
        pairs = draw(rows(groups), 100, np.random.default_rng(1))
        assert pairs.reasonings == [(11,), (12,), (13,), (14,)] and pairs.num_empty == 1
        assert (
            len(draw(rows(groups), 3, np.random.default_rng(2)).reasonings) + draw(rows(groups), 3, np.random.default_rng(2)).num_empty == 3
        )


def test_some_of_the_reasonings_against_all_prompts(turn: Any, group: Any, rows: Any) -> None:
    """Two prompts of 2 and 1 tokens, reasonings of 3, 1 and 2: all cost 3 + 2 x 6, the last two 3 + 2 x 3."""
    groups = [
        group(0, [[turn((1, 2), (10, 11, 12, 90), (0, 3))], [turn((1, 2), (13, 90, 91), (0, 1))], [turn((1, 2), (9,), None)]]),
        group(1, [[turn((3,), (14, 15, 91), (0, 2))]]),
    ]
    pairs = first_turn_pairs(rows(groups))
    assert (pairs.cost, pairs.population, pairs.dropped) == (15, 3, 0)
    some = pairs.only([1, 2])
    assert (some.prompts, some.reasonings, some.source, some.num_empty) == ([(1, 2), (3,)], [(13,), (14, 15)], [0, 1], 1)
    assert (some.cost, some.population, some.dropped) == (9, 3, 1)
    fewer = some.only(np.array([1]))
    assert (fewer.reasonings, fewer.population, fewer.dropped, fewer.prompts) == ([(14, 15)], 3, 2, pairs.prompts)
    assert (pairs.cost, len(pairs.reasonings)) == (15, 3), "the original is as it was"
    assert first_turn_pairs(rows([])).cost == 0


def test_an_agent_that_writes_ids_into_its_prompts(turn: Any, group: Any, rows: Any) -> None:
    """A prompt begins with the task, 1 or 2, and goes on with an id. Half of the members with one prompt keep theirs; with fewer, one stands for all."""
    ids = ((5, 5, 6, 7), (9, 8, 7, 6))
    groups = [group(n, [[turn((n + 1, each), (10, 90), (0, 1)), turn((3,), (11,), None)] for each in ids[n]]) for n in range(2)]
    assert differing_prompts_note(groups) is None and len(first_turn_pairs(rows(groups)).prompts) == 7, (
        "an environment's prompts are its own"
    )
    for each in groups:
        each.env = AGENT
    pairs = first_turn_pairs(rows(groups))
    assert pairs.prompts == [(1, 5), (1, 6), (1, 7), (2, 6)] and pairs.source == [0, 0, 1, 2, 3, 3, 3, 3]
    assert rows(groups).prompts[-1] == (2, 6, 10, 90, 3), "later turns saw what they saw"
    assert list(probe_rows(groups).prompts)[4:] == [(2, 6)] * 4
    note = differing_prompts_note(groups)
    assert note is not None and note.startswith("diagnosis: in 1 of 2 tasks fewer than half of the episodes begin with the same prompt")


def test_calls_are_a_column_where_there_are_any(turn: Any, group: Any) -> None:
    groups = [group(0, [[turn((1,), (10, 20, 21, 90), (0, 1)), turn((3,), (11,), None)]])]
    assert "calls" not in rollout_rows(groups)
    groups[0].trajectories[0].turns[0].calls_span = (1, 3)
    assert rollout_rows(groups)["calls"] == [(20, 21), ()]
