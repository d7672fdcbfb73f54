"""Templates: the skeletons that reasonings of different prompts share, and the slots in them that still vary.

Reasonings are cut into words, a sample of them is searched for skeletons (`skeletons`), every trace is then assigned to the skeleton it
shares most words with, and each slot is tested for following the prompt (`agreement`). A template counts only if it occurs under two prompts:
reasoning that repeats itself under one prompt is not a template. Nothing depends on the order of the traces or on the names of the prompts.

Cost: with N traces of L words, the search is bounded by its sample; the rest is O(N L) to read and O(T N L^2 / 64) to compare with T
skeletons, in compiled bit-parallel code. Log-template miners such as Drain were not taken: they split by length and first words, and
their result depends on the order of the lines.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from tether.core.errors import BadInput
from tether.diagnostics.templates.skeletons import SUPPORT, Candidates, Corpus, find_skeletons, read_corpus, shared_words
from tether.diagnostics.templates.slots import (
    Agreement,
    Slot,
    SlotKind,
    Template,
    Templates,
    TextShares,
    explain,
    measure_agreement,
    split_words,
)

__all__ = ["find_templates", "Templates", "Template", "Slot", "SlotKind", "Agreement", "TextShares"]

Ints = npt.NDArray[np.int64]

SAMPLE_SIZE = 1000
SAMPLE_SLACK = 0.5
"""A skeleton may have this part of the asked share in the sample; the share itself is asked for on all traces."""
NO_TEMPLATE = -1


def find_templates(
    reasonings: Sequence[str], prompts: Sequence[Hashable], *, min_share: float = 0.05, max_templates: int = 10
) -> Templates:
    """The templates that reasonings of different prompts share.

    Args:
        reasonings: N texts, think tags left out. Texts without a word are counted and left out.
        prompts: N hashable ids of the prompts they answer, two distinct ones at least.
        min_share: a template must explain this share of the traces.
        max_templates: stop after this many.

    Raises:
        ValueError: nothing to read, lengths that differ, one prompt only, an option out of range.
    """
    _check(reasonings, prompts, min_share, max_templates)
    corpus = read_corpus(reasonings, prompts, SUPPORT * SAMPLE_SLACK * min_share)
    if not corpus.texts:
        raise BadInput(f"none of the {len(reasonings)} reasonings holds a word; check how the reasoning is extracted")
    if corpus.num_prompts < 2:
        raise BadInput("all reasonings come from one prompt; a template is what different prompts share, so give at least two")
    template_of_T, skeletons = _assign(corpus, _search(corpus, min_share, max_templates), min_share)
    found = [explain(skeleton, corpus, np.flatnonzero(template_of_T == index)) for index, skeleton in enumerate(skeletons)]
    found.sort(key=lambda explained: (-explained.template.num_traces, explained.template.skeleton))
    total = sum(corpus.texts[text].num_words for text in corpus.text_of_T.tolist())
    split = [split_words(explained) for explained in found]
    parts = {part: sum(words[part] for words in split) / total for part in ("template", "tied", "noise", "unknown")}
    return Templates(
        tuple(explained.template for explained in found),
        len(corpus.text_of_T),
        corpus.num_prompts,
        corpus.num_empty,
        float((template_of_T != NO_TEMPLATE).mean()),
        TextShares(**parts, rest=max(0.0, 1.0 - sum(parts.values()))),
        measure_agreement([(str(template),) for template in template_of_T.tolist()], corpus.prompt_of_T),
    )


def _search(corpus: Corpus, min_share: float, max_templates: int) -> list[str]:
    sample = corpus.sample(SAMPLE_SIZE)
    texts, index, counts = np.unique(corpus.text_of_T[sample], return_inverse=True, return_counts=True)
    prompts: list[set[int]] = [set() for _ in texts]
    for m, prompt in zip(index.tolist(), corpus.prompt_of_T[sample].tolist(), strict=True):
        prompts[m].add(prompt)
    candidates = Candidates([corpus.texts[text] for text in texts.tolist()], counts.astype(np.float64), [frozenset(own) for own in prompts])
    return find_skeletons(candidates, SAMPLE_SLACK * min_share * len(sample), max_templates)


def _assign(corpus: Corpus, skeletons: list[str], min_share: float) -> tuple[Ints, list[str]]:
    """The template of each trace, and the skeletons left once those that too few traces or prompts follow are given up, rarest first."""
    shared = [shared_words(skeleton, corpus.texts) for skeleton in skeletons]
    while skeletons:
        scores = np.stack(shared)
        template_of_text = np.where(scores.max(axis=0) > 0, scores.argmax(axis=0), NO_TEMPLATE)
        template_of_T = template_of_text[corpus.text_of_T]
        sizes = [int((template_of_T == index).sum()) for index in range(len(skeletons))]
        prompts = [len(np.unique(corpus.prompt_of_T[template_of_T == index])) for index in range(len(skeletons))]
        short = [index for index in range(len(skeletons)) if sizes[index] < min_share * len(template_of_T) - 1e-9 or prompts[index] < 2]
        if not short:
            return template_of_T, skeletons
        rarest = min(short, key=lambda index: (sizes[index], skeletons[index]))
        skeletons = skeletons[:rarest] + skeletons[rarest + 1 :]
        shared = shared[:rarest] + shared[rarest + 1 :]
    return np.full(len(corpus.text_of_T), NO_TEMPLATE), []


def _check(reasonings: Sequence[str], prompts: Sequence[Hashable], min_share: float, max_templates: int) -> None:
    if isinstance(reasonings, str) or len(reasonings) == 0:
        raise BadInput(f"reasonings must be a list of at least one text; got {'one string' if isinstance(reasonings, str) else 'nothing'}")
    if len(reasonings) != len(prompts):
        raise BadInput(f"there are {len(reasonings)} reasonings but {len(prompts)} prompts; give the prompt of each reasoning")
    for index, (reasoning, prompt) in enumerate(zip(reasonings, prompts, strict=True)):
        if not isinstance(reasoning, str):
            raise BadInput(f"reasoning {index} is {type(reasoning).__name__}; give texts, an empty one where there is no reasoning")
        if not isinstance(prompt, Hashable):
            raise BadInput(f"prompt {index} is {type(prompt).__name__}, which cannot be compared; give its text or a number")
    if not (math.isfinite(min_share) and 0 < min_share <= 1):
        raise BadInput(f"min_share is {min_share}; it is a share of the traces, above 0 and at most 1")
    if max_templates < 1:
        raise BadInput(f"max_templates is {max_templates}; ask for at least 1")
