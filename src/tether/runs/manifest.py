"""The manifest of a checkpoint: size and sha256 of every file, written last, checked whenever a checkpoint is read.

    checkpoints/step_000020/manifest.json    {"version": 1, "step": 20, "files": {"model/config.json": {"bytes": 714, "sha256": "..."}, ...}}

A flipped byte, a missing file or one too many is an error that names the file, and the newest older checkpoint that is whole. Checkpoints that
were written before there were manifests load with a warning. The sums are those of `sha256sum`. A file that was found whole and has not
changed since is not read twice by one process.
"""

import hashlib
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tether.core.errors import CheckpointError
from tether.runs.checkpoints import BEST, BEST_FACTS, MODEL, STATE, step_folders

MANIFEST = "manifest.json"
VERSION = 1
_THREADS = 2
"""Files that are summed at the same time: hashlib lets other threads work."""
_LOG = logging.getLogger(__name__)

_Seen = tuple[str, int, int, int]
_WHOLE: dict[_Seen, str] = {}
"""Path, inode, size and time of files to the sum that was found."""


def file_sum(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_manifest(folder: Path, step: int, sums: dict[str, dict[str, Any]]) -> None:
    """Write the manifest of a checkpoint, once all its files are there; `sums` are those of the files by their path in the folder."""
    with (folder / MANIFEST).open("x", encoding="utf-8") as file:
        json.dump({"version": VERSION, "step": step, "files": dict(sorted(sums.items()))}, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def check_checkpoint(checkpoint: Path, *, only: str = "") -> None:
    """Raise a CheckpointError that says what is damaged and which checkpoint is whole; `only` looks at files under this path alone."""
    found = damage(checkpoint, only=only)
    if not found:
        return
    whole = next((path for path in reversed(_others(checkpoint)) if not damage(path)), None)
    if whole is None:
        advice = f"no other checkpoint of this run is whole; move '{checkpoint}' away to start from scratch"
    else:
        advice = f"{whole.name} is whole; move '{checkpoint}' away to continue from there"
    raise CheckpointError(f"checkpoint '{checkpoint}' is damaged: {'; '.join(found)}; {advice}")


def damage(checkpoint: Path, *, only: str = "") -> list[str]:
    """What is wrong with the files of a checkpoint, a sentence each; empty where it is whole, as far as that can be known."""
    if not checkpoint.is_dir():
        return ["it is not there"]
    if not os.path.lexists(checkpoint / MANIFEST):  # a folder or a broken link in its place is damage
        missing = (
            [name for name in (STATE, f"{MODEL}/config.json") if not (checkpoint / name).exists()] if has_no_adapters(checkpoint) else []
        )
        if not missing:
            _LOG.warning("checkpoint '%s' has no manifest (it is older than manifests, or it was removed): not verified", checkpoint)
        return [f"{name} is missing" for name in missing if name.startswith(only)]
    try:
        expected = _expected(checkpoint / MANIFEST)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} cannot be read ({' '.join(str(error).split())[:100]})"]
    present = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if not path.is_dir() or path.is_symlink()}
    present -= {MANIFEST, *([BEST_FACTS] if checkpoint.name == BEST else [])}
    names = [name for name in sorted(expected) if name.startswith(only)]
    found = [f"{name} is missing" for name in names if name not in present]
    found += [f"{name} does not belong to it" for name in sorted(present - expected.keys()) if name.startswith(only)]
    return found + _altered(checkpoint, {name: expected[name] for name in names if name in present})


def has_no_adapters(checkpoint: Path) -> bool:
    """Whether the checkpoint holds a whole model."""
    return not (checkpoint / MODEL / "adapter_config.json").exists()


def _expected(path: Path) -> dict[str, tuple[int, str]]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["version"] > VERSION:
        raise ValueError(f"version {data['version']}, this Tether reads up to {VERSION}: upgrade Tether")
    return {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in data["files"].items()}


def _altered(checkpoint: Path, expected: dict[str, tuple[int, str]]) -> list[str]:
    """Which files are not what was written; the sizes are compared first, which costs nothing."""
    found, to_read = [], []
    for name, (size, _) in expected.items():
        path = checkpoint / name
        if path.is_symlink() or not path.is_file():
            found.append(f"{name} is no plain file")
        elif path.stat().st_size != size:
            found.append(f"{name} has {path.stat().st_size:,} bytes instead of {size:,}")
        else:
            to_read.append(name)
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = threads.map(_sum_of, (checkpoint / name for name in to_read))
        found += [words for name, got in zip(to_read, sums, strict=True) if (words := _difference(name, got, expected[name][1]))]
    return found


def _difference(name: str, got: str | OSError, expected: str) -> str | None:
    if isinstance(got, OSError):
        return f"{name} cannot be read ({(got.strerror or str(got)).lower()})"
    return None if got == expected else f"{name} is not what was written (its sha256 differs)"


def _sum_of(path: Path) -> str | OSError:
    try:
        stat = path.stat()
        seen = (str(path.resolve()), stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if seen not in _WHOLE:
            _WHOLE[seen] = str(file_sum(path)["sha256"])
        return _WHOLE[seen]
    except OSError as error:  # a disk that cannot read it: said with the file's name
        return error


def _others(checkpoint: Path) -> list[Path]:
    """The checkpoints of the run that are older; for the best one all."""
    numbered = step_folders(checkpoint.parent)
    return numbered[: numbered.index(checkpoint)] if checkpoint in numbered else numbered
