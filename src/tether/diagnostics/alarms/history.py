"""What a run had on record at a step: its numbers as series, its texts as counts, and nothing from later steps."""

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tether.diagnostics.alarms.text import Reasoning, repeated_part
from tether.diagnostics.alarms.trend import Stretch
from tether.runs.schema import StepRecord

INFORMATION = "information/mi_seq / log(prompts)"
"""MI-Seq-Est as a share of its ceiling, so that measurements on different numbers of prompts compare."""
BUDGET = "rollout/response_tokens_max"


@dataclass(frozen=True, slots=True)
class TextCount:
    """The reasonings of one step, and how many of them repeat themselves."""

    step: int
    total: int
    degenerate: int


@dataclass(frozen=True, slots=True)
class History:
    """The record up to and including the last of `steps`."""

    steps: tuple[int, ...]
    texts: tuple[TextCount, ...]
    _series: Mapping[str, Stretch]

    @classmethod
    def of(cls, records: Sequence[StepRecord], reasonings: Sequence[Reasoning], repeated: float) -> "History":
        """`repeated` is the part of a text above which it counts as degenerate."""
        # A run's last step is on file twice, without and with its validation; the later line replaces the earlier.
        in_order = [record for _, record in sorted({record.step: record for record in records}.items())]
        columns: dict[str, list[tuple[int, float]]] = {}
        for record in in_order:
            for name, value in (record.metrics | _derived(record.metrics)).items():
                columns.setdefault(name, []).append((record.step, value))
        series = {name: Stretch(tuple(step for step, _ in column), tuple(value for _, value in column)) for name, column in columns.items()}
        texts = _counted(reasonings, repeated) or _recorded(in_order)
        steps = sorted({record.step for record in in_order} | {count.step for count in texts})
        return cls(tuple(steps), texts, series)

    def until(self, step: int) -> "History":
        """What was known at an earlier step."""
        steps = self.steps[: bisect.bisect_right(self.steps, step)]
        return History(steps, tuple(count for count in self.texts if count.step <= step), self._series)

    def __getitem__(self, metric: str) -> Stretch:
        """One number of the run, where it was measured; empty where it never was."""
        series = self._series.get(metric)
        return series.until(self.steps[-1]) if series and self.steps else Stretch((), ())


def _derived(metrics: Mapping[str, float]) -> dict[str, float]:
    if "information/mi_seq" not in metrics or metrics.get("information/num_prompts", 0) < 2:
        return {}
    return {INFORMATION: metrics["information/mi_seq"] / math.log(metrics["information/num_prompts"])}


def _counted(reasonings: Sequence[Reasoning], repeated: float) -> tuple[TextCount, ...]:
    written = [reasoning for reasoning in reasonings if reasoning.text.strip()]
    total = Counter(reasoning.step for reasoning in written)
    degenerate = Counter(reasoning.step for reasoning in written if repeated_part(reasoning.text, reasoning.prompt) > repeated)
    return tuple(TextCount(step, total[step], degenerate[step]) for step in sorted(total))


def _recorded(records: Sequence[StepRecord]) -> tuple[TextCount, ...]:
    """What a run counted itself while it had the texts at hand."""
    counted = [record for record in records if "rollout/repeated_text" in record.metrics and record.metrics.get("rollout/reasonings")]
    return tuple(
        TextCount(
            record.step,
            round(record.metrics["rollout/reasonings"]),
            round(record.metrics["rollout/repeated_text"] * record.metrics["rollout/reasonings"]),
        )
        for record in counted
    )
