"""A cell: one run of a grid, by its settings; and the small file that a finished one leaves in experiments/cells.

The id of a cell is a readable name and a hash. The hash is taken of the settings that decide the result, as far as they differ from the
defaults of their environment, model and algorithm: two spellings of one run are one cell, and a new setting with a default does not change
the id of an old cell. Settings that decide only speed, memory or disk do not enter.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.core.errors import BadInput
from tether.envs.wording import EXAMPLE
from tether.runs.files import write_whole
from tether.training.resolve import resolve_settings

CELLS = "cells"
CELL_SCHEMA = 1
FAILED = ".failed.json"

WITHOUT_EFFECT = (
    "checkpoint",
    "model.device",
    "env.step_timeout",
    "env.weight",
    "rollout.max_rows",
    "rollout.cache_gb",
    "rollout.speculative_tokens",
    "rollout.error_retries",
    "learner.micro_tokens",
    "learner.packing",
    "learner.share_prompts",
    "learner.gradient_checkpointing",
)
"""Dotted keys of settings that do not decide what a run learns or measures."""
ALWAYS = ("env.name", "model.name", "algorithm.name", "steps", "seed")
"""Keys that are part of an identity, defaults or not."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a grid. Example id: "sokoban-top_p-seed0-1f6b09ac"."""

    id: str
    scale: str
    env: str
    arm: str
    seed: int
    steps: int
    settings: dict[str, Any]
    """As given to `tether train`."""
    identity: dict[str, Any]
    """The dotted settings behind the hash."""

    @classmethod
    def of(cls, scale: str, env: str, arm: str, seed: int, settings: dict[str, Any]) -> "Cell":
        identity = identity_of(settings)
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
        return cls(f"{env}-{arm}-seed{seed}-{digest}", scale, env, arm, seed, int(identity["steps"]), settings, identity)


def identity_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The dotted settings that decide the result of a run, where they differ from the defaults; every setting is checked on the way."""
    resolved = _flat(resolve_settings(None, settings, {}).model_dump(mode="json"))
    plain = {section: {"name": resolved[f"{section}.name"]} for section in ("env", "model", "algorithm")}
    defaults = _flat(resolve_settings(None, plain, {}).model_dump(mode="json"))
    if resolved.get("env.options.instructions") == EXAMPLE:
        defaults |= {"env.options.few_shot": 0}  # none, as in cells that are older than the option; other wordings show none by themselves
    return {
        key: value
        for key, value in sorted(resolved.items())
        if key in ALWAYS or (value != defaults.get(key) and not any(key == name or key.startswith(f"{name}.") for name in WITHOUT_EFFECT))
    }


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return flat


# -------------------------------------------------------------------------------------------------------------------- file


@dataclass(frozen=True, slots=True)
class CellRecord:
    """A finished cell."""

    id: str
    seed: int
    planned: int
    """Steps it was planned for."""
    finished: str
    """How the run ended, such as "all 150 steps done"."""
    seconds: float
    """Computing time of the run's steps; other runs may have shared the machine."""
    curves: dict[str, dict[int, float]]
    about: dict[str, Any]
    """Settings behind the hash, commit, date, machine and version."""

    def to_json(self) -> str:
        """One line per curve, so that the file can be read and a difference is seen."""
        head = {"schema": CELL_SCHEMA, **{name: getattr(self, name) for name in ("id", "seed", "planned", "finished", "seconds", "about")}}
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        curves = [f"    {json.dumps(name)}: {json.dumps(list(map(list, curve.items())))}" for name, curve in sorted(self.curves.items())]
        return "{\n" + ",\n".join(lines) + ',\n  "curves": {\n' + ",\n".join(curves) + "\n  }\n}\n"

    @classmethod
    def read(cls, path: Path) -> "CellRecord":
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] != CELL_SCHEMA:
                raise BadInput(f"'{path}' has schema {data['schema']}, this Tether reads {CELL_SCHEMA}; upgrade Tether")
            curves = {name: {int(step): float(value) for step, value in points} for name, points in data["curves"].items()}
            fields = {name: data[name] for name in ("id", "seed", "planned", "finished", "seconds", "about")}
            return cls(**fields, curves=curves)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"cannot read cell '{path}': {error!r}; restore the file, or delete it to run the cell again") from error


class CellFiles:
    """The finished cells of a scale in a folder, and the reasons of failed ones."""

    def __init__(self, folder: Path, scale: str) -> None:
        self.folder = folder / CELLS / scale

    def path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.id}.json"

    def has(self, cell: Cell) -> bool:
        return self.path(cell).is_file()

    def read(self, cell: Cell) -> CellRecord | None:
        return CellRecord.read(self.path(cell)) if self.has(cell) else None

    def write(self, cell: Cell, record: CellRecord) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.path(cell), record.to_json())
        self._failure(cell).unlink(missing_ok=True)
        return self.path(cell)

    def write_failure(self, cell: Cell, reason: str) -> None:
        """Put a failed cell on record; the next start tries it again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._failure(cell), json.dumps({"id": cell.id, "reason": reason}, indent=2) + "\n")

    def failure(self, cell: Cell) -> str | None:
        path = self._failure(cell)
        return str(json.loads(path.read_text(encoding="utf-8"))["reason"]) if path.is_file() else None

    def _failure(self, cell: Cell) -> Path:
        return self.folder / f"{cell.id}{FAILED}"
