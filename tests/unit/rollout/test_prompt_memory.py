"""Prompt memory: its formulas by hand, what a choice gains, exact resume, and what is refused."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tether.core.config import validate
from tether.core.enums import StopReason
from tether.core.errors import BadInput, ConfigError
from tether.core.types import Group, Observation, Step, Trajectory
from tether.envs.registry import make_env
from tether.rollout.prompt_memory import PromptMemory, PromptMemorySettings, PromptRecord, expected_signal
from tether.rollout.sampler import training_plan
from tether.training.settings import RunSettings


class Rows:
    """An environment of so many rows."""

    name, max_turns, instructions = "rows", 1, ""

    def __init__(self, num_instances: int | None, digest: str = "") -> None:
        self.num_instances, self.instances_digest = num_instances, digest

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        return Observation(str(seed))

    def step(self, answer: str) -> Step:
        return Step(Observation(""), 0.0, True, False)


def _memory(rows: int = 40, seed: int = 0, **settings: Any) -> PromptMemory:
    chosen = PromptMemorySettings(**{"candidates": 2, "explore": 0.0, "signal": "success", **settings})
    return PromptMemory(chosen, seed, {"rows": Rows(rows)})


def _group(index: int, successes: list[bool], choice: dict[str, Any], env: str = "rows") -> Group:
    return Group(
        index, 0, [Trajectory(index, m, 0, [], StopReason.SUCCESS, success=won) for m, won in enumerate(successes)], [], env, choice
    )


def _played(memory: PromptMemory, step: int, num_groups: int, rates: Any, size: int = 8) -> list[Group]:
    """The groups of a step whose prompts succeed with known rates, by row."""
    choose = memory.chooser(step)
    rows = [choose(group, 0) for group in range(num_groups)]
    draws = np.random.default_rng(step).random((num_groups, size))
    return choose.marked([_group(g, [bool(won) for won in draws[g] < rates[row]], {}) for g, row in enumerate(rows)])


def test_a_record_and_its_expected_signal_by_hand() -> None:
    settings = PromptMemorySettings(candidates=2, half_life=10, signal="success")
    once = PromptRecord().plus(5, _group(0, [True, False, True, False], {"prompt": "row 0"}), settings)
    assert once == (4, 5, 4.0, 2.0, 0.0, 1.0, 3.0)  # 4 deviations of a half; 4 episodes less a group
    assert expected_signal(once, 0.1, 5, 10) == pytest.approx((4 * 0.1 + 1) / (4 + 3))
    assert expected_signal(once, 0.1, 15, 10) == pytest.approx((4 * 0.1 + 0.5) / (4 + 1.5))  # a half-life later
    assert expected_signal(None, 0.1, 5, 10) == 0.1
    twice = once.plus(15, _group(0, [True, True], {"prompt": "row 0"}), settings)
    assert twice == (6, 15, 4.0, 3.0, 0.0, 0.5, 2.5) and twice.success == 0.75


def test_levels_that_differ_are_no_signal() -> None:
    """Of two levels with the same parameters one is always solved, one never: half of the episodes succeed, and no group varies."""
    record = PromptRecord()
    for won in (True, False):
        record = record.plus(1, _group(0, [won] * 4, {}), PromptMemorySettings(candidates=2, signal="success"))
    assert record.success == 0.5 and expected_signal(record, 0.2, 1, 50.0) == pytest.approx(4 * 0.2 / (4 + 6))


def test_a_choice_gains_what_it_should() -> None:
    """Half of the prompts have a signal of 0.25, half of 0.05. Of two candidates both are strong with 1/4, one with 1/2, and then it is taken
    with 0.25 / 0.30 = 5/6: a strong one is played with 1/4 + 1/2 x 5/6 = 2/3. So a group has 0.18333 of signal, 11/9 of the even 0.15."""
    memory = _memory(rows=2000)
    sure = 1e9  # degrees of freedom: the record alone counts
    memory.records = {
        ("rows", f"row {row}"): PromptRecord(8, 1, sure, sure / 2, 0.0, sure * (0.25 if row % 2 else 0.05), sure) for row in range(2000)
    }
    strong = [row % 2 for step in range(2, 402) for choose in [memory.chooser(step)] for row in [choose(g, 0) for g in range(10)]]
    assert np.mean(strong) == pytest.approx(2 / 3, abs=0.02)
    assert np.mean(np.where(strong, 0.25, 0.05)) / 0.15 == pytest.approx(11 / 9, abs=0.03)


def test_more_signal_from_known_success_rates() -> None:
    """Ten of forty prompts succeed half the time, the others always. An even draw has 0.0625 of signal. At least one of four candidates is of
    the ten with 1 - 0.75^4 = 0.684, so no choice among four can have more than 0.171; a memory that starts empty comes near."""
    rates = np.where(np.arange(40) < 10, 0.5, 1.0)
    memory = _memory(candidates=4)
    gained = []
    for step in range(1, 201):
        groups = _played(memory, step, 4, rates)
        gained += [rates[int(group.choice["prompt"][4:])] for group in groups]
        memory.observe(step, groups)
    late = np.array(gained[400:])
    assert 2.0 < np.mean(late * (1 - late)) / 0.0625 < 2.736
    assert (late == 1.0).any()  # both kinds are still played


def test_explored_groups_are_an_even_sample() -> None:
    memory = _memory(rows=10, explore=0.25, candidates=8)
    memory.records = {("rows", "row 3"): PromptRecord(8, 1, 1e9, 5e8, 0.0, 2.5e8, 1e9)}
    memory.totals["rows"] = PromptRecord(8, 1, 1e9, 1e9, 0.0, 1.0, 1e9)
    choices = [group.choice for step in range(2, 1002) for group in _played(memory, step, 1, [0.5] * 10)]
    explored = [choice["prompt"] for choice in choices if choice["why"] == "explored"]
    assert len(explored) == pytest.approx(250, abs=45)
    assert all(count == pytest.approx(len(explored) / 10, abs=18) for count in Counter(explored).values()) and len(set(explored)) == 10
    chosen = [choice["prompt"] for choice in choices if choice["why"] != "explored"]
    assert chosen.count("row 3") == pytest.approx(len(chosen) * (1 - 0.9**8), abs=0.06 * len(chosen))


def test_while_nothing_varies_new_prompts_go_first() -> None:
    """Half of the prompts were played in vain: 100 degrees of freedom and no squares. Of two candidates, a played one is taken before a new one with
    (4 / 104) / (1 + 4 / 104) = 1/27, so a new one is played with 1/4 + 1/2 x 26/27 = 0.7315."""
    memory = _memory(rows=2000, half_life=1e9)
    memory.records = {("rows", f"row {row}"): PromptRecord(101, 1, 101.0, 0.0, 0.0, 0.0, 100.0) for row in range(0, 2000, 2)}
    memory.totals["rows"] = PromptRecord(101, 1, 101.0, 0.0, 0.0, 0.0, 100.0)
    new = [row % 2 for step in range(2, 302) for choose in [memory.chooser(step)] for row in [choose(g, 0) for g in range(10)]]
    assert np.mean(new) == pytest.approx(0.7315, abs=0.025)


def test_no_prompt_twice_in_a_step_unless_there_are_too_few() -> None:
    choose = _memory(rows=1000, candidates=3).chooser(1)
    assert len({choose(group, 0) for group in range(100)}) == 100
    choose = _memory(rows=2, candidates=2).chooser(1)
    assert {choose(group, 0) for group in range(8)} == {0, 1}


def test_a_choice_reads_what_was_known_when_it_was_asked_for() -> None:
    """Asynchronous rollouts choose in a thread, while further steps end."""
    memory, same = _memory(candidates=4), _memory(candidates=4)
    early = memory.chooser(12)
    for step in range(1, 11):
        memory.observe(step, _played(memory, step, 4, np.where(np.arange(40) < 10, 0.5, 1.0)))
    late = memory.chooser(12)
    unread = same.chooser(12)
    assert [early(g, 0) for g in range(8)] == [unread(g, 0) for g in range(8)] != [late(g, 0) for g in range(8)]


def test_a_restored_memory_chooses_the_same() -> None:
    rates = np.linspace(0, 1, 40)
    memory = _memory(candidates=4, explore=0.25)
    for step in range(1, 30):
        memory.observe(step, _played(memory, step, 4, rates))
    resumed = _memory(candidates=4, explore=0.25)
    resumed.restore(json.loads(json.dumps(memory.state())))
    assert resumed.state() == memory.state() and resumed.records == memory.records
    assert [g.choice for g in _played(resumed, 30, 8, rates)] == [g.choice for g in _played(memory, 30, 8, rates)]
    fresh = _memory(candidates=4, explore=0.25)
    assert [g.choice for g in _played(fresh, 30, 8, rates)] != [g.choice for g in _played(memory, 30, 8, rates)]


def test_metrics_of_a_step() -> None:
    memory = _memory()
    for row, won in ((0, [True] * 4), (1, [False] * 4), (2, [True, False, False, False])):
        memory.observe(1, [_group(row, won, {"prompt": f"row {row}", "why": "new", "expected": 0.0})])
    known = {"prompt": "row 2", "why": "signal", "expected": 0.2, "success": 0.25, "episodes": 4, "last": 1}
    played = [
        _group(0, [True, True, False, False], known),
        _group(1, [True] * 4, {"prompt": "row 5", "why": "new", "expected": 0.1}),
        _group(2, [False] * 4, {"prompt": "row 6", "why": "explored", "expected": 0.1}),
        _group(3, [True, False, False, False], {"prompt": "row 7", "why": "explored", "expected": 0.1}),
    ]
    assert memory.metrics(played) == {
        "known": 3,
        "solved": 1,
        "hopeless": 1,
        "explored": 0.5,
        "new": 0.25,
        "success_recalled": 0.25,
        "success_chosen": 0.75,
        "success_explored": 0.125,
        "signal_chosen": pytest.approx(1 / 6),  # squares 1 + 0, 6 degrees of freedom
        "signal_explored": pytest.approx(0.75 / 6),
    }
    assert memory.metrics([_group(0, [True], {})]) == {}


def test_the_plan_plays_what_was_chosen_in_every_environment() -> None:
    chosen = PromptMemorySettings(candidates=4)
    memory = PromptMemory(chosen, 0, {"rows": Rows(50), "frozen_lake": make_env("frozen_lake")})
    choose = memory.chooser(1)
    plan = training_plan(0, 1, 8, 2, weights=(1, 1), choose=choose)
    assert plan == training_plan(0, 1, 8, 2, weights=(1, 1), choose=memory.chooser(1))  # as on another rank
    assert len({seeds.instance for seeds in plan}) == 8 and all(seeds.instance < 50 for seeds in plan if seeds.env_index == 0)
    groups = choose.marked([_group(g, [True, False], {}, ("rows", "frozen_lake")[g // 4]) for g in range(8)])
    assert [group.choice["prompt"].split()[0] for group in groups] == ["row"] * 4 + ["distance"] * 4
    memory.observe(1, groups)
    assert {label for label, _ in memory.records} == {"rows", "frozen_lake"}


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("frozen_lake", {"size", "distance"}),
        ("sokoban", {"size", "boxes", "pushes"}),
        ("countdown", {"numbers", "operations"}),
        ("metamathqa", {"kind"}),
    ],
)
def test_generated_instances_name_their_parameters(name: str, names: set[str]) -> None:
    env: Any = make_env(name)
    found = []
    for seed in range(30):
        env.reset(seed)
        found.append(tuple(env.parameters.items()))
    assert {key for parameters in found for key, _ in parameters} == names
    assert 1 < len(set(found)) < 25  # levels are told apart, and share records


def test_the_distance_of_a_lake_by_hand() -> None:
    from tether.envs.frozen_lake.env import FrozenLake
    from tether.envs.frozen_lake.generator import Lake

    env = FrozenLake(generator=lambda seed, split: Lake("SHFFFFFFG"))  # S H F / F F F / F F G
    env.reset(0)
    assert env.parameters == {"size": "3", "distance": "4"}


def test_what_has_no_parameters_is_refused() -> None:
    with pytest.raises(BadInput, match="environment 'endless' makes every prompt anew and names no parameters") as refused:
        PromptMemory(PromptMemorySettings(candidates=2), 0, {"endless": Rows(None)})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"prompt_memory": {"candidates": 1}}, "leaves nothing to choose between"),
        ({"prompt_memory": {"candidates": 4, "explore": 1.5}}, "less than or equal to 1"),
        ({"prompt_memory": {"candidate": 4}}, "did you mean 'rollout.prompt_memory.candidates'"),
        ({"prompt_memory": {"candidates": 4}, "group_size": 1}, "needs at least 2 trajectories per prompt"),
    ],
)
def test_settings_that_make_no_sense_are_refused(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(RunSettings, {"env": {"name": "frozen_lake"}, "filter": {"strategy": "all", "include_zero": True}, "rollout": rollout})


def test_prompts_that_changed_are_refused(tmp_path: Path) -> None:
    def memory(answers: str) -> PromptMemory:
        data = tmp_path / f"{answers}.jsonl"
        data.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": a}) + "\n" for n, a in enumerate(answers)))
        env = make_env("qa", data=str(data), split="all")
        return PromptMemory(PromptMemorySettings(candidates=2), 0, {"qa": env})

    state = memory("1234").state()
    memory("1234").restore(state)
    for other in ("1235", "123", "2134"):
        with pytest.raises(
            BadInput, match=r"the prompts of qa have changed since the checkpoint \(4 rows with digest [0-9a-f]{12}, now"
        ) as no:
            memory(other).restore(state)
        assert "\n" not in str(no.value) and "put the file back and resume" in str(no.value)
