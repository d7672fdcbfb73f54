"""Running out of memory, drawing several tokens a call and using slots again change no trajectory; what was done is counted."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import tether
from tether.core.enums import FinishReason
from tether.core.errors import BadInput, DivergedModel
from tether.core.protocols import ContextReset, EngineStatistics, Sampling
from tether.core.types import Completion
from tether.models.fast.decoding.contiguous import ContiguousDecoder, position_bytes
from tether.models.policy import Policy
from tether.rollout.engines.native import NativeEngine

GREEDY = Sampling(temperature=0.0, max_tokens=30)
WARM = Sampling(temperature=0.9, max_tokens=30)
NUM_TALKS = 7


class Talk:
    """A dialogue with its words laid down beforehand; every second one answers only when it is asked."""

    def __init__(self, number: int, contexts: list[tuple[int, ...]], key: int | None = None) -> None:
        self.contexts, self._slow = contexts, number % 2 == 1
        self.prefix_key = number if key is None else key
        self.closing_tags = ("</answer>",)
        self.uniforms = np.random.Generator(np.random.PCG64(number))
        self.completions: list[Completion] = []

    def begin(self) -> Any:
        return self._give(self.contexts[0])

    def receive(self, completion: Completion) -> Any:
        self.completions.append(completion)
        said = len(self.completions)
        return self._give(self.contexts[said]) if said < len(self.contexts) else None

    def _give(self, feed: tuple[int, ...]) -> Any:
        return (lambda: feed) if self._slow else feed

    @property
    def said(self) -> list[tuple[int, ...]]:
        return [completion.token_ids for completion in self.completions]


def _talks(chat: Any) -> list[Talk]:
    """Mixed lengths and numbers of turns; one begins anew in the middle, and the last two share their first prompt."""
    talks = []
    for number in range(NUM_TALKS):
        env = tether.make_env("frozen_lake", size=4 + number % 3, instructions="plain")
        shown = [env.reset(10 * number + turn).text for turn in range(1 + number % 3)]
        first = chat.first_prompt(env.instructions if number % 2 else "Solve it.", shown[0])
        talks.append(Talk(number, [first, *(chat.next_prompt(text, chat.encode("</answer>")) for text in shown[1:])]))
    talks[2].contexts[1] = ContextReset(talks[1].contexts[0])
    talks[5].contexts[0] = talks[6].contexts[0]
    talks[5].prefix_key = talks[6].prefix_key
    return talks


def _engine(tiny: Any, positions: int | None = None, **options: Any) -> NativeEngine:
    """With a cache of so many positions in all."""
    size = None if positions is None else positions * position_bytes(Policy(tiny.model)) / 2**30
    return NativeEngine(Policy(tiny.model, tiny.tokenizer), cache_gb=size, **options)


def _run(engine: NativeEngine, chat: Any, sampling: Sampling) -> list[Talk]:
    talks, finished = _talks(chat), list[int]()
    engine.run(talks, sampling, lambda: finished.append(1))
    assert len(finished) == NUM_TALKS
    return talks


def _assert_alike(got: list[Talk], want: list[Talk]) -> None:
    assert [talk.said for talk in got] == [talk.said for talk in want]
    for ours, theirs in zip(got, want, strict=True):
        for a, b in zip(ours.completions, theirs.completions, strict=True):
            assert a.finish is b.finish
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def undisturbed(tiny: Any, chat: Any) -> dict[float, list[Talk]]:
    """What is said when there is room for all, by temperature."""
    return {sampling.temperature: _run(_engine(tiny), chat, sampling) for sampling in (GREEDY, WARM)}


@pytest.fixture(scope="module")
def longest(undisturbed: Any) -> int:
    """Positions of the longest conversation of the sampled run."""
    return max(len(talk.contexts[0]) + sum(map(len, talk.contexts[1:])) + sum(map(len, talk.said)) for talk in undisturbed[0.9])


def test_greedy_equals_generate_through_evictions(tiny: Any, chat: Any, undisturbed: Any, longest: int) -> None:
    """Each turn anew through transformers, with the whole conversation; the engine has room for one long conversation and a bit."""
    talks = _run(engine := _engine(tiny, longest + 60), chat, GREEDY)
    assert engine.statistics.evictions > 0
    ends = [tiny.tokenizer.eos_token_id, tiny.tokenizer.convert_tokens_to_ids("</answer>")]
    for talk in talks:
        so_far: list[int] = []
        for context, said in zip(talk.contexts, talk.said, strict=True):
            so_far = [*([] if isinstance(context, ContextReset) else so_far), *context]
            ids = torch.tensor([so_far])
            with torch.inference_mode():
                full = tiny.model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30, eos_token_id=ends, pad_token_id=ends[0]
                )
            assert said == tuple(full[0, len(so_far) :].tolist())
            so_far += said
    _assert_alike(talks, undisturbed[0.0])


@pytest.mark.parametrize(
    ("spare", "tokens_per_call", "beside"),
    [
        (0, 8, False),
        (100, 8, False),
        (100, 8, True),
        *(
            pytest.param(spare, tokens, beside, marks=pytest.mark.long)
            for spare, tokens, beside in (
                (400, 8, False),
                (0, 1, False),
                (100, 1, False),
                (400, 1, False),
                (0, 8, True),
                (400, 8, True),
                (100, 1, True),
            )
        ),
    ],
)
def test_evictions_change_no_trajectory(
    tiny: Any, chat: Any, undisturbed: Any, longest: int, spare: int, tokens_per_call: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`beside`: with drafts, and rows that wait for room to be prefilled while others decode."""
    monkeypatch.setattr(ContiguousDecoder, "tokens_per_call", tokens_per_call)
    monkeypatch.setattr(ContiguousDecoder, "prefills_beside", beside)
    monkeypatch.setattr(ContiguousDecoder, "most_drafted_rows", 128)
    engine = _engine(tiny, longest + spare, speculative_tokens=3 if beside else 0)
    _assert_alike(_run(engine, chat, WARM), undisturbed[0.9])
    assert beside or (engine.statistics.evictions > 0 and engine.statistics.recomputed_tokens > 0)


