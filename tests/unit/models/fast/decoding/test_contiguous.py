"""A decoder over contiguous rows draws what a plain pass over each whole conversation would draw, whatever it moves, copies or resizes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tether.core.protocols import Sampling
from tether.models.fast.decoding import contiguous, rows
from tether.models.fast.decoding.contiguous import ContiguousDecoder, position_bytes
from tether.models.fast.decoding.protocol import DraftPlan, PrefillRequest, SampleOutput
from tether.models.fast.decoding.sampling import sample
from tether.models.policy import Policy

WARM = Sampling(temperature=0.8)
NUM_SLOTS = 6


class Journal:
    """A decoder, the conversation of every slot, and a source of what to do next; each draw is compared with a plain pass."""

    def __init__(self, model: Any, decoder: ContiguousDecoder, seed: int, num_words: int) -> None:
        self.model, self.decoder, self.num_words = model, decoder, num_words
        self.random = np.random.default_rng(seed)
        self.talks: dict[int, list[int]] = {}
        self.beginning: list[int] = []
        """Of new conversations."""
        self.num_compared = 0

    def words(self, count: int) -> list[int]:
        return self.random.integers(3, self.num_words, count).tolist()

    def feed(self, *groups: tuple[int, ...], lengths: tuple[int, ...]) -> None:
        feedings = []
        for slots, length in zip(groups, lengths, strict=True):
            said = self.talks.get(slots[0], [])
            start = max(0, len(said) - 1)  # the last drawn token has not been fed
            new = (said[start:] or self.beginning) + self.words(length)
            feedings.append(PrefillRequest(slots, start, new))
            for slot in slots:
                self.talks[slot] = said[:start] + new
        assert self.decoder.reserve({slot: len(self.talks[slot]) for slots in groups for slot in slots})
        uniforms = self.random.random(sum(map(len, groups)), dtype=np.float32)
        drawn = self.decoder.prefill(feedings, WARM, uniforms)()
        self.compare([slot for slots in groups for slot in slots], drawn, uniforms[:, None])

    def decode(self, *slots: int, count: int = 1) -> None:
        starts = [len(self.talks[slot]) - 1 for slot in slots]
        assert self.decoder.reserve({slot: start + count for slot, start in zip(slots, starts, strict=True)})
        uniforms = self.random.random((len(slots), count), dtype=np.float32)
        self.compare(slots, self.decoder.decode(slots, starts, [self.talks[slot][-1] for slot in slots], WARM, uniforms)(), uniforms)

    def speculate(self, *slots: int, right: int, count: int) -> None:
        """A draft of `count` tokens for each slot, of which the first `right` are what a plain pass draws: another slot has said it before."""
        uniforms = self.random.random((len(slots), count + 1), dtype=np.float32)
        starts = [len(self.talks[slot]) - 1 for slot in slots]
        assert self.decoder.reserve({slot: start + count + 1 for slot, start in zip(slots, starts, strict=True)})
        assert self.decoder._drafts is not None
        for slot, row_uniforms in zip(slots, uniforms, strict=True):
            said = list(self.talks[slot])
            for uniform in row_uniforms[:right]:
                said.append(self.plain(said, uniform)[0])
            self.decoder._drafts.write(NUM_SLOTS + slot, 0, [*said, *self.words(count - right)])
        last = [self.talks[slot][-1] for slot in slots]
        drawn = self.decoder.speculate(slots, starts, last, DraftPlan(1, count), WARM, uniforms)()
        assert drawn.ids_BK.shape == drawn.logprobs_BK.shape == (len(slots), count + 1)
        assert drawn.counts_B is not None and drawn.counts_B.tolist() == [right + 1] * len(slots)
        self.compare(slots, SampleOutput(drawn.ids_BK[:, : right + 1], drawn.logprobs_BK[:, : right + 1]), uniforms[:, : right + 1])

    def adopt(self, slot: int, source: int, length: int) -> None:
        assert self.decoder.adopt(slot, source, length) == length
        self.talks[slot] = self.talks[source][: length + 1]

    def release(self, *slots: int) -> None:
        for slot in slots:
            self.decoder.release(slot)
            self.talks.pop(slot)

    @torch.inference_mode()
    def plain(self, said: list[int], uniform: np.float32) -> tuple[int, float]:
        """What a plain pass over a whole conversation draws next, and its log-prob."""
        logits_1V = self.model(input_ids=torch.tensor([said], device=self.model.device), use_cache=False).logits[:, -1].float()
        ids_1, logprobs_1 = sample(logits_1V, WARM, torch.tensor([uniform], device=self.model.device))
        return int(ids_1), float(logprobs_1)

    def compare(self, slots: Any, drawn: SampleOutput, uniforms_BK: np.ndarray) -> None:
        for b, slot in enumerate(slots):
            for k in range(uniforms_BK.shape[1]):
                token, logprob = self.plain(self.talks[slot], uniforms_BK[b, k])
                assert int(drawn.ids_BK[b, k]) == token
                assert float(drawn.logprobs_BK[b, k]) == pytest.approx(logprob, abs=1e-4)
                self.talks[slot].append(token)
                self.num_compared += 1


@pytest.fixture(params=["grouped", "padded", "gpt2"])
def journal(request: Any, tiny_on_device: Any, device: str, small_model: Callable[..., Any]) -> Callable[..., Journal]:
    """Journals over the embedded model both ways, and over one that the family's pass does not know."""
    model = small_model("gpt2").to(device) if request.param == "gpt2" else tiny_on_device.model
    policy = Policy(model)
    backbone = policy.backbone if request.param == "grouped" else None
    assert (backbone is not None) == (request.param == "grouped")

    def build(seed: int = 0, **options: Any) -> Journal:
        if "budget_positions" in options:
            options["budget"] = options.pop("budget_positions") * position_bytes(policy)
        decoder = ContiguousDecoder(policy, NUM_SLOTS, backbone=backbone, **options)
        return Journal(model, decoder, seed, num_words=97 if request.param == "gpt2" else 400)

    return build


