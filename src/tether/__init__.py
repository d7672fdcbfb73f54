"""Tether trains multi-turn LLM agents with reinforcement learning and keeps their reasoning tied to its input.

The names below are the public surface. They are imported on first use: `import tether` loads neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tether.core.version import __version__

_PUBLIC = {
    "BadInput": "tether.core.errors",
    "Completion": "tether.core.types",
    "Env": "tether.core.protocols",
    "Group": "tether.core.types",
    "Information": "tether.diagnostics.information",
    "LoadedModel": "tether.models.load",
    "Observation": "tether.core.types",
    "Regime": "tether.core.enums",
    "Scorer": "tether.core.protocols",
    "Selection": "tether.algorithms.filters.select",
    "Step": "tether.core.types",
    "StopReason": "tether.core.enums",
    "TetherError": "tether.core.errors",
    "Trajectory": "tether.core.types",
    "Turn": "tether.core.types",
    "VectorEnv": "tether.envs.remote",
    "as_gymnasium": "tether.envs.gym_wrapper",
    "check_env": "tether.envs.checker",
    "cross_score": "tether.diagnostics.cross_score",
    "load_model": "tether.models.load",
    "make_env": "tether.envs.registry",
    "measure_information": "tether.diagnostics.information",
    "register_env": "tether.envs.registry",
    "select_groups": "tether.algorithms.filters.select",
}

__all__ = [
    "__version__",
    "BadInput",
    "Completion",
    "Env",
    "Group",
    "Information",
    "LoadedModel",
    "Observation",
    "Regime",
    "Scorer",
    "Selection",
    "Step",
    "StopReason",
    "TetherError",
    "Trajectory",
    "Turn",
    "VectorEnv",
    "as_gymnasium",
    "check_env",
    "cross_score",
    "load_model",
    "make_env",
    "measure_information",
    "register_env",
    "select_groups",
]

if TYPE_CHECKING:
    from tether.algorithms.filters.select import Selection, select_groups
    from tether.core.enums import Regime, StopReason
    from tether.core.errors import BadInput, TetherError
    from tether.core.protocols import Env, Scorer
    from tether.core.types import Completion, Group, Observation, Step, Trajectory, Turn
    from tether.diagnostics.cross_score import cross_score
    from tether.diagnostics.information import Information, measure_information
    from tether.envs.checker import check_env
    from tether.envs.gym_wrapper import as_gymnasium
    from tether.envs.registry import make_env, register_env
    from tether.envs.remote import VectorEnv
    from tether.models.load import LoadedModel, load_model


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tether' has no attribute '{name}'")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
