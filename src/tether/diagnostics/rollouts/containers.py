"""Files to plain records, one at a time: JSON Lines, the same compressed with gzip, a JSON array, parquet, and slime's torch archives.

The first bytes of a file decide its container, not its name. A line is parsed only on request, so a reader can pass over it
unparsed. Memory is bounded by the longest line or element of an array, or by a batch of rows of a parquet file and the pages it lies on; a
torch archive is loaded whole, without running any code of it.
"""

import codecs
import gzip
import importlib.util
import json
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.core.errors import BadInput, MissingDependency
from tether.diagnostics.rollouts.record import BadRecord

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes in all, of all files, compressed as they lie on the disk."""

MAX_LINE_BYTES = 256 * 2**20
"""A longer line is no record: most likely the file is not JSON Lines, and reading on would fill the memory."""

PROGRESS_BYTES = 4 * 2**20
BATCH_ROWS = 64
READ_BYTES = 2**20

HEAD_BYTES = 256

_ZSTD, _PICKLES, _ZIP = b"\x28\xb5\x2f\xfd", (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), b"PK\x03\x04"
_CONVERT = (
    "if you trust the file, convert it: python -c \"import json, torch; d = torch.load('{name}', weights_only=False); "
    "open('{name}.jsonl', 'w').writelines(json.dumps({{**s, 'step': d['rollout_id']}}, default=str) + chr(10) for s in d['samples'])\""
)


@dataclass(frozen=True, slots=True)
class Item:
    """One record of a file, not parsed yet."""

    where: str
    raw: bytes = b""
    """The line; empty for a row of a table."""
    row: Mapping[str, Any] | None = None
    problem: str | None = None
    """Why there is no record here."""
    step: int | None = None
    """The step that the file as a whole belongs to; a record's own step counts more."""
    is_step_named: bool = False
    """The step is only that of a file's or folder's name."""

    def record(self) -> Mapping[str, Any]:
        """The record; BadRecord says why not."""
        if self.problem is not None:
            raise BadRecord(self.problem)
        return self.row if self.row is not None else _parsed(self.raw)


def items(path: Path, report: Callable[[int], None]) -> Iterator[Item]:
    """The records of a file in order.

    Args:
        report: called now and then with the number of bytes read of this file.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error
    if head.startswith(_ZSTD):
        raise BadInput(f"'{path}' is compressed with zstd; decompress it first (zstd -d), or use gzip")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise BadInput(f"'{path}' is UTF-16; convert it first (iconv -f UTF-16 -t UTF-8)")
    if head.startswith(_PICKLES):
        remedy = "convert it to JSON Lines first (for RAGEN: its scripts/convert_to_jsonl.py)"
        raise BadInput(f"'{path}' is a pickle, which can run code when it is loaded; {remedy}")
    if head.startswith(b"PAR1"):
        return _rows(path, report)
    if head.startswith(_ZIP):
        if not is_samples_archive(path):
            raise BadInput(f"'{path}' is a zip archive; unpack it first")
        return _samples(path, report)
    if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        return _elements(path, report)
    return _lines(path, head.startswith(b"\x1f\x8b"), report)


def is_samples_archive(path: Path) -> bool:
    """Whether a zip file is a dump of slime: an archive of torch whose pickle begins with rollout_id and samples. Nothing is loaded for this."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if name is None:
                return False
            with archive.open(name) as file:
                head = file.read(HEAD_BYTES)
    except (OSError, zipfile.BadZipFile):
        return False
    return b"rollout_id" in head and b"samples" in head


def _samples(path: Path, report: Callable[[int], None]) -> Iterator[Item]:
    """The samples of slime's debug rollout data; only plain values and tensors are loaded, never a class."""
    import torch

    try:
        whole = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        cause = str(error).split("Unsupported", 1)[-1].split("\n", 1)[0].strip(" :")[:80]
        raise BadInput(f"'{path}' holds objects that can run code when they are loaded ({cause}); {_CONVERT.format(name=path)}") from error
    except (OSError, RuntimeError, EOFError) as error:
        raise BadInput(f"cannot read '{path}' as an archive of torch: {' '.join(str(error).split())[:120]}; is it whole?") from error
    samples = whole.get("samples")
    step = whole.get("rollout_id")
    if not isinstance(samples, list):
        raise BadInput(f"'{path}' has no list of samples; expected slime's debug rollout data")
    about = {name: value for name, value in whole.items() if isinstance(value, str | dict)}  # may name the model
    for number, sample in enumerate(samples, 1):
        where = f"{path} sample {number}"
        if isinstance(sample, dict):
            yield Item(where, row=about | sample, step=step if isinstance(step, int) else None)
        else:
            yield Item(where, problem=f"holds a {type(sample).__name__}; expected a dictionary")
    report(path.stat().st_size)


