"""The one verdict on reasoning: does it depend on its prompt? Codes, rules and words are here and nowhere else.

`judge` makes every such verdict: in the live view, the report, the monitor, the audit. They differ in what they have measured (core/evidence.py), not
in the rules.

**Signals.** Each shows dependence by an effect between 0 (none) and 1 (the prompt decides) and counts only if its p-value is at most 0.01. The
largest effect that counts decides: tied from 0.6, weakly tied from 0.1, collapse below. The largest is taken because each signal misses
something: a weak model misses the text, words miss a paraphrase; none of them is large by chance once it is significant.

**The minimum sample.** No label is given, and no regime, below `FEWEST_PROMPTS` prompts and `FEWEST_REASONINGS` reasonings. Reasonings of one
prompt are alike for reasons that have nothing to do with it, so the unit is the prompt: P prompts can be dealt to P groups of reasonings in P!
ways, and the true one has a p-value of 1 / P! at best. 1 / 4! is 0.04; 1 / 5! is below 0.01, the level at which a signal counts.

**Words follow numbers.** An absence of signals is called a collapse only if the intervals exclude the other label: those of the retrieval accuracy and
of the information must end below half of what would be called tied. A dependence that shows, but below what is called weakly tied, is a collapse
only if the intervals end there too. Where they reach further, it cannot be told. The regime is of one piece with the verdict: where that cannot be told there is none, a verdict of
collapse has that collapse as its regime, and reasoning that is tied to its input is never in a regime of collapse.

**Images.** Where prompts hold images, the same reasoning was also scored with those of another episode. The image is ignored where the interval of what
a token loses then holds 0, and ends below half of what would be called tied, in nats per reasoning. It is named beside the code, which is about the prompt as a whole.

Three things bend the rule on signals:

- Text that can be predicted from its prompt need not be about it. Where most reasonings fit one and the same other prompt, the verdict is misplaced.
- Blank reasoning depends on nothing: the effect of the others counts for their share of the responses. Responses whose reasoning is missing for
  another cause (cut off, no tags) are no evidence; from one in ten on they are named, from nine in ten on it cannot be told.
- A template in which nothing follows the prompt is direct evidence of collapse: where such templates hold three in ten of the traces, the verdict is
  at most weakly tied, unless the prompts of eight in ten are found.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from tether.core.enums import REGIME_FRACTION, Regime
from tether.core.evidence import (
    FEWEST_PROMPTS,
    FEWEST_REASONINGS,
    REACH,
    SIGNIFICANT,
    TIED,
    WEAKLY,
    Evidence,
    MissingReasoning,
    Signal,
    Start,
)
from tether.core.metrics import wilson_interval
from tether.core.shares import interval_words

UNSEEN = 2 * WEAKLY
"""No collapse by words alone where the nearest reasonings leave this much possible: what a tied quarter shows, and a true collapse seldom."""
LARGER_MODEL = "Qwen/Qwen3-4B"
"""A judge that reads what the small ones do not, for advice."""
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
FEWEST_SINGLE = 24
"""No collapse for fewer where each prompt has one reasoning only."""


class VerdictCode(StrEnum):
    """The possible verdicts on the reasoning."""

    TIED = "tied"
    WEAKLY_TIED = "weakly_tied"
    TEMPLATE_COLLAPSE = "template_collapse"
    LOW_ENTROPY_COLLAPSE = "low_entropy_collapse"
    MISPLACED = "misplaced"
    CANNOT_BE_TOLD = "cannot_be_told"


COLLAPSES = (VerdictCode.TEMPLATE_COLLAPSE, VerdictCode.LOW_ENTROPY_COLLAPSE)

HEADLINES = {
    VerdictCode.TIED: "Tied to the input: the reasoning depends on its prompt.",
    VerdictCode.WEAKLY_TIED: "Weakly tied: some of the reasoning depends on its prompt, much of it does not.",
    VerdictCode.TEMPLATE_COLLAPSE: "Template collapse: the reasoning varies, but not with its prompt.",
    VerdictCode.LOW_ENTROPY_COLLAPSE: "Low-entropy collapse: nearly one text, whatever the prompt.",
    VerdictCode.MISPLACED: "Misplaced: the reasoning follows its prompt, but is about another one.",
    VerdictCode.CANNOT_BE_TOLD: "It cannot be told whether the reasoning depends on its prompt.",
}


NEXT_STEPS = {
    VerdictCode.TIED: "This is how it should be; train on.",
    VerdictCode.WEAKLY_TIED: "This is usual for a small model or early in training, and no failure by itself: train on and see whether information "
    "rises. If it falls, keep only prompts with signal (filter.strategy top_p, lower filter.keep).",
    VerdictCode.TEMPLATE_COLLAPSE: "This is bad, whatever the reward says: return to a checkpoint from before it, then lower filter.keep and "
    "algorithm.entropy_coef.",
    VerdictCode.LOW_ENTROPY_COLLAPSE: "This is bad, whatever the reward says: return to a checkpoint from before it, then raise rollout.temperature or "
    "algorithm.kl_coef.",
    VerdictCode.MISPLACED: "Check how prompts and responses are paired before you read any other number.",
    VerdictCode.CANNOT_BE_TOLD: f"This is neither good nor bad news: measure more prompts, or score with a larger model, such as {LARGER_MODEL}.",
}
"""Whether a verdict is good, and what to do next."""
IMAGE_IGNORED = "The image is ignored."
LOOK_AGAIN = (
    "This is template collapse in what the agent sees: return to a checkpoint from before it, keep only prompts with signal (lower filter.keep), and "
    "check that the text does not tell what the image shows (env.options.observation)."
)
"""What to do where the image is ignored."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer, the reasons, the signals behind it, and the regime that goes with it."""

    code: VerdictCode
    headline: str
    reasons: tuple[str, ...]
    effect: float | None = None
    """The largest effect that counts; 0 where none does, None where nothing was measured."""
    evidence: tuple[Signal, ...] = ()
    regime: Regime | None = None
    """None where the code is cannot_be_told or misplaced, and where no start is known."""
    image_ignored: bool = False
    """Prompts hold images, and the reasoning does not depend on them."""

    @property
    def label(self) -> str:
        """In a few words, for a line or a table: the regime where there is one. Example: "compressed reasoning"."""
        return str(self.regime) if self.regime is not None else self.code.replace("_", " ")

    @property
    def next_step(self) -> str:
        """Whether this is good, and what to do next."""
        if self.image_ignored and self.code not in COLLAPSES:
            return LOOK_AGAIN
        fell = self.regime in (Regime.TEMPLATE_COLLAPSE, Regime.LOW_ENTROPY_COLLAPSE)
        return NEXT_STEPS[VerdictCode(self.regime.replace(" ", "_").replace("-", "_")) if fell and self.regime else self.code]


