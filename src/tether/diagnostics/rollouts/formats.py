"""The formats of rollout files, by name: TRL's, verl's and RAGEN's are read here, the others in modules of their own.

A file's format is found from its first records: the first record that any format recognises decides. Records that frameworks write beside their
rollouts are known as well, so that a reader can say what it passes over.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tether.core.errors import BadInput, UnknownName, did_you_mean
from tether.diagnostics.rollouts import dumps, episodes, generic, tether_jsonl, values
from tether.diagnostics.rollouts.record import BadRecord, Rollout
from tether.diagnostics.rollouts.values import conversation_turns, split_conversation

NUM_TRIED = 8
"""Records of a file that are tried."""
_NOT_REWARDS = {"step", "prompt", "completion", "advantage"}
_UID = re.compile(r"(.+)_(\d+)_(\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Format:
    """A file format of rollouts."""

    name: str
    title: str
    """For people."""
    expects: str
    """The fields by which it is recognised."""
    recognises: Callable[[values.Record], bool]
    rollouts: Callable[[values.Record, str], Iterator[Rollout]]
    """The turns of a record; the second argument is its place in the file."""


def _is_trl(record: values.Record) -> bool:
    return {"step", "prompt", "completion"} <= record.keys()


def trl_rollouts(record: values.Record, where: str) -> Iterator[Rollout]:
    """The turns of one row of TRL's completions_NNNNN.parquet, which GRPOTrainer writes with log_completions=True (trl 1.16.0,
    trainer/grpo_trainer.py, `log`).

    Columns, in this order: step, prompt, completion, one per reward function, columns of log_extra, advantage. Prompt and completion are text
    or chat messages as the data set has them (rendered text before 1.16). A reward that does not apply is NaN. The file has no group ids, so
    prompts are compared, and no weights of the reward functions, so the reward is their plain sum. A column counts as a reward where it holds
    a float, as TRL writes rewards; name the column with a field map where log_extra added other floats. The distillation trainer writes the
    first three columns only.
    """
    return conversation_turns(
        record["prompt"],
        record["completion"],
        where,
        names=("prompt", "completion"),
        step=values.step(record["step"]),
        reward=_total_reward(record),
    )


def _total_reward(record: values.Record) -> float | None:
    """The sum of the reward functions that applied; None if none did."""
    rewards = [value for name, value in record.items() if name not in _NOT_REWARDS and isinstance(value, float) and math.isfinite(value)]
    return math.fsum(rewards) if rewards else None


def _is_verl(record: values.Record) -> bool:
    return {"input", "output", "score"} <= record.keys()


def verl_rollouts(record: values.Record, where: str) -> Iterator[Rollout]:
    """The response of one line of verl's rollout dump, STEP.jsonl under trainer.rollout_data_dir or validation_data_dir (verl 0.9.1,
    trainer/ppo/ray_trainer.py, `_write_generations`; trainer/ppo/v1/trainer_base.py, `_log_rollout_data`).

    A line has input, output, gts, score, step, and the other values of the reward function. Input and output are decoded without special
    tokens, so x is the prompt's text and not its exact tokens. The newer trainer adds uid = SAMPLE_ROLLOUT_OUTPUT, which names group, episode
    and turn; without it prompts are compared. `acc`, which verl's own reward functions return, is the success. RAGEN's trainer dumps through
    the same code (older, without gts), and leaves input empty when it validates.
    """
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


def _is_ragen(record: values.Record) -> bool:
    metadata = record.get("metadata")
    return {"custom_id", "messages"} <= record.keys() and isinstance(metadata, dict) and "group_id" in metadata


def ragen_rollouts(record: values.Record, where: str) -> Iterator[Rollout]:
    """The turns of one episode of RAGEN's evaluation JSONL (RAGEN 20daedc: output.format=jsonl in ragen/llm_agent/agent_proxy.py,
    `_save_as_jsonl`, and scripts/convert_to_jsonl.py for its pickles); none where the model never answered.

    A line has custom_id, messages (states and responses in turn; the system prompt and the instructions are not kept, so x is the states and
    responses alone) and metadata: group_id, env_id, total_reward, success, and the environment's metrics. Upstream reads `success` from a key
    that its environments do not set (they write "TAG/success") and so stores false; the tagged value counts here. There is no step: the file
    is one evaluation.
    """
    metadata = record.get("metadata")
    if not isinstance(metadata, dict):
        raise BadRecord(f"metadata is {values.shown(metadata)}; expected an object with group_id and total_reward")
    conversation = values.messages(record["messages"], "messages") if record.get("messages") else []
    if not any(message["role"] == "assistant" for message in conversation):
        return iter(())
    prompt, answers = split_conversation(conversation, "messages")
    return conversation_turns(
        prompt,
        answers,
        where,
        names=("messages", "messages after the prompt"),
        step=values.step(metadata.get("step")),
        group=metadata.get("group_id"),
        reward=values.number(metadata.get("total_reward"), "metadata.total_reward"),
        success=_ragen_success(metadata),
    )


def _ragen_success(metadata: values.Record) -> bool | None:
    tagged = [value for name, value in metadata.items() if name.endswith("/success") and name.count("/") == 1]
    return values.outcome(tagged[0] if tagged else metadata.get("success"))


FORMATS = {
    found.name: found
    for found in (
        Format(
            "tether", "Tether's trajectories.jsonl", "step, split, group, member, turns", tether_jsonl.recognises, tether_jsonl.rollouts
        ),
        Format("ragen", "RAGEN's evaluation JSONL", "custom_id, messages, metadata.group_id", _is_ragen, ragen_rollouts),
        Format("skyrl", "SkyRL's evaluation dump", "input_prompt, output_response, score", dumps.is_skyrl, dumps.skyrl_rollouts),
        Format(
            "areal", "AReaL's rollout dump", "task_id, sample_idx, tail_version, prompt, completion", dumps.is_areal, dumps.areal_rollouts
        ),
        Format("slime", "slime's rollout data", "group_index, prompt, tokens, response_length", dumps.is_slime, dumps.slime_rollouts),
        Format(
            "prime_rl", "prime-rl's and verifiers v1's traces", "id, env, task, traces", episodes.is_prime_rl, episodes.prime_rl_rollouts
        ),
        Format(
            "verifiers", "verifiers' results.jsonl", "example_id, prompt, completion", episodes.is_verifiers, episodes.verifiers_rollouts
        ),
        Format("verl", "verl's rollout dump", "input, output, score", _is_verl, verl_rollouts),
        Format("openrlhf", "OpenRLHF's batch inference", "input, output, reward", dumps.is_openrlhf, dumps.openrlhf_rollouts),
        Format("trl", "TRL's completions", "step, prompt, completion", _is_trl, trl_rollouts),
        Format(
            "generic", "generic records", "prompt or messages, response or reasoning", generic.recognises, generic.GenericFormat().rollouts
        ),
    )
}


def named_format(name: str | None, fields: Mapping[str, str] | None) -> Format | None:
    """The format the user asked for; None leaves it to detection. A field map means generic records."""
    if name is not None and name not in FORMATS:
        raise UnknownName(f"rollout format '{name}' is not known; {did_you_mean(name, FORMATS)}")
    if not fields:
        return FORMATS[name] if name is not None else None
    if name not in (None, "generic"):
        raise BadInput(f"a field map is for generic records, but format '{name}' was asked for; leave one of them out")
    plain = FORMATS["generic"]
    return Format(plain.name, plain.title, plain.expects, plain.recognises, generic.GenericFormat(fields).rollouts)


_OTHER_RECORDS: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset({"token_ids", "loss_mask", "trainer_logprobs"}),
        "prime-rl's token export: no text, no rewards; its rollouts/ folder has both",
    ),
    (frozenset({"step", "time"}), "metrics"),
    (frozenset({"task_key", "reason"}), "verifiers' validation of a taskset"),
    (frozenset({"prompt", "chosen", "rejected"}), "pairs of preferences"),
)
"""Fields of records that frameworks write beside their rollouts, and what those are."""


def recognised(records: Sequence[values.Record]) -> Format | None:
    """The format of a file's first records, if they are rollouts."""
    for record in records:
        for candidate in FORMATS.values():
            if candidate.recognises(record):
                return candidate
    return None


def what_else(records: Sequence[values.Record]) -> str:
    """What records are that no format recognises."""
    fields = records[0].keys()
    if fields and all(isinstance(value, int | float) or value is None for value in records[0].values()):
        return "metrics"
    known = next((words for names, words in _OTHER_RECORDS if names <= fields), None)
    return known or f"no rollouts: fields {', '.join(sorted(map(str, fields))[:4])}"


def detect(records: Sequence[values.Record], where: str) -> Format:
    """The format of a file's first records.

    Args:
        where: the place of the first record, for the message when no format recognises any.
    """
    found = recognised(records)
    if found is not None:
        return found
    known = "; ".join(f"{candidate.title} ({candidate.expects})" for candidate in FORMATS.values())
    guess = {name: path for name, path in generic.suggestions(records[0]).items() if name != path}
    remedy = f"try the field map {','.join(f'{name}={path}' for name, path in guess.items())}" if guess else "give a field map"
    got = ", ".join(sorted(map(str, records[0]))) or "none"
    raise BadInput(f"{where} is no rollout of a known format: its fields are {got}; known: {known}; {remedy}")
