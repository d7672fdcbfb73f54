"""Early stopping: the paper's two rules (appendix B.2), and three for runs that cannot learn.

- The reward variance stays below a share of its mean over the first steps: there is no signal left, only noise moves the weights.
- Validation success stays below a floor: the policy has collapsed, or the task is out of reach.
- The filter keeps nothing for several steps in a row: no update happens at all.
- No reply was valid for several steps in a row: the model does not write the form of a reply, and training cannot teach it that.
- Several updates in a row were skipped because their gradient was not finite: the policy cannot learn any more.

The rules read the records of the run and nothing else, so a resumed run stops where an uninterrupted one would have.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tether.runs.schema import StepRecord
from tether.training.hooks import Hook
from tether.training.replies import NONE_VALID
from tether.training.settings import EarlyStopSettings

if TYPE_CHECKING:
    from tether.training.loop import Trainer


class EarlyStop(Hook):
    """Ends a run by the rules; rolled-back steps do not count."""

    def stop_reason(self, run: "Trainer") -> str | None:
        return stop_reason(run.alarm_actions.counting(run.records), run.settings.early_stop)


def stop_reason(records: Sequence[StepRecord], rules: EarlyStopSettings) -> str | None:
    """Why a run with these records (one per step, in order) should end, or None."""
    trained = [record.metrics for record in records if "groups/rv_mean" in record.metrics]
    successes = [record.metrics["validation/success"] for record in records if "validation/success" in record.metrics]
    return (
        _variance_collapsed(trained, rules)
        or _success_too_low(successes, rules)
        or _never_valid(records, rules)
        or _nothing_kept(trained, rules)
        or _not_finite(trained, rules)
    )


def _variance_collapsed(trained: list[dict[str, float]], rules: EarlyStopSettings) -> str | None:
    variances = [metrics["groups/rv_mean"] for metrics in trained]
    first, later = variances[: rules.baseline_steps], variances[rules.baseline_steps :]
    last = later[-rules.variance_steps :]
    bound = rules.variance_share * sum(first) / max(1, len(first))
    if len(last) < rules.variance_steps or max(last) >= bound:
        return None
    return (
        f"the reward variance was below {rules.variance_share:.0%} of its mean over the first {rules.baseline_steps} steps "
        f"for {rules.variance_steps} steps in a row ({last[-1]:.3g}, the bound is {bound:.3g})"
    )


def _success_too_low(successes: list[float], rules: EarlyStopSettings) -> str | None:
    last = successes[-rules.success_evaluations :]
    if len(last) < rules.success_evaluations or max(last) >= rules.success_floor:
        return None
    return f"validation success was below {rules.success_floor:.1%} in {rules.success_evaluations} evaluations in a row"


def _never_valid(records: Sequence[StepRecord], rules: EarlyStopSettings) -> str | None:
    """Steps in which nothing was sampled (every episode failed) say nothing about replies."""
    played = [record for record in records if record.metrics.get("rollout/tokens_sampled")]
    last = played[len(played) - rules.invalid_steps :] if 0 < rules.invalid_steps <= len(played) else []
    if not last or any(record.metrics["rollout/format_valid"] > 0 for record in last):
        return None
    said = next((note for note in last[-1].notes if note.startswith(NONE_VALID)), "")
    return f"no reply was valid for {rules.invalid_steps} steps in a row{said and '; in the last one '}{said}"


def _nothing_kept(trained: list[dict[str, float]], rules: EarlyStopSettings) -> str | None:
    last = trained[len(trained) - rules.empty_steps :] if 0 < rules.empty_steps <= len(trained) else []
    if not last or any(metrics["groups/kept_ratio"] > 0 for metrics in last):
        return None
    return f"the filter kept nothing for {rules.empty_steps} steps in a row"


def _not_finite(trained: list[dict[str, float]], rules: EarlyStopSettings) -> str | None:
    streak = int(trained[-1].get("update/nonfinite_streak", 0)) if trained else 0
    if not rules.nonfinite_updates or streak < rules.nonfinite_updates:
        return None
    return f"the gradient was not finite in {streak} updates in a row; lower learner.learning_rate or learner.max_grad_norm"
