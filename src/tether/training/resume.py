"""Going on from a checkpoint: the parts of a run as they were after its step, or its weights in place of the present ones."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from tether.core.errors import CheckpointError
from tether.diagnostics.monitor import Monitor
from tether.training.checkpoint import load_checkpoint, load_state
from tether.training.learner import Learner
from tether.training.reactions import AlarmActions


def restore(checkpoint: Path, learner: Learner, monitor: Monitor, reactions: AlarmActions) -> int:
    """Put everything but the policy, which is built from the checkpoint, as it was; returns the step."""
    state = load_state(checkpoint)
    if missing := sorted({"learner", "monitor", "reactions"} - state.keys()):
        raise CheckpointError(
            f"checkpoint '{checkpoint}' holds no state of {', '.join(missing)}: another version of tether wrote it; resume with that version"
        )
    try:
        learner.restore(state["learner"])
        monitor.restore(state["monitor"])
        reactions.restore(state["reactions"])
        return int(state["step"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"checkpoint '{checkpoint}' does not fit this run: {error}; resume with the config it was made by") from error


def rollback(checkpoint: Path, model: PreTrainedModel, learner: Learner) -> None:
    """Weights, optimiser and critic of an earlier step in place of the present ones."""
    saved = dict(load_checkpoint(checkpoint, "cpu").model.named_parameters())
    with torch.no_grad():  # float32 masters of rounded weights come back with the optimiser
        for name, parameter in model.named_parameters():
            parameter.copy_(saved[name])
    learner.restore(load_state(checkpoint)["learner"])