def no_verdict(reason: str) -> Verdict:
    """For a sample that could not be measured."""
    return Verdict(VerdictCode.CANNOT_BE_TOLD, HEADLINES[VerdictCode.CANNOT_BE_TOLD], (reason,))


def judge(found: Evidence, start: Start | None = None) -> Verdict:
    """The verdict on one sample; `start` is that of its run, None where the sample is the first or the only one."""
    of_text = max([item.effect for item in found.signals if item.counts], default=0.0)
    effect = round(of_text * (1 - found.without_reasoning.blank), 9)  # a bound that is met exactly is met
    start = start or found.start
    code, reasons = _decided(found, effect, start)
    weak = [
        f"{found.scorer} is a weak judge of this text: it finds reasonings likelier under other prompts than under their own, so its "
        "information is not given."
    ]
    seen = found.images if found.is_sufficient else None
    reasons = [*(weak if found.is_weak else ()), *_missing_words(found.without_reasoning, of_text), *reasons, *_numbers(found)]
    reasons += [seen.words()] if seen is not None else []
    ignored = seen is not None and seen.is_ignored
    headline = f"{HEADLINES[code]} {IMAGE_IGNORED}" if ignored else HEADLINES[code]
    return Verdict(code, headline, tuple(reasons), effect, found.signals, _regime(code, found, start), ignored)


