"""The result of an audit, and the same as one plain JSON object, which `--json` prints and the report is made from."""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.core.alarms import Alarm
from tether.core.enums import Scope
from tether.core.evidence import FEWEST_PROMPTS, FEWEST_REASONINGS, SIGNIFICANT, TIED, WEAKLY, Retrieval
from tether.core.images import image_digests
from tether.core.metrics import wilson_interval
from tether.core.reasoning import ELSEWHERE, FEWEST_SINGLE, Verdict
from tether.core.version import __version__
from tether.diagnostics.audit.encode import REASONING_TOKENS, EncodedPairs
from tether.diagnostics.audit.measure import PERMUTATIONS, Measurement
from tether.diagnostics.audit.reading import Plan, RewardStatistics, StepCounts, StepNumber, Window
from tether.diagnostics.audit.trend import INDICATORS, ChangePoint, Point, Trend
from tether.diagnostics.information import Information
from tether.diagnostics.rollouts import Rollout, Tally
from tether.runs.images import data_url, without_raw_markers

SCHEMA_VERSION = 2
"""2: `course` became `trend`, and the lexical measures have new names."""
SAMPLE_PROMPTS = 4
SAMPLE_REASONINGS = 3
SAMPLE_CHARS = 1200
SAMPLE_IMAGES = 4
"""Of each prompt."""

Json = dict[str, Any]


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
    drawn: list[list[Rollout]]
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
        assert self.last.measurement is not None  # `last` has one
        return self.last.measurement.information

    def document(self) -> dict[str, Any]:
        """Everything as one plain JSON object, which `tether diagnose --json` prints."""
        return to_document(self)

    def report(self, path: Path | str) -> Path:
        """Write the HTML page, which needs no network."""
        from tether.runs.pages import write_audit_report

        write_audit_report(self.document(), Path(path))
        return Path(path)


def to_document(found: Audit) -> Json:
    """Everything that was found. Numbers that are not finite become null."""
    collected, options = found.collected, found.options
    measured = [window for window in found.windows if window.measurement is not None]
    templates = found.last.measurement.templates if found.last.measurement else None
    document = {
        "schema": SCHEMA_VERSION,
        "verdict": _verdict(found.verdict),
        "verdict_step": found.last.window.name,
        "files": collected.files,
        "format": collected.format,
        "model": found.model,
        "precision": found.precision,
        "scope": str(options.scope),
        "options": {
            **{name: value for name, value in dataclasses.asdict(options).items() if name != "scope"},
            "permutations": PERMUTATIONS,
            "reasoning_tokens": REASONING_TOKENS,
        },
        "thresholds": {
            "tied": TIED,
            "weakly_tied": WEAKLY,
            "significant": SIGNIFICANT,
            "elsewhere": ELSEWHERE,
            "fewest_prompts": FEWEST_PROMPTS,
            "fewest_reasonings": FEWEST_REASONINGS,
            "fewest_single": FEWEST_SINGLE,
        },
        "read": {
            "records": collected.tally.num_records,
            "rollouts": collected.tally.num_rollouts,
            "bad": collected.tally.num_bad,
            "empty": dict(collected.tally.missing),
            "without_reward": collected.tally.num_without_reward,
            "steps": len(collected.counts),
        },
        "windows": [_window(window) for window in found.windows],
        "trend": None if found.trend is None else _trend(found.trend),
        "alarms": [alarm.to_json() | {"evidence": [str(item) for item in alarm.evidence]} for alarm in found.alarms],
        "templates": None if templates is None else dataclasses.asdict(templates),
        "samples": [_samples(window) for window in (measured[:1] if len(measured) == 1 else [measured[0], measured[-1]])],
        "notes": list(found.notes),
        "versions": {"tether": __version__},
    }
    clean: Json = _finite(document)
    return clean


def _verdict(verdict: Verdict) -> Json:
    return {
        "code": str(verdict.code),
        "headline": verdict.headline,
        "next_step": verdict.next_step,
        "reasons": list(verdict.reasons),
        "effect": verdict.effect,
        "regime": None if verdict.regime is None else str(verdict.regime),
        "evidence": [{**dataclasses.asdict(item), "counts": item.counts} for item in verdict.evidence],
    }


