"""Finding episodes: by what the index holds, and by the text in them.

What one filters by (step, split, group, outcome, reward, why it ended, kept) is answered from the index, without reading a line of the file. Text
is not indexed: a search reads the lines that the other filters leave, the newest first, for `SEARCH_SECONDS`, and then says how far it came and
where the next search continues. So an answer comes in time however large the file is.
"""

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tether.core.errors import BadInput
from tether.dashboard.catalogue import LiveRun
from tether.runs.schema import StepRecord
from tether.runs.trajectory_index import FAILURE, KEPT, SUCCESS, Rows

SEARCH_SECONDS = 0.12
"""How long one search reads; the whole answer stays below 200 ms with it."""
LONGEST_EXCERPT = 160
_ASCII = re.compile(r"[\x00-\x7f]+")
OUTCOMES = ("", "success", "failure")
ORDERS = ("newest", "oldest", "reward_high", "reward_low")


@dataclass(frozen=True, slots=True)
class Filter:
    """Which episodes are asked for; None and "" take all."""

    step: int | None = None
    split: str = ""
    group: int | None = None
    outcome: str = ""
    """`success` or `failure`."""
    stop_reason: str = ""
    kept: bool | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    alarm: str = ""
    """The name of an alarm: only the steps at which it stood."""
    text: str = ""
    """Stands in an observation or a response, in any case of letters."""
    order: str = "newest"

    def check(self) -> None:
        """Refuse words that mean nothing."""
        for name, got, known in (("outcome", self.outcome, OUTCOMES), ("order", self.order, ORDERS)):
            if got not in known:
                raise BadInput(f"{name} is '{got}'; choose one of {', '.join(word for word in known if word)}")


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One line of the list of episodes."""

    step: int
    split: str
    group: int
    member: int
    reward: float | None
    success: bool | None
    stop_reason: str
    kept: bool
    alarms: tuple[str, ...]
    """The alarms that stood at its step."""
    excerpt: str = ""
    """Where the text that was searched for stands."""

    @property
    def key(self) -> str:
        """Its address in the run. Example: "40/train/3/0"."""
        return f"{self.step}/{self.split}/{self.group}/{self.member}"


@dataclass(frozen=True, slots=True)
class Found:
    """A page of a list of episodes."""

    rows: list[EpisodeRow]
    total: int
    """How many the index holds that fit, the text not considered."""
    searched: int
    """How many of these were read for the text, or are before the end of this page."""
    next_start: int | None
    """Where the next page, or the rest of the search, begins; None at the end."""


def matching_rows(run: LiveRun, wanted: Filter) -> Rows:
    """The rows that fit what the index holds, in the order that was asked for."""
    wanted.check()
    rows = run.index().select(
        step=wanted.step,
        split=wanted.split or None,
        group=wanted.group,
        success=None if not wanted.outcome else wanted.outcome == "success",
        stop_reason=wanted.stop_reason or None,
        kept=wanted.kept,
        reward_at_least=wanted.reward_min,
        reward_at_most=wanted.reward_max,
    )
    if wanted.alarm:
        steps = [step for step, alarms in standing_alarms(run.records()).items() if wanted.alarm in alarms]
        rows = rows[np.isin(rows["step"], steps)]
    if wanted.order == "oldest":
        return rows
    if wanted.order == "newest":
        return rows[::-1]
    rewards = np.nan_to_num(rows["reward"], nan=-np.inf if wanted.order == "reward_high" else np.inf)
    return rows[np.argsort(-rewards if wanted.order == "reward_high" else rewards, kind="stable")]


def find(run: LiveRun, wanted: Filter, *, start: int = 0, limit: int = 50, seconds: float = SEARCH_SECONDS) -> Found:
    """A page of the episodes that fit, from the `start`-th on."""
    rows = matching_rows(run, wanted)
    alarms = standing_alarms(run.records())
    if not wanted.text:
        page = rows[start : start + limit]
        end = start + len(page)
        return Found([_row_view(row, alarms) for row in page], len(rows), end, end if end < len(rows) else None)
    found: list[EpisodeRow] = []
    place = start
    until = time.monotonic() + seconds
    # JSON writes letters beyond ASCII as codes, which differ between cases: the longest stretch within ASCII is compared with the bytes.
    raw = json.dumps(max(_ASCII.findall(wanted.text), key=len, default=""))[1:-1].lower().encode()
    for row, line in zip(rows[start:], run.index().read_lines(rows[start:]), strict=True):
        place += 1
        excerpt = _excerpt(line, raw, wanted.text)
        if excerpt:
            found.append(_row_view(row, alarms, excerpt))
        if len(found) == limit or time.monotonic() > until:
            break
    return Found(found, len(rows), place, place if place < len(rows) else None)


def _excerpt(line: bytes, raw: bytes, text: str) -> str:
    """The text with what stands around it; empty where the episode does not hold it.

    A part of the text is compared with the bytes of the line first, as JSON writes it: parsing a line costs many times as much.
    """
    if raw not in line.lower():
        return ""
    try:
        record = json.loads(line)
    except ValueError:  # a line that a kill tore
        return ""
    for turn in record.get("turns", []):
        for part in (str(turn.get("response", "")), str(turn.get("observation", ""))):
            place = part.lower().find(text.lower())
            if place >= 0:
                begin = max(0, place - LONGEST_EXCERPT // 3)
                end = begin + LONGEST_EXCERPT
                return f"{'…' if begin else ''}{part[begin:end]}{'…' if end < len(part) else ''}"
    return ""


def episode(run: LiveRun, key: str) -> dict[str, Any]:
    """The record of one episode by its `EpisodeRow.key`."""
    parts = key.split("/")
    if len(parts) != 4 or not all(part.lstrip("-").isdigit() for part in (parts[0], parts[2], parts[3])):
        raise BadInput(f"'{key}' is not the address of an episode; expected STEP/SPLIT/GROUP/MEMBER, such as 40/train/3/0")
    step, split, group, member = int(parts[0]), parts[1], int(parts[2]), int(parts[3])
    index = run.index()
    rows = index.select(step=step, split=split, group=group)
    rows = rows[rows["member"] == member]
    record = next(index.read(rows[-1:]), None)
    if record is None:
        raise BadInput(f"run '{run.name}' has no episode {key}; look it up in the list of its trajectories")
    return record


def neighbours(run: LiveRun, key: str) -> dict[str, str]:
    """The keys of the episodes around one: before, after, and the same member of the next prompt of its step."""
    step, split, group, member = key.split("/")
    rows = run.index().select(step=int(step), split=split)
    keys = [_row_view(row, {}).key for row in rows]
    place = keys.index(key) if key in keys else -1
    found = {}
    if place > 0:
        found["before"] = keys[place - 1]
    if 0 <= place < len(keys) - 1:
        found["after"] = keys[place + 1]
    others = [row for row in rows if int(row["group"]) != int(group)]
    later = [row for row in others if int(row["group"]) > int(group)] or others
    if later:
        same = [row for row in later if int(row["group"]) == int(later[0]["group"]) and int(row["member"]) == int(member)]
        found["beside"] = _row_view((same or later)[0], {}).key
    return found


def standing_alarms(records: Sequence[StepRecord]) -> dict[int, tuple[str, ...]]:
    """Step to the names of the alarms that stood at it."""
    return {record.step: tuple(str(alarm["name"]) for alarm in record.alarms) for record in records if record.alarms}


def _row_view(row: Any, alarms: dict[int, tuple[str, ...]], excerpt: str = "") -> EpisodeRow:
    reward, flags, step = float(row["reward"]), int(row["flags"]), int(row["step"])
    return EpisodeRow(
        step=step,
        split=row["split"].decode(),
        group=int(row["group"]),
        member=int(row["member"]),
        reward=None if math.isnan(reward) else reward,
        success=True if flags & SUCCESS else False if flags & FAILURE else None,
        stop_reason=row["stop_reason"].decode("utf-8", "replace"),
        kept=bool(flags & KEPT),
        alarms=alarms.get(step, ()),
        excerpt=excerpt,
    )
