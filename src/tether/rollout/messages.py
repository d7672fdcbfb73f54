"""Conversations as messages, for models whose tokenizer is not here.

An episode builds its prompts by appending numbers, which are token ids where the model is loaded here. A `MessageFormat` gives every message
a number instead. So the episode, the environments and all context modes are the same code for both; what differs is how numbers become a
request: tokens are fed to an engine, messages are looked up here and sent.
"""

from tether.core.enums import FinishReason
from tether.core.grammar import answer_end
from tether.core.types import Completion, Exchanges, Trajectory
from tether.models.chat_endpoint import ChatReply

END_OF_TURN = 0
"""The number behind a response that the model ended by itself; it stands for no message."""


class MessageFormat:
    """The messages of one conversation by number."""

    def __init__(self) -> None:
        self._sent: list[dict[str, str]] = [{}]
        """As the server gets them."""
        self._texts: list[str] = [""]
        """As the parser reads them: the same but for reasoning that a server keeps apart."""

    def first_prompt(self, system: str | None, user: str, few_shot: Exchanges = ()) -> tuple[int, ...]:
        opening = [] if system is None else [self._add("system", system)]
        for shown, reply in few_shot:
            opening += [self._add("user", shown), self._add("assistant", reply)]
        return (*opening, self._add("user", user))

    def next_prompt(self, user: str, response_ids: tuple[int, ...]) -> tuple[int, ...]:
        return (self._add("user", user),)

    def decode(self, ids: tuple[int, ...]) -> str:
        return "".join(self._texts[number] for number in ids)

    def tokens_before(self, ids: tuple[int, ...], num_chars: int) -> int:
        """Nothing: a message is never only reasoning."""
        return 0

    def completion(self, reply: ChatReply, tags: tuple[str, ...]) -> Completion:
        """A reply as the episode takes it. What stands behind the answer is cut off: an engine here would have stopped there."""
        end = answer_end(reply.text, tags)
        behind = 0 if end is None else len(reply.text) - end
        text, content = (part[: len(part) - behind] for part in (reply.text, reply.content))
        number = self._add("assistant", content, text)
        if end is not None or reply.cut:
            return Completion((number,), (), FinishReason.LENGTH if end is None else FinishReason.STOP_TEXT, usage=reply.usage)
        return Completion((number, END_OF_TURN), (), FinishReason.END_OF_TURN, usage=reply.usage)

    def messages(self, ids: list[int]) -> list[dict[str, str]]:
        """What to send for a conversation."""
        return [self._sent[number] for number in ids if number != END_OF_TURN]

    def _add(self, role: str, content: str, text: str = "") -> int:
        self._sent.append({"role": role, "content": content})
        self._texts.append(text or content)
        return len(self._sent) - 1


def forget_numbers(trajectory: Trajectory) -> None:
    """Leave out the numbers of messages, once the conversation is over: whoever reads a trajectory takes them for token ids."""
    for turn in trajectory.turns:
        turn.context_ids, turn.response_ids, turn.reasoning_span = (), (), None