def _cache_bytes(decoder: ContiguousDecoder) -> int:
    cache = decoder._cache
    return sum(buffer.numel() * buffer.element_size() for buffer in (*cache.keys, *cache.values))


def test_a_conversation_of_every_kind(journal: Callable[..., Journal]) -> None:
    j = journal()
    j.feed((0,), (1,), (2,), lengths=(9, 4, 17))
    j.decode(0, 1, 2)
    j.decode(2, 1)  # two of three, and in another order
    j.feed((0,), lengths=(5,))
    j.feed((5, 3, 4), lengths=(8,))  # a group
    j.decode(4, 2, 0, 5)
    j.feed((3,), (1,), (4,), lengths=(1, 12, 3))
    j.decode(5, 4, 3, 2, 1, 0, count=3)
    j.release(1, 4)
    j.feed((4,), (1,), lengths=(2, 11))
    j.decode(1, 3, 4)
    j.decode(0, count=2)
    assert j.num_compared == 3 + 3 + 2 + 1 + 3 + 4 + 3 + 18 + 2 + 3 + 2


def test_drafts_right_and_wrong(journal: Callable[..., Journal]) -> None:
    """What a wrong draft leaves behind in the cache is overwritten."""
    j = journal()
    j.decoder.start_drafts(4)
    j.feed((0,), (1,), (2,), lengths=(9, 4, 17))
    j.speculate(2, 0, right=0, count=3)
    j.speculate(1, right=3, count=3)
    j.decode(0, 1, 2, count=2)
    j.speculate(0, 2, 1, right=1, count=4)
    j.feed((0,), lengths=(5,))
    j.decode(2, 0)
    assert j.num_compared == 3 + 2 + 4 + 6 + 6 + 1 + 2


def test_a_slot_begins_with_what_another_holds(journal: Callable[..., Journal]) -> None:
    """While that one goes on, after it is gone, from one that adopted itself, and with drafts from what was adopted."""
    j = journal(budget_positions=4 * 60)
    j.decoder.start_drafts(3)
    j.feed((0,), (1,), lengths=(30, 5))
    j.decode(0, 1, count=2)
    j.adopt(2, 0, 31)
    j.feed((2,), lengths=(4,))
    j.decode(1, 0, 2)
    j.release(0)
    j.adopt(4, 2, 20)
    j.decode(1)  # moves what was adopted
    j.feed((4,), (0,), lengths=(3, 8))
    j.speculate(4, right=2, count=3)
    j.decode(2, 0, 4, 1)
    assert j.decoder.adopt(5, 2, 61) == 0, "a fifth row of so many positions has no room"
    assert j.num_compared == 2 + 4 + 1 + 3 + 1 + 2 + 3 + 4


