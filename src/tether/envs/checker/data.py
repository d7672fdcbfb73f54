"""What an environment makes of a data file: rows loaded, refused and left out, why, with examples.

The rows go through the environment's own reader, so what is reported here is what loading the file does. Nothing is built or played:
deepcoder needs no sandbox for it, searchqa no index. Reasons that differ only in the values they name are counted as one.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.envs.dataset import Columns, Fields, Row, RowError, RowLeftOut, parse_row, read_rows, with_progress
from tether.envs.registry import ENVIRONMENTS, EnvClass, find_class
from tether.envs.splits import split_of

NUM_EXAMPLES = 3
_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\b\d+(?:\.\d+)?\b")


@dataclass(slots=True)
class RowsNotLoaded:
    """Rows that were not loaded for one reason."""

    reason: str
    """That of the first of them, in full."""
    count: int = 0
    places: list[str] = field(default_factory=list)
    """Of the first few."""

    def add(self, place: str) -> None:
        self.count += 1
        if len(self.places) < NUM_EXAMPLES:
            self.places.append(place)


@dataclass(slots=True)
class DataReport:
    """What became of the rows of a file."""

    env: str
    source: str
    loaded: int = 0
    splits: Counter[Split] = field(default_factory=Counter)
    """Rows loaded by the split that their content puts them in."""
    refused: dict[str, RowsNotLoaded] = field(default_factory=dict)
    """By reason: rows that stop a run, unless bad_rows=skip."""
    left_out: dict[str, RowsNotLoaded] = field(default_factory=dict)
    """By reason: rows that are always left out."""
    unread: list[str] = field(default_factory=list)
    """Columns that nothing looks at."""
    examples: list[str] = field(default_factory=list)
    """The first rows loaded, in a line each."""

    @property
    def num_refused(self) -> int:
        return sum(rows.count for rows in self.refused.values())

    @property
    def num_left_out(self) -> int:
        return sum(rows.count for rows in self.left_out.values())

    @property
    def ok(self) -> bool:
        """Some rows are loaded, and none is refused."""
        return self.loaded > 0 and not self.refused

    def add(self, row: Row, result: Any) -> None:
        """Count one row: its instance, or the error that took its place."""
        if isinstance(result, RowError):
            kept = self.left_out if isinstance(result, RowLeftOut) else self.refused
            kept.setdefault(_VALUES.sub("...", str(result)), RowsNotLoaded(str(result))).add(row.place)
            return
        self.loaded += 1
        self.splits[split_of(result.fingerprint)] += 1
        if len(self.examples) < NUM_EXAMPLES:
            self.examples.append(_one_line(getattr(result, "summary", None) or str(result)))


def check_data(name: str, source: str, fields: Fields = ()) -> DataReport:
    """What the environment of this name makes of a file, or of a data set by name."""
    cls = find_class(name)
    if not reads_data(cls):
        known = ", ".join(data_environments())
        raise BadInput(f"{name} reads no data file that can be checked row by row; those that do: {known}")
    report, columns = DataReport(name, source), Columns(fields)
    own_rows = getattr(cls, "data_rows", None)
    rows: Iterable[Row] = (
        own_rows(source) if own_rows else read_rows(source, env=name, default="the check of the environment itself", option="--data")
    )
    for row in with_progress(rows, f"{name}: reading {source}", "rows"):
        report.add(row, parse_row(row, cls.read_row, columns))  # type: ignore[attr-defined]
    report.unread = columns.unread if report.loaded else []
    return report


def reads_data(cls: EnvClass) -> bool:
    """Whether an environment reads files of rows."""
    return getattr(cls, "read_row", None) is not None


def data_environments() -> list[str]:
    """The names of the environments that read files of rows."""
    return [name for name in ENVIRONMENTS.names() if reads_data(find_class(name))]


def _one_line(text: str, limit: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
