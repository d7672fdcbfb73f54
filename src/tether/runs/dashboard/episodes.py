"""The episodes of a run: found by what the index holds and by the text in them, as groups of a step, and token by token.

What one filters by (step, split, group, outcome, reward, why it ended, kept) is answered from the index, without reading a line of the file. Text
is not indexed: a search reads the lines that the other filters leave, the newest first, for `SEARCH_SECONDS`, and then says how far it came and
where the next search continues. So an answer comes in time however large the file is.

The reward variance of a group is that of the filter: over the members that are evidence (an errored episode is none), with ddof 1, zero for a
group of one. Whether a group was kept is on record; why it was dropped follows from its rewards and the run's filter, and is said only as far as
it follows.

The record of an episode holds token ids, not their texts. The tokenizer that a run's checkpoints carry turns ids into text; it is read by the
`tokenizers` package, without torch. Ids are decoded one after the other by its `DecodeStream`, so that a character of several tokens is one piece
with the log-probs of all of them. Where no checkpoint holds a tokenizer, the page shows the plain response and says why it has no colours.
"""

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.core.enums import ERRORED, Split
from tether.core.errors import BadInput
from tether.runs.checkpoints import MODEL
from tether.runs.dashboard.catalogue import LiveRun
from tether.runs.index import ORDERS, IndexRow
from tether.runs.schema import StepRecord

SEARCH_SECONDS = 0.12
"""How long one search reads; the whole answer stays below 200 ms with it."""
SEARCH_ROWS = 256
"""Rows that a search asks the index for at a time."""
LONGEST_EXCERPT = 160
_ASCII = re.compile(r"[\x00-\x7f]+")
ZERO_VARIANCE = 1e-12
"""At most this counts as zero, as in the filter."""
_EVERY = 1_000_000
LEVELS = tuple(math.log(chance) for chance in (0.9, 0.5, 0.1, 0.01))
"""Log-probs between the colours."""
TOKENIZER = "tokenizer.json"
OUTCOMES = ("", "success", "failure")


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

    def of_index(self, alarms: Mapping[int, Sequence[str]]) -> dict[str, Any]:
        """What the index is asked for; `alarms` are those that stood, by step."""
        return {
            "step": self.step,
            "split": self.split or None,
            "group": self.group,
            "success": None if not self.outcome else self.outcome == "success",
            "stop_reason": self.stop_reason or None,
            "kept": self.kept,
            "reward_at_least": self.reward_min,
            "reward_at_most": self.reward_max,
            "steps": [step for step, names in alarms.items() if self.alarm in names] if self.alarm else None,
        }


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


def find(run: LiveRun, wanted: Filter, *, start: int = 0, limit: int = 50, seconds: float = SEARCH_SECONDS) -> Found:
    """A page of the episodes that fit, from the `start`-th on."""
    wanted.check()
    index, alarms = run.index(), standing_alarms(run.records())
    asked = wanted.of_index(alarms)
    total = index.count(**asked)
    if not wanted.text:
        page = index.select(**asked, order=wanted.order, start=start, limit=limit)
        end = start + len(page)
        return Found([_row_view(row, alarms) for row in page], total, end, end if end < total else None)
    found: list[EpisodeRow] = []
    place = start
    until = time.monotonic() + seconds
    # JSON writes letters beyond ASCII as codes, which differ between cases: the longest stretch within ASCII is compared with the bytes.
    raw = json.dumps(max(_ASCII.findall(wanted.text), key=len, default=""))[1:-1].lower().encode()
    while place < total and len(found) < limit and (place == start or time.monotonic() <= until):
        rows = index.select(**asked, order=wanted.order, start=place, limit=SEARCH_ROWS)
        for row, line in zip(rows, index.read_lines(rows), strict=True):
            place += 1
            if excerpt := _excerpt(line, raw, wanted.text):
                found.append(_row_view(row, alarms, excerpt))
            if len(found) == limit or time.monotonic() > until:
                break
    return Found(found, total, place, place if place < total else None)


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
    record = next(index.read(index.select(step=step, split=split, group=group, member=member)[-1:]), None)
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
    others = [row for row in rows if row.group != int(group)]
    later = [row for row in others if row.group > int(group)] or others
    if later:
        same = [row for row in later if (row.group, row.member) == (later[0].group, int(member))]
        found["beside"] = _row_view((same or later)[0], {}).key
    return found