@pytest.mark.usefixtures("two_threads")
def test_few_rows_on_several_threads(journal: Callable[..., Journal]) -> None:
    """Products of few rows are computed otherwise on several threads."""
    j = journal()
    j.feed((0,), (1,), (2,), (3,), (4,), (5,), lengths=(3, 9, 1, 4, 12, 2))
    j.decode(0, 1, 2, 3, 4, 5, count=2)
    j.decode(4, 2, 0, 5)
    assert j.num_compared == 6 + 12 + 4


@pytest.fixture
def short_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rows have in common is read once from two rows and four positions on."""
    monkeypatch.setattr(contiguous, "LEAST_COMMON", 4)
    monkeypatch.setattr(rows, "LEAST_COMMON", 4)
    monkeypatch.setattr(rows, "LEAST_ROWS", 2)


@pytest.mark.usefixtures("short_beginnings")
def test_what_all_begin_with_is_computed_once(journal: Callable[..., Journal]) -> None:
    """While conversations come and go, and until one begins otherwise."""
    j = journal()
    j.beginning = j.words(12)
    j.feed((0,), (1,), (2, 3), lengths=(3, 7, 1))
    assert j.decoder.tokens_copied == 2 * 12  # that of a group is counted by the engine
    j.decode(0, 1, 2, 3)  # of different lengths
    j.decode(2, 0)
    j.feed((1,), lengths=(5,))
    j.feed((4,), lengths=(0,))  # nothing but the beginning, whose last token is fed
    assert j.decoder.tokens_copied == 2 * 12 + 11
    j.release(0)  # which had computed it
    j.decode(1, 2, 3, 4, count=2)
    j.adopt(0, 4, 9)
    j.feed((0,), lengths=(3,))
    j.decode(4, 2, 0)  # alike in nine positions
    j.beginning = j.words(12)
    j.feed((5,), lengths=(1,))
    j.decode(5, 4, 3, 2, 1, 0)
    j.release(0, 1, 2, 3, 4, 5)
    j.feed((3,), lengths=(2,))
    assert j.decoder.tokens_copied == 2 * 12 + 11
    j.feed((1,), lengths=(4,))
    assert j.decoder.tokens_copied == 2 * 12 + 11 + 12
    assert j.num_compared == 4 + 4 + 2 + 1 + 1 + 8 + 1 + 3 + 1 + 6 + 1 + 1


@pytest.mark.usefixtures("short_beginnings")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_step_that_reads_a_beginning_once_is_a_step(name: str, small_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several query heads share a key head here. The same rows with and without it, of one length and of several, up to rounding."""
    policy = Policy(small_model(name))
    assert policy.backbone is not None and policy.backbone.num_heads > policy.backbone.num_kv_heads
    uniforms = np.array([0.1, 0.5, 0.9], dtype=np.float32)
    for lengths in ((6, 6, 6), (1, 9, 4)):
        found = []
        for least in (4, 1000):
            monkeypatch.setattr(rows, "LEAST_COMMON", least)
            decoder = ContiguousDecoder(policy, 3, backbone=policy.backbone)
            texts = [[*range(10, 30), *range(40, 40 + length)] for length in lengths]
            decoder.reserve(dict.fromkeys(range(3), 40))
            decoder.prefill([PrefillRequest((slot,), 0, text) for slot, text in enumerate(texts)], WARM, uniforms)()
            found.append(decoder.decode([0, 1, 2], [len(text) for text in texts], [7, 8, 9], WARM, uniforms[:, None])())
        assert found[0].ids_BK.tolist() == found[1].ids_BK.tolist()
        np.testing.assert_allclose(found[0].logprobs_BK, found[1].logprobs_BK, atol=2e-5)


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[list[int]]]]:
    """(first position, the one after the last, sets of rows) of all that is read once."""
    found = []

    class Noted(rows._CommonPart):
        def __init__(self, cache: Any, scale: float, start: int, stop: int, sets: Any) -> None:
            super().__init__(cache, scale, start, stop, sets)
            found.append((start, stop, [list(alike) for alike in sets]))

    monkeypatch.setattr(rows, "_CommonPart", Noted)
    return found


