"""A .gguf file is converted once; a changed file and a damaged cache are converted again."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tether.core.errors import ModelUnavailable
from tether.models import gguf as gguf_module
from tether.models.load import load_model
from tether.training.disk import plan_disk
from tether.training.memory import measured_shape, shape_of
from tether.training.settings import RunSettings

gguf = pytest.importorskip("gguf")
WIDTH, INNER, HEADS, LAYERS = 32, 64, 4, 2


def write_gguf(path: Path, seed: int) -> None:
    """A small Llama with a byte-level tokenizer of 262 words; matrices quantised to eight bits."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(262)
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    words = [chr(byte) for byte in visible] + [chr(256 + n) for n in range(256 - len(visible))]
    words += ["<unk>", "<s>", "<|im_start|>", "<|im_end|>", "ab", "cd"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([1] * 256 + [3] * 4 + [1] * 2)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(259)
    writer.add_unk_token_id(256)
    shapes = {"token_embd": (262, WIDTH), "output": (262, WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_{name}": (INNER, WIDTH) for name in ("gate", "up")} | {f"blk.{layer}.ffn_down": (WIDTH, INNER)}
        shapes |= {f"blk.{layer}.{name}_norm": (WIDTH,) for name in ("attn", "ffn")}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Cache:
    """A .gguf file, an empty cache, and how often the file has been converted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TETHER_CACHE", str(folder / "cache"))
        self.path = folder / "small.gguf"
        write_gguf(self.path, seed=0)
        self.conversions = 0
        read = gguf_module.read_gguf

        def counted(*args: Any) -> Any:
            self.conversions += 1
            return read(*args)

        monkeypatch.setattr(gguf_module, "read_gguf", counted)

    def load(self, dtype: str | None = None) -> Any:
        return load_model(str(self.path), device="cpu", dtype=dtype).model

    @property
    def folders(self) -> list[Path]:
        return sorted((self.path.parent / "cache" / "models").iterdir())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    return Cache(tmp_path, monkeypatch)


def _same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_file_is_converted_once_and_that_is_said_once(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    direct, _ = gguf_module.read_gguf(cache.path)
    cache.conversions = 0
    with caplog.at_level(logging.WARNING, logger="tether"):
        first = cache.load()
        said = len(caplog.messages)
        second, half = cache.load(), cache.load("bfloat16")
    assert cache.conversions == 1 and len(cache.folders) == 1
    assert caplog.messages == caplog.messages[:said] and caplog.messages[-1] == (
        f"converted 'small.gguf' to safetensors, cached in {cache.folders[0]}"
    )
    assert _same(first, direct) and _same(second, direct), "float32 loses nothing of what was dequantised"
    assert half.dtype == torch.bfloat16 and first.name_or_path == str(cache.path)


def test_a_moved_file_is_the_same_file(cache: Cache) -> None:
    cache.load()
    other = cache.path.with_name("other")
    other.mkdir()
    cache.path = cache.path.rename(other / cache.path.name)
    cache.load()
    assert cache.conversions == 1


def test_a_changed_file_is_converted_again(cache: Cache) -> None:
    before = cache.load()
    write_gguf(cache.path, seed=1)
    after = cache.load()
    assert cache.conversions == 2 and len(cache.folders) == 2 and not _same(before, after)


def test_the_memory_plan_reads_the_header(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape is that of the loaded model, before it was ever converted and after; nothing is converted for it."""
    found = shape_of(str(cache.path))
    assert cache.conversions == 0 and not (cache.path.parent / "cache").exists()
    assert found == measured_shape(cache.load()) and found is not None
    layer = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH
    assert found.parameters == 2 * 262 * WIDTH + WIDTH + LAYERS * layer
    assert shape_of(str(cache.path)) == found and cache.conversions == 1
    plan = plan_disk(
        RunSettings.model_validate({"model": {"name": str(cache.path), "device": "cpu"}, "env": {"name": "frozen_lake"}}), cache.path.parent
    )
    assert plan is not None and plan.checkpoint == 12 * found.parameters
    for length in (0, 3, 20, 200, 2000, 6000):
        torn = cache.path.with_name(f"{length}.gguf")
        torn.write_bytes(cache.path.read_bytes()[:length])
        assert shape_of(str(torn)) is None
        with pytest.raises(ModelUnavailable, match="cannot read"):
            load_model(str(torn), device="cpu")


@pytest.mark.parametrize("damage", ["torn weights", "no weights", "torn config"])
def test_a_damaged_folder_is_built_again(cache: Cache, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    first = cache.load()
    (folder,) = cache.folders
    weights = folder / "model.safetensors"
    if damage == "torn weights":
        torn = weights.read_bytes()[:1000]
        weights.unlink()  # the loaded model reads from the old file
        weights.write_bytes(torn)
    elif damage == "no weights":
        weights.unlink()
    else:
        (folder / "config.json").write_text("{")
    assert _same(cache.load(), first) and cache.conversions == 2
    assert any("it is converted again" in message for message in caplog.messages)
    assert _same(cache.load(), first) and cache.conversions == 2


def test_a_conversion_that_fails_leaves_nothing(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    class Torn:
        def save_pretrained(self, folder: Path) -> None:
            folder.mkdir()
            (folder / "config.json").write_text("{}")
            raise KeyboardInterrupt

    monkeypatch.setattr(gguf_module, "read_gguf", lambda path: (Torn(), Torn()))
    with pytest.raises(KeyboardInterrupt):
        cache.load()
    assert cache.folders == []


def test_a_cache_that_cannot_be_written(cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (cache.path.parent / "file").write_text("in the way")
    monkeypatch.setenv("TETHER_CACHE", str(cache.path.parent / "file"))
    assert cache.load("bfloat16").dtype == torch.bfloat16
    assert "'small.gguf' cannot be cached and is converted at every load" in caplog.messages[-1]


def test_a_file_that_is_no_gguf_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "fake.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(ModelUnavailable, match=r"cannot read .*fake\.gguf"):
        load_model(str(tmp_path / "fake.gguf"))
    assert not (tmp_path / "cache").exists()
