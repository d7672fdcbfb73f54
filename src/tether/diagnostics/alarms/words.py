"""What an alarm says: its name, how grave it is, the numbers behind it, the likely cause and what to change, in plain words."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tether.diagnostics.alarms.trend import Shift


class AlarmName(StrEnum):
    """Every alarm, in the order in which those of one step are listed."""

    INFORMATION_FALLS = "information_falls"
    """Reasoning tells less about its prompt than it did; usually before success falls."""
    RETRIEVAL_AT_CHANCE = "retrieval_at_chance"
    """The prompt cannot be told from the reasoning."""
    ENTROPY_UP_INFORMATION_DOWN = "entropy_up_information_down"
    """Reasoning grows more varied within a prompt and less different between prompts."""
    INPUT_AGNOSTIC_TEXT = "input_agnostic_text"
    """Responses are well formed and do not depend on the prompt."""
    REWARD_VARIANCE_COLLAPSE = "reward_variance_collapse"
    """Members of a group earn the same, and not because they all succeed."""
    REPEATED_TEXT = "repeated_text"
    """Reasoning is one character, word or phrase over and over."""
    LENGTH_COLLAPSE = "length_collapse"
    """Responses or their reasoning shrink to a small part of what they were."""
    LENGTH_EXPLOSION = "length_explosion"
    """Responses grow until the token budget cuts them off."""


class Severity(StrEnum):
    """How grave an alarm is."""

    WARNING = "warning"
    """Something is being lost; the run may still succeed."""
    CRITICAL = "critical"
    """It is lost; going on as before is likely a waste."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number that moved or stands where it should not.

    Example: str(Evidence("groups/rv_mean", 0.01, (41, 48), "rank-sum p = 0.00002", 0.2, (1, 10)))
    is "groups/rv_mean 0.01 in steps 41-48, 0.2 in steps 1-10 (rank-sum p = 0.00002)".
    """

    metric: str
    value: float
    steps: tuple[int, int]
    """First and last step of the window."""
    test: str
    """What was tested, and the outcome."""
    reference: float | None = None
    """The earlier value it is compared with; None where the comparison is not with the past."""
    reference_steps: tuple[int, int] | None = None

    def __str__(self) -> str:
        words = f"{self.metric} {self.value:.3g} in steps {self.steps[0]}-{self.steps[1]}"
        if self.reference is not None and self.reference_steps is not None:
            words += f", {self.reference:.3g} in steps {self.reference_steps[0]}-{self.reference_steps[1]}"
        return f"{words} ({self.test})"


def evidence_of(metric: str, shift: Shift) -> Evidence:
    """The two medians of a shift."""
    before, after = shift.before, shift.after
    test = f"medians of {len(after)} and {len(before)}, rank-sum p = {shift.p_value:.2g}"
    return Evidence(metric, after.median, after.span, test, before.median, before.span)


@dataclass(frozen=True, slots=True)
class Advice:
    """Why it may have happened, and what to change; one line each."""

    cause: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that is wrong at the last step on record."""

    name: AlarmName
    severity: Severity
    began: int
    """The step from which on it has been true without a break."""
    evidence: tuple[Evidence, ...]
    """The numbers as of the last step."""
    cause: str
    remedy: str

    def sentence(self) -> str:
        """All of it in one line, for a record's notes or the terminal."""
        numbers = "; ".join(str(item) for item in self.evidence)
        return f"{self.severity}: {self.name} since step {self.began}: {numbers}. Likely cause: {self.cause}. To change: {self.remedy}."

    def to_json(self) -> dict[str, Any]:
        """For a step's record."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Alarm":
        """An alarm from a step's record."""
        evidence = tuple(
            Evidence(**{**item, **{key: tuple(item[key]) if item[key] else None for key in ("steps", "reference_steps")}})
            for item in data["evidence"]
        )
        return cls(AlarmName(data["name"]), Severity(data["severity"]), int(data["began"]), evidence, data["cause"], data["remedy"])


ADVICE: dict[AlarmName, Advice] = {
    AlarmName.INFORMATION_FALLS: Advice(
        "updates on prompts with little reward variance, where the entropy and divergence terms steer, wear down what differs between "
        "prompts; or the steps are too large",
        "train on prompts with signal only (filter.strategy top_p, lower filter.keep, filter.include_zero false), lower "
        "algorithm.entropy_coef and learner.learning_rate, raise rollout.group_size",
    ),
    AlarmName.RETRIEVAL_AT_CHANCE: Advice(
        "template collapse: the reasoning would fit any prompt equally well",
        "go back to a checkpoint from before this step and go on with lower filter.keep, filter.include_zero false and lower algorithm.entropy_coef",
    ),
    AlarmName.ENTROPY_UP_INFORMATION_DOWN: Advice(
        "the entropy bonus or sampling noise makes reasoning varied faster than reward ties it to the prompt",
        "lower algorithm.entropy_coef (0 is fine), lower rollout.temperature, lower filter.keep with filter.strategy top_p",
    ),
    AlarmName.INPUT_AGNOSTIC_TEXT: Advice(
        "the format is rewarded and learned, the content is not: a fixed template earns as much as thinking",
        "rank prompts by what solves the task (filter.score outcome_variance), bring rollout.format_penalty nearer to 0, and check that the "
        "environment cannot be solved without reading the prompt",
    ),
    AlarmName.REWARD_VARIANCE_COLLAPSE: Advice(
        "the members of a group all fail, or all earn the same: tasks are too hard for the policy, or it answers alike every time",
        "play easier or more varied tasks (env.options), raise rollout.group_size or rollout.temperature, set filter.include_zero false with "
        "filter.refill",
    ),
    AlarmName.REPEATED_TEXT: Advice(
        "the policy has broken down: updates too large, or logits that are not finite, which sample token 0 ('!' in the vocabularies of "
        "GPT-2 and Qwen)",
        "look at update/nonfinite, update/mismatch and update/ratio_max, go back to an earlier checkpoint, lower learner.learning_rate, set "
        "model.dtype float32 or algorithm.kl_coef above 0",
    ),
    AlarmName.LENGTH_COLLAPSE: Advice(
        "short responses earn as much as long ones, or length is punished, so reasoning is dropped",
        "lower rollout.overlong_penalty or rollout.overlong_share, use algorithm.aggregation token_mean, set algorithm.kl_coef above 0",
    ),
    AlarmName.LENGTH_EXPLOSION: Advice(
        "length costs nothing, or a loss averaged per response makes long failures cheap; what is cut off is malformed",
        "set rollout.overlong_share above 0, use algorithm.aggregation token_mean or algorithm.name dr_grpo; raise rollout.max_tokens if the "
        "task needs the room",
    ),
}

NEVER_INFORMED = Advice(
    "reasoning has not depended on its prompt since the run began: the prompts are nearly alike, or the model does not read them",
    "compare prompts in the report, vary the tasks more (env.options, rollout.num_groups), or start from a stronger model.name",
)
"""Instead of ADVICE where retrieval was at chance from the first measurements on: nothing collapsed."""
