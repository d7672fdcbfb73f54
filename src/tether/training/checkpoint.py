"""Checkpoints: a folder per step that transformers can load, plus the state that resuming needs.

    checkpoints/step_000020/model/      weights as they compute, config and tokenizer in Hugging Face format; for LoRA the adapter; agent.json
    checkpoints/step_000020/state.pt    step, and what the trainer gives: optimiser, critic, monitor; its tensors in state-*.safetensors (state_files.py)
    checkpoints/step_000020/manifest.json   size and sha256 of every file (runs/checkpoints.py), checked when they are read
    checkpoints/best/                   model/ of the step that validated best so far, and its number in best.json: weights, nothing to resume from

A folder is written beside its place, forced to the disk and renamed into it, so a kill, a power cut or a full disk leaves the earlier ones
as they were. Of the last checkpoint of a run that ends, only the weights are forced: the state, which is several times as large, is complete in the
system's cache, which a kill leaves as it is, and nobody waits for the disk. What a kill leaves behind lies in `.unfinished-*` folders, which are
never counted and which `sweep` removes at the next start. Nothing random is stored: every draw follows from the run's seed and the step.

A run calls `save_checkpoint` in a thread of its own (saver.py), with a copy of model and state (snapshot.py). All files are written side by side, and
summed while they are written (models/tensor_files.py).
"""

import errno
import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from tether.core.errors import CheckpointError, ModelUnavailable
from tether.core.temporary import temporary_folder
from tether.models.load import LoadedModel, load_model
from tether.models.lora import model_files
from tether.models.tensor_files import LAST_WRITERS, WRITERS, TensorFile, write_files
from tether.models.vision import save_processor
from tether.runs.checkpoints import (
    BEST,
    BEST_FACTS,
    MODEL,
    STATE,
    STATE_FILES,
    best_checkpoint,
    check_checkpoint,
    checkpoint_name,
    file_sum,
    link_folder,
    list_checkpoints,
    newest_checkpoint,
    write_manifest,
    written_sums,
)
from tether.runs.store import RunStore
from tether.training.agent import Agent
from tether.training.distributed.ranks import Ranks
from tether.training.learner import Learner
from tether.training.state_files import STATE_TENSORS, StateFiles, read_state

_UNFINISHED, _REPLACED = ".unfinished-", "replaced"
_NOT_FULL = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE)
"""Errors of which more space cures none; others may be a full disk in the words of a library."""


class SavesTokenizer(Protocol):
    """A tokenizer, or its files."""

    def save_pretrained(self, save_directory: Path) -> object: ...


class TokenizerFiles:
    """What a tokenizer writes, as it was when this was made. A thread of its own can write it: two must not share a tokenizer, and to copy one takes
    five times as long."""

    def __init__(self, tokenizer: SavesTokenizer, folder: Path) -> None:
        """`folder`: of the checkpoints."""
        with _failing_to(f"write the tokenizer's files to '{folder}'"), temporary_folder(f"{_UNFINISHED}tokenizer-", folder) as place:
            _save_tokenizer(tokenizer, place)
            self._files = {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}

    def save_pretrained(self, save_directory: Path) -> None:
        """Write the files."""
        for name, content in self._files.items():
            (save_directory / name).parent.mkdir(parents=True, exist_ok=True)
            (save_directory / name).write_bytes(content)


def save_checkpoint(
    folder: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: SavesTokenizer,
    state: dict[str, Any],
    keep: int,
    agent: Agent | None = None,
    moments: str = "float32",
    *,
    last: bool = False,
) -> Path:
    """Write the checkpoint of a step and delete all but the `keep` newest; `moments` as in the settings. `last`: the run ends with it."""
    target = folder / checkpoint_name(step)
    with _written_beside(target, unforced=STATE_TENSORS if last else "") as draft:
        draft.mkdir()
        kept = StateFiles(draft, {"step": step, **state}, moments)
        tensors = (file._replace(forced=not last) for file in kept.files)
        files = [*_begun_model(draft / MODEL, model, tokenizer, agent), *tensors]
        sums = write_files(files, LAST_WRITERS if last else WRITERS)
        kept.write_rest()
        _write_manifest(draft, step, sums)
    with _failing_to(f"delete checkpoints older than '{target}'"):
        for old in list_checkpoints(folder)[:-keep]:
            unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))  # a kill on the way leaves no half of it in its place
            old.rename(unfinished / old.name)
            shutil.rmtree(unfinished)
    return target


def _write_manifest(draft: Path, step: int, known: Mapping[Path, dict[str, Any]]) -> None:
    """Write the manifest of all files of a folder; sums of those that are known already are not taken again."""
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    write_manifest(draft, step, {str(path.relative_to(draft)): known[path] if path in known else file_sum(path) for path in files})


