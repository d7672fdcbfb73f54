"""The run of an audit: read and sample the files, then score, measure and decide. The model is loaded in between, after the files are checked."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.core.alarms import Alarm
from tether.core.enums import Scope
from tether.core.errors import BadInput
from tether.core.metrics import wilson_interval
from tether.core.reasoning import WEAKLY, Start, Unread, Verdict, VerdictCode, no_verdict
from tether.diagnostics.alarms.tracker import StepReasoning, check
from tether.diagnostics.audit.encode import EncodedPairs, Encoder
from tether.diagnostics.audit.measure import Measurement, measure
from tether.diagnostics.audit.sample import SampledRollout, draw
from tether.diagnostics.audit.scan import Plan, RewardStatistics, StepCounts, StepNumber, Window, plan_windows, reward_statistics, scan
from tether.diagnostics.audit.scorer import AuditScorer
from tether.diagnostics.audit.trend import MeasuredWindow, Trend, measure_trend
from tether.diagnostics.audit.verdict import decide, evidence_of
from tether.diagnostics.information import Information
from tether.diagnostics.rollouts import RolloutReader, Tally
from tether.diagnostics.rollouts.record import BLANK, MISSING
from tether.runs.schema import StepRecord

TRAJECTORY_SAMPLES = 4
"""In the trajectory scope every drawn context is a column of its own, so fewer are drawn of each group."""

OnStage = Callable[[str, int], None]
"""Called with the name of a stage and its number of parts."""
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """How much is measured. `prompts` x `samples` is what a window may cost; see sample.py."""

    scope: Scope = Scope.FIRST_TURN
    prompts: int = 32
    samples: int = 16
    steps: tuple[int, ...] = ()
    """Only these; empty for all that are worth it."""
    seed: int = 0
    bootstrap: int = 1000

    @property
    def all_turns(self) -> bool:
        return self.scope is not Scope.FIRST_TURN


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of the two readings of the files."""

    files: list[str]
    format: str
    counts: dict[StepNumber, StepCounts]
    plan: Plan
    drawn: list[list[SampledRollout]]
    """One sample per window."""
    tally: Tally
    notes: tuple[str, ...] = ()
    """What the reader passed over, left out or did not find."""


