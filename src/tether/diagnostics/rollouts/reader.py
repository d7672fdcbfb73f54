"""The reader: files or rows in, a stream of rollouts out, with a tally of everything that was skipped or empty.

A path may be a file, several, or a folder (`folders`). The format is detected once, on the first records of each file: where files of a folder differ, the
most frequent format is read; the other files are passed over and named. A reader can be iterated again; the tally then starts from zero.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tether.core.enums import StopReason
from tether.core.errors import BadInput, did_you_mean
from tether.core.images import IMAGE_IDS, Image, has_images
from tether.diagnostics.rollouts.containers import Item, Progress, items
from tether.diagnostics.rollouts.folders import RolloutFile, Source, listed, rollout_files
from tether.diagnostics.rollouts.formats import NUM_TRIED, Format, detect, field_paths, hashable, named_format, recognised, what_else
from tether.diagnostics.rollouts.pictures import may_hold_images, with_markers
from tether.diagnostics.rollouts.reasoning import ReasoningRule
from tether.diagnostics.rollouts.record import BadRecord, ErroredEpisode, OtherRecord, Rollout, Tally
from tether.diagnostics.rollouts.traces import Attempts
from tether.diagnostics.rollouts.values import MISSING, lookup

Rows = Iterable[Mapping[str, Any]]
BadLines = Literal["raise", "skip"]

_REMEDY = "; correct it, or have bad lines skipped (they are then counted)"
MODEL_PATHS = (
    "model",
    "model_name",
    "hf_checkpoint",
    "args.hf_checkpoint",
    "metadata.model",
    "request.model",
    "response.model",
    "inputs.model",
)
"""Where records name the model that wrote them."""
IN_MEMORY, NO_RECORDS = "rows in memory", "no records"


def open_rollouts(
    source: Source | Rows,
    *,
    format: str | None = None,
    fields: Mapping[str, str] | None = None,
    group: str | None = None,
    pattern: str | None = None,
    split: str | None = "train",
    bad_lines: BadLines = "raise",
    progress: Progress | None = None,
    text_only: bool = False,
) -> "RolloutReader":
    """A reader of saved rollouts; whatever is wrong with the arguments or the first records is said here.

    Args:
        source: a file, a folder, or several of them; or rows: mappings, as a file would hold them.
        format: a name of formats.FORMATS; None detects it.
        fields: a field map for generic records, such as {"prompt": "input", "response": "output"}.
        group: the path of the field whose value is the group of a record, whatever the format; None takes the format's own.
        pattern: a regular expression whose one group is the reasoning; None takes the text between think tags.
        split: which episodes of a Tether run count, and which files of a folder that holds training and evaluation; None takes all.
        bad_lines: "raise" stops at the first record that cannot be used, "skip" leaves it out and counts it.
        progress: called with the bytes read so far and the bytes in all.
        text_only: pictures are left out of the prompts, and not read.
    """
    if bad_lines not in ("raise", "skip"):
        raise BadInput(f"bad_lines is {bad_lines!r}; expected 'raise' or 'skip'")
    rule = ReasoningRule(pattern)
    chosen = named_format(format, fields)
    if isinstance(source, Iterator):
        source = list(source)
    rows = _rows(source)
    if rows is not None:
        first = [row for row in rows[:NUM_TRIED] if isinstance(row, Mapping)]
        if not first:
            raise BadInput("there are no rows; give mappings with prompt and response, or the path of a file")
        decided = chosen or detect(first, "row 1")
        return RolloutReader([], decided, rule, split, bad_lines, progress, rows=rows, group=group, text_only=text_only)
    found = rollout_files(source, split)  # type: ignore[arg-type]  # not rows, so paths
    files, decided, notes = _choose_files(found.files, chosen, bad_lines)
    notes = [*found.notes, *notes]
    return RolloutReader(files, decided, rule, split, bad_lines, progress, notes=notes, group=group, text_only=text_only)


def _rows(source: Any) -> list[Mapping[str, Any]] | None:
    """The rows, if the source is rows; None for paths."""
    if isinstance(source, str | Path):
        return None
    if isinstance(source, Mapping):
        raise BadInput("the rollouts are one mapping; give a list of them, one per response")
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        raise BadInput("the rollouts are a table; give its rows, for pandas TABLE.to_dict('records')")
    if not isinstance(source, Iterable):
        raise BadInput(f"the rollouts are a {type(source).__name__}; expected a path, several, or an iterable of mappings")
    parts = list(source)
    return None if all(isinstance(part, str | Path) for part in parts) else parts


class RolloutReader:
    """Iterate over it for the rollouts; then `tally` says what was left out or empty. Made by `open_rollouts`."""

    def __init__(
        self,
        files: Sequence[RolloutFile],
        format: Format,
        rule: ReasoningRule,
        split: str | None,
        bad_lines: BadLines,
        progress: Progress | None,
        *,
        rows: Sequence[Mapping[str, Any]] | None = None,
        notes: Sequence[str] = (),
        group: str | None = None,
        text_only: bool = False,
    ) -> None:
        if format.name == "tether" and rule.pattern is not None:
            raise BadInput("Tether's trajectories carry the place of the reasoning; leave the pattern out")
        self.files = [file.path for file in files]
        self.format = format
        self.tally = Tally()
        self._rule = rule
        self._split = split
        self._bad_lines = bad_lines
        self._progress = progress
        self._steps = [file.step for file in files]
        self._rows = rows
        self._notes = list(notes)
        self._group = group
        self._text_only = text_only
        self._folder: Path | None = None
        """Of the file that is being read."""

    @property
    def names(self) -> list[str]:
        """The files, or that the rows are in memory."""
        return [IN_MEMORY] if self._rows is not None else [str(path) for path in self.files]

    def notes(self) -> list[str]:
        """What was passed over, what the records do not say, and the notes of the tally: one sentence each. After a reading."""
        tally = self.tally
        notes = list(self._notes)
        if tally.num_steps_named:
            notes.append(
                f"the records hold no step; that of {tally.num_steps_named} of {tally.num_rollouts} responses was taken from the names of files or folders"
            )
        if tally.num_without_step:
            notes.append(f"{_share(tally.num_without_step, tally)} no step: they are measured together")
        if tally.num_without_group:
            alike = "with the same first message of the user (--group names another field)" if self.format.is_log else "to equal prompts"
            notes.append(f"{_share(tally.num_without_group, tally)} no group id: responses {alike} are taken as one group")
        return notes + tally.notes()

    def __iter__(self) -> Iterator[Rollout]:
        self.tally = tally = Tally()
        for item in self._items(tally):
            tally.num_records += 1
            try:
                found = self._rollouts(item, tally)
            except BadRecord as error:
                if self._bad_lines == "raise":
                    raise BadInput(f"{item.where}: {error}{_REMEDY}") from error
                tally.add_bad(f"{item.where}: {error}")
                continue
            for rollout in found:
                if rollout.trajectory == item.where:  # what is drawn and shuffled does not depend on the folder that the file lies in
                    rollout = dataclasses.replace(rollout, trajectory=tally.num_records)
                if rollout.step is None and item.step is not None:
                    rollout = dataclasses.replace(rollout, step=item.step)
                    tally.num_steps_named += item.is_step_named
                tally.add(rollout)
                yield rollout
        if not tally.num_rollouts:
            files = _listed(self.names)
            if tally.other_splits:
                others = ", ".join(sorted(tally.other_splits))
                raise BadInput(f"{files} holds no rollouts of split '{self._split}', only of {others}; choose one of these")
            if tally.num_bad:
                raise BadInput(f"{files} holds no readable rollouts: all {tally.num_bad} records are bad; first: {tally.bad_examples[0]}")
            if tally.num_others == tally.num_records:
                raise BadInput(f"{files} holds no call of a model with messages, only other records of a log; export the calls themselves")
            raise BadInput(f"{files} holds no rollouts; {tally.num_without_turns} of {tally.num_records} episodes are without a response")

    def _items(self, tally: Tally) -> Iterator[Item]:
        """The records of all files, without those that a resumed run wrote again."""
        if self._rows is not None:
            for number, row in enumerate(self._rows, 1):
                problem = None if isinstance(row, Mapping) else f"is a {type(row).__name__}; expected a mapping"
                yield Item(f"row {number}", row=None if problem else row, problem=problem)
            return
        total = sum(path.stat().st_size for path in self.files)
        before = 0
        for path, step in zip(self.files, self._steps, strict=True):
            attempts = Attempts(item.raw for item in items(path, _no_report)) if self.format.name == "tether" else None

            def report(read: int, before: int = before) -> None:
                if self._progress is not None:
                    self._progress(min(before + read, total), total)

            self._folder = path.parent
            for item in items(path, report):
                if attempts is not None and attempts.supersede(item.raw):
                    tally.num_records += 1
                    tally.num_superseded += 1
                else:
                    yield item if step is None or item.step is not None else dataclasses.replace(item, step=step, is_step_named=True)
            before += path.stat().st_size

    def _rollouts(self, item: Item, tally: Tally) -> list[Rollout]:
        """All turns of one record: a record is used whole or not at all."""
        record = item.record()
        if tally.model is None and tally.num_records <= NUM_TRIED:
            named = (lookup(record, path) for path in MODEL_PATHS)
            tally.model = next((name for name in named if isinstance(name, str) and name), None)
        if self.format.name == "tether":
            if self._split is not None and (split := record.get("split", self._split)) != self._split:
                tally.other_splits[str(split)] += 1
                return []
            if record.get("stop_reason") == StopReason.ENV_ERROR:
                tally.num_errored += 1
                return []
        try:
            record, images = self._seen(record, item)
            found = [self._rule.apply(rollout) for rollout in self.format.rollouts(record, item.where)]
        except KeyError as error:
            raise BadRecord(f"has no field {error}; expected {self.format.title} ({self.format.expects})") from error
        except RecursionError as error:
            raise BadRecord(f"is nested too deeply; expected {self.format.title} ({self.format.expects})") from error
        except ErroredEpisode:
            tally.num_errored += 1
            return []
        except OtherRecord:
            tally.num_others += 1
            return []
        if self._group is not None:
            group = lookup(record, self._group)
            if group is MISSING or group is None:
                raise BadRecord(f"has no field '{self._group}' to group by; {did_you_mean(self._group, field_paths(record))}")
            found = [dataclasses.replace(rollout, group=hashable(group)) for rollout in found]
        tally.num_without_turns += not found
        return [self._with_images(rollout, images) for rollout in found]

    def _seen(self, record: Mapping[str, Any], item: Item) -> tuple[Mapping[str, Any], tuple[Image, ...]]:
        """The record with markers in the place of its pictures, and these; Tether's own have ids instead."""
        if self.format.name == "tether" or not may_hold_images(item.raw):
            return record, ()
        return with_markers(record, self.format.prompt, self._folder, text_only=self._text_only)

    def _with_images(self, rollout: Rollout, images: tuple[Image, ...]) -> Rollout:
        ids = rollout.prompt_ids
        if self.format.name == "tether" and ids is not None and has_images(ids):
            if self._text_only:
                return dataclasses.replace(rollout, prompt_ids=tuple(token for token in ids if token < IMAGE_IDS))
            return dataclasses.replace(rollout, image_folder=self._folder)
        return dataclasses.replace(rollout, images=images) if images else rollout


