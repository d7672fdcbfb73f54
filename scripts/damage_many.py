"""Damaged checkpoints: what a disk, a copy or a person does to the files of a finished run; a part of scripts/torture.py.

A run with three checkpoints and a best one is copied, and files of one to three checkpoints are altered, cut off, removed, added, replaced. Which
checkpoints are damaged is then known from comparing bytes, without the manifests. `tether doctor RUN` must name each damaged checkpoint and each
whole one; --resume and `tether eval` must refuse what is damaged with one line, and change nothing. A checkpoint whose manifest is gone counts as
one of an older version: there only the lines are looked at.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kill_many import Trial, attempt
from tether.runs.checkpoints import BEST, BEST_FACTS, MANIFEST, MODEL, STATE, step_folders
from torture_part import Part

NEW_PROCESS_EVERY = 50
"""Of so many commands one starts Python anew, as a user does; the others fork this process, which saves the imports."""
EXTRA = ("model/pytorch_model.bin", "model/extra.safetensors", "model/adapter_config.json", "model/.hidden", "state.pt.bak", "notes.txt")


# --- what happens to files ---


def _checkpoint_of(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.parent.name == "checkpoints")


def _flip(random: np.random.Generator, path: Path) -> None:
    """Some bits, the size and the time of the file as they were: what a disk does."""
    stat, content = path.stat(), bytearray(path.read_bytes())
    for place in random.integers(len(content), size=int(random.integers(1, 9))):
        content[place] ^= 1 << int(random.integers(8))
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _cut(random: np.random.Generator, path: Path) -> None:
    os.truncate(path, int(path.stat().st_size * random.random()))


def _lengthen(random: np.random.Generator, path: Path) -> None:
    with path.open("ab") as file:
        file.write(random.bytes(int(random.integers(1, 5000))))


def _zeros(random: np.random.Generator, path: Path) -> None:
    """A block that was never written."""
    content = bytearray(path.read_bytes())
    start = int(random.integers(len(content)))
    block = content[start : start + int(random.integers(1, 4097))]
    content[start : start + len(block)] = bytes(len(block))
    path.write_bytes(content)


def _remove(random: np.random.Generator, path: Path) -> None:
    path.unlink()


def _empty(random: np.random.Generator, path: Path) -> None:
    path.write_bytes(b"")


def _exchange(random: np.random.Generator, path: Path) -> None:
    """The file of that name in another checkpoint: a copy that mixed two."""
    checkpoint = _checkpoint_of(path)
    others = sorted(other for other in checkpoint.parent.iterdir() if other != checkpoint)
    other = others[int(random.integers(len(others)))] / path.relative_to(checkpoint)
    if other.is_file():
        shutil.copyfile(other, path)


def _link(random: np.random.Generator, path: Path) -> None:
    """The same bytes, somewhere else."""
    run = next(parent.parent for parent in path.parents if parent.name == "checkpoints")
    elsewhere = run.with_name(f"{run.name}-elsewhere")
    elsewhere.mkdir(exist_ok=True)
    path.symlink_to(path.rename(elsewhere / f"{path.name}-{int(random.integers(10**9))}"))


def _folder(random: np.random.Generator, path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / path.name).write_bytes(random.bytes(10))


def _add(random: np.random.Generator, path: Path) -> None:
    """A file beside it that does not belong there."""
    checkpoint = _checkpoint_of(path)
    added = checkpoint / EXTRA[int(random.integers(len(EXTRA)))]
    added.parent.mkdir(exist_ok=True)
    added.write_bytes(random.bytes(int(random.integers(100))))


def _remove_model(random: np.random.Generator, path: Path) -> None:
    checkpoint = _checkpoint_of(path)
    shutil.rmtree(checkpoint / MODEL, ignore_errors=True)  # it may be gone already


DAMAGES: dict[str, Callable[[np.random.Generator, Path], None]] = {
    "bits flipped": _flip,
    "cut off": _cut,
    "longer": _lengthen,
    "zeros": _zeros,
    "removed": _remove,
    "empty": _empty,
    "of another checkpoint": _exchange,
    "a link": _link,
    "a folder": _folder,
    "a file added": _add,
    "model removed": _remove_model,
}


def _damage(random: np.random.Generator, run: Path) -> list[str]:
    """Do one to three things to the checkpoints of a run; returns what was done."""
    done = []
    for _ in range(int(random.integers(1, 4))):
        checkpoints = sorted((run / "checkpoints").iterdir())
        newest = step_folders(run / "checkpoints")[-1]  # --resume and eval read this one
        checkpoint = newest if random.random() < 0.4 else checkpoints[int(random.integers(len(checkpoints)))]
        files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and not path.is_symlink() and path.stat().st_size)
        large = [path for path in files if path.name in ("model.safetensors", "state-00001.safetensors", STATE, MANIFEST)]
        files = [path for path in (large if large and random.random() < 0.5 else files) if path.name != BEST_FACTS]
        if files:
            kind = [*DAMAGES][int(random.integers(len(DAMAGES)))]
            path = files[int(random.integers(len(files)))]
            DAMAGES[kind](random, path)
            done.append(f"{path.relative_to(run / 'checkpoints')}: {kind}")
    return done


# --- what should be said about them ---


@dataclass(frozen=True, slots=True)
class Truth:
    """What comparing a checkpoint with the one it was copied from gives."""

    names: frozenset[str]
    """Files that are altered, missing, too many, or listed wrongly in the manifest."""
    manifest: str
    """whole, gone (nothing can be verified), or unreadable."""

    @property
    def is_damaged(self) -> bool:
        return bool(self.names) or self.manifest == "unreadable"

    @property
    def verifiable(self) -> bool:
        return self.manifest != "gone"

    @property
    def model_is_damaged(self) -> bool:
        return self.manifest == "unreadable" or any(name.startswith(f"{MODEL}/") for name in self.names)


def compare(original: Path, copy: Path) -> Truth:
    """Byte by byte, without what Tether has for it."""
    ours, theirs = _files(copy), _files(original)
    names = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    if not (copy / MANIFEST).is_file():
        return Truth(frozenset(names), "gone")
    try:
        listed, written = (json.loads((folder / MANIFEST).read_text(encoding="utf-8")) for folder in (copy, original))
        if listed["version"] > written["version"]:
            return Truth(frozenset(names), "unreadable")
        entries = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in listed["files"].items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        return Truth(frozenset(names), "unreadable")
    right = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in written["files"].items()}
    names |= {name for name in entries.keys() | right.keys() if entries.get(name) != right.get(name)}
    return Truth(frozenset(names), "whole")


def _files(checkpoint: Path) -> dict[str, bytes | None]:
    """Content by name; None for what is no plain file."""
    found = [path for path in checkpoint.rglob("*") if path.is_symlink() or not path.is_dir()]
    names = {str(path.relative_to(checkpoint)): None if path.is_symlink() else path.read_bytes() for path in found}
    return {name: content for name, content in names.items() if name not in (MANIFEST, BEST_FACTS)}


# --- the part ---


def damage(part: Part) -> None:
    """Damage copies of one run until the time is up."""
    reference = Trial(part.folder, "grpo", int(part.random.integers(2**31)), ("checkpoint.keep=3",)).reference
    while part.has_time and not part.failures:
        number = int(part.counts.get("damaged runs", 0))
        run = part.folder / f"copy-{number}"
        shutil.copytree(reference, run)
        done = _damage(part.random, run)
        truth = {path.name: compare(reference / "checkpoints" / path.name, path) for path in sorted((run / "checkpoints").iterdir())}
        case = Case(part, run, done, truth)
        case.check_doctor()
        case.check_resume()
        case.check_eval(best=False)
        case.check_eval(best=True)
        part.count("damaged runs")
        part.count("damaged checkpoints", sum(each.is_damaged and each.verifiable for each in truth.values()))
        part.count("whole checkpoints beside them", sum(not each.is_damaged and each.verifiable for each in truth.values()))
        part.count("checkpoints without a manifest", sum(not each.verifiable for each in truth.values()))
        for folder in part.folder.glob(f"{run.name}*"):
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()


@dataclass(frozen=True, slots=True)
class Case:
    """One damaged run, and the commands on it."""

    part: Part
    run: Path
    done: list[str]
    truth: dict[str, Truth]

    @property
    def newest(self) -> str:
        return step_folders(self.run / "checkpoints")[-1].name

    def check_doctor(self) -> None:
        code, lines = self._tether("doctor", str(self.run))
        for name, truth in self.truth.items():
            said = next((line for line in lines if line[5:].startswith(f"{name}: ")), "")
            if not truth.verifiable:
                if not said.startswith(("FAIL", "note")):
                    self._fail(f"doctor does not say that {name} has no manifest: {said}")
            elif truth.is_damaged:
                missing = [file for file in truth.names if truth.manifest == "whole" and file not in said]
                if not said.startswith(f"FAIL {name}: damaged: ") or missing:
                    self._fail(f"doctor says of {name}, in which {sorted(truth.names)} are damaged: {said}")
            elif said != f"ok   {name}: whole":
                self._fail(f"doctor says of {name}, which is whole: {said}")
        damaged = [name for name, truth in self.truth.items() if truth.is_damaged and truth.verifiable]
        if damaged and code != 1:
            self._fail(f"doctor ends with {code}")
        if self.newest in damaged and f"--resume: stops at {self.newest}" not in lines[-1] and "has no whole checkpoint" not in lines[-1]:
            self._fail(f"doctor says of --resume, whose checkpoint is damaged: {lines[-1]}")

    def check_resume(self) -> None:
        truth = self.truth[self.newest]
        if not truth.is_damaged and truth.verifiable:
            return
        before = self._state()
        code, lines = self._tether("train", "--resume", "--out", str(self.run))
        if truth.verifiable:
            whole = [name for name, other in self.truth.items() if name != BEST and name < self.newest and not other.is_damaged]
            named = not whole or f"{max(whole)} is" in lines[-1] or f"{STATE} is missing" in lines[-1]
            self._check_refusal("--resume", self.newest, code, lines, named=named)
            changed = sorted(path for path, _ in before.items() ^ self._state().items())
            if changed:
                self._fail(f"--resume refused, and changed {', '.join(changed)}")

    def check_eval(self, *, best: bool) -> None:
        name = BEST if best else self.newest
        truth = self.truth[name]
        if not truth.is_damaged and truth.verifiable:
            return
        command = ["eval", str(self.run), "--prompts", "1", "--max-tokens", "4", "--device", "cpu", *(["--best"] if best else [])]
        code, lines = self._tether(*command)
        if truth.verifiable and truth.model_is_damaged:
            self._check_refusal("eval", name, code, lines)

    def _check_refusal(self, what: str, name: str, code: int, lines: list[str], named: bool = True) -> None:
        errors = [line for line in lines if line.startswith("tether: ")]
        right = len(errors) == 1 and str(self.run / "checkpoints" / name) in errors[0] and " is damaged: " in errors[0]
        if code != 1 or not right or not named:
            self._fail(f"{what} with a damaged {name} ends with {code} and says {lines}")
        self.part.count(f"{what} refused")

    def _tether(self, *words: str) -> tuple[int, list[str]]:
        """Exit code and lines of a command; never a traceback, whatever the damage."""
        log = self.run.with_suffix(".log")
        log.unlink(missing_ok=True)
        self.part.count("commands")
        if self.part.counts["commands"] % NEW_PROCESS_EVERY == 1:
            done = subprocess.run([sys.executable, "-m", "tether", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            code, said = done.returncode, done.stdout
            self.part.count("of them in a new process")
        else:
            code = attempt(words, log)
            said = log.read_text()
        if code not in (0, 1, 2) or "Traceback" in said:
            self._fail(f"`tether {' '.join(words)}` ended with {code}: {said[-1000:]}")
        return code, said.splitlines() or [""]

    def _state(self) -> dict[str, tuple[int, int]]:
        """Sizes and times of the run's files, the lock aside."""
        paths = [path for path in self.run.rglob("*") if not path.is_dir() and path.name != "run.lock"]
        return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in paths}

    def _fail(self, what: str) -> None:
        self.part.fail(f"{'; '.join(self.done)}: {what}")
