"""The alarms of a run over its whole course, read back from its step records.

A record holds the alarms that stood at its step. Here they are gathered by name: the spans of steps at which each stood, and how grave it
was then; the evidence, likely cause and remedy as of the last step it stood; and what was done about it, which the run wrote down as notes
of the form "tighten_filter for information_falls: the filter keeps 0.8 from now on, instead of 0.9".
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.runs.schema import StepRecord

CRITICAL = "critical"
_ACTION = re.compile(r"(?P<action>\w+) for (?P<alarm>\w+): (?P<outcome>.+)", re.DOTALL)
_REPEATED_TEXT = "repeated_text"
"""Its evidence is a count over several steps; `rollout/repeated_text` is the same of one step."""


@dataclass(frozen=True, slots=True)
class Span:
    """Steps at which an alarm stood without a break, equally grave."""

    first: int
    last: int
    severity: str

    def __str__(self) -> str:
        return f"{self.severity} at {f'step {self.first}' if self.first == self.last else f'steps {self.first}–{self.last}'}"


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm, over the whole run."""

    name: str
    spans: tuple[Span, ...]
    stands: bool
    """At the run's last step."""
    evidence: tuple[str, ...]
    """As of the last step it stood, as are the two below."""
    cause: str
    remedy: str
    metrics: frozenset[str]
    """What its evidence was measured in."""
    actions: tuple[tuple[int, str], ...]
    """The step and what was done."""

    @property
    def title(self) -> str:
        """Its name in words."""
        return self.name.replace("_", " ")

    @property
    def severity(self) -> str:
        """The gravest it ever was."""
        severities = [span.severity for span in self.spans]
        return CRITICAL if CRITICAL in severities else severities[-1]

    @property
    def when(self) -> str:
        """All its spans. Example: "warning at steps 12–14, critical at steps 15–20"."""
        return ", ".join(str(span) for span in self.spans)

    @property
    def is_about_input(self) -> bool:
        """It says that reasoning comes loose from its input."""
        return any(metric.startswith("information/") for metric in self.metrics)


def alarm_history(records: Sequence[StepRecord]) -> list[Alarm]:
    """Every alarm that ever stood: critical ones first, then those that still stand, then in the order they began."""
    standing: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for place, record in enumerate(records):
        for data in record.alarms:
            standing.setdefault(str(data["name"]), []).append((place, data))
    alarms = [_alarm(name, found, records) for name, found in standing.items()]
    return sorted(alarms, key=lambda alarm: (alarm.severity != CRITICAL, not alarm.stands, alarm.spans[0].first))


def are_recorded(records: Sequence[StepRecord]) -> bool:
    """Whether the run watched for alarms at all; older ones did not."""
    return any(f"alarms/{CRITICAL}" in record.metrics for record in records)


def _alarm(name: str, found: Sequence[tuple[int, Mapping[str, Any]]], records: Sequence[StepRecord]) -> Alarm:
    last_place, last = found[-1]
    metrics = {str(item["metric"]).partition(" ")[0] for item in last["evidence"]}
    if name == _REPEATED_TEXT:
        metrics = {"rollout/repeated_text"}
    return Alarm(
        name=name,
        spans=_spans(found, records),
        stands=last_place == len(records) - 1,
        evidence=tuple(_in_words(item) for item in last["evidence"]),
        cause=str(last["cause"]),
        remedy=str(last["remedy"]),
        metrics=frozenset(metrics),
        actions=_actions(name, records),
    )


def _spans(found: Sequence[tuple[int, Mapping[str, Any]]], records: Sequence[StepRecord]) -> tuple[Span, ...]:
    spans: list[Span] = []
    before: int | None = None
    for place, data in found:
        step, severity = records[place].step, str(data["severity"])
        if spans and before == place - 1 and spans[-1].severity == severity:
            spans[-1] = Span(spans[-1].first, step, severity)
        else:
            spans.append(Span(step, step, severity))
        before = place
    return tuple(spans)


def _actions(name: str, records: Sequence[StepRecord]) -> tuple[tuple[int, str], ...]:
    """The notes that say what was done about an alarm, at the steps it stood."""
    done = []
    for record in records:
        if not any(data["name"] == name for data in record.alarms):
            continue
        for note in record.notes:
            found = _ACTION.fullmatch(note)
            if found and found["alarm"] == name:
                done.append((record.step, f"{found['action'].replace('_', ' ')}: {found['outcome']}"))
    return tuple(done)


def _in_words(item: Mapping[str, Any]) -> str:
    """One piece of evidence. Example: "groups/rv_mean 0.01 in steps 41–48, 0.2 in steps 1–10 (rank-sum p = 0.00002)"."""
    words = f"{item['metric']} {item['value']:.3g} in {_steps(item['steps'])}"
    if item.get("reference") is not None and item.get("reference_steps"):
        words += f", {item['reference']:.3g} in {_steps(item['reference_steps'])}"
    return f"{words} ({item['test']})"


def _steps(ends: Sequence[int]) -> str:
    return f"steps {ends[0]}–{ends[1]}"
