"""The versioned records of a run folder and their JSON form.

Two kinds are written while a run trains: a `StepRecord` per step (numbers, regime, notes) and a dictionary per trajectory, with the
sampled token ids. Both hold only values that follow from the seed and the settings: two runs of one seed write the same bytes, and
timings are stored elsewhere. The version of the whole folder stands once, in its run.json.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tether.core.enums import FinishReason, StopReason
from tether.core.errors import BadInput
from tether.core.images import MOST_PATCHES, Image, find_runs, with_patches, with_placeholders
from tether.core.text import shortened
from tether.core.types import Trajectory, Turn, Usage

SCHEMA_VERSION = 1
"""Raised whenever a file of the run folder changes its meaning."""

LOGPROB_DECIMALS = 6
_CONVERSATION_FIELDS = ("env", "group", "member", "seed", "success", "error", "retries")
_TURN_FIELDS = ("observation", "reward", "penalty", "valid", "lenient")
"""Fields of a conversation and of its turns that are recorded as they are."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The numbers of one training step.

    Example: StepRecord(3, {"rollout/success": 0.25}, regime="diverse reasoning", notes=["2 episodes ended by an environment error"]).
    """

    step: int
    metrics: dict[str, float]
    """Names of core.metrics.CATALOGUE to finite values."""
    regime: str | None = None
    """A value of core.enums.Regime; None where information was not measured in this step."""
    notes: list[str] = field(default_factory=list)
    """Remarks, one sentence each; an alarm is among them at the step at which it begins."""
    alarms: list[dict[str, Any]] = field(default_factory=list)
    """The alarms that stand at this step: name, severity, began, evidence, cause, remedy."""

    def to_json(self) -> dict[str, Any]:
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                raise ValueError(f"metric '{name}' of step {self.step} is {value}; leave out what could not be computed")
        values = dict(sorted(self.metrics.items()))
        return {"step": self.step, "metrics": values, "regime": self.regime, "notes": list(self.notes), "alarms": list(self.alarms)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "StepRecord":
        try:
            step, metrics = int(data["step"]), {str(name): float(value) for name, value in data["metrics"].items()}
            strange = [name for name, value in metrics.items() if not math.isfinite(value)]
            if strange or not 0 <= step < 2**53:
                raise ValueError(f"metric {strange[0]} is not finite" if strange else f"step {shortened(str(step), 40)}")
            alarms = list(data.get("alarms", []))
            if not all(isinstance(alarm, dict) and "name" in alarm for alarm in alarms):
                raise ValueError("an alarm without a name")
            regime = data.get("regime")
            return cls(step, metrics, None if regime is None else str(regime), list(map(str, data.get("notes", []))), alarms)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BadInput(f"not a step record: {error!r}; expected the keys step and metrics") from error


def trajectory_record(
    trajectory: Trajectory,
    step: int,
    split: str,
    kept: bool,
    placeholder: int = 0,
    choice: Mapping[str, Any] | None = None,
    decision: str | None = None,
) -> dict[str, Any]:
    """One episode, ready for JSON; its pictures are files beside the record (images.py), which the caller hands to the store.

    Args:
        kept: whether the filter let its group into the update.
        placeholder: the model's own image token, which stands in the place of every patch.
        choice: why its prompt was chosen (`Group.choice`).
        decision: what was decided about its group after the first members, where that is decided early.
    """
    return {
        "step": step,
        "split": str(split),
        "env": trajectory.env,
        "group": trajectory.group,
        "member": trajectory.member,
        "seed": trajectory.seed,
        "reward": _finite(trajectory.reward),
        "success": trajectory.success,
        "stop_reason": str(trajectory.stop_reason),
        "error": trajectory.error,
        "measures": {name: _finite(value) for name, value in sorted(trajectory.measures.items())},
        "kept": kept,
        **({"choice": dict(choice)} if choice else {}),
        **({} if decision is None else {"decision": str(decision)}),
        "turns": [_turn_record(turn, placeholder) for turn in trajectory.turns],
    }


def _turn_record(turn: Turn, placeholder: int) -> dict[str, Any]:
    context = list(map(int, turn.context_ids))
    images = find_runs(context)
    return {
        "observation": turn.observation,
        "response": turn.text,
        "reasoning_span": list(turn.reasoning_span) if turn.reasoning_span else None,
        "reward": _finite(turn.reward),
        "penalty": _finite(turn.penalty),
        "overlong": _finite(turn.overlong),
        "valid": turn.valid,
        "lenient": turn.lenient,
        "finish": str(turn.finish),
        "fresh": turn.new_context,  # the name of schema 1, which other readers know
        "context_ids": with_placeholders(context, placeholder) if images else context,
        "response_ids": list(map(int, turn.response_ids)),
        "logprobs": _rounded(turn.logprobs),
        **({"versions": [[number, len(list(run))] for number, run in itertools.groupby(turn.versions)]} if turn.versions else {}),
        **({"calls_span": list(turn.calls_span)} if turn.calls_span else {}),
        **({} if turn.trained else {"trained": False}),
        **({"images": [list(run) for run in images]} if images else {}),
    }


def _rounded(logprobs: Sequence[float]) -> list[float | None]:
    rounded = np.asarray(logprobs, dtype=np.float64).round(LOGPROB_DECIMALS)
    values: list[float | None] = rounded.tolist()
    return values if np.isfinite(rounded).all() else list(map(_finite, rounded.tolist()))


def choice_words(choice: Mapping[str, Any]) -> str:
    """Why a prompt was chosen, of an episode's record.

    >>> choice_words({"prompt": "row 17", "why": "signal", "expected": 0.2136, "success": 0.5, "episodes": 32, "last": 12})
    'row 17: chosen for its expected signal 0.214; 50% of 32 episodes solved, last played in step 12'
    >>> choice_words({"prompt": "row 3", "why": "new", "expected": 0.1})
    'row 3: chosen as a new prompt, expected signal 0.1'
    """
    reasons = {"signal": "chosen for its", "new": "chosen as a new prompt,", "explored": "explored,"}
    try:
        words = f"{choice['prompt']}: {reasons[choice['why']]} expected signal {choice['expected']:.3g}"
        if "episodes" not in choice:
            return words
        return f"{words}; {choice['success']:.0%} of {choice['episodes']} episodes solved, last played in step {choice['last']}"
    except (LookupError, TypeError, ValueError):  # of somebody else's file
        return shortened(f"choice that cannot be read: {choice}", 200)


def images_of(trajectories: Iterable[Trajectory]) -> list[Image]:
    """The pictures of these episodes, for the files beside their records."""
    return [image for trajectory in trajectories for turn in trajectory.turns for image in turn.images]


def recorded_context(turn: Mapping[str, Any]) -> tuple[int, ...]:
    """The context_ids of a turn's record as they were, its pictures among them; BadInput where those cannot be placed."""
    ids = turn["context_ids"]
    for run in (runs := turn.get("images") or []):
        try:
            start, length, digest, patch = run
            fits = 0 <= start <= start + length <= len(ids) and 0 <= patch <= patch + length <= MOST_PATCHES
            fits = fits and length > 0 and len(digest) == 12 and int(digest, 16) >= 0
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise BadInput(
                f"an image of the turn is {str(run)[:80]}; expected [start, length, digest, patch] within {len(ids)} context ids"
            )
    return with_patches(ids, runs)