@pytest.mark.usefixtures("short_beginnings")
def test_members_of_a_group_read_their_prompt_once(journal: Callable[..., Journal], read_once: list[Any]) -> None:
    """Groups of several sizes whose prompts differ in length, while rows move, continue and end; with and without a beginning of all prompts."""
    j = journal()
    splits = not j.decoder._pass.pads and j.decoder._pass._splits()  # on a CPU
    j.feed((0, 2), (1, 4, 5), (3,), lengths=(9, 14, 12))
    j.decode(0, 1, 2, 3, 4, 5)
    assert read_once == ([(0, 9, [[0, 2], [1, 4, 5], [3]])] if splits else [])
    j.feed((2,), (1,), lengths=(3, 6))
    j.decode(5, 0, 4, 2, count=2)  # moves a row between those of two groups
    j.decode(5, 1, 4, 2, 0, 3)
    j.release(3)
    j.feed((3,), lengths=(4,))  # shorter than what groups have in common
    read_once.clear()
    j.decode(0, 1, 2, 3, 4, 5)
    assert not splits or [stop for _, stop, _ in read_once] == [4]
    j.release(4)
    j.adopt(4, 0, 7)
    j.feed((4,), lengths=(11,))  # a slot that belonged to another group
    j.decode(4, 1, 5)
    j.decode(5, 1, 2, 0)
    j.release(0, 1, 2, 3, 4, 5)
    read_once.clear()
    j.beginning = j.words(8)
    j.feed((1, 0), (2, 4), (5, 3), lengths=(5, 5, 9))
    j.decode(0, 1, 2, 3, 4, 5, count=2)
    assert not splits or [(start, stop, len(sets)) for start, stop, sets in read_once[:2]] == [(0, 8, 1), (8, 13, 3)]
    j.feed((3,), lengths=(2,))
    j.decode(5, 4, 3, 2, 1, 0)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_random_walk_within_a_budget(journal: Callable[..., Journal], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 90 positions in all: rows become fewer and more, positions more and fewer, and memory never exceeds the budget."""
    monkeypatch.setattr(contiguous, "initial_positions", lambda device: 4)
    j = journal(seed, budget_positions=90)
    shapes, refused = set(), 0
    for _ in range(60):
        slot, new = int(j.random.integers(NUM_SLOTS)), int(j.random.integers(1, 16))
        after = {**{one: len(said) for one, said in j.talks.items()}, slot: len(j.talks.get(slot, [])) + new}
        if len(after) * max(after.values()) > 85:  # the walk may ask for five more below
            refused += not j.decoder.reserve({slot: 91})
            j.release(*j.random.permutation(list(j.talks))[: int(j.random.integers(1, len(j.talks) + 1))].tolist())
        elif j.random.random() < 0.4 and j.talks and len(j.talks) * (max(map(len, j.talks.values())) + 2) <= 85:
            j.decode(*j.random.permutation(list(j.talks)).tolist(), count=int(j.random.integers(1, 3)))
        else:
            j.feed((slot,), lengths=(new,))
        shapes.add((j.decoder._cache.num_rows, j.decoder._cache.capacity))
        assert _cache_bytes(j.decoder) <= 90 * j.decoder._cache.position_bytes
    assert len({rows for rows, _ in shapes}) >= 4 and len(shapes) >= 6
    assert refused > 5 and j.num_compared > 40


def test_padding_takes_no_room(journal: Callable[..., Journal]) -> None:
    """A short text at the end of a long conversation beside a long text at its beginning: padded, it would pass the last position."""
    j = journal(budget_positions=80, most_positions=40)
    j.feed((0,), lengths=(30,))
    j.feed((0,), (1,), lengths=(3, 20))
    j.decode(0, 1)


def test_rows_move_together_when_there_are_to_be_fewer(journal: Callable[..., Journal]) -> None:
    j = journal(budget_positions=90)
    j.feed((0,), (1,), (2,), (3,), (4,), (5,), lengths=(3, 4, 5, 6, 7, 8))
    j.release(0, 1, 2, 3)
    j.feed((4,), lengths=(35,))
    assert j.decoder._cache.num_rows == 2
    j.decode(5, 4, count=2)


def test_room_is_what_rows_and_their_longest_conversation_take(journal: Callable[..., Journal]) -> None:
    decoder = journal(budget_positions=100).decoder
    assert decoder.reserve({0: 30, 1: 20})
    assert decoder.reserve({2: 33})
    assert not decoder.reserve({3: 26})  # four rows of 33
    assert not decoder.reserve({0: 34})  # three rows of 34
    decoder.release(2)
    assert decoder.reserve({3: 26})  # three rows of 30
    decoder.release(0)
    assert decoder.reserve({1: 50}) and not decoder.reserve({1: 51})
    decoder.release(3)
    assert decoder.reserve({1: 100}) and not decoder.reserve({1: 101})


def test_a_refusal_changes_nothing(journal: Callable[..., Journal]) -> None:
    j = journal(budget_positions=60)
    j.feed((0,), (1,), lengths=(20, 12))
    assert not j.decoder.reserve({2: 21}) and not j.decoder.reserve({0: 31})
    j.decode(0, 1, count=4)


def test_memory_is_given_back_with_the_last_slot(journal: Callable[..., Journal]) -> None:
    j = journal()
    j.feed((0,), (1,), lengths=(20, 12))
    j.release(0)
    assert _cache_bytes(j.decoder) > 0
    j.release(1)
    assert _cache_bytes(j.decoder) == 0
    j.decoder.release(3)  # one that holds nothing
    j.feed((4,), lengths=(7,))
    j.decode(4)


def test_long_prompts_are_fed_in_parts(journal: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these parts is a pass of its own; what follows the prompts comes back in the order in which it was asked for."""
    monkeypatch.setattr(contiguous, "PREFILL_TOKENS", 20)
    j = journal()
    j.feed((3,), (0, 1), (2,), (5,), lengths=(15, 4, 25, 5))
    j.decode(0, 1, 2, 3, 5)
    parts = j.decoder._parts([PrefillRequest((0,), 0, [1] * n) for n in (15, 4, 25, 5)])
    assert parts == ([[1, 3], [0], [2]] if j.decoder._pass.pads else [[0, 1], [2], [3]])


def test_the_cache_is_no_longer_than_the_conversations_may_get(journal: Callable[..., Journal]) -> None:
    j = journal(most_positions=30)
    assert j.decoder.max_positions == 30
    j.feed((0,), lengths=(29,))
    assert j.decoder._cache.capacity == 30


def test_the_bytes_of_a_position(tiny: Any, small_model: Callable[..., Any]) -> None:
    config = tiny.model.config
    width = config.hidden_size // config.num_attention_heads
    want = 2 * config.num_hidden_layers * config.num_key_value_heads * width * 4
    assert position_bytes(Policy(tiny.model)) == want
    gpt2 = small_model("gpt2")
    assert position_bytes(Policy(gpt2)) == 2 * 2 * 32 * 4  # keys and values, two layers, all heads together 32 wide, four bytes


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_half_precision_stays_close(name: str, small_model: Callable[..., Any]) -> None:
    """The cache is in the model's precision; the two ways differ by its rounding."""
    model = small_model(name).to(torch.float16)
    policy = Policy(model)
    backbone = policy.backbone
    assert backbone is not None
    found = []
    for backend in (backbone, None):
        decoder = ContiguousDecoder(policy, 2, backbone=backend)
        assert decoder.reserve({0: 20, 1: 20})
        uniforms = np.array([0.3, 0.6], dtype=np.float32)
        found.append(decoder.prefill([PrefillRequest((0,), 0, [5, 6, 7]), PrefillRequest((1,), 0, [8, 9])], WARM, uniforms)())
        assert decoder._cache.keys[0].dtype == torch.float16
    np.testing.assert_allclose(found[0].logprobs_BK, found[1].logprobs_BK, atol=0.2)
