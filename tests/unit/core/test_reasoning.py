"""The one verdict on reasoning: bounds, minimum sample, regimes, and that its words never contradict its numbers.

Expected numbers were worked out by hand from the definitions in tether.core.reasoning.
"""

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.core.enums import Regime
from tether.core.evidence import (
    FEWEST_PROMPTS,
    FEWEST_REASONINGS,
    REACH,
    SIGNIFICANT,
    TIED,
    WEAKLY,
    Evidence,
    Retrieval,
    Signal,
    Start,
    recorded_evidence,
)
from tether.core.metrics import wilson_interval
from tether.core.reasoning import COLLAPSES, HEADLINES, NEXT_STEPS, VerdictCode, judge

START = Start(h_conditional=2.0, mi_seq=1.0)


def evidence(accuracy: float, p_value: float, *, prompts: int = 8, samples: int = 16, high: float = 0.45, **more: Any) -> Evidence:
    """Retrieval of so many prompts, whose interval ends at `high`; by default a narrow one."""
    chance = 1 / prompts
    effect = max(0.0, (accuracy - chance) / (1 - chance))
    found = Retrieval(accuracy, (max(0.0, accuracy - 0.1), max(accuracy, high)), chance, p_value)
    measured = {"mi_seq": 1.0, "mi_interval": (0.5, 1.5), "mi_p_value": p_value, "h_conditional": 2.0, **more}
    return Evidence(
        num_prompts=prompts,
        num_reasonings=prompts * samples,
        most_samples=samples,
        retrieval=found,
        signals=(Signal("retrieval", effect, p_value),),
        **measured,
    )


def test_the_minimum_sample_is_the_least_at_which_whole_prompts_can_be_significant() -> None:
    assert 1 / math.factorial(FEWEST_PROMPTS) <= SIGNIFICANT < 1 / math.factorial(FEWEST_PROMPTS - 1)


def test_the_minimum_sample_finds_what_is_called_tied() -> None:
    """The power that docs/diagnosis.md gives: 5 x 3 reasonings of which 60% name their prompt, the others a random one, against 2 x 8."""
    rng = np.random.default_rng(0)
    power = {}
    for prompts, samples in ((5, 3), (2, 8)):
        own, found = np.repeat(np.arange(prompts), samples), 0
        for _ in range(100):
            named = np.where(rng.random(len(own)) < TIED, own, rng.integers(0, prompts, len(own)))
            dealt = rng.permuted(np.tile(own, (300, 1)), axis=1)
            p_value = (1 + int(((dealt == named).mean(axis=1) >= (own == named).mean() - 1e-12).sum())) / 301
            found += p_value <= SIGNIFICANT
        power[prompts] = found / 100
    assert power[5] > 0.85 and power[2] < 0.5


@pytest.mark.parametrize(
    ("accuracy", "p_value", "code"),
    [
        (0.65, 0.01, VerdictCode.TIED),  # (0.65 - 0.125) / 0.875 is 0.6 exactly
        (0.649, 0.01, VerdictCode.WEAKLY_TIED),
        (0.2125, 0.01, VerdictCode.WEAKLY_TIED),  # 0.1 exactly
        (0.212, 0.01, VerdictCode.CANNOT_BE_TOLD),  # a trace, whose interval reaches 0.45
        (0.2125, 0.0101, VerdictCode.TEMPLATE_COLLAPSE),
    ],
)
def test_the_bounds(accuracy: float, p_value: float, code: VerdictCode) -> None:
    assert judge(evidence(accuracy, p_value, mi_seq=0.0, mi_interval=(-0.1, 0.1))).code is code


