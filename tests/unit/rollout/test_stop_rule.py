"""Responses stop where they should: at the end of the turn, at a closing tag however it is cut, at a sequence of ids, at the budget."""

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tether.core.enums import FinishReason
from tether.core.protocols import Sampling
from tether.core.seeding import generator
from tether.rollout.engines.stop_rule import TAIL_TOKENS, StopRule

LONG = Sampling(max_tokens=100)


def test_stops_at_the_closing_tag_as_one_token(tiny: Any) -> None:
    rule = StopRule(tiny.tokenizer)
    ids = tiny.tokenizer.encode(" go </think> <answer> Up </answer>", add_special_tokens=False)
    assert [rule.finished(ids[:n], LONG) for n in range(1, len(ids))] == [None] * (len(ids) - 1)
    assert rule.finished(ids, LONG) is FinishReason.STOP_TEXT


def _bytes_with(*merged: str) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate([*alphabet, *merged])}, merges=[(m[0], m[1:]) for m in merged])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def test_stops_at_the_closing_tag_in_several_tokens() -> None:
    """One token a letter; ">." is one token, so the tag can also end inside a token."""
    tokenizer = _bytes_with(">.")
    rule = StopRule(tokenizer)
    for text in ("<answer>Up</answer>", "<answer>Up</answer>."):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == 19
        assert [rule.finished(ids[:n], LONG) for n in range(1, 19)] == [None] * 18
        assert rule.finished(ids, LONG) is FinishReason.STOP_TEXT


def test_stops_at_the_end_of_turn_and_at_the_budget(tiny: Any) -> None:
    rule = StopRule(tiny.tokenizer)
    words = tiny.tokenizer.encode(" go right", add_special_tokens=False)
    assert rule.finished([*words, tiny.tokenizer.eos_token_id], LONG) is FinishReason.END_OF_TURN
    assert rule.finished(words, Sampling(max_tokens=len(words) + 1)) is None
    assert rule.finished(words, Sampling(max_tokens=len(words))) is FinishReason.LENGTH
    # What ended the response is said, even where the budget was used up too.
    assert rule.finished([*words, tiny.tokenizer.eos_token_id], Sampling(max_tokens=len(words) + 1)) is FinishReason.END_OF_TURN
    close = tiny.tokenizer.convert_tokens_to_ids("</answer>")
    assert rule.finished([*words, close], Sampling(max_tokens=len(words) + 1)) is FinishReason.STOP_TEXT


def test_stops_at_a_sequence_of_ids(tiny: Any) -> None:
    rule = StopRule(tiny.tokenizer)
    sampling = Sampling(max_tokens=100, stop_ids=((30, 31), (40,), (31, 30, 31)))
    for ids, reason in {
        (30, 31): FinishReason.STOP_TEXT,
        (9, 30, 31): FinishReason.STOP_TEXT,
        (40,): FinishReason.STOP_TEXT,
        (31,): None,  # shorter than its sequence
        (31, 31): None,
        (30, 9, 31): None,
        (30, 31, 9): None,
    }.items():
        assert rule.finished(ids, sampling) is reason, ids
    assert rule.finished((30, 31), LONG) is None


def test_tokens_before_count_against_the_budget_only(tiny: Any) -> None:
    rule = StopRule(tiny.tokenizer)
    assert rule.finished((30, 31), Sampling(max_tokens=10), num_before=7) is None
    assert rule.finished((30, 31), Sampling(max_tokens=10), num_before=8) is FinishReason.LENGTH


def test_only_candidates_can_end_a_response(tiny: Any) -> None:
    """Every token of the vocabulary, one by one: whatever ends a response is a candidate; words that the tokenizer has not are not."""
    rule = StopRule(tiny.tokenizer)
    sampling = Sampling(max_tokens=100, stop_ids=((30, 31), (9,)))
    words = np.arange(len(tiny.tokenizer) + 5)[:, None]
    candidates = set(np.flatnonzero(rule.candidates(words, sampling)).tolist())
    close, end = tiny.tokenizer.convert_tokens_to_ids("</answer>"), tiny.tokenizer.eos_token_id
    assert {close, end, 9, 31} <= candidates and 30 not in candidates and len(candidates) < len(tiny.tokenizer) // 10
    endings = {word for word in words[:, 0].tolist() if word < len(tiny.tokenizer) and rule.finished((30, word), sampling) is not None}
    assert {close, end, 9, 31} <= endings <= candidates
    assert all(rule.finished((30, len(tiny.tokenizer) + n), sampling) is None for n in range(5))


