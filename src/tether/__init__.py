"""Tether trains multi-turn LLM agents with reinforcement learning and keeps their reasoning tied to its input.

The names below are the public surface. They are imported on first use: `import tether` loads neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tether.core.version import __version__

_PUBLIC = {
    "Audit": "tether.diagnostics.audit.result",
    "BadInput": "tether.core.errors",
    "Callback": "tether.training.callbacks",
    "Completion": "tether.core.types",
    "Env": "tether.core.protocols",
    "Evaluation": "tether.training.evaluate",
    "Group": "tether.core.types",
    "Health": "tether.diagnostics.monitor",
    "Information": "tether.diagnostics.information",
    "LoadedModel": "tether.models.load",
    "Monitor": "tether.diagnostics.monitor",
    "Observation": "tether.core.types",
    "Policy": "tether.models.policy",
    "ProbeRows": "tether.diagnostics.pairs",
    "Regime": "tether.core.enums",
    "Result": "tether.rollout.gateway.agents",
    "Run": "tether.runs.store",
    "Scorer": "tether.core.protocols",
    "ScriptedEngine": "tether.rollout.engines.scripted",
    "Selection": "tether.algorithms.filters.select",
    "Step": "tether.core.types",
    "StopReason": "tether.core.enums",
    "TetherError": "tether.core.errors",
    "TetherLogger": "tether.diagnostics.logger",
    "Trajectory": "tether.core.types",
    "Trial": "tether.training.sweep",
    "Turn": "tether.core.types",
    "VectorEnv": "tether.envs.remote",
    "as_gymnasium": "tether.envs.gym_wrapper",
    "audit": "tether.diagnostics.audit.api",
    "check_env": "tether.envs.checker",
    "compare": "tether.runs.evaluations",
    "cross_score": "tether.diagnostics.cross_score",
    "evaluate": "tether.training.api",
    "gateway": "tether.training.gateway",
    "load_model": "tether.models.load",
    "make_env": "tether.envs.registry",
    "measure_information": "tether.diagnostics.information",
    "play": "tether.training.api",
    "register_env": "tether.envs.registry",
    "select_groups": "tether.algorithms.filters.select",
    "sft": "tether.training.sft.api",
    "sweep": "tether.training.side_by_side",
    "train": "tether.training.api",
}

__all__ = [
    "__version__",
    "Audit",
    "BadInput",
    "Callback",
    "Completion",
    "Env",
    "Evaluation",
    "Group",
    "Health",
    "Information",
    "LoadedModel",
    "Monitor",
    "Observation",
    "Policy",
    "ProbeRows",
    "Regime",
    "Result",
    "Run",
    "Scorer",
    "ScriptedEngine",
    "Selection",
    "Step",
    "StopReason",
    "TetherError",
    "TetherLogger",
    "Trajectory",
    "Trial",
    "Turn",
    "VectorEnv",
    "as_gymnasium",
    "audit",
    "check_env",
    "compare",
    "cross_score",
    "evaluate",
    "gateway",
    "load_model",
    "make_env",
    "measure_information",
    "play",
    "register_env",
    "select_groups",
    "sft",
    "sweep",
    "train",
]

if TYPE_CHECKING:
    from tether.algorithms.filters.select import Selection, select_groups
    from tether.core.enums import Regime, StopReason
    from tether.core.errors import BadInput, TetherError
    from tether.core.protocols import Env, Scorer
    from tether.core.types import Completion, Group, Observation, Step, Trajectory, Turn
    from tether.diagnostics.audit.api import audit
    from tether.diagnostics.audit.result import Audit
    from tether.diagnostics.cross_score import cross_score
    from tether.diagnostics.information import Information, measure_information
    from tether.diagnostics.logger import TetherLogger
    from tether.diagnostics.monitor import Health, Monitor
    from tether.diagnostics.pairs import ProbeRows
    from tether.envs.checker import check_env
    from tether.envs.gym_wrapper import as_gymnasium
    from tether.envs.registry import make_env, register_env
    from tether.envs.remote import VectorEnv
    from tether.models.load import LoadedModel, load_model
    from tether.models.policy import Policy
    from tether.rollout.engines.scripted import ScriptedEngine
    from tether.rollout.gateway.agents import Result
    from tether.runs.evaluations import compare
    from tether.runs.store import Run
    from tether.training.api import evaluate, play, train
    from tether.training.callbacks import Callback
    from tether.training.evaluate import Evaluation
    from tether.training.gateway import gateway
    from tether.training.sft.api import sft
    from tether.training.side_by_side import sweep
    from tether.training.sweep import Trial


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tether' has no attribute '{name}'")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