@pytest.mark.parametrize(
    ("high", "mi", "code"),
    [
        (0.387, (-1.0, 0.6), VerdictCode.TEMPLATE_COLLAPSE),  # (0.3875 - 0.125) / 0.875 is 0.3, and so is 0.624 of log 8
        (0.388, (-1.0, 0.6), VerdictCode.CANNOT_BE_TOLD),
        (0.387, (-1.0, 0.63), VerdictCode.CANNOT_BE_TOLD),
        (0.9, (-0.1, 0.1), VerdictCode.TEMPLATE_COLLAPSE),  # scores that hardly depend on the prompt: ranks among them are noise
        (0.9, (-0.1, 0.7), VerdictCode.CANNOT_BE_TOLD),
        (0.387, None, VerdictCode.TEMPLATE_COLLAPSE),  # records of before there were intervals of the information
    ],
)
def test_no_collapse_where_an_interval_reaches_half_of_what_is_called_tied(
    high: float, mi: tuple[float, float] | None, code: VerdictCode
) -> None:
    assert judge(evidence(0.125, 0.5, high=high, mi_seq=0.0, mi_interval=mi)).code is code


def test_an_untrained_model_has_not_collapsed() -> None:
    """12 reasonings under 6 prompts whose information may be anything from none to all there is, as at step 1 of a run."""
    values = {
        "retrieval_acc": 1 / 6,
        "chance": 1 / 6,
        "num_reasonings": 12,
        "num_prompts": 6,
        "retrieval_acc_low": 0.0,
        "retrieval_acc_high": 0.5,
    }
    values |= {"retrieval_p_value": 0.6, "mi_p_value": 0.2, "mi_seq": 0.77, "mi_seq_low": -0.26, "mi_seq_high": 1.79, "h_conditional": 2.0}
    found = recorded_evidence({f"information/{name}": value for name, value in values.items()})
    assert found is not None
    verdict = judge(found)
    assert verdict.code is VerdictCode.CANNOT_BE_TOLD and verdict.regime is None and "neither good nor bad news" in verdict.next_step
    assert verdict.reasons[0].startswith("Little or no dependence shows in 12 reasonings under 6 prompts, but the intervals reach to 100%")


def test_a_trace_of_dependence_is_no_collapse_unless_the_interval_ends_there() -> None:
    shown = judge(evidence(0.2, 0.001, high=0.3, mi_seq=0.1, mi_interval=(-1.0, 0.3)))
    assert shown.code is VerdictCode.CANNOT_BE_TOLD
    assert "cannot be told with this judge" in shown.reasons[0] and "Qwen/Qwen3-4B" in shown.reasons[0]
    assert judge(evidence(0.2, 0.001, high=0.21, mi_seq=0.1, mi_interval=(0.05, 0.15))).code is VerdictCode.TEMPLATE_COLLAPSE


def test_a_weak_scorer_is_said_first_and_its_information_is_not_given() -> None:
    weak = judge(evidence(0.4, 0.001, mi_seq=-12.84, mi_interval=(-20.0, -3.0)))
    assert weak.code is VerdictCode.WEAKLY_TIED and weak.reasons[0].startswith("The model is a weak judge of this text")
    assert "-12.84" not in " ".join(weak.reasons)
    assert "information -0.10 nats" in judge(evidence(0.4, 0.001, mi_seq=-0.1, mi_interval=(-0.3, 0.1))).reasons[-1]


def test_every_verdict_says_whether_it_is_good_and_what_to_do() -> None:
    assert NEXT_STEPS.keys() == HEADLINES.keys() == set(VerdictCode)


@pytest.mark.parametrize(("prompts", "samples", "told"), [(2, 64, False), (4, 64, False), (5, 2, False), (5, 3, True), (6, 2, True)])
def test_no_label_and_no_regime_below_the_minimum_sample(prompts: int, samples: int, told: bool) -> None:
    for accuracy, p_value in ((1.0, 0.001), (1 / prompts, 0.5)):
        verdict = judge(evidence(accuracy, p_value, prompts=prompts, samples=samples, high=0.3, mi_seq=0.0, mi_interval=(-0.1, 0.1)), START)
        assert (verdict.regime is not None) == told
        if not told:
            assert verdict.code is VerdictCode.CANNOT_BE_TOLD and verdict.label == "cannot be told"
            assert verdict.reasons[0].startswith(f"Only {prompts * samples} reasonings under {prompts} prompts: no verdict is given")


