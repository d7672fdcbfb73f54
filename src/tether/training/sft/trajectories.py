"""Demonstrations from a run folder: the run's own successful episodes (rejection sampling), by the very token ids that were sampled.

Nothing is tokenised again. That the ids mean the same to the model that is trained is checked on every turn: its tokenizer must read the
response that was recorded, and the observation in what stood before it. Validation episodes are never used.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.core.enums import FinishReason, StopReason
from tether.core.errors import BadInput
from tether.core.types import Trajectory, Turn
from tether.runs.store import RunStore
from tether.training.sft.demonstration import Demonstration
from tether.training.sft.settings import TrajectorySettings

if TYPE_CHECKING:
    from tether.models.chat import ChatFormat  # transformers: not before the source was checked


def select_trajectories(folder: Path, chosen: TrajectorySettings) -> list[dict[str, Any]]:
    """The records of the episodes to imitate, in the order of the run."""
    store = RunStore.open(folder)
    of_training = list(store.trajectories(split="train"))
    records = [record for record in of_training if _is_wanted(record, chosen)]
    if not records:
        raise BadInput(
            f"none of the {len(of_training)} training episodes in '{folder}' is {_wanted_words(chosen)}; "
            "train for longer, or loosen the settings under trajectories"
        )
    return records if chosen.max_per_prompt is None else _best_of_prompts(records, chosen.max_per_prompt)


def demonstrated(records: list[dict[str, Any]], chat: "ChatFormat", folder: Path, model: str) -> list[Demonstration]:
    """The episodes with their own token ids; a tokenizer that reads them differently is refused."""
    found = []
    for record in records:
        turns = list(_turns(record))
        for turn in turns:
            if not _reads_the_same(chat, turn):
                raise BadInput(
                    f"the tokenizer of '{model}' does not read the token ids of '{folder}': it reads {_read(chat, turn.response_ids)!r} "
                    f"where the run wrote {turn.text[:60]!r}; give --model the model of that run, or a checkpoint of it"
                )
        trajectory = Trajectory(0, 0, int(record["seed"]), turns, StopReason(record["stop_reason"]), success=bool(record["success"]))
        found.append(Demonstration(f"{record.get('env', '')} {record['seed']}", trajectory))
    return found


def _is_wanted(record: dict[str, Any], chosen: TrajectorySettings) -> bool:
    reward, step = record["reward"], int(record["step"])
    return (
        not record.get("error")
        and any(turn["response_ids"] for turn in record["turns"])
        and (bool(record["success"]) or not chosen.success_only)
        and (chosen.min_reward is None or (reward is not None and reward >= chosen.min_reward))
        and chosen.first_step <= step <= (chosen.last_step or step)
    )


def _wanted_words(chosen: TrajectorySettings) -> str:
    words = ["a success" if chosen.success_only else "without an error"]
    words += [] if chosen.min_reward is None else [f"with a return of at least {chosen.min_reward:g}"]
    words += [f"from step {chosen.first_step}"] if chosen.first_step > 1 else []
    words += [f"up to step {chosen.last_step}"] if chosen.last_step is not None else []
    return ", ".join(words)


def _best_of_prompts(records: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many episodes of a prompt: those with the highest return, earlier ones first; in the order of the run."""
    kept: set[int] = set()
    prompts: dict[tuple[Any, ...], list[int]] = {}
    for index, record in enumerate(records):
        prompts.setdefault((record.get("env"), record["seed"]), []).append(index)
    for indices in prompts.values():
        kept.update(sorted(indices, key=lambda index: (-(records[index]["reward"] or 0.0), index))[:most])
    return [record for index, record in enumerate(records) if index in kept]


def _turns(record: dict[str, Any]) -> Iterator[Turn]:
    for turn in record["turns"]:
        yield Turn(
            context_ids=tuple(turn["context_ids"]),
            response_ids=tuple(turn["response_ids"]),
            logprobs=tuple(turn["logprobs"]),
            finish=FinishReason(turn["finish"]),
            text=turn["response"],
            reasoning_span=None,
            observation=turn["observation"],
            new_context=bool(turn.get("fresh")),
        )


def _reads_the_same(chat: "ChatFormat", turn: Turn) -> bool:
    # Some templates strip a message, so the ends of an observation may be missing.
    return chat.decode(turn.response_ids) == turn.text and turn.observation.strip() in chat.decode(turn.context_ids)


def _read(chat: "ChatFormat", ids: tuple[int, ...]) -> str:
    return chat.decode(ids)[:60]
