"""Evidence: what was measured of a sample of reasoning, and what that leaves possible. The verdict on it is that of core/reasoning.py.

A run's records (`recorded_evidence`) and an audit's texts both become `Evidence`. The bounds of effects and the minimum sample are here, because an
interval is read against them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tether.core.metrics import wilson_interval
from tether.core.shares import share_interval

SIGNIFICANT = 0.01
Z_SIGNIFICANT = 2.5758
"""The normal quantile of SIGNIFICANT, for records of before there were p-values."""
TIED = 0.6
WEAKLY = 0.1
REACH = TIED / 2
"""No collapse where an interval reaches this effect: a true collapse stays below it, reasoning that is tied lies above."""
FEWEST_PROMPTS = 5
"""No label for fewer: 1 / 4! is above SIGNIFICANT, 1 / 5! is not."""
FEWEST_REASONINGS = 12
"""No label for fewer."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One of the numbers that show dependence. Example: Signal("neighbours", 0.93, 0.002)."""

    name: str
    effect: float
    p_value: float

    @property
    def counts(self) -> bool:
        return self.p_value <= SIGNIFICANT


@dataclass(frozen=True, slots=True)
class Retrieval:
    """How often the own prompt was found among all. Example: Retrieval(0.81, (0.74, 0.88), 0.125, 0.001)."""

    accuracy: float
    interval: tuple[float, float]
    """95%, over prompts."""
    chance: float
    p_value: float | None = None
    """None in records of before there was one."""

    @property
    def excess(self) -> float:
        """How far of the way from chance to certainty."""
        return self.excess_of(self.accuracy)

    def excess_of(self, accuracy: float) -> float:
        """The same of another accuracy, such as an end of the interval."""
        return (accuracy - self.chance) / (1 - self.chance) if self.chance < 1 else 0.0

    def signal(self, name: str) -> Signal:
        """The retrieval as a signal of dependence."""
        return Signal(name, max(0.0, self.excess), 1.0 if self.p_value is None else self.p_value)


@dataclass(frozen=True, slots=True)
class Texts:
    """What the texts themselves show, without a model; only an audit reads them."""

    num_distinct: int
    top_share: float
    """Share of the most common reasoning."""
    similarity: float
    """Of two reasonings of one prompt; of any two where no prompt has two."""
    loose_share: float
    """Share of the reasonings in templates in which nothing follows the prompt."""
    neighbours: Retrieval | None
    overlap: Retrieval
    elsewhere: tuple[float, float]
    """Share of the reasonings whose words fit one and the same other prompt better, and its p-value."""
    nearest: Retrieval | None = None
    """By the one reasoning that is most similar: sees a part that is tied among many that are not."""


@dataclass(frozen=True, slots=True)
class MissingReasoning:
    """The responses of a sample that hold no reasoning, as shares of all in its scope."""

    blank: float = 0.0
    """Tags with nothing between them."""
    missing: float = 0.0
    """For any other cause."""
    causes: str = ""
    """Of the latter, in words."""


@dataclass(frozen=True, slots=True)
class Start:
    """The run's first measurement of a sufficient sample, which regimes are relative to."""

    h_conditional: float
    mi_seq: float