@pytest.mark.parametrize(
    ("accuracy", "p_value", "entropy", "mi", "regime"),
    [
        (0.9, 0.001, 1.0, (1.0, 0.9, 1.1), Regime.DIVERSE),  # half of the start is not below half
        (0.9, 0.001, 0.99, (1.0, 0.9, 1.1), Regime.COMPRESSED),
        (0.9, 0.001, 2.0, (0.1, 0.0, 0.2), Regime.DIVERSE),  # tied reasoning is not in a regime of collapse
        (0.4, 0.001, 2.0, (0.3, 0.1, 0.49), Regime.TEMPLATE_COLLAPSE),  # weakly tied, and fallen beyond the interval
        (0.4, 0.001, 0.5, (0.3, 0.1, 0.49), Regime.LOW_ENTROPY_COLLAPSE),
        (0.4, 0.001, 2.0, (0.3, 0.1, 0.5), Regime.DIVERSE),  # the interval reaches half of the start
        (0.125, 0.5, 2.0, (0.0, -0.1, 0.1), Regime.TEMPLATE_COLLAPSE),
        (0.125, 0.5, 0.99, (0.0, -0.1, 0.1), Regime.LOW_ENTROPY_COLLAPSE),
    ],
)
def test_the_regime_goes_with_the_verdict(
    accuracy: float, p_value: float, entropy: float, mi: tuple[float, float, float], regime: Regime
) -> None:
    found = evidence(accuracy, p_value, h_conditional=entropy, mi_seq=mi[0], mi_interval=mi[1:])
    verdict = judge(found, START)
    assert verdict.regime is regime and verdict.label == regime.value
    if verdict.code in COLLAPSES:
        assert verdict.code.replace("_", "-") == regime.value.replace(" ", "-")


def test_an_interval_is_never_a_point() -> None:
    none = judge(evidence(0.0, 1.0, high=0.0))
    # Wilson's interval of 0 of 8 prompts ends at 0.3244.
    assert "finds the prompt of 0% of the reasonings (0 of 128; at most 32%; chance 12.5%" in none.reasons[-1]
    point = Evidence(
        num_prompts=16, num_reasonings=64, most_samples=4, retrieval=Retrieval(1.0, (1.0, 1.0), 1 / 16, 0.001), signals=()
    )  # fmt: skip
    assert "(all of 64; at least 81%; chance 6.2%, p 0.001)" in judge(point).reasons[-1]  # Wilson's of 16 of 16: 0.806


def metrics(**values: float) -> dict[str, float]:
    return {f"information/{name}": value for name, value in values.items()}


def test_the_evidence_of_a_record() -> None:
    recorded = metrics(
        retrieval_acc=0.5, chance=0.125, retrieval_acc_low=0.4, retrieval_acc_high=0.6, retrieval_p_value=0.002, mi_seq=math.log(2),
        mi_p_value=0.004, mi_seq_low=0.2, mi_seq_high=0.9, h_conditional=1.5, num_prompts=8, num_reasonings=64,
    )  # fmt: skip
    found = recorded_evidence(recorded)
    assert found is not None and found.interval == (0.4, 0.6) and found.start == Start(1.5, math.log(2)) and found.most_samples == 8
    assert [(item.name, item.p_value) for item in found.signals] == [("retrieval", 0.002), ("information", 0.004)]
    assert [item.effect for item in found.signals] == pytest.approx([0.375 / 0.875, 1 / 3])
    assert recorded_evidence({"rollout/success": 1.0}) is None


def test_a_record_from_before_intervals_and_p_values() -> None:
    old = metrics(retrieval_acc=0.81, chance=0.125, num_reasonings=128)
    found = recorded_evidence(old)
    assert found is not None and found.num_prompts == 8 and found.interval == pytest.approx(wilson_interval(0.81 * 128, 128))
    assert judge(found).code is VerdictCode.TIED
    assert "p 0" not in judge(found).reasons[-1]
    at_chance = recorded_evidence(old | metrics(retrieval_acc=20 / 128))
    assert at_chance is not None and judge(at_chance).code is VerdictCode.TEMPLATE_COLLAPSE
    uncounted = recorded_evidence(metrics(retrieval_acc=0.9, chance=0.125))
    assert uncounted is not None and judge(uncounted).code is VerdictCode.CANNOT_BE_TOLD


