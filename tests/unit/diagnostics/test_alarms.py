"""The rules one by one: what raises each alarm, what does not, since when it stands, and what it says.

The window sizes are the defaults: 10 steps of start, 8 recent steps; 5 and 4 measurements where information is measured.
"""

import math
import re
from collections.abc import Callable

import pytest
from pydantic import ValidationError

from tether.core.alarms import Alarm, AlarmName, Evidence, Severity
from tether.core.config import known_keys
from tether.core.metrics import is_catalogued
from tether.diagnostics.alarms.rules import NEVER_INFORMED, NEVER_LOOKED, RULES, Advice
from tether.diagnostics.alarms.tracker import StepReasoning, check, steps_standing
from tether.diagnostics.settings import AlarmRules
from tether.runs.schema import StepRecord
from tether.training.settings import RunSettings

Level = Callable[[int], float]
INFORMED = {
    "information/retrieval_acc": 0.75,
    "information/chance": 0.125,
    "information/num_prompts": 8.0,
    "information/h_conditional": 1.0,
}


def _noise(step: int) -> float:
    """A factor between 0.95 and 1.05 that no two neighbouring steps share."""
    return 0.95 + 0.1 * ((step * 7) % 11) / 10


def _run(steps: int, every: int = 5, **levels: Level) -> list[StepRecord]:
    """Healthy numbers, but for the metrics whose level is given; `mi` is a share of log P."""
    records = []
    for step in range(1, steps + 1):
        metrics = {
            "rollout/success": 0.4 * _noise(step),
            "rollout/format_valid": 0.8,
            "rollout/response_tokens": 100 * _noise(step),
            "rollout/reasoning_tokens": 70 * _noise(step),
            "rollout/response_tokens_max": 160.0,
            "groups/rv_mean": 0.2 * _noise(step),
        }
        measured = dict(INFORMED, **{"information/mi_seq": math.log(8) * 0.6 * _noise(step)})
        for name, level in levels.items():
            key = name.replace("__", "/")
            if name == "mi":
                measured["information/mi_seq"] = math.log(8) * level(step)
            elif key.startswith("information/"):
                measured[key] = level(step)
            else:
                metrics[key] = level(step)
        records.append(StepRecord(step, metrics | (measured if (step - 1) % every == 0 else {})))
    return records


def _drop(at: int, before: float, after: float) -> Level:
    return lambda step: (before if step < at else after) * _noise(step)


def _names(alarms: list[Alarm]) -> list[str]:
    return [str(alarm.name) for alarm in alarms]


def test_a_healthy_run_is_silent_and_so_is_an_empty_one() -> None:
    assert check(_run(200)) == [] and steps_standing(_run(200)) == {}
    assert check([]) == [] and steps_standing([]) == {}
    assert check([StepRecord(0, {"validation/success": 0.1})]) == []


def test_information_falls_while_success_holds() -> None:
    """Measured at 1, 6, ..., 46 high and at 51, 56, 61, 66 low: the four lows are complete at 66."""
    records = _run(70, mi=_drop(50, 0.6, 0.2))
    assert check(records[:65]) == []
    (alarm,) = check(records)
    assert (alarm.name, alarm.severity, alarm.began) == (AlarmName.INFORMATION_FALLS, Severity.WARNING, 66)
    (evidence,) = alarm.evidence
    assert evidence.metric == "information/mi_seq / log(prompts)" and evidence.steps == (51, 66)
    # The noise factors of steps 51, 56, 61, 66 are 1.0, 1.02, 1.04, 0.95 in some order: their median times 0.2.
    assert evidence.value == pytest.approx(0.2 * sorted(_noise(step) for step in (51, 56, 61, 66))[1], rel=0.03)
    assert evidence.reference == pytest.approx(0.6, rel=0.05) and evidence.test == "medians of 4 and 5, rank-sum p = 0.0079"
    assert (alarm.cause, alarm.remedy) == (RULES[alarm.name].advice.cause, RULES[alarm.name].advice.remedy)


def test_information_that_first_rises_is_compared_with_its_best() -> None:
    """0.3 at the start, 0.8 when learned, 0.35 after: above the start, and less than half of the best."""
    records = _run(120, mi=lambda step: (0.3 if step < 30 else 0.8 if step < 80 else 0.35) * _noise(step))
    (alarm,) = check(records)
    assert alarm.name == AlarmName.INFORMATION_FALLS and alarm.began == 96
    assert alarm.evidence[0].reference == pytest.approx(0.8, rel=0.05) and (alarm.evidence[0].reference_steps or (0, 0))[0] >= 31
    assert check(_run(120, mi=lambda step: (0.3 if step < 30 else 0.8 if step < 80 else 0.42) * _noise(step))) == []


