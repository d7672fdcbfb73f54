"""What the entry point loads: the agent loop `tether` is made known to verl.

verl's registry of agent loops holds import paths, so the class itself is imported only in the workers that use it. The sampler and the probe
need no registration: the config names the sampler, and the sampler attaches the probe.
"""

import re
from importlib import metadata

from verl.experimental.agent_loop import agent_loop as verl_agent_loop

from tether.core.errors import MissingDependency

NAME = "tether"
"""Of the entry point and of the agent loop."""
TARGET = "tether.integrations.verl.agent_loop.TetherAgentLoop"
TESTED = ((0, 9), (0, 10))
"""From the first, below the second."""
INDEPENDENT = (
    "tether.select_groups, tether.Monitor, tether.TetherLogger and `tether diagnose` on verl's rollout dumps work with any version"
)


def check_version(version: str | None = None) -> str | None:
    """None for a tested version of verl, else a line that names it and says what still works."""
    found = version if version is not None else metadata.version("verl")
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if TESTED[0] <= numbers < TESTED[1]:
        return None
    low, high = (".".join(map(str, bound)) for bound in TESTED)
    return (
        f"verl {found} is outside the tested range {low} to below {high}: the sampler and the agent loop extend classes of its V1 trainer, "
        f"which may have changed. {INDEPENDENT}"
    )


def register() -> None:
    """Make the agent loop known."""
    registry = getattr(verl_agent_loop, "_agent_loop_registry", None)
    if not isinstance(registry, dict):
        raise MissingDependency(f"verl {metadata.version('verl')} keeps its agent loops elsewhere; install verl 0.9. {INDEPENDENT}")
    registry[NAME] = {"_target_": TARGET}


register()