def test_a_row_that_is_evicted_is_the_one_that_came_last(deep_tiny: Any, chat: Any, longest: int) -> None:
    """The first dialogue is never disturbed: its whole conversation is fed once."""
    contexts = [tuple(range(10, 70)), tuple(range(20, 50))]
    talks = [Talk(2 * number, list(contexts)) for number in range(4)]
    order: list[int] = []
    for number, talk in enumerate(talks):
        talk.receive = lambda completion, talk=talk, number=number: (order.append(number), Talk.receive(talk, completion))[1]  # type: ignore[method-assign]
    engine = _engine(deep_tiny, 2 * 150)
    engine.run(talks, Sampling(0.9, 25))
    assert engine.statistics.evictions > 0
    assert order[0] == 0 and order.index(1) < order.index(3)
    assert all(len(talk.said) == 2 for talk in talks)


@pytest.mark.parametrize("tokens_per_call", [3, pytest.param(8, marks=pytest.mark.long), pytest.param(50, marks=pytest.mark.long)])
def test_how_many_tokens_are_drawn_at_once_changes_nothing(
    tiny: Any, chat: Any, undisturbed: Any, tokens_per_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContiguousDecoder, "tokens_per_call", tokens_per_call)
    for sampling in (GREEDY, WARM):
        engine = _engine(tiny, max_rows=3)
        _assert_alike(_run(engine, chat, sampling), undisturbed[sampling.temperature])
    assert engine.statistics.dropped_tokens > 0 and engine.statistics.decode_calls < 300 / tokens_per_call


def test_no_more_tokens_are_drawn_than_any_row_can_use(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContiguousDecoder, "tokens_per_call", 50)
    engine = _engine(tiny)
    talk = Talk(0, [(10, 11, 12)])
    engine.run([talk], Sampling(0.9, 4))
    stats = engine.statistics
    assert stats.sampled_tokens + stats.dropped_tokens == 4 and stats.decode_calls == 1 and len(talk.said[0]) <= 4


