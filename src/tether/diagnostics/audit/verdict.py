"""The verdict on one window, in plain words, as far as the numbers support it.

Six signals show dependence, each with its own p-value and an effect between 0 (none) and 1 (the prompt decides): retrieval by the
model, the same adjusted for prompts that raise the score of any text, information as a share of log P, and three that need no model:
agreement, neighbours and prompt overlap (lexical.py). A signal counts only if it is significant. The largest effect that counts decides:

    at least 0.6   tied to the input
    at least 0.1   weakly tied: a part of the reasonings, or a part of each
    below          input-agnostic: template collapse if the text varies, low-entropy collapse if it is one fixed text

The largest is taken because each signal misses something: a weak model misses the text, words miss a paraphrase. None of them is large by
chance once it is significant. A template in which nothing follows the prompt is direct evidence of collapse: where such templates hold three
in ten of the traces, the verdict is at most weakly tied, unless the prompts of eight in ten are found.

Three things bend that rule:

- Text that can be predicted from its prompt need not be about it. Where most reasonings fit one and the same other prompt, by their words or by the
  model's scores, the verdict is misplaced, and says which of the two ties them to their own.
- Blank reasoning depends on nothing: the effect of the others counts for their share of the responses. Responses whose reasoning is missing for
  another cause (cut off, no tags) are no evidence; from one in ten on they are named, from nine in ten on it cannot be told.
- An absence of signals means collapse only if a signal could have been found: with few reasonings, or one for each of a few prompts, it cannot
  be told; nor with one for each prompt and a scorer that finds the text no likelier than counts of its tokens do, unless prompts share their texts.

The bounds were chosen on generated rollouts of twenty kinds (tests/unit/diagnostics) and on real ones of tiny.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from tether.core.metrics import wilson_interval
from tether.diagnostics.audit.measure import Measurement

SIGNIFICANT = 0.01
TIED = 0.6
WEAKLY = 0.1
CLEARLY = 0.8
"""From this effect on, templates do not lower the verdict."""
LOOSE = 0.3
FIXED_SHARE = 0.5
"""One text: the most common reasoning is at least this share of all ..."""
FIXED_SIMILARITY = 0.95
"""... or two reasonings of one prompt are alike to at least this degree."""
SHARED_TEXTS = 0.5
"""One reasoning for each prompt, and no more different ones than this share: the text cannot name its prompt, whoever reads it."""
ELSEWHERE = 0.5
"""Misplaced: at least this share of the reasonings fits one and the same other prompt."""
NAMED_SHARE = 0.1
"""Responses without reasoning are part of the verdict from this share on."""
MOSTLY_MISSING = 0.9
FEWEST = 12
"""With fewer reasonings, an absence of signals means nothing."""
FEWEST_SINGLE = 24
"""The same where each prompt has one reasoning only."""


class VerdictCode(StrEnum):
    """The possible verdicts on the reasoning."""

    TIED = "tied"
    WEAKLY_TIED = "weakly_tied"
    TEMPLATE_COLLAPSE = "template_collapse"
    LOW_ENTROPY_COLLAPSE = "low_entropy_collapse"
    MISPLACED = "misplaced"
    CANNOT_BE_TOLD = "cannot_be_told"


HEADLINES = {
    VerdictCode.TIED: "Tied to the input: the reasoning depends on its prompt.",
    VerdictCode.WEAKLY_TIED: "Weakly tied: some of the reasoning depends on its prompt, much of it does not.",
    VerdictCode.TEMPLATE_COLLAPSE: "Template collapse: the reasoning varies, but not with its prompt.",
    VerdictCode.LOW_ENTROPY_COLLAPSE: "Low-entropy collapse: one fixed text, whatever the prompt.",
    VerdictCode.MISPLACED: "Misplaced: the reasoning follows its prompt, but is about another one.",
    VerdictCode.CANNOT_BE_TOLD: "It cannot be told whether the reasoning depends on its prompt.",
}


@dataclass(frozen=True, slots=True)
class Signal:
    """One of the six numbers that show dependence. Example: Signal("neighbours", 0.93, 0.002)."""

    name: str
    effect: float
    p_value: float

    @property
    def counts(self) -> bool:
        return self.p_value <= SIGNIFICANT


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer, the reasons, and the signals behind it."""

    code: VerdictCode
    headline: str
    reasons: tuple[str, ...]
    effect: float | None = None
    """The largest effect that counts; 0 where none does, None where nothing was measured."""
    evidence: tuple[Signal, ...] = ()


