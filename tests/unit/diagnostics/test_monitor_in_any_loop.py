"""The monitor inside somebody else's loop: texts or ids in, alarms out, with what is missing computed and bad input refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tether.core.enums import FinishReason, Scope, StopReason
from tether.core.errors import BadInput
from tether.core.metrics import StepMetrics
from tether.core.types import Group, Trajectory, Turn
from tether.diagnostics.cross_score import cross_score
from tether.diagnostics.monitor import Monitor, step_work
from tether.diagnostics.pairs import rollout_rows
from tether.diagnostics.settings import AlarmRules

PROMPTS = ["user: the box is left\n<think>"] * 2 + ["user: the goal is up\n<think>"] * 2
THOUGHTS = ["I push left.", "left it is", "I walk up", "Up, twice"]
ROWS: dict[str, Any] = {"prompts": PROMPTS, "reasonings": THOUGHTS, "groups": ["a", "a", "b", "b"]}
QUICK = AlarmRules(start_steps=8, recent_steps=2, step_p=0.03)


class _Same:
    """Every text is equally likely."""

    def score(self, prompt: Any, reasoning: Any) -> float:
        return -1.0 * len(reasoning)


def test_texts_and_ids_give_the_same_numbers(tiny: Any) -> None:
    ids = {
        name: [tiny.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        for name, texts in (("prompts", PROMPTS), ("reasonings", THOUGHTS))
    }
    by_text = Monitor(tiny.model, tokenizer=tiny.tokenizer).observe(1, **ROWS)
    by_ids = Monitor(tiny.model, tokenizer=tiny.tokenizer).observe(1, **ids, groups=ROWS["groups"])
    arrays = {name: [np.array(row) for row in rows] for name, rows in ids.items()}
    by_arrays = Monitor(tiny.model, tokenizer=tiny.tokenizer).observe(1, **arrays, groups=ROWS["groups"])
    assert by_text == by_ids == by_arrays
    scores = cross_score(tiny.model, ids["prompts"][::2], ids["reasonings"])
    gains = [scores[row, row // 2] - np.logaddexp(*scores[row]) + math.log(2) for row in range(4)]
    assert by_text.information[Scope.FIRST_TURN].mi_seq == pytest.approx(np.mean(gains), abs=1e-9)
    assert by_text.metrics["rollout"]["reasoning_tokens"] == np.mean([len(row) for row in ids["reasonings"]])


def test_a_beginning_token_is_added_to_texts_once() -> None:
    class Tokenizer:
        bos_token_id = 1

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            known = text.startswith("<s>")
            return [1] * (add_special_tokens or known) + [ord(letter) for letter in text.removeprefix("<s>")]

    asked: set[tuple[int, ...]] = set()

    class Scorer(_Same):
        def score(self, prompt: Any, reasoning: Any) -> float:
            asked.add(tuple(prompt))
            return super().score(prompt, reasoning)

    monitor = Monitor(Scorer(), tokenizer=Tokenizer(), rules=None)
    monitor.observe(1, prompts=["A", "<s>B"], reasonings=["x", "y"], groups=[0, 1])
    assert asked == {(1, ord("A")), (1, ord("B"))}


def test_what_the_alarms_read_is_computed_where_it_is_missing() -> None:
    """Rewards 0, 1 and 3, 3: variances 1/2 and 0. Three of four succeed; one of four texts repeats itself, another quotes its prompt."""
    rows = {
        "prompts": [(1,), (1,), (1, 5), (2,), (2,)],
        "reasonings": [(3, 4), (3,), (), (5,), None],
        "groups": [7, 7, 7, 9, 9],
        "trajectories": [0, 1, 1, 0, 1],
        "rewards": [0.0, 1.0, 1.0, 3.0, 3.0],
        "successes": [False, True, True, True, True],
    }
    health = Monitor(_Same()).observe(1, **rows)
    assert health.metrics["groups"] == {"rv_mean": 0.25}
    assert health.metrics["rollout"] == {"success": 0.75, "reasoning_tokens": pytest.approx(4 / 3)}, "ids without a tokenizer hold no text"
    assert health.metrics["alarms"] == {"warning": 0, "critical": 0}
    logged = StepMetrics()
    for section, values in health.metrics.items():
        logged.put(section, values)
    known = {"rollout/success": 0.1, "groups/rv_mean": 0.0, "rollout/reasoning_tokens": 9.0}
    assert list(Monitor(_Same()).observe(1, **rows, metrics=known).metrics) == ["information", "alarms"], "what is known is not computed"
    assert list(Monitor(_Same(), rules=None).observe(1, **rows).metrics) == ["information"]


def test_repeated_text_is_found_in_texts_and_in_ids(tiny: Any) -> None:
    loop = "go left " * 8
    texts = {"prompts": ["x", f"say: {loop}", "y"], "reasonings": [loop, loop, "up"], "groups": [0, 1, 2]}
    for reasonings in (texts["reasonings"], [tiny.tokenizer.encode(text, add_special_tokens=False) for text in texts["reasonings"]]):
        monitor = Monitor(tiny.model, every=0, tokenizer=tiny.tokenizer)
        health = monitor.observe(1, **{**texts, "reasonings": reasonings})
        assert health.metrics["rollout"]["reasonings"] == 3 and health.metrics["rollout"]["repeated_text"] == pytest.approx(1 / 3)
        assert health.information == {}, "nothing is measured where `every` is 0"


def _lazy(step: int, start: int) -> dict[str, Any]:
    """Rewards differ before a step and are equal from it on."""
    return {**ROWS, "rewards": [0.0, 1.0, 0.0, 1.0] if step < start else [0.0] * 4, "successes": [False] * 4}


def _observed(monitor: Monitor, steps: range, start: int, tokenizer: Any) -> list[list[tuple[str, int]]]:
    found = []
    for step in steps:
        health = monitor.observe(step, **_lazy(step, start))
        assert [alarm for alarm in health.alarms if alarm.began == step] == health.new_alarms
        assert health.metrics["alarms"]["critical"] == sum(alarm.severity == "critical" for alarm in health.alarms)
        found.append([(str(alarm.name), alarm.began) for alarm in health.alarms])
    return found


def test_alarms_are_checked_at_every_step_and_a_resumed_run_raises_the_same(tiny: Any) -> None:
    """No reward variance from step 4 on: two steps in a row are an alarm, at step 5; information is measured at steps 1 and 11 only."""

    def make() -> Monitor:
        return Monitor(tiny.model, every=10, tokenizer=tiny.tokenizer, rules=QUICK)

    whole = _observed(make(), range(1, 9), 4, tiny.tokenizer)
    collapse = [("reward_variance_collapse", 5)]
    assert whole == [[]] * 4 + [collapse] * 4
    records = [(step, {"groups/rv_mean": 0.5 if step < 4 else 0.0, "rollout/success": 0.0}) for step in range(1, 6)]
    resumed = make()
    resumed.replay(records)
    assert _observed(resumed, range(6, 9), 4, tiny.tokenizer) == whole[5:]
    resumed.forget(4, 8)
    assert _observed(resumed, range(9, 11), 4, tiny.tokenizer) == [[], [("reward_variance_collapse", 10)]]


def test_without_rules_there_are_no_alarms(tiny: Any) -> None:
    monitor = Monitor(tiny.model, every=0, tokenizer=tiny.tokenizer, rules=None)
    monitor.replay([(1, {"groups/rv_mean": 0.0})])
    monitor.forget(1, 1)
    health = monitor.observe(2, **_lazy(2, 1))
    assert (health.alarms, health.new_alarms, health.metrics) == ([], [], {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reasonings": THOUGHTS[:3]}, "got 4 prompts and 3 reasonings"),
        ({"groups": [1]}, "got 4 prompts and 1 groups"),
        ({"trajectories": [1]}, "got 4 prompts and 1 trajectories"),
        ({"rewards": [1.0]}, "got 4 prompts and 1 rewards"),
        ({"successes": [True]}, "got 4 prompts and 1 successes"),
        ({"rewards": [1.0, 2.0, math.nan, 1.0]}, r"rewards of the rows \[2\] are \[nan\]"),
        ({"rewards": [1.0, 2.0, 1.0, 1.0], "trajectories": [0, 0, 0, 1]}, r"rewards of the rows \[0, 1\] are \[1.0, 2.0\]"),
    ],
)
def test_bad_rows(changes: dict[str, Any], words: str, tiny: Any) -> None:
    with pytest.raises(BadInput, match=words):
        Monitor(_Same(), tokenizer=tiny.tokenizer).observe(1, **{**ROWS, **changes})


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(BadInput, match=r"prompts\[0\] is text; give the tokenizer"):
        Monitor(_Same()).observe(1, **ROWS)


@pytest.mark.parametrize("wrong", [{"every": -1}, {"budget": 0.0}, {"budget": 1.5}, {"contexts": 0}])
def test_bad_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="give every >= 0"):
        Monitor(_Same(), **wrong)
    with pytest.raises(ValueError, match="turns"):
        Monitor(_Same(), scopes=["turns"])


# Tether's own groups.


def _turn(read: int, said: int, *, new_context: bool = False) -> Turn:
    span = (0, 1)
    return Turn((1,) * read, (2,) * said, (-0.5,) * said, FinishReason.LENGTH, "", span, new_context=new_context, reward=1.0)


def _trajectory(member: int, turns: list[Turn], stop: StopReason = StopReason.SUCCESS) -> Trajectory:
    return Trajectory(0, member, 0, turns, stop, success=stop is StopReason.SUCCESS)


def test_rows_of_groups_leave_errored_trajectories_out() -> None:
    """A backend that is down for one member would look like reward variance."""
    members = [
        _trajectory(0, [_turn(2, 1), _turn(1, 2)]),
        _trajectory(1, [_turn(2, 3)], StopReason.ENV_ERROR),
        _trajectory(2, [_turn(2, 1)]),
    ]
    rows = rollout_rows([Group(4, 0, members)])
    assert rows["prompts"] == [(1, 1), (1, 1, 2, 1), (1, 1)] and rows["reasonings"] == [(2,), (2,), (2,)]
    assert (rows["groups"], rows["rewards"], rows["successes"]) == ([4, 4, 4], [2.0, 2.0, 1.0], [True, True, True])
    assert rows["trajectories"] == [0, 0, 1]


def test_the_work_of_a_step() -> None:
    """Group 0: 5 + 3 and, in a second turn, 2 + 4 more: 14 tokens; group 1: 6 + 1, 6 + 2 in contexts of their own: 15, and 7."""
    first = Group(0, 0, [_trajectory(0, [_turn(5, 3), _turn(2, 4)])])
    second = Group(1, 0, [_trajectory(0, [_turn(6, 1), _turn(6, 2, new_context=True)]), _trajectory(1, [_turn(6, 1)])])
    assert step_work([first, second], [second], epochs=1) == 36 + 3 * 22
    assert step_work([first, second], [second], epochs=4) == 36 + 3 * 4 * 22
    assert step_work([first, second], [], epochs=1) == 36


def test_the_state_of_a_checkpoint_of_tether_0_1_restores() -> None:
    folder = Path(__file__).parents[2] / "fixtures" / "run_of_0_1" / "run" / "checkpoints" / "step_000002"
    state = torch.load(folder / "state.pt", weights_only=False)["monitor"]
    monitor = Monitor(_Same(), scopes=[Scope.TRAJECTORY])
    monitor.restore(state)
    assert monitor.state()["sigma_ema"] == state["sigma_ema"] and monitor.state()["start"] == state["start"]
