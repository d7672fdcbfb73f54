"""The paged decoder against transformers: by Triton's interpreter where there is no CUDA device."""

import numpy as np
import pytest
import torch
import transformers as hf

from tether.core.protocols import Sampling
from tether.core.seeding import derive_seed, generator
from tether.models.fast.decoding.protocol import DraftPlan, PrefillRequest
from tether.models.policy import probe_backbone

pytest.importorskip("triton")

from tether.models.fast.decoding import paged
from tether.models.fast.kernels import attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GREEDY = Sampling(temperature=0)
LAYERS = 2 if DEVICE == "cuda" else 1
"""The interpreter takes as long as there are layers; one test has two everywhere."""


@pytest.fixture
def layers() -> int:
    return LAYERS


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, layers: int) -> hf.PreTrainedModel:
    monkeypatch.setattr(paged, "BATCH_SIZES", (1, 3, 512))
    monkeypatch.setattr(paged, "PAGE", 16)
    monkeypatch.setattr(attention, "ENOUGH_PROGRAMS", 12)  # splits texts in two, no more: every program takes the interpreter its time
    torch.manual_seed(derive_seed("test", "paged"))
    config = hf.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
    )
    return hf.AutoModelForCausalLM.from_config(config).eval().to(DEVICE)


def decoder_for(model: hf.PreTrainedModel, num_slots: int = 3, budget: int = 10**8) -> paged.PagedDecoder:
    backbone, _ = probe_backbone(model)
    assert backbone is not None
    return paged.PagedDecoder(backbone, model.get_output_embeddings(), num_slots, 128, budget)


def greedy(model: hf.PreTrainedModel, text: list[int], count: int) -> list[int]:
    for _ in range(count):
        with torch.no_grad():
            text = [*text, int(model(torch.tensor([text], device=DEVICE)).logits[0, -1].argmax())]
    return text[-count:]


def logprobs(model: hf.PreTrainedModel, text: list[int], count: int) -> torch.Tensor:
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([text], device=DEVICE)).logits[0].float(), -1)
    return rows[torch.arange(len(text) - count - 1, len(text) - 1), torch.tensor(text[-count:])].cpu()


