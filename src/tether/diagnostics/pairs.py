"""Rows of a rollout batch to (x, z) pairs: the prompt and the reasoning of a turn, as token ids.

x is everything the model saw before the reasoning, up to and including the opening think tag; z is the reasoning without its tags. One row
is one turn. Rows are plain sequences, so any training loop can supply them; `rollout_rows` makes them from Tether's own groups. Token ids
are used as they are. Three scopes choose the turns:

- first turn: one pair per trajectory; all members of a group share x, so P prompts are P columns
- trajectory: a trajectory is drawn uniformly, then one of its turns; long episodes count no more than short ones
- turn: a turn is drawn uniformly from all turns of all trajectories

The same is made of the tool calls of an agent, in the place of its reasoning: z is then the call, and x stays what it is.

In the last two scopes every drawn context is a column. Equal contexts (two groups that drew the same puzzle) are always one column. A fixed
probe (`ProbeRows`) takes the place of the first turns: the same prompts at every measurement, each of them a column whatever was replied.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from tether.core.enums import StopReason
from tether.core.errors import BadInput
from tether.core.images import Image, has_images
from tether.core.types import AGENT, Group, Trajectory

Ids = tuple[int, ...]
TokensOrText = Sequence[int] | str
OTHER_IMAGES = 2
"""How often a reasoning is scored with other images: those of another episode, and blank ones."""
Lead = TypeVar("Lead", str, Ids)
"""What stands before the reasoning in a response, as text or as token ids."""


@dataclass(frozen=True, slots=True)
class Rows:
    """N turns as token ids, and the trajectories and groups they belong to."""

    prompts: list[Ids]
    reasonings: list[Ids]
    """Empty where a response holds no reasoning."""
    trajectories: list[list[int]]
    """The rows of each trajectory, in the order of its turns."""
    groups: list[Hashable]
    """The group of each trajectory."""


@dataclass(frozen=True, slots=True)
class ProbeRows:
    """The replies to the prompts of a fixed probe, one row per reply. Give the prompts in the same order at every measurement."""

    prompts: Sequence[TokensOrText]
    """Everything the model saw before each reasoning."""
    reasonings: Sequence[TokensOrText | None]
    """Empty or None where a reply holds no reasoning."""
    tokens_sampled: int | None = None
    """Tokens that sampling put through the model; None: those of the prompts and the reasonings."""
    errors: int = 0
    """Episodes that an environment error ended; they are in no row."""
    notes: Sequence[str] = ()
    """What to put on the record beside the numbers."""
    images: Sequence[Image] = ()
    """The pictures of the prompts, so that they are held until all is scored."""


@dataclass(slots=True)
class Pairs:
    """N reasonings and the P distinct prompts they came from."""

    prompts: list[Ids] = field(default_factory=list)
    reasonings: list[Ids] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    """The column of each reasoning's own prompt."""
    num_empty: int = 0
    """Responses without reasoning (empty, or the think tag was never closed); counted, not scored."""

    dropped: int = 0
    """Reasonings left out by `only`."""

    @property
    def lengths(self) -> list[int]:
        return [len(reasoning) for reasoning in self.reasonings]

    @property
    def population(self) -> int:
        """The number of reasonings before any was left out."""
        return len(self.reasonings) + self.dropped

    @property
    def cost(self) -> int:
        """Tokens that scoring computes: every prompt once, every reasoning under every prompt; where there are images, both twice more with others."""
        prompts, reasonings = sum(map(len, self.prompts)), sum(self.lengths)
        again = OTHER_IMAGES * (prompts + reasonings) if any(map(has_images, self.prompts)) else 0
        return prompts + len(self.prompts) * reasonings + again

    def only(self, rows: Iterable[int]) -> "Pairs":
        """These reasonings against all prompts, so that means over reasonings keep their expectation."""
        kept = [int(row) for row in rows]
        reasonings, source = [self.reasonings[row] for row in kept], [self.source[row] for row in kept]
        return Pairs(self.prompts, reasonings, source, self.num_empty, self.population - len(kept))


