"""verl's rollout dump, STEP.jsonl under trainer.rollout_data_dir or validation_data_dir (verl 0.9.1, trainer/ppo/ray_trainer.py,
`_write_generations`; trainer/ppo/v1/trainer_base.py, `_log_rollout_data`).

A line has input, output, gts, score, step, and whatever the reward function returned beside its score. Input and output are decoded with
special tokens left out, so x is the prompt's text rather than its exact tokens. The newer trainer adds uid = SAMPLE_ROLLOUT_OUTPUT, which
names group, episode and turn; without it prompts are compared. `acc`, which verl's own reward functions return, is the success.
RAGEN's trainer dumps through the same code (older, without gts), and leaves input empty when it validates.
"""

import re
from collections.abc import Iterator

from tether.diagnostics.rollouts import values
from tether.diagnostics.rollouts.conversation import conversation_turns
from tether.diagnostics.rollouts.record import BadRecord, Rollout

_UID = re.compile(r"(.+)_(\d+)_(\d+)", re.DOTALL)


def recognises(record: values.Record) -> bool:
    return {"input", "output", "score"} <= record.keys()


def rollouts(record: values.Record, where: str) -> Iterator[Rollout]:
    """The one response of a line."""
    if record["input"] == "":
        raise BadRecord("input is empty, as in the validation dumps of RAGEN's trainer; give its training dumps (trainer.rollout_data_dir)")
    uid = record.get("uid")
    placed = _UID.fullmatch(uid) if isinstance(uid, str) else None
    turns = conversation_turns(
        record["input"],
        record["output"],
        where,
        names=("input", "output"),
        step=values.step(record.get("step")),
        group=placed[1] if placed else uid,
        reward=values.number(record["score"], "score"),
        success=values.outcome(record.get("acc")),
    )
    for rollout in turns:
        yield rollout.at(trajectory=f"{placed[1]}_{placed[2]}", turn=int(placed[3])) if placed else rollout
