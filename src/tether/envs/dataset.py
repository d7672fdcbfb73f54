"""Rows of the public data sets, from a file or by name, each with its origin.

A source is the path of a .jsonl, .json, .csv or .parquet file (all but the last also gzipped), or the name of a data set that the `datasets`
package can fetch (`owner/name`, or with its configuration and split `owner/name@configuration:split`). A loader turns each row into an instance and raises `RowError` for
one it cannot use: that is reported with file and line, or counted and skipped where the user asked for it.
"""

import csv
import gzip
import hashlib
import importlib.util
import json
import logging
import time
import tomllib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from tether.core.enums import Split
from tether.core.errors import BadInput, MissingDependency, did_you_mean
from tether.envs.splits import Instance, belongs

BadRows = Literal["error", "skip"]
"""What to do with a malformed row: stop and name it, or count it and continue."""

Fields = tuple[tuple[str, str], ...]
"""Columns under other names than the loaders know: (name of the loader, name in the file)."""

_LOG = logging.getLogger(__name__)
PARQUET_ROWS = 1024
"""Rows of a parquet file that are in memory at a time."""
_FILE_ENDINGS = (".json", ".jsonl", ".csv", ".parquet", ".json.gz", ".jsonl.gz", ".csv.gz")


class RowError(ValueError):
    """A row that cannot be used; the message says what is wrong with it."""


class RowLeftOut(RowError):
    """A row with nothing wrong in it that cannot be judged fairly; it is left out and counted, whatever `bad_rows` says.

    The message says why, and does not differ from row to row.
    """


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data set."""

    value: Any
    """Usually a dictionary; a loader checks."""
    place: str
    """Where it stands, such as "train.jsonl:12"."""
    folder: Path | None = None
    """Of the file, for paths that the row names."""

    def checked(self) -> "Row":
        """This row, unless it could not even be read."""
        if isinstance(self.value, _Broken):
            raise RowError(str(self.value))
        return self

    def fields(self, *names: str) -> list[Any]:
        """The values of these fields; RowError if the row is no dictionary or lacks one."""
        if not isinstance(self.value, dict):
            raise RowError(f"is a {type(self.value).__name__}; expected an object with {', '.join(names)}")
        missing = [name for name in names if name not in self.value]
        if missing:
            raise RowError(f"has no field '{missing[0]}' (it has {', '.join(map(str, self.value)) or 'none'})")
        return [self.value[name] for name in names]

    def plus(self, values: Mapping[str, Any]) -> "Row":
        """The row with further or other columns. What is read of it still counts as read of this row."""
        whole = {**self.value, **values}
        return Row(_Record(whole, self.value.noted) if isinstance(self.value, _Record) else whole, self.place, self.folder)


T = TypeVar("T")
InstanceT = TypeVar("InstanceT", bound=Instance)


class Columns:
    """The columns of a source: those of `fields` get the names that a loader knows, and which ones were read is remembered."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._met: dict[str, None] = {}
        self._read = {column for _, column in fields}

    def named(self, row: Row) -> Row:
        """The row as the loader sees it."""
        if not isinstance(row.value, dict):
            return row
        for name, column in self._fields:
            if column not in row.value:
                raise RowError(f"has no column '{column}', which fields maps to {name}: {did_you_mean(column, row.value)}")
        self._met |= dict.fromkeys(row.value)
        mapped = {name: row.value[column] for name, column in self._fields}
        return Row(_Record({**row.value, **mapped}, self._read), row.place, row.folder)

    @property
    def unread(self) -> list[str]:
        return [name for name in self._met if name not in self._read]


class _Record(dict[str, Any]):
    """A row that notes which of its columns are looked at."""

    def __init__(self, values: dict[str, Any], read: set[str]) -> None:
        super().__init__(values)
        self.noted = read

    def __getitem__(self, key: str) -> Any:
        self.noted.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.noted.add(key)
        return super().get(key, default)


def load_instances(
    source: str, parse: Callable[[Row], T], *, env: str, default: str, option: str = "data", bad_rows: BadRows, fields: Fields = ()
) -> list[T]:
    """Every row of a source through `parse`. `option` and `default` (what is used without it) are named if the source is missing."""
    instances = iter_instances(source, parse, env=env, default=default, option=option, bad_rows=bad_rows, fields=fields)
    return list(with_progress(instances, f"{env}: reading {source}", "rows"))


