"""Early stopping: the paper's two rules (appendix B.2), and three for runs that cannot learn.

- The reward variance stays below a share of its mean over the first steps: there is no signal left, only noise moves the weights.
- Validation success stays below a floor: the policy has collapsed, or the task is out of reach.
- The filter keeps nothing for several steps in a row: no update happens at all.
- No reply was valid for several steps in a row: the model does not write the form of a reply, and training cannot teach it that.
- Several updates in a row were skipped because their gradient was not finite: the policy cannot learn any more.

The rules read the records of the run and nothing else, so a resumed run stops where an uninterrupted one would have. They need the first steps and
the last few, so that is all that is kept of the records: a step costs the same however long the run is.
"""

import copy
from collections import deque
from collections.abc import Iterable

from tether.runs.schema import StepRecord
from tether.training.alarm_actions import AlarmActions
from tether.training.hooks import Hook, Run
from tether.training.replies import NONE_VALID
from tether.training.settings import EarlyStopSettings


class EarlyStop(Hook):
    """Ends a run by the rules; rolled-back steps do not count."""

    def __init__(self, actions: AlarmActions) -> None:
        self._actions = actions
        self._evidence: Evidence | None = None
        self._rolled_back: list[tuple[int, int]] = []
        """The stretches that the evidence leaves out."""
        self._read = 0
        """How many of the run's records were looked at."""

    def stop_reason(self, run: Run) -> str | None:
        """The last record may still be amended, so it is added to a copy of the evidence; all earlier ones are final."""
        actions = self._actions
        if self._evidence is None or self._rolled_back != actions.rolled_back:  # a rollback takes back steps that were counted
            self._evidence, self._rolled_back, self._read = Evidence(run.settings.early_stop), list(actions.rolled_back), 0
        final = len(run.records) - 1
        for record in actions.counting(run.records[self._read : final]):
            self._evidence.add(record)
        self._read = max(final, 0)
        now = copy.deepcopy(self._evidence)
        for record in actions.counting(run.records[-1:]):
            now.add(record)
        return now.stop_reason()


def stop_reason(records: Iterable[StepRecord], rules: EarlyStopSettings) -> str | None:
    """Why a run with these records (one per step, in order) should end, or None."""
    evidence = Evidence(rules)
    for record in records:
        evidence.add(record)
    return evidence.stop_reason()


class Evidence:
    """What the rules need of a run's records: each window holds as many values as its rule asks for in a row."""

    def __init__(self, rules: EarlyStopSettings) -> None:
        self._rules = rules
        self._baseline: list[float] = []
        """Reward variances of the first steps that trained."""
        self._variances: deque[float] = deque(maxlen=rules.variance_steps)
        """Those of the last ones after them."""
        self._successes: deque[float] = deque(maxlen=rules.success_evaluations)
        self._played: deque[StepRecord] = deque(maxlen=rules.invalid_steps)
        """Steps in which nothing was sampled (every episode failed) say nothing about replies, and are left out."""
        self._trained: deque[dict[str, float]] = deque(maxlen=rules.empty_steps)
        self._nonfinite_streak = 0

    def add(self, record: StepRecord) -> None:
        """Take in the next record."""
        metrics = record.metrics
        if "groups/rv_mean" in metrics:  # a step that trained
            full = len(self._baseline) == self._rules.baseline_steps
            (self._variances if full else self._baseline).append(metrics["groups/rv_mean"])
            self._trained.append(metrics)
            self._nonfinite_streak = int(metrics.get("update/nonfinite_streak", 0))
        if "validation/success" in metrics:
            self._successes.append(metrics["validation/success"])
        if metrics.get("rollout/tokens_sampled"):
            self._played.append(record)

    def stop_reason(self) -> str | None:
        """Why the run should end, or None."""
        rules, played, streak = self._rules, self._played, self._nonfinite_streak
        bound = rules.variance_share * sum(self._baseline) / max(1, len(self._baseline))
        if len(self._variances) == rules.variance_steps and max(self._variances) < bound:
            return (
                f"the reward variance was below {rules.variance_share:.0%} of its mean over the first {rules.baseline_steps} steps "
                f"for {rules.variance_steps} steps in a row ({self._variances[-1]:.3g}, the bound is {bound:.3g})"
            )
        if len(self._successes) == rules.success_evaluations and max(self._successes) < rules.success_floor:
            return f"validation success was below {rules.success_floor:.1%} in {rules.success_evaluations} evaluations in a row"
        if 0 < rules.invalid_steps == len(played) and not any(record.metrics["rollout/format_valid"] > 0 for record in played):
            said = next((note for note in played[-1].notes if note.startswith(NONE_VALID)), "")
            return f"no reply was valid for {rules.invalid_steps} steps in a row{said and '; in the last one '}{said}"
        if 0 < rules.empty_steps == len(self._trained) and not any(metrics["groups/kept_ratio"] > 0 for metrics in self._trained):
            return f"the filter kept nothing for {rules.empty_steps} steps in a row"
        if 0 < rules.nonfinite_updates <= streak:
            return f"the gradient was not finite in {streak} updates in a row; lower learner.learning_rate or learner.max_grad_norm"
        return None
