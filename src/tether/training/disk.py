"""What a run takes on disk, counted before anything is loaded: the checkpoints that lie there at a time, and what its episodes are written down in.

A checkpoint holds 4 bytes a weight (float32, or bfloat16 with the other half of the float32 master weight) and two moments of everything that is
trained, in float32 or bfloat16. The best are the weights alone, as they compute. While a checkpoint is written, those that `checkpoint.keep` keeps are
still there, and the best beside them. Episodes are an upper bound: most are shorter than the context allows.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tether.core.errors import BadInput
from tether.models.hardware import check_device, default_device
from tether.runs.checkpoints import BEST, list_checkpoints
from tether.training.memory import GB, WIDTHS, critic_name, num_adapted, num_frozen, shape_of, width_of
from tether.training.settings import RunSettings

TOKEN_BYTES = 16
"""Of a token of an episode: its id, its text, and for half of them a log-prob; measured on the demo and on Qwen2.5-Coder-1.5B."""
DEFAULT_PROMPTS = 512


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """What a run takes of a disk, in bytes."""

    checkpoint: int
    """One checkpoint; 0 where none is written."""
    most: int
    """Checkpoints that lie there at a time, at most."""
    best: int
    """The best weights beside them, at most; 0 where they are those of the only checkpoint, or not kept."""
    episodes: int
    """All records, at most."""
    present: int
    """What a resumed run has written already."""
    free: int
    moments: str = "float32"
    """What they are saved in."""
    exact: int = 0
    """What checkpoints would take with float32 moments, where these are not saved because they would not fit."""

    @property
    def checkpoints(self) -> int:
        return self.most * self.checkpoint + self.best

    @property
    def total(self) -> int:
        return self.checkpoints + self.episodes

    @property
    def is_enough(self) -> bool:
        return self.total - self.present <= self.free

    def words(self) -> str:
        """Example: "2 checkpoints of 21.3 GB, best weights 3.6 GB, episodes up to 0.7 GB = 46.9 GB of 120.0 GB free"."""
        checkpoints = f"{self.most} checkpoint{'s' * (self.most != 1)} of {_size(self.checkpoint)}, " if self.checkpoint else ""
        best = f"best weights {_size(self.best)}, " if self.best else ""
        there = f" ({_size(self.present)} of it is there)" if self.present else ""
        return f"{checkpoints}{best}episodes up to {_size(self.episodes)} = {_size(self.total)}{there} of {_size(self.free)} free"


def plan_disk(settings: RunSettings, folder: Path) -> DiskPlan | None:
    """The plan of a run that writes this folder, there or not; a run is refused whose checkpoints cannot fit. None where it cannot be counted."""
    shape = shape_of(settings.model.name)
    critic = critic_name(settings)
    critic_shape = shape_of(critic) if critic else None
    if shape is None or (critic and critic_shape is None):
        return None
    width = width_of(settings, torch.device(check_device(settings.model.device or default_device())))
    adapters = num_adapted(settings, shape)
    frozen = num_frozen(settings, shape) if adapters is None else 0
    trained = shape.parameters - frozen if adapters is None else adapters
    weights = (width if adapters is None else 4) * trained + width * frozen
    moved = trained + (critic_shape.backbone if critic_shape is not None else 0)
    chosen, steps = settings.checkpoint, settings.steps
    tokens = min(settings.rollout.max_context, shape.positions)
    evaluations = 2 + (steps // settings.evaluation.every if settings.evaluation.every else 0)
    played = steps * settings.rollout.num_groups * settings.rollout.most_members
    prompts = DEFAULT_PROMPTS if settings.evaluation.prompts is None else settings.evaluation.prompts
    played += evaluations * settings.evaluation.samples * prompts
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free, kept = shutil.disk_usage(there).free, _bytes(_kept_files(folder / "checkpoints"))
    present = kept + _bytes(folder.glob("*.jsonl"))

    def plan(moments: str, exact: int = 0) -> DiskPlan:
        size = (4 + 2 * WIDTHS[moments]) * moved + width * frozen
        return DiskPlan(size, *_at_a_time(settings, size, weights), played * tokens * TOKEN_BYTES, present, free, moments, exact)

    found = plan(chosen.moments or "float32")
    if chosen.moments is None and found.checkpoints - kept > free:
        found = plan("bfloat16", exact=found.checkpoints)
    if found.checkpoints - kept > free:
        smaller = "" if found.moments == "bfloat16" else "give checkpoint.moments=bfloat16, "
        raise BadInput(
            f"the checkpoints of '{settings.model.name}' do not fit into '{there}': {found.words()}; free some space, choose another --out, {smaller}lower "
            "checkpoint.keep, raise checkpoint.every, leave the best out (checkpoint.best=false), or train adapters (lora.rank)"
        )
    return found


def _at_a_time(settings: RunSettings, checkpoint: int, weights: int) -> tuple[int, int]:
    """How many checkpoints lie there when most is taken, and the bytes of best weights beside them."""
    chosen, steps, every = settings.checkpoint, settings.steps, settings.evaluation.every
    before = (steps - 1) // chosen.every  # the last step
    # Steps whose weights may be the best and not those of the last checkpoint.
    apart = ((steps - 1) // every if every else 0) + (not chosen.last) if chosen.best else 0
    writing = min(before + chosen.last, chosen.keep + 1), min(apart, 1) * weights
    replacing = min(before, chosen.keep), min(apart, 2) * weights  # one best by another
    return max(writing, replacing, key=lambda found: found[0] * checkpoint + found[1])


def disk_notes(plan: DiskPlan) -> list[str]:
    """What is to be said of the disk before a run; nothing where there is enough."""
    notes = []
    if plan.exact:
        notes.append(
            f"Adam's moments are saved in bfloat16: checkpoints with float32 ones would take {_size(plan.exact)}, and {_size(plan.free + plan.present)} are "
            "there. A resumed run is then equal within rounding (docs/checkpoints.md); checkpoint.moments=float32 refuses to run without the room"
        )
    if not plan.is_enough:
        notes.append(
            f"the disk may become full before the run ends: {plan.words()}; free some space, choose another --out, or lower checkpoint.keep. A run that "
            "finds no room stops, and --resume continues from its last checkpoint"
        )
    return notes


def _kept_files(checkpoints: Path) -> Iterator[Path]:
    for folder in (*list_checkpoints(checkpoints), checkpoints / BEST):
        yield from folder.rglob("*")


def _bytes(paths: Iterable[Path]) -> int:
    """What files take; one with two names counts once."""
    sizes = {(stat.st_dev, stat.st_ino): stat.st_size for path in paths if (stat := os.lstat(path))}
    return sum(sizes.values())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f} GB" if num_bytes >= 0.1 * GB else f"{num_bytes / 1e6:.0f} MB"
