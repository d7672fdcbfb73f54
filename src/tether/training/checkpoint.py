"""Checkpoints: a folder per step that transformers can load, plus the state that resuming needs.

    checkpoints/step_000020/model/      weights, config and tokenizer in Hugging Face format
    checkpoints/step_000020/state.pt    step, optimiser, monitor

A checkpoint is written beside its place and renamed into it, so a kill or a full disk leaves the earlier ones as they were. Nothing
random is stored: every draw follows from the run's seed and the step.
"""

import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.core.errors import CheckpointError, ModelUnavailable
from tether.models.load import LoadedModel, load_model

MODEL, STATE, NEW = "model", "state.pt", "new"


def checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def save_checkpoint(
    folder: Path, step: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, state: dict[str, Any], keep: int
) -> Path:
    """Write the checkpoint of a step and delete all but the `keep` newest."""
    target = folder / checkpoint_name(step)
    unfinished: Path | None = None
    try:
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
        model.save_pretrained(unfinished / NEW / MODEL)
        tokenizer.save_pretrained(unfinished / NEW / MODEL)
        torch.save({"step": step, **state}, unfinished / NEW / STATE)
        if target.exists():  # the same step again: the old one stands aside until the new one is in place
            target.rename(unfinished / "replaced")
        (unfinished / NEW).rename(target)
    except (OSError, RuntimeError) as error:  # torch and safetensors report a full disk as RuntimeError
        raise CheckpointError(
            f"cannot write checkpoint '{target}': {' '.join(str(error).split())[:200]}; earlier checkpoints and records are untouched, "
            "free some space and go on with --resume"
        ) from error
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step_*") if (path / STATE).is_file())


def load_checkpoint(checkpoint: Path, device: str | None) -> LoadedModel:
    """The model of a checkpoint."""
    try:
        return load_model(str(checkpoint / MODEL), device=device)
    except ModelUnavailable as error:
        raise CheckpointError(f"{error}; or move '{checkpoint}' away to resume from the one before it") from error


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The resuming state of a checkpoint."""
    try:
        state: dict[str, Any] = torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, LookupError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"cannot read checkpoint '{checkpoint}': {' '.join(str(error).split())[:160]}; move it away to resume from the one before it"
        ) from error
    return state
