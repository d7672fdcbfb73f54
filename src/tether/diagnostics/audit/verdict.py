"""The evidence of an audit, for the one function that makes verdicts (tether.core.reasoning).

Six signals show dependence: retrieval by the model, the same adjusted for prompts that raise the score of any text, information as a share of
log P, and three that need no model: agreement, neighbours and prompt overlap (lexical.py). Where a run of Tether measured the same step itself, its
scorer's retrieval and information are signals as well: the run's record and the audit then never say the opposite of each other.

The bounds were chosen on generated rollouts of twenty kinds (tests/unit/diagnostics) and on real ones of tiny.
"""

import dataclasses
import math
from collections.abc import Mapping

from tether.core.reasoning import (
    COLLAPSES,
    Evidence,
    Found,
    Signal,
    Start,
    Texts,
    Unread,
    Verdict,
    VerdictCode,
    judge,
    recorded_evidence,
)
from tether.diagnostics.audit.lexical import Retrieval
from tether.diagnostics.audit.measure import Measurement


def decide(
    found: Measurement,
    unread: Unread = Unread(),  # noqa: B008 (immutable)
    *,
    start: Start | None = None,
    recorded: Mapping[str, float] | None = None,
) -> Verdict:
    """The verdict on one measurement, and on the responses that it could not take in.

    Args:
        start: that of the run, which regimes are relative to.
        recorded: the metrics that the run itself recorded at this step, if it is one of Tether's.
    """
    verdict = judge(evidence_of(found, unread, recorded), start)
    own = recorded_evidence(recorded) if recorded is not None else None
    if own is None or judge(own).code not in COLLAPSES or verdict.code not in (VerdictCode.TIED, VerdictCode.WEAKLY_TIED):
        return verdict
    shown = ", ".join(item.name.replace("_", " ") for item in verdict.evidence if item.counts)
    words = f"The run's own scorer found no dependence at this step, and its report says so; what shows it here is {shown}."
    return dataclasses.replace(verdict, reasons=(words, *verdict.reasons))


def evidence_of(found: Measurement, unread: Unread = Unread(), recorded: Mapping[str, float] | None = None) -> Evidence:  # noqa: B008 (immutable)
    """Everything that an audit knows of one window."""
    information, lexical = found.information, found.lexical
    low, high = information.intervals.get("retrieval_acc", (0.0, 1.0))
    best = max(found.adjusted.accuracy, lexical.neighbours.accuracy if lexical.neighbours else 0.0)
    return Evidence(
        num_prompts=found.num_prompts,
        num_reasonings=found.num_reasonings,
        most_samples=found.most_samples,
        retrieval=Found(information.retrieval_acc, low, high, information.chance, information.retrieval_p_value),
        signals=(*_signals(found), *_recorded_signals(recorded)),
        mi_seq=information.mi_seq,
        mi_interval=information.intervals.get("mi_seq"),
        mi_p_value=information.mi_p_value,
        h_conditional=information.h_conditional,
        is_read=found.is_read,
        scorer_nats=found.scorer_nats,
        unigram_nats=found.unigram_nats,
        best_accuracy=best,
        elsewhere=(found.elsewhere.share, found.elsewhere.p_value),
        texts=Texts(
            num_distinct=lexical.num_distinct,
            top_share=lexical.top_share,
            similarity=lexical.similarity,
            loose_share=found.loose_share,
            neighbours=None if lexical.neighbours is None else _found(lexical.neighbours),
            overlap=_found(lexical.prompt_overlap),
            elsewhere=(lexical.elsewhere.share, lexical.elsewhere.p_value),
        ),
        unread=unread,
    )


def _found(retrieval: Retrieval) -> Found:
    return Found(retrieval.accuracy, *retrieval.interval, retrieval.chance, retrieval.p_value)


def _signals(found: Measurement) -> list[Signal]:
    information, lexical = found.information, found.lexical
    by_rank, by_score = information.retrieval_p_value or 1.0, information.mi_p_value or 1.0
    signals = [
        Signal("retrieval", max(0.0, (information.retrieval_acc - information.chance) / (1 - information.chance)), by_rank),
        Signal("adjusted_retrieval", max(0.0, found.adjusted.excess), by_score),
        Signal("information", max(0.0, information.mi_seq / math.log(found.num_prompts)), by_score),
        Signal("agreement", max(0.0, lexical.agreement.strength), lexical.agreement.p_value),
        Signal("prompt_overlap", max(0.0, lexical.prompt_overlap.excess), lexical.prompt_overlap.p_value),
    ]
    if lexical.neighbours is not None:
        signals.append(Signal("neighbours", max(0.0, lexical.neighbours.excess), lexical.neighbours.p_value))
    return signals


def _recorded_signals(recorded: Mapping[str, float] | None) -> list[Signal]:
    """The signals of the run's own record; none where its sample is too small for a label of its own."""
    found = recorded_evidence(recorded) if recorded is not None else None
    if found is None or not found.is_sufficient:
        return []
    return [Signal(f"recorded_{item.name}", item.effect, item.p_value) for item in found.signals]