def test_information_is_a_share_of_its_ceiling() -> None:
    """Half the prompts, two thirds of the ceiling: mi_seq falls with it, and nothing was lost."""
    records = _run(100, mi=lambda step: 0.6 * (1 if step < 50 else 1 / 3), information__num_prompts=lambda step: 8.0 if step < 50 else 2.0)
    assert check(records) == []


def test_information_falls_gravely_once_success_fell_too() -> None:
    records = _run(100, mi=_drop(40, 0.6, 0.2), rollout__success=_drop(80, 0.5, 0.2))
    assert [alarm.severity for alarm in check(records[:80])] == [Severity.WARNING]
    (alarm,) = check(records)
    assert alarm.severity is Severity.CRITICAL and alarm.began == 56, "growing graver does not begin it anew"
    assert [item.metric for item in alarm.evidence][1] == "rollout/success" and alarm.evidence[1].steps == (93, 100)
    learned = _run(
        100, mi=_drop(40, 0.6, 0.2), rollout__success=lambda step: (0.3 if step < 30 else 0.8 if step < 80 else 0.4) * _noise(step)
    )
    assert [alarm.severity for alarm in check(learned)] == [Severity.CRITICAL], "above its start, and half of its best"
    mild = _run(100, mi=_drop(40, 0.6, 0.2), rollout__success=_drop(80, 0.5, 0.4))
    assert [alarm.severity for alarm in check(mild)] == [Severity.WARNING]


@pytest.mark.parametrize("dip", [1, 2])
def test_one_or_two_wild_measurements_raise_nothing(dip: int) -> None:
    assert steps_standing(_run(150, mi=lambda step: 0.01 if 70 <= step < 70 + 5 * dip else 0.6 * _noise(step))) == {}
    assert steps_standing(_run(150, groups__rv_mean=lambda step: 0.0 if 70 <= step < 70 + dip else 0.2 * _noise(step))) == {}


def _seeing(level: Level, margin: float = 0.004, **levels: Level) -> list[StepRecord]:
    """A run with images, in which the reasoning loses so much with those of another episode."""
    ends = {
        f"information__image_swapped{end}": lambda step, by=by: level(step) + by
        for end, by in (("", 0), ("_low", -margin), ("_high", margin))
    }
    others = {"information__image_prompts": lambda step: 8.0, "information__h_conditional_seq": lambda step: 40.0}
    return _run(100, **{**ends, **others, **levels})


def test_an_agent_that_stops_looking() -> None:
    (alarm,) = check(_seeing(_drop(50, 0.2, 0.0)))
    assert (alarm.name, alarm.severity, alarm.began) == (AlarmName.IMAGE_IGNORED, Severity.CRITICAL, 66)
    (evidence,) = alarm.evidence
    assert str(evidence) == (
        "information/image_swapped 0 in steps 81-96 (mean of 4 measurements, 95% interval -0.002 to 0.002 over 8 prompts each holds 0)"
    )
    assert "stopped looking" in alarm.cause


def test_an_agent_that_looks_less() -> None:
    (alarm,) = check(_seeing(_drop(50, 0.2, 0.04), margin=0.001))
    assert (alarm.name, alarm.severity, alarm.began) == (AlarmName.IMAGE_IGNORED, Severity.WARNING, 66)
    assert check(_seeing(_drop(50, 0.2, 0.06), margin=0.001)) == [], "above a quarter of its best"


def test_an_agent_that_never_looked() -> None:
    (alarm,) = check(_seeing(lambda step: 0.001))
    assert (alarm.name, alarm.severity, alarm.cause) == (AlarmName.IMAGE_IGNORED, Severity.WARNING, NEVER_LOOKED.cause)


def test_no_alarm_about_images_without_evidence() -> None:
    assert check(_seeing(lambda step: 0.001, margin=0.1)) == [], "the interval reaches far: 40 tokens of 0.05 nats are two bits and more"
    assert check(_seeing(lambda step: 0.001, information__image_prompts=lambda step: 4.0)) == []
    fixed = check(
        _seeing(_drop(50, 0.2, 0.0), information__h_conditional=_drop(50, 1.0, 0.2), information__h_conditional_seq=_drop(50, 40, 8))
    )
    assert fixed == [], "reasoning that no longer varies is another alarm's"
    probe = _seeing(lambda step: 0.003, margin=0.004, information__probe_tokens_sampled=lambda step: 9.0)
    assert _names(check(probe)) == ["image_ignored"] and check(_seeing(lambda step: 0.003, margin=0.004)) == []


