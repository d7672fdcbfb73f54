"""What the curves of a report show, as data: one `Panel` per small chart, one `Series` per line, and the sentence on how to read it.

Panels are grouped under the three questions a reader has. A single run draws every series of a panel; a comparison of several runs
draws only the panel's main series, coloured by run, because four lines per run stop being readable at the second run. The information
section is of the first turn; where a run measured other scopes too, they are dashed lines beside it, each with a chance level of its own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tether.runs.schema import StepRecord


class Style(StrEnum):
    """How a series is drawn."""

    MAIN = "main"
    LIGHT = "light"
    REFERENCE = "reference"
    """A dashed line to read the others against: chance, a bound."""
    SHARE = "share"
    """One layer of a stack that adds up to the whole."""


BLUE, ORANGE, GREY = "#2b6cb0", "#c2622d", "#7b8794"
PALE_BLUE, PALE_ORANGE = "#93b7d9", "#dfae8f"
PURPLE, PALE_PURPLE, TEAL, PALE_TEAL = "#805ad5", "#c3b1ee", "#2c7a7b", "#97c4c4"
FAIL, MIXED, SUCCEED = "#d8dde3", "#b9d3ec", "#b7dcc4"


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    metric: str
    label: str
    """Written at the end of the line, so two words at most."""
    style: Style = Style.MAIN
    colour: str = BLUE
    band: tuple[str, str] | None = None
    """The metrics that hold the lower and the upper end of its interval."""
    transform: Callable[[float], float] | None = None
    beside: bool = False
    """Measured beside the others in some runs only: a dashed line for a single run, not missed where it is absent."""

    def points(self, records: Sequence[StepRecord]) -> tuple[list[int], list[float]]:
        """Steps and values of the records that hold this metric."""
        held = [(record.step, record.metrics[self.metric]) for record in records if self.metric in record.metrics]
        return [step for step, _ in held], [self.transform(value) if self.transform else value for _, value in held]


@dataclass(frozen=True, slots=True)
class Panel:
    """One small chart."""

    key: str
    title: str
    reading: str
    """One or two sentences on how to read it."""
    series: tuple[Series, ...]
    percent: bool = False
    """The axis runs from 0% to 100%."""


@dataclass(frozen=True, slots=True)
class Section:
    """The panels that answer one question."""

    question: str
    panels: tuple[Panel, ...]


def _log(prompts: float) -> float:
    """The most information a choice among so many prompts can carry."""
    return math.log(max(1.0, prompts))


def _ends(name: str) -> tuple[str, str]:
    """The metrics of a first-turn metric's interval."""
    return f"information/{name}_low", f"information/{name}_high"


def _other_scopes(name: str) -> tuple[Series, ...]:
    """A metric of the first turn as the other scopes measure it."""
    return (
        Series(f"information_trajectory/{name}", "trajectory", Style.LIGHT, PURPLE, beside=True),
        Series(f"information_turn/{name}", "turn", Style.LIGHT, TEAL, beside=True),
    )


def _other_references(name: str, label: str, transform: Callable[[float], float] | None = None) -> tuple[Series, ...]:
    """What the lines of `_other_scopes` are read against."""
    return (
        Series(f"information_trajectory/{name}", f"traj. {label}", Style.REFERENCE, PALE_PURPLE, transform=transform, beside=True),
        Series(f"information_turn/{name}", f"turn {label}", Style.REFERENCE, PALE_TEAL, transform=transform, beside=True),
    )


_LEARNING = Section(
    "Does it solve the task?",
    (
        Panel(
            "success",
            "Success",
            "Validation plays the same fixed prompts every time; its band is the 95% Wilson interval, and a change smaller than the band "
            "is not yet a change. Training success is noisier, because every step brings new prompts.",
            (
                Series("validation/success", "validation", band=("validation/success_low", "validation/success_high")),
                Series("rollout/success", "training", Style.LIGHT, PALE_BLUE),
            ),
            percent=True,
        ),
        Panel(
            "format",
            "Valid turns",
            "Share of turns with closed tags and legal actions only. Success cannot exceed what this allows; "
            "a fall late in a run is an early sign of trouble. Repeating are reasonings that mostly repeat one character, word or phrase.",
            (
                Series("rollout/format_valid", "valid"),
                Series("rollout/repeated_text", "repeating", Style.LIGHT, PALE_ORANGE),
            ),
            percent=True,
        ),
        Panel(
            "length",
            "Tokens per response",
            "Reasoning that shrinks towards nothing, or responses that grow until they hit the budget, both end learning.",
            (
                Series("rollout/response_tokens", "response"),
                Series("rollout/reasoning_tokens", "reasoning", Style.LIGHT, PALE_ORANGE),
            ),
        ),
        Panel(
            "budget",
            "Episodes cut short",
            "Share of episodes that ran out of turns or of context before the task ended. These did not fail; they lacked the room.",
            (
                Series("rollout/turn_limit", "turns"),
                Series("rollout/context_full", "context", Style.LIGHT, PALE_ORANGE),
            ),
            percent=True,
        ),
    ),
)

