"""A cached decoder gives the logits of a plain forward pass over the whole conversation, however it was fed, padded, copied or moved."""

import mmap
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    Qwen2Config,
)

from tether.core.errors import BadInput, OutOfMemory
from tether.models.fast.decoding import rows as decoding_rows
from tether.models.fast.decoding.rows import CachedDecoder
from tether.models.hardware import memory_boundary
from tether.models.policy import Policy

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = {**SMALL, **ENDS, "num_key_value_heads": 1, "max_position_embeddings": 64}
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2),
    "gpt_neox": GPTNeoXConfig(**SMALL, max_position_embeddings=64, bos_token_id=1, eos_token_id=2),
    "qwen2": Qwen2Config(**GROUPED),
    "gemma2": Gemma2Config(**GROUPED, head_dim=16, final_logit_softcapping=0.5, sliding_window=64),
    "cohere": CohereConfig(**GROUPED, logit_scale=0.25),
    "granite": GraniteConfig(**GROUPED, logits_scaling=4.0),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STATM = Path("/proc/self/statm")
POST_PROCESS = ("gemma2", "cohere", "granite")


def _random_model(name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval().to(DEVICE)
    for parameter in model.parameters():  # large enough weights that a missing scale or cap shows
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.3)
    return model


def _resident_bytes() -> int:
    return int(STATM.read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def _ids(length: int, seed: int, vocabulary: int = 64) -> Tensor:
    return torch.randint(3, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@torch.inference_mode()
def _plain(model: Any, ids: Tensor) -> Tensor:
    """[T, V] of one forward pass over a conversation."""
    return model(input_ids=ids[None], use_cache=False).logits[0].float()


def _feed(decoder: CachedDecoder, first: int, pieces: list[Tensor], starts: list[int], pad: int) -> list[Tensor]:
    """Feed pieces of any lengths to consecutive rows, padded on the right with `pad`; the logits of each row's own tokens."""
    longest = max(len(piece) for piece in pieces)
    ids = torch.full((len(pieces), longest), pad, device=DEVICE)
    for row, piece in enumerate(pieces):
        ids[row, : len(piece)] = piece
    features = decoder.extend(slice(first, first + len(pieces)), ids, torch.tensor(starts, device=DEVICE))
    return [decoder.logits(features[row, : len(piece)]) for row, piece in enumerate(pieces)]


def _assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4)


def test_prefill_in_pieces(tiny_on_device: Any) -> None:
    ids = _ids(60, seed=1, vocabulary=400)
    decoder = CachedDecoder(Policy(tiny_on_device.model), num_rows=1)
    cuts = [0, 7, 8, 30, 31, 60]
    got = [_feed(decoder, 0, [ids[a:b]], [a], pad=0)[0] for a, b in pairwise(cuts)]
    _assert_close(torch.cat(got), _plain(tiny_on_device.model, ids))


def test_mixed_lengths_with_any_padding(tiny_on_device: Any) -> None:
    first = [_ids(n, seed=n, vocabulary=400) for n in (5, 23, 11)]
    second = [_ids(n, seed=10 + n, vocabulary=400) for n in (17, 2, 9)]
    decoder = CachedDecoder(Policy(tiny_on_device.model), num_rows=5)
    for row, logits in enumerate(_feed(decoder, 1, first, [0, 0, 0], pad=399)):
        _assert_close(logits, _plain(tiny_on_device.model, first[row]))
    for row, logits in enumerate(_feed(decoder, 1, second, [5, 23, 11], pad=77)):
        whole = torch.cat([first[row], second[row]])
        _assert_close(logits, _plain(tiny_on_device.model, whole)[len(first[row]) :])


@torch.inference_mode()
def test_copied_rows_continue_alone(tiny_on_device: Any) -> None:
    prompt = _ids(20, seed=2, vocabulary=400)
    ends = [_ids(6, seed=seed, vocabulary=400) for seed in (3, 4, 5)]
    decoder = CachedDecoder(Policy(tiny_on_device.model), num_rows=3)
    _feed(decoder, 0, [prompt], [0], pad=0)
    decoder.cache.copy_row(0, slice(1, 3), len(prompt))
    for row, logits in enumerate(_feed(decoder, 0, ends, [20, 20, 20], pad=0)):
        _assert_close(logits, _plain(tiny_on_device.model, torch.cat([prompt, ends[row]]))[20:])


@torch.inference_mode()
def test_swapped_rows_change_places(tiny_on_device: Any) -> None:
    prompts, end = [_ids(12, seed=6, vocabulary=400), _ids(30, seed=7, vocabulary=400)], _ids(4, seed=8, vocabulary=400)
    decoder = CachedDecoder(Policy(tiny_on_device.model), num_rows=3)
    _feed(decoder, 0, prompts, [0, 0], pad=0)
    decoder.cache.swap_rows(0, 1, 30)
    longer, shorter = _feed(decoder, 0, [end, end], [30, 12], pad=0)
    _assert_close(longer, _plain(tiny_on_device.model, torch.cat([prompts[1], end]))[30:])
    _assert_close(shorter, _plain(tiny_on_device.model, torch.cat([prompts[0], end]))[12:])


def test_the_cache_grows_and_keeps_what_it_holds(tiny_on_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_rows, "initial_positions", lambda device: 256)
    rows = [_ids(250, seed=9, vocabulary=400), _ids(40, seed=10, vocabulary=400)]
    more = [_ids(30, seed=11, vocabulary=400), _ids(25, seed=12, vocabulary=400)]
    decoder = CachedDecoder(Policy(tiny_on_device.model), num_rows=2)
    _feed(decoder, 0, rows, [0, 0], pad=0)
    assert decoder.cache.capacity == 256
    for row, logits in enumerate(_feed(decoder, 0, more, [len(part) for part in rows], pad=0)):
        _assert_close(logits, _plain(tiny_on_device.model, torch.cat([rows[row], more[row]]))[len(rows[row]) :])
    assert decoder.cache.capacity == 512


@pytest.mark.skipif(not STATM.exists(), reason="the memory that a process really has is read from Linux's /proc")
def test_main_memory_is_taken_when_something_is_written() -> None:
    cache = decoding_rows.RowCache(64)
    cache.capacity = 1024
    before = _resident_bytes()
    keys, values = cache.layer(0, torch.zeros(1, 8, 1, 64), torch.zeros(1, 8, 1, 64))
    size = keys.nbytes + values.nbytes
    assert size == 2**28 and _resident_bytes() - before < size / 8
    keys[:, :, :100] = 1.0
    cache.resize(64, 2048, 100)
    assert _resident_bytes() - before < size / 4
    assert bool((cache.keys[0][:, :, :100] == 1).all()) and not cache.keys[0][:, :, 100:200].any() and not cache.values[0].any()


def test_a_cache_that_main_memory_cannot_take_is_an_error_that_says_so() -> None:
    cache = decoding_rows.RowCache(2**40)
    cache.capacity = 1024
    with pytest.raises(OutOfMemory, match=r"out of memory in the rollout \(.*\); lower it"), memory_boundary("rollout", "lower it"):
        cache.layer(0, torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))