def test_entropy_up_while_information_falls() -> None:
    records = _run(100, mi=_drop(50, 0.6, 0.2), information__h_conditional=_drop(50, 1.0, 1.5))
    assert _names(check(records)) == ["information_falls", "entropy_up_information_down"]
    alarm = check(records)[1]
    assert alarm.began == 66 and alarm.severity is Severity.CRITICAL
    assert [item.metric for item in alarm.evidence] == ["information/mi_seq / log(prompts)", "information/h_conditional"]
    assert alarm.evidence[0].steps == alarm.evidence[1].steps and alarm.evidence[0].reference_steps == alarm.evidence[1].reference_steps
    assert _names(check(_run(100, mi=_drop(50, 0.6, 0.2), information__h_conditional=_drop(50, 1.0, 1.05)))) == ["information_falls"]
    assert check(_run(100, information__h_conditional=_drop(50, 1.0, 1.5))) == [], "diversity alone is no harm"


def test_retrieval_at_chance() -> None:
    """Four measurements of 8 prompts: 0.125 of 32 has the Wilson interval 0.050 to 0.281."""
    records = _run(100, information__retrieval_acc=lambda step: 0.75 if step < 50 else 0.125)
    (alarm,) = check(records)
    assert (alarm.name, alarm.severity, alarm.began) == (AlarmName.RETRIEVAL_AT_CHANCE, Severity.CRITICAL, 66)
    assert alarm.evidence[0].test == "mean of 4 measurements, 95% interval 0.0497 to 0.281 over 32 prompts holds chance, 0.125"
    assert alarm.remedy == RULES[alarm.name].advice.remedy


@pytest.mark.parametrize(("accuracy", "prompts", "raised"), [(0.21, 8, True), (0.22, 8, False), (0.06, 32, True), (0.07, 32, False)])
def test_where_chance_ends(accuracy: float, prompts: int, raised: bool) -> None:
    """With 8 prompts the excess decides: 0.125 + 0.1 * 0.875 = 0.2125. With 32 the interval does: of 128, 0.06 reaches down to 0.030, 0.07 to 0.037, and chance is 0.031."""
    records = _run(
        100,
        information__retrieval_acc=lambda step: 0.75 if step < 50 else accuracy,
        information__chance=lambda step: 1 / prompts,
        information__num_prompts=lambda step: float(prompts),
    )
    assert _names(check(records)) == ["retrieval_at_chance"] * raised


def test_a_run_that_never_was_informed_has_lost_nothing() -> None:
    (alarm,) = check(_run(40, information__retrieval_acc=lambda step: 0.13))
    assert alarm.severity is Severity.WARNING and alarm.began == 16 and alarm.cause == NEVER_INFORMED.cause


def test_well_formed_text_that_ignores_its_prompt() -> None:
    lost: Level = lambda step: 0.75 if step < 50 else 0.125  # noqa: E731
    records = _run(100, information__retrieval_acc=lost, rollout__format_valid=lambda step: 0.95)
    assert _names(check(records)) == ["retrieval_at_chance", "input_agnostic_text"]
    alarm = check(records)[1]
    assert [item.metric for item in alarm.evidence] == ["rollout/format_valid", "information/retrieval_acc"] and alarm.began == 66
    assert alarm.evidence[0].value == 0.95 and alarm.evidence[0].steps == (93, 100)
    assert _names(check(_run(100, information__retrieval_acc=lost, rollout__format_valid=lambda step: 0.89))) == ["retrieval_at_chance"]
    assert check(_run(100, rollout__format_valid=lambda step: 1.0)) == []


def test_reward_variance_collapse() -> None:
    records = _run(60, groups__rv_mean=_drop(41, 0.2, 0.04))
    (alarm,) = check(records)
    assert (alarm.name, alarm.severity) == (AlarmName.REWARD_VARIANCE_COLLAPSE, Severity.CRITICAL)
    assert 44 <= alarm.began <= 48, "a median of eight needs five of them, the rank test nearly all"
    assert alarm.evidence[0].reference_steps == (1, 10) and alarm.evidence[0].steps == (53, 60)
    assert check(_run(60, groups__rv_mean=_drop(41, 0.2, 0.06))) == [], "to a third is not a collapse"


