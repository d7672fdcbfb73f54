"""The episodes of a run: found by what the index holds and by the text in them, and as groups of a step.

What one filters by (step, split, group, outcome, reward, why it ended, kept) is answered from the index, without reading a line of the file. Text
is not indexed: a search reads the lines that the other filters leave, the newest first, for `SEARCH_SECONDS`, and then says how far it came and
where the next search continues. So an answer comes in time however large the file is.

The reward variance of a group is that of the filter: over the members that are evidence (an errored episode is none), with ddof 1, zero for a
group of one. Whether a group was kept is on record; why it was dropped follows from its rewards and the run's filter, and is said only as far as
it follows.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.core.enums import ERRORED, Split
from tether.core.errors import BadInput
from tether.runs.dashboard.catalogue import LiveRun
from tether.runs.files import parsed_line
from tether.runs.images import IMAGES, Picture, image_size, without_raw_markers
from tether.runs.index import IndexRow
from tether.runs.schema import StepRecord, recorded_digests

SEARCH_SECONDS = 0.12
"""How long one search reads; the whole answer stays below 200 ms with it."""
SEARCH_ROWS = 256
"""Rows that a search asks the index for at a time."""
LONGEST_EXCERPT = 160
_ASCII = re.compile(r"[\x00-\x7f]+")
ZERO_VARIANCE = 1e-12
"""At most this counts as zero, as in the filter."""


@dataclass(frozen=True, slots=True)
class EpisodeList:
    """A page of a list of episodes."""

    rows: list[IndexRow]
    alarms: dict[int, tuple[str, ...]]
    """Step to the names of the alarms that stood at it."""
    excerpts: dict[str, str]
    """Where the text that was searched for stands, by the key of the row."""
    total: int
    """How many the index holds that fit, the text not considered."""
    searched: int
    """How many of these were read for the text, or are before the end of this page."""
    next_start: int | None
    """Where the next page, or the rest of the search, begins; None at the end."""


def find(
    run: LiveRun,
    *,
    text: str = "",
    alarm: str = "",
    order: str = "newest",
    start: int = 0,
    limit: int = 50,
    seconds: float = SEARCH_SECONDS,
    **wanted: Any,
) -> EpisodeList:
    """A page of the episodes that fit, from the `start`-th on.

    Args:
        text: stands in an observation or a response, in any case of letters.
        alarm: the name of an alarm; only the steps at which it stood.
        order: one of `tether.runs.index.ORDERS`.
        wanted: what `TrajectoryIndex.select` can be asked for; None and "" take all.
    """
    index, alarms = run.index(), standing_alarms(run.records())
    asked = {**wanted, "steps": [step for step, names in alarms.items() if alarm in names] if alarm else None}
    total = index.count(**asked)
    if not text:
        page = index.select(**asked, order=order, start=start, limit=limit)
        end = start + len(page)
        return EpisodeList(page, alarms, {}, total, end, end if end < total else None)
    found: list[IndexRow] = []
    excerpts: dict[str, str] = {}
    place = start
    until = time.monotonic() + seconds
    # JSON writes letters beyond ASCII as codes, which differ between cases: the longest stretch within ASCII is compared with the bytes.
    raw = json.dumps(max(_ASCII.findall(text), key=len, default=""))[1:-1].lower().encode()
    while place < total and len(found) < limit and (place == start or time.monotonic() <= until):
        rows = index.select(**asked, order=order, start=place, limit=SEARCH_ROWS)
        for row, line in zip(rows, index.read_lines(rows), strict=True):
            place += 1
            if excerpt := _excerpt(line, raw, text):
                found.append(row)
                excerpts[row.key] = excerpt
            if len(found) == limit or time.monotonic() > until:
                break
    return EpisodeList(found, alarms, excerpts, total, place, place if place < total else None)


def _excerpt(line: bytes, raw: bytes, text: str) -> str:
    """The text with what stands around it; empty where the episode does not hold it.

    A part of the text is compared with the bytes of the line first, as JSON writes it: parsing a line costs many times as much.
    """
    if raw not in line.lower():
        return ""
    for turn in (parsed_line(line) or {}).get("turns", []):
        for part in (str(turn.get("response", "")), str(turn.get("observation", ""))):
            place = part.lower().find(text.lower())
            if place >= 0:
                begin = max(0, place - LONGEST_EXCERPT // 3)
                end = begin + LONGEST_EXCERPT
                return without_raw_markers(f"{'…' if begin else ''}{part[begin:end]}{'…' if end < len(part) else ''}")
    return ""


def previews(run: LiveRun, rows: Sequence[IndexRow]) -> dict[str, str]:
    """How the first response of each episode begins."""
    found = {}
    for row, record in zip(rows, run.index().read(rows), strict=True):
        text = " ".join(record["turns"][0].get("response", "").split()) if record and record.get("turns") else ""
        found[row.key] = text if len(text) <= LONGEST_EXCERPT else f"{text[:LONGEST_EXCERPT]}…"
    return found


def episode(run: LiveRun, key: str) -> dict[str, Any]:
    """The record of one episode by its `IndexRow.key`."""
    parts = key.split("/")
    if len(parts) != 4 or not all(part.lstrip("-").isdigit() for part in (parts[0], parts[2], parts[3])):
        raise BadInput(f"'{key}' is not the address of an episode; expected STEP/SPLIT/GROUP/MEMBER, such as 40/train/3/0")
    step, split, group, member = int(parts[0]), parts[1], int(parts[2]), int(parts[3])
    index = run.index()
    record = next(index.read(index.select(step=step, split=split, group=group, member=member)[-1:]), None)
    if record is None:
        raise BadInput(f"run '{run.name}' has no episode {key}; look it up in the list of its trajectories")
    return record


def neighbours(run: LiveRun, key: str) -> dict[str, str]:
    """The keys of the episodes around one: before, after, and the same member of the next prompt of its step."""
    step, split, group, member = key.split("/")
    rows = run.index().select(step=int(step), split=split)
    keys = [row.key for row in rows]
    place = keys.index(key) if key in keys else -1
    found = {}
    if place > 0:
        found["before"] = keys[place - 1]
    if 0 <= place < len(keys) - 1:
        found["after"] = keys[place + 1]
    others = [row for row in rows if row.group != int(group)]
    later = [row for row in others if row.group > int(group)] or others
    if later:
        same = [row for row in later if (row.group, row.member) == (later[0].group, int(member))]
        found["beside"] = (same or later)[0].key
    return found


def standing_alarms(records: Sequence[StepRecord]) -> dict[int, tuple[str, ...]]:
    """Step to the names of the alarms that stood at it."""
    return {record.step: tuple(str(alarm["name"]) for alarm in record.alarms) for record in records if record.alarms}


# ------------------------------------------------------------------------------------------------------------------ groups


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group of a step."""

    number: int
    members: list[IndexRow]
    num_errored: int
    rewards: list[float]
    """Of the members that are evidence."""
    reward_mean: float | None
    reward_variance: float | None
    """None where every member errored."""
    num_successes: int
    kept: bool
    why: str