@dataclasses.dataclass(frozen=True, slots=True)
class _Head:
    """The first records of a file."""

    records: list[Mapping[str, Any]]
    where: str = ""
    """Of the first of them."""
    problem: str | None = None
    """Of the first that could not be read."""

    @classmethod
    def read(cls, file: RolloutFile, bad_lines: BadLines) -> "_Head":
        """A record that cannot be read ends everything where the user named the file, or where its name promises records."""
        promised = file.is_given or not file.path.name.endswith((".json", ".pt"))
        records: list[Mapping[str, Any]] = []
        where, problem = "", None
        try:
            for item in itertools.islice(items(file.path, _no_report), NUM_TRIED):
                try:
                    records.append(item.record())
                    where = where or item.where
                except BadRecord as error:
                    problem = problem or f"{item.where}: {error}"
                    if bad_lines == "raise" and not records and promised:
                        raise BadInput(problem + _REMEDY) from error
        except BadInput as error:
            if promised or "can run code" in str(error):
                raise
            return cls([], problem=NO_RECORDS)
        return cls(records, where, problem if promised else NO_RECORDS)

    def format(self, chosen: Format | None) -> Format | None:
        """The format of the file: the detected one, or the chosen one if a record can be read by it."""
        if chosen is None:
            return recognised(self.records)
        for record in self.records:
            try:
                list(chosen.rollouts(record, self.where))
            except (BadRecord, KeyError, RecursionError):
                continue
            except (ErroredEpisode, OtherRecord):
                pass
            return chosen
        return None