_SIGNAL = Section(
    "Is there still something to learn from?",
    (
        Panel(
            "reward_variance",
            "Reward variance within a prompt",
            "The mean over prompts. It is the signal of policy-gradient training: near zero, every attempt at a prompt earns the same "
            "and the regularisers steer.",
            (Series("groups/rv_mean", "mean"),),
        ),
        Panel(
            "rv_ratio",
            "Spread of that variance over prompts",
            "Standard deviation over mean. Around 1 and above, a few prompts hold most of the signal and filtering pays; "
            "well below it, filtering mostly throws data away.",
            (Series("groups/rv_ratio", "std / mean"),),
        ),
        Panel(
            "groups",
            "What the groups look like",
            "The layers split the prompts by outcome; only mixed ones teach success from failure. "
            "The line is the share of prompts the filter kept for the update.",
            (
                Series("groups/all_fail", "all fail", Style.SHARE, FAIL),
                Series("groups/mixed", "mixed", Style.SHARE, MIXED),
                Series("groups/all_succeed", "all succeed", Style.SHARE, SUCCEED),
                Series("groups/kept_ratio", "kept", Style.MAIN, ORANGE),
            ),
            percent=True,
        ),
        Panel(
            "grad_norm",
            "Gradient norm",
            "Before clipping. Read it with the reward variance: a gradient that stays large while the variance vanishes is noise.",
            (Series("update/grad_norm", "norm"),),
        ),
    ),
)

_INFORMATION = Section(
    "Is the reasoning tied to its input?",
    (
        Panel(
            "retrieval",
            "Can the prompt be told from the reasoning?",
            "Share of reasonings that their own prompt explains best among all prompts; the band is the 95% interval over prompts. "
            "At the grey dashed line the reasoning says nothing about its input: template collapse.",
            (
                Series("information/retrieval_acc", "best 1", band=_ends("retrieval_acc")),
                Series("information/recall_2", "best 2", Style.LIGHT, "#7fa8d1"),
                Series("information/recall_4", "best 4", Style.LIGHT, "#b9d0e6"),
                Series("information/chance", "chance", Style.REFERENCE, GREY),
                *_other_scopes("retrieval_acc"),
                *_other_references("chance", "chance"),
            ),
            percent=True,
        ),
        Panel(
            "mi_seq",
            "Information per reasoning, nats",
            "MI-Seq-Est: how much one whole reasoning tells about its prompt, with its 95% interval. "
            "The grey dashed line is the most it can be, the logarithm of the number of prompts.",
            (
                Series("information/mi_seq", "MI", band=_ends("mi_seq")),
                Series("information/num_prompts", "log P", Style.REFERENCE, GREY, transform=_log),
                *_other_scopes("mi_seq"),
                *_other_references("num_prompts", "log P", transform=_log),
            ),
        ),
        Panel(
            "mi",
            "Information per token, nats",
            "MI-Est: the same per token. It falls when reasoning gets longer without saying more about the prompt.",
            (Series("information/mi", "MI", band=_ends("mi")), *_other_scopes("mi")),
        ),
        Panel(
            "entropy",
            "Diversity of the reasoning, nats per token",
            "H(Z|X) is variety within one prompt, H(Z) over all prompts; the gap between the lines is the information per token. "
            "High lines with no gap look healthy and are not.",
            (
                Series("information/h_conditional", "H(Z|X)", band=_ends("h_conditional")),
                Series("information/h_marginal", "H(Z)", Style.LIGHT, PALE_ORANGE),
                *_other_scopes("h_conditional"),
            ),
        ),
    ),
)

SECTIONS: tuple[Section, ...] = (_LEARNING, _SIGNAL, _INFORMATION)


def drawn(panel: Panel, runs: Sequence[Sequence[StepRecord]]) -> list[Series]:
    """The series of a panel that these runs hold and that are shown: all for one run, the main ones for several.

    Where several runs hold no main series the light ones stand in, so runs without validation still compare on training success.
    A reference line alone is not shown: it says nothing without the line it is read against.
    """
    held = [series for series in panel.series if any(series.points(records)[0] for records in runs)]
    if len(runs) > 1:
        held = [series for series in held if not series.beside]
        main = [series for series in held if series.style is Style.MAIN] or [series for series in held if series.style is Style.LIGHT]
        held = main + [series for series in held if series.style is Style.REFERENCE]
    return held if any(series.style is not Style.REFERENCE for series in held) else []
