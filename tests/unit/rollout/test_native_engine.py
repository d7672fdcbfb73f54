"""The native engine says what transformers would say, token for token, whatever shares its batch, its rows or its prefill."""

from itertools import takewhile
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tether
from tether.core.config import validate
from tether.core.errors import BadInput, DivergedModel, TetherError
from tether.core.protocols import ContextReset, Sampling
from tether.core.types import Completion
from tether.models.fast.decoding import contiguous
from tether.models.logprobs import token_logprobs
from tether.models.policy import Policy
from tether.rollout.engines import continuous_batch
from tether.rollout.engines.native import NativeEngine
from tether.training.settings import RunSettings

GREEDY = Sampling(temperature=0.0, max_tokens=24)
WARM = Sampling(temperature=0.9, max_tokens=24)


class Talk:
    """A dialogue with its words laid down beforehand; it remembers what it was answered."""

    def __init__(self, contexts: list[tuple[int, ...]], key: int, seed: int = 0) -> None:
        self.contexts = contexts
        self.prefix_key = key
        self.closing_tags = ("</answer>",)
        self.uniforms = np.random.Generator(np.random.PCG64(seed))
        self.completions: list[Completion] = []

    def begin(self) -> tuple[int, ...] | None:
        return self.contexts[0] if self.contexts else None

    def receive(self, completion: Completion) -> tuple[int, ...] | None:
        self.completions.append(completion)
        said = len(self.completions)
        return self.contexts[said] if said < len(self.contexts) else None

    @property
    def said(self) -> list[tuple[int, ...]]:
        return [completion.token_ids for completion in self.completions]


class SlowTalk(Talk):
    """The same, but what comes next has to be asked for; it counts how many answers are on their way at a time."""

    on_their_way = 0
    most_on_their_way = 0

    def begin(self) -> Any:
        return self._later(super().begin())

    def receive(self, completion: Completion) -> Any:
        return self._later(super().receive(completion))

    def _later(self, feed: tuple[int, ...] | None) -> Any:
        SlowTalk.on_their_way += 1
        SlowTalk.most_on_their_way = max(SlowTalk.most_on_their_way, SlowTalk.on_their_way)

        def ask() -> tuple[int, ...] | None:
            SlowTalk.on_their_way -= 1
            return feed

        return ask


@pytest.fixture(scope="module")
def contexts(chat: Any) -> list[list[tuple[int, ...]]]:
    """Conversations of different lengths and numbers of turns; the appended parts do not depend on the answers."""
    conversations = []
    for seed, (name, options, turns) in enumerate(
        [
            ("frozen_lake", {}, 2),
            ("sokoban", {}, 1),
            ("frozen_lake", {"size": 6}, 3),
            ("frozen_lake", {"observation": "coordinates"}, 1),
            ("frozen_lake", {}, 2),
        ]
    ):
        env = tether.make_env(name, few_shot=0, **options)
        shown = env.reset(seed).text
        more = [chat.next_prompt(env.reset(seed + 100 + n).text, chat.encode("</answer>")) for n in range(turns - 1)]
        conversations.append([chat.first_prompt(env.instructions, shown), *more])
    return conversations


def _talk(tiny: Any, talks: list[Talk], sampling: Sampling, max_rows: int = 128) -> list[Talk]:
    finished: list[int] = []
    NativeEngine(Policy(tiny.model, tiny.tokenizer), max_rows=max_rows).run(talks, sampling, lambda: finished.append(1))
    assert len(finished) == len(talks)
    return talks


@pytest.fixture(scope="module")
def generated(tiny_on_device: Any, contexts: list[list[tuple[int, ...]]]) -> list[list[tuple[int, ...]]]:
    """What `generate` answers greedily, with the whole conversation given anew for each turn."""
    answers = []
    ends = [tiny_on_device.tokenizer.eos_token_id, tiny_on_device.tokenizer.convert_tokens_to_ids("</answer>")]
    for conversation in contexts:
        so_far: list[int] = []
        said = []
        for context in conversation:
            so_far += context
            ids = torch.tensor([so_far], device=tiny_on_device.model.device)
            with torch.inference_mode():
                full = tiny_on_device.model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, eos_token_id=ends, pad_token_id=ends[0]
                )
            said.append(tuple(full[0, len(so_far) :].tolist()))
            so_far += said[-1]
        answers.append(said)
    return answers


@pytest.mark.parametrize("max_rows", [128, 2, pytest.param(1, marks=pytest.mark.long)])
def test_greedy_equals_generate(tiny_on_device: Any, contexts: Any, generated: Any, max_rows: int) -> None:
    talks = _talk(tiny_on_device, [Talk(conversation, key) for key, conversation in enumerate(contexts)], GREEDY, max_rows)
    assert [talk.said for talk in talks] == generated
    assert {len(talk.said) for talk in talks} == {1, 2, 3}


