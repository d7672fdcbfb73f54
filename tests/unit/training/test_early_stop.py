"""The rules for ending a run early, on records written by hand; and a run that ends by one, with checkpoint, reason and evaluation."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tether.core.config import dump_yaml, validate
from tether.core.seeding import generator
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.training.alarm_actions import AlarmActions
from tether.training.early_stop import EarlyStop, stop_reason
from tether.training.loop import Trainer
from tether.training.settings import EarlyStopSettings, RunSettings

RULES = EarlyStopSettings()


def _run(variances: list[float], kept: float = 1.0) -> list[StepRecord]:
    steps = [{"groups/rv_mean": variance, "groups/kept_ratio": kept} for variance in variances]
    return [StepRecord(0, {"validation/success": 0.3}), *(StepRecord(n, metrics) for n, metrics in enumerate(steps, 1))]


@pytest.mark.parametrize(
    ("variances", "stops"),
    [
        ([1.0] * 10 + [0.09] * 5, True),
        ([1.0] * 10 + [0.09] * 4, False),
        ([1.0] * 10 + [0.1] * 5, False),  # at the bound is not below it
        ([1.0] * 10 + [0.09] * 4 + [0.2, 0.09], False),  # in a row
        ([1.0] * 10 + [0.5] + [0.09] * 5, True),
        ([2.0] * 5 + [0.0] * 5 + [0.09] * 5, True),  # the mean over the first ten is 1.0
        ([2.0] * 5 + [0.0] * 9, False),  # four steps after the first ten
        ([0.0] * 30, False),  # nothing to fall from
    ],
)
def test_variance_rule(variances: list[float], stops: bool) -> None:
    reason = stop_reason(_run(variances), RULES)
    assert (reason is not None) is stops
    if reason:
        assert "below 10% of its mean over the first 10 steps for 5 steps in a row" in reason


def test_variance_rule_can_be_turned_off_and_set() -> None:
    collapsed = _run([1.0] * 10 + [0.0] * 9)
    assert stop_reason(collapsed, EarlyStopSettings(variance_share=0)) is None
    assert stop_reason(_run([1.0, 1.0, 0.4]), EarlyStopSettings(variance_share=0.5, baseline_steps=2, variance_steps=1)) is not None


@pytest.mark.parametrize(
    ("successes", "stops"),
    [([0.009] * 5, True), ([0.009] * 4, False), ([0.01] * 5, False), ([0.3, 0, 0, 0, 0, 0], True), ([0, 0, 0, 0.3, 0, 0], False)],
)
def test_success_rule(successes: list[float], stops: bool) -> None:
    records = [StepRecord(step, {"validation/success": success}) for step, success in enumerate(successes)]
    reason = stop_reason(records, RULES)
    assert (reason is not None) is stops
    assert stop_reason(records, EarlyStopSettings(success_floor=0)) is None
    if reason:
        assert reason == "validation success was below 1.0% in 5 evaluations in a row"


def test_empty_filter_rule() -> None:
    assert stop_reason(_run([0.1] * 5, kept=0.0), RULES) == "the filter kept nothing for 5 steps in a row"
    assert stop_reason(_run([0.1] * 4, kept=0.0), RULES) is None
    assert stop_reason(_run([0.1] * 5, kept=0.0), EarlyStopSettings(empty_steps=0)) is None
    one_kept = _run([0.1] * 5, kept=0.0)
    one_kept[-2].metrics["groups/kept_ratio"] = 0.125
    assert stop_reason(one_kept, RULES) is None


@pytest.mark.parametrize(("streak", "bound", "stops"), [(10, 10, True), (9, 10, False), (23, 10, True), (3, 3, True), (99, 0, False)])
def test_nonfinite_rule(streak: int, bound: int, stops: bool) -> None:
    records = _run([1.0, 1.0])
    records[-1].metrics["update/nonfinite_streak"] = streak
    reason = stop_reason(records, EarlyStopSettings(nonfinite_updates=bound))
    assert (reason is not None) is stops
    if reason:
        assert reason == f"the gradient was not finite in {streak} updates in a row; lower learner.learning_rate or learner.max_grad_norm"


def test_a_streak_that_ended_stops_nothing() -> None:
    records = _run([1.0, 1.0, 1.0])
    records[1].metrics["update/nonfinite_streak"] = 50
    records[2].metrics["update/nonfinite_streak"] = 0  # the last step made no update at all
    assert stop_reason(records, RULES) is None
    assert stop_reason([], RULES) is None


# ------------------------------------------------------------------------------------------------- from step to step

SHORT = {"baseline_steps": 3, "variance_steps": 2, "success_evaluations": 2, "empty_steps": 2, "invalid_steps": 2, "nonfinite_updates": 2}


def _rule_that_holds(records: list[StepRecord], rules: EarlyStopSettings) -> str | None:
    """The rules once more, over all records, the way the paper states them; which one holds, by a word of its sentence."""
    trained = [record.metrics for record in records if "groups/rv_mean" in record.metrics]
    variances = [metrics["groups/rv_mean"] for metrics in trained]
    later = variances[rules.baseline_steps :][-rules.variance_steps :]
    bound = rules.variance_share * sum(variances[: rules.baseline_steps]) / max(1, len(variances[: rules.baseline_steps]))
    successes = [record.metrics["validation/success"] for record in records if "validation/success" in record.metrics]
    played = [record.metrics["rollout/format_valid"] for record in records if record.metrics.get("rollout/tokens_sampled")]
    kept = [metrics["groups/kept_ratio"] for metrics in trained]

    def all_of_last(values: list[bool], count: int) -> bool:
        return 0 < count <= len(values) and all(values[-count:])

    streak = trained[-1].get("update/nonfinite_streak", 0) if trained else 0
    holds = {
        "reward variance": len(later) == rules.variance_steps and max(later) < bound,
        "validation success": all_of_last([value < rules.success_floor for value in successes], rules.success_evaluations),
        "no reply": all_of_last([value == 0 for value in played], rules.invalid_steps),
        "kept nothing": all_of_last([value == 0 for value in kept], rules.empty_steps),
        "not finite": 0 < rules.nonfinite_updates <= streak,
    }
    return next((rule for rule, held in holds.items() if held), None)


def _random_record(step: int, random: np.random.Generator) -> StepRecord:
    """Anything a step can leave: trained or not, evaluated or not, played or not."""
    metrics: dict[str, float] = {}
    if random.random() < 0.8:
        metrics |= {"groups/rv_mean": float(random.choice([0.0, 0.05, 1.0])), "groups/kept_ratio": float(random.choice([0.0, 0.5]))}
        metrics["update/nonfinite_streak"] = float(random.choice([0, 0, 1, 2]))
    if random.random() < 0.3:
        metrics["validation/success"] = float(random.choice([0.0, 0.5]))
    if random.random() < 0.7:
        metrics |= {"rollout/tokens_sampled": float(random.integers(2)), "rollout/format_valid": float(random.choice([0.0, 0.5]))}
    return StepRecord(step, metrics)


@pytest.mark.parametrize("turned_off", [{}, {"variance_share": 0}, {"empty_steps": 0}, {"invalid_steps": 0}, {"nonfinite_updates": 0}])
def test_every_step_decides_what_all_records_would(turned_off: dict[str, int]) -> None:
    """Also where the last record is amended after it was looked at, where steps are rolled back, and after a resume."""
    settings = validate(RunSettings, {"env": {"name": "countdown"}, "early_stop": {**SHORT, **turned_off}})
    random, held = generator("early stop", len(turned_off)), set[str | None]()
    for _ in range(20):
        actions, records = AlarmActions(settings), list[StepRecord]()
        hook, run = EarlyStop(actions), cast(Any, SimpleNamespace(records=records, settings=settings))
        assert hook.stop_reason(run) is None
        for step in range(40):
            records.append(_random_record(step, random))
            for _ in range(2):
                expected, reason = _rule_that_holds(actions.counting(records), settings.early_stop), hook.stop_reason(run)
                assert (reason is None) is (expected is None) and (expected or "") in (reason or "")
                assert reason == stop_reason(actions.counting(records), settings.early_stop)
                held.add(expected)
                records[-1] = _random_record(step, random)
            if random.random() < 0.05:
                actions.rolled_back.append((int(random.integers(step + 1)), step))
            if random.random() < 0.05:
                hook = EarlyStop(actions)
    assert len(held) == 6 - len(turned_off)


class _Counted(list[StepRecord]):
    """Counts the records that were read."""

    read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.read += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self) -> Iterator[StepRecord]:
        for record in super().__iter__():
            self.read += 1
            yield record


def test_a_step_reads_no_more_records_than_are_new() -> None:
    settings = validate(RunSettings, {"env": {"name": "countdown"}})
    records, hook = _Counted(), EarlyStop(AlarmActions(settings))
    run: Any = SimpleNamespace(records=records, settings=settings)
    for record in _run([1.0] * 300):
        records.append(record)
        before = records.read
        assert hook.stop_reason(run) is None
        assert records.read - before <= 2  # the one that is final now, and the last


def _settings(**early_stop: Any) -> RunSettings:
    return validate(
        RunSettings,
        {
            "env": {"name": "countdown"},  # eight tokens are too few for an answer: all fail alike
            "rollout": {"num_groups": 2, "group_size": 2, "max_tokens": 8},
            "evaluation": {"prompts": 2},
            "diagnosis": {"every": 0},
            "checkpoint": {"every": 50},
            "steps": 9,
            "early_stop": early_stop,
        },
    )


def test_a_run_that_stops_leaves_a_checkpoint_a_reason_and_an_evaluation(tmp_path: Path) -> None:
    settings = _settings(empty_steps=2)
    store = RunStore.create(tmp_path / "run", dump_yaml(settings), {})
    Trainer(settings, store).run()
    reason = "the filter kept nothing for 2 steps in a row"
    assert store.finished == f"stopped early after step 2: {reason}"
    last = store.steps()[-1]
    assert last.step == 2 and last.notes[-1] == f"stopped early: {reason}"
    assert "validation/success" in last.metrics and "groups/rv_mean" in last.metrics
    assert [path.name for path in store.checkpoints.glob("step_*")] == ["step_000002"]
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    Trainer(settings, RunStore.open(tmp_path / "run")).run()  # asked to go on, it finds the same reason and trains no further
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
