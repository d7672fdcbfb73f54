"""Several windows: the course of a training run, when dependence on the prompt began to fall, and whether success fell before or after.

The numbers that can tell are retrievals of the prompt: by the model (plain or adjusted), by likeness, by shared words. Of these the one that
stands clearest above chance anywhere in the run is followed, as its excess over chance, so that windows with other numbers of prompts compare.

Two rules find a decline (decline.py): the last window alone, by its interval, and, with six windows or more, all windows together. With fewer
than four windows only the first and the last are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tether.core.enums import Regime
from tether.core.metrics import wilson_interval
from tether.diagnostics.audit.decline import STRETCH, Decline, Point, decline
from tether.diagnostics.audit.measure import Measurement
from tether.diagnostics.audit.verdict import Verdict
from tether.diagnostics.audit.windows import Window
from tether.diagnostics.audit.wording import Retrieval
from tether.diagnostics.regimes import Baseline, classify

FEWEST_WINDOWS = 4

SIGNS = {
    "retrieval": "the model's retrieval of the prompt",
    "adjusted_retrieval": "the model's adjusted retrieval of the prompt",
    "kin": "retrieval of the prompt by likeness",
    "echo": "retrieval of the prompt by shared words",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One window with what was found in it; the counts are of all its rollouts, not of the sample."""

    window: Window
    measurement: Measurement
    verdict: Verdict
    num_success: int
    num_judged: int


@dataclass(frozen=True, slots=True)
class Course:
    """What became of the run. `sentences` say it."""

    sign: str
    points: tuple[Point, ...]
    """Excess over chance of that sign."""
    regimes: tuple[Regime, ...]
    information: Decline | None
    success: Decline | None
    sentences: tuple[str, ...]


def follow(windows: Sequence[Measured]) -> Course | None:
    """The course over two windows or more; None for one."""
    if len(windows) < 2:
        return None
    sign = clearest_sign([window.measurement for window in windows])
    points = tuple(_point(window.window, signs_of(window.measurement)[sign], window.measurement.num_prompts) for window in windows)
    rates = [_rate(window) for window in windows if window.num_judged]
    fall = decline(points)
    success = decline(rates)
    return Course(sign, points, _regimes(windows), fall, success, tuple(_sentences(sign, points, rates, fall, success)))


def signs_of(found: Measurement) -> dict[str, Retrieval]:
    """The retrievals of one window by name; likeness only where prompts have several reasonings."""
    information, wording = found.information, found.wording
    by_rank = Retrieval(
        information.retrieval_acc,
        information.intervals.get("retrieval_acc", (0.0, 1.0)),
        information.chance,
        1.0 if information.retrieval_p_value is None else information.retrieval_p_value,
    )
    signs = {"retrieval": by_rank, "adjusted_retrieval": found.adjusted, "echo": wording.echo}
    return signs if wording.kin is None else signs | {"kin": wording.kin}


def clearest_sign(measurements: Sequence[Measurement]) -> str:
    """The sign that stands highest above chance over some stretch of windows; one that all windows have. The model's own wins ties."""
    signs = [signs_of(found) for found in measurements]
    shared = [name for name in SIGNS if all(name in window for window in signs)]

    def height(name: str) -> float:
        if len(signs) < STRETCH:  # single windows speak for themselves, if surely
            return max(_excess(window[name], window[name].interval[0]) for window in signs)
        values = [window[name].excess for window in signs]
        return max(sum(values[start : start + STRETCH]) for start in range(len(values) - STRETCH + 1))

    return max(shared, key=lambda name: (height(name), -shared.index(name)))


def _excess(found: Retrieval, accuracy: float) -> float:
    return (accuracy - found.chance) / (1 - found.chance)


def _point(window: Window, found: Retrieval, num_prompts: int) -> Point:
    low, high = found.interval
    if low == high:  # all right or all wrong: resampling sees no spread, though a few prompts more might have differed
        low, high = wilson_interval(found.accuracy * num_prompts, num_prompts)
    return Point(window, found.excess, _excess(found, low), _excess(found, high))


def _rate(window: Measured) -> Point:
    low, high = wilson_interval(window.num_success, window.num_judged)
    return Point(window.window, window.num_success / window.num_judged, low, high)


def _regimes(windows: Sequence[Measured]) -> tuple[Regime, ...]:
    """Against the first window; the axis of information is the largest effect that counts, which a weak model does not hide."""
    axes = [(window.measurement.information.h_conditional, window.verdict.effect or 0.0) for window in windows]
    start = Baseline(*axes[0])
    return tuple(classify(entropy, effect, start) for entropy, effect in axes)


def _sentences(sign: str, points: Sequence[Point], rates: Sequence[Point], fall: Decline | None, success: Decline | None) -> list[str]:
    if len(points) < FEWEST_WINDOWS:
        words = [_first_to_last(f"Dependence on the prompt ({SIGNS[sign]}, share above chance)", points)]
        return words + ([_first_to_last("Success", rates)] if len(rates) > 1 else [])
    what = f"Dependence on the prompt ({SIGNS[sign]}, share above chance)"
    if fall is None:
        first, last = points[0], points[-1]
        words = [f"{what} shows no decline: {first}, {last}."]
    else:
        words = [
            f"{what} fell from {fall.best} to {fall.end}. The decline began at step {fall.began.window.name}; "
            f"step {fall.last_good.window.name} is the last before it."
        ]
    if rates:
        words.append(_success_words(rates, fall, success))
    return words


def _success_words(rates: Sequence[Point], fall: Decline | None, success: Decline | None) -> str:
    if success is None:
        after = " while dependence on the prompt was lost: look at the reasoning, not at the reward" if fall else ""
        return f"Success shows no decline ({rates[0]}, {rates[-1]}){after}."
    words = f"Success fell from {success.best} to {success.end}, beginning at step {success.began.window.name}"
    if fall is None:
        return f"{words}; dependence on the prompt did not."
    if fall.began.window.last == success.began.window.last:
        return f"{words}, together with dependence on the prompt."
    return f"{words}: {'after' if fall.began.window.last < success.began.window.last else 'before'} dependence on the prompt did."


def _first_to_last(what: str, points: Sequence[Point]) -> str:
    first, last = points[0], points[-1]
    if last.high < first.low:
        return f"{what} fell: {first}, {last}."
    return f"{what} {'rose' if last.low > first.high else 'did not measurably change'}: {first}, {last}."