def test_variance_that_ends_in_success_is_no_alarm() -> None:
    assert check(_run(60, groups__rv_mean=_drop(41, 0.2, 0.01), rollout__success=lambda step: 0.4 if step < 41 else 0.93)) == []
    assert check(_run(60, groups__rv_mean=_drop(41, 0.2, 0.01), rollout__success=lambda step: 0.4 if step < 41 else 0.89)) != []
    assert check(_run(60, groups__rv_mean=lambda step: 0.0, rollout__success=lambda step: 1.0)) == []


def test_no_variance_at_all_needs_no_start_to_compare_with() -> None:
    records = _run(8, groups__rv_mean=lambda step: 1e-13, rollout__success=lambda step: 0.0)
    assert check(records[:7]) == []
    (alarm,) = check(records)
    assert alarm.began == 8 and alarm.evidence[0].test == "zero in 8 steps in a row"


def test_length_collapse() -> None:
    records = _run(60, rollout__reasoning_tokens=_drop(41, 70, 10))
    (alarm,) = check(records)
    assert (alarm.name, alarm.severity) == (AlarmName.LENGTH_COLLAPSE, Severity.WARNING) and 44 <= alarm.began <= 48
    assert [item.metric for item in alarm.evidence] == ["rollout/reasoning_tokens"]
    both = _run(
        60, rollout__reasoning_tokens=_drop(41, 70, 10), rollout__response_tokens=_drop(41, 100, 20), rollout__success=_drop(41, 0.5, 0.1)
    )
    (alarm,) = check(both)
    assert alarm.severity is Severity.CRITICAL
    assert [item.metric for item in alarm.evidence] == ["rollout/reasoning_tokens", "rollout/response_tokens", "rollout/success"]
    assert check(_run(60, rollout__reasoning_tokens=_drop(41, 70, 25), rollout__response_tokens=_drop(41, 100, 30))) == []


def test_length_explosion() -> None:
    grown = _drop(41, 100, 158)
    records = _run(60, rollout__response_tokens=lambda step: min(160.0, grown(step)))
    (alarm,) = check(records)
    assert (alarm.name, alarm.severity) == (AlarmName.LENGTH_EXPLOSION, Severity.CRITICAL)
    assert [item.metric for item in alarm.evidence] == ["rollout/response_tokens", "rollout/response_tokens_max"]
    assert check(records, rules=AlarmRules(max_tokens=400)) == [], "long, and far from the budget"
    assert check(records, rules=AlarmRules(max_tokens=160))[0].evidence[1].metric == "rollout.max_tokens"
    assert check(_run(60, rollout__response_tokens=lambda step: 155 * _noise(step) ** 0.1)) == [], (
        "always near the budget, and no longer than ever"
    )
    assert check(_run(60, rollout__response_tokens=_drop(41, 100, 135))) == [], "longer, and not at the budget"
    assert check(_run(60, rollout__response_tokens=lambda step: (135 if step < 41 else 155) * _noise(step) ** 0.1)) == [], "hardly longer"
    assert check(_run(16, rollout__response_tokens=lambda step: 100.0 if step < 9 else 155.0)) == [], (
        "the start is not yet ten steps of its own"
    )


def test_sampler_mismatch() -> None:
    (alarm,) = check(_run(20, rollout__mismatch_before=_drop(15, 1e-3, 0.3), rollout__staleness=lambda step: 0.0))
    assert (alarm.name, alarm.severity) == (AlarmName.SAMPLER_MISMATCH, Severity.CRITICAL)
    assert [item.metric for item in alarm.evidence] == ["rollout/mismatch_before"] and alarm.began == 16
    (late,) = check(_run(20, rollout__mismatch_before=lambda step: 1e-3, rollout__staleness=lambda step: 2.0))
    assert late.severity is Severity.WARNING and late.evidence[0].metric == "rollout/staleness"
    once = _run(20, rollout__mismatch_before=lambda step: 0.5 if step == 19 else 1e-3, rollout__staleness=lambda step: 1.0)
    assert check(once) == [], "one wild step, and a lag of one update, are no alarm"


def _agent(**levels: Level) -> dict[str, Level]:
    """A healthy agent: three requests an episode, two of them with a call, two follow-ups that continue."""
    healthy: dict[str, Level] = {
        **{f"rollout/env/agent/{name}": lambda _, value=value: value for name, value in (("calls", 3.0), ("with_tools", 3.0))},  # type: ignore[misc]
        "rollout/env/agent/tool_calls": lambda step: 2 * _noise(step),
        "rollout/env/agent/unparsed_calls": lambda _: 0.5,
        "rollout/continued": lambda _: 1.0,
    }
    return healthy | {name if name == "rollout/continued" else f"rollout/env/agent/{name}": level for name, level in levels.items()}