def step_groups(run: LiveRun, step: int) -> list[GroupRow]:
    """The groups of a training step, most reward variance first."""
    members: dict[int, list[IndexRow]] = {}
    for row in run.index().select(step=step, split=Split.TRAIN.value):
        members.setdefault(row.group, []).append(row)
    settings = run.config()
    rows = [_group(number, found, settings) for number, found in members.items()]
    return sorted(rows, key=lambda group: -1.0 if group.reward_variance is None else group.reward_variance, reverse=True)


def first_pictures(run: LiveRun, groups: Sequence[GroupRow]) -> dict[int, Picture]:
    """What the members of each group saw first; nothing for a run without pictures."""
    if not (run.folder / IMAGES).is_dir():
        return {}
    found = {}
    for group, record in zip(groups, run.index().read([group.members[0] for group in groups]), strict=True):
        turns = (record or {}).get("turns") or [{}]
        if digests := recorded_digests(turns[0]):
            found[group.number] = Picture(digests[0], image_size(run.folder, digests[0]))
    return found


def _group(number: int, members: list[IndexRow], settings: Mapping[str, Any]) -> GroupRow:
    evidence = [row for row in members if row.stop_reason not in ERRORED]
    rewards = [row.reward for row in evidence if row.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    variance = None if mean is None else sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
    kept = any(row.kept for row in members)
    return GroupRow(
        number=number,
        members=members,
        num_errored=len(members) - len(evidence),
        rewards=rewards,
        reward_mean=mean,
        reward_variance=variance,
        num_successes=sum(row.success is True for row in evidence),
        kept=kept,
        why=_why(kept, variance, len(members), settings),
    )


def _why(kept: bool, variance: float | None, num_members: int, config: Mapping[str, Any]) -> str:
    """Why the group was kept or dropped, from the run's settings; an alarm action may have changed the share that is kept."""
    settings, rollout = config.get("filter") or {}, config.get("rollout") or {}
    if not kept and num_members == rollout.get("first_members") != rollout.get("group_size"):
        return "ended with its first members (early decision)"
    strategy, score = str(settings.get("strategy", "filter")), str(settings.get("score", "reward_variance"))
    words = score.replace("_", " ")
    if kept:
        return f"among the groups that {strategy} takes by {words}" if strategy != "all" else "all groups are kept"
    if variance is None:
        return "every member errored, so there is no evidence"
    if score == "reward_variance":
        if variance <= ZERO_VARIANCE:
            return "all rewards are equal: no task gradient"
        return f"reward variance below the cut of {strategy}"
    return f"its {words} is beyond the cut of {strategy}"


def train_steps(run: LiveRun) -> list[int]:
    """The steps that have training episodes."""
    return sorted(step for step, split in run.index().attempts() if split == Split.TRAIN.value)
