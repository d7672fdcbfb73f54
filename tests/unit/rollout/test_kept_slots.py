"""What ended conversations left in the cache: found by the request that continues them, given up where room is needed, forgotten with the weights."""

import copy
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from tether.core.protocols import Sampling
from tether.core.seeding import generator
from tether.core.types import Completion
from tether.models.fast.decoding.contiguous import position_bytes
from tether.models.policy import Policy
from tether.rollout.engines.continuous_batch import Admission
from tether.rollout.engines.kept_slots import KeptSlots
from tether.rollout.engines.native import NativeEngine


def test_the_slot_with_the_longest_beginning_of_a_prompt_is_found() -> None:
    kept = KeptSlots()
    assert kept.find([1, 2]) == (-1, 0, 0)
    for slot, tokens in enumerate([[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 9, 4, 5], [1, 2, 3]]):
        kept.keep(slot, tokens)
    assert kept.find([1, 2, 3]) == (0, 2, 2), "a token must be left to compute"
    assert kept.find([1, 2, 3, 4, 5, 6]) == (1, 5, 5)
    assert kept.find([1, 2, 9, 4, 6, 6]) == (2, 4, 4)
    assert kept.find([1, 2, 3, 7]) == (0, 3, 3) and kept.is_all_of(0, 3) and not kept.is_all_of(1, 3)
    kept.take(0)
    assert kept.find([1, 2, 3, 7]) == (3, 3, 3), "a kept slot that holds nothing else comes first"
    kept.take(3)
    assert kept.find([1, 2, 3, 7]) == (0, 3, 3) and not kept.is_all_of(0, 3), "a live one serves as well"
    assert kept.find([4, 2, 3, 7]).length == 0 and not kept.is_all_of(1, 0) and kept.find([1]).length == 0
    assert len(kept) == 2 and 2 in kept and 0 not in kept
    assert [kept.give_up(but=1), kept.give_up(but=1), kept.give_up(), kept.give_up()] == [2, None, 1, None]
    assert kept.find([1, 2, 3, 4, 5, 6]) == (0, 3, 3)
    kept.drop(0)
    kept.drop(3)
    assert kept.find([1, 2, 3, 4, 5, 6]).length == 0


def test_the_slot_that_a_prompt_continues_is_the_one_that_find_says() -> None:
    """Of few words, so that beginnings are shared; tokens that a slot holds no more stay written."""
    draws = generator(0, "continued")
    continued = 0
    for _ in range(300):
        kept = KeptSlots()
        texts = [draws.integers(3, size=int(draws.integers(1, 7))).tolist() for _ in range(int(draws.integers(1, 7)))]
        for slot, text in enumerate(texts):
            kept.keep(slot, text)
        for slot, action in enumerate(draws.integers(4, size=len(texts)).tolist()):
            if action == 0:
                kept.take(slot)  # live from now on
            elif action == 1:
                kept.drop(slot)
        for _ in range(5):
            prompt = [*texts[int(draws.integers(len(texts)))], *draws.integers(3, size=int(draws.integers(0, 3))).tolist()]
            found = kept.find(prompt)
            expected = found.slot if kept.is_all_of(found.slot, found.length) else -1
            assert kept.continued(prompt) == expected
            continued += expected >= 0
    assert continued > 300 and KeptSlots().continued([1, 2]) == -1


def test_what_is_promised_is_not_held_before_it_is_computed() -> None:
    kept = KeptSlots()
    kept.keep(2, [5, 6])
    kept.promise(0, [5, 6, 7, 8])
    assert kept.find([5, 6, 7, 8, 9]) == (2, 2, 4)
    kept.take_back()
    assert kept.find([5, 6, 7, 8, 9]) == (2, 2, 2)
    kept.promise(0, [5, 6, 7, 8])
    kept.hold(0)
    assert kept.find([5, 6, 7, 8, 9]) == (0, 4, 4)


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


def _same(mine: list[_Response], theirs: list[_Response]) -> None:
    assert [response.tokens for response in mine] == [response.tokens for response in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4 if torch.cuda.is_available() else 1e-5)


def _counts(engine: NativeEngine) -> tuple[int, int]:
    return engine.statistics.fed_tokens, engine.statistics.shared_tokens


def _text(seed: int, count: int) -> list[int]:
    return generator("test", "kept slots", seed).integers(20, 400, count).tolist()


def _engines(tiny: Any, **options: Any) -> tuple[NativeEngine, NativeEngine]:
    """One that keeps slots, and one that computes everything."""
    return NativeEngine(Policy(*tiny), keeps_slots=True, **options), NativeEngine(Policy(*tiny), max_rows=8)


