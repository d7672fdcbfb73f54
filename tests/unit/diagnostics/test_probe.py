"""The fixed probe: the change and its paired interval against known answers, its columns, its budget, and that a checkpoint carries it."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tether import BadInput, Information, ProbeRows, measure_information
from tether.core.enums import Scope
from tether.core.metrics import StepMetrics
from tether.core.seeding import generator
from tether.diagnostics.monitor import Monitor
from tether.diagnostics.pairs import Pairs, probe_rows
from tether.diagnostics.probe import CHANGES, ProbeMeasurement

Sample = tuple[np.ndarray, np.ndarray, np.ndarray]

# ------------------------------------------------------------------------------------------- the change and its interval


def measurement(sample: Sample) -> tuple[ProbeMeasurement, Information]:
    scores, lengths, source = sample
    information = measure_information(*sample, bootstrap=1)
    pairs = Pairs([(column,) for column in range(scores.shape[1])], [(0,) * int(length) for length in lengths], source.tolist())
    return ProbeMeasurement.of(1, pairs, information), information


def narrowest(first: Sample, last: Sample, name: str) -> tuple[float, float]:
    """Of eight intervals from one draw each: a single draw's ratio is nearly always within Student's t, which then decides both ends."""
    before, after = measurement(first)[0], measurement(last)[0]
    found = [after.change_since(before, 1, generator("test", seed)) for seed in range(8)]
    ends = [(change[f"{name}_change_low"], change[f"{name}_change_high"]) for change in found]
    return min(ends, key=lambda pair: pair[1] - pair[0])


def test_one_reasoning_a_prompt_is_the_paired_t_interval_of_the_textbook() -> None:
    """H(Z|X) rises by 1 2 3 4 5 at five prompts that differ by tens: mean 3, standard error sqrt(2.5 / 5) = 0.707107, t(4) = 2.77645.

    The two levels by themselves have intervals of about +-25: the difference of two unpaired ones says nothing.
    """
    first, last = np.full((5, 5), -90.0), np.full((5, 5), -90.0)
    np.fill_diagonal(first, [-10.0, -60.0, -30.0, -50.0, -20.0])
    np.fill_diagonal(last, [-11.0, -62.0, -33.0, -54.0, -25.0])
    rest = np.ones(5), np.arange(5)
    low, high = narrowest((first, *rest), (last, *rest), "h_conditional")
    assert (low, high) == pytest.approx((3 - 1.963248, 3 + 1.963248), rel=1e-3)
    level = measurement((first, *rest))[1].intervals["h_conditional"]
    assert level[1] - level[0] > 10 * (high - low)


def two_samples(groups: int = 1) -> tuple[Sample, Sample]:
    """Forty prompts whose own scores fall, by more at some prompts than at others; rounded, so that there are ties."""
    rng = np.random.default_rng(4)
    source = np.repeat(np.arange(40), groups)
    rows = np.arange(len(source))
    scores = np.round(2 * rng.normal(size=(len(source), 40)), 1) - 30
    scores[rows, source] += np.round(rng.normal(4, 1.5, size=40), 1)[source]
    later = scores + np.round(rng.normal(0, 0.3, size=scores.shape), 1)
    later[rows, source] -= np.round(rng.gamma(1.0, 1.0, size=40), 1)[source]
    lengths = rng.integers(1, 5, size=len(source))
    return (scores, lengths, source), (later, lengths, source)


def without(sample: Sample, prompt: int) -> Information:
    scores, lengths, source = sample
    rest = source != prompt
    kept = source[rest]
    return measure_information(np.delete(scores[rest], prompt, axis=1), lengths[rest], kept - (kept > prompt))


@pytest.mark.parametrize("name", CHANGES)
def test_the_error_of_a_change_is_that_of_changes_without_each_prompt(name: str) -> None:
    """A plain jackknife of the difference, done here by measuring both matrices forty times without a prompt. t(39) is 2.02269."""
    first, last = two_samples()
    smaller = np.array([getattr(without(last, prompt), name) - getattr(without(first, prompt), name) for prompt in range(40)])
    error = math.sqrt(39 / 40 * ((smaller - smaller.mean()) ** 2).sum())
    low, high = narrowest(first, last, name)
    assert high - low == pytest.approx(2 * 2.02269 * error, rel=1e-4)


@pytest.mark.parametrize("name", CHANGES)
def test_the_change_is_the_difference_of_the_levels_exactly_and_the_pairing_pays(name: str) -> None:
    first, last = two_samples(groups=3)
    (before, level), (after, later) = measurement(first), measurement(last)
    found = after.change_since(before, 400, generator("test"))
    assert found[f"{name}_change"] == getattr(later, name) - getattr(level, name)
    low, high = found[f"{name}_change_low"], found[f"{name}_change_high"]
    assert low < found[f"{name}_change"] < high
    widths = [ends[1] - ends[0] for ends in (level.intervals[name], later.intervals[name])]
    assert high - low < 0.8 * math.hypot(*widths)


def test_nothing_changed_is_exactly_nothing() -> None:
    found = measurement(two_samples()[0])[0]
    assert set(found.change_since(found, 50, generator("test")).values()) == {0.0}


def test_a_change_of_the_accuracy_ends_at_one() -> None:
    """Three prompts, two retrieved before and one after: with two degrees of freedom the interval would reach far beyond -1 and 1."""
    first, last = np.full((3, 3), -5.0), np.full((3, 3), -5.0)
    first[0, 0] = first[1, 1] = last[2, 2] = -1.0
    first[2, 0] = last[0, 1] = last[1, 2] = -2.0
    rest = np.ones(3), np.arange(3)
    before, after = measurement((first, *rest))[0], measurement((last, *rest))[0]
    found = after.change_since(before, 100, generator("test"))
    assert [found[f"retrieval_acc_change{end}"] for end in ("", "_low", "_high")] == [pytest.approx(-1 / 3), -1.0, 1.0]


# ------------------------------------------------------------------------------------------------------- in the monitor

OWN = {"prompts": [(7,) * 10] * 2, "reasonings": [(1,) * 5] * 2, "groups": [0, 0]}
"""The step's own rows: a single prompt, on which nothing could be measured. Prompts of 10 tokens, reasonings of 5."""


