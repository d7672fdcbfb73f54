"""Tokens are drawn by inverse CDF exactly, log-probs are those of the sampling temperature, and responses stop where they should."""

import math
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tether.core.enums import FinishReason
from tether.rollout.engines.sampling import StopRule, draw

PROBABILITIES = [0.1, 0.2, 0.3, 0.4]
LOGITS = torch.tensor(PROBABILITIES).log()


def _picks(logits: torch.Tensor, temperature: float, uniforms: list[float]) -> list[int]:
    rows = logits.expand(len(uniforms), -1)
    return draw(rows, temperature, torch.tensor(uniforms))[0].tolist()


def test_literal_picks() -> None:
    assert _picks(LOGITS, 1.0, [0.0, 0.05, 0.099, 0.11, 0.29, 0.31, 0.59, 0.61, 0.999]) == [0, 0, 0, 1, 1, 2, 2, 3, 3]


def test_temperature_sharpens() -> None:
    # Squares: 1, 4, 9, 16 in 30; the borders are 1/30, 5/30, 14/30.
    assert _picks(LOGITS, 0.5, [0.03, 0.04, 0.16, 0.17, 0.46, 0.47]) == [0, 1, 1, 2, 2, 3]


def test_log_probs_are_those_of_the_temperature() -> None:
    ids, logprobs = draw(LOGITS.expand(2, -1), 0.5, torch.tensor([0.0, 0.9]))
    assert ids.tolist() == [0, 3]
    assert logprobs.tolist() == pytest.approx([math.log(1 / 30), math.log(16 / 30)], abs=1e-6)


def test_zero_temperature_takes_the_most_likely_whatever_the_uniform() -> None:
    rows = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    for uniform in (0.0, 0.999):
        ids, logprobs = draw(rows, 0.0, torch.full((2,), uniform))
        assert ids.tolist() == [1, 0]
        assert logprobs.tolist() == pytest.approx(
            [3 - math.log(1 + math.e**3 + math.e), 5 - math.log(math.e**5 + math.e**3 + math.e)], abs=1e-5
        )


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24, math.nextafter(1, 0)])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    never = -torch.inf
    for possible in ([2], [2, 5], [0], [7]):
        logits = torch.full((8,), never)
        logits[possible] = 1.5
        assert _picks(logits, 1.0, [uniform])[0] in possible
    # Many terms: the cumulative sum ends a little off 1.
    logits = torch.cat([torch.full((3,), never), torch.linspace(-3, 3, 5000), torch.full((4000,), never)])
    assert 3 <= _picks(logits, 1.0, [uniform])[0] < 5003


def test_draws_follow_the_softmax() -> None:
    """Chi-square of 20000 draws; 16.27 is passed by chance once in a thousand (3 degrees of freedom), and the seed is fixed."""
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    ids, _ = draw(LOGITS.expand(20_000, -1), 1.0, uniforms)
    counts = torch.bincount(ids, minlength=4).tolist()
    chi_square = sum((count - 20_000 * p) ** 2 / (20_000 * p) for count, p in zip(counts, PROBABILITIES, strict=True))
    assert chi_square < 16.27


def test_stops_at_the_closing_tag_as_one_token(tiny: Any) -> None:
    rule = StopRule(tiny.tokenizer)
    ids = tiny.tokenizer.encode(" go </think> <answer> Up </answer>", add_special_tokens=False)
    assert [rule.finished(ids[:n], 100) for n in range(1, len(ids))] == [None] * (len(ids) - 1)
    assert rule.finished(ids, 100) is FinishReason.STOP_TEXT


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
        assert [rule.finished(ids[:n], 100) for n in range(1, 19)] == [None] * 18
        assert rule.finished(ids, 100) is FinishReason.STOP_TEXT


def test_stops_at_the_end_of_turn_and_at_the_budget(tiny: Any) -> None:
    rule = StopRule(tiny.tokenizer)
    words = tiny.tokenizer.encode(" go right", add_special_tokens=False)
    assert rule.finished([*words, tiny.tokenizer.eos_token_id], 100) is FinishReason.END_OF_TURN
    assert rule.finished(words, len(words) + 1) is None
    assert rule.finished(words, len(words)) is FinishReason.LENGTH
    # What ended the response is said, even where the budget was used up too.
    assert rule.finished([*words, tiny.tokenizer.eos_token_id], len(words) + 1) is FinishReason.END_OF_TURN
    close = tiny.tokenizer.convert_tokens_to_ids("</answer>")
    assert rule.finished([*words, close], len(words) + 1) is FinishReason.STOP_TEXT
