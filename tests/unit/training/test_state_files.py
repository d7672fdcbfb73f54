"""What resuming needs goes to disk in half the bytes and comes back bit for bit; rounded moments come back within literal bounds."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tether.models import tensor_files
from tether.models.tensor_files import TensorFile, entry_of, write_file, write_files
from tether.runs.checkpoints import file_sum
from tether.training import masters
from tether.training.checkpoint import load_state, save_checkpoint
from tether.training.masters import LowBits, in_bfloat16, joined, low_bits
from tether.training.snapshot import HostMemory
from tether.training.state_files import StateFiles, read_state


def _numbers(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("bits", "low", "exception"),
    [
        (0x3F800000, 0, False),  # 1
        (0x3F800001, 1, False),  # the next one
        (0x3F807FFF, 0x7FFF, False),  # the last that is rounded down
        (0x3F808000, -0x8000, True),  # half-way, rounded down to the even one
        (0x3F818000, -0x8000, False),  # half-way, rounded up to the even one
        (0x3F80FFFF, -1, False),
        (0xBF818001, -0x7FFF, False),  # negative
        (0x80000000, 0, False),  # -0
        (0x00000001, 1, False),  # the smallest
        (0x7F7FFFFF, -1, False),  # the largest, which rounds to infinity
        (0x7F800000, 0, False),
        (0x7FC01234, 0x1234, True),  # no number
    ],
)
def test_the_lower_half_of_a_master_weight(bits: int, low: int, exception: bool) -> None:
    master = _numbers(bits)
    saved = low_bits(master)
    assert saved.low.tolist() == [low] and saved.at.tolist() == [0] * exception
    assert torch.equal(joined(master.bfloat16(), saved).view(torch.int32), master.view(torch.int32))


def test_all_bits_come_back() -> None:
    """A million random patterns, and the weights of a layer."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(-(2**31), 2**31 - 1, (1024, 1024), generator=generator, dtype=torch.int64).to(torch.int32)
    for master in (patterns.view(torch.float32), 0.02 * torch.randn(300, 500, generator=generator)):
        saved = low_bits(master)
        assert torch.equal(joined(master.bfloat16(), saved).view(torch.int32), master.view(torch.int32))
        assert saved.low.shape == master.shape and saved.low.dtype == torch.int16
    assert len(saved.at) < 10  # one of 131,072


def test_moments_are_rounded_as_torch_does_it() -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(1000, 1100, generator=generator) * 10.0 ** torch.randint(-30, 5, (1000, 1100), generator=generator)
    rounded = torch.cat([piece.clone() for piece in in_bfloat16(numbers)]).view(numbers.shape)
    assert torch.equal(rounded, numbers.bfloat16())
    assert ((rounded.float() - numbers).abs() <= numbers.abs() / 256).all()  # and none is zero that was not
    (found,) = in_bfloat16(_numbers(0x3F808000, 0x3F818000, 0))
    assert torch.equal(found, torch.tensor([1.0, 1.015625, 0.0], dtype=torch.bfloat16))