class Table:
    """p at the own prompt and q elsewhere; reasoning z is about prompt z // 100."""

    def __init__(self, p: float, q: float) -> None:
        self.p, self.q = p, q
        self.tokens = 0

    def score_many(self, prompt: Any, reasonings: Any) -> list[float]:
        self.tokens += len(prompt) + sum(map(len, reasonings))
        return [math.log(self.p if reasoning[0] // 100 == prompt[0] else self.q) for reasoning in reasonings]

    def score(self, prompt: Any, reasoning: Any) -> float:
        return self.score_many(prompt, [reasoning])[0]


def sampler(num_prompts: int, silent: tuple[int, ...] = (), asked: list[int] | None = None) -> Callable[[int], ProbeRows]:
    """A probe whose reasonings are about their prompts; a silent prompt gets replies without reasoning."""

    def sample(count: int) -> ProbeRows:
        if asked is not None:
            asked.append(count)
        members = [(prompt, member) for prompt in range(1, num_prompts + 1) for member in range(count)]
        reasonings = [None if prompt in silent else (100 * prompt + member,) * 5 for prompt, member in members]
        return ProbeRows([(prompt,) * 10 for prompt, _ in members], reasonings)

    return sample


def test_the_probe_takes_the_place_of_the_steps_own_prompts() -> None:
    """Four prompts, p 1/2 and q 1/8: gain log(1/2 / (7/32)) = log(16/7). Then q 1/4: log(8/5), a change of log(7/10)."""
    monitor, asked = Monitor(Table(1 / 2, 1 / 8), every=2, probe_prompts=4, probe_samples=3, rules=None), []
    health = monitor.observe(1, **OWN, probe=sampler(4, asked=asked))
    found = health.metrics["information"]
    assert (found["num_prompts"], found["num_reasonings"], found["chance"], health.regime) == (4, 12, 1 / 4, None)
    assert found["mi_seq"] == pytest.approx(math.log(16 / 7)) and "mi_seq_change" not in found and health.notes == []
    # 12 prompts of 10 and 12 reasonings of 5 sampled; 4 prompts and 12 x 4 reasonings scored.
    assert (found["probe_tokens_sampled"], found["probe_tokens_scored"], found["probe_errors"]) == (180, 280, 0)
    assert monitor.observe(2, **OWN, probe=sampler(4, asked=asked)).metrics == {} and asked == [3], "sampled only where it is due"
    monitor.scorer = Table(1 / 2, 1 / 4)
    found = monitor.observe(3, **OWN, probe=sampler(4)).metrics["information"]
    assert found["mi_seq_change"] == pytest.approx(math.log(7 / 10))
    assert found["mi_seq_change_low"] == found["mi_seq_change_high"] == found["mi_seq_change"], "every prompt agrees"
    assert found["retrieval_acc_change"] == found["h_conditional_change"] == 0
    StepMetrics().put("information", found)


def test_a_prompt_without_reasoning_stays_a_column() -> None:
    """Of four prompts the last is silent: three have rows, and the mixture, chance and ceiling are still those of four."""
    monitor = Monitor(Table(1 / 2, 1 / 8), probe_prompts=4, rules=None)
    first = monitor.observe(1, **OWN, probe=sampler(4)).metrics["information"]
    found = monitor.observe(2, **OWN, probe=sampler(4, silent=(4,))).metrics["information"]
    assert (found["num_prompts"], found["num_reasonings"], found["num_empty"], found["chance"]) == (4, 12, 4, 1 / 4)
    assert found["mi_seq"] == first["mi_seq"] and found["mi_seq_change"] == 0
    silent = monitor.observe(3, **OWN, probe=sampler(4, silent=(1, 2, 3, 4)))
    assert silent.notes == ["diagnosis (first_turn): none of 16 responses holds reasoning; nothing to measure"] and not silent.information
    alone = monitor.observe(4, **OWN, probe=sampler(4, silent=(1, 2, 3)))
    assert alone.notes == [
        "diagnosis (first_turn): all reasoning of the step comes from one prompt; there is no other prompt to compare with"
    ]
    assert (alone.information, alone.regime, alone.metrics["information"]["num_prompts"]) == ({}, None, 4)


def test_other_columns_are_said_and_not_compared() -> None:
    """A prompt that could not be shown at first comes in later: from then on changes are since that step. Fewer columns are not compared."""
    monitor = Monitor(Table(1 / 2, 1 / 8), probe_prompts=4, rules=None)
    notes, changed = [], []
    for step, num_prompts in enumerate((3, 4, 4, 3, 4), start=1):
        health = monitor.observe(step, **OWN, probe=sampler(num_prompts))
        notes.append(health.notes)
        changed.append(health.metrics["information"].get("mi_seq_change"))
    assert changed == [None, None, 0, None, 0]
    assert notes == [
        ["probe: 3 columns, not 4: equal prompts are one column, and a prompt that could not be shown is none"],
        ["probe: the prompts (4 columns) are not those of step 1 (3 columns); changes are measured from this step on"],
        [],
        ["probe: the prompts (3 columns) are not those of step 2 (4 columns); no change is measured at this step"],
        [],
    ]


@pytest.mark.parametrize(
    ("work", "samples", "scored"),
    [
        (math.inf, 6, 520),
        (880, 6, 520),  # 4 x 10 scored once, and 4 x (10 + 5) + 4 x 4 x 5 = 140 for each reasoning of every prompt
        (879, 5, 440),
        (600, 4, 360),
        (320, 2, 200),
        (319, 2, 200),  # two a prompt whatever it costs
        (0, 2, 200),
    ],
)
def test_fewer_reasonings_for_less_work_and_never_more_again(work: float, samples: int, scored: int) -> None:
    table, asked = Table(1 / 2, 1 / 8), []
    monitor = Monitor(table, every=2, budget=0.5, probe_prompts=4, probe_samples=6, rules=None)
    health = monitor.observe(1, **OWN, work=work, probe=sampler(4, asked=asked))
    found = health.metrics["information"]
    assert asked == [samples] and found["num_reasonings"] == 4 * samples
    assert found["probe_tokens_scored"] == table.tokens == scored
    assert found["probe_tokens_sampled"] == 60 * samples and scored + 60 * samples == 40 + 140 * samples
    fewer = f"the probe samples {samples} reasonings for each prompt from now on, not 6, because of diagnosis.budget"
    over = (
        f"the probe takes about 320 tokens at its fewest reasonings, more than its {work:.0f} of diagnosis.budget; it is measured anyway: "
        "raise diagnosis.every or diagnosis.budget, or lower diagnosis.probe_prompts"
    )
    assert health.notes == [fewer] * (samples < 6) + [over] * (work < 320)
    resumed = Monitor(table, every=2, budget=0.5, probe_prompts=4, probe_samples=6, rules=None)
    resumed.restore(json.loads(json.dumps(monitor.state())))
    later = resumed.observe(3, **OWN, work=work, probe=sampler(4, asked=asked))
    assert asked == [samples] * 2 and later.notes == [], "what was said is said once"
    resumed.observe(5, **OWN, probe=sampler(4, asked=asked))
    assert asked == [samples] * 3


def test_whole_responses_count_where_the_loop_tells_their_length() -> None:
    """Responses of 25 tokens: 4 x (10 + 25) + 80 = 220 for each reasoning of every prompt; 40 + 220 x 2 = 480."""
    asked: list[int] = []
    monitor = Monitor(Table(1 / 2, 1 / 8), probe_prompts=4, rules=None)
    monitor.observe(1, **OWN, work=700, metrics={"rollout/response_tokens": 25.0}, probe=sampler(4, asked=asked))
    assert asked == [3]


def test_one_sample_a_prompt_is_allowed() -> None:
    asked: list[int] = []
    health = Monitor(Table(1 / 2, 1 / 8), probe_prompts=4, probe_samples=1, rules=None).observe(
        1, **OWN, work=0, probe=sampler(4, asked=asked)
    )
    assert asked == [1] and len(health.notes) == 1 and "180 tokens at its fewest" in health.notes[0]


@pytest.mark.parametrize(("work", "contexts"), [(1760, 16), (1759, 15)])
def test_other_scopes_get_what_the_probe_leaves(work: float, contexts: int) -> None:
    """The probe costs 120 tokens to sample and 200 to score; sixteen contexts cost 160 + 16 x 16 x 5 = 1440."""
    monitor = Monitor(Table(1 / 2, 1 / 8), scopes=[Scope.TURN], contexts=16, probe_prompts=4, probe_samples=2, rules=None)
    rows = {"prompts": [(n,) * 10 for n in range(1, 17)], "reasonings": [(100 * n,) * 5 for n in range(1, 17)], "groups": range(16)}
    health = monitor.observe(1, **rows, work=work, probe=sampler(4))
    assert health.metrics["information"]["num_reasonings"] == 8 and health.metrics["information_turn"]["num_prompts"] == contexts
    assert not any(name.startswith("probe") or "change" in name for name in health.metrics["information_turn"])


def test_a_checkpoint_carries_the_first_measurement_and_old_ones_have_none() -> None:
    def made() -> Monitor:
        return Monitor(Table(1 / 2, 1 / 8), probe_prompts=4, rules=None)

    whole = made()
    whole.observe(1, **OWN, probe=sampler(4))
    resumed = made()
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert resumed.state() == whole.state()
    for monitor in (whole, resumed):
        monitor.scorer = Table(1 / 3, 1 / 8)
    assert whole.observe(2, **OWN, probe=sampler(4)) == resumed.observe(2, **OWN, probe=sampler(4))
    old = made()
    old.restore({name: value for name, value in whole.state().items() if name != "probe"})
    assert "mi_seq_change" not in old.observe(2, **OWN, probe=sampler(4)).metrics["information"]
    assert "mi_seq_change" in old.observe(3, **OWN, probe=sampler(4)).metrics["information"]


def test_a_probe_that_cannot_be_sampled_is_a_note_and_bad_rows_are_refused() -> None:
    def fails(count: int) -> ProbeRows:
        raise BadInput("the environment is gone; start it again")

    monitor = Monitor(Table(1 / 2, 1 / 8), probe_prompts=4, rules=None)
    health = monitor.observe(1, **OWN, probe=fails)
    assert health.notes == ["diagnosis (first_turn) failed: the environment is gone; start it again"]
    assert health.metrics["information"] == {"num_reasonings": 0, "num_prompts": 0, "num_empty": 0, "failed": 1}
    with pytest.raises(BadInput, match="got 2 prompts and 1 reasonings; give equally many"):
        monitor.observe(1, **OWN, probe=lambda count: ProbeRows([(1,), (2,)], [(100,)]))
    with pytest.raises(BadInput, match="observe has no probe; give probe_prompts to Monitor and probe to every observe, or neither"):
        monitor.observe(1, **OWN)
    with pytest.raises(BadInput, match="Monitor has no probe_prompts"):
        Monitor(Table(1 / 2, 1 / 8)).observe(1, **OWN, probe=sampler(4))
    for bad in ({"probe_prompts": 1}, {"probe_prompts": -2}, {"probe_prompts": 4, "probe_samples": 0}):
        with pytest.raises(BadInput, match="give at least 2 prompts"):
            Monitor(None, **bad)


def test_rows_of_a_probe_are_first_turns_and_errors_are_counted(turn: Any, group: Any) -> None:
    groups = [group(0, [[turn((1, 2), (10, 11, 90), (0, 2))], [turn((1, 2), (12, 90), None)]]), group(1, [[]])]
    groups[1].errored = [group(1, [[]]).trajectories[0]]
    assert probe_rows(groups) == ProbeRows([(1, 2), (1, 2)], [(10, 11), ()], tokens_sampled=9, errors=1)
