"""Tether inside TRL's GRPO trainer: the filter, the probe with its alarms, and Tether's environments.

    from tether.integrations.trl import TetherCallback, TetherGRPOTrainer

    trainer = TetherGRPOTrainer(model, reward_funcs=..., args=..., train_dataset=..., group_filter="top_p:0.9", callbacks=[TetherCallback()])

`TetherMixin` does the same for a subclass of one's own: `class Mine(TetherMixin, MyGRPOTrainer)`. Without a filter and without a callback
nothing of TRL's computation is touched. docs/integrations.md says which rows take part in the loss, and with which weight.
"""

import importlib.util
import logging

from tether.core.errors import MissingDependency

if importlib.util.find_spec("trl") is None or importlib.util.find_spec("datasets") is None:
    raise MissingDependency("tether.integrations.trl needs TRL; install it with: pip install 'tether-agents[trl]'")

from tether.algorithms.filters.group_filter import GroupFilter
from tether.integrations.trl.callback import TetherCallback
from tether.integrations.trl.config import TetherGRPOConfig, check_version
from tether.integrations.trl.environments import TetherEnvironment
from tether.integrations.trl.trainer import TetherGRPOTrainer, TetherMixin

__all__ = [
    "GroupFilter",
    "TetherCallback",
    "TetherEnvironment",
    "TetherGRPOConfig",
    "TetherGRPOTrainer",
    "TetherMixin",
]

_remark = check_version()
if _remark is not None:
    logging.getLogger(__name__).warning(_remark)
