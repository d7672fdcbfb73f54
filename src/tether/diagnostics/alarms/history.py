"""The history that the alarm rules read: one series per metric, up to and including a step.

The history grows by one step at a time. `until` gives the history as it was at an earlier step; it shares the series with the whole.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tether.diagnostics.alarms.shifts import Stretch

INFORMATION = "information/mi_seq / log(prompts)"
"""MI-Seq-Est as a share of its ceiling, so that measurements on different numbers of prompts compare."""
LONGEST_RESPONSE = "rollout/response_tokens_max"
REASONINGS, REPEATED = "rollout/reasonings", "rollout/repeated_text"

METRICS = frozenset(
    {
        "groups/rv_mean",
        "information/chance",
        "information/h_conditional",
        "information/mi_seq",
        "information/num_prompts",
        "information/retrieval_acc",
        "rollout/format_valid",
        "rollout/reasoning_tokens",
        "rollout/response_tokens",
        "rollout/success",
        INFORMATION,
        LONGEST_RESPONSE,
        REASONINGS,
        REPEATED,
    }
)
"""What the rules read. Other metrics are not kept."""


@dataclass(frozen=True, slots=True)
class TextCount:
    """The number of reasonings of one step, and of the degenerate ones among them."""

    step: int
    total: int
    degenerate: int


class History:
    """The metrics of a run's steps, in order."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._series: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in METRICS}
        self._end = math.inf

    @property
    def steps(self) -> Sequence[int]:
        """The steps on record."""
        return self._steps[: bisect.bisect_right(self._steps, self._end)]

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step after all others."""
        assert not self._steps or step > self._steps[-1], "steps are added in order"
        self._steps.append(step)
        for name, value in (dict(metrics) | _derived(metrics)).items():
            if name in METRICS:
                steps, values = self._series[name]
                steps.append(step)
                values.append(value)

    def drop_from(self, step: int) -> None:
        """Remove this step and all later ones."""
        for steps, values in ((self._steps, None), *self._series.values()):
            keep = bisect.bisect_left(steps, step)
            del steps[keep:]
            if values is not None:
                del values[keep:]

    def until(self, step: int) -> "History":
        """The history as it was at an earlier step."""
        earlier = History()
        earlier._steps, earlier._series, earlier._end = self._steps, self._series, step
        return earlier

    def __getitem__(self, metric: str) -> Stretch:
        """The measurements of one metric; empty where it was never measured."""
        steps, values = self._series[metric]
        count = bisect.bisect_right(steps, self._end)
        return Stretch(tuple(steps[:count]), tuple(values[:count]))

    def texts(self, count: int) -> list[TextCount]:
        """The last `count` steps with reasonings; fewer where fewer are on record."""
        steps, shares = self._series[REPEATED]
        counted: list[TextCount] = []
        totals = dict(zip(*self._series[REASONINGS], strict=True)) if steps else {}
        for place in reversed(range(bisect.bisect_right(steps, self._end))):
            if len(counted) == count:
                break
            if total := totals.get(steps[place]):
                counted.append(TextCount(steps[place], round(total), round(shares[place] * total)))
        return counted[::-1]


def _derived(metrics: Mapping[str, float]) -> dict[str, float]:
    if "information/mi_seq" not in metrics or metrics.get("information/num_prompts", 0) < 2:
        return {}
    return {INFORMATION: metrics["information/mi_seq"] / math.log(metrics["information/num_prompts"])}