# ----------------------------------------------------------------------------------------------- words against numbers

shares = st.floats(0, 1)


@st.composite
def measurements(draw: st.DrawFn) -> tuple[dict[str, float], Start | None]:
    """The metrics of a small measurement, whatever they may be, and a start."""
    prompts = draw(st.integers(2, 12))
    accuracy, ends = draw(shares), sorted((draw(shares), draw(shares)))
    mi = draw(st.floats(-2, math.log(prompts)))
    values = {
        "num_prompts": prompts,
        "num_reasonings": draw(st.integers(2, 60)),
        "chance": 1 / prompts,
        "retrieval_acc": accuracy,
        "retrieval_acc_low": min(accuracy, ends[0]),
        "retrieval_acc_high": max(accuracy, ends[1]),
        "retrieval_p_value": draw(st.sampled_from((0.001, 0.01, 0.02, 0.3, 1.0))),
        "mi_p_value": draw(st.sampled_from((0.001, 0.01, 0.02, 0.3, 1.0))),
        "mi_seq": mi,
        "mi_seq_low": mi - draw(st.floats(0, 2)),
        "mi_seq_high": mi + draw(st.floats(0, 2)),
        "h_conditional": draw(st.floats(0, 4)),
    }
    start = draw(st.none() | st.builds(Start, st.floats(0, 4), st.floats(-1, 2)))
    return metrics(**values), start


@settings(max_examples=400, deadline=None)
@given(measurements())
def test_words_never_contradict_numbers(measured: tuple[dict[str, float], Start | None]) -> None:
    values, start = measured
    found = recorded_evidence(values)
    assert found is not None
    verdict = judge(found, start)
    said = " ".join((verdict.headline, *verdict.reasons, verdict.label)).lower()
    counted = [item.effect for item in found.signals if item.counts]
    reaches = found.reach >= REACH
    small = values["information/num_prompts"] < FEWEST_PROMPTS or values["information/num_reasonings"] < FEWEST_REASONINGS
    collapse, told = "collapse" in said, "cannot be told" not in said
    assert told == (verdict.code is not VerdictCode.CANNOT_BE_TOLD)
    assert not (collapse and not told), "it cannot be told, and it is a collapse"
    if small:
        assert not told and verdict.regime is None
    if verdict.code in COLLAPSES:
        assert not reaches and not any(effect >= WEAKLY for effect in counted)
        assert verdict.regime is not None and verdict.regime.value.startswith(
            verdict.code.replace("_", " ").replace("low entropy", "low-entropy")
        )
    if "collapse" in str(verdict.regime) and verdict.code not in COLLAPSES:
        assert verdict.code is VerdictCode.WEAKLY_TIED and start is not None
        assert values["information/mi_seq_high"] < start.mi_seq / 2
    if verdict.code is VerdictCode.TIED:
        assert max(counted) >= TIED - 1e-9 and not collapse
    if verdict.code is VerdictCode.WEAKLY_TIED:
        assert counted
    assert not re.search(r"\b(\d+)% to \1%", said), "an interval that is a point"
    assert verdict == judge(found, start)


def test_every_code_is_reached_by_a_record() -> None:
    """The property above would hold of a function that never tells: it does tell."""
    codes = set()
    for accuracy, p_value, prompts, entropy in itertools.product((0.125, 0.3, 0.9), (0.001, 0.5), (2, 8), (0.1, 2.0)):
        none = {"mi_seq": 0.0, "mi_interval": (-0.1, 0.1)}
        codes.add(judge(evidence(accuracy, p_value, prompts=prompts, h_conditional=entropy, **none), START).code)
    assert codes == set(VerdictCode) - {VerdictCode.MISPLACED}
