"""Templates and their slots: what is fixed, what varies, and whether the filler of a slot follows the prompt.

Two fillers agree by the cosine of their word counts: 1 for the same words, 0 for none in common, so a paraphrase counts in part. With W
the mean agreement of two distinct reasonings of one prompt and B that of two reasonings of different prompts, the strength is
(W - B) / (1 - B): Krippendorff's alpha with prompts as units, up to how the expected disagreement is averaged. Means over pairs of
distinct samples are unbiased, where a plug-in mutual information would rise with every filler that is seen once. The p-value is that
of a permutation test: prompts are shuffled over the reasonings. Whether an agreement could be detected at all is tested on the same shuffles, with
the fillers sorted by prompt as far as possible.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tether.core.seeding import generator
from tether.diagnostics.templates.skeletons import SUPPORT, WILD, Corpus, Text, align, fit, is_word, words_of

SHOWN_LENGTH = 40
"""Characters of a filler in the description; the record holds all of it."""


class SlotKind(StrEnum):
    """Whether the filler of a slot follows the prompt."""

    TIED = "tied"
    """Reasonings of one prompt agree on the filler more than reasonings of different prompts, beyond chance."""
    NOISE = "noise"
    """The filler varies, and no more with the prompt than chance allows."""
    UNKNOWN = "unknown"
    """Too few reasonings share a prompt to tell the two apart."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a varying text follows the prompt: agreement within prompts against agreement across prompts."""

    strength: float
    """(W - B) / (1 - B), W and B being the mean agreement within and across prompts. 1: the prompt decides, 0: it has no influence; may fall
    below 0 by chance. Both means are over pairs of distinct reasonings, so few samples do not lift it."""
    p_value: float
    """Share of shuffles of the prompts that agree at least as well within prompts."""
    kind: SlotKind


@dataclass(frozen=True, slots=True)
class Slot:
    """A place of a template whose words vary, such as ⟨2⟩."""

    number: int
    num_fillers: int
    """Distinct fillers, nothing at all being one of them."""
    fillers: tuple[tuple[str, float], ...]
    """The most common fillers and the share of the template's traces that have each; "" where the slot is left empty."""
    mean_words: float
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class Template:
    """One skeleton, e.g. "I am at ⟨1⟩, goal at ⟨2⟩. So ⟨3⟩", and the traces that follow it."""

    skeleton: str
    num_words: int
    """Fixed words of the skeleton; punctuation does not count."""
    num_traces: int
    share: float
    """Of all traces that have reasoning."""
    num_prompts: int
    prompt_share: float
    """Share of the prompts under which it occurs."""
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class TextShares:
    """Where the words of all reasonings go; the five add up to 1."""

    template: float
    """Fixed words of a template: the same whatever the prompt."""
    tied: float
    """Words in tied slots, times the strength of their agreement."""
    noise: float
    """Words in noise slots, and the remaining part of tied slots."""
    unknown: float
    """Words in slots of unknown kind."""
    rest: float
    """Words of traces that follow no template, and strays between the words of a skeleton."""


@dataclass(frozen=True, slots=True)
class Templates:
    """Everything that was found, the most common template first."""

    templates: tuple[Template, ...]
    num_traces: int
    """Traces with at least one word of reasoning; all shares are of these."""
    num_prompts: int
    num_empty: int
    """Traces without a word of reasoning; left out."""
    explained: float
    """Share of traces that follow some template."""
    words: TextShares
    choice: Agreement
    """Does the prompt decide which template (or none) is followed?"""

    def describe(self) -> str:
        """The finding in plain text, a few lines per template."""
        words = self.words
        unknown = f", {words.unknown:.0%} in slots too rare to classify" if words.unknown else ""
        lines = [
            f"{_counted(len(self.templates), 'template')} explain{'s' * (len(self.templates) == 1)} {self.explained:.0%} of "
            f"{_counted(self.num_traces, 'trace')} under {_counted(self.num_prompts, 'prompt')}.",
            f"Of the words {words.template:.0%} are template, {words.tied:.0%} follow the prompt, {words.noise:.0%} vary regardless of it"
            f"{unknown}, {words.rest:.0%} belong to no template.",
        ]
        if len(self.templates) > 1 or 0 < self.explained < 1:
            lines.append(f"Which template is used: {_in_words(self.choice)}.")
        for template in self.templates:
            where = f"{template.num_prompts} prompts, {template.prompt_share:.0%} of them"
            lines += ["", f"{template.share:6.1%}  {template.skeleton}    ({_counted(template.num_traces, 'trace')}; {where})"]
            for slot in template.slots:
                common = ", ".join(f"{_shortened(text) or '(nothing)'} {share:.0%}" for text, share in slot.fillers)
                more = ", ..." if slot.num_fillers > len(slot.fillers) else ""
                lines.append(f"        ⟨{slot.number}⟩ {_in_words(slot.agreement)}; {_counted(slot.num_fillers, 'filler')}: {common}{more}")
        return "\n".join(lines)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _shortened(filler: str) -> str:
    return filler if len(filler) <= SHOWN_LENGTH else f"{filler[: SHOWN_LENGTH - 1].rstrip()}…"


def _in_words(found: Agreement) -> str:
    return f"{found.kind} (agreement {found.strength:.2f}, p {found.p_value:.3f})"


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

    agreement = cosines([distinct[index] for index in np.unique(filler_N).tolist()])
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


