"""The verdict on a run in plain words: the sentences at the top of a report and its key figures.

Two claims are made, and each only as far as the numbers support it. Success changed: only if the 95% interval of the difference leaves
out zero (Newcombe's hybrid of the two Wilson intervals, which treats the two measurements as independent; they share their prompts,
so it errs on the careful side). Reasoning is tied to its input: by the rules of tether.core.reasoning, as everywhere, computed anew from the
numbers on record, because earlier versions named a regime on samples of two prompts. What keeps a run from
learning, alarms that stand at the end, measurements that failed and what was never measured are said.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tether.core.evidence import Start, recorded_evidence
from tether.core.metrics import wilson_interval
from tether.core.reasoning import Verdict, VerdictCode, judge
from tether.core.shares import exact_percent, interval_words, percent
from tether.runs.alarms import CRITICAL, alarm_history, are_recorded
from tether.runs.causes import cause_words
from tether.runs.schema import StepRecord

MINUS = "−"
NOT_MEASURED = "Whether the reasoning depends on its input was not measured in this run."
_MEASUREMENTS = {
    "information": ("Measuring information", ("diagnosis failed", "diagnosis (first_turn)")),
    "information_trajectory": ("Measuring information over trajectories", ("diagnosis (trajectory)",)),
    "information_turn": ("Measuring information over turns", ("diagnosis (turn)",)),
    "information_calls": ("Measuring tool calls", ("diagnosis (calls_first_turn)",)),
    "information_calls_trajectory": ("Measuring tool calls over trajectories", ("diagnosis (calls_trajectory)",)),
    "information_calls_turn": ("Measuring tool calls over turns", ("diagnosis (calls_turn)",)),
    "gradients": ("The gradient decomposition", ("gradient decomposition",)),
}
"""Section of metrics to what is measured there, and how notes begin that say why it failed."""
ENV_ERRORS = "episodes ended by an environment error and were left out"
"""What a note of a step says about episodes that failed: "3 of 8 episodes ... left out, all with: reset: OSError: no such file"."""
_ENV_ERRORS = re.compile(rf"(validation: )?(\d+) of (\d+) {ENV_ERRORS}, [\w ]+? with: (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Rate:
    """A measured share with its interval, such as validation success at one step."""

    step: int
    value: float
    low: float
    high: float
    count: int | None
    """What it was measured on; None if that was not recorded."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One key figure. Example: Tile("Validation success", "64%", "58% to 70%; 31% at the start")."""

    label: str
    value: str
    note: str


def verdict(records: Sequence[StepRecord]) -> list[str]:
    """The headline of one run, a sentence or two per claim."""
    if not records:
        return ["No step was recorded, so there is no verdict yet."]
    return [
        _success_words(records),
        *reasoning_words(records),
        *cause_words(records),
        *_error_words(records),
        *_alarm_words(records),
        *failures(records).values(),
    ]


def comparison(runs: Mapping[str, Sequence[StepRecord]]) -> str:
    """Which run validates best at its end, and whether that is more than chance between the best two."""
    finals = sorted(
        ((rates[-1], name) for name, records in runs.items() if (rates := validation(records))), key=lambda pair: -pair[0].value
    )
    if len(finals) < 2:
        return "Fewer than two of these runs recorded validation, so their success cannot be ranked."
    (best, best_name), (second, second_name) = finals[:2]
    low, high = difference_interval(second, best)
    lead = f"{best_name} ends with {percent(best.value)} validation success, {second_name} with {percent(second.value)}"
    gap = f"{points(second.value, best.value)}, 95% interval {_signed(low)} to {_signed(high)}"
    if low <= 0 <= high:
        return f"{lead} ({gap}). The interval includes zero: the data do not tell the best two apart."
    return f"{lead} ({gap}): {best_name} is ahead beyond chance."


