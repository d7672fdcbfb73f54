"""verl's trajectories in the TransferQueue: rewards by session, and rows for diagnosis.

A key is `{uid}_{session}_{index}`: a prompt, one of its rollouts, and the index of an output where a rollout gave several. The reward of a session is
that of its last output. Fields come back as nested tensors, one entry per key.
"""

from dataclasses import dataclass
from typing import Any

import transfer_queue as tq

from tether.core.errors import BadInput
from tether.integrations.rows import Row


@dataclass(frozen=True, slots=True)
class Session:
    """One rollout of a prompt."""

    uid: str
    reward: float
    length: int
    """Tokens of its last output."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One rollout with its tokens."""

    session: Session
    row: Row


def uid_of(key: str) -> str:
    """The prompt of a key."""
    return key.rsplit("_", 2)[0]


def last_outputs(keys: list[str]) -> list[int]:
    """The place of each session's last output among the keys, in the order in which sessions first appear."""
    found: dict[str, tuple[int, int]] = {}
    for place, key in enumerate(keys):
        parts = key.rsplit("_", 2)
        if len(parts) != 3 or not parts[2].isdigit():
            raise BadInput(f"'{key}' is not a key of verl's trajectories; expected uid_session_index")
        session, index = f"{parts[0]}_{parts[1]}", int(parts[2])
        if session not in found or index > found[session][0]:
            found[session] = index, place
    return [place for _, place in found.values()]


def read_rewards(batch: Any) -> list[Session]:
    """The reward of every session of a batch; a batch without rewards is refused."""
    places = last_outputs(list(batch.keys))
    keys = [batch.keys[place] for place in places]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["rm_scores"])
    scores = data.get("rm_scores", None)
    if scores is None:
        raise BadInput(
            "the trajectories have no rm_scores when the batch is sampled: the reward must be computed in the rollout "
            "(an agent loop that sets reward_score, or verl's reward loop), not after sampling"
        )
    return [Session(uid_of(key), float(row.sum()), len(row)) for key, row in zip(keys, _entries(scores), strict=True)]


def read_rows(batch: Any) -> list[SessionRow]:
    """The tokens of every session of a batch."""
    sessions = read_rewards(batch)
    places = last_outputs(list(batch.keys))
    keys = [batch.keys[place] for place in places]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["prompts", "responses", "response_mask"])
    columns = (_entries(data[name]) for name in ("prompts", "responses", "response_mask"))
    rows = []
    for session, prompt, response, mask in zip(sessions, *columns, strict=True):
        row = Row(session.uid, tuple(prompt.tolist()), tuple(response.tolist()), tuple(bool(flag) for flag in mask.tolist()), None, None)
        rows.append(SessionRow(session, row))
    return rows


def _entries(tensor: Any) -> list[Any]:
    """One tensor per key, whatever form the queue gave them: nested, a list, or equally long rows."""
    if getattr(tensor, "is_nested", False):
        return list(tensor.unbind())
    return list(tensor)
