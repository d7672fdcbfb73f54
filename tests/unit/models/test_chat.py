"""A conversation built by appending equals the chat template rendered in one go, and a response is never tokenised again."""

import copy
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tether.core.errors import BadInput
from tether.core.seeding import generator
from tether.models.chat import PLAIN_TEMPLATE, ChatFormat, text_decoder

SYSTEM, SHOWN, AGAIN = "Walk to the goal.", "Turn 1 of 5.\n_P_\n_OG", "Turn 2 of 5.\n__P\n_OG"
RESPONSE = " The goal is right. </think> <answer> Right </answer>"
NO_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _with_template(tokenizer: Any, template: str | None) -> Any:
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def test_appending_equals_rendering_in_one_go(tiny: Any, chat: ChatFormat) -> None:
    appended = chat.first_prompt(SYSTEM, SHOWN) + chat.encode(RESPONSE)
    appended += chat.next_prompt(AGAIN, chat.encode(RESPONSE)) + chat.encode(RESPONSE)
    appended += chat.next_prompt(SHOWN, chat.encode(RESPONSE))
    reply = {"role": "assistant", "content": "<think>" + RESPONSE}
    messages = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": "user", "content": SHOWN}, reply, {"role": "user", "content": AGAIN}, reply, {"role": "user", "content": SHOWN}]
    rendered = tiny.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + "<think>"
    assert chat.decode(appended) == rendered
    assert list(appended) == tiny.tokenizer.encode(rendered, add_special_tokens=False)


def test_the_first_prompt_literally(chat: ChatFormat) -> None:
    assert chat.decode(chat.first_prompt("S", "U")) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n<think>"
    )


def test_the_end_of_turn_is_not_doubled(chat: ChatFormat) -> None:
    between = "<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n<think>"
    cut_off = chat.encode(" no tag here")
    ended = (*cut_off, chat.end_of_turn)
    assert chat.decode(chat.next_prompt("U", cut_off)) == between
    assert chat.decode(chat.next_prompt("U", ())) == between
    assert chat.decode(ended + chat.next_prompt("U", ended)) == " no tag here" + between


def test_every_end_of_turn_token_of_the_model_counts(tiny: Any) -> None:
    """As in Gemma and Llama 3: the tokenizer names one token, the generation config another, and the template ends turns with the latter."""
    tokenizer = copy.deepcopy(tiny.tokenizer)
    template_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.eos_token = "</answer>"
    other = ChatFormat(tokenizer, (tokenizer.eos_token_id, template_end))
    between = "<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n<think>"
    ended = (*other.encode("yes"), template_end)
    assert other.decode(ended + other.next_prompt("U", ended)) == "yes" + between
    by_tokenizer = (*other.encode("yes"), tokenizer.eos_token_id)
    assert other.decode(by_tokenizer + other.next_prompt("U", by_tokenizer)) == "yes</answer>" + between, "the template's own follows"
    assert ChatFormat(tokenizer).end_of_turn_ids == {tokenizer.eos_token_id}


def test_a_template_that_opens_the_think_tag_itself_is_left_alone(tiny: Any) -> None:
    template = tiny.tokenizer.chat_template.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    assert template != tiny.tokenizer.chat_template
    other = ChatFormat(_with_template(tiny.tokenizer, template))
    assert other.decode(other.first_prompt("S", "U")).endswith("assistant\n<think>\n")
    assert other.decode(other.next_prompt("U", ())).endswith("assistant\n<think>\n")


def test_a_template_without_system_role_gets_the_rules_in_the_first_message(tiny: Any) -> None:
    other = ChatFormat(_with_template(tiny.tokenizer, NO_SYSTEM))
    assert other.decode(other.first_prompt("S", "U")) == "<|im_start|>user\nS\n\nU<|im_end|>\n<|im_start|>assistant\n<think>"
    assert other.decode(other.next_prompt("V", ())) == "<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n<think>"