def validation(records: Sequence[StepRecord]) -> list[Rate]:
    """Every validation of a run, with the recorded intervals."""
    rates = []
    for record in records:
        if (value := record.metrics.get("validation/success")) is None:
            continue
        count = record.metrics.get("validation/prompts")
        low, high = wilson_interval(round(value * count), round(count)) if count else (0.0, 1.0)
        low, high = record.metrics.get("validation/success_low", low), record.metrics.get("validation/success_high", high)
        rates.append(Rate(record.step, value, low, high, round(count) if count else None))
    return rates


def difference_interval(first: Rate, last: Rate) -> tuple[float, float]:
    """95% interval of last - first (Newcombe 1998, method 10).

    >>> low, high = difference_interval(Rate(0, 0.5, 0.4, 0.6, 96), Rate(9, 0.6, 0.5, 0.69, 96))
    >>> round(low, 3), round(high, 3)
    (-0.041, 0.235)
    """
    change = last.value - first.value
    below = math.hypot(last.value - last.low, first.high - first.value)
    above = math.hypot(last.high - last.value, first.value - first.low)
    return change - below, change + above


def _success_words(records: Sequence[StepRecord]) -> str:
    rates = validation(records)
    if not rates:
        return _training_words(records)
    first, last = rates[0], rates[-1]
    on = f"{last.count} prompt{'' if last.count == 1 else 's'}" if last.count else "an unrecorded number of prompts"
    if len(rates) == 1:
        at = f"measured once, at step {last.step}"
        return f"Validation success is {percent(last.value)} ({interval_words(last.value, last.low, last.high, last.count)}; {on}), {at}."
    low, high = difference_interval(first, last)
    gap = points(first.value, last.value)
    between = f"from {percent(first.value)} to {percent(last.value)}"
    if first.value == last.value:
        between = f"{percent(last.value)} at step {first.step} and at step {last.step}"
    if low <= 0 <= high:
        interval = f"its 95% interval, {_signed(low)} to {_signed(high)}, includes zero"
        return f"Validation success did not measurably change: {between} ({gap}; {on}); {interval}."
    moved = "rose" if last.value > first.value else "fell"
    words = f"Validation success {moved} {between} ({gap}; {on}; 95% interval {_signed(low)} to {_signed(high)})."
    best = max(rates, key=lambda rate: rate.value)
    if difference_interval(last, best)[0] > 0:
        words += f" It had been higher: {percent(best.value)} at step {best.step}."
    return words


def _training_words(records: Sequence[StepRecord]) -> str:
    held = [record for record in records if "rollout/success" in record.metrics]
    if not held:
        return "No validation and no training success was recorded, so learning cannot be assessed."
    first, last = held[0], held[-1]
    start, end = first.metrics["rollout/success"], last.metrics["rollout/success"]
    if len(held) == 1:
        return f"No validation was recorded. Training success is {percent(end)} at step {last.step}, the only one recorded."
    return (
        f"No validation was recorded. Training success went from {percent(start)} (step {first.step}) "
        f"to {percent(end)} (step {last.step}); each step plays new prompts, so take the difference as a rough guide only."
    )


def _alarm_words(records: Sequence[StepRecord]) -> list[str]:
    """One sentence each on the critical and on the other alarms that stand at the end; nothing where none does."""
    began = {str(data["name"]): int(data["began"]) for data in records[-1].alarms}
    by_word: dict[str, list[str]] = {"Critical": [], "Warning": []}
    for alarm in alarm_history(records):
        if alarm.stands:
            word = "Critical" if alarm.spans[-1].severity == CRITICAL else "Warning"
            by_word[word].append(f"{alarm.title} (since step {began[alarm.name]})")
    return [f"{word} at the end: {_listed(names)}." for word, names in by_word.items() if names]


def _error_words(records: Sequence[StepRecord]) -> list[str]:
    """A sentence on the episodes that an environment error ended, with the commonest cause; nothing where none did."""
    found = [error for record in records for error in _environment_errors(record)]
    if not found:
        return []
    causes: Counter[str] = Counter()
    for failed, _, cause in found:
        causes[cause] += failed
    cause, _ = causes.most_common(1)[0]
    num_failed, num_played = sum(failed for failed, _, _ in found), sum(played for _, played, _ in found)
    share = f"All {num_failed}" if num_failed == num_played else f"{num_failed} of {num_played}"
    return [f"{share} episodes of the steps that had errors were ended by their environment; the commonest error: {cause.rstrip('.')}."]