def iter_instances(
    source: str, parse: Callable[[Row], T], *, env: str, default: str, option: str = "data", bad_rows: BadRows, fields: Fields = ()
) -> Iterator[T]:
    """The same one by one, for a source that may be larger than memory."""
    used = 0
    skipped: list[str] = []
    left_out: Counter[str] = Counter()
    columns = Columns(fields)
    for row in read_rows(source, env=env, default=default, option=option):
        result = parse_row(row, parse, columns)
        if isinstance(result, RowLeftOut):
            left_out[str(result)] += 1
        elif not isinstance(result, RowError):
            used += 1
            yield result
        elif bad_rows == "error":
            raise BadInput(f"{row.place}: {result}; fix the row, or skip such rows with bad_rows=skip") from result
        else:
            skipped.append(f"{row.place}: {result}")
    total = len(skipped) + used + left_out.total()
    if columns.unread and used:
        one = len(columns.unread) == 1
        what, are = ("column", "is") if one else ("columns", "are")
        _LOG.warning("%s: of %s the %s %s %s not read", env, source, what, ", ".join(columns.unread), are)
    if skipped:
        _LOG.warning("%s: skipped %d of %d rows of %s; the first: %s", env, len(skipped), total, source, skipped[0])
    for reason, count in left_out.items():
        _LOG.warning("%s: left out %d of %d rows of %s: %s", env, count, total, source, reason)
    if not used:
        why = f" ({', '.join(left_out)})" if left_out else ""
        raise BadInput(f"{env}: {option}='{source}' holds no usable row{why}; {default} is used where {option} is left out")


def parse_row(row: Row, parse: Callable[[Row], T], columns: Columns) -> T | RowError:
    """The instance of a row, or why there is none."""
    try:
        return parse(columns.named(row.checked()))
    except RowError as error:
        return error


def read_rows(source: str, *, env: str, default: str, option: str = "data") -> Iterator[Row]:
    """The rows of a file or of a named data set."""
    path = Path(source).expanduser()
    if path.is_file():
        folder = path.parent
        yield from (Row(row.value, row.place, folder) for row in _file_rows(path, env))
    elif source.endswith(_FILE_ENDINGS) or source.startswith((".", "/", "~")) or path.exists() or source.count("/") != 1:
        state = "is a folder" if path.is_dir() else "does not exist"
        raise BadInput(f"{env}: {option}='{source}' {state}; give {option} the path of a file, or leave it out for {default}")
    else:
        yield from _hub_rows(source, env, default, option)


class Pool(Generic[InstanceT]):
    """The instances of a data set by split: a generator like any other. Seeds run through the rows of the split in the order of the
    file, so with split `all` seed i is row i."""

    def __init__(self, instances: Sequence[InstanceT], *, env: str, source: str) -> None:
        self._env, self._source = env, source
        self._pools = {split: tuple(instance for instance in instances if belongs(instance, split)) for split in Split}

    def __len__(self) -> int:
        return len(self._pools[Split.ALL])

    def __iter__(self) -> Iterator[InstanceT]:
        return iter(self._pools[Split.ALL])

    def num_instances(self, split: Split) -> int:
        """How many rows the split has."""
        return len(self._pools[split])

    def digest(self, split: Split) -> str:
        """Of all that the rows of the split hold, in their order."""
        found = hashlib.blake2b(digest_size=6)
        for instance in self._pools[split]:
            found.update(json.dumps([instance.fingerprint, instance], default=_held).encode())
        return found.hexdigest()

    def __call__(self, seed: int, split: Split) -> InstanceT:
        pool = self._pools[split]
        if not pool:
            raise BadInput(
                f"{self._env}: none of the {len(self)} rows of '{self._source}' is a {split} instance; use split=all, or a larger file"
            )
        return pool[seed % len(pool)]


