"""Chat to tokens, without ever re-tokenizing what the model wrote.

A conversation is built by appending: the first prompt is rendered through the tokenizer's chat template; later, only the text
between the end of the model's response and the start of its next one (end of turn, the user's message, the opening of the
assistant's turn) is rendered and tokenized. Every prompt ends with the opening think tag, so a response begins with the reasoning.
"""

from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from tether.core.errors import BadInput
from tether.core.grammar import THINK_OPEN

_RESPONSE = "\u27e6response\u27e7"
"""Stands for the model's response while a template is rendered; what follows it is what has to be appended."""


class ChatFormat:
    """The chat template of one tokenizer, as token ids to append."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_of_turn_ids: Sequence[int] = ()) -> None:
        """`end_of_turn_ids`: every token that ends a response, `Policy.end_of_turn_ids`; the tokenizer's own always does."""
        if not tokenizer.chat_template:
            raise BadInput(f"the tokenizer of '{tokenizer.name_or_path}' has no chat template; use an instruction-tuned model")
        if tokenizer.eos_token_id is None:
            raise BadInput(f"the tokenizer of '{tokenizer.name_or_path}' has no end-of-turn token; use an instruction-tuned model")
        self._tokenizer = tokenizer
        self.end_of_turn = int(tokenizer.eos_token_id)
        self.end_of_turn_ids = frozenset((self.end_of_turn, *end_of_turn_ids))
        self._system_role = self._accepts_system_role()

    def _accepts_system_role(self) -> bool:
        try:
            self._render([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
        except TemplateError:  # some templates refuse the role; its text then goes in front of the first message
            return False
        return True

    def first_prompt(self, system: str | None, user: str) -> tuple[int, ...]:
        """Tokens of a new conversation, up to and including the opening think tag; None leaves the system message to the template."""
        return self.encode(self._render(self._opening(system, user)))

    def next_prompt(self, user: str, response_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens between a response and the next one.

        A template begins this text with the token that ends a turn. That token is left out if the response already ended with it. A response
        may end with another one of the model's end-of-turn tokens (Llama 3 has three): the template's own token then follows it.
        """
        messages = [*self._opening("s", "u"), {"role": "assistant", "content": _RESPONSE}, {"role": "user", "content": user}]
        ids = self.encode(self._render(messages).rpartition(_RESPONSE)[2])
        ended = bool(response_ids) and response_ids[-1] in self.end_of_turn_ids and ids[:1] == response_ids[-1:]
        return ids[1:] if ended else ids

    def decode(self, ids: tuple[int, ...]) -> str:
        """The text of sampled tokens, special ones included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def tokens_before(self, ids: tuple[int, ...], num_chars: int) -> int:
        """How many leading tokens of `ids` lie entirely within the first `num_chars` characters of their text.

        A token that straddles the border (such as one that joins a full stop with the start of a tag) is not counted.
        """
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high + 1) // 2
            if len(self.decode(ids[:middle])) <= num_chars:
                low = middle
            else:
                high = middle - 1
        return low

    def _opening(self, system: str | None, user: str) -> list[dict[str, str]]:
        if system is None:
            return [{"role": "user", "content": user}]
        if self._system_role:
            return [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return [{"role": "user", "content": f"{system}\n\n{user}"}]

    def _render(self, messages: list[dict[str, str]]) -> str:
        rendered: Any = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        text = str(rendered)
        return text if text.rstrip().endswith(THINK_OPEN) else text + THINK_OPEN

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a text, nothing added."""
        # Not verbose: transformers warns of texts longer than the model, but a rollout keeps to its budget by itself.
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