def no_verdict(reason: str) -> Verdict:
    """For a window that could not be measured."""
    return Verdict(VerdictCode.CANNOT_BE_TOLD, HEADLINES[VerdictCode.CANNOT_BE_TOLD], (reason,))


@dataclass(frozen=True, slots=True)
class Unread:
    """The responses of a window that hold no reasoning, as shares of all in its scope."""

    blank: float = 0.0
    """Tags with nothing between them."""
    missing: float = 0.0
    """For any other cause."""
    causes: str = ""
    """Of the latter, in words."""


def decide(found: Measurement, unread: Unread = Unread()) -> Verdict:  # noqa: B008 (immutable)
    """The verdict on one measurement, and on the responses that it could not take in."""
    evidence = _evidence(found)
    of_text = max([item.effect for item in evidence if item.counts], default=0.0)
    effect = round(of_text * (1 - unread.blank), 9)  # a bound that is met exactly is met
    code, reasons = _decided(found, evidence, effect, unread)
    return Verdict(code, HEADLINES[code], (*_unread_words(unread, of_text), *reasons, *_numbers(found)), effect, evidence)


def _unread_words(unread: Unread, of_text: float) -> list[str]:
    words = []
    if unread.blank >= NAMED_SHARE:
        words.append(
            f"{unread.blank:.0%} of the responses have blank reasoning, which depends on nothing; the others show {of_text:.0%} of full dependence."
        )
    if unread.missing >= NAMED_SHARE:
        words.append(
            f"{unread.missing:.0%} of the responses hold no reasoning that can be read ({unread.causes}); this is about the others."
        )
    return words


def _evidence(found: Measurement) -> tuple[Signal, ...]:
    information, lexical = found.information, found.lexical
    by_rank, by_score = information.retrieval_p_value or 1.0, information.mi_p_value or 1.0
    evidence = [
        Signal("retrieval", max(0.0, (information.retrieval_acc - information.chance) / (1 - information.chance)), by_rank),
        Signal("adjusted_retrieval", max(0.0, found.adjusted.excess), by_score),
        Signal("information", max(0.0, information.mi_seq / math.log(found.num_prompts)), by_score),
        Signal("agreement", max(0.0, lexical.agreement.strength), lexical.agreement.p_value),
        Signal("prompt_overlap", max(0.0, lexical.prompt_overlap.excess), lexical.prompt_overlap.p_value),
    ]
    if lexical.neighbours is not None:
        evidence.append(Signal("neighbours", max(0.0, lexical.neighbours.excess), lexical.neighbours.p_value))
    return tuple(evidence)


def _decided(found: Measurement, evidence: tuple[Signal, ...], effect: float, unread: Unread) -> tuple[VerdictCode, list[str]]:
    if unread.missing >= MOSTLY_MISSING:
        return VerdictCode.CANNOT_BE_TOLD, ["Too few of the responses hold reasoning to speak for the others."]
    counted = any(item.counts for item in evidence)
    if counted and (words := _misplaced(found, evidence)) is not None:
        return VerdictCode.MISPLACED, [words]
    if effect >= TIED:
        if found.loose_share >= LOOSE and effect < CLEARLY:
            words = f"{found.loose_share:.0%} of the reasonings follow a template in which nothing depends on the prompt"
            return VerdictCode.WEAKLY_TIED, [f"Partial collapse: {words}; the rest is tied to it."]
        return VerdictCode.TIED, []
    if effect >= WEAKLY or (counted and found.most_samples == 1 and unread.blank < FIXED_SHARE):
        return VerdictCode.WEAKLY_TIED, [_how_weak(found, effect)]
    if is_fixed(found) or unread.blank >= FIXED_SHARE:
        share = found.lexical.top_share
        return VerdictCode.LOW_ENTROPY_COLLAPSE, [f"{share:.0%} of the reasonings are word for word the same."] if share > 0.5 else []
    if (lack := _too_little(found) or _cannot_read(found)) is not None:
        return VerdictCode.CANNOT_BE_TOLD, [lack]
    reasons = ["A dependence shows, but too small to matter."] if counted else []
    if found.most_samples == 1:
        reasons.append("With one reasoning per prompt this rests on the model and on shared words alone; sample several to be sure.")
    return VerdictCode.TEMPLATE_COLLAPSE, reasons