def test_tokens_stay_within_the_positions(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response that ends with the last position of its conversation: eight at once would pass the end, and no room is asked for them."""
    prompt = tuple(range(10, 55))
    plain = Talk(0, [prompt])
    _engine(tiny).run([plain], Sampling(0.9, 6))
    asked: list[int] = []
    reserve = ContiguousDecoder.reserve
    monkeypatch.setattr(
        ContiguousDecoder, "reserve", lambda self, slots, *more: (asked.extend(slots.values()), reserve(self, slots, *more))[1]
    )
    monkeypatch.setattr(ContiguousDecoder, "tokens_per_call", 8)
    talk = Talk(0, [prompt])
    _engine(tiny, max_context=50).run([talk], Sampling(0.9, 30, stop_ids=(plain.said[0],)))
    assert talk.said == plain.said and len(plain.said[0]) == 6
    assert max(asked) == 50


def test_a_row_that_begins_anew_gives_its_room_to_others(tiny: Any) -> None:
    """40 tokens and 25 do not fit together, 10 and 25 do: the second dialogue plays beside the new conversation of the first."""
    talks = [Talk(0, [tuple(range(10, 50)), ContextReset(range(60, 70))]), Talk(2, [tuple(range(30, 55))])]
    engine = _engine(tiny, 62)
    engine.run(talks, Sampling(0.9, 5))
    assert [len(said) for talk in talks for said in talk.said] == [5, 5, 5]
    assert engine.statistics.decode_calls == 4 + 4


def test_a_stream_of_draws_is_one_uniform_a_token(tiny: Any, chat: Any, undisturbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was drawn ahead and dropped is used for the next token: the uniforms of a dialogue are used up in order."""
    talk = undisturbed[0.9][3]
    assert len(talk.said) == 1
    fresh = np.random.Generator(np.random.PCG64(3))
    so_far = list(talk.contexts[0])
    for token in talk.said[0]:
        with torch.inference_mode():
            probs = torch.softmax(tiny.model(torch.tensor([so_far])).logits[0, -1] / 0.9, dim=-1)
        assert token == int(torch.searchsorted(probs.cumsum(0), fresh.random(dtype=np.float32), right=True))
        so_far.append(token)


def test_the_counts_of_a_run(tiny: Any, chat: Any) -> None:
    """A group of three, one turn; a single talk, two turns: every number by hand."""
    prompt, more = tuple(range(10, 30)), tuple(range(40, 47))
    talks = [Talk(0, [prompt], 5), Talk(2, [prompt], 5), Talk(4, [prompt], 5), Talk(6, [prompt, more])]
    engine = _engine(tiny)
    engine.run(talks, Sampling(0.9, 5))
    sampled = [len(said) for talk in talks for said in talk.said]
    assert (
        engine.statistics
        == EngineStatistics(
            sampled_tokens=sum(sampled),
            fed_tokens=20 + 20 + 1 + 7,  # two prompts, the last token of the first response and what follows it
            shared_tokens=2 * 20,
            decode_calls=max(sampled[:4]) - 1 + sampled[4] - 1,
        )
    )
    engine.run([], GREEDY)
    assert engine.statistics == EngineStatistics()


def test_only_beginnings_are_shared(tiny: Any) -> None:
    """Two members that say the same and hear the same: a decoder shares what empty slots begin with, no more."""
    prompt, more = tuple(range(10, 30)), tuple(range(40, 47))
    talks = [Talk(0, [prompt, more], 5), Talk(2, [prompt, more], 5)]
    engine = _engine(tiny)
    engine.run(talks, Sampling(0.0, 5))
    assert talks[0].said == talks[1].said
    assert (engine.statistics.fed_tokens, engine.statistics.shared_tokens) == (20 + 2 * (1 + 7), 20)


def test_what_is_computed_again_is_counted(deep_tiny: Any) -> None:
    """Room for two prompts of 20 and 10 tokens more each; the second gives way when the 31st position is due, and comes back whole."""
    talks = [Talk(0, [tuple(range(10, 30))]), Talk(2, [tuple(range(30, 50))])]
    engine = _engine(deep_tiny, 60)
    engine.run(talks, Sampling(0.9, 25, stop_ids=()))
    first, second = (len(talk.said[0]) for talk in talks)
    assert first > 12 and second > 12  # else this test shows nothing
    assert engine.statistics.evictions == 1
    assert engine.statistics.recomputed_tokens == 30
    assert engine.statistics.fed_tokens == 20 + 20 + 31


def test_a_conversation_that_does_not_fit_alone_is_said_so(tiny: Any, chat: Any) -> None:
    engine = _engine(tiny, 40)
    with pytest.raises(BadInput, match=r"a conversation of 41 tokens does not fit .* \(rollout.cache_gb=.*\); raise rollout.cache_gb"):
        engine.run([Talk(0, [tuple(range(10, 47))]), Talk(2, [(7, 8)])], Sampling(0.9, 30))
    talk = Talk(0, [(7, 8, 9)])
    engine.run([talk], Sampling(0.9, 5))  # the engine can go on
    assert len(talk.said) == 1


def test_a_conversation_past_its_positions_is_refused(tiny: Any) -> None:
    engine = _engine(tiny, max_context=40)
    for prompt, budget in ((41, 1), (39, 5)):
        with pytest.raises(
            BadInput, match=r"a conversation of 41 tokens exceeds the 40 positions that it may have; lower rollout.max_context"
        ):
            engine.run([Talk(0, [tuple(range(10, 10 + prompt))])], Sampling(0.9, budget))
    engine.run([Talk(0, [tuple(range(10, 49))])], Sampling(0.9, 2))


def test_a_response_ends_at_a_sequence_of_ids(tiny: Any, chat: Any, undisturbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence is taken from the middle of what is said otherwise; tokens per call decide nothing here either."""
    plain = undisturbed[0.0][0].said[0]
    ending = plain[4:7]
    for tokens_per_call in (1, 5):
        monkeypatch.setattr(ContiguousDecoder, "tokens_per_call", tokens_per_call)
        talk = _talks(chat)[0]
        _engine(tiny).run([talk], Sampling(0.0, 30, stop_ids=((1, *ending), ending)))
        assert talk.said == [plain[:7]] and talk.completions[0].finish is FinishReason.STOP_TEXT
        talk = _talks(chat)[0]
        _engine(tiny).run([talk], Sampling(0.0, 30, stop_ids=((talk.contexts[0][-1], plain[0]),)))
        assert talk.said == [plain]  # a sequence that begins in the prompt is none of the response's


def test_an_engine_plays_again_with_more_slots_and_after_a_failure(tiny: Any, chat: Any, undisturbed: Any) -> None:
    engine = _engine(tiny)
    few = _talks(chat)[:2]
    engine.run(few, WARM)
    small = engine._decoder
    _assert_alike(_run(engine, chat, WARM), undisturbed[0.9])
    large = engine._decoder
    assert small is not large and large is not None and large.num_slots == NUM_TALKS

    class Failing(Talk):
        def receive(self, completion: Completion) -> Any:
            raise RuntimeError("the house is on fire")

    with pytest.raises(RuntimeError, match="fire"):
        engine.run([*_talks(chat)[:3], Failing(8, [(10, 11, 12)])], WARM)
    _assert_alike(_run(engine, chat, WARM), undisturbed[0.9])
    kept = engine._decoder
    _assert_alike(_run(engine, chat, WARM), undisturbed[0.9])
    assert engine._decoder is kept
    engine.free()
    assert engine._decoder is None


def test_a_cache_that_held_nonsense_is_not_used_again(tiny_model: Any, tiny: Any, chat: Any, undisturbed: Any) -> None:
    engine = NativeEngine(Policy(tiny_model, tiny.tokenizer))
    weights = tiny_model.base_model.layers[0].mlp.down_proj.weight
    sound = weights.detach().clone()
    weights.data.fill_(float("nan"))
    with pytest.raises(DivergedModel):
        _run(engine, chat, WARM)
    assert engine._decoder is None
    weights.data.copy_(sound)
    _assert_alike(_run(engine, chat, WARM), undisturbed[0.9])


def test_which_decoder_serves_a_model(tiny: Any) -> None:
    assert _engine(tiny).backend == "contiguous"
    size = {"vocab_size": len(tiny.tokenizer), "n_embd": 16, "n_layer": 1, "n_head": 1, "n_positions": 64}
    other = hf.GPT2LMHeadModel(hf.GPT2Config(**size, bos_token_id=0, eos_token_id=0)).eval()
    assert NativeEngine(Policy(other, tiny.tokenizer)).backend == "generic"


@pytest.mark.long  # with random weights: test_greedy_equals_generate_through_evictions
def test_smollm2_says_greedily_what_generate_says(smollm2: Any) -> None:
    """Two turns and three lengths, with room for little more than one conversation at a time."""
    encode: Callable[[str], tuple[int, ...]] = lambda text: tuple(smollm2.tokenizer.encode(text))  # noqa: E731
    talks = [
        Talk(0, [encode("The capital of France is"), encode(" And the capital of Italy")]),
        Talk(1, [encode("One, two, three, four, five, six, seven,")]),
        Talk(2, [encode("Water boils at"), encode(" degrees, and it freezes")]),
    ]
    size = 50 * position_bytes(Policy(smollm2.model)) / 2**30
    engine = NativeEngine(Policy(smollm2.model, smollm2.tokenizer), cache_gb=size)
    engine.run(talks, Sampling(0.0, 10))
    assert engine.statistics.evictions > 0
    for talk in talks:
        so_far: list[int] = []
        for context, said in zip(talk.contexts, talk.said, strict=True):
            so_far += context
            ids = torch.tensor([so_far])
            with torch.inference_mode():
                full = smollm2.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10)
            assert said == tuple(full[0, len(so_far) :].tolist())
            so_far += said
