"""The reader: files in, a stream of rollouts out, with a tally of everything that was skipped or empty.

A path may be a file, several, or a folder: verl and TRL write one file a step. Files of a folder are read in the order of the numbers in
their names. The format is detected once, on the first file that holds a record. A reader can be iterated again; the tally then starts from zero.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from tether.core.enums import StopReason
from tether.core.errors import BadInput
from tether.diagnostics.rollouts.containers import Item, Progress, items
from tether.diagnostics.rollouts.formats import NUM_TRIED, Format, detect, named_format
from tether.diagnostics.rollouts.reasoning import ReasoningRule
from tether.diagnostics.rollouts.record import BadRecord, Rollout, Tally
from tether.diagnostics.rollouts.tether_jsonl import Attempts

Source = str | Path | Sequence[str | Path]
BadLines = Literal["raise", "skip"]

SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".parquet")
_REMEDY = "; correct it, or have bad lines skipped (they are then counted)"
_OWN_FILE, _TRL_FOLDER = "trajectories.jsonl", "completions"


def open_rollouts(
    source: Source,
    *,
    format: str | None = None,
    fields: Mapping[str, str] | None = None,
    pattern: str | None = None,
    split: str | None = "train",
    bad_lines: BadLines = "raise",
    progress: Progress | None = None,
) -> "RolloutReader":
    """A reader of saved rollouts; whatever is wrong with the arguments or the first records is said here.

    Args:
        source: a file, a folder, or several of them.
        format: a name of formats.FORMATS; None detects it.
        fields: a field map for generic records, such as {"prompt": "input", "response": "output"}.
        pattern: a regular expression whose one group is the reasoning; None takes the text between think tags.
        split: which episodes of a Tether run count; None takes all.
        bad_lines: "raise" stops at the first record that cannot be used, "skip" leaves it out and counts it.
        progress: called with the bytes read so far and the bytes in all.
    """
    if bad_lines not in ("raise", "skip"):
        raise BadInput(f"bad_lines is {bad_lines!r}; expected 'raise' or 'skip'")
    rule = ReasoningRule(pattern)
    chosen = named_format(format, fields)
    files = rollout_files(source)
    return RolloutReader(files, chosen or _detected(files, bad_lines), rule, split, bad_lines, progress)


class RolloutReader:
    """Iterate over it for the rollouts; then `tally` says what was left out or empty. Made by `open_rollouts`."""

    def __init__(
        self, files: Sequence[Path], format: Format, rule: ReasoningRule, split: str | None, bad_lines: BadLines, progress: Progress | None
    ) -> None:
        if format.name == "tether" and rule.pattern is not None:
            raise BadInput("Tether's trajectories carry the place of the reasoning; leave the pattern out")
        self.files = list(files)
        self.format = format
        self.tally = Tally()
        self._rule = rule
        self._split = split
        self._bad_lines = bad_lines
        self._progress = progress

    def __iter__(self) -> Iterator[Rollout]:
        self.tally = tally = Tally()
        for item in self._items(tally):
            tally.num_records += 1
            try:
                found = self._rollouts(item, tally)
            except BadRecord as error:
                message = _sentence(item, error)
                if self._bad_lines == "raise":
                    raise BadInput(f"{message}{_REMEDY}") from error
                tally.add_bad(message)
                continue
            for rollout in found:
                tally.add(rollout)
                yield rollout
        if not tally.num_rollouts:
            raise BadInput(_nothing(self.files, self._split, tally))

    def _items(self, tally: Tally) -> Iterator[Item]:
        """The records of all files, without those that a resumed run wrote again."""
        total = sum(path.stat().st_size for path in self.files)
        before = 0
        for path in self.files:
            attempts = Attempts(item.raw for item in items(path, _ignore)) if self.format.name == "tether" else None
            for item in items(path, _teller(self._progress, before, total)):
                if attempts is not None and attempts.supersede(item.raw):
                    tally.num_records += 1
                    tally.num_superseded += 1
                else:
                    yield item
            before += path.stat().st_size

    def _rollouts(self, item: Item, tally: Tally) -> list[Rollout]:
        """All turns of one record: a record is used whole or not at all."""
        record = item.record()
        if self.format.name == "tether" and self._split is not None and record.get("split", self._split) != self._split:
            tally.add_other_split(str(record["split"]))
            return []
        if self.format.name == "tether" and record.get("stop_reason") == StopReason.ENV_ERROR:
            tally.num_errored += 1
            return []
        try:
            found = [self._rule.apply(rollout) for rollout in self.format.rollouts(record, item.where)]
        except KeyError as error:
            raise BadRecord(f"has no field {error}; expected {self.format.title} ({self.format.expects})") from error
        tally.num_without_turns += not found
        return found


def rollout_files(source: Source) -> list[Path]:
    """The files of the given paths, in the order of reading."""
    paths = [Path(source)] if isinstance(source, str | Path) else [Path(path) for path in source]
    if not paths:
        raise BadInput("no rollout file was given; name a file or a folder")
    files = []
    for path in paths:
        if path.is_dir():
            files += _in_folder(path)
        elif path.exists():
            files.append(path)
        else:
            raise BadInput(f"rollout file '{path}' does not exist; check the path")
    return files


def _in_folder(folder: Path) -> list[Path]:
    if (folder / _OWN_FILE).is_file():
        return [folder / _OWN_FILE]  # a run folder, whose other JSON Lines are no rollouts
    for place in (folder, folder / _TRL_FOLDER):
        if place.is_dir() and (files := [path for path in place.iterdir() if path.name.endswith(SUFFIXES) and path.is_file()]):
            return sorted(files, key=_by_numbers)
    raise BadInput(f"folder '{folder}' holds no rollouts; expected files that end with {', '.join(SUFFIXES)}")


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """10.jsonl comes after 9.jsonl."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _detected(files: Sequence[Path], bad_lines: BadLines) -> Format:
    problem = None
    for path in files:
        records, place = [], ""
        for item in itertools.islice(items(path, _ignore), NUM_TRIED):
            try:
                records.append(item.record())
                place = place or item.where
            except BadRecord as error:
                problem = problem or _sentence(item, error)
                if bad_lines == "raise" and not records:
                    raise BadInput(problem + _REMEDY) from error
        if records:
            return detect(records, place)
    raise BadInput(problem or f"{_listed(files)} holds no records; expected one JSON object a line, or a parquet table")


def _teller(progress: Progress | None, before: int, total: int) -> Callable[[int], None]:
    return _ignore if progress is None else lambda read: progress(min(before + read, total), total)


def _ignore(read: int) -> None:
    """The progress callback where none was given."""


def _sentence(item: Item, error: BadRecord) -> str:
    return f"{item.where}: {error}"


def _nothing(files: Sequence[Path], split: str | None, tally: Tally) -> str:
    if tally.other_splits:
        others = ", ".join(sorted(tally.other_splits))
        return f"{_listed(files)} holds no rollouts of split '{split}', only of {others}; choose one of these"
    if tally.num_bad:
        return f"{_listed(files)} holds no readable rollouts: all {tally.num_bad} records are bad; first: {tally.bad_examples[0]}"
    return f"{_listed(files)} holds no rollouts; {tally.num_without_turns} of {tally.num_records} episodes are without a response"


def _listed(files: Sequence[Path]) -> str:
    return f"'{files[0]}'" if len(files) == 1 else f"'{files[0]}' and {len(files) - 1} more"