def _held(value: Any) -> Any:
    """The fields of a record, for JSON; of anything else its type, as its text may hold an address in memory."""
    return {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else type(value).__name__


@lru_cache(maxsize=32)
def read_packaged(package: str, name: str) -> dict[str, Any]:
    """A TOML table of an environment's `data` folder, read once per process. Callers must not change it."""
    return tomllib.loads(files(package).joinpath("data", name).read_text(encoding="utf-8"))


def _file_rows(path: Path, env: str) -> Iterator[Row]:
    if path.name.endswith(".parquet"):
        yield from _parquet_rows(path, env)
        return
    if not path.name.endswith(_FILE_ENDINGS):
        raise BadInput(f"{env}: cannot read '{path}': its ending is '{path.suffix}'; use one of {', '.join(_FILE_ENDINGS)}")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            if ".jsonl" in path.name:
                yield from _line_rows(file, path)
            elif ".csv" in path.name:
                yield from _csv_rows(file, path)
            else:
                yield from _array_rows(file.read(), path)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{env}: cannot read '{path}': {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{env}: '{path}' is not UTF-8 text; save it as UTF-8") from error


def _line_rows(lines: Any, path: Path) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield Row(_decoded(line), f"{path}:{number}")


def _csv_rows(lines: Any, path: Path) -> Iterator[Row]:
    """The rows of a CSV file whose first line names the columns. Every value is text; a cell may hold line breaks in quotes."""
    csv.field_size_limit(_MAX_CELL)
    reader = csv.DictReader(lines, restkey=_SURPLUS, restval=None, strict=True)
    if not reader.fieldnames or any(not name.strip() for name in reader.fieldnames):
        raise BadInput(f"{path}:1: has no name for every column; the first line of a CSV file names them")
    names = [name.strip().removeprefix("\ufeff") for name in reader.fieldnames]
    if len(set(names)) < len(names):
        raise BadInput(f"{path}:1: has a column twice ({', '.join(names)}); give each a name of its own")
    reader.fieldnames = names
    while True:
        try:
            value: Any = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise BadInput(f"{path}:{reader.line_num}: is not CSV ({error}); quote cells that hold quotes or line breaks") from error
        cells = len(names) + len(value.get(_SURPLUS) or ()) - sum(cell is None for cell in value.values())
        if cells != len(names):
            value = _Broken(f"has {cells} cells; the first line names {len(names)} columns")
        yield Row(value, f"{path}:{reader.line_num}")


_SURPLUS = "\0"
"""Where csv puts the cells beyond the last column; no column is called so."""
_MAX_CELL = 2**27


def _decoded(line: str) -> Any:
    """The value of a line; one that is no JSON becomes a _Broken, so that the user may skip it."""
    try:
        return json.loads(line, parse_int=whole_number)
    except (ValueError, RecursionError) as error:
        return _Broken(f"is not JSON ({error})")


def whole_number(digits: str) -> int:
    """An integer of any length; int() reads some thousand digits, decimal has no such limit."""
    try:
        return int(digits)
    except ValueError:
        return int(Decimal(digits))


class _Broken(str):
    """Stands for a row that could not be read; the text is why."""


def _array_rows(text: str, path: Path) -> Iterator[Row]:
    """The items of a JSON array with the line each begins on, or the entries of an object as (key, value)."""
    decoder = json.JSONDecoder(parse_int=whole_number)
    at = _skip_blank(text, 0)
    if text[at : at + 1] != "[":
        try:
            whole = json.loads(text, parse_int=whole_number)
        except ValueError as error:
            if "Extra data" in str(error):  # one object a line, whatever the file is called
                yield from _line_rows(text.splitlines(), path)
                return
            raise BadInput(f"{path}: is not JSON ({error})") from error
        yield from (Row(entry, f"{path}: {entry[0]!r}") for entry in whole.items()) if isinstance(whole, dict) else [Row(whole, str(path))]
        return
    at = _skip_blank(text, at + 1)
    line, counted = 1, 0
    while text[at : at + 1] not in ("]", ""):
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError as error:
            raise BadInput(f"{path}:{line}: is not JSON ({error})") from error
        yield Row(value, f"{path}:{line}")
        at = _skip_blank(text, at)
        if text[at : at + 1] == ",":
            at = _skip_blank(text, at + 1)
    if at >= len(text):
        raise BadInput(f"{path}:{line}: the array is not closed; is the file cut short?")


def _skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _parquet_rows(path: Path, env: str) -> Iterator[Row]:
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingDependency(f"{env}: reading '{path}' needs pyarrow, which is not installed; run: pip install 'tether-agents[data]'")
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=PARQUET_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(value, f"{path}, row {number}")
    except (OSError, pyarrow.ArrowException) as error:
        raise BadInput(f"{env}: cannot read '{path}' after row {number}: {error}") from error


def _hub_rows(name: str, env: str, default: str, option: str) -> Iterator[Row]:
    if importlib.util.find_spec("datasets") is None:
        raise MissingDependency(
            f"{env}: {option}='{name}' is no file, so it would be fetched by name, which needs datasets; "
            f"run: pip install 'tether-agents[data]', give a file, or leave {option} out for {default}"
        )
    import datasets

    place, _, split = name.partition(":")
    repository, _, configuration = place.partition("@")
    try:
        values = datasets.load_dataset(repository, configuration or None, split=split or "train")
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{env}: cannot fetch the data set '{name}' ({reason}); give a file, or leave {option} out for {default}") from error
    for column, feature in values.features.items():
        if isinstance(feature, datasets.Image):  # as bytes or a path: whoever needs a picture decodes it
            values = values.cast_column(column, datasets.Image(decode=False))
    yield from (Row(dict(value), f"{name}, row {number}") for number, value in enumerate(values, 1))


# --- a line about every load that takes longer than two seconds: a program that says nothing for minutes looks dead ---

FIRST_SECONDS = 2.0
"""A load that takes longer is announced."""
EVERY_SECONDS = 10.0
"""Between two lines of the same load."""


def with_progress(items: Iterable[T], doing: str, unit: str, clock: Callable[[], float] = time.monotonic) -> Iterator[T]:
    """The items as they are. `doing` and `unit` make the line: "metamathqa: reading train.jsonl: 40,000 rows in 2 s, continuing".

    The time of whoever takes the items counts too: parsing a row, or indexing a document.
    """
    started = clock()
    due = started + FIRST_SECONDS
    count, said = 0, False
    for count, item in enumerate(items, 1):
        yield item
        now = clock()
        if now >= due:
            _LOG.warning("%s: %s %s in %.0f s, continuing", doing, f"{count:,}", unit, now - started)
            due, said = now + EVERY_SECONDS, True
    seconds = clock() - started
    if said or seconds >= FIRST_SECONDS:
        _LOG.warning("%s: %s %s, done in %.1f s", doing, f"{count:,}", unit, seconds)
