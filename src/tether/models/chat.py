"""Chat to tokens, without ever re-tokenizing what the model wrote.

A conversation is built by appending: the first prompt is rendered through the tokenizer's chat template; later, only the text
between the end of the model's response and the start of its next one (end of turn, the user's message, the opening of the
assistant's turn) is rendered and tokenized. Every prompt ends with the opening think tag, so a response begins with the reasoning.

Templates differ, and what a template does is found out by rendering it:
- One that has a reasoning mode (Qwen3's enable_thinking) is rendered with the mode on.
- One that opens the think tag itself (DeepSeek-R1) is left alone; where it writes a think block that is closed already, the closing is cut off.
- A tokenizer without a template gets a plain one, and keeps it: a model is exported with the template that it was trained with.
`ChatFormat.notes` says in words which of these holds. Reasoning of earlier turns stays in the conversation, also where a template would leave it
out: a conversation is only ever appended to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tether.core.errors import BadInput
from tether.core.grammar import THINK_CLOSE, THINK_OPEN
from tether.core.images import MARKER, image_of
from tether.core.types import Exchanges

if TYPE_CHECKING:  # torch: a process that plays an agent's episodes reads and writes text, and starts five seconds sooner without
    from tether.models.vision import Vision

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}\n\n{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)
"""For models without a chat template: "System: ...", "User: ..." and "Assistant: ...", the last with the end-of-turn token behind it."""
REASONING_MODES = ("enable_thinking", "thinking")
"""The arguments by which templates switch reasoning on: of Qwen3 and most others, and of DeepSeek-V3.1."""

CACHED_PROMPTS = 64
"""First prompts that are kept: the members of a group begin alike, one after the other."""
CACHED_EXAMPLES = 16
"""Beginnings with worked examples that are kept: one for each environment of a run."""
CACHED_JOINTS = 2048
"""Later observations that are kept: those of a group resemble each other, and a template takes longer than many environments."""

_RESPONSE = "\u27e6response\u27e7"
"""Stands for the model's response while a template is rendered; what follows it is what has to be appended."""


class PromptFormat(Protocol):
    """What an episode needs to know of how a model is written to: prompts as numbers to append, and responses read back from theirs.

    Of a model that is loaded here the numbers are its tokens (`ChatFormat`); of one behind a chat endpoint they stand for whole messages
    (`rollout.remote.MessageFormat`).
    """

    @property
    def sees(self) -> bool:
        """Whether texts may hold markers of images."""
        ...

    def first_prompt(self, system: str | None, user: str, few_shot: Exchanges = ()) -> tuple[int, ...]: ...

    def next_prompt(self, user: str, response_ids: tuple[int, ...]) -> tuple[int, ...]: ...

    def decode(self, ids: tuple[int, ...]) -> str: ...

    def tokens_before(self, ids: tuple[int, ...], num_chars: int) -> int: ...


