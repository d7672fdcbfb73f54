"""A checkpoint is whole or absent: failing leaves the earlier ones, old ones make room, the best stays, and an unreadable one is named."""

import errno
import hashlib
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tether.core.errors import CheckpointError
from tether.models import lora
from tether.models.load import load_model
from tether.runs.checkpoints import Best, best_checkpoint, check_checkpoint, damage, find_checkpoint, list_checkpoints, newest_checkpoint
from tether.training import checkpoint
from tether.training.checkpoint import TokenizerFiles, is_best, keep_best, load_checkpoint, load_state, save_checkpoint, sweep


class Killed(BaseException):
    """Ends a write as a kill would: nothing after it runs, but for what the test calls."""


def _save(folder: Path, step: int, tiny: Any, keep: int = 2, note: str | None = None, **given: Any) -> Path:
    return save_checkpoint(
        folder, step, tiny.model, tiny.tokenizer, {"note": note or f"of step {step}", **given.pop("state", {})}, keep, **given
    )


def _stub(folder: Path, step: int, note: str = "") -> Path:
    """A checkpoint's shape, without a model."""
    path = folder / f"step_{step:06d}"
    (path / "model").mkdir(parents=True)
    (path / "model" / "config.json").write_text(f"{note} weights of {step}")
    torch.save({"step": step}, path / "state.pt")
    return path


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool]) -> None:
    """Stop before the first call for which `when` holds, and at every one after it. Nor is anything deleted: a killed process cleans nothing."""
    real, dead = getattr(owner, name), False

    def stop(*args: Any, **kwargs: Any) -> Any:
        nonlocal dead
        if dead or when(*args):
            dead = True
            monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, stop)


def test_transformers_can_load_it(tmp_path: Path, tiny: Any) -> None:
    path = _save(tmp_path, 7, tiny)
    assert path == tmp_path / "step_000007"
    model = AutoModelForCausalLM.from_pretrained(path / "model")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tiny.model.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(path / "model").encode("<think> Up") == tiny.tokenizer.encode("<think> Up")
    assert load_state(path) == {"step": 7, "note": "of step 7"}


def test_a_tokenizer_is_kept_as_its_files(tmp_path: Path, tiny: Any) -> None:
    """Byte for byte what it writes, nothing else is left behind; a disk that refuses is a line."""
    (tmp_path / "checkpoints").mkdir()
    kept = TokenizerFiles(tiny.tokenizer, tmp_path / "checkpoints")
    assert not list((tmp_path / "checkpoints").iterdir())
    for name, writer in (("own", tiny.tokenizer), ("kept", kept)):
        (tmp_path / name).mkdir()
        writer.save_pretrained(tmp_path / name)
    contents = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*")} for folder in (tmp_path / "own", tmp_path / "kept")
    ]
    assert contents[0] == contents[1] and contents[0]

    class Full:
        def save_pretrained(self, save_directory: Path) -> None:
            raise RuntimeError("No space left on device (os error 28)")  # as tokenizers' library says it

    with pytest.raises(CheckpointError, match=r"cannot write the tokenizer's files .*No space left on device; .*free some space"):
        TokenizerFiles(Full(), tmp_path / "checkpoints")


def test_a_large_model_is_in_several_files(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "MODEL_FILE_BYTES", 2_000_000)
    path = _save(tmp_path, 7, tiny)
    assert len(list((path / "model").glob("model-*.safetensors"))) > 2 and (path / "model" / "model.safetensors.index.json").is_file()
    loaded = load_checkpoint(path, "cpu").model
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), tiny.model.parameters(), strict=True))


def test_only_the_newest_stay(tmp_path: Path, tiny: Any) -> None:
    for step in (2, 9, 10, 100):
        _save(tmp_path, step, tiny)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000010", "step_000100"]
    assert _names(tmp_path) == ["step_000010", "step_000100"]


def test_newest_is_by_number(tmp_path: Path) -> None:
    for step in (1_000_000, 999_999, 20):
        _stub(tmp_path, step)
    (tmp_path / "step_copy").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000020", "step_999999", "step_1000000"]


