"""Files of tensors in the safetensors format, several at a time, with their sums.

safetensors writes a file in one call that holds Python's lock, so nothing else of the process runs meanwhile, and a sum needs the file read again.
Here the bytes of each tensor go to the file and into the sum piece by piece; both let other threads work, so files are written side by side while
a run trains on. What is saved in another form is brought into it piece by piece, too: a copy of it whole would take new memory, and time to get it.
Readers are those of safetensors.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

CORES = os.cpu_count() or 1
WRITERS, LAST_WRITERS = max(2, min(8, CORES // 2)), max(2, min(16, CORES))
"""Files that are written at the same time while a run trains on, which has the other cores, and once it has ended."""
FILE_BYTES = 2**29
"""About the size of a file, so that the disk works on the first ones while others are written."""
PIECE = 2**23
"""Bytes of a tensor that are written and summed at once."""
SENT = 2**25
"""Bytes after which the disk is to begin with them: else it does nothing until a file is complete, and then the processor waits for it."""
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Entry(NamedTuple):
    """A tensor of a file."""

    dtype: torch.dtype
    shape: torch.Size
    pieces: Callable[[], Iterable[Tensor]]
    """Its numbers in order, made when they are written; each piece may be forgotten before the next."""

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class TensorFile(NamedTuple):
    """A file that is to be written."""

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str] = {}
    forced: bool = True
    """Whether to wait until it is on the disk. Otherwise the system writes it there when it sees fit, half a minute later at the latest on Linux."""


def entry_of(tensor: Tensor) -> Entry:
    """A tensor as it is."""
    return Entry(tensor.dtype, tensor.shape, lambda: pieces_of(tensor))


def pieces_of(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor's numbers in order, flat, in the host's memory."""
    return tensor.detach().cpu().contiguous().flatten().split(max(1, PIECE // tensor.itemsize))


def write_files(files: Sequence[TensorFile], num_writers: int = WRITERS) -> dict[Path, dict[str, Any]]:
    """Write so many files at a time, those that are forced to the disk first, and of these the largest; returns their sums."""
    ordered = sorted(files, key=lambda file: (not file.forced, -sum(entry.nbytes for entry in file.entries.values())))
    with ThreadPoolExecutor(num_writers, thread_name_prefix="tensors") as threads:
        written = [threads.submit(write_file, file) for file in ordered]
    return {file.path: sums.result() for file, sums in zip(ordered, written, strict=True)}


def write_file(file: TensorFile) -> dict[str, Any]:
    """Write one file; returns its size and sha256."""
    ordered = sorted(file.entries.items(), key=lambda item: -item[1].dtype.itemsize)  # each begins where its numbers may
    header: dict[str, Any] = {"__metadata__": dict(file.metadata)} if file.metadata else {}
    end = 0
    for name, entry in ordered:
        begin, end = end, end + entry.nbytes
        header[name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, num_sent = hashlib.sha256(), 0
    with file.path.open("xb") as out:
        for part in (len(text).to_bytes(8, "little"), text):
            out.write(part)
            digest.update(part)
        for _, entry in ordered:
            for piece in entry.pieces():
                content = piece.view(torch.uint8).numpy().data if len(piece) else b""
                out.write(content)
                digest.update(content)
                if file.forced:
                    num_sent = _sent_to_disk(out, num_sent)
        out.flush()
        if file.forced:
            os.fsync(out.fileno())
        return {"bytes": out.tell(), "sha256": digest.hexdigest()}


def _sent_to_disk(out: BufferedWriter, num_sent: int) -> int:
    """Let the system begin to write what a file has got since so many bytes, if that is much; returns how many it was told of."""
    written = out.tell()
    if written - num_sent < SENT or not hasattr(os, "posix_fadvise"):
        return num_sent
    out.flush()
    with suppress(OSError):  # of a file system that takes no advice
        os.posix_fadvise(out.fileno(), num_sent, written - num_sent, os.POSIX_FADV_DONTNEED)
    return written


def shared_out(entries: Mapping[str, Entry], path_of: Callable[[int], Path]) -> list[TensorFile]:
    """Files of about `FILE_BYTES` each for some tensors, in their order; the numbers of files begin with 1."""
    files: list[dict[str, Entry]] = []
    size = FILE_BYTES
    for name, entry in entries.items():
        if size >= FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = entry
        size += entry.nbytes
    return [TensorFile(path_of(number), part) for number, part in enumerate(files, start=1)]
