"""The learning rate of every step. It follows from the step alone, so nothing about it has to be remembered when a run goes on."""

import math
from collections.abc import Callable

# From the share of the decay that has passed (0 at its start, 1 in the last step) to the share of the way down to the final rate.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda passed: 0.0,
    "linear": lambda passed: passed,
    "cosine": lambda passed: (1 - math.cos(math.pi * passed)) / 2,
}


def learning_rate(base: float, step: int, steps: int, schedule: str, warmup_steps: int, min_lr_ratio: float) -> float:
    """The rate of a step, of which there are `steps`, counted from 1.

    It rises in equal parts from base / warmup_steps in step 1 to base in step warmup_steps (in step 1 without warm-up), then falls as the
    schedule says, to min_lr_ratio * base in the last step.
    """
    if step < warmup_steps:
        return base * step / warmup_steps
    peak = max(warmup_steps, 1)
    passed = min(1.0, (step - peak) / (steps - peak)) if step > peak else 0.0
    return base * (1 - (1 - min_lr_ratio) * SCHEDULES[schedule](passed))
