"""The two readings: counts that are exact, windows that hold enough prompts, samples that are bounded and do not depend on the order."""

from collections.abc import Sequence
from typing import Any

import pytest

from tether.core.errors import BadInput
from tether.diagnostics.audit import reading as scanning
from tether.diagnostics.audit.reading import (
    Running,
    StepCounts,
    Window,
    WindowSample,
    compacted,
    draw,
    evenly,
    group_hash,
    plan_windows,
    reward_statistics,
    scan,
)
from tether.diagnostics.rollouts import Rollout


def _rollout(group: Any, episode: int = 0, *, step: int | None = 1, turn: int = 0, **more: Any) -> Rollout:
    values = {"prompt": f"p{group}", "response": "r", "reasoning": f"z{group}/{episode}/{turn}"} | more
    return Rollout(step=step, group=group, trajectory=f"{step}/{group}/{episode}", turn=turn, where=f"line {episode}", **values)


def _names(drawn: Sequence[Rollout]) -> list[tuple[Any, str | None]]:
    return [(member.group, member.reasoning) for member in drawn]


def test_running_variance_by_hand() -> None:
    running = Running()
    for value in (1.0, 2.0, 4.0):
        running.add(value)
    assert running.count == 3
    assert running.mean == pytest.approx(7 / 3)
    assert running.variance == pytest.approx(7 / 3)  # ((4/3)^2 + (1/3)^2 + (5/3)^2) / 2
    assert Running().variance == 0.0


def test_counts_are_of_episodes_and_of_the_scope() -> None:
    rollouts = [
        _rollout("a", 0, reward=1.0, success=True),
        _rollout("a", 0, turn=1, reward=1.0, success=True),
        _rollout("a", 1, reward=0.0, success=False, reasoning=None, missing="untagged"),
        _rollout("b", 0, reward=None),
        _rollout("b", 0, step=2, reward=5.0),
    ]
    first = scan(rollouts, all_turns=False, seed=0)[1]
    assert (first.num_rollouts, first.num_episodes, first.num_scope, first.num_empty) == (4, 3, 3, 1)
    assert (first.num_judged, first.num_success, first.success) == (2, 1, 0.5)
    assert (first.reward.count, first.reward.mean) == (2, 0.5)
    assert first.num_groups == 2
    assert scan(rollouts, all_turns=True, seed=0)[1].num_scope == 4
    assert list(scan(rollouts, all_turns=False, seed=0)) == [1, 2]


def test_reward_statistics_by_hand() -> None:
    rollouts = [
        _rollout(group, n, reward=reward)
        for group, rewards in (("a", (0, 1)), ("b", (1, 1)), ("c", (2,)))
        for n, reward in enumerate(rewards)
    ]
    found = reward_statistics(scan(rollouts, all_turns=False, seed=0).values())
    assert found is not None
    assert (found.num_groups, found.rv_mean, found.rv_std, found.rv_ratio, found.zero_share) == (2, 0.25, 0.25, 1.0, 0.5)
    flat = reward_statistics(scan(rollouts[2:], all_turns=False, seed=0).values())
    assert flat is not None and flat.rv_ratio is None and flat.zero_share == 1.0
    assert reward_statistics(scan(rollouts[-1:], all_turns=False, seed=0).values()) is None


def test_groups_followed_are_bounded_and_the_smallest_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "MAX_GROUPS", 5)
    rollouts = [_rollout(group, member, reward=float(member)) for member in range(2) for group in range(50)]
    for order in (rollouts, rollouts[::-1]):
        counts = scan(order, all_turns=False, seed=7)[1]
        smallest = sorted(group_hash(7, 1, group) for group in range(50))[:5]
        assert sorted(counts.rewards_of) == smallest and counts.is_sample
        assert all(rewards.count == 2 and rewards.variance == 0.5 for rewards in counts.rewards_of.values())
        assert counts.reward.count == 100  # totals are of all


def test_steps_that_are_no_steps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "MAX_STEPS", 3)
    with pytest.raises(BadInput, match="more than 3 different steps"):
        scan((_rollout("a", step=step) for step in range(4)), all_turns=False, seed=0)


def test_no_first_turn_is_said() -> None:
    with pytest.raises(BadInput, match="--scope trajectory"):
        scan([_rollout("a", turn=1)], all_turns=False, seed=0)


def _counts(groups: dict[int | None, int], empty: Sequence[int] = ()) -> dict[int | None, StepCounts]:
    found = {}
    for step, count in groups.items():
        rollouts = [
            _rollout(group, step=step, **({"reasoning": None, "missing": "blank"} if step in empty else {})) for group in range(count)
        ]
        found |= scan(rollouts, all_turns=False, seed=0)
    return found


def test_evenly_keeps_the_ends() -> None:
    assert evenly(3, 5) == [0, 1, 2]
    assert evenly(100, 4) == [0, 33, 66, 99]
    assert len(evenly(1000, 20)) == 20


def test_many_steps_are_thinned() -> None:
    plan = plan_windows(_counts(dict.fromkeys(range(41), 8)))
    assert len(plan.windows) == 20 and plan.windows[0].steps == (0,) and plan.windows[-1].steps == (40,)
    assert plan.notes == ("20 of 41 steps were measured, evenly spread; name others with --step",)


