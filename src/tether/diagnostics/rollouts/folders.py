"""The files of the given paths: folders are searched in depth, in the order of the numbers in their names.

The name of a folder or file may say what its records do not: the training step (step_12, global_step_12_evals, iter-3) and whether it holds
training or evaluation. Where a folder holds both, one of them is read. prime-rl writes the episodes that it trained on (effective) a second time beside all of
them; all are read, because a diagnosis is about the unfiltered groups. Whatever is passed over is named.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tether.core.errors import BadInput

Source = str | Path | Sequence[str | Path]

SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".parquet", ".json", ".pt")
PICKLES = (".pkl", ".pickle")
_OWN_FILE, _TRL_FOLDER = "trajectories.jsonl", "completions"
_STEP = re.compile(r"(?:^|[_\-.])(?:global[_-]?)?(?:step|iter|iteration)s?[_\-=]?(\d+)(?=$|[_\-.])", re.IGNORECASE)
_EVALUATION = re.compile(r"(?:eval|evals|evaluation|eval-rollout|val|validation|test)(?:_\d+)?")
_TRAINING = re.compile(r"(?:train|training|rollout)")
NAMED = 3


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """A file that may hold rollouts."""

    path: Path
    step: int | None = None
    """As its name or that of a folder says."""
    is_given: bool = True
    """Named by the user, not found in a folder: it is read or refused, never passed over."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files in the order of reading, and notes on what was passed over."""

    files: list[RolloutFile]
    notes: list[str]


def rollout_files(source: Source, split: str | None) -> Files:
    """The files of the given paths.

    Args:
        split: where a folder holds training and evaluation apart, which is read; None for both.
    """
    paths = [Path(source)] if isinstance(source, str | Path) else [Path(path) for path in source]
    if not paths:
        raise BadInput("no rollout file was given; name a file or a folder")
    files: list[RolloutFile] = []
    notes: list[str] = []
    for path in paths:
        if path.is_dir():
            found = _in_folder(path, split)
            files += found.files
            notes += found.notes
        elif path.is_file():
            files.append(RolloutFile(path, named_step((path.parent.name, path.name))))
        elif path.exists():  # it is read twice, and a pipe may never end
            raise BadInput(f"'{path}' is a pipe or a device, not a file; write the rollouts to a file first")
        else:
            raise BadInput(f"rollout file '{path}' does not exist; check the path")
    return Files(files, notes)


def named_step(names: Iterable[str]) -> int | None:
    """The step that the last of these names says, if one does.

    >>> named_step(["dumped_evals", "global_step_12_evals", "gsm8k.jsonl"])
    12
    """
    found = [match for name in names for match in _STEP.finditer(name)]
    return int(found[-1][1]) if found else None


def listed(names: Sequence[str]) -> str:
    """A few names and the number of the others."""
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _in_folder(folder: Path, split: str | None) -> Files:
    if (folder / _OWN_FILE).is_file():
        return Files([RolloutFile(folder / _OWN_FILE)], [])  # a run folder, whose other JSON Lines are no rollouts
    runs = sorted(path.parent for path in folder.rglob(_OWN_FILE) if (path.parent / "run.json").is_file())
    if runs:
        if len(runs) > 1:
            raise BadInput(f"folder '{folder}' holds {len(runs)} runs of Tether ({listed([run.name for run in runs])}); name one of them")
        return Files([RolloutFile(runs[0] / _OWN_FILE)], [])
    place = folder / _TRL_FOLDER if (folder / _TRL_FOLDER).is_dir() and not any(map(_may_hold, folder.iterdir())) else folder
    visible = (path for path in place.rglob("*") if not any(part.startswith(".") for part in path.relative_to(place).parts))
    paths = sorted(filter(_may_hold, visible), key=lambda path: _order(path, place))
    notes = [
        f"{path.relative_to(place)} was passed over: a pickle, which can run code when it is loaded"
        for path in sorted(place.rglob("*"))
        if path.name.endswith(PICKLES)
    ]
    if not paths:
        because = f" ({notes[0]})" if notes else ""
        raise BadInput(f"folder '{folder}' holds no rollouts; expected files that end with {', '.join(SUFFIXES)}{because}")
    if len(notes) > 1:
        notes = [f"{notes[0]}; so were {len(notes) - 1} more"]
    paths, passed = _of_split(paths, place, split)
    found = [RolloutFile(path, named_step((place.name, *path.relative_to(place).parts)), is_given=False) for path in paths]
    return Files(found, [*passed, *notes])


def _may_hold(path: Path) -> bool:
    return path.name.endswith(SUFFIXES) and path.is_file()


def _of_split(paths: list[Path], place: Path, split: str | None) -> tuple[list[Path], list[str]]:
    notes = []
    effective = {path for path in paths if path.parent.name == "effective" and path.parent.parent / "all" / path.name in paths}
    if effective:
        notes.append(
            f"{len(effective)} files of folders named effective were passed over: the folders named all beside them hold the same episodes and more"
        )
    paths = [path for path in paths if path not in effective]
    evaluations = set()
    for path in paths:  # the innermost name that says training or evaluation counts
        parts = path.relative_to(place).parts
        named = (part for part in (path.name.split(".")[0], *parts[-2::-1]) if _EVALUATION.fullmatch(part) or _TRAINING.fullmatch(part))
        if _EVALUATION.fullmatch(next(named, "")):
            evaluations.add(path)
    if split is None or not 0 < len(evaluations) < len(paths):
        return paths, notes
    wants_training = split == "train"
    kept = [path for path in paths if (path in evaluations) != wants_training]
    other, name = ("evaluation", "eval") if wants_training else ("training", "train")
    notes.append(f"{len(paths) - len(kept)} files of {other} were passed over; --split {name} reads them")
    return kept, notes


def _order(path: Path, place: Path) -> list[list[tuple[int, str]]]:
    """10.jsonl comes after 9.jsonl."""
    return [
        [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)] for name in path.relative_to(place).parts
    ]