def _decided(found: Evidence, effect: float, start: Start | None) -> tuple[VerdictCode, list[str]]:
    absent, texts = found.without_reasoning, found.texts
    if absent.missing >= MOSTLY_MISSING:
        return VerdictCode.CANNOT_BE_TOLD, ["Too few of the responses hold reasoning to speak for the others."]
    if not found.is_sufficient:
        least = f"{FEWEST_REASONINGS} reasonings under {FEWEST_PROMPTS} prompts"
        return VerdictCode.CANNOT_BE_TOLD, [f"Only {_sample_words(found)}: no verdict is given on fewer than {least}."]
    counted = any(item.counts for item in found.signals)
    if counted and (words := _misplaced(found)) is not None:
        return VerdictCode.MISPLACED, [words]
    if effect >= TIED:
        if texts is not None and texts.loose_share >= LOOSE and effect < CLEARLY:
            words = f"{texts.loose_share:.0%} of the reasonings follow a template in which nothing depends on the prompt"
            return VerdictCode.WEAKLY_TIED, [f"Partial collapse: {words}; the rest is tied to it."]
        return VerdictCode.TIED, []
    if effect >= WEAKLY or (counted and found.most_samples == 1 and absent.blank < FIXED_SHARE):
        return VerdictCode.WEAKLY_TIED, [_how_weak(found, effect, start)]
    if absent.blank >= FIXED_SHARE:
        return VerdictCode.LOW_ENTROPY_COLLAPSE, []
    if texts is not None and (fixed := _fixed_words(found, start)) is not None:  # the texts themselves show it
        return VerdictCode.LOW_ENTROPY_COLLAPSE, [fixed]
    if (lack := _may_be_tied(found, counted)) is not None:
        return VerdictCode.CANNOT_BE_TOLD, [lack]
    if texts is None and (fixed := _fixed_words(found, start)) is not None:
        return VerdictCode.LOW_ENTROPY_COLLAPSE, [fixed]
    if (lack := _too_little(found) or _cannot_read(found)) is not None:
        return VerdictCode.CANNOT_BE_TOLD, [lack]
    reasons = ["A dependence shows, but too small to matter."] if counted else []
    if not found.is_read:
        reasons.append("This rests on the words: the scorer finds the text no likelier than counts of its tokens do.")
    if texts is None and start == found.start:
        reasons.append(
            "This is the run's first measurement: nothing has collapsed yet, the reasoning does not depend on its prompt from the start."
        )
    if found.most_samples == 1:
        reasons.append("With one reasoning per prompt this rests on the model and on shared words alone; sample several to be sure.")
    if texts is None:
        reasons.append("This rests on the scores alone; tether diagnose compares the words of the reasonings as well.")
    return VerdictCode.TEMPLATE_COLLAPSE, reasons


def _regime(code: VerdictCode, found: Evidence, start: Start | None) -> Regime | None:
    """The regime of a verdict: its information is low where the verdict is a collapse, or where it is weakly tied and has fallen below half of the
    start beyond the interval; H(Z|X) is low below half of the start."""
    if code is VerdictCode.TEMPLATE_COLLAPSE:
        return Regime.TEMPLATE_COLLAPSE
    if code is VerdictCode.LOW_ENTROPY_COLLAPSE:
        return Regime.LOW_ENTROPY_COLLAPSE
    if code not in (VerdictCode.TIED, VerdictCode.WEAKLY_TIED) or start is None or found.h_conditional is None:
        return None
    is_diverse = not _entropy_is_low(found, start)
    if code is VerdictCode.WEAKLY_TIED and _information_fell(found, start):
        return Regime.TEMPLATE_COLLAPSE if is_diverse else Regime.LOW_ENTROPY_COLLAPSE
    return Regime.DIVERSE if is_diverse else Regime.COMPRESSED


def _entropy_is_low(found: Evidence, start: Start | None) -> bool:
    return start is not None and found.h_conditional is not None and found.h_conditional < REGIME_FRACTION * start.h_conditional


