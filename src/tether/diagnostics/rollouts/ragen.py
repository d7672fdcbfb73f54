"""Upstream RAGEN's evaluation JSONL (RAGEN 20daedc: output.format=jsonl in ragen/llm_agent/agent_proxy.py `_save_as_jsonl`, and
scripts/convert_to_jsonl.py for its pickles).

A line has custom_id, messages (states and responses in turn; neither the system prompt nor the instructions are kept, so x is the states
and responses alone) and metadata: group_id, env_id, total_reward, success, and the environment's metrics. Upstream reads
`success` from a key that its environments do not set (they write "TAG/success") and so stores false; the tagged one counts here.
There is no step: the file is one evaluation.
"""

from collections.abc import Iterator

from tether.diagnostics.rollouts import values
from tether.diagnostics.rollouts.conversation import conversation_turns, split_conversation
from tether.diagnostics.rollouts.record import BadRecord, Rollout


def recognises(record: values.Record) -> bool:
    metadata = record.get("metadata")
    return {"custom_id", "messages"} <= record.keys() and isinstance(metadata, dict) and "group_id" in metadata


def rollouts(record: values.Record, where: str) -> Iterator[Rollout]:
    """The turns of one episode; none where the model never answered."""
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
        success=_success(metadata),
    )


def _success(metadata: values.Record) -> bool | None:
    tagged = [value for name, value in metadata.items() if name.endswith("/success") and name.count("/") == 1]
    return values.outcome(tagged[0] if tagged else metadata.get("success"))