class ChatFormat:
    """The chat template of one tokenizer, as token ids to append."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_of_turn_ids: Sequence[int] = (), vision: "Vision | None" = None) -> None:
        """`end_of_turn_ids`: every token that ends a response, `Policy.end_of_turn_ids`; the tokenizer's own always does. `vision`: how the model
        reads images, `Policy.vision`; a text may hold markers of images then."""
        if tokenizer.eos_token_id is None:
            raise BadInput(f"the tokenizer of '{tokenizer.name_or_path}' has no end-of-turn token; use an instruction-tuned model")
        if not tokenizer.chat_template:
            tokenizer.chat_template = PLAIN_TEMPLATE
        self.tokenizer = self._tokenizer = tokenizer
        self.vision = vision
        self.end_of_turn = int(tokenizer.eos_token_id)
        self.end_of_turn_ids = frozenset((self.end_of_turn, *end_of_turn_ids))
        try:
            self._rendered([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
            self._system_role = True
        except TemplateError:  # some templates refuse the role; its text then goes in front of the first message
            self._system_role = False
        opening = self._opening("s", "u")
        self._modes: dict[str, Any] = {
            name: True for name in REASONING_MODES if self._rendered(opening, **{name: True}) != self._rendered(opening, **{name: False})
        }
        """The arguments of REASONING_MODES that change what the template renders."""
        self.notes = tuple(self._describe())
        """What is worth knowing about the template before the first prompt; empty for one that knows nothing of reasoning."""
        self._decode, self._encode = text_decoder(tokenizer), text_encoder(tokenizer)
        self._first_prompts = lru_cache(maxsize=CACHED_PROMPTS)(self._first_prompt)
        self._beginnings = lru_cache(maxsize=CACHED_EXAMPLES)(self._with_examples)
        self._joints = lru_cache(maxsize=CACHED_JOINTS)(self._joint)

    @property
    def sees(self) -> bool:
        return self.vision is not None

    def _describe(self) -> Iterator[str]:
        prompt = self._rendered(self._opening("s", "u"), **self._modes).rstrip()
        if self._tokenizer.chat_template == PLAIN_TEMPLATE:
            yield (
                "the model has no chat template: prompts are plain lines that begin with System:, User: and Assistant:; "
                "an instruction-tuned model follows them better, or teach this one the form first with tether sft"
            )
        if self._modes:
            yield (
                f"the chat template has a reasoning mode ({', '.join(self._modes)}): it is on, and every prompt ends with one opening think tag; "
                "a model trained to reason at length may need a larger rollout.max_tokens"
            )
        if prompt.endswith(THINK_OPEN):
            yield "the chat template opens the think tag itself: prompts end with that one, and none is added"
        elif prompt.endswith(THINK_CLOSE):
            yield "the chat template ends prompts with a think block that is closed already: the closing tag is cut off, so that the model reasons"

    def first_prompt(self, system: str | None, user: str, few_shot: Exchanges = ()) -> tuple[int, ...]:
        """Tokens of a new conversation, up to and including the opening think tag; None leaves the system message to the template.

        `few_shot` are turns in front of the user's message: written as turns of a rollout are, so that replies keep their reasoning also
        where a template would leave it out.
        """
        return self._first_prompts(system, user, few_shot)

    def _first_prompt(self, system: str | None, user: str, few_shot: Exchanges) -> tuple[int, ...]:
        if few_shot:
            return self._beginnings(system, few_shot) + self._joints(user)
        return self.encode(self._render(self._opening(system, user)))

    def _with_examples(self, system: str | None, few_shot: Exchanges) -> tuple[int, ...]:
        """What all first prompts with these examples begin with, up to the end of the last reply."""
        (first, reply), *others = few_shot
        ids = self.encode(self._render(self._opening(system, first))) + self.encode(reply.removeprefix(THINK_OPEN))
        for observation, reply in others:
            ids += self._joints(observation) + self.encode(reply.removeprefix(THINK_OPEN))
        return ids

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Tokens of a whole conversation given as messages (role, content), up to and including the opening think tag.

        For clients that hold a conversation as text. Episodes append to the tokens that were sampled instead: `next_prompt`.
        """
        try:
            return self.encode(self._render(self.with_system_in_front(messages)))
        except TemplateError as error:
            raise BadInput(f"the chat template refuses these messages: {error}; send user and assistant messages in turn") from error

    def with_system_in_front(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages as the template takes them: where it refuses the role system, that text goes in front of the next message."""
        known = [dict(message) for message in messages]
        if not self._system_role and known[0]["role"] == "system" and len(known) > 1:
            known[:2] = [{"role": "user", "content": f"{known[0]['content']}\n\n{known[1]['content']}"}]
        return known

    def rendered(self, messages: list[dict[str, Any]], *, prompt: bool = True, **arguments: Any) -> str:
        """What the template makes of messages, reasoning modes on, nothing added; `prompt`: up to where a reply begins."""
        return self._rendered(messages, prompt=prompt, **self._modes, **arguments)

    def next_prompt(self, user: str, response_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens between a response and the next one.

        A template begins this text with the token that ends a turn. That token is left out if the response already ended with it. A response
        may end with another one of the model's end-of-turn tokens (Llama 3 has three): the template's own token then follows it.
        """
        ids = self._joints(user)
        ended = bool(response_ids) and response_ids[-1] in self.end_of_turn_ids and ids[:1] == response_ids[-1:]
        return ids[1:] if ended else ids

    def decode(self, ids: tuple[int, ...]) -> str:
        """The text of sampled tokens, special ones included."""
        return self._decode(ids)

    def tokens_before(self, ids: tuple[int, ...], num_chars: int) -> int:
        """How many leading tokens of `ids` lie entirely within the first `num_chars` characters of their text."""
        return tokens_before(self.decode, ids, num_chars)

    def _joint(self, user: str) -> tuple[int, ...]:
        """Tokens between a response that no token has ended and the next one."""
        messages = [*self._opening("s", "u"), {"role": "assistant", "content": _RESPONSE}, {"role": "user", "content": user}]
        return self.encode(self._render(messages).rpartition(_RESPONSE)[2])

    def _opening(self, system: str | None, user: str) -> list[dict[str, str]]:
        if system is None:
            return [{"role": "user", "content": user}]
        if self._system_role:
            return [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return [{"role": "user", "content": f"{system}\n\n{user}"}]

    def _render(self, messages: list[dict[str, str]]) -> str:
        """A prompt that ends with one opening think tag, whatever the template does about reasoning."""
        text = self._rendered(messages, **self._modes)
        if text.rstrip().endswith(THINK_CLOSE):
            text = text.rstrip().removesuffix(THINK_CLOSE)
            if text.rstrip().endswith(THINK_OPEN):  # the block was empty: what stands between its tags goes too
                text = text.rstrip()
        return text if text.rstrip().endswith(THINK_OPEN) else text + THINK_OPEN

    def _rendered(self, messages: list[dict[str, Any]], *, prompt: bool = True, **arguments: Any) -> str:
        """What the template makes of messages, with the markers of their images."""
        if self.vision is not None:
            messages = [{**message, "content": self._parts(message.get("content"))} for message in messages]
        rendered: Any = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **arguments)
        if self.vision is None:
            return str(rendered)
        shown = [part["marker"] for message in messages for part in message["content"] or () if part["type"] == "image"]
        pieces = str(rendered).split(self.vision.placeholder)
        if len(pieces) != len(shown) + 1:
            raise BadInput(
                f"the chat template writes {len(pieces) - 1} images where the messages hold {len(shown)}; use the model's own template"
            )
        return pieces[0] + "".join(marker + piece for marker, piece in zip(shown, pieces[1:], strict=True))

    def _parts(self, content: Any) -> Any:
        """A text as the parts of a message: what stands between images, and they."""
        if not isinstance(content, str):
            return content
        assert self.vision is not None
        if self.vision.placeholder in content:
            raise BadInput(f"a text holds {self.vision.placeholder!r}, which stands for an image in this model; leave it out")
        pieces = MARKER.split(content)  # every second one is a digest
        return [
            {"type": "image", "marker": f"<image:{piece}>"} if n % 2 else {"type": "text", "text": piece}
            for n, piece in enumerate(pieces)
            if piece or len(pieces) == 1
        ]

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a text, nothing added; the markers of images become their tokens."""
        if self.vision is None:
            return tuple(self._encode(text))
        ids: list[int] = []
        for n, piece in enumerate(MARKER.split(text)):
            ids += self.vision.expand(image_of(piece)) if n % 2 else self._encode(piece)
        return tuple(ids)


def text_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """What gives the text of tokens, special ones included.

    transformers looks at every number before it decodes them, which takes longer than to decode them: where nothing else is done to the text,
    the library behind it is asked directly.
    """
    if isinstance(tokenizer, PreTrainedTokenizerFast) and type(tokenizer)._decode is PreTrainedTokenizerFast._decode:
        backend: Any = tokenizer.backend_tokenizer
        return lambda ids: str(backend.decode(list(ids), skip_special_tokens=False))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def text_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], Sequence[int]]:
    """What gives the tokens of a text, nothing added and nothing cut off; as above the library behind transformers is asked directly, in half the time."""
    is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and not tokenizer.split_special_tokens
    if is_plain and type(tokenizer)._encode_plus is PreTrainedTokenizerFast._encode_plus:
        backend: Any = tokenizer.backend_tokenizer

        def encode(text: str) -> Sequence[int]:
            if backend.truncation is not None or backend.padding is not None:  # of the tokenizer's file, or of somebody else's last call
                backend.no_truncation()
                backend.no_padding()
            ids: Sequence[int] = backend.encode(text, add_special_tokens=False).ids
            return ids

        return encode
    # Not verbose: transformers warns of texts longer than the model, but a rollout keeps to its budget by itself.
    return lambda text: tokenizer.encode(text, add_special_tokens=False, verbose=False)


def tokens_before(decode: Callable[[tuple[int, ...]], str], ids: tuple[int, ...], num_chars: int) -> int:
    """How many leading tokens of `ids` lie entirely within the first `num_chars` characters of their text.

    A token that straddles the border (such as one that joins a full stop with the start of a tag) is not counted.
    """
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(decode(ids[:middle])) <= num_chars:
            low = middle
        else:
            high = middle - 1
    return low
