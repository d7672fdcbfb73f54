"""Finding the checkpoints of a run: the one place that knows their names. Nothing here reads weights.

checkpoints/step_000020/model/      weights, config and tokenizer in Hugging Face format
checkpoints/step_000020/state.pt    what resuming needs beside them; a folder without it is not a complete checkpoint
checkpoints/step_000020/manifest.json   size and sha256 of every file (manifest.py)
checkpoints/best/                   the checkpoint that validated best so far, with its number in best.json
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

from tether.core.errors import BadInput, CheckpointError

MODEL, STATE, BEST, BEST_FACTS = "model", "state.pt", "best", "best.json"

_STEP = re.compile(r"step_(\d+)")


class Best(NamedTuple):
    """Which checkpoint validated best so far. Example: Best(40, 0.8125)."""

    step: int
    success: float


def checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def step_of(checkpoint: Path) -> int:
    """The step a checkpoint was written after. Example: 20 of ".../step_000020"."""
    return int(checkpoint.name.removeprefix("step_"))


def step_folders(folder: Path) -> list[Path]:
    """The folders of steps, oldest first, whatever they hold."""
    numbered = [(int(name[1]), path) for path in folder.glob("step_*") if (name := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return [path for path in step_folders(folder) if (path / STATE).is_file()]


def newest_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint of a run, or None.

    Checkpoints come to their place whole, so a last one without its state has lost it: an error, because an older one would be taken for it.
    """
    found, complete = step_folders(folder), list_checkpoints(folder)
    if found and found[-1] not in complete:
        before = f"; {complete[-1].name} is there" if complete else ""
        raise CheckpointError(
            f"checkpoint '{found[-1]}' is damaged: {STATE} is missing{before}; move '{found[-1]}' away to continue without it"
        )
    return complete[-1] if complete else None


def best_checkpoint(folder: Path) -> Best | None:
    """What `keep_best` kept last; None if it was never called."""
    path = folder / BEST / BEST_FACTS
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return Best(int(facts["step"]), float(facts["success"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"cannot read '{path}': {error}; move '{path.parent}' away, the next evaluation makes a new one") from error


def find_checkpoint(folder: Path, *, best: bool = False, step: int | None = None) -> tuple[Path, int]:
    """The checkpoint that was asked for, and its step: the best, that of a step, or the newest."""
    if best:
        facts = best_checkpoint(folder)
        if facts is None:
            raise BadInput(f"run '{folder.parent}' has no best checkpoint: none was evaluated yet; leave out --best for its last one")
        return _with_model(folder / BEST), facts.step
    found = list_checkpoints(folder)
    if step is None:
        newest = newest_checkpoint(folder)
        if newest is None:
            raise BadInput(f"run '{folder.parent}' has no checkpoint yet; let it train on")
        return _with_model(newest), step_of(newest)
    if folder / checkpoint_name(step) not in found:
        known = ", ".join(str(step_of(path)) for path in found) or "none"
        raise BadInput(f"run '{folder.parent}' has no checkpoint of step {step}; it has those of steps {known}")
    return _with_model(folder / checkpoint_name(step)), step


def _with_model(checkpoint: Path) -> Path:
    """The checkpoint, if it has a model folder: without one its path would be taken for a mistyped name of a model."""
    if not (checkpoint / MODEL).is_dir():
        raise CheckpointError(
            f"checkpoint '{checkpoint}' is damaged: {MODEL} is missing; "
            f"`tether doctor {checkpoint.parent.parent}` says which checkpoint is whole"
        )
    return checkpoint
