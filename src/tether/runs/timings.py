"""Time and memory of a run: the record of a step, and its view in a report.

These numbers differ between two runs of one seed, so they have a file of their own, and no metric follows from them. Older runs hold seconds
and one rate only; whatever a record lacks is left out of the view. The charts are those of the metrics: a step's timings are put into the
form of a step's metrics, under names that no metric has.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from tether.core.errors import BadInput
from tether.core.text import short_repr
from tether.runs.panels import COST, WORDS, Style
from tether.runs.schema import StepRecord

GB = 1e9

STAGES = tuple(series.label for series in COST.panels[0].series if series.style is Style.SHARE)
"""The stages of a step in their order."""


@dataclass(frozen=True, slots=True)
class StepTimings:
    """What one step cost.

    Example: StepTimings({"rollout": 3.1, "update": 5.0}, 900.0, 4100.0, {"rollout": 0.02, "update": 0.31}).
    """

    seconds: dict[str, float] = field(default_factory=dict)
    """By stage."""
    tokens_per_second: float | None = None
    """Sampled in the rollout."""
    update_tokens_per_second: float | None = None
    """Put through the model in the update, forwards and backwards, no padding."""
    share_of_peak: dict[str, float] = field(default_factory=dict)
    """By stage: operations of the model a second / those of a large matrix product on the device."""
    peak_memory: dict[str, int] = field(default_factory=dict)
    """Bytes by stage: allocated on a card; elsewhere the most the process has taken by then."""
    unused_memory: int | None = None
    """Bytes of a card that torch held at the end and no tensor used."""
    engine: dict[str, float] = field(default_factory=dict)
    """What the engine counted in the rollout."""
    background: dict[str, float] = field(default_factory=dict)
    """Seconds of work beside the stages that ended in this step: `checkpoint` is the writing of one, `rollout` the sampling of the step's
    batch, while training went on."""

    def to_json(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in named.items() if value is not None and value != {}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "StepTimings":
        """From a line of timings.jsonl; keys that are not known are passed over, as older and newer versions write others."""
        given = {name: data[name] for name in cls.__dataclass_fields__ if data.get(name) is not None}
        for name, value in given.items():
            is_one, numbers = name in _NUMBERS, value.values() if isinstance(value, dict) else [value]
            # A line may have come from anywhere, and JSON has whole numbers that no float holds.
            if isinstance(value, dict) == is_one or not all(
                type(one) in (int, float) and abs(one) <= sys.float_info.max for one in numbers
            ):
                form = "a number" if is_one else "numbers by name"
                raise BadInput(f"timings.jsonl, step {data.get('step')}: {name} is {short_repr(value)}; expected {form}; delete that line")
        return cls(**given)


_NUMBERS = ("tokens_per_second", "update_tokens_per_second", "unused_memory")


@dataclass(frozen=True, slots=True)
class StageTime:
    """One row of the table of times."""

    stage: str
    total: str
    per_step: str
    share: float
    memory: str
    """The most of any step; empty where it was not measured."""


def as_records(timings: Sequence[Mapping[str, Any]]) -> list[StepRecord]:
    """Timings in the form of metrics, for the panels of COST; a stage that a step did not have took no time."""
    records = []
    read = [StepTimings.from_json(line) for line in timings]
    present = [stage for stage in STAGES if any(stage in found.seconds for found in read)]
    for line, found in zip(timings, read, strict=True):
        metrics = {f"seconds/{stage}": found.seconds.get(stage, 0.0) for stage in present}
        metrics["seconds/all"] = sum(found.seconds.values())
        metrics |= {f"share/{stage}": share for stage, share in found.share_of_peak.items()}
        metrics |= {f"memory/{stage}": size / GB for stage, size in found.peak_memory.items()}
        for name, value in (("rate/rollout", found.tokens_per_second), ("rate/update", found.update_tokens_per_second)):
            metrics |= {name: value} if value is not None else {}
        metrics |= {"memory/unused": found.unused_memory / GB} if found.unused_memory is not None else {}
        records.append(StepRecord(int(line["step"]), metrics))
    return records


def stage_times(timings: Sequence[Mapping[str, Any]]) -> list[StageTime]:
    """Seconds by stage, the longest first."""
    totals: dict[str, float] = {}
    memory: dict[str, int] = {}
    for line in timings:
        found = StepTimings.from_json(line)
        for stage, seconds in found.seconds.items():
            totals[stage] = totals.get(stage, 0.0) + float(seconds)
        for stage, size in found.peak_memory.items():
            memory[stage] = max(memory.get(stage, 0), size)
    whole = sum(totals.values())
    return [
        StageTime(
            stage,
            _duration(total),
            _duration(total / len(timings)),
            total / whole if whole else 0.0,
            f"{memory[stage] / GB:.3g} GB" if stage in memory else "",
        )
        for stage, total in sorted(totals.items(), key=lambda item: -item[1])
    ]


def mean_rates(timings: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What to say of the other numbers: their means over the steps that have them."""
    found = [StepTimings.from_json(line) for line in timings]
    values: dict[str, list[float]] = {
        "tokens sampled per second": [step.tokens_per_second for step in found if step.tokens_per_second is not None],
        "tokens trained per second": [step.update_tokens_per_second for step in found if step.update_tokens_per_second is not None],
    }
    rows = [(label, f"{fmean(seen):,.0f}") for label, seen in values.items() if seen]
    for stage in STAGES:
        shares = [step.share_of_peak[stage] for step in found if stage in step.share_of_peak]
        rows += [(f"share of the device's peak in the {stage}", f"{fmean(shares):.1%}")] if shares else []
    for name, words in WORDS["engine"].items():
        counts = [step.engine[name] for step in found if name in step.engine]
        rows += [(f"{words}, per step", f"{fmean(counts):,.0f}")] if counts else []
    return rows