def rollout_rows(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Tether's groups as the keyword arguments of `Monitor.observe`, one row per turn.

    The token ids are those of the trajectories; text is never tokenised again. A trajectory that ended with an environment error is left
    out: its reward is not evidence about the policy. Where any turn calls tools, `calls` is a column too.
    """
    rows: dict[str, list[Any]] = {
        name: [] for name in ("prompts", "reasonings", "groups", "rewards", "successes", "trajectories", "calls")
    }  # fmt: skip
    played = [
        (group, trajectory) for group in groups for trajectory in group.trajectories if trajectory.stop_reason != StopReason.ENV_ERROR
    ]
    # A column is a prompt, not a beginning of a response, so all members of a group get the lead of most of them. Tether's own prompts open the
    # think tag, and their leads are empty.
    leads = {
        group.index: most_common([t.turns[0].lead_ids for t in group.trajectories if t.turns and t.turns[0].reasoning_ids], default=())
        for group in groups
    }
    common = _common_prompts(groups)
    for number, (group, trajectory) in enumerate(played):
        for turn in range(len(trajectory.turns)):
            lead = trajectory.turns[turn].lead_ids if turn else leads[group.index]
            context = common[group.index] if turn == 0 and group.index in common else context_of(trajectory, turn)
            rows["prompts"].append((*context, *lead))
            rows["calls"].append(trajectory.turns[turn].calls_ids)
            rows["reasonings"].append(trajectory.turns[turn].reasoning_ids)
            rows["groups"].append(group.index)
            rows["rewards"].append(trajectory.reward)
            rows["successes"].append(trajectory.success)
            rows["trajectories"].append(number)
    if not any(rows["calls"]):
        del rows["calls"]
    return rows


def _common_prompts(groups: Sequence[Group]) -> dict[int, Ids]:
    """The first prompt that stands for an agent's task, where fewer than half of the members began with the same one.

    An agent may write a date or an id into its prompts. Each would be a column of its own, and no reasoning could tell the columns of one
    task apart.
    """
    found = {}
    for group in groups:
        firsts = [trajectory.turns[0].context_ids for trajectory in group.trajectories if trajectory.turns]
        prompt = most_common(firsts, default=())
        if group.env == AGENT and 2 * firsts.count(prompt) < len(firsts):
            found[group.index] = prompt
    return found


def differing_prompts_note(groups: Sequence[Group]) -> str | None:
    """One sentence where the members of an agent's tasks do not begin alike; None where they do."""
    count = len(_common_prompts(groups))
    if not count:
        return None
    return (
        f"diagnosis: in {count} of {len(groups)} tasks fewer than half of the episodes begin with the same prompt (a date, an id?); there the prompt "
        "of one of them is the column of the task"
    )


def most_common(values: Sequence[Lead], default: Lead) -> Lead:
    """The most common value, the smallest among equals; used for what stands before the reasoning in the responses of a group."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value), default=default)


def probe_rows(groups: Sequence[Group]) -> ProbeRows:
    """The first turns of Tether's groups as the rows of a probe. Errored episodes are counted and left out, as in `rollout_rows`."""
    common = _common_prompts(groups)
    firsts = [trajectory.turns[0] for group in groups for trajectory in group.trajectories if trajectory.turns]
    prompts = [common.get(group.index, t.turns[0].context_ids) for group in groups for t in group.trajectories if t.turns]
    return ProbeRows(
        prompts=prompts,
        reasonings=[turn.reasoning_ids for turn in firsts],
        tokens_sampled=sum(len(turn.context_ids) + len(turn.response_ids) for turn in firsts),
        errors=sum(len(group.errored) for group in groups),
        images=tuple(image for turn in firsts for image in turn.images),
    )


def read_rows(
    prompts: Sequence[TokensOrText],
    reasonings: Sequence[TokensOrText | None],
    groups: Sequence[Hashable],
    trajectories: Sequence[Hashable] | None = None,
    tokenizer: Any = None,
) -> Rows:
    """Rows as token ids. A text is encoded with `tokenizer`, the prompt apart from the reasoning; token ids are kept.

    `trajectories` tells the turns of one episode apart within a group; without it, every row is a trajectory of its own.
    """
    counts = {"reasonings": len(reasonings), "groups": len(groups)} | ({} if trajectories is None else {"trajectories": len(trajectories)})
    for name, count in counts.items():
        if count != len(prompts):
            raise BadInput(f"one row per turn: got {len(prompts)} prompts and {count} {name}; give equally many")
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(row if trajectories is None else (group, trajectories[row]), []).append(row)
    return Rows(
        prompts=[encoded(prompt, tokenizer, f"prompts[{row}]", beginning=True) for row, prompt in enumerate(prompts)],
        reasonings=[() if text is None else encoded(text, tokenizer, f"reasonings[{row}]") for row, text in enumerate(reasonings)],
        trajectories=list(members.values()),
        groups=[groups[rows[0]] for rows in members.values()],
    )


def encoded(value: TokensOrText, tokenizer: Any, where: str, *, beginning: bool = False) -> Ids:
    """Token ids as they are, a text as the tokenizer encodes it; `beginning`: with the token that begins every text, if there is one."""
    if isinstance(value, tuple):
        return value
    if not isinstance(value, str):
        return tuple(int(token) for token in value)
    if tokenizer is None:
        raise BadInput(f"{where} is text; give the tokenizer of the model that scores, or token ids")
    ids = tuple(tokenizer.encode(value, add_special_tokens=False))
    start = beginning_ids(tokenizer) if beginning else ()
    return ids if ids[: len(start)] == start else start + ids


def beginning_ids(tokenizer: Any) -> Ids:
    """The token that the tokenizer puts before every text, if it does."""
    added = tuple(tokenizer.encode("", add_special_tokens=True))
    return added if added == (tokenizer.bos_token_id,) else ()


def first_turn_pairs(rows: Rows) -> Pairs:
    """The first turn of every trajectory."""
    return _pairs(rows, (turns[0] for turns in rows.trajectories))


def probe_pairs(rows: Rows) -> Pairs:
    """Every row of a probe. A prompt whose replies hold no reasoning stays a column, so that every measurement has the same columns."""
    return _pairs(rows, range(len(rows.prompts)), columns=rows.prompts)


def trajectory_pairs(rows: Rows, count: int, rng: np.random.Generator) -> Pairs:
    """At most `count` trajectories, drawn without repetition, with one turn each."""
    chosen = rng.permutation(len(rows.trajectories))[:count]
    drawn = [rows.trajectories[index] for index in sorted(chosen)]
    return _pairs(rows, [turns[int(rng.integers(len(turns)))] for turns in drawn])


def turn_pairs(rows: Rows, count: int, rng: np.random.Generator) -> Pairs:
    """At most `count` turns of all trajectories, drawn without repetition."""
    turns = [turn for trajectory in rows.trajectories for turn in trajectory]
    return _pairs(rows, [turns[index] for index in sorted(rng.permutation(len(turns))[:count])])


def context_of(trajectory: Trajectory, turn: int) -> Ids:
    """Every token that the model saw before it responded in this turn."""
    start = max(index for index in range(turn + 1) if index == 0 or trajectory.turns[index].new_context)
    parts = [ids for earlier in trajectory.turns[start:turn] for ids in (earlier.context_ids, earlier.response_ids)]
    return (*itertools.chain(*parts), *trajectory.turns[turn].context_ids)


def _pairs(rows: Rows, chosen: Iterable[int], columns: Iterable[Ids] = ()) -> Pairs:
    """The reasonings of the chosen rows. The columns are their prompts, after those that are given."""
    pairs = Pairs()
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(columns))}
    for row in chosen:
        if not rows.reasonings[row]:
            pairs.num_empty += 1
            continue
        column = places.setdefault(rows.prompts[row], len(places))
        pairs.reasonings.append(rows.reasonings[row])
        pairs.source.append(column)
    pairs.prompts = list(places)
    return pairs