def write_model(folder: Path, model: PreTrainedModel, tokenizer: SavesTokenizer, agent: Agent | None = None) -> None:
    """Write a folder that `load_model` reads, with how its model is asked; where that fails, whatever the libraries say, it is an OSError."""
    write_files(_begun_model(folder, model, tokenizer, agent))


def _begun_model(folder: Path, model: PreTrainedModel, tokenizer: SavesTokenizer, agent: Agent | None) -> list[TensorFile]:
    """Write such a folder but for the weights; returns their files."""
    files = model_files(model, folder)
    _save_tokenizer(tokenizer, folder)
    save_processor(model, folder)
    if agent is not None:
        agent.write(folder)
    return files


def _save_tokenizer(tokenizer: SavesTokenizer, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library has no narrower word for a full disk
        raise _system_error(error) from error


def _system_error(error: Exception) -> OSError:
    """What a library written in Rust says of a system error, with its number: whoever words it tells a full disk from others by that."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))


def is_best(folder: Path, step: int, success: float) -> bool:
    """Whether the weights of a step are to be kept as the best, and are not yet.

    The best are the earliest weights with the highest success, in whatever order steps are reported and however often: a resumed run may report one
    again.
    """
    best = best_checkpoint(folder)
    return best is None or (best.success, -best.step) < (success, -step)


def keep_best(folder: Path, step: int, success: float) -> None:
    """Keep the weights of a step's checkpoint as the best, if they are."""
    if not is_best(folder, step, success):
        return
    source = folder / checkpoint_name(step)
    if source not in list_checkpoints(folder):
        raise CheckpointError(f"cannot keep step {step} as the best: there is no checkpoint '{source}'")

    def link(draft: Path) -> Mapping[Path, dict[str, Any]]:
        link_folder(source / MODEL, draft / MODEL)
        return {draft / name: entry for name, entry in written_sums(source).items()}

    _write_best(folder, step, success, link)


def save_best(
    folder: Path, step: int, success: float, model: PreTrainedModel, tokenizer: SavesTokenizer, agent: Agent | None = None
) -> None:
    """Write the weights of a step that has no checkpoint as the best, if they are."""
    if is_best(folder, step, success):
        _write_best(folder, step, success, lambda draft: write_files(_begun_model(draft / MODEL, model, tokenizer, agent)))


def _write_best(folder: Path, step: int, success: float, put: Callable[[Path], Mapping[Path, dict[str, Any]]]) -> None:
    with _written_beside(folder / BEST) as draft:
        draft.mkdir()
        _write_manifest(draft, step, put(draft))
        (draft / BEST_FACTS).write_text(json.dumps({"step": step, "success": success}) + "\n", encoding="utf-8")


def unfinished_bytes(folder: Path) -> int:
    """How much of a checkpoint that is being written is there by now."""
    found = 0
    for path in folder.glob(f"{_UNFINISHED}*/**/*"):
        try:
            found += path.stat().st_size
        except OSError:  # it was moved to its place a moment ago
            continue
    return found


def sweep(folder: Path) -> None:
    """Clear away what a kill left unfinished. Only for the run's own trainer, before it looks for checkpoints.

    A kill may have come when the old folder had stood aside and the new one was not yet in its place: that last move is made now.
    """
    with _failing_to(f"clear unfinished checkpoints away from '{folder}'"):
        for unfinished in folder.glob(f"{_UNFINISHED}*"):
            if (unfinished / _REPLACED).exists():
                for draft in unfinished.iterdir():
                    if draft.name != _REPLACED and not (folder / draft.name).exists():
                        draft.rename(folder / draft.name)
            shutil.rmtree(unfinished)


def load_checkpoint(checkpoint: Path, device: str | None, dtype: str | None = None) -> LoadedModel:
    """The model of a checkpoint, found whole; `device` and `dtype` as in `load_model`."""
    try:
        return load_model(str(checkpoint / MODEL), device=device, dtype=dtype)
    except ModelUnavailable as error:
        raise CheckpointError(f"{error}; or move '{checkpoint}' away to resume from the one before it") from error


def load_state(checkpoint: Path, *, mapped: bool = False, verified: bool = False) -> dict[str, Any]:
    """The resuming state of a checkpoint; `mapped` reads of each tensor what is used: ranks of one machine share the file's pages.

    `verified`: the file was found whole by another rank.
    """
    if not verified:
        check_checkpoint(checkpoint, only=STATE_FILES)
    try:
        return read_state(checkpoint, mapped=mapped)
    except pickle.UnpicklingError as error:  # torch's own words advise to load it unsafely
        raise CheckpointError(
            f"cannot read checkpoint '{checkpoint}': {STATE} holds something else than numbers, texts and tensors, so Tether did not write it; "
            "nothing of it was run; move it away to resume from the one before it"
        ) from error
    except (OSError, RuntimeError, EOFError, LookupError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read checkpoint '{checkpoint}': {_one_line(error)}; move it away to resume from the one before it"
        ) from error


class RunState(NamedTuple):
    """What a checkpoint holds besides the policy."""

    step: int
    learner: dict[str, Any]
    monitor: dict[str, Any]
    alarm_actions: dict[str, Any]
    batches_ahead: str | None
    """Batches that had been sampled for the next steps, of a run with asynchronous rollouts."""
    prompt_memory: dict[str, Any] | None
    """Of a run with one."""


def last_checkpoint(store: RunStore) -> Path | None:
    """The checkpoint to continue from, found whole, once what a kill left unfinished is cleared away."""
    store.lock()  # before anything is cleared away: it could be another process's
    sweep(store.checkpoints)
    checkpoint = newest_checkpoint(store.checkpoints)
    if checkpoint is not None:
        check_checkpoint(checkpoint)
    return checkpoint


def restore(checkpoint: Path, ranks: Ranks) -> RunState:
    """The state of everything but the policy, which is built from the checkpoint. The first rank verifies it for all."""
    saved = load_state(checkpoint, mapped=ranks.size > 1, verified=ranks.rank > 0)
    if "reactions" in saved:  # the name that tether 0.1 wrote
        saved.setdefault("alarm_actions", saved["reactions"])
    if missing := sorted({"step", "learner", "monitor", "alarm_actions"} - saved.keys()):
        raise CheckpointError(
            f"checkpoint '{checkpoint}' holds no state of {', '.join(missing)}: another version of tether wrote it; resume with that version"
        )
    always = saved["learner"], saved["monitor"], saved["alarm_actions"]
    return RunState(int(saved["step"]), *always, saved.get("batches_ahead"), saved.get("prompt_memory"))


@contextmanager
def fitting(checkpoint: Path) -> Iterator[None]:
    """A block that gives the parts of a run their state of a checkpoint; one that does not fit them is said."""
    try:
        yield
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"checkpoint '{checkpoint}' does not fit this run: {error}; resume with the config it was made by") from error


