"""The record of a step: its numbers under their catalogued names, and in words what was out of the ordinary."""

from collections.abc import Mapping, Sequence

from tether.core.metrics import StepMetrics
from tether.diagnostics.monitor import Health
from tether.rollout.summary import rollout_summary
from tether.runs.schema import StepRecord
from tether.training.gather import SampledBatch


def step_record(
    step: int,
    gathered: SampledBatch,
    update: Mapping[str, float],
    health: Health,
    *,
    mixed: bool,
    repetition: Mapping[str, float],
    groups: Mapping[str, float],
    notes: Sequence[str] = (),
) -> StepRecord:
    """What a step did.

    Args:
        step: its number.
        gathered: what was sampled, and what of it was chosen.
        update: the "update/" metrics.
        health: what diagnosis found.
        mixed: whether the run plays in more than one environment.
        repetition: metrics about reasoning that repeats itself.
        groups: the "groups/" metrics.
        notes: what happened on the way.
    """
    metrics = StepMetrics()
    metrics.put("rollout", rollout_summary(gathered.groups, mixed=mixed))
    metrics.put("rollout", repetition)
    metrics.put("groups", groups)
    metrics.put("update", update)
    for section, values in health.metrics.items():
        metrics.put(section, values)
    return StepRecord(step, dict(metrics), health.regime, [*notes, *health.notes, *_remarks(gathered, update)])


def _remarks(gathered: SampledBatch, update: Mapping[str, float]) -> list[str]:
    remarks = []
    if update["skipped"] and gathered.chosen:
        remarks.append("no kept episode holds a response: nothing to learn from, the update was skipped")
    if not gathered.chosen:
        flat = gathered.selection.zero_variance
        remarks.append(f"the filter kept none of {len(gathered.groups)} groups ({flat} without reward variance); the update was skipped")
    if update.get("nonfinite"):
        remarks.append(f"{update['nonfinite']:.0f} updates were left out: their gradient was not finite")
    return remarks
