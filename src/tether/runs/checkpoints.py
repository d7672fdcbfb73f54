"""The checkpoints of a run: finding them, by the one place that knows their names, and whether they are whole. Nothing here reads weights.

checkpoints/step_000020/model/      weights, config and tokenizer in Hugging Face format
checkpoints/step_000020/state.pt    what resuming needs beside them, its tensors in state-*.safetensors; a folder without it is not a complete checkpoint
checkpoints/step_000020/manifest.json   {"version": 1, "step": 20, "files": {"model/config.json": {"bytes": 714, "sha256": "..."}, ...}}
checkpoints/best/                   model/ of the step that validated best so far, with its number in best.json; until 0.1 a whole checkpoint

The manifest, size and sha256 of every file, is written last and checked whenever a checkpoint is read. A flipped byte, a missing file or one too
many is an error that names the file, and the newest older checkpoint that is whole. Checkpoints that were written before there were manifests load
with a warning. The sums are those of `sha256sum`. A file that was found whole and has not changed since is not read twice by one process.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tether.core.errors import BadInput, CheckpointError, TetherError
from tether.core.files import open_to_read
from tether.runs.files import read_object

MODEL, STATE, BEST, BEST_FACTS = "model", "state.pt", "best", "best.json"
STATE_FILES = "state"
"""What the names of all files of a state begin with."""

MANIFEST = "manifest.json"
VERSION = 1
_THREADS = 2
"""Files that are summed at the same time: hashlib lets other threads work."""
_LOG = logging.getLogger(__name__)

_Seen = tuple[str, int, int, int]
_WHOLE: dict[_Seen, str] = {}
"""Path, inode, size and time of files to the sum that was found."""

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
    if not os.path.lexists(path):
        return None
    try:
        facts = read_object(path)
        return Best(int(facts["step"]), float(facts["success"]))
    except (TetherError, ValueError, LookupError, TypeError, OverflowError) as error:
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
            facts = best_checkpoint(folder)
            found_best = "" if facts is None else f", or take the best weights, of step {facts.step} (--best)"
            raise BadInput(f"run '{folder.parent}' has no checkpoint yet; let it train on{found_best}")
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


# --------------------------------------------------------------------------------------------------------------- manifest


def file_sum(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file."""
    with open_to_read(path) as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_manifest(folder: Path, step: int, sums: dict[str, dict[str, Any]]) -> None:
    """Write the manifest of a checkpoint, once all its files are there; `sums` are those of the files by their path in the folder."""
    with (folder / MANIFEST).open("x", encoding="utf-8") as file:
        json.dump({"version": VERSION, "step": step, "files": dict(sorted(sums.items()))}, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def written_sums(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """The sums in the manifest of a checkpoint; none where it has no manifest."""
    path = checkpoint / MANIFEST
    return {name: {"bytes": size, "sha256": sha256} for name, (size, sha256) in _expected(path).items()} if path.is_file() else {}


def check_checkpoint(checkpoint: Path, *, only: str = "") -> None:
    """Raise a CheckpointError that says what is damaged and which checkpoint is whole; `only` looks at files under this path alone."""
    found = damage(checkpoint, only=only)
    if not found:
        return
    others = step_folders(checkpoint.parent)
    if checkpoint in others:  # the best one is none of them
        others = others[: others.index(checkpoint)]
    whole = next((path for path in reversed(others) if not damage(path)), None)
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
        needed = (f"{MODEL}/config.json",) if checkpoint.name == BEST else (STATE, f"{MODEL}/config.json")
        missing = [name for name in needed if not (checkpoint / name).exists()] if has_no_adapters(checkpoint) else []
        if not missing:
            _LOG.warning("checkpoint '%s' has no manifest (it is older than manifests, or it was removed): not verified", checkpoint)
        return [f"{name} is missing" for name in missing if name.startswith(only)]
    try:
        expected = _expected(checkpoint / MANIFEST)
    except (TetherError, ValueError, LookupError, TypeError, AttributeError) as error:
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
    data = read_object(path)
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
        found += filter(None, threads.map(lambda name: _content_damage(checkpoint, name, expected[name][1]), to_read))
    return found


def _content_damage(checkpoint: Path, name: str, sha256: str) -> str | None:
    """What is wrong with the content of a file, None where it is what was written."""
    path = checkpoint / name
    try:
        stat = path.stat()
        seen = (str(path.resolve()), stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if seen not in _WHOLE:
            _WHOLE[seen] = str(file_sum(path)["sha256"])
    except OSError as error:  # a disk that cannot read it
        return f"{name} cannot be read ({(error.strerror or str(error)).lower()})"
    return None if _WHOLE[seen] == sha256 else f"{name} is not what was written (its sha256 differs)"


def link_folder(source: Path, target: Path) -> None:
    """A second name for each file, which costs no space, or a copy where the file system has no such; files of checkpoints never change."""
    target.mkdir()
    for path in sorted(source.rglob("*")):
        linked = target / path.relative_to(source)
        if path.is_dir():
            linked.mkdir()
            continue
        try:
            os.link(path, linked)
        except OSError:
            shutil.copyfile(path, linked)
