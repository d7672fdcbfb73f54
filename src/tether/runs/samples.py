"""A few episodes from different prompts, ready to be shown side by side.

The point is to let a person see whether reasoning differs between prompts in what it says, which no count of words can tell: a
collapsed run varies its wording too. Episodes are not picked by hand: the first member of the first few prompts, at the first and the
last recorded step. Where validation was recorded at both, it is shown, because it plays the same prompts each time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tether.core.enums import Split
from tether.core.grammar import THINK_CLOSE, parse_response
from tether.runs.store import RunStore

NUM_PROMPTS = 4
LONGEST_TEXT = 1200
"""Characters of an observation or a response that are shown; the store holds the rest."""


@dataclass(frozen=True, slots=True)
class SampleTurn:
    """One exchange as it is shown."""

    observation: str
    reasoning: str
    """Empty if the think tag was never closed; the whole response is then in `answer`."""
    answer: str
    """What follows the reasoning: the answer, or the raw rest of a malformed response."""
    well_formed: bool
    reward: float | None
    penalty: float | None
    valid: bool


@dataclass(frozen=True, slots=True)
class SampleEpisode:
    """One episode as it is shown."""

    prompt: int
    """The number of its group."""
    seed: int
    success: bool
    stop_reason: str
    error: str | None
    reward: float | None
    turns: list[SampleTurn]


@dataclass(frozen=True, slots=True)
class SampleStep:
    """Episodes of different prompts at one step."""

    step: int
    split: str
    episodes: list[SampleEpisode]


def sample_steps(store: RunStore) -> list[SampleStep]:
    """Samples at the first and the last recorded step; fewer where fewer were recorded."""
    steps_of: dict[str, list[int]] = {}
    for step, split in store.trajectory_blocks():
        steps_of.setdefault(split, []).append(step)
    if not steps_of:
        return []
    # Validation only wins where it can show two points in time; a single validation would hide how training began.
    most = max(steps_of, key=lambda split: (len(steps_of[split]), split == Split.TRAIN))
    split = Split.VALIDATION.value if len(steps_of.get(Split.VALIDATION, [])) > 1 else most
    ends = dict.fromkeys((steps_of[split][0], steps_of[split][-1]))
    return [
        SampleStep(step, split, [_episode(record) for record in _first_of_each_prompt(store.trajectories(step, split))]) for step in ends
    ]


def _first_of_each_prompt(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first trajectory of each of the first few distinct instances; reading stops as soon as they are found."""
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        found.setdefault(record["seed"], record)
        if len(found) == NUM_PROMPTS:
            break
    return list(found.values())


def _episode(record: dict[str, Any]) -> SampleEpisode:
    return SampleEpisode(
        prompt=record["group"],
        seed=record["seed"],
        success=record["success"],
        stop_reason=record["stop_reason"].replace("_", " "),
        error=record["error"],
        reward=record["reward"],
        turns=[_turn(turn) for turn in record["turns"]],
    )


def _turn(turn: dict[str, Any]) -> SampleTurn:
    response = turn["response"]
    parsed = parse_response(response)
    rest = response if parsed.reasoning_end is None else response[parsed.reasoning_end + len(THINK_CLOSE) :]
    return SampleTurn(
        observation=_shortened(turn["observation"]),
        reasoning=_shortened(parsed.reasoning or ""),
        answer=_shortened(rest.strip() if parsed.answer is None else parsed.answer),
        well_formed=parsed.well_formed,
        reward=turn["reward"],
        penalty=turn["penalty"],
        valid=turn["valid"],
    )


def _shortened(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT].rstrip()} … ({len(text) - LONGEST_TEXT} more characters)"
