"""What the plug-in reads of a TRL trainer: the rows of one generation batch, gathered from all processes, and the policy's own module.

TRL gathers rewards in the order of its rows, which are `num_generations` of one prompt after the other; a group may lie on two processes. Every
row carries a key of its data row, and rows that are not in this order are refused: their baselines would be wrong in TRL, too.

Under mixed precision accelerate replaces a model's `forward` by one that runs in autocast. Tether's fast path reads the weights, so it computes in
their precision (float32 under mixed precision), and is probed against the module's own `forward`. Within `plain_forward` that is the original
one. Nothing else changes, and the trainer's `forward` is back afterwards.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor

from tether.core.errors import BadInput
from tether.diagnostics.logger import Generations
from tether.diagnostics.rollouts.reasoning import ReasoningRule
from tether.integrations.rows import Ids, Row, rows_as_generations
from tether.models.probing import evaluating

SUCCESS, SPANS = "tether_success", "tether_spans"
"""Columns that Tether's own rollout function adds: whether the task is solved, and the span of the reasoning in each response."""


@dataclass(frozen=True, slots=True)
class GenerationBatch:
    """All rows of a generation batch, over all processes."""

    rows: list[Row]
    rewards: list[float]
    """Weighted sum over the reward functions, before any normalisation; NaN where none of them scored the row."""
    successes: list[bool] | None
    group_size: int

    @property
    def group_ids(self) -> list[int]:
        return [row // self.group_size for row in range(len(self.rows))]

    @property
    def scored(self) -> list[int]:
        """The rows that have a reward."""
        return [row for row, reward in enumerate(self.rewards) if reward == reward]


def row_keys(inputs: Sequence[dict[str, Any]]) -> list[str]:
    """A key of each data row: what identifies its prompt. Taken before generation, which adds columns."""
    named = [repr((row.get("prompt"), row.get("environment"), row.get("seed"))) for row in inputs]
    return [hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in named]


def gather_batch(
    keys: Sequence[str],
    inputs: Sequence[dict[str, Any]],
    output: dict[str, Any],
    rewards_per_func: Tensor,
    weights: Tensor,
    success_column: int | None,
    group_size: int,
) -> GenerationBatch:
    """The rows of every process, in the order of the gathered rewards."""
    tool_mask = output.get("tool_mask")
    local = []
    for row, key in enumerate(keys):
        prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()]
        length = int(output["completion_mask"][row].sum())  # `mask_truncated_completions` zeroes the mask of a whole row
        sampled = [True] * length if tool_mask is None else tool_mask[row][:length].bool().tolist()
        spans = inputs[row].get(SPANS)
        local.append(
            Row(
                key=key,
                prompt_ids=tuple(prompt.tolist()),
                completion_ids=tuple(output["completion_ids"][row][:length].tolist()),
                sampled=tuple(sampled),
                success=inputs[row].get(SUCCESS),
                spans=None if spans is None else tuple(None if span is None else tuple(span) for span in spans),
            )
        )
    rows: list[Row] = gather_object(local)
    if len(rows) != len(rewards_per_func):
        raise BadInput(f"TRL gathered {len(rewards_per_func)} rewards for {len(rows)} completions; every completion needs its rewards")
    check_order([row.key for row in rows], group_size)
    unscored = rewards_per_func.isnan().all(dim=1)
    totals = (rewards_per_func * weights.to(rewards_per_func.device).unsqueeze(0)).nansum(dim=1)
    totals[unscored] = float("nan")
    if bool(unscored.all()):
        raise BadInput(
            f"none of {len(rows)} completions has a reward: every reward function returned None; at least one must return a number"
        )
    successes: list[bool] | None = None
    if success_column is not None:
        successes = (rewards_per_func[:, success_column] >= 1).tolist()
    elif all(row.success is not None for row in rows):
        successes = [bool(row.success) for row in rows]
    return GenerationBatch(rows, totals.double().tolist(), successes, group_size)


def check_order(keys: Sequence[str], group_size: int) -> None:
    """Refuse rows that are not `group_size` of one prompt after the other."""
    if group_size < 2:
        raise BadInput(f"num_generations is {group_size}: a group of one has no reward variance; give 2 or more")
    if len(keys) % group_size:
        raise BadInput(f"{len(keys)} completions are no whole number of groups of {group_size}; every prompt needs num_generations of them")
    for start in range(0, len(keys), group_size):
        members = keys[start : start + group_size]
        if len(set(members)) > 1:
            other = next(place for place, key in enumerate(members) if key != members[0])
            raise BadInput(
                f"rows are out of order: completions {start} and {start + other} belong to one group of {group_size} and have different prompts; "
                "TRL's baselines and the filter need the completions of a prompt next to each other (use TRL's own sampler)"
            )


def as_generations(batch: GenerationBatch, decode: Callable[[Ids], str], rule: ReasoningRule) -> Generations:
    """The rows as groups."""
    return rows_as_generations(batch.rows, batch.group_ids, batch.rewards, batch.successes, decode, rule)


def policy_module(trainer: Any) -> Any:
    """The module that is trained, without the wrappers of data parallelism."""
    return trainer.accelerator.unwrap_model(trainer.model)


@contextmanager
def plain_forward(module: Any) -> Iterator[None]:
    """The module without autocast and without dropout."""
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    held = [
        (each, each.__dict__["forward"]) for each in {id(m): m for m in (module, base)}.values() if "_original_forward" in each.__dict__
    ]
    for each, _ in held:
        each.forward = each._original_forward
    try:
        with evaluating(module):
            yield
    finally:
        for each, forward in held:
            each.forward = forward
