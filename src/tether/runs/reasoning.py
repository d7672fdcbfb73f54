"""What a run's records say about its reasoning: the verdicts of tether.core.reasoning on every step that measured information.

Regimes are computed anew from the numbers on record, not read from it: earlier versions named one on samples of two prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tether.core.reasoning import Start, Verdict, VerdictCode, judge, recorded_evidence
from tether.runs.alarms import CRITICAL, alarm_history
from tether.runs.schema import StepRecord

NOT_MEASURED = "Whether the reasoning depends on its input was not measured in this run."


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The verdict on one step."""

    step: int
    verdict: Verdict


def step_verdicts(records: Sequence[StepRecord]) -> list[StepVerdict]:
    """The verdict on every step that measured information, in order."""
    found: list[StepVerdict] = []
    start: Start | None = None
    for record in records:
        if (evidence := recorded_evidence(record.metrics)) is not None:
            start = start or evidence.start
            found.append(StepVerdict(record.step, judge(evidence, start)))
    return found


def reasoning_label(record: StepRecord) -> str | None:
    """A step's verdict in a few words, for the live view: its regime, or that it cannot be told; None where nothing was measured.

    Example: "diverse reasoning", "cannot be told from 8 reasonings under 2 prompts".
    """
    evidence = recorded_evidence(record.metrics)
    if record.regime or evidence is None:
        return record.regime
    label = judge(evidence).label
    return label if evidence.is_sufficient else f"{label} from {evidence.num_reasonings} reasonings under {evidence.num_prompts} prompts"


def reasoning_words(records: Sequence[StepRecord]) -> list[str]:
    """The verdict on the last measurement: the headline with the regime, then the reasons, the numbers, the start and critical alarms about it."""
    found = step_verdicts(records)
    if not found:
        return [NOT_MEASURED]
    last = found[-1].verdict
    words = list(last.reasons)
    if last.code is VerdictCode.CANNOT_BE_TOLD:
        words.append("tether diagnose measures several steps together where each has few prompts.")
    if len(found) > 1:
        words.append(f"This is step {found[-1].step}; {_start_words(records, found[0])}.")
    warned = [
        alarm.title for alarm in alarm_history(records) if alarm.stands and alarm.is_about_input and alarm.spans[-1].severity == CRITICAL
    ]
    if warned:
        less = last.code in (VerdictCode.TIED, VerdictCode.WEAKLY_TIED)
        words.append(
            f"{'It depends on its input less than before' if less else 'Over several measurements'}: critical alarm {_listed(warned)}."
        )
    regime = f" Regime: {last.regime}." if last.regime is not None else ""
    return [f"{last.headline}{regime}", " ".join(words)]


def _start_words(records: Sequence[StepRecord], first: StepVerdict) -> str:
    accuracy = next(record.metrics["information/retrieval_acc"] for record in records if record.step == first.step)
    return f"at step {first.step} the prompts of {accuracy:.0%} were found ({first.verdict.label})"


def _listed(names: Sequence[str]) -> str:
    """Names in a row. Example: "one, two and three"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
