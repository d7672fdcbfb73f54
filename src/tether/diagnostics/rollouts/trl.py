"""TRL's completions_NNNNN.parquet, which GRPOTrainer writes with log_completions=True (trl 1.16.0, trainer/grpo_trainer.py, `log`).

Columns, in this order: step, prompt, completion, one per reward function, whatever the user logged with log_extra, advantage. Prompt and
completion are text or chat messages as the data set has them (rendered text before 1.16). A reward that does not apply is NaN. The file
holds neither group ids, so prompts are compared, nor the weights of the reward functions: the reward is their plain sum. A column counts
as a reward where it holds a float, as TRL writes rewards; name the column with a field map where log_extra added other floats. The
distillation trainer writes the first three columns only.
"""

import math
from collections.abc import Iterator

from tether.diagnostics.rollouts import values
from tether.diagnostics.rollouts.conversation import conversation_turns
from tether.diagnostics.rollouts.record import Rollout

_NOT_REWARDS = {"step", "prompt", "completion", "advantage"}


def recognises(record: values.Record) -> bool:
    return {"step", "prompt", "completion"} <= record.keys()


def rollouts(record: values.Record, where: str) -> Iterator[Rollout]:
    """The turns of one row."""
    return conversation_turns(
        record["prompt"],
        record["completion"],
        where,
        names=("prompt", "completion"),
        step=values.step(record["step"]),
        reward=total_reward(record),
    )


def total_reward(record: values.Record) -> float | None:
    """The sum of the reward functions that applied; None if none did."""
    rewards = [value for name, value in record.items() if name not in _NOT_REWARDS and isinstance(value, float) and math.isfinite(value)]
    return math.fsum(rewards) if rewards else None