def test_a_conversation_past_the_models_positions_is_refused() -> None:
    decoder = CachedDecoder(Policy(_random_model("qwen2")), num_rows=1)
    _feed(decoder, 0, [_ids(60, seed=1)], [0], pad=0)
    _feed(decoder, 0, [_ids(4, seed=1)], [60], pad=0)
    with pytest.raises(BadInput, match=r"a conversation of 65 tokens exceeds the model's 64 positions; lower rollout.max_context"):
        _feed(decoder, 0, [_ids(1, seed=1)], [64], pad=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_any_architecture_decodes_as_it_reads(name: str) -> None:
    model = _random_model(name)
    first, second = [_ids(9, seed=1), _ids(4, seed=2)], [_ids(1, seed=3), _ids(6, seed=4)]
    decoder = CachedDecoder(Policy(model), num_rows=2)
    _feed(decoder, 0, first, [0, 0], pad=5)
    for row, logits in enumerate(_feed(decoder, 0, second, [9, 4], pad=5)):
        _assert_close(logits, _plain(model, torch.cat([first[row], second[row]]))[len(first[row]) :])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_halves_make_the_models_own_logits(name: str) -> None:
    """Where logits are scaled or capped after the head, the features must be the logits; elsewhere the cheap split is used."""
    model = _random_model(name)
    policy, ids = Policy(model), _ids(10, seed=5)
    with torch.inference_mode():
        features = policy.features(input_ids=ids[None], use_cache=False)
        _assert_close(policy.logits(features)[0], _plain(model, ids))
    assert features.shape == (1, 10, 64 if name in POST_PROCESS else 32)


def test_a_weak_soft_cap_is_not_taken_for_none() -> None:
    """A fresh model has small logits, on which a cap hardly shows; training makes them large."""
    config = Gemma2Config(**GROUPED, head_dim=16, final_logit_softcapping=30.0, sliding_window=64)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().to(DEVICE)
    policy, ids = Policy(model), _ids(10, seed=5)
    with torch.inference_mode():
        model.get_output_embeddings().weight.mul_(50)
        _assert_close(policy.logits(policy.features(input_ids=ids[None], use_cache=False))[0], _plain(model, ids))
    assert float(_plain(model, ids).abs().max()) > 5  # large enough for the cap to matter


def test_tiny_splits(tiny_on_device: Any) -> None:
    ids = _ids(12, seed=1, vocabulary=400)
    policy = Policy(tiny_on_device.model)
    with torch.inference_mode():
        features = policy.features(input_ids=ids[None], use_cache=False)
        assert features.shape == (1, 12, tiny_on_device.model.config.hidden_size)
        _assert_close(policy.logits(features[0, 3:5]), _plain(tiny_on_device.model, ids)[3:5])