@pytest.mark.parametrize(("share", "prefill_tokens"), [(1, 8192), (10**9, 8192), (8, 1), (2, 400)])
def test_when_and_how_much_is_fed_changes_nothing(
    tiny_on_device: Any, contexts: Any, generated: Any, share: int, prefill_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuous_batch, "FEED_SHARE", share)
    monkeypatch.setattr(contiguous, "PREFILL_TOKENS", prefill_tokens)
    talks = _talk(tiny_on_device, [Talk(conversation, key) for key, conversation in enumerate(contexts)], GREEDY, max_rows=4)
    assert [talk.said for talk in talks] == generated


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Drafts, and prefills beside them, as on a GPU: every call of the decoder with those that were not waited for when it was made, its own name last."""
    names: list[str] = []
    calls: list[tuple[str, ...]] = []

    def noted(name: str, call: Any) -> Any:
        def begin(self: Any, *given: Any) -> Any:
            wait = call(self, *given)
            names.append(name)
            calls.append(tuple(names))

            def waited() -> Any:
                assert names.pop(0) == name, "calls are waited for in their order"
                return wait()

            return waited

        return begin

    for name in ("prefill", "decode", "speculate"):
        monkeypatch.setattr(contiguous.ContiguousDecoder, name, noted(name, getattr(contiguous.ContiguousDecoder, name)))
    monkeypatch.setattr(contiguous.ContiguousDecoder, "prefills_beside", True)
    monkeypatch.setattr(contiguous.ContiguousDecoder, "most_drafted_rows", 128)
    return calls


@pytest.mark.parametrize("kind", [Talk, SlowTalk])
@pytest.mark.parametrize("max_rows", [4, pytest.param(2, marks=pytest.mark.long)])
def test_rows_that_are_prefilled_while_others_decode_change_nothing(
    tiny: Any, contexts: Any, kind: type[Talk], max_rows: int, under_way: list[tuple[str, ...]]
) -> None:
    plain = _talk(tiny, [kind(conversation, key, key) for key, conversation in enumerate(contexts)], WARM, max_rows)
    assert not [call for call in under_way if len(call) > 1]
    talks = [kind(conversation, key, key) for key, conversation in enumerate(contexts)]
    NativeEngine(Policy(tiny.model, tiny.tokenizer), max_rows=max_rows, speculative_tokens=2).run(talks, WARM)
    assert [talk.said for talk in talks] == [talk.said for talk in plain]
    beside = [call for call in under_way if len(call) > 1]
    assert len(beside) >= 2 and set(beside) <= {("decode", "prefill"), ("speculate", "prefill")}


@pytest.mark.parametrize(("share", "asked_beside"), [(1, False), (10**9, True)])
def test_few_answers_are_not_waited_for_while_others_decode(
    tiny: Any, contexts: Any, under_way: list[tuple[str, ...]], share: int, asked_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of 1: only once all rows wait. A large one: as soon as one does."""
    monkeypatch.setattr(continuous_batch, "FEED_SHARE", share)
    talks = [SlowTalk(conversation, key, key) for key, conversation in enumerate(contexts)]
    NativeEngine(Policy(tiny.model, tiny.tokenizer), max_rows=4, speculative_tokens=2).run(talks, WARM)
    assert any(len(call) > 1 for call in under_way) == asked_beside


@pytest.mark.parametrize("max_rows", [pytest.param(128, marks=pytest.mark.long), 2, pytest.param(1, marks=pytest.mark.long)])
def test_answers_that_have_to_be_asked_for_change_nothing(tiny_on_device: Any, contexts: Any, generated: Any, max_rows: int) -> None:
    SlowTalk.most_on_their_way = 0
    talks = _talk(tiny_on_device, [SlowTalk(conversation, key) for key, conversation in enumerate(contexts)], GREEDY, max_rows)
    assert [talk.said for talk in talks] == generated
    assert SlowTalk.on_their_way == 0
    assert SlowTalk.most_on_their_way == min(max_rows, len(contexts))  # all were at work before the first was asked


def test_slow_and_quick_dialogues_share_a_batch(tiny_on_device: Any, contexts: Any, generated: Any) -> None:
    kinds = [Talk, SlowTalk, Talk, SlowTalk, SlowTalk]
    talks = _talk(
        tiny_on_device, [kind(conversation, key) for key, (kind, conversation) in enumerate(zip(kinds, contexts, strict=True))], GREEDY, 3
    )
    assert [talk.said for talk in talks] == generated


