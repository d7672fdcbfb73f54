"""A checkpoint is whole or absent: failing leaves the earlier ones, old ones make room, and an unreadable one is named."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tether.core.errors import CheckpointError
from tether.training import checkpoint
from tether.training.checkpoint import list_checkpoints, load_state, save_checkpoint


def _save(folder: Path, step: int, tiny: Any, keep: int = 2) -> Path:
    return save_checkpoint(folder, step, tiny.model, tiny.tokenizer, {"note": f"of step {step}"}, keep)


def test_transformers_can_load_it(tmp_path: Path, tiny: Any) -> None:
    path = _save(tmp_path, 7, tiny)
    assert path == tmp_path / "step_000007"
    model = AutoModelForCausalLM.from_pretrained(path / "model")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tiny.model.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(path / "model").encode("<think> Up") == tiny.tokenizer.encode("<think> Up")
    assert load_state(path) == {"step": 7, "note": "of step 7"}


def test_only_the_newest_stay(tmp_path: Path, tiny: Any) -> None:
    for step in (2, 9, 10, 100):
        _save(tmp_path, step, tiny)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000010", "step_000100"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000010", "step_000100"]


def test_a_step_can_be_saved_again(tmp_path: Path, tiny: Any) -> None:
    _save(tmp_path, 1, tiny)
    save_checkpoint(tmp_path, 1, tiny.model, tiny.tokenizer, {"note": "again"}, 2)
    assert load_state(tmp_path / "step_000001")["note"] == "again"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("unexpected pos 64 vs 0: No space left")])
def test_a_full_disk_leaves_the_earlier_one(tmp_path: Path, tiny: Any, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 1, tiny)

    def fail(_state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(checkpoint.torch, "save", fail)
    for step in (1, 2):
        with pytest.raises(
            CheckpointError, match=f"cannot write checkpoint '.*step_00000{step}': .*[Nn]o space left.*go on with --resume"
        ) as caught:
            _save(tmp_path, step, tiny, keep=1)
        assert "\n" not in str(caught.value) and caught.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    monkeypatch.undo()
    assert load_state(tmp_path / "step_000001") == {"step": 1, "note": "of step 1"}


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
    with pytest.raises(
        CheckpointError, match=r"cannot read checkpoint '.*step_000003'.*; move it away to resume from the one before it"
    ) as caught:
        load_state(path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_state_is_no_checkpoint(tmp_path: Path, tiny: Any) -> None:
    _save(tmp_path, 1, tiny)
    (tmp_path / "step_000002" / "model").mkdir(parents=True)
    (tmp_path / ".unfinished-x").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000001"]
