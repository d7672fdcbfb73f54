"""Which steps are measured, and which are taken together.

A measurement compares prompts with each other, so it needs several. Where steps hold too few (a small batch of one prompt is common),
neighbouring steps are pooled until there are enough. Where there are more steps than are worth the cost, some are left out evenly; the
first and the last are always measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tether.core.errors import BadInput
from tether.diagnostics.audit.survey import Step, StepCounts

FEW_GROUPS = 4
"""Steps are pooled where the typical one holds fewer groups ..."""
ENOUGH_GROUPS = 8
"""... until there are about so many."""
MAX_WINDOWS = 20


@dataclass(frozen=True, slots=True)
class Window:
    """One step, or a few neighbouring ones that are measured together. Example: Window((5, 6, 7, 8)) is named "5-8"."""

    steps: tuple[Step, ...]

    @property
    def name(self) -> str:
        if self.steps == (None,):
            return "all"
        first, last = self.steps[0], self.steps[-1]
        return str(last) if first == last else f"{first}-{last}"

    @property
    def last(self) -> int:
        """Its place on the axis of a curve."""
        return self.steps[-1] or 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The windows in order, and in words what was decided."""

    windows: tuple[Window, ...]
    notes: tuple[str, ...]


def plan_windows(counts: Mapping[Step, StepCounts], asked: Sequence[int] = ()) -> Plan:
    """The windows to measure.

    Args:
        counts: of every step that was found, in order.
        asked: steps the user named; each is then a window of its own.
    """
    if asked:
        return _asked_windows(counts, asked)
    steps = [step for step in counts if counts[step].num_scope > counts[step].num_empty] or list(counts)
    silent = len(counts) - len(steps)
    notes = [f"{silent} of {len(counts)} steps hold no reasoning and were not measured"] if silent else []
    typical = sorted(counts[step].num_groups for step in steps)[len(steps) // 2]
    if len(steps) > 1 and typical < FEW_GROUPS:
        size = max(math.ceil(ENOUGH_GROUPS / max(1, typical)), math.ceil(len(steps) / MAX_WINDOWS))
        windows = _pooled(steps, size)
        prompts = "1 prompt" if typical == 1 else f"{typical} prompts"
        notes.append(f"a step holds {prompts}, too few to compare: up to {size} neighbouring steps were taken together")
        return Plan(windows, tuple(notes))
    chosen = evenly(len(steps), MAX_WINDOWS)
    if len(chosen) < len(steps):
        notes.append(f"{len(chosen)} of {len(steps)} steps were measured, evenly spread; name others with --step")
    return Plan(tuple(Window((steps[index],)) for index in chosen), tuple(notes))


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread, the first and the last among them.

    >>> evenly(9, 3)
    [0, 4, 8]
    """
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def _asked_windows(counts: Mapping[Step, StepCounts], asked: Sequence[int]) -> Plan:
    known = [step for step in counts if step is not None]
    for step in asked:
        if step not in counts:
            there = "without numbers" if not known else f"from {known[0]} to {known[-1]}"
            raise BadInput(f"step {step} is not in the rollouts, whose steps are {there}; name one that is, or leave out --step")
    return Plan(tuple(Window((step,)) for step in sorted(set(asked))), ())


def _pooled(steps: Sequence[Step], size: int) -> tuple[Window, ...]:
    """Windows of so many steps; a short rest joins the one before it."""
    starts = list(range(0, len(steps), size))
    if len(starts) > 1 and len(steps) - starts[-1] < (size + 1) // 2:
        starts.pop()
    return tuple(Window(tuple(steps[start:stop])) for start, stop in zip(starts, [*starts[1:], len(steps)], strict=True))