def test_two_continuations_of_a_reply_compute_their_new_tokens_alone(tiny_on_device: Any) -> None:
    """At the same time, and one after the other; 100 tokens and a reply of nine, of which the last was not fed."""
    engine, plain = _engines(tiny_on_device, max_rows=8)
    (first,) = _ask(engine, [_text(0, 100)])
    reply = [*first.prompt, *first.tokens]
    together = [[*reply, *_text(1, 5)], [*reply, *_text(2, 7)]]
    _same(_ask(engine, together, 1), _ask(plain, together, 1))
    assert _counts(engine) == (6 + 8, 2 * 108)
    for number in (3, 4):
        prompt = [*reply, *_text(number, 10)]
        _same(_ask(engine, [prompt], number), _ask(plain, [prompt], number))
        assert _counts(engine) == (10, 109), "the last token of the reply was fed by now"
    _same(_ask(engine, [together[0]], 9), _ask(plain, [together[0]], 9))
    assert _counts(engine) == (1, 113), "the same request again"


def test_instructions_are_computed_once_for_all_episodes(tiny_on_device: Any) -> None:
    """200 tokens that every episode begins with, 70 of its task: episodes that begin together, members of a group, and an episode that begins later."""
    engine, plain = _engines(tiny_on_device, max_rows=8)
    tasks = [[*_text(0, 200), *_text(number, 70)] for number in range(1, 5)]
    prompts = [tasks[0], tasks[1], tasks[0], tasks[2], tasks[1]]
    _same(_ask(engine, prompts), _ask(plain, prompts))
    assert _counts(engine) == (270 + 70 + 70 + 1, 270 + 200 + 200 + 269), "the third shares the first one's call"
    _same(_ask(engine, [tasks[3]], 7), _ask(plain, [tasks[3]], 7))
    assert _counts(engine) == (70, 200)
    short = [_text(0, 200)[:60] + _text(9, 10)]
    _same(_ask(engine, short), _ask(plain, short))
    assert _counts(engine) == (70, 0), "60 tokens are computed in the time that it takes to share them"


def test_what_one_gives_up_another_still_has(tiny_on_device: Any) -> None:
    """Two slots: of a beginning and its continuation the slot that computed it goes to a stranger, and the other one still serves."""
    engine, plain = _engines(tiny_on_device, max_rows=2)
    shared = _text(0, 130)
    for seed, (prompt, fed) in enumerate([([*shared, 5], 131), ([*shared, 6, 7], 2), (_text(1, 140), 140), ([*shared, 8, 9], 2)]):
        _same(_ask(engine, [prompt], seed), _ask(plain, [prompt], seed))
        assert engine.statistics.fed_tokens == fed
    _same(_ask(engine, [_text(2, 140)], 5), _ask(plain, [_text(2, 140)], 5))
    assert _counts(engine) == (140, 0)


def _position_gb(tiny: Any) -> float:
    return position_bytes(Policy(tiny.model)) / 2**30


@pytest.mark.parametrize(
    ("seed", "speculative"), [(0, 3), *(pytest.param(seed, 3 * (seed % 2), marks=pytest.mark.long) for seed in range(1, 7))]
)
def test_random_conversations_are_those_of_an_engine_that_keeps_nothing(tiny_on_device: Any, seed: int, speculative: int) -> None:
    """Requests that continue any text so far, or begin like it, in waves; slots and memory run short, so that slots are given up and rows evicted."""
    random = generator("test", "random conversations", seed)
    engine, plain = _engines(
        tiny_on_device, max_rows=4, max_context=448, cache_gb=700 * _position_gb(tiny_on_device), speculative_tokens=speculative
    )
    texts, shared = [_text(0, 90)], 0
    for wave in range(5):
        prompts = []
        for _ in range(int(random.integers(1, 7))):
            text = texts[int(random.integers(len(texts)))]
            begin = text[: int(random.integers(60, len(text) + 1))] if random.random() < 0.5 else text
            prompts.append([*begin[:400], *random.integers(20, 400, int(random.integers(1, 60))).tolist()])
        mine, theirs = _ask(engine, prompts, 100 * wave), _ask(plain, prompts, 100 * wave)
        _same(mine, theirs)
        counts = engine.statistics
        assert counts.fed_tokens - counts.recomputed_tokens + counts.shared_tokens >= sum(map(len, prompts))
        assert counts.fed_tokens <= plain.statistics.fed_tokens + counts.recomputed_tokens or not counts.shared_tokens
        texts += [[*response.prompt, *response.tokens] for response in mine]
        shared += counts.shared_tokens
    assert shared > 400


def test_new_weights_forget_it(tiny_on_device: Any, chat: Any) -> None:
    model = copy.deepcopy(tiny_on_device.model)
    engine = NativeEngine(Policy(model, tiny_on_device.tokenizer), max_rows=4, keeps_slots=True)
    prompt = list(chat.encode("Once upon a time, " * 20))
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