def test_words_that_the_tokenizer_has_not_end_nothing() -> None:
    """Also where its last token does."""
    tokenizer = _bytes_with(">.")
    end = tokenizer.eos_token_id
    assert end == len(tokenizer) - 1
    assert StopRule(tokenizer).candidates(np.array([[end, end + 1, end + 100]]), LONG).tolist() == [[True, False, False]]


@pytest.mark.parametrize("text", ["END", "\n\n", "so.", "é"])
def test_stops_at_a_stop_string_however_it_is_cut(text: str) -> None:
    """One token a byte; "D" of END, a line break, a full stop and the last byte of a letter complete the string."""
    tokenizer = _bytes_with("ND")
    rule, sampling = StopRule(tokenizer), Sampling(max_tokens=100, stop_strings=(text,))
    ids = tokenizer.encode(f"a{text}", add_special_tokens=False)
    candidates = rule.candidates(np.array([ids]), sampling)[0]
    assert candidates[-1]
    assert [rule.finished(ids[:n], sampling) for n in range(1, len(ids))] == [None] * (len(ids) - 1)
    assert rule.finished(ids, sampling) is FinishReason.STOP_TEXT
    assert rule.finished(ids, LONG) is None


def test_a_stop_string_longer_than_the_tail_is_found() -> None:
    tokenizer = _bytes_with("ND")
    text = "The final answer is 42"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > TAIL_TOKENS
    assert StopRule(tokenizer).finished(ids, Sampling(max_tokens=100, stop_strings=(text,))) is FinishReason.STOP_TEXT


def test_every_end_of_turn_id_ends_a_response(tiny: Any) -> None:
    """Llama 3, Gemma and Phi end a turn with ids that their tokenizers do not name."""
    rule = StopRule(tiny.tokenizer, (tiny.tokenizer.eos_token_id, 30))
    assert rule.finished((9, 30), LONG) is FinishReason.END_OF_TURN
    assert rule.candidates(np.array([[30, 31]]), LONG).tolist() == [[True, False]]
    assert StopRule(tiny.tokenizer).finished((9, 30), LONG) is None


@pytest.mark.parametrize("letters", [">.", "</", "r>", "é>"])
def test_pieces_say_what_the_text_says(letters: str) -> None:
    """Random tokens of a tokenizer of bytes, with some of the tag behind them: to look at their pieces, or to decode them, finds the same ends."""
    tokenizer = _bytes_with(*(piece for piece in (letters,) if piece.isascii()))
    by_pieces, by_text = StopRule(tokenizer), StopRule(tokenizer)
    assert by_pieces._spells_bytes
    by_text._spells_bytes = False
    random = generator("test", "pieces")
    tag = tokenizer.encode(f"</answer>{letters}", add_special_tokens=False)
    found = []
    for _ in range(300):
        ids = [*random.integers(0, len(tokenizer) + 2, int(random.integers(1, 12))).tolist(), *tag[: int(random.integers(0, len(tag) + 1))]]
        found.append(by_pieces.finished(ids, LONG))
        assert found[-1] is by_text.finished(ids, LONG)
    assert FinishReason.STOP_TEXT in found and None in found


def test_a_tokenizer_of_words_is_decoded() -> None:
    """Its pieces may write a character as another one."""
    tokenizer = Tokenizer(models.WordLevel({"▁</answer": 0, ">": 1, "</s>": 2}))
    tokenizer.decoder = decoders.Metaspace()
    rule = StopRule(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))
    assert not rule._spells_bytes
    assert rule.finished([0, 1], LONG) is FinishReason.STOP_TEXT
