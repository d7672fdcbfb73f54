"""One window, measured and judged: pairs to cross-scores, to information, lexical measures and templates, to the evidence of a verdict.

Besides the proxies of the paper there is one more number, the adjusted retrieval. A scorer that did not write the text may find any text
likelier under some prompts than under others; the argmax of a row then shows the prompt's general effect instead of the reasoning. The score
that a prompt gives to the average reasoning, per token, is subtracted first.

Whether the scorer can read the text at all is measured against counts of its tokens: a unigram model of the other reasonings. A scorer that finds
the text no likelier than that under any prompt has not understood a word order or a language, and cannot show a dependence.

Seven signals show dependence: retrieval by the model, the same adjusted for prompts that raise the score of any text, information as a share of
log P, and four that need no model: agreement, neighbours, nearest and prompt overlap (lexical.py). Where a run of Tether measured the same step itself, its
scorer's retrieval and information are signals as well: the run's record and the audit then never say the opposite of each other. The function that
makes the verdict is tether.core.reasoning.judge; its bounds were chosen on generated rollouts of twenty kinds (tests/unit/diagnostics) and on
real ones of tiny.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tether.core.errors import BadInput
from tether.core.evidence import Evidence, ImageEvidence, MissingReasoning, Retrieval, Signal, Start, Texts, recorded_evidence
from tether.core.images import without_markers
from tether.core.reasoning import COLLAPSES, Verdict, VerdictCode, judge
from tether.diagnostics.audit.encode import EncodedPairs
from tether.diagnostics.audit.lexical import Elsewhere, LexicalMeasures, find_elsewhere, measure_lexical
from tether.diagnostics.cross_score import cross_score
from tether.diagnostics.image_dependence import NO_IMAGES, ImageDependence, measure_images
from tether.diagnostics.information import Information, measure_information
from tether.diagnostics.templates import SlotKind, Templates, find_templates

PROMPTS_PER_CALL = 8
"""Columns that are scored between two moves of the progress bar."""
PERMUTATIONS = 1000
CLEAR_NATS = 5.0
"""A reasoning fits another prompt clearly better if it is so much likelier under it: odds of 148 to 1."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything that was found about the reasonings of one window."""

    num_prompts: int
    num_reasonings: int
    most_samples: int
    """Reasonings of the prompt that has most."""
    mean_tokens: float
    information: Information
    scorer_nats: float
    """Per token, under the prompt that explains a reasoning best; mean over reasonings."""
    unigram_nats: float
    """The same by counts of the tokens of the other reasonings."""
    elsewhere: Elsewhere
    """By the adjusted scores of the model."""
    adjusted: Retrieval
    """By scores from which each prompt's mean score is subtracted; its p-value is mi_p_value."""
    lexical: LexicalMeasures
    templates: Templates | None
    """None where no reasoning holds a word."""
    loose_share: float
    """Share of the reasonings that follow a template in which nothing follows the prompt; 0 where the prompt decides which one."""
    images: ImageDependence = NO_IMAGES
    """What the reasonings lose with other images, where prompts hold any."""

    @property
    def retrieval(self) -> Retrieval:
        """By the model's scores as they are."""
        interval = self.information.intervals.get("retrieval_acc", (0.0, 1.0))
        return Retrieval(self.information.retrieval_acc, interval, self.information.chance, self.information.retrieval_p_value)

    @property
    def is_read(self) -> bool:
        """Whether the scorer finds the text likelier than counts of its tokens do."""
        return self.scorer_nats < self.unigram_nats


def measure(pairs: EncodedPairs, scorer: object, *, bootstrap: int, seed: int, advance: Advance) -> Measurement:
    """Measure pairs of two prompts or more; `advance` is called with the number of prompts scored since."""
    blocks = []
    for start in range(0, len(pairs.prompts), PROMPTS_PER_CALL):
        prompts = pairs.prompts[start : start + PROMPTS_PER_CALL]
        blocks.append(cross_score(scorer, prompts, pairs.reasonings))
        advance(len(prompts))
    scores = np.concatenate(blocks, axis=1)
    lengths = np.array([len(reasoning) for reasoning in pairs.reasonings], dtype=np.float64)
    own = np.asarray(pairs.source, dtype=np.int64)
    try:
        templates = find_templates(pairs.texts, pairs.source)
    except BadInput:  # no word in any reasoning, or all words under one prompt
        templates = None
    information = measure_information(scores, lengths, own, bootstrap=bootstrap, permutations=PERMUTATIONS, seed=seed)
    return Measurement(
        num_prompts=len(pairs.prompts),
        num_reasonings=len(pairs.reasonings),
        most_samples=int(np.bincount(own).max()),
        mean_tokens=float(lengths.mean()),
        information=information,
        scorer_nats=float(-(scores.max(axis=1) / lengths).mean()),
        unigram_nats=unigram_nats(pairs.reasonings),
        elsewhere=_elsewhere(scores, lengths, own, seed),
        adjusted=_adjusted(scores / lengths[:, None], own, information, bootstrap, seed),
        lexical=measure_lexical(
            pairs.texts, pairs.source, [without_markers(text) for text in pairs.prompt_texts], bootstrap=bootstrap, seed=seed
        ),
        templates=templates,
        loose_share=0.0 if templates is None else loose_share(templates),
        images=measure_images(
            scorer, pairs.prompts, pairs.reasonings, pairs.source, scores[np.arange(len(own)), own], resamples=bootstrap, seed=seed
        ),
    )