def rollback(checkpoint: Path, learner: Learner) -> None:
    """Put the weights, optimiser state and critic of an earlier step in place of the present ones."""

    def read() -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in load_checkpoint(checkpoint, "cpu").model.named_parameters()}

    policy, ranks = learner.policy, learner.ranks
    if policy.divided is not None:
        policy.divided.load(ranks.barrier(lambda: read() if ranks.rank == 0 else None))
    else:
        saved = read()
        with torch.no_grad():  # fp32 master weights of rounded parameters come back with the optimiser
            for name, parameter in policy.module.named_parameters():
                parameter.copy_(saved[name])
    learner.restore(restore(checkpoint, ranks).learner)


@contextmanager
def _written_beside(target: Path, unforced: str = "") -> Iterator[Path]:
    """A place to write a folder in, which becomes `target` at the end of the block; where anything fails, `target` stays as it was.

    `unforced`: the pattern of files that need not be on the disk by then.
    """
    unfinished: Path | None = None
    with _failing_to(f"write checkpoint '{target}'"):
        try:
            unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=target.parent))
            draft = unfinished / target.name
            yield draft
            _force_to_disk(draft, set(draft.glob(unforced)) if unforced else set())
            _move(draft, target, unfinished / _REPLACED)
            _force_folder(target.parent)
        finally:
            if unfinished is not None:
                shutil.rmtree(unfinished, ignore_errors=True)


def _move(draft: Path, target: Path, aside: Path) -> None:
    """Rename a folder to its place; one that is there already stands aside, and comes back if that fails or is interrupted."""
    try:
        if target.exists():
            target.rename(aside)
        draft.rename(target)
    finally:
        if aside.exists() and not target.exists():
            aside.rename(target)


@contextmanager
def _failing_to(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        number = error.errno if isinstance(error, OSError) else None
        remedy = "check the disk and the folder's permissions" if number in _NOT_FULL else "free some space"
        raise CheckpointError(
            f"cannot {what}: {_one_line(error)}; earlier checkpoints and records are untouched, {remedy} and continue with --resume"
        ) from error


def _force_to_disk(written: Path, but: Set[Path]) -> None:
    """Make a folder's contents outlive a power cut: a rename can reach the disk before the data it names."""
    for path in (*sorted(set(written.rglob("*")) - but), written):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _force_folder(path)


def _force_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder, and need not
            raise
    finally:
        os.close(handle)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
