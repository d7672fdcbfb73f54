"""`tether.audit`: the audit of saved rollouts from Python, with everything that `tether diagnose` has; the command calls it.

Files and options are checked, then the files are read and sampled, and only then is a model loaded, which scores the sample. A run folder of Tether
needs no model: the one that the run began with scores it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tether.core.enums import Scope, Split
from tether.core.errors import BadInput, UnknownName, did_you_mean
from tether.core.evidence import WEAKLY, MissingReasoning, Start
from tether.core.reasoning import VerdictCode, no_verdict
from tether.diagnostics.alarms.tracker import StepReasoning, check
from tether.diagnostics.audit.encode import EncodedPairs, Encoder
from tether.diagnostics.audit.measure import decide, evidence_of, measure
from tether.diagnostics.audit.reading import StepCounts, Window, draw, plan_windows, reward_statistics, scan
from tether.diagnostics.audit.result import Audit, AuditOptions, Collected, WindowAudit
from tether.diagnostics.audit.scorer import AuditScorer, is_server, load_scorer, loaded_scorer, resolve_model, starting_model
from tether.diagnostics.audit.trend import MeasuredWindow, measure_trend
from tether.diagnostics.rollouts import RolloutReader, open_rollouts, parse_fields
from tether.diagnostics.rollouts.record import BLANK, MISSING
from tether.models.catalog import check_name
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore

if TYPE_CHECKING:
    from tether.models.load import LoadedModel

SCOPES = {"first-turn": Scope.FIRST_TURN, "trajectory": Scope.TRAJECTORY}
FEWEST_RESAMPLES = 100

Rollouts = str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]]
TRAJECTORY_SAMPLES = 4
"""In the trajectory scope every drawn context is a column of its own, so fewer are drawn of each group."""


class AuditProgress(Protocol):
    """What a caller may want to show while an audit runs."""

    def read(self, done: int, total: int) -> None:
        """Bytes read so far, and in all."""

    def begin(self, stage: str, total: int) -> None:
        """A stage of so many parts begins."""

    def advance(self, count: int) -> None:
        """So many parts of it are done."""


def audit(
    rollouts: Rollouts,
    model: "str | LoadedModel | AuditScorer | None" = None,
    *,
    format: str | None = None,
    fields: Mapping[str, str] | str | Sequence[str] | None = None,
    group: str | None = None,
    pattern: str | None = None,
    split: str | None = "train",
    skip_bad: bool = False,
    steps: int | Sequence[int] = (),
    scope: Scope | str = "first-turn",
    prompts: int = 32,
    samples: int = 16,
    seed: int = 0,
    bootstrap: int = 1000,
    device: str | None = None,
    tokenizer: str | None = None,
    text_only: bool = False,
    out: Path | str | None = None,
    progress: AuditProgress | None = None,
) -> Audit:
    """Does the reasoning of these rollouts depend on its input?

    Args:
        rollouts: a file or a folder of any framework, several of them, a run folder of Tether, or rows: an iterable of mappings.
        model: the model that scores: tiny, smollm2, a folder, a Hugging Face id, a .gguf file, a run folder (its last checkpoint), a server's http
            address, or a loaded model (`tether.load_model`). May be left out for a run folder of Tether.
        format: tether, trl, verl, ragen, skyrl, openrlhf, areal, slime, verifiers, prime_rl, openai, litellm, langfuse, weave or generic;
            detected if left out.
        fields: a field map for other names, such as {"prompt": "input", "response": "output"} or "prompt=input,response=output".
        group: the field whose value is the group of a record, as a dotted path; by default the one that the format has.
        pattern: a regular expression whose one group is the reasoning; between think tags if left out.
        split: which episodes of a Tether run, or of a folder that holds training and evaluation; None for all.
        skip_bad: leave unreadable records out and count them.
        steps: measure these steps only.
        scope: "first-turn", or "trajectory": one turn of each episode, drawn at random.
        prompts: prompts per step.
        samples: reasonings per prompt; with fewer, more prompts are taken at the same cost.
        seed: of what is sampled and shuffled.
        bootstrap: resamples for the intervals, 100 or more.
        device: where the model computes; the GPU if there is one.
        tokenizer: the model whose token ids the rollouts hold, if it is not the one that scores; needed for a server.
        text_only: leave pictures out of the prompts and measure the text alone, which a model without eyes can score.
        out: where an HTML report goes; none is written if left out.
        progress: told of bytes read and prompts scored.
    """
    out = None if out is None else Path(out)
    if out is not None and not out.parent.is_dir():  # said now, not after scoring
        raise BadInput(f"--out is '{out}', but there is no folder '{out.parent}'; make it or choose another")
    options = AuditOptions(
        scope=_scope(scope),
        prompts=_at_least("prompts", prompts, 2),
        samples=_at_least("samples", samples, 1),
        steps=(steps,) if isinstance(steps, int) else tuple(steps),
        seed=seed,
        bootstrap=_at_least("bootstrap", bootstrap, FEWEST_RESAMPLES),
    )
    run = run_folder(rollouts)
    name, remark = _named(run, model) if isinstance(model, str) or (model is None and run) else ("", None)
    reader = open_rollouts(
        rollouts,
        format=format,
        fields=fields if fields is None or isinstance(fields, Mapping) else parse_fields([fields] if isinstance(fields, str) else fields),
        group=group,
        pattern=pattern,
        split=split,
        bad_lines="skip" if skip_bad else "raise",
        progress=progress.read if progress else None,
        text_only=text_only,
    )
    if model is None and run is None:
        next(iter(reader), None)
        raise BadInput(
            f"which model should score the rollouts? add --model (model=... in Python): {reader.tally.writer}, or a small one such as smollm2"
        )
    collected = collect(reader, options)
    if isinstance(model, AuditScorer):
        scorer = model
    elif model is None or isinstance(model, str):
        written = resolve_model(str(run))[0] if run and model else None  # the model whose ids a run holds, where another one scores it
        scorer = load_scorer(name, tokenizer=tokenizer or written, device=device)
    else:
        scorer = loaded_scorer(model, tokenizer=tokenizer)
    notes = (remark,) if remark else ()
    found = audit_sample(
        collected,
        scorer,
        options,
        notes=notes,
        recorded=_recorded(run) if run is not None and split == Split.TRAIN and options.scope is Scope.FIRST_TURN else None,
        stage=progress.begin if progress else None,
        advance=progress.advance if progress else None,
    )
    if out is not None:
        found.report(out)
    return found


def run_folder(rollouts: Rollouts) -> Path | None:
    """The run of Tether that is to be audited, if it is one."""
    named = rollouts[0] if isinstance(rollouts, list | tuple) and len(rollouts) == 1 else rollouts
    return Path(named) if isinstance(named, str | Path) and (Path(named) / "run.json").is_file() else None


def _recorded(run: Path) -> dict[int, dict[str, float]]:
    """What a run of Tether measured itself, by step; a fixed probe was not measured on the rollouts of its step, and does not count here."""
    records = RunStore.open(run).steps()
    return {record.step: record.metrics for record in records if "information/probe_tokens_sampled" not in record.metrics}


def _named(run: Path | None, model: str | None) -> tuple[str, str | None]:
    """The model that scores, and a remark where it was found in a run folder; nothing heavy is loaded yet."""
    name, remark = resolve_model(model) if model is not None else starting_model(run) if run else ("", None)
    if not is_server(name):
        check_name(name)
    return name, remark


def _scope(scope: Scope | str) -> Scope:
    name = str(scope).replace("_", "-")
    if name not in SCOPES:
        raise UnknownName(f"unknown scope '{scope}': {did_you_mean(name, SCOPES)}")
    return SCOPES[name]


def _at_least(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadInput(f"{name} is {value!r}; expected a whole number from {least}")
    return value


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
    stage: Callable[[str, int], None] | None = None,
    advance: Callable[[int], None] | None = None,
) -> Audit:
    """Score, measure and decide every window; where none can be measured, an error says why.

    Args:
        notes: what is already known and belongs before the notes of the result.
        recorded: step to the metrics that the run itself recorded, if it is one of Tether's.
    """
    encoder = Encoder(model.tokenizer, model.vocabulary, model.positions, collected.tally.writer, model.vision, model.name)
    encoded = [encoder.pairs(drawn) for drawn in collected.drawn]
    if stage is not None:
        stage("scoring", sum(len(pairs.prompts) for pairs in encoded if _lack(pairs) is None))
    windows: list[WindowAudit] = []
    start: Start | None = None  # regimes are relative to the first window with a sufficient sample
    for window, pairs in zip(collected.plan.windows, encoded, strict=True):
        own = (recorded or {}).get(window.last) if len(window.steps) == 1 else None
        windows.append(_window(window, pairs, collected, model, options, advance or (lambda count: None), start, own))
        if start is None and (found := windows[-1].measurement) is not None:
            start = evidence_of(found).start
    if all(window.measurement is None for window in windows):
        raise BadInput(f"nothing can be said about these rollouts: {windows[-1].verdict.reasons[0]}")
    measured = [
        MeasuredWindow(window.window, window.measurement, window.verdict, window.num_success, window.num_judged)
        for window in windows
        if window.measurement is not None
    ]
    all_notes = [*notes, *collected.plan.notes, *collected.notes, *encoder.notes(), *_remarks(windows)]
    alarms = tuple(check(_records(collected, windows), _texts(windows)))
    return Audit(collected, options, model.name, model.precision, tuple(windows), measure_trend(measured), alarms, tuple(all_notes))


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


def _window(
    window: Window,
    pairs: EncodedPairs,
    collected: Collected,
    model: AuditScorer,
    options: AuditOptions,
    advance: Callable[[int], None],
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
        missing=dict(sum((step.missing for step in counts), Counter[str]())),
        reward_mean=sum(step.reward.mean * step.reward.count for step in counts) / num_rewards if num_rewards else None,
        num_judged=sum(step.num_judged for step in counts),
        num_success=sum(step.num_success for step in counts),
        rewards=reward_statistics(counts),
        measurement=found,
        verdict=no_verdict(lack or "") if found is None else decide(found, _missing(counts), start=start, recorded=recorded),
        pairs=pairs,
    )


def _missing(counts: Sequence[StepCounts]) -> MissingReasoning:
    """The responses without reasoning, as shares of all in scope."""
    causes = sum((step.missing for step in counts), Counter[str]())
    total = sum(step.num_scope for step in counts)
    blank = causes.pop(BLANK, 0)
    words = ", ".join(f"{count} {MISSING[cause]}" for cause, count in sorted(causes.items()))
    return MissingReasoning(blank / total, causes.total() / total, words)


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
                "information/h_conditional_seq": information.h_conditional_seq,
                **{f"information/{name}": value for name, value in found.images.metrics.items()},
            }
    return [StepRecord(step, values) for step, values in sorted(metrics.items())]


def _texts(windows: Sequence[WindowAudit]) -> list[StepReasoning]:
    return [
        StepReasoning(window.window.last, window.pairs.prompt_texts[column], text)
        for window in windows
        for text, column in zip(window.pairs.texts, window.pairs.source, strict=True)
    ]
