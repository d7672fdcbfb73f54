"""`retrieval_at_chance` on a fixed probe: its evidence is that of its prompts, however often they are measured.

Where every prompt is found always or never, the number of prompts found is binomial, so rates are sums over that number and not simulated. The run
is tied to its input (7 of 8 prompts found) and falls to a true retrieval well above chance: an alarm that says "at chance" is false.
"""

import math

import numpy as np
import pytest

from tether.core.alarms import Severity
from tether.core.seeding import generator
from tether.diagnostics.alarms.tracker import check
from tether.diagnostics.information import measure_information
from tether.runs.schema import StepRecord

MEASUREMENTS, SAMPLES, TRUE = 4, 4, 0.40
PROBE = {"information/probe_tokens_sampled": 4096.0}


def _measured(logprobs: np.ndarray, source: np.ndarray, seed: int = 0) -> dict[str, float]:
    """What the monitor records of a measurement."""
    information = measure_information(logprobs, np.full(len(source), 20), source, bootstrap=400, seed=seed)
    low, high = information.intervals["retrieval_acc"]
    return {
        "information/retrieval_acc": information.retrieval_acc,
        "information/retrieval_acc_low": low,
        "information/retrieval_acc_high": high,
        "information/chance": information.chance,
        "information/num_prompts": float(logprobs.shape[1]),
    }


def _scores(prompts: int, found: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs with which the reasonings of the first `found` prompts find their prompt, and the others never do."""
    source = np.repeat(np.arange(prompts), SAMPLES)
    logprobs = np.full((len(source), prompts), -50.0)
    logprobs[np.arange(len(source)), source] += np.where(source < found, 5.0, -5.0)
    return logprobs, source


def _is_critical(later: list[dict[str, float]], before: dict[str, float]) -> bool:
    measured = [before] * 6 + later
    alarms = check([StepRecord(1 + 5 * place, metrics) for place, metrics in enumerate(measured)])
    return any(alarm.name == "retrieval_at_chance" and alarm.severity is Severity.CRITICAL for alarm in alarms)


def _binomial(successes: int, trials: int, rate: float) -> float:
    return math.comb(trials, successes) * rate**successes * (1 - rate) ** (trials - successes)


def _false_alarms_of_a_probe(prompts: int, rate: float) -> float:
    before = _measured(*_scores(prompts, prompts - 1)) | PROBE
    alarmed = [found for found in range(prompts // 2) if _is_critical([_measured(*_scores(prompts, found)) | PROBE] * MEASUREMENTS, before)]
    return sum(_binomial(found, prompts, rate) for found in alarmed)


def test_prompts_of_their_own_at_every_measurement_are_counted_at_every_measurement() -> None:
    """4 x 8 prompts: the alarm stands up to 6 of 32 found, which has a chance of 0.9% at a true retrieval of 0.40."""
    fresh = {"information/chance": 1 / 8, "information/num_prompts": 8.0}
    before = fresh | {"information/retrieval_acc": 7 / 8}
    alarmed = [found for found in range(16) if _is_critical([fresh | {"information/retrieval_acc": found / 32}] * MEASUREMENTS, before)]
    assert alarmed == list(range(7))
    assert sum(_binomial(found, 32, TRUE) for found in alarmed) == pytest.approx(0.00914, abs=1e-5)


def test_prompts_of_a_fixed_probe_are_counted_once() -> None:
    """1 of 8 found in four measurements is 1 prompt of 8, not 4 of 32: with it the rate would be 0.6^8 + 8 x 0.4 x 0.6^7 = 10.6%."""
    assert _false_alarms_of_a_probe(8, TRUE) == pytest.approx(0.6**8), "only where none of the eight is found: 1.7%"
    plain = {"information/chance": 1 / 8, "information/num_prompts": 8.0} | PROBE
    before = plain | {"information/retrieval_acc": 7 / 8}
    found = [found for found in range(4) if _is_critical([plain | {"information/retrieval_acc": found / 8}] * MEASUREMENTS, before)]
    assert found == [0], "the same by Wilson's interval over the prompts, where a record has no interval of its own"


@pytest.mark.parametrize("prompts", [5, 6, 7, 9, 12, 16, 24, 32])
def test_false_alarms_of_a_probe_of_any_size_stay_near_the_level_of_the_interval(prompts: int) -> None:
    """At the same effect as 0.40 among 8 prompts (31% of the way from chance to 1), at most 5%."""
    rate = 1 / prompts + (TRUE - 1 / 8) / (1 - 1 / 8) * (1 - 1 / prompts)
    assert _false_alarms_of_a_probe(prompts, rate) <= 0.0501


def test_measuring_a_probe_more_often_is_no_further_evidence() -> None:
    """At every step, eight measurements are recent."""
    found = _measured(*_scores(8, 1)) | PROBE
    records = [_measured(*_scores(8, 7)) | PROBE] * 12 + [found] * 12
    assert check([StepRecord(step, metrics) for step, metrics in enumerate(records, 1)]) == []


@pytest.mark.parametrize("prompts", [5, 8, 16])
def test_reasoning_that_is_the_same_under_every_prompt_is_seen(prompts: int) -> None:
    """Every prompt scores alike: ties are shared, each prompt is at chance, and so is their interval."""
    source = np.repeat(np.arange(prompts), SAMPLES)
    lost = _measured(np.full((len(source), prompts), -50.0), source) | PROBE
    assert lost["information/retrieval_acc"] == pytest.approx(1 / prompts)
    assert _is_critical([lost] * MEASUREMENTS, _measured(*_scores(prompts, prompts - 1)) | PROBE)


@pytest.mark.parametrize(("prompts", "least"), [(8, 0.6), (16, 0.95), (32, 0.95)])
def test_a_collapse_of_noisy_scores_is_seen(prompts: int, least: float) -> None:
    """Scores that differ by chance alone; sixteen measurements after the collapse, as the policy goes on changing."""
    source, seen, runs = np.repeat(np.arange(prompts), SAMPLES), 0, 20
    before = _measured(*_scores(prompts, prompts - 1)) | PROBE
    for seed in range(runs):
        rng = generator("collapse", prompts, seed)
        lost = [_measured(-50 + rng.normal(0, 1, (len(source), prompts)), source, place) | PROBE for place in range(16)]
        seen += any(_is_critical(lost[: place + 1], before) for place in range(3, 16))
    assert seen / runs >= least