def every_episode_failed(record: StepRecord) -> str | None:
    """The commonest error of a training step whose every episode an environment error ended; None where one ended otherwise."""
    return next((cause for failed, played, cause in _environment_errors(record, validation=False) if failed == played), None)


def _environment_errors(record: StepRecord, *, validation: bool = True) -> list[tuple[int, int, str]]:
    """Failed episodes, played ones and the commonest cause, from the notes of a step; `validation`: those of its validation, too."""
    found = [said for note in record.notes if (said := _ENV_ERRORS.fullmatch(note))]
    return [(int(said[2]), int(said[3]), said[4]) for said in found if validation or not said[1]]


def failures(records: Sequence[StepRecord]) -> dict[str, str]:
    """Section of metrics to a sentence, for each kind of measurement that was due and failed, with the cause that its note gives."""
    sentences = {}
    for section, (what, begins) in _MEASUREMENTS.items():
        failed = [record for record in records if record.metrics.get(f"{section}/failed", 0) > 0]
        if not failed:
            continue
        causes = [note.partition("failed: ")[2] for note in failed[-1].notes if note.startswith(begins) and "failed: " in note]
        at = f"at step {failed[-1].step}" if len(failed) == 1 else f"at {len(failed)} steps, the last time at step {failed[-1].step}"
        sentences[section] = f"{what} failed {at}{f': {causes[0]}' if causes else ''}".rstrip(".") + "."
    return sentences