def test_no_template_gives_plain_lines(tiny: Any) -> None:
    tokenizer = _with_template(tiny.tokenizer, None)
    plain = ChatFormat(tokenizer)
    assert plain.decode(plain.first_prompt("S", "U")) == "System: S\n\nUser: U\n\nAssistant: <think>"
    between = "<|im_end|>\n\nUser: V\n\nAssistant: <think>"
    ended = (*plain.encode("yes"), plain.end_of_turn)
    assert plain.decode(plain.next_prompt("V", plain.encode("yes"))) == between
    assert plain.decode(ended + plain.next_prompt("V", ended)) == "yes" + between
    (note,) = plain.notes
    assert note.startswith("the model has no chat template: prompts are plain lines") and "tether sft" in note
    assert tokenizer.chat_template == PLAIN_TEMPLATE  # saved with the model, and known again by the run that resumes it
    assert ChatFormat(tokenizer).notes == plain.notes


# Templates with reasoning of their own, in the shapes that models come with; only what does not bear on it was left out.

QWEN3 = (
    "{%- for message in messages %}{%- if message.role in ('system', 'user') %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set content = message.content %}{%- set reasoning = '' %}"
    "{%- if '</think>' in content %}{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.last %}{{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
R1 = (
    "{% set ns = namespace(system='') %}{% for message in messages %}{% if message.role == 'system' %}{% set ns.system = message.content %}"
    "{% endif %}{% endfor %}{{ ns.system }}{% for message in messages %}{% if message.role == 'user' %}<User>{{ message.content }}"
    "{% elif message.role == 'assistant' %}{% set content = message.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}<Assistant>{{ content }}<|im_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<Assistant><think>\n{% endif %}"
)
V3_1 = (
    "{% if thinking is not defined %}{% set thinking = false %}{% endif %}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}{% elif message.role == 'user' %}<User>{{ message.content }}"
    "{% else %}<Assistant></think>{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<Assistant>{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
)
EMPTY_BLOCK = QWEN3.replace("enable_thinking is defined and enable_thinking is false", "true")
BARE_CLOSE = V3_1.replace("{% if thinking %}<think>{% else %}</think>{% endif %}", "</think>")


@pytest.mark.parametrize(
    ("template", "first", "later", "notes"),
    [
        (
            QWEN3,
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n<think>",
            "<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n<think>",
            ["the chat template has a reasoning mode (enable_thinking): it is on"],
        ),
        (R1, "S<User>U<Assistant><think>\n", "<|im_end|><User>V<Assistant><think>\n", ["the chat template opens the think tag itself"]),
        (
            V3_1,
            "S<User>U<Assistant><think>",
            "<|im_end|><User>V<Assistant><think>",
            ["the chat template has a reasoning mode (thinking): it is on", "the chat template opens the think tag itself"],
        ),
        (
            EMPTY_BLOCK,
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n<think>",
            "<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n<think>",
            ["the chat template ends prompts with a think block that is closed already"],
        ),
        (
            BARE_CLOSE,
            "S<User>U<Assistant><think>",
            "<|im_end|><User>V<Assistant><think>",
            ["the chat template ends prompts with a think block that is closed already"],
        ),
    ],
    ids=["Qwen3", "DeepSeek-R1", "DeepSeek-V3.1", "an empty block", "a bare closing tag"],
)
def test_templates_with_reasoning_of_their_own(tiny: Any, template: str, first: str, later: str, notes: list[str]) -> None:
    """The prompt ends with exactly one opening think tag, and what was sampled before is never rendered again."""
    other = ChatFormat(_with_template(tiny.tokenizer, template))
    assert other.decode(other.first_prompt("S", "U")) == first
    response = other.encode(RESPONSE)
    assert other.decode(other.next_prompt("V", response)) == later
    assert [note.startswith(begin) for note, begin in zip(other.notes, notes, strict=True)] == [True] * len(notes)


def test_a_template_that_knows_nothing_of_reasoning_needs_no_word(chat: ChatFormat) -> None:
    assert chat.notes == ()


def test_no_end_of_turn_token_is_bad_input(tiny: Any) -> None:
    other = copy.deepcopy(tiny.tokenizer)
    other.eos_token = None
    with pytest.raises(BadInput, match="end-of-turn"):
        ChatFormat(other)


def _characters(merge: tuple[str, str]) -> PreTrainedTokenizerFast:
    """One token a byte, and one that joins two of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*alphabet, "".join(merge)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[merge]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template="{{ messages[0].content }}")


def test_a_token_across_the_border_is_not_counted() -> None:
    chat = ChatFormat(_characters((".", "<")))
    ids = chat.encode("go.</think>")
    assert len(ids) == 10  # g o .< / t h i n k >
    assert [chat.tokens_before(ids, n) for n in (0, 1, 2, 3, 4, 11)] == [0, 1, 2, 2, 3, 10]


def test_a_letter_of_several_tokens_is_counted_whole() -> None:
    chat = ChatFormat(_characters((".", "<")))
    ids = chat.encode("a√</think>")  # √ is three bytes
    assert chat.tokens_before(ids, 2) == 4
    assert chat.decode(ids[:4]) == "a√"


def test_the_text_of_tokens_is_what_the_tokenizer_says(tiny: Any) -> None:
    tokenizer = tiny.tokenizer
    decode = text_decoder(tokenizer)
    random = generator("test", "text decoder")
    for _ in range(50):
        ids = tuple(random.integers(0, len(tokenizer), 30).tolist())
        assert decode(ids) == tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_a_tokenizer_that_decodes_otherwise_is_asked_itself(tiny: Any) -> None:
    class Loud(type(tiny.tokenizer)):  # type: ignore[misc]
        def _decode(self, *given: Any, **options: Any) -> str:
            return str(super()._decode(*given, **options)).upper()

    loud = copy.copy(tiny.tokenizer)
    loud.__class__ = Loud
    assert text_decoder(loud)(tiny.tokenizer.encode("go left")) == text_decoder(tiny.tokenizer)(tiny.tokenizer.encode("go left")).upper()


def test_texts_are_tokens_as_by_transformers(tiny: Any) -> None:
    """Whatever the tokenizer was last used for: a cut or padding that somebody asked for is not applied here."""
    tokenizer = copy.deepcopy(tiny.tokenizer)
    chat = ChatFormat(tokenizer)
    texts = ["", " ", "P at (0,1).\nG at (3,1)", "<|im_start|>user", "\u00e9\u4e16\u754c \U0001f600", "x" * 300]
    expected = [tuple(tokenizer.encode(text, add_special_tokens=False, verbose=False)) for text in texts]
    tokenizer(["a b c d", "e"], truncation=True, max_length=2, padding="max_length")
    assert tokenizer.backend_tokenizer.truncation is not None, "the example is one where it matters"
    assert [chat.encode(text) for text in texts] == expected
    assert len(expected[-1]) > 2


def test_what_examples_begin_with_is_made_once(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are those of all parts one after the other; of a further prompt with the same examples only the last part is encoded."""
    chat = ChatFormat(tiny.tokenizer)
    examples = (("seen 1", "<think>one</think> <answer>a</answer>"), ("seen 2", "two</think> <answer>b</answer>"))
    opening = chat.first_prompt("S", "seen 1")
    one, two = chat.encode("one</think> <answer>a</answer>"), chat.encode("two</think> <answer>b</answer>")
    assert chat.first_prompt("S", "now", examples) == (opening + one + chat.next_prompt("seen 2", ()) + two + chat.next_prompt("now", ()))
    encoded: list[str] = []
    encode = chat.encode
    monkeypatch.setattr(chat, "encode", lambda text: encoded.append(text) or encode(text))
    chat.first_prompt("S", "later", examples)
    assert len(encoded) == 1
    assert "later" in encoded[0]
    other = chat.first_prompt("T", "later", examples)
    assert other != chat.first_prompt("S", "later", examples), "another system message begins anew"