def _adjusted(per_token: Floats, own: Ints, information: Information, bootstrap: int, seed: int) -> Retrieval:
    found = measure_information(_centred(per_token), np.ones(len(own)), own, recall_at=(), bootstrap=bootstrap, seed=seed)
    interval = found.intervals.get("retrieval_acc", (0.0, 1.0))
    return Retrieval(found.retrieval_acc, interval, found.chance, 1.0 if information.mi_p_value is None else information.mi_p_value)


def _centred(per_token: Floats) -> Floats:
    centred: Floats = np.round(per_token - per_token.mean(axis=0), 12)  # equal scores must stay equal
    return centred


def _elsewhere(scores: Floats, lengths: Floats, own: Ints, seed: int) -> Elsewhere:
    centred_NP = _centred(scores / lengths[:, None])
    sequences_NP = centred_NP * lengths[:, None]

    def is_clear(labels: Ints) -> Bools:
        clear: Bools = sequences_NP - sequences_NP[np.arange(len(labels)), labels][:, None] >= CLEAR_NATS
        return clear

    return find_elsewhere(centred_NP, own, is_clear, seed)


def unigram_nats(reasonings: Sequence[Sequence[int]]) -> float:
    """The mean over reasonings of -log p per token, with p the share of a token among the tokens of all other reasonings.

    A half is added to every count, so that a token nobody else used is improbable and not impossible.

    >>> round(unigram_nats([[1, 1], [1, 2]]), 3)  # (log(3 / 1.5) + (log(3 / 2.5) + log(3 / 0.5)) / 2) / 2
    0.84
    """
    counts = Counter(token for reasoning in reasonings for token in reasoning)
    total, kinds = sum(counts.values()), len(counts)
    nats = []
    for reasoning in reasonings:
        own = Counter(reasoning)
        others = total - len(reasoning) + kinds / 2
        nats.append(-sum(count * math.log((counts[token] - count + 0.5) / others) for token, count in own.items()) / len(reasoning))
    return sum(nats) / len(nats)


def loose_share(templates: Templates) -> float:
    """Share of the traces in templates whose slots are all noise; which of them is used must be noise as well."""
    if templates.choice.kind is SlotKind.TIED:
        return 0.0
    return sum(template.share for template in templates.templates if all(slot.agreement.kind is SlotKind.NOISE for slot in template.slots))


def decide(
    found: Measurement,
    absent: MissingReasoning = MissingReasoning(),  # noqa: B008 (immutable)
    *,
    start: Start | None = None,
    recorded: Mapping[str, float] | None = None,
) -> Verdict:
    """The verdict on one measurement, and on the responses that it could not take in.

    Args:
        start: that of the run, which regimes are relative to.
        recorded: the metrics that the run itself recorded at this step, if it is one of Tether's.
    """
    verdict = judge(evidence_of(found, absent, recorded), start)
    own = recorded_evidence(recorded) if recorded is not None else None
    if own is None or judge(own).code not in COLLAPSES or verdict.code not in (VerdictCode.TIED, VerdictCode.WEAKLY_TIED):
        return verdict
    shown = ", ".join(item.name.replace("_", " ") for item in verdict.evidence if item.counts)
    words = f"The run's own scorer found no dependence at this step, and its report says so; what shows it here is {shown}."
    return dataclasses.replace(verdict, reasons=(words, *verdict.reasons))


def evidence_of(found: Measurement, absent: MissingReasoning = MissingReasoning(), recorded: Mapping[str, float] | None = None) -> Evidence:  # noqa: B008 (immutable)
    """Everything that an audit knows of one window."""
    information, lexical = found.information, found.lexical
    by_score = information.mi_p_value or 1.0
    signals = [
        found.retrieval.signal("retrieval"),
        found.adjusted.signal("adjusted_retrieval"),
        Signal("information", max(0.0, information.mi_seq / math.log(found.num_prompts)), by_score),
        Signal("agreement", max(0.0, lexical.agreement.strength), lexical.agreement.p_value),
        lexical.prompt_overlap.signal("prompt_overlap"),
    ]
    if lexical.neighbours is not None:
        signals.append(lexical.neighbours.signal("neighbours"))
    if lexical.nearest is not None:
        signals.append(lexical.nearest.signal("nearest"))
    own = recorded_evidence(recorded) if recorded is not None else None
    if own is not None and own.is_sufficient:  # a smaller sample would have no label of its own
        signals += [Signal(f"recorded_{item.name}", item.effect, item.p_value) for item in own.signals]
    best = max(found.adjusted.accuracy, lexical.neighbours.accuracy if lexical.neighbours else 0.0)
    return Evidence(
        num_prompts=found.num_prompts,
        num_reasonings=found.num_reasonings,
        most_samples=found.most_samples,
        retrieval=found.retrieval,
        signals=tuple(signals),
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
            neighbours=lexical.neighbours,
            overlap=lexical.prompt_overlap,
            elsewhere=(lexical.elsewhere.share, lexical.elsewhere.p_value),
            nearest=lexical.nearest,
        ),
        without_reasoning=absent,
        images=_image_evidence(found),
    )


def _image_evidence(found: Measurement) -> ImageEvidence | None:
    if "image_swapped" not in found.images.levels:
        return None
    ends = found.images.intervals["image_swapped"]
    return ImageEvidence(found.images.levels["image_swapped"], *ends, found.mean_tokens, found.images.num_prompts)