def _listed(names: Sequence[str]) -> str:
    """Names in a row. Example: "one, two and three"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def tiles(records: Sequence[StepRecord]) -> list[Tile]:
    """The key figures of one run; what was not recorded says so."""
    rates = validation(records)
    if rates:
        interval = interval_words(rates[-1].value, rates[-1].low, rates[-1].high, rates[-1].count)
        first = Tile("Validation success", percent(rates[-1].value), f"{interval}; {percent(rates[0].value)} at the start")
    else:
        first = _tile(records, "Training success", "rollout/success", percent)
    labels = [judged.label for _, judged in step_verdicts(records)]
    alarms = alarm_history(records)
    standing = [alarm for alarm in alarms if alarm.stands]
    critical = sum(alarm.spans[-1].severity == CRITICAL for alarm in standing)
    ever = "none was ever raised" if not alarms else f"{len(alarms)} raised in the whole run"
    alarm_tile = Tile("Alarms at the end", str(len(standing)), f"{critical} critical; {ever}" if standing else ever)
    return [
        first,
        _tile(records, "Retrieval accuracy", "information/retrieval_acc", exact_percent, _retrieval_note(records)),
        *_image_tile(records),
        Tile("Regime", labels[-1] if labels else "—", f"{labels[0]} at the start" if labels else "not measured"),
        _tile(records, "Information (MI), nats", "information/mi_seq", number, _ends_words(records, "information/mi_seq")),
        _tile(records, "Diversity H(Z|X), nats", "information/h_conditional", number, _ends_words(records, "information/h_conditional")),
        _tile(records, "Reward variance", "groups/rv_mean", number),
        _tile(records, "Valid turns", "rollout/format_valid", percent),
        alarm_tile if are_recorded(records) else Tile("Alarms at the end", "—", "not recorded"),
    ]


def _retrieval_note(records: Sequence[StepRecord]) -> str:
    """The interval of the last retrieval accuracy, and chance."""
    last = next((record.metrics for record in reversed(records) if "information/retrieval_acc" in record.metrics), {})
    words = []
    if {"information/retrieval_acc_low", "information/retrieval_acc_high"} <= last.keys():
        found, low, high = (last[f"information/retrieval_acc{end}"] for end in ("", "_low", "_high"))
        words.append(interval_words(found, low, high, last.get("information/num_prompts")))
    if "information/chance" in last:
        words.append(f"{exact_percent(last['information/chance'])} is chance")
    return "; ".join(words)


def _image_tile(records: Sequence[StepRecord]) -> list[Tile]:
    """What a token loses with the images of another episode; none for a run without images."""
    name = "information/image_swapped"
    if _last(records, name) is None:
        return []
    return [_tile(records, "Loss with other images, nats", name, number, _ends_words(records, name))]


def _tile(records: Sequence[StepRecord], label: str, metric: str, show: Callable[[float], str], note: str = "") -> Tile:
    values = [record.metrics[metric] for record in records if metric in record.metrics]
    if not values:
        return Tile(label, "—", "not recorded")
    start = f"{show(values[0])} at the start" if len(values) > 1 else "measured once"
    return Tile(label, show(values[-1]), "; ".join(part for part in (note, start) if part))


def _ends_words(records: Sequence[StepRecord], metric: str) -> str:
    """The interval of the last measurement; empty where none was recorded."""
    low, high = _last(records, f"{metric}_low"), _last(records, f"{metric}_high")
    return "" if low is None or high is None else f"{number(low)} to {number(high)}"


def change_words(records: Sequence[StepRecord], metric: str) -> str:
    """The change of a metric since the first measurement on the fixed probe, with its paired interval; empty where none was recorded.

    Example: "change since the first measurement on the same prompts: −0.41 (95% interval −0.6 to −0.22)".
    """
    measured = [record for record in records if metric in record.metrics]
    names = (f"{metric}_change", f"{metric}_change_low", f"{metric}_change_high")
    if not measured or any(name not in measured[-1].metrics for name in names):
        return ""
    change, low, high = (measured[-1].metrics[name] for name in names)
    return f"change since the first measurement on the same prompts: {number(change)} (95% interval {number(low)} to {number(high)})"


def _last(records: Sequence[StepRecord], metric: str) -> float | None:
    return next((record.metrics[metric] for record in reversed(records) if metric in record.metrics), None)


def points(first: float, last: float) -> str:
    """The difference of two shares in percentage points, as a reader would subtract the rounded numbers."""
    change = round(100 * last) - round(100 * first)
    return f"{_sign(change)}{abs(change)} point{'' if abs(change) == 1 else 's'}"


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}".replace("-", MINUS)


def _signed(value: float) -> str:
    rounded = round(100 * value)
    return f"{_sign(rounded)}{abs(rounded)}"


def _sign(value: int) -> str:
    return MINUS if value < 0 else "+" if value > 0 else "±"


# -------------------------------------------------------------------------------------------------------------- reasoning


def step_verdicts(records: Sequence[StepRecord]) -> list[tuple[StepRecord, Verdict]]:
    """Every record that measured information, in order, with the verdict on it."""
    found: list[tuple[StepRecord, Verdict]] = []
    start: Start | None = None
    for record in records:
        if (evidence := recorded_evidence(record.metrics)) is not None:
            start = start or evidence.start
            found.append((record, judge(evidence, start)))
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
    (first_record, first), (last_record, last) = found[0], found[-1]
    words = list(last.reasons)
    if last.code is VerdictCode.CANNOT_BE_TOLD:
        words.append("tether diagnose measures several steps together where each has few prompts.")
    if len(found) > 1:
        start = f"at step {first_record.step} the prompts of {first_record.metrics['information/retrieval_acc']:.0%} were found"
        words.append(f"This is step {last_record.step}; {start} ({first.label}).")
    warned = [
        alarm.title for alarm in alarm_history(records) if alarm.stands and alarm.is_about_input and alarm.spans[-1].severity == CRITICAL
    ]
    if warned:
        less = last.code in (VerdictCode.TIED, VerdictCode.WEAKLY_TIED)
        words.append(
            f"{'It depends on its input less than before' if less else 'Over several measurements'}: critical alarm {_listed(warned)}."
        )
    regime = f" Regime: {last.regime}." if last.regime is not None else ""
    return [f"{last.headline}{regime} {last.next_step}", " ".join(words)]