def _information_fell(found: Evidence, start: Start | None) -> bool:
    if start is None or found.mi_seq is None or start.mi_seq <= 0:
        return False
    high = found.mi_interval[1] if found.mi_interval is not None else found.mi_seq
    return high < REGIME_FRACTION * start.mi_seq


def _missing_words(absent: MissingReasoning, of_text: float) -> list[str]:
    words = []
    if absent.blank >= NAMED_SHARE:
        words.append(
            f"{absent.blank:.0%} of the responses have blank reasoning, which depends on nothing; the others show {of_text:.0%} of full dependence."
        )
    if absent.missing >= NAMED_SHARE:
        words.append(
            f"{absent.missing:.0%} of the responses hold no reasoning that can be read ({absent.causes}); this is about the others."
        )
    return words


def _misplaced(found: Evidence) -> str | None:
    """What fits another prompt better, in words; None where the reasonings are at home."""
    words, scores = found.texts.elsewhere if found.texts is not None else (0.0, 1.0), found.elsewhere
    by_words, by_scores = (share >= ELSEWHERE and p_value <= SIGNIFICANT for share, p_value in (words, scores))
    by_scores = by_scores and found.is_read
    own = {item.name for item in found.signals if item.counts and item.effect >= WEAKLY}
    if by_words and own & {"retrieval", "adjusted_retrieval"}:
        return (
            "The model's scores tie the reasonings to their prompts, yet the words of "
            f"{words[0]:.0%} fit one and the same other prompt better: check that prompts and responses are paired as they were sampled."
        )
    if by_scores and "prompt_overlap" in own:
        return (
            "The reasonings share words with their prompts, yet the model's scores find that "
            f"{scores[0]:.0%} fit one and the same other prompt better: read a few of them."
        )
    if not (by_words or by_scores):
        return None
    who = "words and the model's scores find" if by_words and by_scores else "the words show" if by_words else "the model's scores find"
    share = max(item[0] for item, holds in ((words, by_words), (scores, by_scores)) if holds)
    return (
        f"Reasonings of one prompt are alike, but {who} that {share:.0%} of them fit one and the same other prompt better, and hardly any their own: "
        "check that prompts and responses are paired as they were sampled."
    )


def _fixed_words(found: Evidence, start: Start | None) -> str | None:
    """Why the reasonings are nearly one text, or None. Without the texts, by the entropy that is left of the start's."""
    texts = found.texts
    if texts is None:
        if not _entropy_is_low(found, start):
            return None
        assert start is not None and found.h_conditional is not None  # it is low against it
        return f"H(Z|X) is {found.h_conditional:.3g} nats a token, {start.h_conditional:.3g} at the start."
    if texts.top_share >= FIXED_SHARE:
        return f"{texts.top_share:.0%} of the reasonings are word for word the same."
    return f"Two reasonings of one prompt are {texts.similarity:.0%} alike." if texts.similarity >= FIXED_SIMILARITY else None


def _how_weak(found: Evidence, effect: float, start: Start | None) -> str:
    if found.texts is not None and found.texts.loose_share >= LOOSE:
        return (
            f"Partial collapse: {found.texts.loose_share:.0%} of the reasonings follow a template in which nothing depends on the prompt."
        )
    words = f"The strongest signal of dependence is {effect:.0%} of what full dependence would show"
    if _information_fell(found, start):
        assert start is not None and found.mi_seq is not None  # it fell from there
        return f"{words}, and information has fallen from {start.mi_seq:.2f} nats at the start to {found.mi_seq:.2f}."
    return f"{words}."


def _sample_words(found: Evidence) -> str:
    each = ", one for each prompt" if found.most_samples == 1 else ""
    return f"{found.num_reasonings} reasonings under {found.num_prompts} prompts{each}"