@pytest.mark.parametrize(
    ("kind", "max_rows"),
    [(Talk, 128), (SlowTalk, 2), pytest.param(Talk, 2, marks=pytest.mark.long), pytest.param(SlowTalk, 128, marks=pytest.mark.long)],
)
def test_a_conversation_begun_anew_is_a_conversation_of_its_own(
    tiny_on_device: Any, contexts: Any, generated: Any, kind: Any, max_rows: int
) -> None:
    """Long after short, short after long, appended to afterwards, beside others that go on: the answers are those of the parts alone."""
    first, second, third, _, fifth = ([ContextReset(conversation[0]), *conversation[1:]] for conversation in contexts)
    talks = [kind(first + third, 0), kind(third + second + fifth, 1), kind(contexts[2], 2), kind(second, 3), kind(fifth + fifth, 4)]
    _talk(tiny_on_device, talks, GREEDY, max_rows)
    said = generated
    assert [talk.said for talk in talks] == [said[0] + said[2], said[2] + said[1] + said[4], said[2], said[1], said[4] + said[4]]


def test_prompts_begun_anew_are_computed_once_for_a_group(tiny_on_device: Any, contexts: Any) -> None:
    """Three members come to the same second prompt at the same time."""
    talks = [Talk([contexts[0][0], ContextReset(contexts[2][0])], 0) for _ in range(3)]
    engine = NativeEngine(Policy(tiny_on_device.model, tiny_on_device.tokenizer))
    engine.run(talks, GREEDY)
    prompts = len(contexts[0][0]) + len(contexts[2][0])
    assert (engine.statistics.fed_tokens, engine.statistics.shared_tokens) == (prompts, 2 * prompts)
    assert talks[0].said == talks[1].said == talks[2].said


class SlowToBegin(SlowTalk):
    """Only its beginning has to be asked for, and only once."""

    def receive(self, completion: Completion) -> Any:
        return Talk.receive(self, completion)


def test_a_dialogue_is_asked_once_for_each_answer(tiny_on_device: Any, contexts: Any, generated: Any) -> None:
    talks = _talk(tiny_on_device, [SlowToBegin(conversation, key) for key, conversation in enumerate(contexts)], GREEDY, 2)
    assert [talk.said for talk in talks] == generated
    assert SlowTalk.on_their_way == 0


def test_a_slow_dialogue_that_has_nothing_to_say_is_finished(tiny_on_device: Any) -> None:
    talks = _talk(tiny_on_device, [SlowTalk([], 0), SlowTalk([], 1)], GREEDY)
    assert [talk.said for talk in talks] == [[], []]


def test_a_response_ends_at_its_dialogues_own_tag(deep_tiny: Any, contexts: Any) -> None:
    talks = [Talk(contexts[1], 0), Talk(contexts[1], 0)]
    talks[0].closing_tags = ("</think>", "</answer>")
    (said,), (whole,) = (_talk(deep_tiny, [talk], GREEDY)[0].said for talk in talks)
    assert deep_tiny.tokenizer.decode(said).endswith("</think>")
    assert said == whole[: len(said)] and len(said) < len(whole)


def test_a_sample_does_not_depend_on_its_batch(tiny_on_device: Any, contexts: Any) -> None:
    together = _talk(tiny_on_device, [Talk(conversation, key, seed=key) for key, conversation in enumerate(contexts)], WARM, max_rows=3)
    for key in (0, 2, 4):
        alone = _talk(tiny_on_device, [Talk(contexts[key], 0, seed=key)], WARM)[0]
        assert alone.said == together[key].said
        for a, b in zip(alone.completions, together[key].completions, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4) and a.finish is b.finish