def test_numbers_in_several_pieces_and_in_no_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,500 random patterns and four exceptions in pieces of 1,000, in memory that is used again; an exception is counted through the whole."""
    monkeypatch.setattr(masters, "PIECE", 1000)
    patterns = torch.randint(-(2**31), 2**31 - 1, (50, 50), generator=torch.Generator().manual_seed(2), dtype=torch.int64).to(torch.int32)
    for place in (0, 999, 1000, 2499):
        patterns.view(-1)[place] = 0x3F808000
    master = patterns.view(torch.float32)
    saved = low_bits(master)
    assert {0, 999, 1000, 2499} <= set(saved.at.tolist())
    assert torch.equal(joined(master.bfloat16(), saved).view(torch.int32), patterns)
    finite = torch.nan_to_num(master, nan=1.5)
    assert [len(piece) for piece in in_bfloat16(finite)] == [1000, 1000, 500]
    assert torch.equal(torch.cat([piece.clone() for piece in in_bfloat16(finite)]).view(50, 50), finite.bfloat16())
    nothing = low_bits(torch.empty(0, 3))
    assert nothing.low.shape == (0, 3) and not len(nothing.at) and not list(in_bfloat16(torch.empty(0, 3)))


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6.0).view(2, 3).t(),  # not contiguous
        "b": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "c": torch.tensor(2.5, dtype=torch.bfloat16),
        "d": torch.empty(0, 4),
        "e": torch.tensor([True, False]),
    }
    sums = write_file(TensorFile(tmp_path / "x", {name: entry_of(tensor) for name, tensor in tensors.items()}, {"format": "pt"}))
    found = load_file(tmp_path / "x")
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert sums == file_sum(tmp_path / "x")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice about files")
def test_the_disk_begins_before_a_file_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told of every part once, in order; what a file system says to that does not matter."""
    told: list[tuple[int, int]] = []

    def advise(file: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED and os.fstat(file).st_size == start + length, "all of it has left the process"
        told.append((start, length))
        raise OSError("no advice is taken here")

    monkeypatch.setattr(tensor_files, "PIECE", 1000)
    monkeypatch.setattr(tensor_files, "SENT", 3000)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    tensors = {name: torch.arange(1000.0) for name in "ab"}
    sums = write_file(TensorFile(tmp_path / "x", {name: entry_of(tensor) for name, tensor in tensors.items()}))
    assert [start for start, _ in told] == [0, told[0][1]] and all(3000 <= length < 4000 for _, length in told)
    assert sums == file_sum(tmp_path / "x") and torch.equal(load_file(tmp_path / "x")["b"], tensors["b"])


def test_tensors_are_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into several files, which come back as one state; numbers and texts stay in state.pt."""
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 1000)
    state = {"step": 3, "learner": {"moments": [torch.full((100,), float(n)) for n in range(9)], 0: {"x": "text"}, "none": None}}
    files = StateFiles(tmp_path, state, "float32")
    assert [file.path.name for file in files.files] == [f"state-{number:05d}.safetensors" for number in (1, 2, 3)]
    sums = write_files(files.files)
    files.write_rest()
    assert all(sums[path] == file_sum(path) for path in sums) and (tmp_path / "state.pt").stat().st_size < 5000
    for mapped in (False, True):
        found = read_state(tmp_path, mapped=mapped)
        assert found["step"] == 3 and found["learner"][0] == {"x": "text"} and found["learner"]["none"] is None
        assert [tensor.tolist() for tensor in found["learner"]["moments"]] == [[float(n)] * 100 for n in range(9)]


def test_a_state_without_one_of_its_files_is_refused(tmp_path: Path, tiny: Any) -> None:
    path = save_checkpoint(tmp_path, 1, tiny.model, tiny.tokenizer, {"moments": torch.ones(3)}, 1)
    (path / "state-00001.safetensors").unlink()
    with pytest.raises(Exception, match=r"step_000001' is damaged: state-00001.safetensors is missing"):
        load_state(path)
    (path / "manifest.json").unlink()
    with pytest.raises(Exception, match=r"cannot read checkpoint '.*step_000001': .*moments"):
        load_state(path)


def test_master_weights_are_in_halves_and_moments_as_asked(tmp_path: Path, tiny: Any) -> None:
    master, moment = torch.tensor([1.0 + 2**-20, 1.00390625]), torch.tensor([1.0 + 2**-8, 1e-30])
    state = {"optimizers": {"policy": {"adam": {"state": {0: {"exp_avg": moment, "step": torch.tensor(7.0)}}}, "masters": [master]}}}
    for step, (moments, expected) in enumerate((("float32", moment), ("bfloat16", moment.bfloat16())), start=1):
        path = save_checkpoint(tmp_path, step, tiny.model, tiny.tokenizer, {"learner": state}, 2, None, moments)
        found = load_state(path)["learner"]["optimizers"]["policy"]
        (saved,) = found["masters"]
        assert isinstance(saved, LowBits) and saved.low.tolist() == [8, -0x8000] and saved.at.tolist() == [1]
        assert torch.equal(joined(master.bfloat16(), saved), master)
        assert torch.equal(found["adam"]["state"][0]["exp_avg"], expected) and found["adam"]["state"][0]["exp_avg"].dtype == expected.dtype
        assert found["adam"]["state"][0]["step"].item() == 7


def test_master_weights_are_halved_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of three numbers; exceptions in the first, the second and the last one are counted through the whole tensor."""
    monkeypatch.setattr(tensor_files, "PIECE", 12)
    master = torch.ones(2, 4)
    master.view(-1)[[1, 5, 7]] = 1.00390625  # half-way, rounded down
    files = StateFiles(tmp_path, {"learner": {"masters": [master, torch.empty(0, 3)], "exp_avg": torch.tensor([0.1] * 7)}}, "bfloat16")
    write_files(files.files)
    files.write_rest()
    found = read_state(tmp_path, mapped=False)["learner"]
    saved, nothing = found["masters"]
    assert saved.at.tolist() == [1, 5, 7] and torch.equal(joined(master.bfloat16(), saved), master)
    assert nothing.low.shape == (0, 3) and joined(torch.empty(0, 3, dtype=torch.bfloat16), nothing).shape == (0, 3)
    assert torch.equal(found["exp_avg"], torch.tensor([0.1] * 7).bfloat16())


def test_a_copy_from_a_card_goes_to_registered_memory(gpu: str, tiny: Any) -> None:
    memory = HostMemory(reuse=True)
    memory.prepare([4_000_000, 4_000_000])
    state = {"a": torch.arange(1_000_000, device=gpu, dtype=torch.float32), "b": torch.ones(1_000_000, device=gpu)}
    taken = memory.snapshot(tiny.model, state).state
    assert all(torch.equal(taken[name], state[name].cpu()) and taken[name].is_pinned() for name in state)