@pytest.mark.parametrize("layers", [2])
@pytest.mark.parametrize("sizes", [pytest.param((), marks=pytest.mark.long), (64,)], ids=["feeds as they are", "feeds filled up"])
def test_two_turns_token_for_token(model: hf.PreTrainedModel, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    """Prompts of several lengths, one of them shared; then observations for some, a slot used again, and more tokens."""
    monkeypatch.setattr(paged, "FEED_SIZES", sizes)
    decoder = decoder_for(model)
    rng = generator("test", "paged")
    texts = [rng.integers(0, 50, count).tolist() for count in (18, 18, 5)]
    texts[1] = list(texts[0])
    assert decoder.reserve({0: 18, 1: 18, 2: 5}, {1: 0})
    found = decoder.prefill(
        [PrefillRequest((0, 1), 0, texts[0]), PrefillRequest((2,), 0, texts[2])], GREEDY, np.zeros(3, np.float32)
    )().ids_BK
    assert decoder.reserve({0: 30, 1: 30, 2: 30})
    more = decoder.decode([0, 1, 2], [18, 18, 5], found[:, 0].tolist(), GREEDY, np.zeros((3, 3), np.float32))()
    for slot in range(3):
        tokens = [*found[slot].tolist(), *more.ids_BK[slot].tolist()]
        assert tokens == greedy(model, texts[slot], 4)
        texts[slot] += tokens
        np.testing.assert_allclose(more.logprobs_BK[slot], logprobs(model, texts[slot], 3), atol=1e-5)
    # The last token drawn has not been fed. Slot 0 ends two tokens earlier than it was decoded, slot 2 is given to another text.
    texts[0] = texts[0][:-2]
    decoder.release(2)
    assert decoder.reserve({0: 60, 2: 60})
    observations = {0: rng.integers(0, 50, 20).tolist(), 2: rng.integers(0, 50, 33).tolist()}
    feedings = [PrefillRequest((0,), len(texts[0]) - 1, [texts[0][-1], *observations[0]]), PrefillRequest((2,), 0, observations[2])]
    texts[0] += observations[0]
    texts[2] = observations[2]
    found = decoder.prefill(feedings, GREEDY, np.zeros(2, np.float32))().ids_BK
    more = decoder.decode([2, 0], [33, len(texts[0])], found[[1, 0], 0].tolist(), GREEDY, np.zeros((2, 2), np.float32))()
    assert [int(found[0, 0]), *more.ids_BK[1].tolist()] == greedy(model, texts[0], 3)
    assert [int(found[1, 0]), *more.ids_BK[0].tolist()] == greedy(model, texts[2], 3)


def test_a_slot_begins_with_what_another_holds(model: hf.PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two full pages are shared, four positions of the third are copied: neither slot sees what the other writes, nor what becomes of its slot."""
    monkeypatch.setattr(paged, "FEED_SIZES", ())
    decoder = decoder_for(model)
    decoder.start_drafts(2)
    rng = generator("test", "adopt")
    source, more, stranger = (rng.integers(0, 50, count).tolist() for count in (40, 5, 37))
    zeros = np.zeros(1, np.float32)
    assert decoder.reserve({0: 42})
    source += decoder.prefill([PrefillRequest((0,), 0, source)], GREEDY, zeros)().ids_BK[0].tolist()
    assert decoder.adopt(1, 0, 36) == 36
    text = [*source[:36], *more]
    assert decoder.reserve({1: 48})
    text += decoder.prefill([PrefillRequest((1,), 36, more)], GREEDY, zeros)().ids_BK[0].tolist()
    source += decoder.decode([0], [40], source[-1:], GREEDY, np.zeros((1, 1), np.float32))().ids_BK[0].tolist()
    assert source[40:] == greedy(model, source[:40], 2)
    decoder.release(0)
    assert decoder.reserve({0: 38})
    decoder.prefill([PrefillRequest((0,), 0, stranger)], GREEDY, zeros)()
    found = decoder.speculate([1], [41], text[-1:], DraftPlan(2, 2), GREEDY, np.zeros((1, 6), np.float32))()
    assert found.counts_B is not None
    text += found.ids_BK[0, : int(found.counts_B[0])].tolist()
    assert text[41:] == greedy(model, text[:41], len(text) - 41)
    np.testing.assert_allclose(found.logprobs_BK[0, : len(text) - 42], logprobs(model, text, len(text) - 42), atol=1e-5)


def test_a_feed_that_is_filled_up(model: hf.PreTrainedModel) -> None:
    """Tokens that fill it up belong to the row behind the last text, which is on page 0; texts that fill it up have no tokens."""
    decoder = decoder_for(model)
    assert decoder.reserve({0: 3, 1: 18})
    requests = [PrefillRequest((1,), 15, [7, 8, 9]), PrefillRequest((0,), 0, [5, 6])]
    feed = decoder._feeds.read(decoder._feeds.inputs(requests, (8, 3)), (8, 3))
    assert feed.ids_S.tolist() == [7, 8, 9, 5, 6, 0, 0, 0]
    assert feed.rows_S.tolist() == [0, 0, 0, 1, 1, 3, 3, 3]
    assert feed.positions_S.tolist() == [15, 16, 17, 0, 1, 0, 0, 0]
    assert (feed.last_B.tolist(), feed.lengths_B.tolist(), feed.starts_B1.tolist()) == ([2, 4, 0], [18, 2, 0], [0, 3, 5, 5])
    assert feed.blocks_N2.tolist() == [[0, 0], [1, 0], [0, attention.NO_BLOCK]], "64 tokens to a block, of which there may be one a text"
    tables = decoder._pages.tables
    assert feed.tables_BX.tolist() == [tables[1].tolist(), tables[0].tolist(), [0] * 8, [0] * 8]
    assert tables[1, :2].all() and tables[0, 0]  # page 0 is nobody's


@pytest.mark.parametrize(
    ("tokens", "texts", "size"),
    [(1, 1, (64, 4)), (64, 4, (64, 4)), (65, 1, (128, 8)), (10, 5, (128, 8)), (2048, 128, (2048, 128)), (2049, 1, None), (500, 129, None)],
)
def test_a_feed_takes_the_smallest_recorded_size_that_holds_it(tokens: int, texts: int, size: tuple[int, int] | None) -> None:
    assert paged._feed_size(tokens, texts, (64, 128, 2048)) == size


@pytest.mark.parametrize("sampling", [pytest.param(Sampling(temperature=0.7), marks=pytest.mark.long), Sampling(temperature=0.7, top_k=3)])
def test_draws_follow_the_uniforms(model: hf.PreTrainedModel, sampling: Sampling) -> None:
    """The uniform picks from the cumulative probabilities of the tokens that are not excluded; log-probs are of all tokens."""
    decoder = decoder_for(model)
    text = [3, 1, 4, 1, 5]
    assert decoder.reserve({0: 12})
    uniforms = np.array([[0.1, 0.5, 0.95]], dtype=np.float32)
    first = decoder.prefill([PrefillRequest((0,), 0, text)], sampling, np.array([0.3], dtype=np.float32))()
    rest = decoder.decode([0], [5], [int(first.ids_BK[0, 0])], sampling, uniforms)()
    ids = [*first.ids_BK[0].tolist(), *rest.ids_BK[0].tolist()]
    found = [*first.logprobs_BK[0].tolist(), *rest.logprobs_BK[0].tolist()]
    for step, uniform in enumerate([0.3, 0.1, 0.5, 0.95]):
        with torch.no_grad():
            logits = model(torch.tensor([text + ids[:step]], device=DEVICE)).logits[0, -1].double().cpu() / 0.7
        probs = torch.softmax(logits, -1)
        left = torch.where(probs >= probs.topk(sampling.top_k).values[-1], probs, 0.0) if sampling.top_k else probs
        cumulative = (left / left.sum()).cumsum(0)
        assert ids[step] == int((cumulative <= uniform).sum())
        assert abs(found[step] - float(probs[ids[step]].log())) < 1e-5


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(GREEDY, marks=pytest.mark.long),
        Sampling(temperature=0.7),
        pytest.param(Sampling(temperature=0.7, top_k=3), marks=pytest.mark.long),
    ],
)
def test_drafts_draw_what_single_steps_draw(model: hf.PreTrainedModel, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots of three, in two rounds of drafts of two tokens; a third slot has said before what the first one will say, so that its drafts are right."""
    monkeypatch.setattr(paged, "DRAFT_ROUNDS", 2)
    monkeypatch.setattr(paged, "FEED_SIZES", ())
    uniforms = generator("test", "drafts").random((2, 10), dtype=np.float32)
    texts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]]  # the second crosses into another page

    def begun() -> tuple[paged.PagedDecoder, list[int]]:
        decoder = decoder_for(model)
        decoder.start_drafts(2)
        assert decoder.reserve({0: 20, 1: 30, 2: 30})
        requests = [PrefillRequest((0,), 0, texts[0]), PrefillRequest((2,), 0, texts[1])]
        return decoder, decoder.prefill(requests, sampling, uniforms[:, 0].copy())().ids_BK[:, 0].tolist()

    single, first = begun()
    wanted = single.decode([0, 2], [5, 14], first, sampling, uniforms[:, 1:7])()
    decoder, first = begun()
    known = [*texts[0], first[0], *wanted.ids_BK[0].tolist()]
    decoder.prefill([PrefillRequest((1,), 0, known)], sampling, uniforms[0, :1].copy())()
    plan = decoder.draft_plan(2)
    assert plan == DraftPlan(2, 2)
    found = decoder.speculate([0, 2], [5, 14], first, plan, sampling, uniforms[:, 1:7])()
    assert found.counts_B is not None
    counts = found.counts_B.tolist()
    assert counts[0] == 6 and 2 <= counts[1] <= 6, "all that slot 1 said first; at least one token a round"
    for row, count in enumerate(counts):
        assert found.ids_BK[row, :count].tolist() == wanted.ids_BK[row, :count].tolist()
        np.testing.assert_allclose(found.logprobs_BK[row, :count], wanted.logprobs_BK[row, :count], atol=1e-5)
    count = counts[1]
    rest = decoder.decode([2], [14 + count], [int(found.ids_BK[1, count - 1])], sampling, uniforms[1:, 1 + count : 2 + count])()
    after = single.decode([2], [14 + count], [int(found.ids_BK[1, count - 1])], sampling, uniforms[1:, 1 + count : 2 + count])()
    assert rest.ids_BK.tolist() == after.ids_BK.tolist(), "what a wrong draft left in the cache is overwritten"


