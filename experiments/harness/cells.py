"""A cell: one run of a grid; and the small file that a finished one leaves in experiments/cells."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.core.errors import BadInput
from tether.runs.files import write_whole
from tether.training.sweep import Trial

CELLS = "cells"
CELL_SCHEMA = 1
FAILED = ".failed.json"


@dataclass(frozen=True, slots=True)
class Cell(Trial):
    """One run of a grid: a trial of an arm in an environment, at a scale. Example id: "sokoban-top_p-seed0-1f6b09ac"."""

    scale: str
    env: str

    @property
    def arm(self) -> str:
        return self.name

    @classmethod
    def at(cls, scale: str, env: str, arm: str, seed: int, settings: dict[str, Any]) -> "Cell":
        found = Trial.of(env, arm, seed, settings)
        return cls(found.id, arm, seed, found.steps, settings, found.identity, scale, env)


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