def _elements(path: Path, report: Callable[[int], None]) -> Iterator[Item]:
    """The objects of a JSON array, read as a stream."""
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    number = 0
    text, at = "", 0
    try:
        with path.open("rb") as file:
            words = codecs.getincrementaldecoder("utf-8-sig")()

            def more() -> bool:
                nonlocal text, at
                chunk = file.read(max(READ_BYTES, len(text) - at))  # an element that spans many chunks is tried log times, not n times
                text, at = text[at:] + words.decode(chunk, final=not chunk), 0
                report(file.tell())
                return bool(chunk)

            more()
            opened = False
            while True:
                while at < len(text) and text[at] in (" \t\r\n," if opened else " \t\r\n["):
                    opened = opened or text[at] == "["
                    at += 1
                where = f"{path} item {number + 1}"
                if at == len(text):
                    if more():
                        continue
                    yield Item(where, problem="the array is not closed; is the file whole?")
                    return
                if text[at] == "]":
                    return
                if text[at] != "{":
                    yield Item(where, problem=f"begins with {text[at : at + 10]!r}; expected an array of objects")
                    return
                try:
                    record, end = decoder.raw_decode(text, at)
                except _TwiceNamed as error:
                    number, at = number + 1, json.JSONDecoder().raw_decode(text, at)[1]
                    yield Item(where, problem=str(error))
                    continue
                except (ValueError, RecursionError) as error:
                    if len(text) - at <= MAX_LINE_BYTES and more():
                        continue
                    yield Item(where, problem=f"is not JSON: {error}; expected an array of objects")
                    return
                number, at = number + 1, end
                yield Item(where, row=record)
    except UnicodeDecodeError as error:
        yield Item(f"{path} item {number + 1}", problem=f"is not UTF-8 ({error.reason})")
    except OSError as error:
        raise _unreadable(path, error) from error


def _lines(path: Path, compressed: bool, report: Callable[[int], None]) -> Iterator[Item]:
    number = 0
    reported = 0
    try:
        with path.open("rb") as file:
            source: Any = gzip.GzipFile(fileobj=file) if compressed else file
            while line := source.readline(MAX_LINE_BYTES + 1):
                number += 1
                where = f"{path} line {number}"
                if len(line) > MAX_LINE_BYTES:
                    while (rest := source.readline(READ_BYTES)) and not rest.endswith(b"\n"):
                        pass
                    yield Item(where, problem=f"is longer than {MAX_LINE_BYTES // 2**20} MiB; expected one JSON object a line")
                elif not line.isspace():
                    yield Item(where, line)
                if (position := file.tell()) >= reported + PROGRESS_BYTES:
                    reported = position
                    report(position)
            report(file.tell())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield Item(f"{path} after line {number}", problem=f"the gzip stream is damaged ({error}); compress the file again")
    except OSError as error:
        raise _unreadable(path, error) from error


class _TwiceNamed(ValueError):
    """An object that names a field twice: either value may be the one that was meant."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceNamed(f"names the field {max(names, key=names.count)!r} twice; expected each field once")
    return record


def _parsed(line: bytes) -> Mapping[str, Any]:
    if line.lstrip().startswith(b"["):
        raise BadRecord("begins a JSON array; expected one object a line (jq -c '.[]' FILE makes it so)")
    try:
        record = json.loads(line, object_pairs_hook=_object)  # bytes, so that a byte-order mark is taken for what it is
    except UnicodeDecodeError as error:
        raise BadRecord(f"is not UTF-8 ({error.reason} at byte {error.start}); expected one JSON object a line") from error
    except _TwiceNamed as error:
        raise BadRecord(str(error)) from error
    except (ValueError, RecursionError) as error:
        torn = "" if line.endswith(b"\n") else " (the file ends in the middle of it?)"
        cause = str(error).partition(";")[0]  # Python's advice on numbers of 5,000 digits follows
        raise BadRecord(f"is not JSON: {cause}{torn}; expected one JSON object a line") from error
    if not isinstance(record, dict):
        raise BadRecord(f"holds a {type(record).__name__}; expected one JSON object a line")
    return record


def _rows(path: Path, report: Callable[[int], None]) -> Iterator[Item]:
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingDependency(f"reading '{path}' needs pyarrow, which is not installed; run: pip install 'tether-agents[data]'")
    import pyarrow
    import pyarrow.parquet

    number = 0
    read = 0
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False) as table:
            for group in range(table.num_row_groups):
                for batch in table.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], use_threads=False):
                    for row in batch.to_pylist():
                        number += 1
                        yield Item(f"{path} row {number}", row=row)
                columns = table.metadata.row_group(group)
                read += sum(columns.column(index).total_compressed_size for index in range(columns.num_columns))
                report(read)
        report(path.stat().st_size)
    except UnicodeDecodeError as error:
        raise BadInput(f"'{path}' holds text that is not UTF-8 ({error.reason}) after row {number}; write its texts as UTF-8") from error
    except (OSError, pyarrow.ArrowException) as error:
        raise BadInput(f"cannot read '{path}' as parquet after row {number}: {' '.join(str(error).split())}; is it whole?") from error


def _unreadable(path: Path, error: OSError) -> BadInput:
    return BadInput(f"cannot read '{path}': {(error.strerror or type(error).__name__).lower()}; check the path and its permissions")