def standing_alarms(records: Sequence[StepRecord]) -> dict[int, tuple[str, ...]]:
    """Step to the names of the alarms that stood at it."""
    return {record.step: tuple(str(alarm["name"]) for alarm in record.alarms) for record in records if record.alarms}


def _row_view(row: IndexRow, alarms: Mapping[int, tuple[str, ...]], excerpt: str = "") -> EpisodeRow:
    """A row of the index as the list of episodes shows it."""
    return EpisodeRow(
        row.step, row.split, row.group, row.member, row.reward, row.success, row.stop_reason, row.kept, alarms.get(row.step, ()), excerpt
    )


# ------------------------------------------------------------------------------------------------------------------ groups


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group of a step."""

    number: int
    members: list[EpisodeRow]
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
    members: dict[int, list[EpisodeRow]] = {}
    for row in find(run, Filter(step=step, split=Split.TRAIN.value, order="oldest"), limit=_EVERY).rows:
        members.setdefault(row.group, []).append(row)
    rows = [_group(number, found, run.config().get("filter") or {}) for number, found in members.items()]
    return sorted(rows, key=lambda group: -1.0 if group.reward_variance is None else group.reward_variance, reverse=True)


def _group(number: int, members: list[EpisodeRow], settings: Mapping[str, Any]) -> GroupRow:
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
        why=_why(kept, variance, settings),
    )


def _why(kept: bool, variance: float | None, settings: Mapping[str, Any]) -> str:
    """Why the group was kept or dropped, from the run's filter settings; an alarm action may have changed the share that is kept."""
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


# ------------------------------------------------------------------------------------------------------------------ tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text that one token, or several where a character needs them, wrote."""

    text: str
    logprob: float | None
    """The sum over its tokens; None where one is not on record."""
    is_reasoning: bool
    ids: tuple[int, ...]

    @property
    def level(self) -> int | None:
        """0 for the most certain tokens to 4 for the least; None without a log-prob."""
        return None if self.logprob is None else sum(self.logprob < bound for bound in LEVELS)


def run_tokenizer(run: LiveRun) -> Any | None:
    """The tokenizer of the run's checkpoints; None where there is none."""
    return run.once("tokenizer", ("checkpoints",), lambda: _load(run.store.checkpoints))


def _load(checkpoints: Path) -> Any | None:
    from tokenizers import Tokenizer

    for path in sorted(checkpoints.glob(f"*/{MODEL}/{TOKENIZER}")):
        return Tokenizer.from_file(str(path))
    return None


def context_text(tokenizer: Any, turn: Mapping[str, Any]) -> str:
    """What the model was given before this response, special tokens included."""
    return str(tokenizer.decode(list(turn.get("context_ids") or []), skip_special_tokens=False))


def pieces(tokenizer: Any, turn: Mapping[str, Any]) -> list[Piece]:
    """The response of a turn, token by token; empty where its token ids are not on record."""
    from tokenizers.decoders import DecodeStream

    ids = list(turn.get("response_ids") or [])
    logprobs = list(turn.get("logprobs") or [])
    first, last = turn.get("reasoning_span") or (0, 0)
    stream = DecodeStream(skip_special_tokens=False)
    found: list[Piece] = []
    pending: list[int] = []
    for place, token in enumerate(ids):
        pending.append(place)
        text = stream.step(tokenizer, token)
        if text is None and place < len(ids) - 1:
            continue
        chances = [logprobs[each] if each < len(logprobs) else None for each in pending]
        known = [chance for chance in chances if chance is not None]
        found.append(
            Piece(
                text if text is not None else "\N{REPLACEMENT CHARACTER}",
                sum(known) if len(known) == len(chances) else None,
                all(first <= each < last for each in pending),
                tuple(ids[each] for each in pending),
            )
        )
        pending = []
    return found
