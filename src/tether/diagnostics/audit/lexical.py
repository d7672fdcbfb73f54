"""Lexical measures, without any model: do the words follow the prompt, and how much variety is in them?

A model that scores text of another model may be too weak to see what the text depends on. Five measures need no model:

- similarity: how alike two reasonings of one prompt are (cosine of word counts). Near 1 there is one fixed text.
- agreement: how much more reasonings of one prompt agree than those of different prompts, 1 where the prompt decides the text (`templates.agreement`).
- neighbours: whether a reasoning is more similar to the other reasonings of its own prompt than to those of any other: retrieval by
  similarity, over words and pairs of neighbouring words, so that an order of words that follows the prompt is seen as well. Where a part of the
  reasonings ignores its prompt, that part fails.
- nearest: whether the reasoning that is most similar to it answers the same prompt. The mean over a prompt's other reasonings is diluted where most of
  them ignore it; the single nearest one still shows a quarter that does not.
- prompt overlap: whether a reasoning uses words that its own prompt holds and others do not: retrieval by shared words. It needs no second
  reasoning of a prompt, but sees only words that are repeated.

Words that most reasonings hold are left out of the last four. All of them are tested by shuffling which prompt a reasoning belongs to.

Agreement and neighbours show that the text can be predicted from its prompt, not that it is about it. `elsewhere` is the share of the reasonings
that fit one and the same other prompt better than their own.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tether.core.evidence import Retrieval
from tether.core.seeding import generator
from tether.diagnostics.information import measure_information, own_in_top
from tether.diagnostics.intervals import prompt_effects, studentised_intervals
from tether.diagnostics.templates import Agreement
from tether.diagnostics.templates.skeletons import TOKEN
from tether.diagnostics.templates.slots import cosines, measure_agreement

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Words = tuple[str, ...]

COMMON_SHARE = 0.5
"""A word that more than this share of the reasonings hold tells nothing about which prompt they answer."""
SHUFFLES = 499
ELSEWHERE_SHUFFLES = 199
FEWEST_ELSEWHERE = 0.1
"""A smaller share decides nothing and is not tested."""
CLEAR_WORDS = 2
"""A reasoning fits another prompt clearly better if it shares so many words with it that its own prompt does not hold."""
DECIMALS = 9
"""Scores are rounded, so that equals stay equal and share their ties."""
TOLERANCE = 1e-7
"""Of equal means of such scores: sums differ in their last digits from one process to the next."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """How many reasonings fit another prompt best, the one that the other reasonings of their prompt fit best as well."""

    share: float
    """0 where no prompt has two reasonings: a single one may fit another prompt by chance."""
    p_value: float


@dataclass(frozen=True, slots=True)
class LexicalMeasures:
    """The lexical measures of one window."""

    num_distinct: int
    """Different reasonings."""
    top_share: float
    """Share of the most common one."""
    similarity: float
    """Mean similarity of two reasonings of one prompt; of any two where no prompt has two."""
    agreement: Agreement
    neighbours: Retrieval | None
    """None where no prompt has two reasonings."""
    nearest: Retrieval | None
    prompt_overlap: Retrieval
    elsewhere: Elsewhere
    """By the words that a reasoning shares with prompts."""


@dataclass(frozen=True, slots=True)
class _Resampling:
    num_prompts: int
    bootstrap: int
    seed: int


def measure_lexical(
    texts: Sequence[str], source: Sequence[int], prompts: Sequence[str], *, bootstrap: int = 0, seed: int = 0
) -> LexicalMeasures:
    """The lexical measures of reasonings (`texts`), each an answer to prompt number `source`, of two prompts or more.

    Args:
        bootstrap: resamples for the intervals; without, they reach from 0 to 1.
        seed: of the resampling.
    """
    words = [tuple(TOKEN.findall(text.casefold())) for text in texts]
    counts = Counter(words)
    own = np.asarray(source, dtype=np.int64)
    with_pairs = [(*reasoning, *(f"{first} {second}" for first, second in itertools.pairwise(reasoning))) for reasoning in words]
    resampling = _Resampling(len(prompts), bootstrap, seed)
    overlap = _Overlap(words, prompts)
    neighbours, nearest = _neighbours(_uncommon(with_pairs), own, resampling)
    return LexicalMeasures(
        num_distinct=len(counts),
        top_share=max(counts.values()) / len(words),
        similarity=_mean_similarity(words, own),
        agreement=measure_agreement(_uncommon(words), own),
        neighbours=neighbours,
        nearest=nearest,
        prompt_overlap=_tested(lambda labels: overlap.scores_NP, own, np.arange(len(own)), resampling),
        elsewhere=find_elsewhere(overlap.scores_NP, own, overlap.is_clear, seed),
    )


def _uncommon(words: Sequence[Words]) -> list[Words]:
    held = Counter(word for reasoning in words for word in set(reasoning))
    common = {word for word, count in held.items() if count > COMMON_SHARE * len(words)}
    return [tuple(word for word in reasoning if word not in common) for reasoning in words]


def _mean_similarity(words: Sequence[Words], own: Ints) -> float:
    likeness = cosines(words)
    alike = own[:, None] == own[None, :]
    np.fill_diagonal(alike, False)
    if not alike.any():
        alike = ~np.eye(len(own), dtype=bool)
    return float(likeness[alike].mean()) if alike.any() else 1.0


def _neighbours(words: Sequence[Words], own: Ints, resampling: _Resampling) -> tuple[Retrieval | None, Retrieval | None]:
    """Retrieval by mean similarity to the other reasonings of a prompt, rare words counting more; and by the most similar one alone."""
    num_prompts = resampling.num_prompts
    sizes = np.bincount(own, minlength=num_prompts)
    if sizes.max() < 2:
        return None, None
    held = Counter(word for reasoning in words for word in set(reasoning))
    likeness = cosines(words, {word: 1 + float(np.log(len(words) / count)) for word, count in held.items()})
    np.fill_diagonal(likeness, 0.0)
    rows = np.flatnonzero(sizes[own] > 1)  # a group of one has no neighbours to compare with

    def scores(labels: Ints) -> Floats:
        member_NP = np.zeros((len(labels), num_prompts))
        member_NP[np.arange(len(labels)), labels] = 1.0
        others_NP = np.maximum(sizes[None, :] - member_NP, 1.0)
        return np.round((likeness @ member_NP) / others_NP, DECIMALS)

    return _tested(scores, own, rows, resampling), _nearest(likeness, own, rows, resampling)


def _nearest(likeness: Floats, own: Ints, rows: Ints, resampling: _Resampling) -> Retrieval:
    """How often the most similar reasoning has the same prompt, ties shared; the p-value is that of shuffled prompts."""
    others = np.round(likeness, DECIMALS)
    np.fill_diagonal(others, -1.0)
    row_E, other_E = np.nonzero(others == others.max(axis=1, keepdims=True))
    weight_E = 1.0 / np.bincount(row_E)[row_E]

    def found(labels: Ints) -> Floats:
        own_E = weight_E * (labels[row_E] == labels[other_E])
        return np.bincount(row_E, weights=own_E, minlength=len(own))[rows].astype(np.float64)

    values, rng = found(own), generator("audit nearest", resampling.seed)
    hits = sum(float(found(rng.permutation(own)).mean()) >= float(values.mean()) - TOLERANCE for _ in range(SHUFFLES))
    chance = float((np.bincount(own)[own[rows]] - 1).mean() / max(1, len(own) - 1))
    interval = (0.0, 1.0)
    if resampling.bootstrap and len(np.unique(own[rows])) > 1:
        effects = {"nearest": prompt_effects(values, None, own[rows], resampling.num_prompts)}
        degrees, rng = len(np.unique(own[rows])) - 1, generator("audit nearest", "bootstrap", resampling.seed)
        interval = studentised_intervals(
            {"nearest": float(values.mean())}, effects, {"nearest": (0.0, 1.0)}, degrees=degrees, resamples=resampling.bootstrap, rng=rng
        )["nearest"]
    return Retrieval(float(values.mean()), interval, chance, (1 + hits) / (1 + SHUFFLES))


class _Overlap:
    """The words that reasonings share with prompts, each weighed by how few prompts hold it."""

    def __init__(self, words: Sequence[Words], prompts: Sequence[str]) -> None:
        asked = [set(TOKEN.findall(prompt.casefold())) for prompt in prompts]
        held = Counter(word for prompt in asked for word in prompt)
        rare = {word: column for column, word in enumerate(sorted(word for word in held if held[word] < len(prompts)))}
        weight = np.array([np.log(len(prompts) / held[word]) for word in rare])
        self._prompt_PW = np.zeros((len(prompts), len(rare)))
        for row, prompt in enumerate(asked):
            self._prompt_PW[row, [rare[word] for word in prompt if word in rare]] = 1.0
        self._reasoning_NW = np.zeros((len(words), len(rare)))
        for row, reasoning in enumerate(words):
            self._reasoning_NW[row, [rare[word] for word in set(reasoning) if word in rare]] = 1.0
        shared_NP = (self._reasoning_NW * weight) @ self._prompt_PW.T
        norm_P = np.sqrt((self._prompt_PW * weight**2).sum(axis=1))
        shared_NP /= np.where(norm_P > 0, norm_P, 1.0)  # a long prompt shares words with everything
        self.scores_NP: Floats = np.round(shared_NP - shared_NP.mean(axis=0), DECIMALS)
        """[N, P]; what a prompt shares with any reasoning tells nothing, and is taken away."""
        self._is_telling_W = np.array([2 * held[word] <= len(prompts) for word in rare], dtype=bool)

    def is_clear(self, labels: Ints) -> Bools:
        """Whether a reasoning shares two words or more with a prompt that its own does not hold, nor most others."""
        telling = self._is_telling_W
        foreign_NW = self._reasoning_NW[:, telling] * (1.0 - self._prompt_PW[labels][:, telling])
        clear: Bools = foreign_NW @ self._prompt_PW[:, telling].T >= CLEAR_WORDS
        return clear


def find_elsewhere(scores_NP: Floats, own: Ints, is_clear: Callable[[Ints], Bools], seed: int) -> Elsewhere:
    """The share of the reasonings that fit another prompt.

    The prompt that a reasoning should fit is the one that the other reasonings of its own prompt fit best, without it. It counts if that is
    another prompt, the reasoning by itself fits it best, without ties, and fits it clearly better than its own: a text that is the same for
    every reasoning of a prompt fits some prompt best whatever it says. The p-value is that of shuffled prompts.

    Args:
        scores_NP: what a prompt gives to any reasoning is taken away.
        is_clear: [N, P] by the prompts of the reasonings, which reasoning fits which prompt clearly better than its own.
    """
    rows = np.arange(len(own))
    mine_N, is_single_N = _clear_best(scores_NP)

    def share(labels: Ints) -> float:
        member_NP = np.zeros(scores_NP.shape)
        member_NP[rows, labels] = 1.0
        best_N, is_best_N = _clear_best(np.round((member_NP.T @ scores_NP)[labels] - scores_NP, DECIMALS - 2))
        return float(np.mean(is_best_N & is_single_N & (best_N == mine_N) & (best_N != labels) & is_clear(labels)[rows, best_N]))

    observed = share(own)
    if observed < FEWEST_ELSEWHERE:
        return Elsewhere(observed, 1.0)
    rng = generator("audit elsewhere", seed)
    hits = sum(share(rng.permutation(own)) >= observed for _ in range(ELSEWHERE_SHUFFLES))
    return Elsewhere(observed, (1 + hits) / (1 + ELSEWHERE_SHUFFLES))


def _clear_best(scores_NP: Floats) -> tuple[Ints, Bools]:
    """The best column of every row, and whether it is the only one."""
    highest_N = scores_NP.max(axis=1, keepdims=True)
    return scores_NP.argmax(axis=1).astype(np.int64), (scores_NP == highest_N).sum(axis=1) == 1


def _tested(scores: Callable[[Ints], Floats], own: Ints, rows: Ints, resampling: _Resampling) -> Retrieval:
    """Retrieval accuracy of these rows, with a permutation p-value.

    Two statistics are tested and the smaller p-value doubled: the mean score of the own prompt detects a little in every reasoning, the accuracy
    detects much in a few of them.
    """
    rng = generator("audit wording", resampling.seed)

    def statistics(labels: Ints) -> Floats:
        found = scores(labels)[rows]
        mine = labels[rows]
        return np.array([found[np.arange(len(rows)), mine].mean(), own_in_top(found, mine, 1).mean()])

    observed = statistics(own)
    hits = sum((statistics(rng.permutation(own)) >= observed - TOLERANCE).astype(np.int64) for _ in range(SHUFFLES))
    p_value = min(1.0, 2 * (1 + int(np.min(hits))) / (1 + SHUFFLES))
    found = measure_information(
        scores(own)[rows], np.ones(len(rows)), own[rows], recall_at=(), bootstrap=resampling.bootstrap, seed=resampling.seed
    )
    return Retrieval(found.retrieval_acc, found.intervals.get("retrieval_acc", (0.0, 1.0)), found.chance, p_value)
