"""Files to plain records, one at a time: JSON Lines, the same compressed with gzip, and parquet.

The first bytes of a file decide its container, not its name. A line is parsed only on request, so a reader can pass over it
unparsed. Memory is bounded by the longest line, or by a batch of rows of a parquet file and the pages it lies on.
"""

import gzip
import importlib.util
import json
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

_REFUSED = {
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; decompress it first (zstd -d), or use gzip",
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"\x80\x02": "is a pickle",
    b"\x80\x03": "is a pickle",
    b"\x80\x04": "is a pickle",
    b"\x80\x05": "is a pickle",
}
_PICKLE = ", which can run code when it is loaded; convert it to JSON Lines first (for RAGEN: its scripts/convert_to_jsonl.py)"


@dataclass(frozen=True, slots=True)
class Item:
    """One record of a file, not parsed yet."""

    where: str
    raw: bytes = b""
    """The line; empty for a row of a table."""
    row: Mapping[str, Any] | None = None
    problem: str | None = None
    """Why there is no record here."""

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
            head = file.read(4)
    except OSError as error:
        raise _unreadable(path, error) from error
    for magic, what in _REFUSED.items():
        if head.startswith(magic):
            raise BadInput(f"'{path}' {what}{_PICKLE if 'pickle' in what else ''}")
    return _rows(path, report) if head == b"PAR1" else _lines(path, head.startswith(b"\x1f\x8b"), report)


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
                    _skip_line(source)
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


def _skip_line(source: Any) -> None:
    while (rest := source.readline(2**20)) and not rest.endswith(b"\n"):
        pass


def _parsed(line: bytes) -> Mapping[str, Any]:
    if line.lstrip().startswith(b"["):
        raise BadRecord("begins a JSON array; expected one object a line (jq -c '.[]' FILE makes it so)")
    try:
        record = json.loads(line)  # bytes, so that a byte-order mark is taken for what it is
    except UnicodeDecodeError as error:
        raise BadRecord(f"is not UTF-8 ({error.reason} at byte {error.start}); expected one JSON object a line") from error
    except (ValueError, RecursionError) as error:
        torn = "" if line.endswith(b"\n") else " (the file ends in the middle of it?)"
        raise BadRecord(f"is not JSON: {error}{torn}; expected one JSON object a line") from error
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
    except (OSError, pyarrow.ArrowException) as error:
        raise BadInput(f"cannot read '{path}' as parquet after row {number}: {' '.join(str(error).split())}; is it whole?") from error


def _unreadable(path: Path, error: OSError) -> BadInput:
    return BadInput(f"cannot read '{path}': {(error.strerror or type(error).__name__).lower()}; check the path and its permissions")
