"""The alarms of a whole run, read back from its step records.

A record holds the alarms that stood at its step. This module groups them by name: the spans of steps at which each alarm stood and its
severity there; the evidence, likely cause and remedy at the last step it stood; and the actions, which the run wrote down as notes of the
form "tighten_filter for information_falls: the filter keeps 0.8 from now on, instead of 0.9".
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.core.alarms import AlarmName, Evidence, Severity
from tether.core.text import visible
from tether.runs.schema import StepRecord

CRITICAL = Severity.CRITICAL.value
_ACTION = re.compile(r"(?P<action>\w+) for (?P<alarm>\w+): (?P<outcome>.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AlarmSpan:
    """Consecutive steps at which an alarm stood with one severity."""

    first: int
    last: int
    severity: str

    def __str__(self) -> str:
        return f"{self.severity} at {f'step {self.first}' if self.first == self.last else f'steps {self.first}–{self.last}'}"


@dataclass(frozen=True, slots=True)
class AlarmSummary:
    """One alarm, over the whole run."""

    name: str
    spans: tuple[AlarmSpan, ...]
    stands: bool
    """At the run's last step."""
    evidence: tuple[str, ...]
    """As of the last step it stood, as are the two below."""
    cause: str
    remedy: str
    metrics: frozenset[str]
    """The metrics of its evidence."""
    actions: tuple[tuple[int, str], ...]
    """The step and the action."""

    @property
    def title(self) -> str:
        """Its name in words."""
        return visible(self.name.replace("_", " "))

    @property
    def severity(self) -> str:
        """The highest severity it ever had."""
        severities = [span.severity for span in self.spans]
        return CRITICAL if CRITICAL in severities else severities[-1]

    @property
    def when(self) -> str:
        """All its spans. Example: "warning at steps 12–14, critical at steps 15–20"."""
        return ", ".join(str(span) for span in self.spans)

    @property
    def is_about_input(self) -> bool:
        """Whether the alarm is about the dependence of the reasoning on its input."""
        return any(metric.startswith("information/") for metric in self.metrics)


def alarm_history(records: Sequence[StepRecord]) -> list[AlarmSummary]:
    """Every alarm that ever stood: critical ones first, then those that still stand, then in the order they began."""
    standing: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for place, record in enumerate(records):
        for data in record.alarms:
            standing.setdefault(str(data["name"]), []).append((place, data))
    alarms = []
    for name, found in standing.items():
        last_place, last = found[-1]
        metrics = {str(item["metric"]).partition(" ")[0] for item in last["evidence"]}
        if name == AlarmName.REPEATED_TEXT:  # its evidence pools several steps; this metric is the same of one step
            metrics = {"rollout/repeated_text"}
        evidence = tuple(Evidence.from_json(item).words("–") for item in last["evidence"])
        said = (evidence, str(last["cause"]), str(last["remedy"]), frozenset(metrics), _actions(name, records))
        alarms.append(AlarmSummary(name, _spans(found, records), last_place == len(records) - 1, *said))
    return sorted(alarms, key=lambda alarm: (alarm.severity != CRITICAL, not alarm.stands, alarm.spans[0].first))


def are_recorded(records: Sequence[StepRecord]) -> bool:
    """Whether the run checked for alarms at all; runs of old versions did not."""
    return any(f"alarms/{CRITICAL}" in record.metrics for record in records)


def _spans(found: Sequence[tuple[int, Mapping[str, Any]]], records: Sequence[StepRecord]) -> tuple[AlarmSpan, ...]:
    spans: list[AlarmSpan] = []
    before: int | None = None
    for place, data in found:
        step, severity = records[place].step, str(data["severity"])
        if spans and before == place - 1 and spans[-1].severity == severity:
            spans[-1] = AlarmSpan(spans[-1].first, step, severity)
        else:
            spans.append(AlarmSpan(step, step, severity))
        before = place
    return tuple(spans)


def _actions(name: str, records: Sequence[StepRecord]) -> tuple[tuple[int, str], ...]:
    """The notes on the actions of an alarm, at the steps it stood."""
    return tuple(
        (record.step, f"{found['action'].replace('_', ' ')}: {found['outcome']}")
        for record in records
        if any(data["name"] == name for data in record.alarms)
        for note in record.notes
        if (found := _ACTION.fullmatch(note)) and found["alarm"] == name
    )
