"""The likely cause of each alarm and the settings to change, in plain words."""

from dataclasses import dataclass

from tether.core.alarms import AlarmName


@dataclass(frozen=True, slots=True)
class Advice:
    """The likely cause, and what to change; one line each."""

    cause: str
    remedy: str


ADVICE: dict[AlarmName, Advice] = {
    AlarmName.INFORMATION_FALLS: Advice(
        "updates on prompts with little reward variance, where the entropy and divergence terms dominate, remove the differences between "
        "prompts; or the steps are too large",
        "train only on prompts with signal (filter.strategy top_p, lower filter.keep, filter.include_zero false), lower "
        "algorithm.entropy_coef and learner.learning_rate, raise rollout.group_size",
    ),
    AlarmName.RETRIEVAL_AT_CHANCE: Advice(
        "template collapse: the reasoning would fit any prompt equally well",
        "return to a checkpoint from before this step and continue with lower filter.keep, filter.include_zero false and lower algorithm.entropy_coef",
    ),
    AlarmName.ENTROPY_UP_INFORMATION_DOWN: Advice(
        "the entropy bonus or sampling noise adds variety faster than reward ties the reasoning to the prompt",
        "lower algorithm.entropy_coef (0 is fine), lower rollout.temperature, lower filter.keep with filter.strategy top_p",
    ),
    AlarmName.INPUT_AGNOSTIC_TEXT: Advice(
        "the format is rewarded and learned, the content is not: a fixed template earns as much as thinking",
        "rank prompts by what solves the task (filter.score outcome_variance), bring rollout.format_penalty nearer to 0, and check that the "
        "environment cannot be solved without reading the prompt",
    ),
    AlarmName.REWARD_VARIANCE_COLLAPSE: Advice(
        "the members of a group all fail, or all earn the same: the tasks are too hard for the policy, or it always gives the same answer",
        "play easier or more varied tasks (env.options), raise rollout.group_size or rollout.temperature, set filter.include_zero false with "
        "filter.refill",
    ),
    AlarmName.REPEATED_TEXT: Advice(
        "the policy has broken down: the updates are too large, or the logits are not finite and sample token 0 ('!' in the vocabularies of "
        "GPT-2 and Qwen)",
        "look at update/nonfinite, update/mismatch and update/ratio_max, return to an earlier checkpoint, lower learner.learning_rate, set "
        "model.dtype float32 or algorithm.kl_coef above 0",
    ),
    AlarmName.LENGTH_COLLAPSE: Advice(
        "short responses earn as much as long ones, or length is punished, so reasoning is dropped",
        "lower rollout.overlong_penalty or rollout.overlong_share, use algorithm.aggregation token_mean, set algorithm.kl_coef above 0",
    ),
    AlarmName.LENGTH_EXPLOSION: Advice(
        "length costs nothing, or a loss averaged per response makes long failures cheap; a response that is cut off is malformed",
        "set rollout.overlong_share above 0, use algorithm.aggregation token_mean or algorithm.name dr_grpo; raise rollout.max_tokens if the "
        "task needs the room",
    ),
}

NEVER_INFORMED = Advice(
    "reasoning has not depended on its prompt since the run began: the prompts are nearly alike, or the model does not read them",
    "compare prompts in the report, vary the tasks more (env.options, rollout.num_groups), or start from a stronger model.name",
)
"""Replaces ADVICE where retrieval was at chance from the first measurements on: nothing collapsed."""