def _group(contexts: Any, keys: list[int]) -> list[Talk]:
    """Three members each of two groups, every one with draws of its own."""
    return [Talk(contexts[(0, 2)[n // 3]], key, seed=50 + n) for n, key in enumerate(keys)]


def test_a_shared_prefill_gives_the_same(tiny_on_device: Any, contexts: Any) -> None:
    engine = NativeEngine(Policy(tiny_on_device.model, tiny_on_device.tokenizer))
    shared, apart = _group(contexts, [0, 0, 0, 1, 1, 1]), _group(contexts, [0, 1, 2, 3, 4, 5])
    engine.run(shared, WARM)
    with_groups = engine.statistics
    engine.run(apart, WARM)
    assert [talk.said for talk in shared] == [talk.said for talk in apart]
    assert len({tuple(talk.said[0]) for talk in shared[:3]}) > 1  # members draw for themselves
    saved = 2 * (len(contexts[0][0]) + len(contexts[2][0]))
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(contexts[0][0], contexts[2][0], strict=False))
    begin = len(list(alike)) if engine.backend == "contiguous" else 0
    assert begin > 300 or engine.backend != "contiguous"  # the instructions
    # One prompt a group went through the model, and on a CPU what both prompts begin with once.
    assert (with_groups.shared_tokens, engine.statistics.shared_tokens) == (saved + begin, 5 * begin)
    assert engine.statistics.fed_tokens - with_groups.fed_tokens == saved - 4 * begin


def test_sampled_log_probs_are_the_learners(tiny_on_device: Any, contexts: Any) -> None:
    split = Policy(tiny_on_device.model)
    for talk in _talk(tiny_on_device, [Talk(conversation, key, seed=key) for key, conversation in enumerate(contexts)], WARM, max_rows=3):
        ids: list[int] = []
        mask: list[bool] = []
        for context, completion in zip(talk.contexts, talk.completions, strict=True):
            ids += [*context, *completion.token_ids]
            mask += [False] * len(context) + [True] * len(completion.token_ids)
        with torch.inference_mode():
            batch = (torch.tensor(part, device=split.device) for part in ([ids], [mask], [len(ids)]))
            want = token_logprobs(split, *batch, 0.9, max_tokens=2000)
        got = [value for completion in talk.completions for value in completion.logprobs]
        assert got == pytest.approx(want.tolist(), abs=1e-4)


def test_a_dialogue_with_nothing_to_say_does_not_stop_the_others(tiny_on_device: Any, contexts: Any, generated: Any) -> None:
    talks = _talk(tiny_on_device, [Talk([], 0), Talk(contexts[1], 1), Talk([], 2), Talk(contexts[0], 3), Talk([], 4)], GREEDY, max_rows=1)
    assert [talk.said for talk in talks] == [[], generated[1], [], generated[0], []]


def test_nobody_to_talk_to(tiny_on_device: Any) -> None:
    assert _talk(tiny_on_device, [], GREEDY) == []


def test_the_budget_of_a_response(tiny_on_device: Any, contexts: Any, generated: Any) -> None:
    talk = _talk(tiny_on_device, [Talk(contexts[1], 0)], Sampling(0.0, 7))[0]
    assert talk.said == [generated[1][0][:7]]
    assert str(talk.completions[0].finish) == "length"


def test_a_long_conversation_beside_a_new_prompt_stays_within_the_positions(tiny_on_device: Any) -> None:
    """900 tokens here, a new prompt of 300 there: neither is longer than the 1024 positions of the model, so neither may fail."""
    long = [tuple(range(10, 310)), tuple(range(10, 300)), tuple(range(10, 300)), (7, 8)]
    short = [tuple(range(20, 320))]
    talks = [Talk(long, 0)] + [Talk(short, key) for key in range(1, 12)]
    _talk(tiny_on_device, talks, Sampling(0.0, 3), max_rows=2)
    assert [len(talk.said) for talk in talks] == [4] + [1] * 11


def test_the_same_with_a_table_of_positions(tiny_on_device: Any) -> None:
    """A model that looks its 64 positions up in a table cannot even be asked for the 65th."""
    size = {"vocab_size": len(tiny_on_device.tokenizer), "n_embd": 16, "n_layer": 1, "n_head": 1, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)).eval()
    talks = [Talk([tuple(range(10, 30)), tuple(range(10, 28)), (7, 8)], 0)] + [Talk([tuple(range(20, 44))], key) for key in range(1, 9)]
    NativeEngine(Policy(model, tiny_on_device.tokenizer), max_rows=2).run(talks, Sampling(0.0, 3))
    assert [len(talk.said) for talk in talks] == [3] + [1] * 8


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_a_model_that_has_diverged_is_said_so(device: str, contexts: list[list[tuple[int, ...]]], sampling: Sampling) -> None:
    loaded = tether.load_model("tiny", device=device)
    engine = NativeEngine(Policy(loaded.model, loaded.tokenizer))
    loaded.model.get_output_embeddings().weight.data.fill_(float("nan"))
    with pytest.raises(DivergedModel, match="the model's log-probs are not finite: its weights have diverged"):
        engine.run([Talk(contexts[0], key=0)], sampling)


def test_float8_is_refused_where_there_is_none(tiny: Any) -> None:
    with pytest.raises(BadInput, match=r"rollout\.precision is fp8, but the device is CPU, .* it needs a GPU of compute capability 8\.9"):
        NativeEngine(Policy(tiny.model, tiny.tokenizer), precision="fp8")


def test_float8_corrects_by_itself_and_belongs_to_the_native_engine() -> None:
    chosen = validate(RunSettings, {"env": {"name": "frozen_lake"}, "rollout": {"precision": "fp8"}})
    assert chosen.algorithm.importance_cap == 2.0 and chosen.rollout.samples_with_copy
    kept = validate(RunSettings, {"env": {"name": "frozen_lake"}, "rollout": {"precision": "fp8"}, "algorithm": {"importance_cap": None}})
    assert kept.algorithm.importance_cap is None
    with pytest.raises(TetherError, match="has precision fp8, but engine is vllm, and only the native engine rounds weights"):
        validate(RunSettings, {"env": {"name": "frozen_lake"}, "rollout": {"precision": "fp8", "engine": "vllm"}})
