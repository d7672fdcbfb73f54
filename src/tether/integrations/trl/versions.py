"""Which TRL this plug-in was tested with, and what it needs of another one.

TRL has no public hook for a group filter, so the plug-in overrides four methods of `GRPOTrainer` that are not part of its public interface. A
version outside the tested range is used with a line that says so, as long as these methods are there; otherwise it is refused.
"""

import inspect
import re
from typing import Any

from tether.core.errors import MissingDependency

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
        import trl

        version, trainer = trl.__version__, trl.GRPOTrainer
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    low, high = (".".join(map(str, bound)) for bound in TESTED)
    tested = f"the tested range {low} to below {high}"
    missing = [name for name, needed in OVERRIDDEN.items() if not _takes(getattr(trainer, name, None), needed)]
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


def _takes(method: Any, needed: tuple[str, ...]) -> bool:
    return method is not None and set(needed) <= set(inspect.signature(method).parameters)