def token_account(records: Sequence[StepRecord]) -> str:
    """What became of the tokens of a run, in one line; empty where no step says so.

    Example: "12,000 tokens sampled, 4,000 trained on: 3.00 sampled per token trained on; 1,500 went to prompts that were not continued".
    """
    told = [record.metrics for record in records if {"groups/tokens_trained", "rollout/tokens_sampled"} <= record.metrics.keys()]
    sampled, trained, decisions = (
        sum(metrics.get(name, 0.0) for metrics in told)
        for name in ("rollout/tokens_sampled", "groups/tokens_trained", "groups/tokens_decisions")
    )
    if not sampled:
        return ""
    words = f"{sampled:,.0f} tokens sampled, {trained:,.0f} trained on"
    words += f": {sampled / trained:.2f} sampled per token trained on" if trained else ""
    return words + (f"; {decisions:,.0f} went to prompts that were not continued" if decisions else "")


def machine_words(machine: Mapping[str, Any]) -> str:
    """What a run was computed on, in one line. Example: "NVIDIA H200; 790 TFLOP/s measured in bfloat16; engine: paged"."""
    parts = [str(machine["device"])] if "device" in machine else []
    if isinstance(machine.get("peak"), int | float):
        parts.append(f"{float(machine['peak']) / 1e12:.3g} TFLOP/s measured in {machine.get('dtype', 'its type')}")
    parts += [f"engine: {machine['engine']}"] if "engine" in machine else []
    return "; ".join(parts)


def fast_path_words(machine: Mapping[str, Any]) -> list[str]:
    """The fast-path report of a run, a line for the choices and one for each reason that a slow way was taken; empty where none is on record.

    Example: ["Fast path: decoder paged; attention in the learner packed; scorer shared prefix; head fused."].
    """
    found = machine.get("fast_path")
    if not isinstance(found, Mapping):
        return []
    parts = [f"{words} {found[name]}" for name, words in WORDS["fast_path"].items() if found.get(name)]
    reasons = found.get("reasons") or []
    listed = (
        [f"{part}: {reason}" for part, reason in reasons.items()] if isinstance(reasons, Mapping) else [str(reason) for reason in reasons]
    )
    return ([f"Fast path: {'; '.join(parts)}."] if parts else []) + [f"Slow way: {reason}" for reason in listed]


def _duration(seconds: float) -> str:
    """Seconds for people.

    >>> _duration(0.25), _duration(75), _duration(7260)
    ('0.25 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