def test_a_healthy_agent_is_silent_and_so_is_one_without_tools() -> None:
    assert steps_standing(_run(60, **_agent())) == {}
    none = dict.fromkeys(("with_tools", "tool_calls"), lambda _: 0.0)
    assert steps_standing(_run(60, **_agent(**none, calls=lambda _: 1.0))) == {}


def test_no_tool_call_in_a_step_with_tools() -> None:
    records = _run(30, **_agent(tool_calls=lambda step: 0.0 if step == 20 else 0.1))
    assert steps_standing(records) == {AlarmName.NO_TOOL_CALLS: [20]}
    (alarm,) = check(records[:20])
    assert str(alarm.evidence[0]).endswith("tool_calls 0 in steps 20-20 (none in the step; 0.5 an episode that cannot be read)")


def test_an_agent_that_stops_calling_its_tools() -> None:
    """Two calls an episode, then 0.4, less than a quarter: beyond chance once seven of the eight recent steps have it."""
    records = _run(60, **_agent(tool_calls=_drop(30, 2.0, 0.4)))
    (alarm,) = check(records)
    assert (alarm.name, alarm.severity, alarm.began) == (AlarmName.TOOL_USE_FALLS, Severity.WARNING, 36)
    assert check(_run(60, **_agent(tool_calls=_drop(30, 2.0, 0.6)))) == [], "more than a quarter"
    (alarm,) = check(_run(60, rollout__success=_drop(30, 0.5, 0.2), **_agent(tool_calls=_drop(30, 2.0, 0.4))))
    assert alarm.severity is Severity.CRITICAL and alarm.evidence[1].metric == "rollout/success"


def test_follow_ups_that_continue_nothing() -> None:
    records = _run(10, **_agent(**{"rollout/continued": lambda step: {4: 0.5, 6: 0.49}.get(step, 0.9)}))
    assert steps_standing(records) == {AlarmName.BROKEN_HISTORY: [6]}


def test_episodes_of_a_single_request() -> None:
    records = _run(10, **_agent(calls=lambda step: {4: 1.01, 6: 1.0}.get(step, 3.0)))
    assert steps_standing(records) == {AlarmName.SINGLE_CALLS: [6]}
    without = [*_run(1, **_agent(calls=lambda _: 1.0)), StepRecord(2, {"rollout/success": 0.5})]
    assert check(without) == [], "a step that has no such number says nothing"


@pytest.mark.parametrize("metric", ["groups__rv_mean", "rollout__reasoning_tokens"])
def test_what_rose_and_came_back_to_its_start_has_not_collapsed(metric: str) -> None:
    assert steps_standing(_run(80, **{metric: lambda step: (50 if 20 < step < 50 else 10) * _noise(step)})) == {}


def _texts(step: int, degenerate: int, total: int = 32) -> list[StepReasoning]:
    return [StepReasoning(step, "Solve it.", "!" * 40 if place < degenerate else f"I try {place} and look.") for place in range(total)]


def test_repeated_text() -> None:
    texts = [item for step in range(55, 71) for item in _texts(step, 0 if step < 63 else 12)]
    (alarm,) = check(_run(70), texts)
    assert (alarm.name, alarm.severity) == (AlarmName.REPEATED_TEXT, Severity.CRITICAL)
    assert alarm.began == 64, "two of three steps, and 24 of 96 is above a tenth beyond its interval"
    assert alarm.evidence[0].value == pytest.approx(12 / 32) and alarm.evidence[0].steps == (68, 70)
    assert check(_run(70)) == [], "without text there is nothing to read"


def test_repeated_text_needs_more_than_one_step_and_more_than_a_few() -> None:
    one_step = [item for step in (68, 69, 70) for item in _texts(step, 32 if step == 70 else 0)]
    assert check(_run(70), one_step) == []
    few = [item for step in (68, 69, 70) for item in _texts(step, 4)]
    assert check(_run(70), few) == [], "12 of 96: the interval reaches down to 7%"
    assert check(_run(70), _texts(69, 32) + _texts(70, 32)) == [], "two steps are on record"
    quoted = [StepReasoning(step, "!" * 40, "!" * 40) for step in (68, 69, 70) for _ in range(32)]
    assert check(_run(70), quoted) == []
    half = [StepReasoning(step, "", "so good!!!!!!") for step in (68, 69, 70) for _ in range(32)]
    assert check(_run(70), half) == [], "half of the text, and not more"
    blank = [StepReasoning(step, "", " ") for step in (68, 69)]
    assert _names(check(_run(70), [*_texts(66, 20), *_texts(67, 20), *blank, *_texts(70, 20)])) == ["repeated_text"], "blank is not text"