def cosines(fillers: Sequence[Filler], weights: Mapping[str, float] | None = None) -> Floats:
    """[N, N] cosines of word counts, each word counted as often as its weight says; an empty filler agrees with empty ones only."""
    vocabulary = {word: column for column, word in enumerate(sorted({word for filler in fillers for word in filler}), 1)}
    counts = np.zeros((len(fillers), len(vocabulary) + 1))
    for row, filler in enumerate(fillers):
        counts[row, 0] = not filler
        for word, count in Counter(filler).items():
            counts[row, vocabulary[word]] = count * (weights[word] if weights else 1.0)
    counts /= np.linalg.norm(counts, axis=1, keepdims=True)
    agreement: Floats = counts @ counts.T
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


NUM_FILLERS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Reading:
    """One text read along a skeleton."""

    text: Text
    weight: int
    """Traces with this text."""
    places: list[int]
    gaps: list[list[int]]

    def filler(self, gap: int) -> tuple[str, ...]:
        return tuple(self.text.tokens[place] for place in self.gaps[gap])

    def num_words(self, places: Sequence[int]) -> int:
        return sum(is_word(self.text.tokens[place]) for place in places if place >= 0)


@dataclass(frozen=True, slots=True)
class Explained:
    """A template and its words, counted over all its traces."""

    template: Template
    fixed_words: int
    slot_words: tuple[int, ...]
    """Per slot of the template."""


def explain(skeleton: str, corpus: Corpus, traces: Ints) -> Explained:
    """The template of a skeleton, from the traces (indices into the corpus) that were assigned to it."""
    text_of_N, prompt_of_N = corpus.text_of_T[traces], corpus.prompt_of_T[traces]
    members = sorted(Counter(text_of_N.tolist()).items())
    # traces of a skeleton that was given up may have come in, and sampled support is not that of all traces
    fitted = fit(skeleton, [corpus.texts[text] for text, _ in members], [weight for _, weight in members])
    skeleton = fitted if words_of(fitted) else skeleton
    readings = {text: Reading(corpus.texts[text], weight, *align(skeleton, corpus.texts[text].codes)) for text, weight in members}
    num_gaps = len(skeleton.replace(WILD, "")) + 1
    filled = [
        sum(reading.weight for reading in readings.values() if reading.num_words(reading.gaps[gap])) / len(traces)
        for gap in range(num_gaps)
    ]
    varying = [gap for gap, share in enumerate(filled) if share >= 1 - SUPPORT - 1e-9]
    slots = [_slot(number, gap, readings, text_of_N, prompt_of_N) for number, gap in enumerate(varying, 1)]
    num_prompts = len(np.unique(prompt_of_N))
    template = Template(
        _printed(list(readings.values()), varying),
        len(words_of(skeleton)),
        len(traces),
        len(traces) / len(corpus.text_of_T),
        num_prompts,
        num_prompts / corpus.num_prompts,
        tuple(slots),
    )
    return Explained(
        template,
        sum(reading.weight * reading.num_words(reading.places) for reading in readings.values()),
        tuple(sum(reading.weight * reading.num_words(reading.gaps[gap]) for reading in readings.values()) for gap in varying),
    )


def split_words(explained: Explained) -> dict[str, float]:
    """The words of a template's traces by what they are, strays left out."""
    words = {"template": float(explained.fixed_words), "tied": 0.0, "noise": 0.0, "unknown": 0.0}
    for slot, count in zip(explained.template.slots, explained.slot_words, strict=True):
        if slot.agreement.kind is SlotKind.UNKNOWN:
            words["unknown"] += count
        else:
            tied = min(max(slot.agreement.strength, 0.0), 1.0) if slot.agreement.kind is SlotKind.TIED else 0.0
            words["tied"] += tied * count
            words["noise"] += (1 - tied) * count
    return words


def _slot(number: int, gap: int, readings: dict[int, Reading], text_of_N: Ints, prompt_of_N: Ints) -> Slot:
    shown: Counter[str] = Counter()
    num_words = 0
    for reading in readings.values():
        shown[_joined(reading.text, reading.gaps[gap])] += reading.weight
        num_words += reading.weight * reading.num_words(reading.gaps[gap])
    common = sorted(shown.items(), key=lambda item: (-item[1], item[0]))[:NUM_FILLERS_SHOWN]
    words = {text: tuple(token for token in reading.filler(gap) if is_word(token)) for text, reading in readings.items()}
    return Slot(
        number,
        len(shown),
        tuple((filler, count / len(text_of_N)) for filler, count in common),
        num_words / len(text_of_N),
        measure_agreement([words[text] for text in text_of_N.tolist()], prompt_of_N),
    )


def _printed(readings: list[Reading], varying: list[int]) -> str:
    """The skeleton with numbered slots, spaced as most of its traces are."""
    printed = ""
    for gap in range(len(readings[0].gaps)):
        if gap in varying:
            printed += _spaced(
                f"⟨{varying.index(gap) + 1}⟩", [(reading, reading.gaps[gap][0]) for reading in readings if reading.gaps[gap]]
            )
        if gap < len(readings[0].places):
            seen = [(reading, reading.places[gap]) for reading in readings if reading.places[gap] >= 0]
            printed += _spaced(seen[0][0].text.tokens[seen[0][1]], seen)
    return printed.strip()


def _spaced(piece: str, seen: list[tuple[Reading, int]]) -> str:
    """The piece, with a space before it unless most texts glue it to what precedes."""
    glued = sum(reading.weight * (1 if reading.text.glued[place] else -1) for reading, place in seen)
    return piece if glued > 0 else f" {piece}"


def _joined(text: Text, places: list[int]) -> str:
    return "".join(f"{'' if text.glued[place] else ' '}{text.tokens[place]}" for place in places).strip()
