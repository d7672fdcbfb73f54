"""Prompt and answer to turns, whether they are text or chat messages: the part that formats share.

Every assistant message of an answer is a turn; it saw the prompt and all messages before it. A message may carry its thoughts in a field
of their own (`reasoning_content`, as servers return them), which is then the reasoning.
"""

from collections.abc import Hashable, Iterator
from typing import Any

from tether.diagnostics.rollouts import values
from tether.diagnostics.rollouts.record import BadRecord, Rollout, prompt_group

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Where a message may keep its thoughts apart from its content."""


def conversation_turns(
    prompt: Any,
    answer: Any,
    where: str,
    *,
    names: tuple[str, str] = ("prompt", "response"),
    step: int | None = None,
    group: Hashable = None,
    reward: float | None = None,
    success: bool | None = None,
) -> Iterator[Rollout]:
    """The turns of one record.

    Args:
        prompt: text or messages.
        answer: text, one message, or messages.
        names: what the file calls the two, for error messages.
        group: None to take the hash of the prompt.
    """
    shared: dict[str, Any] = {"step": step, "reward": reward, "success": success, "where": where, "trajectory": where}
    if isinstance(answer, dict):
        answer = [answer]
    is_chat = not isinstance(prompt, str)
    first = values.messages(prompt, names[0]) if is_chat else _words(prompt, names[0])
    shared["group"] = prompt_group(first) if group is None else group
    if not isinstance(answer, list):
        response = values.text(answer, names[1])
        if response is None:
            raise BadRecord(f"{names[1]} is null; expected text")
        seen: dict[str, Any] = {"messages": first} if is_chat else {"prompt": first}
        yield Rollout(**shared, **seen, turn=0, response=response)
        return
    before = list(first) if isinstance(first, list) else [{"role": "user", "content": first}]
    yield from _answers(before, values.messages(answer, names[1]), names[1], shared)


def split_conversation(conversation: list[dict[str, Any]], field: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A whole conversation as the prompt (all before the first answer) and the rest."""
    for index, message in enumerate(conversation):
        if message["role"] == "assistant":
            if index == 0:
                raise BadRecord(f"{field} begins with an assistant message; expected the prompt before it")
            return conversation[:index], conversation[index:]
    raise BadRecord(f"{field} holds no assistant message, and there is no response; expected one of them")


def _answers(before: list[dict[str, Any]], answer: list[dict[str, Any]], field: str, shared: dict[str, Any]) -> Iterator[Rollout]:
    turn = 0
    for index, message in enumerate(answer):
        if message["role"] == "assistant":
            named = f"{field}[{index}]"
            thoughts = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
            yield Rollout(
                **shared,
                messages=list(before),
                turn=turn,
                response=values.message_text(message, named),
                reasoning=values.text(thoughts, f"{named} reasoning"),
                think_implied=thoughts is not None,
            )
            turn += 1
        before.append(message)
    if turn == 0:
        raise BadRecord(f"{field} holds no assistant message; expected at least one")


def _words(prompt: str, field: str) -> str:
    words = values.text(prompt, field)
    if not words:
        raise BadRecord(f"{field} is empty; there is nothing the reasoning could depend on")
    return words
