"""`AlarmTracker`: which alarms stand at the last step of a run, and since when.

A rule is a pure function of the history up to a step, so its answer for an earlier step never changes while that history stands. The
tracker therefore asks every rule once per step and remembers the answers: an alarm that stood at the step before keeps its beginning, any
other begins now. The cost of a step does not grow with the time for which an alarm has been standing. Answers are computed again only
where the history itself changes: where a step is recorded a second time, or where steps are rolled back.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tether.core.alarms import Alarm, AlarmName
from tether.diagnostics.alarms.history import History
from tether.diagnostics.alarms.repetition import repetition_metrics
from tether.diagnostics.alarms.rules import RULES
from tether.diagnostics.settings import AlarmRules
from tether.runs.schema import StepRecord


class AlarmTracker:
    """The alarms of a run, step by step."""

    def __init__(self, rules: AlarmRules | None = None) -> None:
        self.rules = rules or AlarmRules()
        self._history = History()
        self._standing: dict[int, list[Alarm]] = {}
        """The alarms at each step on record, in the order of the steps."""

    @property
    def alarms(self) -> list[Alarm]:
        """The alarms that stand at the last step, earliest first; those that began together in the order of AlarmName."""
        return list(self._standing[self._history.steps[-1]]) if self._standing else []

    @property
    def new_alarms(self) -> list[Alarm]:
        """Those of them that begin at the last step."""
        return [alarm for alarm in self.alarms if alarm.began == self._history.steps[-1]]

    def add(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Record a step and return the alarms that stand at the last step on record. A step that is on record already is replaced."""
        self._append(self._pop_from(step) | {step: metrics})
        return self.alarms

    def replay(self, records: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Record the (step, metrics) of an earlier part of the run, in any order; the last entry of a step counts."""
        for step, metrics in sorted(dict(records).items()):
            self.add(step, metrics)

    def forget(self, first: int, last: int) -> None:
        """Remove the steps `first` to `last`, both included; they no longer count for any rule."""
        self._append({step: metrics for step, metrics in self._pop_from(first).items() if step > last})

    def steps_standing(self) -> dict[AlarmName, list[int]]:
        """For every alarm that ever stood, the steps at which it did."""
        stood: dict[AlarmName, list[int]] = defaultdict(list)
        for step, alarms in self._standing.items():
            for alarm in alarms:
                stood[alarm.name].append(step)
        return {name: stood[name] for name in AlarmName if name in stood}

    def _pop_from(self, first: int) -> dict[int, Mapping[str, float]]:
        """Remove all steps from `first` on, with their answers; the answers for earlier steps do not depend on them."""
        for step in [step for step in reversed(self._standing) if step >= first]:
            del self._standing[step]
        return dict(self._history.pop_from(first))

    def _append(self, records: Mapping[int, Mapping[str, float]]) -> None:
        for step in sorted(records):
            began = {alarm.name: alarm.began for alarm in self.alarms}
            self._history.append(step, records[step])
            alarms = []
            for name in AlarmName:
                rule = RULES[name]
                if finding := rule.check(self._history, self.rules):
                    advice = finding.advice or rule.advice
                    alarms.append(Alarm(name, finding.severity, began.get(name, step), finding.evidence, advice.cause, advice.remedy))
            self._standing[step] = sorted(alarms, key=lambda alarm: alarm.began)  # stable: equals stay in the order of AlarmName


@dataclass(frozen=True, slots=True)
class StepReasoning:
    """One reasoning of a step and its prompt, as text. Example: StepReasoning(12, "Board: ...", "The box is left of the target.")."""

    step: int
    prompt: str
    text: str


def check(records: Sequence[StepRecord], reasonings: Sequence[StepReasoning] = (), rules: AlarmRules | None = None) -> list[Alarm]:
    """The alarms that stand at the last of these records, earliest first; those that began together in the order of AlarmName.

    `records` may be in any order; of one step the last record counts. The rule on repeated text reads the counts on record. For a run
    without them, give the `reasonings` of the recent steps: whole steps, `rules.text_steps` of them or more.
    """
    return _tracked(records, reasonings, rules).alarms


def steps_standing(records: Sequence[StepRecord]) -> dict[AlarmName, list[int]]:
    """The whole run in hindsight: for every alarm that ever stood, the steps at which `check` would have raised it."""
    return _tracked(records, (), None).steps_standing()


def _tracked(records: Sequence[StepRecord], reasonings: Sequence[StepReasoning], rules: AlarmRules | None) -> AlarmTracker:
    tracker = AlarmTracker(rules)
    metrics = {record.step: dict(record.metrics) for record in records}
    texts: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for item in reasonings:
        if item.text.strip():
            texts[item.step].append((item.text, item.prompt))
    if texts:  # texts take precedence over the counts on record
        counts = ("rollout/reasonings", "rollout/repeated_text")
        metrics = {step: {n: v for n, v in values.items() if n not in counts} for step, values in metrics.items()}
    for step, written in texts.items():
        counted = repetition_metrics(written, tracker.rules.repeated_part)
        metrics.setdefault(step, {}).update({f"rollout/{name}": value for name, value in counted.items()})
    tracker.replay(metrics.items())
    return tracker