def _choose_files(files: Sequence[RolloutFile], chosen: Format | None, bad_lines: BadLines) -> tuple[list[RolloutFile], Format, list[str]]:
    """The files that are read, their format, and notes on the others."""
    if chosen is not None and all(file.is_given for file in files):
        return list(files), chosen, []
    heads = {file.path: _Head.read(file, bad_lines) for file in files}
    formats = {path: head.format(chosen) for path, head in heads.items()}
    known = Counter(found.name for file in files if (found := formats[file.path]) is not None)
    if not known:
        if chosen is not None:
            return list(files), chosen, []
        for head in heads.values():
            if head.records:
                detect(head.records, head.where)  # says what it found instead
        problem = next((head.problem for head in heads.values() if head.problem not in (None, NO_RECORDS)), None)
        names = _listed([str(file.path) for file in files])
        raise BadInput(problem or f"{names} holds no records; expected one JSON object a line, or a parquet table")
    name = max(known, key=lambda name: known[name])  # the first among equals
    decided = next(found for found in formats.values() if found is not None and found.name == name)
    read = [file for file in files if file.is_given or ((found := formats[file.path]) is not None and found.name == name)]
    passed: dict[str, list[str]] = {}
    for file in files:
        if file not in read:
            head, found = heads[file.path], formats[file.path]
            reason = found.title if found is not None else what_else(head.records) if head.records else head.problem or NO_RECORDS
            passed.setdefault(reason, []).append(file.path.name)
    return read, decided, [f"passed over ({reason}): {listed(names)}" for reason, names in passed.items()]


def _share(count: int, tally: Tally) -> str:
    return "the responses have" if count == tally.num_rollouts else f"{count} of {tally.num_rollouts} responses have"


def _no_report(read: int) -> None:
    """The progress of a reading that nobody watches."""


def _listed(files: Sequence[str]) -> str:
    return f"'{files[0]}'" if len(files) == 1 else f"'{files[0]}' and {len(files) - 1} more"
