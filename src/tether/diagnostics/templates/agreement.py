"""Does the filler of a slot follow the prompt? Agreement within prompts against agreement across them.

Two fillers agree by the cosine of their word counts: 1 for the same words, 0 for none in common, so a paraphrase counts in part. With W
the mean agreement of two distinct reasonings of one prompt and B that of two reasonings of different prompts, the strength is
(W - B) / (1 - B): Krippendorff's alpha with prompts as units, up to how the expected disagreement is averaged. Means over pairs of
distinct samples are unbiased, where a plug-in mutual information would rise with every filler that is seen once. The p-value is that
of a permutation test: prompts are shuffled over the reasonings. Whether an agreement could be detected at all is tested on the same shuffles, with
the fillers sorted by prompt as far as possible.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tether.core.seeding import generator
from tether.diagnostics.templates.records import Agreement, SlotKind

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Filler = tuple[str, ...]

MAX_TRACES = 500
MIN_PER_PROMPT = 50
SHUFFLES = 199
SIGNIFICANT = 0.01
MIN_PAIRS = 10
ROUNDING = 1e-9


def measure_agreement(fillers: Sequence[Filler], prompts: Ints) -> Agreement:
    """The agreement of fillers (tuples of words) with the prompts they were written for, from a sample of whole prompts.

    The result depends on the order of the traces only through the sample and the shuffles, so callers sort them first.
    """
    rng = generator("template ties")
    chosen = _whole_prompts(prompts, rng)
    distinct = sorted(set(fillers))
    number = {filler: index for index, filler in enumerate(distinct)}
    filler_N = np.array([number[fillers[n]] for n in chosen.tolist()], dtype=np.int64)
    prompt_N = prompts[chosen]

    agreement = _cosines([distinct[index] for index in np.unique(filler_N).tolist()])
    filler_N = np.unique(filler_N, return_inverse=True)[1]
    by_prompt = np.argsort(prompt_N, kind="stable")
    filler_N, prompt_N = filler_N[by_prompt], prompt_N[by_prompt]
    left, right = _pairs_within(prompt_N)
    num_within, num_all = len(left), len(filler_N) * (len(filler_N) - 1) // 2
    if num_within == 0 or num_within == num_all:
        return Agreement(0.0, 1.0, SlotKind.UNKNOWN)

    def within(order: Ints) -> float:
        return float(agreement[filler_N[order][left], filler_N[order][right]].sum())

    counts = np.bincount(filler_N)
    total = (float(counts @ agreement @ counts) - len(filler_N)) / 2
    observed = within(np.arange(len(filler_N)))
    shuffled = np.array([within(rng.permutation(len(filler_N))) for _ in range(SHUFFLES)])
    same, across = observed / num_within, (total - observed) / (num_all - num_within)
    strength = (same - across) / (1 - across) if across < 1 - ROUNDING else 0.0
    p_value = _p_value(observed, shuffled)
    best_p_value = _p_value(within(_sorted_by_filler(filler_N, prompt_N)), shuffled)
    blind = num_within < MIN_PAIRS or (total > ROUNDING and best_p_value > SIGNIFICANT)
    kind = SlotKind.TIED if p_value <= SIGNIFICANT else SlotKind.UNKNOWN if blind else SlotKind.NOISE
    return Agreement(strength, p_value, kind)


def _whole_prompts(prompts: Ints, rng: np.random.Generator) -> Ints:
    """At most about MAX_TRACES traces, prompt by prompt, so that pairs within prompts are not thinned out."""
    shuffled = rng.permutation(len(prompts))
    by_prompt = shuffled[np.argsort(prompts[shuffled], kind="stable")]
    members = np.split(by_prompt, np.cumsum(np.unique(prompts, return_counts=True)[1])[:-1])
    most = max(MIN_PER_PROMPT, MAX_TRACES // len(members))
    chosen: list[int] = []
    for index in rng.permutation(len(members)).tolist():
        if len(chosen) < MAX_TRACES:
            chosen += members[index][:most].tolist()
    return np.sort(np.array(chosen, dtype=np.int64))


def _cosines(fillers: Sequence[Filler]) -> Floats:
    """Cosine of word counts; an empty filler agrees with itself only."""
    vocabulary = {word: column for column, word in enumerate(sorted({word for filler in fillers for word in filler}), 1)}
    counts = np.zeros((len(fillers), len(vocabulary) + 1))
    for row, filler in enumerate(fillers):
        counts[row, 0] = not filler
        for word, count in Counter(filler).items():
            counts[row, vocabulary[word]] = count
    unit = counts / np.linalg.norm(counts, axis=1, keepdims=True)
    agreement: Floats = unit @ unit.T
    return agreement


def _pairs_within(prompts: Ints) -> tuple[Ints, Ints]:
    """All pairs of positions with the same prompt, of sorted prompts."""
    blocks = []
    start = 0
    for size in np.unique(prompts, return_counts=True)[1].tolist():
        blocks.append(np.stack(np.triu_indices(size, 1)) + start)
        start += size
    left, right = np.concatenate(blocks, axis=1)
    return left, right


def _sorted_by_filler(fillers: Ints, prompts: Ints) -> Ints:
    """An order of the traces that gives the prompts with the most traces the most common fillers: as tied as these fillers can be."""
    common_first = np.lexsort((fillers, -np.bincount(fillers)[fillers]))
    large_first = np.lexsort((prompts, -np.bincount(prompts)[prompts]))
    order = np.empty_like(common_first)
    order[large_first] = common_first
    return order


def _p_value(observed: float, shuffled: Floats) -> float:
    return float((1 + (shuffled >= observed - ROUNDING).sum()) / (1 + len(shuffled)))
