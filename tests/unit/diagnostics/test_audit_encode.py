"""Rollouts to token ids: ids of the file where they are the model's, text otherwise, and a clear line where they are not."""

from typing import Any

import pytest

from tether.core.errors import BadInput
from tether.diagnostics.audit.encode import REASONING_TOKENS, Encoder
from tether.diagnostics.audit.reading import compacted
from tether.diagnostics.rollouts import Rollout


def _drawn(**more: Any) -> Rollout:
    values: dict[str, Any] = {"step": 1, "group": "g", "trajectory": "t", "turn": 0, "where": "a.jsonl line 7"}
    return compacted(Rollout(**(values | more)))


@pytest.fixture
def encoder(tiny: Any) -> Encoder:
    return Encoder(tiny.tokenizer, tiny.model.config.vocab_size, tiny.model.config.max_position_embeddings)


def test_x_and_z_are_tokenised_apart(encoder: Encoder, chat: Any) -> None:
    pairs = encoder.pairs(
        [_drawn(prompt="2+2? ", reasoning="easy", lead="<think>"), _drawn(prompt="2+3? ", reasoning="easy", lead="<think>")]
    )
    assert pairs.prompts == [chat.encode("2+2? <think>"), chat.encode("2+3? <think>")]
    assert pairs.reasonings == [chat.encode("easy")] * 2 and pairs.texts == ["easy", "easy"] and pairs.source == [0, 1]
    assert pairs.prompt_texts == ["2+2? <think>", "2+3? <think>"]
    assert encoder.notes() == []


def test_messages_go_through_the_chat_template_and_the_tag_is_opened_once(encoder: Encoder, chat: Any, tiny: Any) -> None:
    messages = [{"role": "user", "content": "Where?"}]
    rendered = tiny.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pairs = encoder.pairs([_drawn(messages=messages, reasoning="here", think_implied=True)])
    text = rendered if rendered.rstrip().endswith("<think>") else rendered + "<think>"
    assert pairs.prompts == [chat.encode(text)]
    opened = encoder.pairs([_drawn(prompt="Where? <think>", reasoning="here", think_implied=True)])
    assert opened.prompt_texts == ["Where? <think>"]


def test_ids_of_the_file_count(encoder: Encoder, chat: Any) -> None:
    prompt, reasoning = chat.encode("Go. <think>"), chat.encode(" Left then")
    pairs = encoder.pairs([_drawn(prompt="no matter", prompt_ids=prompt, reasoning_ids=reasoning, reasoning=" Left then")])
    assert pairs.prompts == [prompt] and pairs.reasonings == [reasoning]
    closed = encoder.pairs(
        [_drawn(prompt_ids=prompt, reasoning_ids=reasoning, reasoning=" Left then</")]
    )  # the last token straddles the tag
    assert closed.reasonings == [reasoning]
    led = encoder.pairs([_drawn(prompt_ids=chat.encode("Go. "), reasoning="Left", lead="<think>")])
    assert led.prompts == [chat.encode("Go. ") + chat.encode("<think>")]
    assert encoder.notes() == ["1 of 3 reasonings had no token ids and were tokenised"]


def test_ids_outside_the_vocabulary_are_refused(encoder: Encoder) -> None:
    with pytest.raises(BadInput, match="line 7: tokens do not fit the model's tokenizer: id 999999, but the model knows ids from 0 to"):
        encoder.pairs([_drawn(prompt="x", reasoning_ids=(5, 999999))])
    with pytest.raises(BadInput, match="tokens do not fit"):
        encoder.pairs([_drawn(prompt_ids=(encoder.vocabulary,), reasoning="x")])
    assert encoder.pairs([_drawn(prompt_ids=(encoder.vocabulary - 1,), reasoning="x")]).prompts


def test_ids_of_another_tokenizer_are_refused(encoder: Encoder, chat: Any) -> None:
    foreign = [_drawn(prompt="x", reasoning_ids=chat.encode("Up then Down"), reasoning="something else altogether") for _ in range(3)]
    with pytest.raises(BadInput, match="they decode to 'Up then Down', the text beside them is 'something else altogether'"):
        encoder.pairs(foreign)
    new_context = Encoder(encoder.tokenizer, encoder.vocabulary, encoder.positions)
    own = [_drawn(prompt="x", reasoning_ids=chat.encode("Up then Down"), reasoning="Up then Down") for _ in range(5)]
    assert len(new_context.pairs([foreign[0], *own]).reasonings) == 6  # one odd record in six is not another tokenizer


def test_long_prompts_lose_their_beginning_and_long_reasonings_their_end(tiny: Any, chat: Any) -> None:
    encoder = Encoder(tiny.tokenizer, tiny.model.config.vocab_size, 40)
    prompt, reasoning = "Left Right " * 60 + "end", "Up " * 60
    pairs = encoder.pairs([_drawn(prompt=prompt, reasoning=reasoning), _drawn(prompt="other", reasoning="Up")])
    assert pairs.reasonings[0] == chat.encode(reasoning)[:20]
    assert pairs.prompts[0] == chat.encode(prompt)[-20:] and pairs.prompts[1] == chat.encode("other")
    assert (encoder.num_prompts_cut, encoder.num_reasonings_cut) == (1, 1)
    assert any("lost their beginning" in note for note in encoder.notes()) and any("only the beginning" in note for note in encoder.notes())
    assert len(Encoder(tiny.tokenizer, 10**6, None).pairs([_drawn(prompt="x", reasoning="a " * 5000)]).reasonings[0]) == REASONING_TOKENS


def test_the_common_beginning_stands_for_a_group(encoder: Encoder) -> None:
    leads = ["<think>", "Well. <think>", "<think>"]
    pairs = encoder.pairs([_drawn(prompt="Q ", reasoning=f"z{n}", lead=lead) for n, lead in enumerate(leads)])
    assert pairs.prompt_texts == ["Q <think>"] and pairs.source == [0, 0, 0]
    assert encoder.notes()[0].startswith("1 of 3 responses begin otherwise")


def test_equal_prompts_of_two_groups_are_one_column(encoder: Encoder) -> None:
    pairs = encoder.pairs([_drawn(prompt="Q", reasoning="a", group=1), _drawn(prompt="Q", reasoning="b", group=2)])
    assert len(pairs.prompts) == 1 and pairs.source == [0, 0]


def test_words_written_again_in_a_later_step_are_left_out(encoder: Encoder) -> None:
    drawn = [_drawn(prompt="Q", reasoning="same", step=step) for step in (1, 1, 2)]
    assert len(encoder.pairs(drawn).reasonings) == 2 and encoder.num_repeats == 1


def test_a_model_without_a_chat_template_gets_plain_roles(tiny: Any) -> None:
    import copy

    plain = copy.deepcopy(tiny.tokenizer)
    plain.chat_template = None
    pairs = Encoder(plain, 10**6, None).pairs([_drawn(messages=[{"role": "user", "content": "Hi"}], reasoning="z", lead="<think>")])
    assert pairs.prompt_texts[0].startswith("user: Hi") and pairs.prompt_texts[0].endswith("<think>")
    refusing = copy.deepcopy(tiny.tokenizer)
    refusing.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadInput, match=r"chat template refuses the messages of a prompt .roles must alternate"):
        Encoder(refusing, 10**6, None).pairs([_drawn(messages=[{"role": "user", "content": "Hi"}], reasoning="z")])