def test_alarms_come_in_the_order_they_began_and_do_not_depend_on_the_order_of_the_records() -> None:
    records = _run(120, mi=_drop(90, 0.6, 0.1), groups__rv_mean=_drop(41, 0.2, 0.01), rollout__reasoning_tokens=_drop(41, 70, 5))
    alarms = check(records)
    assert _names(alarms) == ["reward_variance_collapse", "length_collapse", "information_falls"]
    assert check(records[::-1]) == alarms
    assert check([StepRecord(120, {}), *records]) == alarms, "of one step the last record counts"
    assert check([*records, records[-1]]) == alarms, "the last step on file twice"


def test_every_prefix_tells_the_same_story() -> None:
    """Asked step by step, an alarm is new exactly where the whole record says it began."""
    records = _run(90, mi=_drop(50, 0.6, 0.2), information__h_conditional=_drop(50, 1.0, 1.5), groups__rv_mean=_drop(60, 0.2, 0.01))
    live = {(step, name) for step in range(1, 91) for name in _names(check(records[:step]))}
    assert live == {(step, str(name)) for name, steps in steps_standing(records).items() for step in steps}
    for alarm in check(records):
        assert (alarm.began, alarm.name) in live and (alarm.began - 1, alarm.name) not in live


def test_an_alarm_that_was_interrupted_began_anew() -> None:
    records = _run(90, groups__rv_mean=lambda step: (0.01 if 20 < step <= 40 or step > 70 else 0.2) * _noise(step))
    assert check(records[:60]) == []
    (alarm,) = check(records)
    assert alarm.began > 70 and steps_standing(records)[AlarmName.REWARD_VARIANCE_COLLAPSE][0] < 30


def test_missing_numbers_are_no_alarm() -> None:
    bare = [StepRecord(step, {"information/retrieval_acc": 0.1, "information/mi_seq": 0.0}) for step in range(1, 60)]
    assert check(bare) == []
    one_prompt = [StepRecord(step, {"information/mi_seq": 0.0, "information/num_prompts": 1.0}) for step in range(1, 60)]
    assert check(one_prompt) == []


def test_one_line_says_it_all() -> None:
    evidence = Evidence("groups/rv_mean", 0.01, (41, 48), "rank-sum p = 0.00002", 0.2, (1, 10))
    alarm = Alarm(AlarmName.REWARD_VARIANCE_COLLAPSE, Severity.CRITICAL, 45, (evidence, Evidence("x", 1.0, (1, 2), "t")), "why", "what")
    assert alarm.sentence() == (
        "critical: reward_variance_collapse since step 45: groups/rv_mean 0.01 in steps 41-48, 0.2 in steps 1-10 (rank-sum p = 0.00002); "
        "x 1 in steps 1-2 (t). Likely cause: why. To change: what."
    )


@pytest.mark.parametrize("advice", [*(rule.advice for rule in RULES.values()), NEVER_INFORMED], ids=[*RULES, "never_informed"])
def test_advice_names_settings_and_metrics_that_exist(advice: Advice) -> None:
    """One line each; every word like section.key is a setting and every word like section/name a metric."""
    words = f"{advice.cause} {advice.remedy}"
    assert "\n" not in words and not advice.remedy.endswith(".") and not advice.cause.endswith(".")
    named = re.findall(r"\b[a-z_]+\.[a-z_]+\b", words)
    assert named, "an alarm says what to change"
    assert set(named) <= set(known_keys(RunSettings))
    assert all(is_catalogued(name) for name in re.findall(r"\b[a-z_]+/[a-z_]+\b", words))


def test_every_alarm_has_a_rule() -> None:
    assert set(RULES) == set(AlarmName)


def test_rules_that_could_never_fire_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"windows of 3 and 3 reach 0.05 at best; lengthen them"):
        AlarmRules(start_measurements=3, recent_measurements=3)
    with pytest.raises(ValidationError, match="step_p is 1e-05"):
        AlarmRules(step_p=1e-5)
    with pytest.raises(ValidationError):
        AlarmRules(information_share=1.5)
    AlarmRules(start_measurements=5, recent_measurements=5, measured_p=0.004)
