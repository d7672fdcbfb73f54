"""Which packages' environments can be used, and under which names: `reasoning_gym:NAME`, `textarena:ID`, and so on.

A module of this folder adapts one package. Its function `env_class` gives the class of what stands behind the colon, or one line about what is
wrong with it. The packages are optional: nothing of them is imported before such a name is used.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tether.core.errors import MissingDependency


@dataclass(frozen=True, slots=True)
class Adapter:
    """One package."""

    form: str
    """How a name is written."""
    task: str
    distribution: str
    """What pip installs."""
    extra: str
    """The extra of Tether that brings it; empty: Tether always does."""
    module: str
    package: str
    """What is imported."""

    @property
    def version(self) -> str | None:
        """The installed version; None where it is not installed."""
        if importlib.util.find_spec(self.package) is None:
            return None
        try:
            return version(self.distribution)
        except PackageNotFoundError:  # on the path, but not installed by pip
            return "?"

    @property
    def install(self) -> str:
        return f'pip install "tether-agents[{self.extra}]"'


_HERE = __package__
ADAPTERS = {
    "gymnasium": Adapter("gymnasium:ID", "discrete actions, in words", "gymnasium", "", "tether.envs.gym_env", "gymnasium"),
    "mcp": Adapter("mcp:COMMAND", "answer rows of yours with the tools of an MCP server", "mcp", "mcp", f"{_HERE}.mcp", "mcp"),
    "openenv": Adapter("openenv:URL", "an OpenEnv server", "openenv-core", "openenv", f"{_HERE}.openenv", "openenv"),
    "reasoning_gym": Adapter(
        "reasoning_gym:NAME", "generated puzzles, about a hundred kinds", "reasoning-gym", "reasoning-gym", f"{_HERE}.reasoning_gym", "reasoning_gym"
    ),
    "textarena": Adapter("textarena:ID", "games for one player, or against an opponent", "textarena", "textarena", f"{_HERE}.textarena", "textarena"),
    "verifiers": Adapter("verifiers:TASKSET", "single-turn tasksets", "verifiers", "verifiers", f"{_HERE}.verifiers", "verifiers"),
}  # fmt: skip


def adapter_of(name: str) -> Adapter | None:
    """The adapter of a name; None where it is not a name of another package's environment."""
    prefix, colon, _ = name.partition(":")
    return ADAPTERS.get(prefix) if colon else None


def adapted_class(name: str) -> Any:
    """The class of a name; a package that is missing, or a name that it does not know, is one line."""
    prefix, _, target = name.partition(":")
    adapter = ADAPTERS[prefix]
    if importlib.util.find_spec(adapter.package) is None:
        raise MissingDependency(f"environment '{name}' needs {adapter.distribution}, which is not installed; run: {adapter.install}")
    env_class: Callable[[str], Any] = importlib.import_module(adapter.module).env_class
    return env_class(target)