def _window(window: WindowAudit) -> Json:
    return {
        "name": window.window.name,
        "step": window.window.steps[-1],
        "steps": list(window.window.steps),
        "rollouts": window.num_rollouts,
        "episodes": window.num_episodes,
        "in_scope": window.num_in_scope,
        "empty": window.num_empty,
        "missing": dict(window.missing),
        "reward_mean": window.reward_mean,
        "success": window.success,
        "success_interval": window.success_interval,
        "rewards": None if window.rewards is None else dataclasses.asdict(window.rewards),
        "verdict": _verdict(window.verdict),
        "measured": None if window.measurement is None else _measured(window.measurement),
    }


def _measured(found: Measurement) -> Json:
    information, lexical = found.information, found.lexical
    return {
        "prompts": found.num_prompts,
        "reasonings": found.num_reasonings,
        "most_samples": found.most_samples,
        "reasoning_tokens": found.mean_tokens,
        "information": {
            **{
                key: value
                for key, value in dataclasses.asdict(information).items()
                if key not in ("recall", "mi_interval", "intervals", "effects")
            },
            "mi_ceiling": math.log(found.num_prompts),
            "recall": {str(k): value for k, value in information.recall.items()},
            "intervals": {name: list(ends) for name, ends in information.intervals.items()},
        },
        "scorer": {"nats": found.scorer_nats, "unigram_nats": found.unigram_nats, "is_read": found.is_read},
        "elsewhere": {"words": dataclasses.asdict(found.lexical.elsewhere), "model": dataclasses.asdict(found.elsewhere)},
        "adjusted_retrieval": _retrieval(found.adjusted),
        "lexical": {
            "distinct": lexical.num_distinct,
            "top_share": lexical.top_share,
            "similarity": lexical.similarity,
            "agreement": dataclasses.asdict(lexical.agreement),
            "neighbours": None if lexical.neighbours is None else _retrieval(lexical.neighbours),
            "nearest": None if lexical.nearest is None else _retrieval(lexical.nearest),
            "prompt_overlap": _retrieval(lexical.prompt_overlap),
        },
        "loose_share": found.loose_share,
        **({"images": found.images.metrics} if found.images.levels else {}),
    }


def _retrieval(found: Retrieval) -> Json:
    return {**dataclasses.asdict(found), "excess": found.excess}


def _trend(trend: Trend) -> Json:
    return {
        "indicator": trend.indicator,
        "indicator_in_words": INDICATORS[trend.indicator],
        "points": [_point(point) for point in trend.points],
        "regimes": [None if regime is None else str(regime) for regime in trend.regimes],
        "change_point": None if trend.information is None else _change_point(trend.information),
        "success_change_point": None if trend.success is None else _change_point(trend.success),
        "sentences": list(trend.sentences),
    }


def _point(point: Point) -> Json:
    return {"name": point.window.name, "step": point.window.steps[-1], "value": point.value, "low": point.low, "high": point.high}


def _change_point(found: ChangePoint) -> Json:
    return {part: _point(getattr(found, part)) for part in ("best", "last_good", "began", "end")}


def _samples(window: WindowAudit) -> Json:
    """A few reasonings of a few prompts: the first of the seeded sample, not chosen by hand."""
    pairs = window.pairs
    shown = []
    for column in range(min(SAMPLE_PROMPTS, len(pairs.prompts))):
        rows = [row for row, source in enumerate(pairs.source) if source == column][:SAMPLE_REASONINGS]
        reasonings = [
            {"text": pairs.texts[row][:SAMPLE_CHARS], "reward": pairs.drawn[row].reward, "where": pairs.drawn[row].where} for row in rows
        ]
        prompt = without_raw_markers(pairs.prompt_texts[column])[-SAMPLE_CHARS:]
        seen = [pairs.images[digest] for digest in dict.fromkeys(image_digests(pairs.prompts[column]))][:SAMPLE_IMAGES]
        images = [{"digest": image.digest, "source": data_url(image.png, image.pixels.shape[1::-1])} for image in seen]
        shown.append({"prompt": prompt, **({"images": images} if images else {}), "reasonings": reasonings})
    return {"name": window.window.name, "prompts": shown}


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
