"""What ended conversations left in the cache: found by the request that continues them, given up where room is needed, forgotten with the weights."""

import copy
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from tether.core.protocols import Sampling
from tether.core.types import Completion
from tether.models.policy import Policy
from tether.rollout.engines.continuous_batch import Admission
from tether.rollout.engines.kept_slots import KeptSlots
from tether.rollout.engines.native import NativeEngine


def test_the_longest_beginning_of_a_prompt_is_found() -> None:
    kept = KeptSlots()
    kept.keep(0, [1, 2, 3])
    kept.keep(1, [1, 2, 3, 4, 5])
    kept.keep(2, [1, 2, 9, 4, 5])
    kept.keep(3, [1, 2, 3])
    assert kept.take([1, 2, 3]) is None, "a token must be left to compute"
    assert kept.take([1, 2, 3, 4, 5, 6]) == (1, 5)
    assert kept.take([1, 2, 3, 4, 5, 6]) == (0, 3), "each slot serves one"
    assert kept.take([1, 2, 9, 4, 6, 6]) is None
    assert len(kept) == 2 and 2 in kept and 1 not in kept
    assert [kept.give_up(), kept.give_up()] == [2, 3], "the one kept first goes first"
    assert not kept and kept.take([1, 2, 3, 4]) is None


def test_prompts_that_differ_before_their_last_tokens_are_told_apart() -> None:
    kept = KeptSlots()
    kept.keep(0, [7, *range(20)])
    assert kept.take([8, *range(20), 1]) is None
    assert kept.take([7, *range(20), 1]) == (0, 21)


class _Response:
    """A request of a client: one response."""

    prefix_key = 0
    closing_tags: tuple[str, ...] = ()

    def __init__(self, prompt: list[int], seed: int) -> None:
        self.prompt, self.uniforms = tuple(prompt), np.random.Generator(np.random.PCG64(seed))
        self.tokens: list[int] = []
        self.logprobs: tuple[float, ...] = ()

    def begin(self) -> tuple[int, ...]:
        return self.prompt

    def receive(self, completion: Completion) -> None:
        self.tokens, self.logprobs = list(completion.token_ids), completion.logprobs


def _ask(engine: NativeEngine, prompts: list[list[int]], first_seed: int = 0) -> list[_Response]:
    requests = [_Response(prompt, first_seed + number) for number, prompt in enumerate(prompts)]
    engine.play(deque(Admission(request, Sampling(1.0, 9)) for request in requests))
    return requests


def _turns(engine: NativeEngine, chat: Any, turns: int, conversations: int) -> tuple[list[list[_Response]], list[int]]:
    """Conversations turn by turn, each sent from its beginning; and what was fed in each turn."""
    texts = [chat.encode(f"Number {number} says hello to everybody") for number in range(conversations)]
    said, fed = [], []
    for turn in range(turns):
        said.append(_ask(engine, texts, 10 * turn))
        fed.append(engine.statistics.fed_tokens)
        texts = [[*text, *response.tokens, *chat.encode(" and then")] for text, response in zip(texts, said[-1], strict=True)]
    return said, fed


@pytest.mark.parametrize("max_rows", [4, 2])
def test_a_continued_conversation_computes_its_new_tokens_alone(tiny_on_device: Any, chat: Any, max_rows: int) -> None:
    """With the tokens and log-probs of an engine that begins anew; also where there are more conversations than slots."""
    engine, plain = (NativeEngine(Policy(*tiny_on_device), max_rows=max_rows, keeps_slots=keeps) for keeps in (True, False))
    (said, fed), (expected, all_fed) = _turns(engine, chat, 3, 4), _turns(plain, chat, 3, 4)
    for mine, theirs in zip(said, expected, strict=True):
        assert [response.tokens for response in mine] == [response.tokens for response in theirs]
        assert all(a.logprobs == pytest.approx(b.logprobs, abs=1e-4) for a, b in zip(mine, theirs, strict=True))
    new = len(chat.encode(" and then")) + 1  # and the last token of the response before
    assert fed[0] == all_fed[0] and all_fed[2] > all_fed[1]
    assert fed[1:] == [4 * new] * 2 if max_rows == 4 else all(new < count for count in fed[1:])


def test_memory_is_taken_from_what_was_kept_before_rows_are_evicted(tiny_on_device: Any, chat: Any) -> None:
    config = tiny_on_device.model.config
    position = 2 * config.num_hidden_layers * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * 4
    engine = NativeEngine(Policy(*tiny_on_device), max_rows=4, max_context=256, cache_gb=position * 150 / 2**30, keeps_slots=True)
    plain = NativeEngine(Policy(*tiny_on_device), max_rows=4)
    for first in range(0, 12, 2):
        prompts = [chat.encode(f"Number {number} " + "has a long tale to tell " * 8) for number in range(first, first + 2)]
        mine, theirs = _ask(engine, prompts, first), _ask(plain, prompts, first)
        assert [response.tokens for response in mine] == [response.tokens for response in theirs]
        assert engine.statistics.evictions == 0


def test_new_weights_forget_it(tiny_on_device: Any, chat: Any) -> None:
    model = copy.deepcopy(tiny_on_device.model)
    engine = NativeEngine(Policy(model, tiny_on_device.tokenizer), max_rows=4, keeps_slots=True)
    prompt = list(chat.encode("Once upon a time"))
    (first,) = _ask(engine, [prompt])
    engine.forget()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    continued = [*prompt, *first.tokens, *chat.encode(" and then")]
    (mine,), (theirs,) = (
        _ask(engine, [continued], 5),
        _ask(NativeEngine(Policy(model, tiny_on_device.tokenizer), max_rows=4), [continued], 5),
    )
    assert mine.tokens == theirs.tokens and mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