def _misplaced(found: Measurement, evidence: tuple[Signal, ...]) -> str | None:
    """What fits another prompt better, in words; None where the reasonings are at home."""
    words, scores = found.lexical.elsewhere, found.elsewhere
    by_words, by_scores = (item.share >= ELSEWHERE and item.p_value <= SIGNIFICANT for item in (words, scores))
    by_scores = by_scores and found.is_read
    own = {item.name for item in evidence if item.counts and item.effect >= WEAKLY}
    if by_words and own & {"retrieval", "adjusted_retrieval"}:
        return (
            "The model's scores tie the reasonings to their prompts, yet the words of "
            f"{words.share:.0%} fit one and the same other prompt better: check that prompts and responses are paired as they were sampled."
        )
    if by_scores and "prompt_overlap" in own:
        return (
            "The reasonings share words with their prompts, yet the model's scores find that "
            f"{scores.share:.0%} fit one and the same other prompt better: read a few of them."
        )
    if not (by_words or by_scores):
        return None
    who = "words and the model's scores find" if by_words and by_scores else "the words show" if by_words else "the model's scores find"
    share = max(item.share for item, holds in ((words, by_words), (scores, by_scores)) if holds)
    return (
        f"Reasonings of one prompt are alike, but {who} that {share:.0%} of them fit one and the same other prompt better, and hardly any their own: "
        "check that prompts and responses are paired as they were sampled."
    )


def _cannot_read(found: Measurement) -> str | None:
    """Why finding nothing means nothing with this scorer, or None. Several reasonings of a prompt can be compared without it."""
    shared = found.lexical.num_distinct <= SHARED_TEXTS * found.num_reasonings
    if found.most_samples > 1 or found.is_read or shared:
        return None
    return (
        f"This scorer cannot tell: under every prompt it finds the text no likelier than counts of its tokens do ({found.scorer_nats:.1f} nats a "
        f"token, counts {found.unigram_nats:.1f}), and one reasoning for each prompt leaves nothing else to compare; take a model that can read the "
        "text, or several reasonings for each prompt."
    )


def is_fixed(found: Measurement) -> bool:
    """One text for everything."""
    return found.lexical.top_share >= FIXED_SHARE or found.lexical.similarity >= FIXED_SIMILARITY


def _how_weak(found: Measurement, effect: float) -> str:
    if found.loose_share >= LOOSE:
        return f"Partial collapse: {found.loose_share:.0%} of the reasonings follow a template in which nothing depends on the prompt."
    return f"The strongest signal of dependence is {effect:.0%} of what full dependence would show."


def _too_little(found: Measurement) -> str | None:
    """Why finding nothing means nothing here, or None."""
    fewest = FEWEST_SINGLE if found.most_samples == 1 else FEWEST
    each = ", one for each prompt" if found.most_samples == 1 else ""
    counted = f"{found.num_reasonings} reasonings under {found.num_prompts} prompts{each}"
    if found.num_reasonings < fewest:
        return f"Only {counted}: no dependence was found, but it takes at least {fewest} to find one."
    chance = found.information.chance
    best = max(found.adjusted.accuracy, found.lexical.neighbours.accuracy if found.lexical.neighbours else 0.0)
    high = wilson_interval(best * found.num_reasonings, found.num_reasonings)[1]
    if (high - chance) / (1 - chance) >= TIED:
        return f"Only {counted}: the prompt may be found from up to {high:.0%} of them, or by chance ({chance:.0%}); more are needed."
    return None


def _numbers(found: Measurement) -> list[str]:
    """The figures behind the verdict, two sentences."""
    information, lexical = found.information, found.lexical
    low, high = information.intervals.get("retrieval_acc", (0.0, 1.0))
    ceiling = math.log(found.num_prompts)
    mi_low, mi_high = information.intervals.get("mi_seq", (-math.inf, ceiling))
    by_model = (
        f"The model finds the prompt of {information.retrieval_acc:.0%} of the reasonings (95% interval {low:.0%} to {high:.0%}; chance "
        f"{information.chance:.1%}, p {information.retrieval_p_value:.3f}); information {information.mi_seq:.2f} nats of {ceiling:.2f} "
        f"({mi_low:.2f} to {mi_high:.2f}, p {information.mi_p_value:.3f})."
    )
    neighbours = (
        ""
        if lexical.neighbours is None
        else f"similarity to its neighbours finds that of {lexical.neighbours.accuracy:.0%} (p {lexical.neighbours.p_value:.3f}), "
    )
    by_words = (
        f"Words alone: {neighbours}words shared with the prompt {lexical.prompt_overlap.accuracy:.0%} (p {lexical.prompt_overlap.p_value:.3f}); two reasonings of "
        f"{'one prompt' if found.most_samples > 1 else 'any prompts'} are {lexical.similarity:.0%} alike."
    )
    return [by_model, by_words]
