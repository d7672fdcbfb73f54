"""The rules of the alarms: each is a pure function of the history up to a step and says whether its alarm stands there.

A rule stands beside the likely cause of its alarm and the settings to change. It reads any logged metric from the history. The tracker asks
every rule once per step and remembers since when an alarm stands.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from tether.algorithms.filters.scores import ZERO
from tether.core.alarms import AlarmName, Evidence, Severity
from tether.core.enums import REGIME_FRACTION
from tether.core.evidence import FEWEST_PROMPTS, REACH, ImageEvidence, mean_tokens
from tether.core.metrics import wilson_interval
from tether.core.types import AGENT
from tether.diagnostics.alarms.history import INFORMATION, History, Shift, fall, rise
from tether.diagnostics.settings import AlarmRules


@dataclass(frozen=True, slots=True)
class Advice:
    """The likely cause, and what to change; one line each."""

    cause: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of a rule whose alarm stands."""

    severity: Severity
    evidence: tuple[Evidence, ...]
    advice: Advice | None = None
    """Replaces the usual advice of the alarm."""


Check = Callable[[History, AlarmRules], Finding | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """Whether an alarm stands at the last step of a history, and what to say if it does."""

    check: Check
    advice: Advice


RULES: dict[AlarmName, Rule] = {}
"""Filled by `_rule`, below."""

NEVER_INFORMED = Advice(
    "reasoning has not depended on its prompt since the run began: the prompts are nearly alike, or the model does not read them",
    "compare prompts in the report, vary the tasks more (env.options, rollout.num_groups), or start from a stronger model.name",
)
"""Replaces the usual advice where retrieval was at chance from the first measurements on: nothing collapsed."""


NEVER_LOOKED = Advice(
    "the reasoning has not depended on the image since the run began: the text tells what the image shows, or the model does not see it",
    "compare reasonings and pictures in the report, leave the state out of the text (env.options.observation), or start from a model.name that reads such pictures",
)
"""Replaces the usual advice where the image was ignored from the first measurements on."""


def _rule(name: AlarmName, cause: str, remedy: str) -> Callable[[Check], Check]:
    """Register a function as the rule of an alarm, with the likely cause and what to change."""

    def register(check: Check) -> Check:
        RULES[name] = Rule(check, Advice(cause, remedy))
        return check

    return register


@_rule(
    AlarmName.INFORMATION_FALLS,
    "updates on prompts with little reward variance, where the entropy and divergence terms dominate, remove the differences between "
    "prompts; or the steps are too large",
    "train only on prompts with signal (filter.strategy top_p, lower filter.keep, filter.include_zero false), lower "
    "algorithm.entropy_coef and learner.learning_rate, raise rollout.group_size",
)
def _information_falls(history: History, rules: AlarmRules) -> Finding | None:
    shift = _information_shift(history, rules)
    if shift is None:
        return None
    success = _success_shift(history, rules)
    if success is None:
        return Finding(Severity.WARNING, (_evidence(INFORMATION, shift),))
    return Finding(Severity.CRITICAL, (_evidence(INFORMATION, shift), _evidence("rollout/success", success)))


@_rule(
    AlarmName.RETRIEVAL_AT_CHANCE,
    "template collapse: the reasoning would fit any prompt equally well",
    "return to a checkpoint from before this step and continue with lower filter.keep, filter.include_zero false and lower algorithm.entropy_coef",
)
def _retrieval_at_chance(history: History, rules: AlarmRules) -> Finding | None:
    evidence = _chance_evidence(history, rules)
    if evidence is None:
        return None
    measured = history["information/retrieval_acc"]
    first = measured.early(rules.recent_steps, rules.recent_measurements)
    if _chance_evidence(history.until(first.steps[-1]), rules):
        return Finding(Severity.WARNING, (evidence,), NEVER_INFORMED)
    return Finding(Severity.CRITICAL, (evidence,))


@_rule(
    AlarmName.ENTROPY_UP_INFORMATION_DOWN,
    "the entropy bonus or sampling noise adds variety faster than reward ties the reasoning to the prompt",
    "lower algorithm.entropy_coef (0 is fine), lower rollout.temperature, lower filter.keep with filter.strategy top_p",
)
def _entropy_up_information_down(history: History, rules: AlarmRules) -> Finding | None:
    shift = _information_shift(history, rules)
    if shift is None:
        return None
    # The same measurements between which the information fell.
    entropy = history["information/h_conditional"]
    higher = rise(entropy.at(shift.before.steps), entropy.at(shift.after.steps), rules.entropy_rise, rules.measured_p)
    if higher is None:
        return None
    return Finding(Severity.CRITICAL, (_evidence(INFORMATION, shift), _evidence("information/h_conditional", higher)))


@_rule(
    AlarmName.INPUT_AGNOSTIC_TEXT,
    "the format is rewarded and learned, the content is not: a fixed template earns as much as thinking",
    "rank prompts by what solves the task (filter.score outcome_variance), bring rollout.format_penalty nearer to 0, and check that the "
    "environment cannot be solved without reading the prompt",
)
def _input_agnostic_text(history: History, rules: AlarmRules) -> Finding | None:
    evidence = _chance_evidence(history, rules)
    valid = history["rollout/format_valid"].last(rules.recent_steps)
    if evidence is None or len(valid) < rules.recent_steps or valid.median < rules.valid_share:
        return None
    test = f"median of {len(valid)}, at least {rules.valid_share:g}"
    return Finding(Severity.CRITICAL, (Evidence("rollout/format_valid", valid.median, valid.span, test), evidence))


@_rule(
    AlarmName.IMAGE_IGNORED,
    "the agent has stopped looking, which is template collapse in what it sees: reward can be had without the picture, or updates on prompts with little "
    "reward variance remove what tells pictures apart",
    "return to a checkpoint from before this step, train only on prompts with signal (filter.strategy top_p, lower filter.keep), lower "
    "algorithm.entropy_coef, and check that the text does not tell what the image shows (env.options.observation)",
)
def _image_ignored(history: History, rules: AlarmRules) -> Finding | None:
    """Where the reasoning itself no longer varies, that is another alarm's."""
    measured = history["information/image_swapped"]
    recent = measured.recent(rules.recent_steps, rules.recent_measurements)
    first = measured.early(rules.start_steps, rules.start_measurements)
    varies, varied = (history["information/h_conditional"].at(window.steps) for window in (recent, first))
    if min(len(recent), len(varies)) < rules.recent_measurements or not varied.values or varies.median < REGIME_FRACTION * varied.median:
        return None
    evidence = _blind_evidence(history, rules)
    if evidence is not None:
        start = measured.early(rules.recent_steps, rules.recent_measurements)
        never = _blind_evidence(history.until(start.steps[-1]), rules) is not None
        return Finding(Severity.WARNING, (evidence,), NEVER_LOOKED) if never else Finding(Severity.CRITICAL, (evidence,))
    pooled = _pooled_images(history, rules)
    if pooled is None or len(measured.without_last(len(recent))) < len(first) or pooled.high > REGIME_FRACTION * first.median:
        return None
    # Against the start: the best stretch of a noisy number is an accident, and one that has vanished is found above.
    shift = fall(first, recent, rules.image_share, rules.measured_p)
    return Finding(Severity.WARNING, (_evidence("information/image_swapped", shift),)) if shift else None


@_rule(
    AlarmName.REWARD_VARIANCE_COLLAPSE,
    "the members of a group all fail, or all earn the same: the tasks are too hard for the policy, or it always gives the same answer",
    "play easier or more varied tasks (env.options), raise rollout.group_size or rollout.temperature, set filter.include_zero false with "
    "filter.refill",
)
def _reward_variance_collapse(history: History, rules: AlarmRules) -> Finding | None:
    variance = history["groups/rv_mean"]
    recent = variance.last(rules.recent_steps)
    success = history["rollout/success"].last(rules.recent_steps)
    if len(recent) < rules.recent_steps or (success.values and success.median >= rules.solved):
        return None
    if max(recent.values) <= ZERO:
        return Finding(Severity.CRITICAL, (Evidence("groups/rv_mean", 0.0, recent.span, f"zero in {len(recent)} steps in a row"),))
    shift = _from_the_start(history, "groups/rv_mean", rules, rules.variance_share)
    return Finding(Severity.CRITICAL, (_evidence("groups/rv_mean", shift),)) if shift else None


@_rule(
    AlarmName.REPEATED_TEXT,
    "the policy has broken down: the updates are too large, or the logits are not finite and sample token 0 ('!' in the vocabularies of "
    "GPT-2 and Qwen)",
    "look at update/nonfinite, update/mismatch and update/ratio_max, return to an earlier checkpoint, lower learner.learning_rate, set "
    "model.dtype float32 or algorithm.kl_coef above 0",
)
def _repeated_text(history: History, rules: AlarmRules) -> Finding | None:
    shares, written = history["rollout/repeated_text"], history["rollout/reasonings"]
    totals = dict(zip(written.steps, written.values, strict=True))
    counts = [(step, totals[step], share) for step, share in zip(shares.steps, shares.values, strict=True) if totals.get(step)]
    counts = counts[-rules.text_steps :]
    if len(counts) < rules.text_steps:
        return None
    total, degenerate = round(sum(count for _, count, _ in counts)), round(sum(count * share for _, count, share in counts))
    low, high = wilson_interval(degenerate, total)
    showing = sum(share > rules.repeated_texts for _, _, share in counts)
    if low <= rules.repeated_texts or 2 * showing <= len(counts):
        return None
    test = f"95% interval {low:.2g} to {high:.2g} of {total}, the bound is {rules.repeated_texts:g}"
    evidence = Evidence("share of reasonings that repeat themselves", degenerate / total, (counts[0][0], counts[-1][0]), test)
    return Finding(Severity.CRITICAL, (evidence,))


@_rule(
    AlarmName.LENGTH_COLLAPSE,
    "short responses earn as much as long ones, or length is punished, so reasoning is dropped",
    "lower rollout.overlong_penalty or rollout.overlong_share, use algorithm.aggregation token_mean, set algorithm.kl_coef above 0",
)
def _length_collapse(history: History, rules: AlarmRules) -> Finding | None:
    shifts = {
        metric: shift
        for metric in ("rollout/reasoning_tokens", "rollout/response_tokens")
        if (shift := _from_the_start(history, metric, rules, rules.length_share))
    }
    if not shifts:
        return None
    evidence = tuple(_evidence(metric, shift) for metric, shift in shifts.items())
    success = _success_shift(history, rules)
    if success is None:
        return Finding(Severity.WARNING, evidence)
    return Finding(Severity.CRITICAL, (*evidence, _evidence("rollout/success", success)))


@_rule(
    AlarmName.LENGTH_EXPLOSION,
    "length costs nothing, or a loss averaged per response makes long failures cheap; a response that is cut off is malformed",
    "set rollout.overlong_share above 0, use algorithm.aggregation token_mean or algorithm.name dr_grpo; raise rollout.max_tokens if the "
    "task needs the room",
)
def _length_explosion(history: History, rules: AlarmRules) -> Finding | None:
    lengths = history["rollout/response_tokens"]
    recent = lengths.last(rules.recent_steps)
    before = lengths.without_last(rules.recent_steps).first(rules.start_steps)
    budget = rules.max_tokens or max(history["rollout/response_tokens_max"].values, default=math.inf)
    if len(before) < rules.start_steps or recent.median < rules.budget_share * budget:
        return None
    shift = rise(before, recent, rules.length_rise, rules.step_p)
    if shift is None:
        return None
    limit = Evidence("rollout/response_tokens_max" if rules.max_tokens is None else "rollout.max_tokens", budget, recent.span, "the budget")
    return Finding(Severity.CRITICAL, (_evidence("rollout/response_tokens", shift), limit))


@_rule(
    AlarmName.SAMPLER_MISMATCH,
    "the server computes with other weights, another precision or other log-probs than the learner, or it takes updates too late",
    "look at update/probe_difference and update/importance_weight, serve in the learner's precision (model.dtype), start vLLM with "
    "--logprobs-mode processed_logprobs, set rollout.top_p 1 and rollout.top_k 0, or train with rollout.engine native",
)
def _sampler_mismatch(history: History, rules: AlarmRules) -> Finding | None:
    """Importance weights correct a small difference between sampler and learner. A large one is a defect, not noise."""
    found = []
    for metric, bound in (("rollout/mismatch_before", rules.mismatch), ("rollout/staleness", rules.staleness)):
        recent = history[metric].last(rules.sampler_steps)
        if len(recent) == rules.sampler_steps and recent.median > bound:
            found.append(Evidence(metric, recent.median, recent.span, f"median of {len(recent)}, the bound is {bound:g}"))
    if not found:
        return None
    return Finding(Severity.CRITICAL if found[0].metric == "rollout/mismatch_before" else Severity.WARNING, tuple(found))


@_rule(
    AlarmName.NO_TOOL_CALLS,
    "the model does not write tool calls, or writes them in another format than its chat template's, so that they are read as text",
    "read some replies in the dashboard, set agent.tool_format where they hold calls, say in the prompt when to call a tool, start from a model that was "
    "taught tools (model.name), raise rollout.max_tokens if replies are cut",
)
def _no_tool_calls(history: History, rules: AlarmRules) -> Finding | None:
    calls = _now(history, "tool_calls")
    if not _now(history, "with_tools") or calls is None or calls > 0:
        return None
    unparsed = _now(history, "unparsed_calls") or 0.0
    return _finding(history, "tool_calls", 0.0, f"none in the step; {unparsed:.3g} an episode that cannot be read")


@_rule(
    AlarmName.TOOL_USE_FALLS,
    "answers without tools earn as much as those with them, or calls that fail cost more than none, so the policy unlearns them",
    "let the reward tell an answer that was looked up from a guess, bring rollout.format_penalty nearer to 0, set algorithm.kl_coef above 0, return to an "
    "earlier checkpoint",
)
def _tool_use_falls(history: History, rules: AlarmRules) -> Finding | None:
    shift = _from_the_start(history, _agent("tool_calls"), rules, rules.tool_share)
    if shift is None:
        return None
    success = _success_shift(history, rules)
    if success is None:
        return Finding(Severity.WARNING, (_evidence(_agent("tool_calls"), shift),))
    return Finding(Severity.CRITICAL, (_evidence(_agent("tool_calls"), shift), _evidence("rollout/success", success)))


@_rule(
    AlarmName.BROKEN_HISTORY,
    "the agent or its framework rewrites the history (a time in the system prompt, summaries, calls as text), so every request is computed anew and trained as "
    "a context of its own; for sub-agents that share a reply this is as it should be",
    "look at contexts_edited and its neighbours among the numbers of the agent, send earlier messages back as they came; set agent.history template where each request "
    "is meant to be read as a server would",
)
def _broken_history(history: History, rules: AlarmRules) -> Finding | None:
    share = _now(history, "rollout/continued")
    if share is None or share >= rules.continued_share:
        return None
    return _finding(history, "rollout/continued", share, f"of the step's follow-up requests, the bound is {rules.continued_share:g}")


@_rule(
    AlarmName.SINGLE_CALLS,
    "the agent does not send the results of its tools back, its loop ends after one reply, or its other requests go to another address",
    "check that the loop runs until a reply has no tool call, and that every client takes the address of its episode (agent.env for a "
    "command); for a task of one step this is as it should be",
)
def _single_calls(history: History, rules: AlarmRules) -> Finding | None:
    if (
        not _now(history, "with_tools") or _now(history, "calls") != 1.0
    ):  # an episode without any call is no evidence, so a mean of 1 is all of them
        return None
    return _finding(history, "calls", 1.0, "in every episode of the step")


def _agent(name: str) -> str:
    """The metric of a number that every episode of an agent has."""
    return name if "/" in name else f"rollout/env/{AGENT}/{name}"


def _now(history: History, name: str) -> float | None:
    """Its value at the last step."""
    last = history[_agent(name)].last(1)
    return last.values[0] if last.steps and last.steps[0] == history.steps[-1] else None


def _finding(history: History, name: str, value: float, test: str) -> Finding:
    """A warning about the last step alone."""
    step = history.steps[-1]
    return Finding(Severity.WARNING, (Evidence(_agent(name), value, (step, step), test),))


def _evidence(metric: str, shift: Shift) -> Evidence:
    """The two medians of a shift."""
    before, after = shift.before, shift.after
    test = f"medians of {len(after)} and {len(before)}, rank-sum p = {shift.p_value:.2g}"
    return Evidence(metric, after.median, after.span, test, before.median, before.span)


def _information_shift(history: History, rules: AlarmRules) -> Shift | None:
    """Information of the recent measurements against its best stretch before them."""
    measured = history[INFORMATION]
    recent = measured.recent(rules.recent_steps, rules.recent_measurements)
    earlier = measured.without_last(len(recent))
    start = earlier.early(rules.start_steps, rules.start_measurements)
    if len(start) < rules.start_measurements:
        return None
    return fall(earlier.best(len(start)), recent, rules.information_share, rules.measured_p)


def _pooled_images(history: History, rules: AlarmRules) -> ImageEvidence | None:
    """What the reasoning loses with the images of another episode over the recent measurements, or None where they are too few.

    Errors of measurements on prompts of their own shrink with their number; those of a fixed probe do not.
    """
    recent = history["information/image_swapped"].recent(rules.recent_steps, rules.recent_measurements)
    names = ("image_swapped_low", "image_swapped_high", "image_prompts", "h_conditional", "h_conditional_seq")
    series = {name: history[f"information/{name}"].at(recent.steps) for name in names}
    if min(len(recent), *map(len, series.values())) < rules.recent_measurements:
        return None
    is_fixed = bool(history["information/probe_tokens_sampled"].at(recent.steps).steps)
    shrunk = math.sqrt(1 if is_fixed else len(recent))
    low, high = (recent.mean + (series[name].mean - recent.mean) / shrunk for name in ("image_swapped_low", "image_swapped_high"))
    tokens = mean_tokens({name: series[name].mean for name in ("h_conditional", "h_conditional_seq")})
    return ImageEvidence(recent.mean, low, high, tokens, round(min(series["image_prompts"].values)))


def _blind_evidence(history: History, rules: AlarmRules) -> Evidence | None:
    """That the image is ignored, as for a verdict: an interval that reaches far is no evidence."""
    found = _pooled_images(history, rules)
    if found is None or found.num_prompts < FEWEST_PROMPTS or not found.is_ignored:
        return None
    recent = history["information/image_swapped"].recent(rules.recent_steps, rules.recent_measurements)
    test = f"mean of {len(recent)} measurements, 95% interval {found.low:.3g} to {found.high:.3g} over {found.num_prompts} prompts each holds 0"
    return Evidence("information/image_swapped", recent.mean, recent.span, test)


def _success_shift(history: History, rules: AlarmRules) -> Shift | None:
    played = history["rollout/success"]
    earlier, recent = played.without_last(rules.recent_steps), played.last(rules.recent_steps)
    if len(earlier) < rules.start_steps:
        return None
    return fall(earlier.best(rules.start_steps), recent, rules.success_share, rules.step_p)


def _from_the_start(history: History, metric: str, rules: AlarmRules, share: float) -> Shift | None:
    """A number of every step against the run's start."""
    series = history[metric]
    earlier, recent = series.without_last(rules.recent_steps), series.last(rules.recent_steps)
    if len(earlier) < rules.start_steps:
        return None
    return fall(earlier.first(rules.start_steps), recent, share, rules.step_p)


def _chance_evidence(history: History, rules: AlarmRules) -> Evidence | None:
    """Retrieval over the recent measurements is not above chance, or None.

    Reasonings of one prompt are right or wrong together, so the unit of the interval is the prompt, not the reasoning. Measurements on prompts
    of their own add up. A fixed probe has the same prompts every time: however often they are measured, the evidence is that of its prompts.
    With few prompts the interval is wide; the bound on the excess then keeps half-right reasoning from counting as chance, and an interval
    that reaches `REACH`, as for a verdict, is no evidence. Measurements on fewer prompts than a verdict needs do not count (tether.core.reasoning).
    """
    accuracy = history["information/retrieval_acc"].recent(rules.recent_steps, rules.recent_measurements)
    chances = history["information/chance"].at(accuracy.steps)
    prompts = history["information/num_prompts"].at(accuracy.steps)
    if min(len(accuracy), len(chances), len(prompts)) < rules.recent_measurements or min(prompts.values) < FEWEST_PROMPTS:
        return None
    is_fixed = bool(history["information/probe_tokens_sampled"].at(accuracy.steps).steps)
    count, chance = round(min(prompts.values) if is_fixed else sum(prompts.values)), chances.mean
    low, high = wilson_interval(accuracy.mean * count, count)
    recorded = history["information/retrieval_acc_high"].at(accuracy.steps)
    if is_fixed and len(recorded) == len(accuracy):
        # The interval over prompts that a measurement recorded is tighter where all prompts are found equally seldom. Where none is found it
        # is a point, and Wilson's bound is used.
        none_found = wilson_interval(0, count)[1]
        high = min(high, fmean(end if value > 0 else none_found for end, value in zip(recorded.values, accuracy.values, strict=True)))
    if low > chance or accuracy.mean > chance + rules.chance_excess * (1 - chance) or high >= chance + REACH * (1 - chance):
        return None
    test = f"mean of {len(accuracy)} measurements, 95% interval {low:.3g} to {high:.3g} over {count} prompts holds chance, {chance:.3g}"
    return Evidence("information/retrieval_acc", accuracy.mean, accuracy.span, test)
