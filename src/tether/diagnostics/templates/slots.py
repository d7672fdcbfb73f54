"""From a skeleton and the traces that follow it to a printable template: what is fixed, what varies, and whether it follows the prompt."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tether.diagnostics.templates.agreement import measure_agreement
from tether.diagnostics.templates.corpus import WILD, Corpus, Text, is_word, words_of
from tether.diagnostics.templates.records import Slot, SlotKind, Template
from tether.diagnostics.templates.skeletons import SUPPORT, align, fit

Ints = npt.NDArray[np.int64]

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