@pytest.mark.long
def test_what_was_recorded_is_forgotten_when_weights_have_moved(model: hf.PreTrainedModel) -> None:
    """That is looked at when a conversation begins, and not when one goes on."""
    decoder = decoder_for(model)
    decoder.start_drafts(1)
    assert decoder.reserve({0: 20, 1: 20})
    first = int(decoder.prefill([PrefillRequest((0,), 0, [3, 1, 4])], GREEDY, np.zeros(1, np.float32))().ids_BK[0, 0])
    decoder.speculate([0], [3], [first], DraftPlan(1, 1), GREEDY, np.zeros((1, 2), np.float32))()
    before = list(decoder._drafted)
    assert before
    decoder.prefill([PrefillRequest((0,), 4, [1, 5])], GREEDY, np.zeros(1, np.float32))()
    decoder.prefill([PrefillRequest((1,), 0, [3, 1, 4])], GREEDY, np.zeros(1, np.float32))()
    assert list(decoder._drafted) == before
    weight = model.model.norm.weight
    weight.data = weight.data.clone()
    decoder.prefill([PrefillRequest((0,), 6, [1, 5])], GREEDY, np.zeros(1, np.float32))()
    assert list(decoder._drafted) == before
    decoder.prefill([PrefillRequest((1,), 0, [3, 1, 4])], GREEDY, np.zeros(1, np.float32))()
    assert not decoder._drafted


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), pytest.param(Sampling(temperature=0.7, top_k=3), marks=pytest.mark.long)])
@pytest.mark.parametrize("mixed_sizes", [(32,), pytest.param((16,), marks=pytest.mark.long)])
@pytest.mark.long
def test_a_call_with_drafts_takes_in_what_is_prefilled(
    model: hf.PreTrainedModel, sampling: Sampling, mixed_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots decode, two others are prefilled meanwhile, one of them behind what it holds already; with too many tokens that comes after the call."""
    monkeypatch.setattr(paged, "MIXED_SIZES", mixed_sizes)
    monkeypatch.setattr(paged, "FEED_SIZES", ())
    uniforms = generator("test", "mixed").random((4, 8), dtype=np.float32)
    texts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [2, 7, 1], [8, 2, 8]]
    later = [[1, 8, 2, 8, 1, 8, 2, 8, 4], [4, 5, 2, 3, 5, 3, 6, 0, 2, 8, 7, 4, 7, 1, 3, 5, 2, 6]]

    def begun() -> tuple[paged.PagedDecoder, list[int]]:
        decoder = decoder_for(model, num_slots=4)
        decoder.start_drafts(1)
        assert decoder.reserve(dict.fromkeys(range(4), 40))
        requests = [PrefillRequest((slot,), 0, text) for slot, text in enumerate(texts[:3])]
        return decoder, decoder.prefill(requests, sampling, uniforms[:3, 0].copy())().ids_BK[:, 0].tolist()

    def requests(first: list[int]) -> list[PrefillRequest]:
        return [PrefillRequest((2,), 3, [first[2], *later[0]]), PrefillRequest((3,), 0, later[1])]

    apart, first = begun()
    wanted = apart.decode([0, 1], [5, 14], first[:2], sampling, uniforms[:2, 1:5])()
    fed_apart = apart.prefill(requests(first), sampling, uniforms[2:, 1].copy())()
    decoder, first = begun()
    call = decoder.speculate([0, 1], [5, 14], first[:2], DraftPlan(2, 1), sampling, uniforms[:2, 1:5])
    fed = decoder.prefill(requests(first), sampling, uniforms[2:, 1].copy())
    # On a GPU every size is recorded at the first call, used or not: one that was used holds what was fed.
    empty = {size: decoder._feeds.inputs([], (size, size // paged.TOKENS_PER_TEXT))[0] for size in mixed_sizes}
    used = [size for (_, _, size, _), ((flat,), _, _) in decoder._mixed.items() if not torch.equal(flat, empty[size])]
    assert used == ([32] if mixed_sizes == (32,) else [])
    found = call()
    assert found.counts_B is not None
    for row, count in enumerate(found.counts_B.tolist()):
        assert count >= 2 and found.ids_BK[row, :count].tolist() == wanted.ids_BK[row, :count].tolist()
        np.testing.assert_allclose(found.logprobs_BK[row, :count], wanted.logprobs_BK[row, :count], atol=1e-5)
    assert fed().ids_BK.tolist() == fed_apart.ids_BK.tolist()
    np.testing.assert_allclose(fed().logprobs_BK, fed_apart.logprobs_BK, atol=1e-5)
    last = [int(token) for token in fed_apart.ids_BK[:, 0]]
    starts = [4 + len(later[0]), len(later[1])]
    more = [one.decode([2, 3], starts, last, sampling, uniforms[2:, 2:3])() for one in (decoder, apart)]
    assert more[0].ids_BK.tolist() == more[1].ids_BK.tolist(), "keys and values of what was fed are the same"


@pytest.mark.parametrize(
    ("rows", "most", "tokens", "fed"),
    [
        (1, 7, 7, 8),
        (3, 7, 7, 32),
        (16, 7, 7, 128),
        (16, 16, 15, 256),
        (4, 16, 15, 64),
        (17, 16, 7, 256),
        (33, 7, 7, 256),
        (33, 2, 2, 192),
        (64, 7, 7, 256),
        (96, 7, 3, 256),
        (128, 7, 3, 256),
        (128, 1, 1, 256),
        (129, 7, None, 0),
    ],
)
def test_few_rows_get_long_drafts(
    monkeypatch: pytest.MonkeyPatch, model: hf.PreTrainedModel, rows: int, most: int, tokens: int | None, fed: int
) -> None:
    """At most 256 tokens a step, of which a row may have 16, eight or four, by how many there are; none where they are more than 128."""
    monkeypatch.setattr(paged, "BATCH_SIZES", (1, 4, 16, 32, 64, 96, 128, 192))
    decoder = decoder_for(model)
    decoder.start_drafts(most)
    plan = decoder.draft_plan(rows)
    assert plan == (None if tokens is None else DraftPlan(3, tokens))
    assert plan is None or paged._num_fed(paged._batch_size(rows), 1 + plan.tokens) == fed


@pytest.mark.parametrize("layers", [2])
def test_the_cache_stays_within_its_budget(model: hf.PreTrainedModel) -> None:
    """A page of 16 positions: two layers, keys and values, two heads of width 8, four bytes: 4,096 bytes."""
    decoder = decoder_for(model, budget=3 * 4096 + 100)
    assert decoder.cache_bytes == 4 * 4096, "and one page that belongs to nobody"
    assert decoder.reserve({0: 32, 1: 16}) and not decoder.reserve({2: 1})
    decoder.release(1)
    assert decoder.reserve({2: 1})
    assert decoder_for(model, num_slots=1).cache_bytes == (128 // 16 + 1) * 4096, "no more than the slots can use"


def test_batch_sizes(model: hf.PreTrainedModel) -> None:
    assert [paged._batch_size(rows) for rows in (1, 2, 3, 4, 512, 513)] == [1, 3, 3, 512, 512, 1024]


def test_prompts_are_cut_into_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "PREFILL_TOKENS", 10)
    feedings = [PrefillRequest((slot,), 0, [1] * count) for slot, count in enumerate((4, 6, 1, 12, 3))]
    assert [[len(feeding.tokens) for feeding in part] for part in paged._parts(feedings)] == [[4, 6], [1], [12], [3]]