def recorded_digests(turn: Mapping[str, Any]) -> list[str]:
    """The digests of the pictures of a turn's record, each once, in order: of runs of patches, or of a conversation's list."""
    return list(dict.fromkeys(str(image if isinstance(image, str) else image[2]) for image in turn.get("images") or []))


def conversation_record(trajectory: Trajectory) -> dict[str, Any]:
    """One episode with a model whose tokens are not known, ready for JSON."""
    turns = [
        {
            **{name: getattr(turn, name) for name in _TURN_FIELDS},
            "response": turn.text,
            "finish": str(turn.finish),
            "usage": None if turn.usage is None else dataclasses.asdict(turn.usage),
            **({"images": [image.digest for image in turn.images]} if turn.images else {}),
        }
        for turn in trajectory.turns
    ]
    return {
        **{name: getattr(trajectory, name) for name in _CONVERSATION_FIELDS},
        "stop_reason": str(trajectory.stop_reason),
        "measures": dict(trajectory.measures),
        "categories": dict(trajectory.categories),
        "turns": turns,
    }


def read_conversation(record: Mapping[str, Any], image: Callable[[str], Image]) -> Trajectory:
    """The episode that `conversation_record` wrote; `image` finds a picture by its digest."""
    try:
        turns = [
            Turn(
                *((), (), (), FinishReason(turn["finish"]), turn["response"], None),
                usage=None if turn["usage"] is None else Usage(**turn["usage"]),
                images=tuple(image(digest) for digest in turn.get("images", ())),
                **{name: turn[name] for name in _TURN_FIELDS},
            )
            for turn in record["turns"]
        ]
        plain = {name: record[name] for name in (*_CONVERSATION_FIELDS, "measures", "categories")}
        return Trajectory(turns=turns, stop_reason=StopReason(record["stop_reason"]), **plain)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"not the record of a conversation: {error!r}") from error


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity; an environment that pays one is recorded as null rather than ending the run."""
    return float(value) if math.isfinite(value) else None


def check_schema(version: object, where: str) -> None:
    """Refuse a folder that a newer Tether wrote: its numbers may not mean what this version takes them for."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise BadInput(f"{where} has schema {version!r}; expected a number from 1 to {SCHEMA_VERSION}: is this a Tether run?")
    if version > SCHEMA_VERSION:
        raise BadInput(f"{where} has schema {version}, this Tether reads up to {SCHEMA_VERSION}; upgrade Tether to read this run")
