"""One window, measured: pairs to cross-scores, to information, lexical measures and templates.

Besides the proxies of the paper there is one more number, the adjusted retrieval. A scorer that did not write the text may find any text
likelier under some prompts than under others; the argmax of a row then shows the prompt's general effect instead of the reasoning. The score
that a prompt gives to the average reasoning, per token, is subtracted first.

Whether the scorer can read the text at all is measured against counts of its tokens: a unigram model of the other reasonings. A scorer that finds
the text no likelier than that under any prompt has not understood a word order or a language, and cannot show a dependence.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tether.core.errors import BadInput
from tether.diagnostics.audit.encode import EncodedPairs
from tether.diagnostics.audit.lexical import Elsewhere, LexicalMeasures, Retrieval, find_elsewhere, measure_lexical
from tether.diagnostics.cross_score import cross_score
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
    templates = _templates(pairs)
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
        lexical=measure_lexical(pairs.texts, pairs.source, pairs.prompt_texts, bootstrap=bootstrap, seed=seed),
        templates=templates,
        loose_share=0.0 if templates is None else loose_share(templates),
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


def _templates(pairs: EncodedPairs) -> Templates | None:
    try:
        return find_templates(pairs.texts, pairs.source)
    except BadInput:  # no word in any reasoning, or all words under one prompt
        return None


def loose_share(templates: Templates) -> float:
    """Share of the traces in templates whose slots are all noise; which of them is used must be noise as well."""
    if templates.choice.kind is SlotKind.TIED:
        return 0.0
    return sum(template.share for template in templates.templates if all(slot.agreement.kind is SlotKind.NOISE for slot in template.slots))