def _may_be_tied(found: Evidence, counted: bool) -> str | None:
    """Why finding little means nothing: an interval reaches what would be another label."""
    if counted and found.most >= WEAKLY:
        shown = ", ".join(f"{item.name.replace('_', ' ')} p {item.p_value:.3f}" for item in found.signals if item.counts)
        return (
            f"A dependence shows ({shown}), but whether it is more than a trace cannot be told with this judge: the intervals reach to "
            f"{min(1.0, found.most):.0%} of full dependence. Score with a larger model, such as {LARGER_MODEL}, or measure more prompts."
        )
    if found.reach < REACH:
        return None
    return (
        f"Little or no dependence shows in {_sample_words(found)}, but the intervals reach to {min(1.0, found.reach):.0%} of full dependence: more "
        "prompts are needed."
    )


def _too_little(found: Evidence) -> str | None:
    """Why finding nothing means nothing here, or None."""
    if found.most_samples == 1 and found.num_reasonings < FEWEST_SINGLE:
        return f"Only {_sample_words(found)}: no dependence was found, but it takes at least {FEWEST_SINGLE} to find one."
    chance = found.retrieval.chance
    best = found.retrieval.accuracy if found.best_accuracy is None else found.best_accuracy
    high = wilson_interval(best * found.num_reasonings, found.num_reasonings)[1]
    if found.retrieval.excess_of(high) >= TIED:
        return f"Only {_sample_words(found)}: the prompt may be found from up to {high:.0%} of them, or by chance ({chance:.0%}); more are needed."
    return None


def _cannot_read(found: Evidence) -> str | None:
    """Why finding nothing means nothing with this scorer, or None. Several reasonings of a prompt can be compared without it."""
    shared = found.texts is not None and found.texts.num_distinct <= SHARED_TEXTS * found.num_reasonings
    sees = found.is_read and (found.most_samples == 1 or found.texts is None or not found.is_alike)
    if sees or shared:
        return None
    nearest = found.texts.nearest if found.texts is not None else None
    by_words = 1.0 if nearest is None else nearest.excess_of(nearest.interval[1])
    if by_words < UNSEEN:
        return None
    rest = "one reasoning for each prompt leaves nothing else to compare"
    if found.most_samples > 1:
        rest = f"by their words up to {min(1.0, by_words):.0%} of the reasonings may follow their prompt"
    what = f"under every prompt it finds the text no likelier than counts of its tokens do ({found.scorer_nats:.1f} nats a token, counts {found.unigram_nats:.1f})"
    if found.is_read:
        what = "to it a reasoning is as likely under one prompt as under another"
    return f"It cannot be told with this judge: {what}, and {rest}; take a larger model, such as {LARGER_MODEL}, or more reasonings."


def _numbers(found: Evidence) -> list[str]:
    """The figures behind the verdict, a sentence on the scores and one on the words."""
    own, texts = found.retrieval, found.texts
    p_words = "" if own.p_value is None else f", p {own.p_value:.3f}"
    ends = interval_words(own.accuracy, *found.interval, found.num_reasonings)
    by_model = f"{found.scorer} finds the prompt of {own.accuracy:.0%} of the reasonings ({ends}; chance {own.chance:.1%}{p_words})"
    if found.mi_seq is not None and found.num_prompts > 1 and not found.is_weak:
        low_high = "" if found.mi_interval is None else f"{found.mi_interval[0]:.2f} to {found.mi_interval[1]:.2f}"
        p_words = "" if found.mi_p_value is None else f"p {found.mi_p_value:.3f}"
        inside = ", ".join(part for part in (low_high, p_words) if part)
        by_model += f"; information {found.mi_seq:.2f} nats of {math.log(found.num_prompts):.2f}{f' ({inside})' if inside else ''}"
    if texts is None:
        return [f"{by_model}."]
    neighbours = (
        ""
        if texts.neighbours is None
        else f"similarity to its neighbours finds that of {texts.neighbours.accuracy:.0%} (p {texts.neighbours.p_value:.3f}), "
    )
    by_words = (
        f"Words alone: {neighbours}words shared with the prompt {texts.overlap.accuracy:.0%} (p {texts.overlap.p_value:.3f}); two reasonings of "
        f"{'one prompt' if found.most_samples > 1 else 'any prompts'} are {texts.similarity:.0%} alike."
    )
    return [f"{by_model}.", by_words]