@dataclass(frozen=True, slots=True)
class WindowAudit:
    """One window: counted whole, measured on a sample."""

    window: Window
    num_rollouts: int
    num_episodes: int
    num_in_scope: int
    num_empty: int
    missing: dict[str, int]
    """The empty ones by cause."""
    reward_mean: float | None
    num_judged: int
    num_success: int
    rewards: RewardStatistics | None
    measurement: Measurement | None
    """None where nothing could be measured; the verdict says why."""
    verdict: Verdict
    pairs: EncodedPairs

    @property
    def success(self) -> float | None:
        return self.num_success / self.num_judged if self.num_judged else None

    @property
    def success_interval(self) -> tuple[float, float] | None:
        return wilson_interval(self.num_success, self.num_judged) if self.num_judged else None


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit. The verdict is that of the last window that could be measured.

    Example: found.verdict.code, found.verdict.headline, found.information.mi_seq, found.trend, found.report("diagnosis.html").
    """

    collected: Collected
    options: AuditOptions
    model: str
    precision: str
    windows: tuple[WindowAudit, ...]
    trend: Trend | None
    alarms: tuple[Alarm, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def last(self) -> WindowAudit:
        return next(window for window in reversed(self.windows) if window.measurement is not None)

    @property
    def verdict(self) -> Verdict:
        return self.last.verdict

    @property
    def information(self) -> Information:
        """Retrieval accuracy, information and entropies of that window, with intervals and p-values."""
        return self._measured.information

    @property
    def _measured(self) -> Measurement:
        found = self.last.measurement
        assert found is not None  # `last` has one
        return found

    def document(self) -> dict[str, Any]:
        """Everything as one plain JSON object, which `tether diagnose --json` prints."""
        from tether.diagnostics.audit.document import to_document

        return to_document(self)

    def report(self, path: Path | str) -> Path:
        """Write the HTML page, which needs no network."""
        from tether.runs.pages import write_audit_report

        write_audit_report(self.document(), Path(path))
        return Path(path)


def collect(reader: RolloutReader, options: AuditOptions) -> Collected:
    """Read the files twice: once to count, once to draw a sample."""
    counts = scan(reader, all_turns=options.all_turns, seed=options.seed)
    tally, notes = reader.tally, tuple(reader.notes())
    if all(step.num_scope == step.num_empty for step in counts.values()):
        hints = [note for note in tally.notes() if "pattern" in note]
        causes = [note for note in tally.notes() if "empty" in note]
        remedy = (hints or ["give --pattern with one group around the reasoning"])[0]
        raise BadInput(f"no response in scope holds reasoning: {'; '.join(causes)}; {remedy}")
    plan = plan_windows(counts, options.steps)
    samples = min(options.samples, TRAJECTORY_SAMPLES) if options.all_turns else options.samples
    drawn = draw(reader, plan.windows, all_turns=options.all_turns, prompts=options.prompts, samples=samples, seed=options.seed)
    return Collected(reader.names, reader.format.name, counts, plan, drawn, tally, notes)


def audit_sample(
    collected: Collected,
    model: AuditScorer,
    options: AuditOptions,
    *,
    notes: Sequence[str] = (),
    recorded: Mapping[int, Mapping[str, float]] | None = None,
    stage: OnStage | None = None,
    advance: Advance | None = None,
) -> Audit:
    """Score, measure and decide every window; where none can be measured, an error says why.

    Args:
        notes: what is already known and belongs before the notes of the result.
        recorded: step to the metrics that the run itself recorded, if it is one of Tether's.
    """
    encoder = Encoder(model.tokenizer, model.vocabulary, model.positions)
    encoded = [encoder.pairs(drawn) for drawn in collected.drawn]
    if stage is not None:
        stage("scoring", sum(len(pairs.prompts) for pairs in encoded if _lack(pairs) is None))
    windows = _windows(collected, encoded, model, options, recorded or {}, advance or _ignore)
    if all(window.measurement is None for window in windows):
        raise BadInput(f"nothing can be said about these rollouts: {windows[-1].verdict.reasons[0]}")
    measured = [
        MeasuredWindow(window.window, window.measurement, window.verdict, window.num_success, window.num_judged)
        for window in windows
        if window.measurement is not None
    ]
    all_notes = [*notes, *collected.plan.notes, *collected.notes, *encoder.notes(), *_remarks(windows)]
    alarms = tuple(check(_records(collected, windows), _texts(windows)))
    return Audit(collected, options, model.name, model.precision, windows, measure_trend(measured), alarms, tuple(all_notes))


def _ignore(count: int) -> None:
    """The progress callback where none was given."""


def _lack(pairs: EncodedPairs) -> str | None:
    """Why these pairs cannot be measured, or None."""
    if not pairs.reasonings:
        return "no rollout of it holds reasoning."
    if len(pairs.prompts) < 2:
        return (
            f"all {len(pairs.reasonings)} sampled reasonings answer one prompt, and there is no other to compare with; "
            "give rollouts of several prompts, or check the field that holds the prompt."
        )
    return None


def _windows(
    collected: Collected,
    encoded: Sequence[EncodedPairs],
    model: AuditScorer,
    options: AuditOptions,
    recorded: Mapping[int, Mapping[str, float]],
    advance: Advance,
) -> tuple[WindowAudit, ...]:
    """Every window in order; regimes are relative to the first one with a sufficient sample."""
    windows: list[WindowAudit] = []
    start: Start | None = None
    for window, pairs in zip(collected.plan.windows, encoded, strict=True):
        own = recorded.get(window.last) if len(window.steps) == 1 else None
        windows.append(_window(window, pairs, collected, model, options, advance, start, own))
        if start is None and (measured := windows[-1].measurement) is not None:
            start = evidence_of(measured).start
    return tuple(windows)


def _window(
    window: Window,
    pairs: EncodedPairs,
    collected: Collected,
    model: AuditScorer,
    options: AuditOptions,
    advance: Advance,
    start: Start | None,
    recorded: Mapping[str, float] | None,
) -> WindowAudit:
    counts = [collected.counts[step] for step in window.steps]
    lack = _lack(pairs)
    found = None if lack else measure(pairs, model.scorer, bootstrap=options.bootstrap, seed=options.seed, advance=advance)
    num_rewards = sum(step.reward.count for step in counts)
    return WindowAudit(
        window=window,
        num_rollouts=sum(step.num_rollouts for step in counts),
        num_episodes=sum(step.num_episodes for step in counts),
        num_in_scope=sum(step.num_scope for step in counts),
        num_empty=sum(step.num_empty for step in counts),
        missing=dict(_missing(counts)),
        reward_mean=sum(step.reward.mean * step.reward.count for step in counts) / num_rewards if num_rewards else None,
        num_judged=sum(step.num_judged for step in counts),
        num_success=sum(step.num_success for step in counts),
        rewards=reward_statistics(counts),
        measurement=found,
        verdict=no_verdict(lack or "") if found is None else decide(found, _unread(counts), start=start, recorded=recorded),
        pairs=pairs,
    )


def _missing(counts: Sequence[StepCounts]) -> Counter[str]:
    return sum((Counter(step.missing) for step in counts), Counter[str]())


def _unread(counts: Sequence[StepCounts]) -> Unread:
    causes = _missing(counts)
    total = sum(step.num_scope for step in counts)
    blank = causes.pop(BLANK, 0)
    words = ", ".join(f"{count} {MISSING[cause]}" for cause, count in sorted(causes.items()))
    return Unread(blank / total, causes.total() / total, words)


def _sees(window: WindowAudit) -> bool:
    return any(
        item.counts and item.effect >= WEAKLY for item in window.verdict.evidence if item.name in ("retrieval", "adjusted_retrieval")
    )


def _remarks(windows: Sequence[WindowAudit]) -> list[str]:
    measured = [window for window in windows if window.measurement is not None]
    tied = [window for window in measured if window.verdict.code in (VerdictCode.TIED, VerdictCode.WEAKLY_TIED)]
    remarks = [f"step {window.window.name}: {window.verdict.reasons[0]}" for window in windows if window.measurement is None]
    if tied and not any(_sees(window) for window in tied):
        remarks.append(
            "the model is a weak scorer of this text: the words show a dependence that its scores do not; read its numbers with care"
        )
    if all(window.measurement is not None and window.measurement.most_samples == 1 for window in measured):
        remarks.append("there is one reasoning per prompt: similarity within a prompt cannot be measured; take several samples per prompt")
    return remarks


def _records(collected: Collected, windows: Sequence[WindowAudit]) -> list[StepRecord]:
    """The numbers of every step as a run would have logged them, for the rules of the alarms."""
    metrics: dict[int, dict[str, float]] = {}
    for step, counts in collected.counts.items():
        values: dict[str, float] = {}
        if counts.success is not None:
            values["rollout/success"] = counts.success
        if (rewards := reward_statistics([counts])) is not None:
            values["groups/rv_mean"] = rewards.rv_mean
        metrics[step or 0] = values
    informative = any(_sees(window) for window in windows)  # a model that never shows a dependence cannot show its loss
    for window in windows:
        if (found := window.measurement) is not None and informative:
            information = found.information
            metrics[window.window.last] |= {
                "information/retrieval_acc": information.retrieval_acc,
                "information/chance": information.chance,
                "information/mi_seq": information.mi_seq,
                "information/h_conditional": information.h_conditional,
                "information/num_prompts": float(found.num_prompts),
            }
    return [StepRecord(step, values) for step, values in sorted(metrics.items())]


def _texts(windows: Sequence[WindowAudit]) -> list[StepReasoning]:
    return [
        StepReasoning(window.window.last, window.pairs.prompt_texts[column], text)
        for window in windows
        for text, column in zip(window.pairs.texts, window.pairs.source, strict=True)
    ]
