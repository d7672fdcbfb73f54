"""`TetherGRPOConfig`: TRL's `GRPOConfig` with the filter's options, and which versions of TRL the plug-in works with.

The options have the names of TRL's pull request 7242 by the paper's author. A script that parses its arguments with TRL's parser gets them as
flags: `--reward_variance_filtering top_p --reward_variance_top_p 0.9`.

TRL has no public hook for a group filter, so the plug-in overrides four methods of `GRPOTrainer` that are not part of its public interface. A
version outside the tested range is used with a line that says so, as long as these methods are there; otherwise it is refused.
"""

import inspect
import re
from dataclasses import dataclass, field, fields
from typing import Any

import trl
from trl import GRPOConfig

from tether.algorithms.filters.group_filter import GroupFilter
from tether.core.config import validate
from tether.core.errors import BadInput, MissingDependency

TESTED = ((1, 16), (1, 17))
"""From the first, below the second."""

OVERRIDDEN = {
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_generate_and_score_completions": ("inputs",),
    "_prepare_inputs": ("generation_batch",),
    "_compute_loss": ("model", "inputs"),
}
"""Methods of GRPOTrainer to the parameters they must have."""

INDEPENDENT = "tether.select_groups, tether.Monitor and tether.TetherLogger do not depend on TRL and work with any version"


def check_version(version: str | None = None, trainer: Any = None) -> str | None:
    """None for a tested version; a line for an untested one that has what is needed; an error for one that has not.

    `version` and `trainer` are TRL's own unless given.
    """
    if version is None or trainer is None:
        version, trainer = trl.__version__, trl.GRPOTrainer
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    low, high = (".".join(map(str, bound)) for bound in TESTED)
    tested = f"the tested range {low} to below {high}"
    missing = [name for name, needed in OVERRIDDEN.items() if not set(needed) <= _parameters(trainer, name)]
    if missing:
        raise MissingDependency(
            f"TRL {version} is outside {tested}, and its GRPOTrainer has no {', '.join(missing)} that the plug-in could extend; "
            f"install TRL {low}. {INDEPENDENT}"
        )
    if TESTED[0] <= numbers < TESTED[1]:
        return None
    return (
        f"TRL {version} is outside {tested}. The methods that the filter and the probe extend are there, so both run; check "
        f"groups/kept_ratio and the loss of the first steps. {INDEPENDENT}"
    )


def _parameters(trainer: Any, method: str) -> set[str]:
    found = getattr(trainer, method, None)
    return set() if found is None else set(inspect.signature(found).parameters)


NATIVE = "reward_variance_filtering" in {each.name for each in fields(GRPOConfig)}
"""Whether this TRL has the options itself; it then filters by itself, and the plug-in leaves these options to it."""


@dataclass
class TetherGRPOConfig(GRPOConfig):
    """Options of the filter beside those of GRPO."""

    reward_variance_filtering: str | None = field(
        default=None, metadata={"help": "Strategy of the group filter: top_p, top_k, min_p, band, all or auto; None is off."}
    )
    reward_variance_top_p: float = field(default=0.9, metadata={"help": "Share of the summed score that top_p (and min_p, auto) keeps."})
    reward_variance_top_k: int | None = field(default=None, metadata={"help": "Number of groups that top_k keeps."})
    reward_variance_filtering_include_zero: bool = field(default=False, metadata={"help": "Whether groups of equal rewards may be kept."})
    reward_variance_filtering_selection_eps: float = field(default=0.01, metadata={"help": "Slack of top_p, in units of the summed score."})
    tether_filter_score: str = field(
        default="reward_variance",
        metadata={
            "help": "What groups are ranked by: reward_variance, reward_std, outcome_variance, reward_sum, entropy, entropy_variance, length."
        },
    )
    tether_filter_order: str = field(default="largest", metadata={"help": "largest or smallest."})
    tether_filter_band: list[float] | None = field(default=None, metadata={"help": "Low and high quantile of strategy band."})
    tether_loss_scale: str = field(default="none", metadata={"help": "Factor on the loss of a filtered batch: none, kept_ratio, sqrt."})
    tether_success_reward: str | None = field(
        default=None, metadata={"help": "Name of the reward function whose value of 1 or more means that the task is solved."}
    )


def filter_of(args: Any) -> GroupFilter | None:
    """The filter that a config asks for; None where it asks for none."""
    strategy = None if NATIVE else getattr(args, "reward_variance_filtering", None)
    if strategy is None:
        return None
    num_groups = args.reward_variance_top_k
    if strategy == "top_k" and num_groups is None:
        raise BadInput("reward_variance_filtering is top_k without reward_variance_top_k; give the number of groups to keep")
    band = getattr(args, "tether_filter_band", None)
    asked = {
        "strategy": strategy,
        "keep": args.reward_variance_top_p,
        "num_groups": num_groups if strategy == "top_k" else None,
        "include_zero": args.reward_variance_filtering_include_zero,
        "eps": args.reward_variance_filtering_selection_eps,
        "score": getattr(args, "tether_filter_score", "reward_variance"),
        "order": getattr(args, "tether_filter_order", "largest"),
        "band": None if band is None else (float(band[0]), float(band[-1])),
        "loss_scale": getattr(args, "tether_loss_scale", "none"),
    }
    return validate(GroupFilter, asked, "filter")