def test_a_step_can_be_saved_again(tmp_path: Path, tiny: Any) -> None:
    _save(tmp_path, 1, tiny)
    _save(tmp_path, 1, tiny, note="again")
    assert load_state(tmp_path / "step_000001")["note"] == "again"
    assert _names(tmp_path) == ["step_000001"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("unexpected pos 64 vs 0: No space left")])
def test_a_full_disk_leaves_the_earlier_one(tmp_path: Path, tiny: Any, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 1, tiny)

    def fail(_state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(checkpoint.torch, "save", fail)
    for step in (1, 2):
        with pytest.raises(
            CheckpointError, match=f"cannot write checkpoint '.*step_00000{step}': .*[Nn]o space left.*continue with --resume"
        ) as caught:
            _save(tmp_path, step, tiny, keep=1)
        assert "\n" not in str(caught.value) and caught.value.exit_code == 1
    assert _names(tmp_path) == ["step_000001"]
    monkeypatch.undo()
    assert load_state(tmp_path / "step_000001") == {"step": 1, "note": "of step 1"}


@pytest.mark.parametrize("limit", [64, 100_000, 3_000_000])
def test_no_file_larger_than_the_disk(tmp_path: Path, tiny: Any, limit: int) -> None:
    """The system itself refuses to write on: in config.json, in the weights, in the state."""
    _save(tmp_path, 1, tiny)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"cannot write checkpoint '.*step_000002': .*; earlier checkpoints and records are untouched"
        ):
            save_checkpoint(tmp_path, 2, tiny.model, tiny.tokenizer, {"moments": torch.zeros(1_000_000)}, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _names(tmp_path) == ["step_000001"]


def test_a_tokenizer_that_cannot_be_written(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise Exception("No space left on device (os error 28)")  # the tokenizers library raises no more than that

    monkeypatch.setattr(tiny.tokenizer, "save_pretrained", fail)
    with pytest.raises(
        CheckpointError, match=r"cannot write checkpoint '.*step_000001': \[Errno 28\] No space left on device.*free some space"
    ):
        _save(tmp_path, 1, tiny)
    assert _names(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "said"), [(OSError(errno.EIO, "Input/output error"), CheckpointError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_where_the_last_move_fails_the_old_one_comes_back(
    tmp_path: Path, tiny: Any, error: BaseException, said: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, 1, tiny)
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "step_000001" and target.parent == tmp_path:
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(said):
        _save(tmp_path, 1, tiny, note="again")
    assert _names(tmp_path) == ["step_000001"]
    assert load_state(tmp_path / "step_000001")["note"] == "of step 1"


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "zip of nothing"])
def test_an_unreadable_state_is_named(tmp_path: Path, tiny: Any, damage: str) -> None:
    path = _save(tmp_path, 3, tiny)
    whole = (path / "state.pt").read_bytes()
    damaged = {
        "empty": b"",
        "text": b"hello, this is no checkpoint",
        "cut": whole[: len(whole) // 2],
        "zip of nothing": b"PK\x05\x06" + bytes(18),
    }
    (path / "state.pt").write_bytes(damaged[damage])
    with pytest.raises(CheckpointError, match=r"checkpoint '.*step_000003' is damaged: state.pt has .* bytes instead of") as caught:
        load_state(path)
    assert "\n" not in str(caught.value)
    (path / "manifest.json").unlink()  # as of an older version
    with pytest.raises(
        CheckpointError, match=r"cannot read checkpoint '.*step_000003'.*; move it away to resume from the one before it"
    ) as caught:
        load_state(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_torn_model_is_named(tmp_path: Path, tiny: Any, share: float) -> None:
    path = _save(tmp_path, 3, tiny)
    weights = path / "model" / "model.safetensors"
    os.truncate(weights, int(weights.stat().st_size * share))
    with pytest.raises(CheckpointError, match=r"checkpoint '.*step_000003' is damaged: model/model.safetensors has .* bytes instead of"):
        load_checkpoint(path, "cpu")
    (path / "manifest.json").unlink()  # as of an older version
    with pytest.raises(
        CheckpointError, match=r"'.*step_000003/model'.*; or move '.*step_000003' away to resume from the one before it"
    ) as caught:
        load_checkpoint(path, "cpu")
    assert "\n" not in str(caught.value)


def test_a_folder_without_state_is_no_checkpoint(tmp_path: Path) -> None:
    _stub(tmp_path, 1)
    (tmp_path / "step_000002" / "model").mkdir(parents=True)
    (tmp_path / ".unfinished-x").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000001"]


def test_a_newest_folder_that_lost_its_state_is_not_passed_over(tmp_path: Path) -> None:
    _stub(tmp_path, 1)
    (_stub(tmp_path, 2) / "state.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"step_000002' is damaged: state.pt is missing; step_000001 is there; move '.*step_000002' away"
    ):
        newest_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"state.pt is missing"):
        find_checkpoint(tmp_path)
    shutil.rmtree(tmp_path / "step_000002")
    assert find_checkpoint(tmp_path) == (tmp_path / "step_000001", 1)


@pytest.mark.parametrize("chosen", [{}, {"best": True}, {"step": 2}], ids=["newest", "best", "of a step"])
def test_a_checkpoint_that_lost_its_model_is_damaged(tmp_path: Path, chosen: dict[str, Any]) -> None:
    checkpoint = _stub(tmp_path, 2)
    shutil.copytree(checkpoint, tmp_path / "best")
    (tmp_path / "best" / "best.json").write_text('{"step": 2, "success": 0.5}')
    name = "best" if chosen.get("best") else "step_000002"
    assert find_checkpoint(tmp_path, **chosen) == (tmp_path / name, 2)
    shutil.rmtree(tmp_path / name / "model")
    with pytest.raises(CheckpointError, match=f"{name}' is damaged: model is missing; `tether doctor .*` says which checkpoint is whole"):
        find_checkpoint(tmp_path, **chosen)


# ------------------------------------------------------------------------------------------------------------ the manifest


def _flip(path: Path, share: float) -> None:
    """One bit, the size and the time of the file as they were: what a disk does."""
    stat, place = path.stat(), int(path.stat().st_size * share)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_the_manifest_holds_the_sums_of_every_file(tmp_path: Path, tiny: Any) -> None:
    path = _save(tmp_path, 7, tiny)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["version"], manifest["step"]) == (1, 7)
    files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"}
    assert {"state.pt", "model/model.safetensors", "model/config.json", "model/tokenizer.json"} <= files.keys()
    expected = {name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()}
    assert manifest["files"] == expected
    assert damage(path) == []


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("name", ["state.pt", "model/model.safetensors"])
def test_a_flipped_bit_is_an_error_that_names_the_file_and_what_is_whole(tmp_path: Path, tiny: Any, name: str, share: float) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, tiny.model, tiny.tokenizer, {"moments": torch.arange(1000.0)}, keep=3)
    _flip(tmp_path / "step_000003" / name, share)
    _flip(tmp_path / "step_000002" / "model" / "config.json", share)
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(tmp_path / "step_000003")
    said = str(caught.value)
    assert (
        f"step_000003' is damaged: {name} is not what was written (its sha256 differs); step_000001 is whole; move '" in said
        and "\n" not in said
    )
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load_state(tmp_path / "step_000003") if name == "state.pt" else load_checkpoint(tmp_path / "step_000003", "cpu")
    with pytest.raises(CheckpointError, match=r"step_000002' is damaged: model/config.json"):
        load_model(str(tmp_path / "step_000002" / "model"), device="cpu")  # by any door
    assert load_state(tmp_path / "step_000001")["step"] == 1


def test_missing_and_extra_files_are_errors(tmp_path: Path, tiny: Any) -> None:
    path = _save(tmp_path, 1, tiny)
    (path / "model" / "tokenizer.json").unlink()
    (path / "model" / "pytorch_model.bin").write_bytes(b"x")
    (path / "model" / "link.json").symlink_to("/etc/hostname")
    assert damage(path) == [
        "model/tokenizer.json is missing",
        "model/link.json does not belong to it",
        "model/pytorch_model.bin does not belong to it",
    ]
    with pytest.raises(CheckpointError, match=r"model/tokenizer.json is missing; .*; no other checkpoint of this run is whole"):
        load_checkpoint(path, "cpu")
    assert load_state(path)["step"] == 1  # that file is whole


@pytest.mark.parametrize(("name", "said"), [("adapter_config.json", "does not belong to it"), ("config.json", "is missing")])
def test_damage_is_found_before_a_file_is_read(tmp_path: Path, tiny: Any, name: str, said: str) -> None:
    """What a file says, or that it is not there, would be taken for the fault of whoever named the folder."""
    path = _save(tmp_path, 1, tiny) / "model" / name
    path.unlink() if path.exists() else path.write_bytes(b"\xd0\x00")
    with pytest.raises(CheckpointError, match=f"step_000001' is damaged: model/{name} {said}"):
        load_checkpoint(tmp_path / "step_000001", "cpu")


def test_a_manifest_that_cannot_be_read(tmp_path: Path, tiny: Any) -> None:
    path = _save(tmp_path, 1, tiny)
    for content in ("", "[]", "{", '{"version": 1}', '{"version": 9, "files": {}}', '{"version": 1, "files": {"a": 3}}'):
        (path / "manifest.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"step_000001' is damaged: manifest.json cannot be read"):
            load_state(path)
    (path / "manifest.json").unlink()
    for put in (Path.mkdir, lambda place: place.symlink_to(tmp_path / "nowhere")):  # not as if there had never been one
        put(path / "manifest.json")
        with pytest.raises(CheckpointError, match=r"step_000001' is damaged: manifest.json cannot be read"):
            check_checkpoint(path)
        (path / "manifest.json").rmdir() if put is Path.mkdir else (path / "manifest.json").unlink()


def _with_tensors(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(path / "model" / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model" / "model.safetensors", {"format": "pt"})


def test_of_an_older_checkpoint_tensors_are_counted(tmp_path: Path, tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Without a manifest: missing weights would be drawn at random, extra ones passed over."""
    path = _save(tmp_path, 1, tiny)
    (path / "manifest.json").unlink()
    load_checkpoint(path, "cpu")
    assert "has no manifest (it is older than manifests, or it was removed): not verified" in caplog.text
    name = "model.layers.1.mlp.up_proj.weight"
    removed: list[Any] = []
    _with_tensors(path, lambda tensors: removed.append(tensors.pop(name)))
    with pytest.raises(CheckpointError, match=rf"do not hold its weights: {re.escape(name)} is missing"):
        load_checkpoint(path, "cpu")
    _with_tensors(path, lambda tensors: tensors.update({name: removed[0], "stowaway": torch.ones(2)}))
    with pytest.raises(CheckpointError, match="do not hold its weights: stowaway is one too many"):
        load_checkpoint(path, "cpu")
    _with_tensors(path, lambda tensors: (tensors.pop("stowaway"), tensors.update({name: torch.ones(3, 2)})))
    with pytest.raises(CheckpointError):
        load_checkpoint(path, "cpu")


def test_the_best_is_verified_too(tmp_path: Path, tiny: Any) -> None:
    _save(tmp_path, 1, tiny)
    _save(tmp_path, 2, tiny)
    keep_best(tmp_path, 1, 0.5)
    assert damage(tmp_path / "best") == []
    weights = tmp_path / "best" / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()  # the numbered one holds the same file
    weights.write_bytes(content[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"best' is damaged: model/model.safetensors is not what was written .*step_000002 is whole"):
        load_model(str(tmp_path / "best" / "model"), device="cpu")


class _Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("payload",)


def test_a_pickled_file_is_refused_without_advice_to_load_it(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = _save(tmp_path, 1, tiny)
    (path / "manifest.json").unlink()
    torch.save({"step": 1, "learner": _Payload()}, path / "state.pt")
    with pytest.raises(CheckpointError, match=r"holds something else than numbers, texts and tensors.*nothing of it was run") as caught:
        load_state(path)
    (path / "model" / "model.safetensors").unlink()
    torch.save({"lm_head.weight": _Payload()}, path / "model" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="is pickled and holds something else than weights; nothing of it was run") as model:
        load_checkpoint(path, "cpu")
    for said in (str(caught.value), str(model.value)):
        assert not re.search("weights_only|trust|re-running|allowlist|unsafe", said)
    assert not (tmp_path / "payload").exists()


# ------------------------------------------------------------------------------------------------------------------ kills


def test_killed_while_writing(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 1, tiny)
    _kill_at(monkeypatch, checkpoint.torch, "save", lambda state, path: bool(path.write_bytes(b"half")))
    with pytest.raises(Killed):
        _save(tmp_path, 2, tiny, keep=1)
    monkeypatch.undo()
    assert len(_names(tmp_path)) == 2 and _names(tmp_path)[0].startswith(".unfinished-")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000001"]
    sweep(tmp_path)
    assert _names(tmp_path) == ["step_000001"]
    assert load_state(tmp_path / "step_000001")["note"] == "of step 1"


@pytest.mark.parametrize("target", ["step_000001", "best"])
def test_killed_between_the_two_moves(tmp_path: Path, target: str, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old folder stands aside, the new one is not in its place: the next start makes the last move."""
    _save(tmp_path, 1, tiny)
    keep_best(tmp_path, 1, 0.25)
    _save(tmp_path, 2, tiny)
    _kill_at(monkeypatch, Path, "rename", lambda path, to: to == tmp_path / target and path.parent != tmp_path)
    with pytest.raises(Killed):
        keep_best(tmp_path, 2, 0.5) if target == "best" else _save(tmp_path, 1, tiny, note="again")
    monkeypatch.undo()
    assert target not in _names(tmp_path)
    sweep(tmp_path)
    assert _names(tmp_path) == ["best", "step_000001", "step_000002"]
    assert best_checkpoint(tmp_path) == (Best(2, 0.5) if target == "best" else Best(1, 0.25))
    assert load_state(tmp_path / "step_000001")["note"] == ("of step 1" if target == "best" else "again")


def test_killed_after_the_last_move(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 1, tiny)
    _kill_at(monkeypatch, checkpoint, "_force_folder", lambda folder: folder == tmp_path)
    with pytest.raises(Killed):
        _save(tmp_path, 1, tiny, note="again")
    monkeypatch.undo()
    sweep(tmp_path)
    assert _names(tmp_path) == ["step_000001"]
    assert load_state(tmp_path / "step_000001")["note"] == "again"


def test_killed_while_deleting(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old checkpoint is in its place, whole, or gone."""
    _stub(tmp_path, 1)
    _stub(tmp_path, 2)
    _kill_at(monkeypatch, shutil, "rmtree", lambda path: bool(list(path.glob("step_*"))))
    with pytest.raises(Killed):
        _save(tmp_path, 3, tiny, keep=1)
    monkeypatch.undo()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000002", "step_000003"]
    sweep(tmp_path)
    assert _names(tmp_path) == ["step_000002", "step_000003"]


def test_a_sweep_replaces_nothing(tmp_path: Path) -> None:
    _stub(tmp_path, 1, "the place of the")
    unfinished = tmp_path / ".unfinished-x"
    _stub(unfinished, 1, "other")
    (unfinished / "replaced").mkdir()
    sweep(tmp_path)
    assert _names(tmp_path) == ["step_000001"]
    assert (tmp_path / "step_000001" / "model" / "config.json").read_text() == "the place of the weights of 1"


def test_a_sweep_that_cannot_sweep_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".unfinished-x").mkdir()

    def fail(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(CheckpointError, match=r"cannot clear unfinished checkpoints away .*Permission denied"):
        sweep(tmp_path)


def test_everything_is_on_the_disk_before_the_rename(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the folder that holds the new name after it."""
    events: list[Any] = []
    rename = Path.rename
    monkeypatch.setattr(os, "fsync", lambda handle: events.append(os.fstat(handle).st_ino))
    monkeypatch.setattr(Path, "rename", lambda path, target: (events.append("rename"), rename(path, target))[1])
    path = _save(tmp_path, 1, tiny)
    before = set(events[: events.index("rename")])
    assert {inner.stat().st_ino for inner in (path, *path.rglob("*"))} == before
    assert events[events.index("rename") + 1 :] == [tmp_path.stat().st_ino]


def test_of_the_last_checkpoint_the_state_is_left_to_the_system(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights and what names them are on the disk before the rename; the tensors of the state nobody waits for."""
    forced: list[int] = []
    rename = Path.rename
    monkeypatch.setattr(os, "fsync", lambda handle: forced.append(os.fstat(handle).st_ino))
    monkeypatch.setattr(Path, "rename", lambda path, target: (forced.append(-1), rename(path, target))[1])
    path = _save(tmp_path, 1, tiny, state={"moment": torch.ones(3)}, last=True)
    left = {inner for inner in path.rglob("*") if inner.stat().st_ino not in forced[: forced.index(-1)]}
    assert left == set(path.glob("state-*.safetensors")) and left
    assert damage(path) == [] and load_state(path)["step"] == 1


def test_a_file_system_that_cannot_sync_folders_will_do(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: int) -> None:
        def fsync(handle: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{handle}") or os.path.isdir(f"/dev/fd/{handle}"):
                raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", fsync)

    refuse(errno.EINVAL)
    assert load_state(_save(tmp_path, 1, tiny))["step"] == 1
    refuse(errno.EIO)
    with pytest.raises(CheckpointError, match=os.strerror(errno.EIO)):
        _save(tmp_path, 2, tiny)


# ------------------------------------------------------------------------------------------------------------------- best


def test_the_best_survives_retention(tmp_path: Path, tiny: Any) -> None:
    for step, success in ((1, 0.25), (2, 0.75), (3, 0.5)):
        _save(tmp_path, step, tiny, keep=1)
        assert is_best(tmp_path, step, success) == (step < 3)
        keep_best(tmp_path, step, success)
    assert _names(tmp_path) == ["best", "step_000003"]
    assert json.loads((tmp_path / "best" / "best.json").read_text()) == {"step": 2, "success": 0.75}
    assert _names(tmp_path / "best") == ["best.json", "manifest.json", "model"] and damage(tmp_path / "best") == []
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "best" / "model").num_parameters() == tiny.model.num_parameters()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000003"]


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (4, 3, 2, 1), (2, 2, 4, 3, 1, 3, 2)])
def test_the_earliest_of_equals_is_the_best_in_whatever_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    success = {1: 0.25, 2: 0.5, 3: 0.5, 4: 0.0}
    for step in success:
        _stub(tmp_path, step)
    for step in order:
        keep_best(tmp_path, step, success[step])
    assert best_checkpoint(tmp_path) == Best(2, 0.5)
    assert (tmp_path / "best" / "model" / "config.json").read_text() == " weights of 2"
    assert not is_best(tmp_path, 2, 0.5) and not is_best(tmp_path, 3, 0.5) and is_best(tmp_path, 3, 0.51)


def test_a_run_that_never_succeeds_has_a_best_too(tmp_path: Path) -> None:
    assert best_checkpoint(tmp_path) is None
    _stub(tmp_path, 5)
    keep_best(tmp_path, 5, 0.0)
    assert best_checkpoint(tmp_path) == Best(5, 0.0)


def test_a_step_without_a_checkpoint_cannot_be_the_best(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot keep step 5 as the best: there is no checkpoint '.*step_000005'"):
        keep_best(tmp_path, 5, 0.5)
    assert _names(tmp_path) == []


def test_the_best_costs_no_space_where_files_can_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _stub(tmp_path, 1)
    keep_best(tmp_path, 1, 0.5)
    assert (tmp_path / "best" / "model" / "config.json").samefile(path / "model" / "config.json")

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = _stub(tmp_path, 2)
    keep_best(tmp_path, 2, 0.75)
    assert not (tmp_path / "best" / "model" / "config.json").samefile(path / "model" / "config.json")
    assert (tmp_path / "best" / "model" / "config.json").read_text() == " weights of 2"


def test_a_full_disk_leaves_the_earlier_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stub(tmp_path, 1)
    keep_best(tmp_path, 1, 0.5)
    _stub(tmp_path, 2)

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint '.*best': .*No space left.*continue with --resume"):
        keep_best(tmp_path, 2, 0.75)
    assert best_checkpoint(tmp_path) == Best(1, 0.5)
    assert _names(tmp_path) == ["best", "step_000001", "step_000002"]


@pytest.mark.parametrize("text", ["", "{", '{"step": 3}', "[1]", '{"step": "x", "success": 1}', '{"step": null, "success": 1}'])
def test_a_damaged_note_of_the_best_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "best.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"cannot read '.*best.json': .*; move '.*best' away"):
        best_checkpoint(tmp_path)
