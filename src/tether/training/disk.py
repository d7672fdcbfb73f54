"""What a run takes on disk, counted before anything is loaded: the checkpoints that lie there at a time, and what its episodes are written down in.

A checkpoint holds the weights in float32 and two moments of everything that is trained; weights that compute in bfloat16 have their float32 master
weights in the state as well. While one is written, those that `checkpoint.keep` keeps are still there; the best stays beside them. Episodes are an
upper bound: most are shorter than the context allows.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from tether.core.errors import BadInput
from tether.models.hardware import check_device, default_device
from tether.runs.checkpoints import list_checkpoints
from tether.training.memory import GB, critic_name, num_adapted, num_frozen, shape_of, width_of
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
    episodes: int
    """All records, at most."""
    present: int
    """What a resumed run has written already."""
    free: int

    @property
    def total(self) -> int:
        return self.most * self.checkpoint + self.episodes

    @property
    def is_enough(self) -> bool:
        return self.total - self.present <= self.free

    def words(self) -> str:
        """Example: "3 checkpoints of 1.6 GB, episodes up to 0.7 GB = 5.6 GB of 12.0 GB free"."""
        checkpoints = f"{self.most} checkpoint{'s' * (self.most != 1)} of {_size(self.checkpoint)}, " if self.checkpoint else ""
        there = f" ({_size(self.present)} of it is there)" if self.present else ""
        return f"{checkpoints}episodes up to {_size(self.episodes)} = {_size(self.total)}{there} of {_size(self.free)} free"


def plan_disk(settings: RunSettings, folder: Path) -> DiskPlan | None:
    """The plan of a run that writes this folder, there or not; a run is refused where not even one checkpoint fits. None where it cannot be counted."""
    shape = shape_of(settings.model.name)
    critic = critic_name(settings)
    critic_shape = shape_of(critic) if critic else None
    if shape is None or (critic and critic_shape is None):
        return None
    width = width_of(settings, torch.device(check_device(settings.model.device or default_device())))
    masters = 4 if width < 4 else 0
    adapters = num_adapted(settings, shape)
    frozen = num_frozen(settings, shape)
    size = (12 + masters) * (shape.parameters - frozen) + width * frozen if adapters is None else 12 * adapters
    if critic_shape is not None:  # its weights as they compute, the float32 ones where those are rounded, and two moments
        size += (8 + width + masters) * critic_shape.backbone
    chosen, steps = settings.checkpoint, settings.steps
    written = (steps - 1) // chosen.every + chosen.last
    beside = chosen.best and written > 1 and 0 < settings.evaluation.every < steps
    most = min(written, chosen.keep + 1) + beside
    tokens = min(settings.rollout.max_context, shape.positions)
    evaluations = 2 + (steps // settings.evaluation.every if settings.evaluation.every else 0)
    played = steps * settings.rollout.num_groups * settings.rollout.group_size
    played += evaluations * settings.evaluation.samples * (settings.evaluation.prompts or DEFAULT_PROMPTS)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    plan = DiskPlan(size if written else 0, most, played * tokens * TOKEN_BYTES, _written(folder), shutil.disk_usage(there).free)
    if plan.checkpoint > plan.free:
        raise BadInput(
            f"a checkpoint of '{settings.model.name}' takes {_size(plan.checkpoint)}, and '{there}' has {_size(plan.free)} free: not even one would fit; "
            "free some space, choose another --out, or train adapters (lora.rank)"
        )
    return plan


def disk_note(plan: DiskPlan) -> str | None:
    """The line on a disk that may become full before the run ends; None where there is enough."""
    if plan.is_enough:
        return None
    return (
        f"the disk may become full before the run ends: {plan.words()}; free some space, choose another --out, or lower checkpoint.keep. A run that finds no "
        "room stops, and --resume continues from its last checkpoint"
    )


def _written(folder: Path) -> int:
    """Bytes that the run has written so far."""
    files = [path for checkpoint in list_checkpoints(folder / "checkpoints") for path in checkpoint.rglob("*")]
    found = {(stat.st_dev, stat.st_ino): stat.st_size for path in (*files, *folder.glob("*.jsonl")) if (stat := os.lstat(path))}
    return sum(found.values())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f} GB" if num_bytes >= 0.1 * GB else f"{num_bytes / 1e6:.0f} MB"