def test_steps_of_few_prompts_are_pooled() -> None:
    plan = plan_windows(_counts(dict.fromkeys(range(1, 19), 1)))
    assert [window.steps for window in plan.windows] == [tuple(range(1, 9)), tuple(range(9, 19))]  # a rest of 2 joins its neighbour
    assert [window.name for window in plan.windows] == ["1-8", "9-18"]
    assert "a step holds 1 prompt, too few to compare: up to 8 neighbouring steps" in plan.notes[0]


def test_enough_prompts_are_not_pooled_and_one_step_is_never() -> None:
    assert len(plan_windows(_counts({1: 5, 2: 5})).windows) == 2
    assert len(plan_windows(_counts({1: 3, 2: 3})).windows) == 1
    three = plan_windows(_counts({1: 4, 2: 4, 3: 4})).windows
    assert [window.steps for window in three] == [(1, 2, 3)], "a rest of 4 prompts is too few for a verdict"
    assert plan_windows(_counts({None: 2})).windows == (Window((None,)),)
    assert Window((None,)).name == "all"


def test_silent_steps_are_left_out_and_asked_ones_taken() -> None:
    counts = _counts({1: 8, 2: 8, 3: 8}, empty=[2])
    plan = plan_windows(counts)
    assert [window.steps for window in plan.windows] == [(1,), (3,)] and "1 of 3 steps hold no reasoning" in plan.notes[0]
    assert [window.steps for window in plan_windows(counts, [3, 1, 3]).windows] == [(1,), (3,)]
    ended = plan_windows(_counts({1: 8, 2: 8, 3: 8}, empty=[3])).notes[0]
    assert ended == "1 of 3 steps hold no reasoning and were not measured, the last of all among them: the verdict is on step 2"
    with pytest.raises(BadInput, match="step 9 is not in the rollouts, whose steps are from 1 to 3"):
        plan_windows(counts, [9])


def test_sample_is_bounded_and_does_not_depend_on_the_order() -> None:
    rollouts = [_rollout(group, episode) for group in range(40) for episode in range(9)]
    drawn = []
    for order in (rollouts, rollouts[::-1], rollouts[1::2] + rollouts[::2]):
        sample = WindowSample(prompts=4, samples=3, seed=1)
        for rollout in order:
            sample.add(rollout)
        drawn.append(_names(sample.drawn()))
    assert drawn[0] == drawn[1] == drawn[2]
    groups = [group for group, _ in drawn[0]]
    assert len(drawn[0]) == 12 and {groups.count(group) for group in groups} == {3}
    assert set(groups) == set(sorted(range(40), key=lambda group: group_hash(1, 1, group))[:4])
    other = WindowSample(prompts=4, samples=3, seed=2)
    for rollout in rollouts:
        other.add(rollout)
    assert _names(other.drawn()) != drawn[0]


def test_fewer_samples_of_a_prompt_buy_more_prompts() -> None:
    sample = WindowSample(prompts=4, samples=4, seed=0)  # costs 4 x 16 = 64: 8 prompts of one reasoning each cost the same
    for group in range(100):
        sample.add(_rollout(group))
    assert len(sample.drawn()) == 8


def test_sample_holds_what_fits_at_any_moment() -> None:
    sample = WindowSample(prompts=2, samples=2, seed=0)
    for group in range(500):
        for episode in range(5):
            sample.add(_rollout(group, episode))
            assert len(sample.drawn()) <= 5


def test_trajectory_scope_takes_one_turn_of_each_episode_evenly() -> None:
    rollouts = [_rollout("g", episode, turn=turn) for episode in range(300) for turn in range(3)]
    (drawn,) = draw(rollouts, [Window((1,))], all_turns=True, prompts=2, samples=300, seed=0)
    turns = [str(member.reasoning).split("/")[2] for member in drawn]
    assert len(drawn) == 300 == len({str(member.reasoning).split("/")[1] for member in drawn})
    assert all(70 <= turns.count(turn) <= 130 for turn in "012")  # 100 expected, standard deviation 8
    (first,) = draw(rollouts, [Window((1,))], all_turns=False, prompts=2, samples=300, seed=0)
    assert {str(member.reasoning).split("/")[2] for member in first} == {"0"}


def test_windows_take_their_own_steps_and_only_reasoning() -> None:
    rollouts = [_rollout(0, step=step) for step in range(6)] + [_rollout(1, step=0, reasoning=None, missing="blank")]
    drawn = draw(rollouts, [Window((0, 1)), Window((4,))], all_turns=False, prompts=8, samples=8, seed=0)
    assert [sorted(str(member.step) for member in window) for window in drawn] == [["0", "1"], ["4"]]


def test_ids_are_kept_whole_and_a_giant_one_stays_too_large() -> None:
    kept = compacted(_rollout(0, prompt_ids=(1, 2, 3), reasoning_ids=(5, 2**80)))
    assert kept.prompt_ids is not None and list(kept.prompt_ids) == [1, 2, 3]
    assert kept.reasoning_ids is not None and kept.reasoning_ids[1] > 2**60