@dataclass(frozen=True, slots=True)
class ImageEvidence:
    """What a token of the reasoning loses with the images of another episode, in nats, and its 95% interval."""

    swapped: float
    low: float
    high: float
    tokens: float
    """Of a reasoning, on average."""
    num_prompts: int
    """Prompts whose images were swapped."""

    @property
    def is_ignored(self) -> bool:
        return self.low <= 0 and self.tokens * self.high < REACH * math.log(max(2, self.num_prompts))

    def words(self) -> str:
        ends = f"{self.swapped:.3g} nats a token, {self.low:.3g} to {self.high:.3g}"
        if self.is_ignored:
            return f"The reasoning is as likely with the images of another episode ({ends} less): it does not depend on the image."
        if self.low > 0:
            return f"With the images of another episode the reasoning is less likely ({ends}): it depends on the image."
        return f"Whether it depends on the image cannot be told: with those of another episode it loses {ends}; more prompts are needed."


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything a verdict is made from. What was not measured has its default."""

    num_prompts: int
    num_reasonings: int
    most_samples: int
    """Reasonings of the prompt that has most."""
    retrieval: Retrieval
    signals: tuple[Signal, ...]
    mi_seq: float | None = None
    mi_interval: tuple[float, float] | None = None
    mi_p_value: float | None = None
    h_conditional: float | None = None
    scorer: str = "The model"
    """Whose scores these are, as the subject of a sentence."""
    is_read: bool = True
    """Whether the scorer finds the text likelier than counts of its tokens do; a policy reads what it wrote."""
    scorer_nats: float = math.nan
    unigram_nats: float = math.nan
    best_accuracy: float | None = None
    """Of all retrievals that count reasonings, the best; None: `retrieval` is the only one."""
    elsewhere: tuple[float, float] = (0.0, 1.0)
    """Share of the reasonings that the scores find to fit one and the same other prompt better, and its p-value."""
    texts: Texts | None = None
    without_reasoning: MissingReasoning = MissingReasoning()
    images: ImageEvidence | None = None

    @property
    def is_sufficient(self) -> bool:
        """Whether the sample is large enough for any label."""
        return self.num_prompts >= FEWEST_PROMPTS and self.num_reasonings >= FEWEST_REASONINGS

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the retrieval accuracy, which is never a point."""
        return share_interval(self.retrieval.accuracy, *self.retrieval.interval, self.num_prompts)

    @property
    def is_weak(self) -> bool:
        """Whether the scorer finds the reasonings likelier under other prompts than under their own, which no writer of them would."""
        return self.mi_seq is not None and self.mi_seq < 0 and self.mi_interval is not None and self.mi_interval[1] < 0

    @property
    def _upper_ends(self) -> tuple[float, float, float]:
        """The largest effect that the interval of the retrieval leaves possible, of the information, and of the words; 0 where not measured."""
        information = self.mi_interval[1] / math.log(self.num_prompts) if self.mi_interval is not None and self.num_prompts > 1 else 0.0
        compared = (self.texts.neighbours, self.texts.nearest) if self.texts is not None else ()
        words = max((found.excess_of(found.interval[1]) for found in compared if found is not None), default=0.0)
        return self.retrieval.excess_of(self.interval[1]), information, words

    @property
    def is_alike(self) -> bool:
        """Whether a reasoning is about as likely under every prompt: it does not depend on them, or the scorer does not see how."""
        bound = WEAKLY * math.log(max(2, self.num_prompts))
        return self.mi_interval is not None and -bound < self.mi_interval[0] <= self.mi_interval[1] < bound

    @property
    def most(self) -> float:
        """The largest effect that any interval leaves possible."""
        return max(self._upper_ends)

    @property
    def reach(self) -> float:
        """The same where nothing was found: that of the scores, or of the words where they end sooner.

        Scores that hardly depend on the prompt bound the information by themselves, while ranks among nearly equal scores are noise.
        """
        retrieval, information, words = self._upper_ends
        scores = information if self.is_alike else max(retrieval, information)
        return min(scores, words) if words else scores

    @property
    def start(self) -> Start | None:
        """As the start of a run; None where the sample is too small to be one."""
        if not self.is_sufficient or self.mi_seq is None or self.h_conditional is None:
            return None
        return Start(self.h_conditional, self.mi_seq)


def recorded_evidence(metrics: Mapping[str, float], scorer: str = "The run's scorer") -> Evidence | None:
    """The evidence in a step's metrics, those of the first turn; None where information was not measured.

    Records of before there were intervals and p-values get Wilson's interval over the reasonings, at 95% and at the level of a signal.
    """
    values = {name.removeprefix("information/"): value for name, value in metrics.items() if name.startswith("information/")}
    if not {"retrieval_acc", "chance"} <= values.keys():
        return None
    accuracy, chance = values["retrieval_acc"], values["chance"]
    count = round(values.get("num_reasonings", 0))
    num_prompts = round(values.get("num_prompts", 1 / chance if chance else 0))
    wilson = wilson_interval(accuracy * count, count)
    low, high = values.get("retrieval_acc_low", wilson[0]), values.get("retrieval_acc_high", wilson[1])
    above = count > 0 and wilson_interval(accuracy * count, count, Z_SIGNIFICANT)[0] > chance
    p_value, mi_p_value = values.get("retrieval_p_value"), values.get("mi_p_value")
    by_rank = p_value if p_value is not None else SIGNIFICANT if above else 1.0
    retrieval = Retrieval(accuracy, (low, high), chance, p_value)
    signals = [Signal("retrieval", max(0.0, retrieval.excess), by_rank)]
    mi_seq = values.get("mi_seq")
    if mi_seq is not None and mi_p_value is not None and num_prompts > 1:
        signals.append(Signal("information", max(0.0, mi_seq / math.log(num_prompts)), mi_p_value))
    ends = (values["mi_seq_low"], values["mi_seq_high"]) if {"mi_seq_low", "mi_seq_high"} <= values.keys() else None
    return Evidence(
        num_prompts=num_prompts,
        num_reasonings=count,
        most_samples=max(1, math.ceil(count / max(1, num_prompts))),
        retrieval=retrieval,
        signals=tuple(signals),
        mi_seq=mi_seq,
        mi_interval=ends,
        mi_p_value=mi_p_value,
        h_conditional=values.get("h_conditional"),
        scorer=scorer,
        images=_recorded_images(values),
    )


def _recorded_images(values: Mapping[str, float]) -> ImageEvidence | None:
    """What was measured with other images; None where prompts hold none."""
    if not {"image_swapped", "image_swapped_low", "image_swapped_high", "image_prompts"} <= values.keys():
        return None
    ends = (values["image_swapped"], values["image_swapped_low"], values["image_swapped_high"])
    return ImageEvidence(*ends, mean_tokens(values), round(values["image_prompts"]))


def mean_tokens(values: Mapping[str, float]) -> float:
    """Tokens of a reasoning, as its two entropies tell them."""
    per_token, whole = values.get("h_conditional", 0.0), values.get("h_conditional_seq", 0.0)
    return whole / per_token if per_token > 0 and whole > 0 else 1.0
