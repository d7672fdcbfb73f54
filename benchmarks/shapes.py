"""What the speed benchmarks share: models to measure, the clock, what the machine can do, what a model asks of it, and the table at the end.

A shape is a model with random weights, made on the device: no time depends on what the weights are. Its tokenizer is that of `tiny`, of
which only the end of turn and the chat template matter; ids beyond its vocabulary are words without letters. What the machine can do is
measured, not looked up: the rate of a large matrix product in the model's own precision (as the trainer measures it), and of a large copy
(bytes read and written).
A floor is what no program can leave out, at those rates: the products of every token once, the weights and the cache once per token.

Progress goes to stderr; stdout holds the Markdown table alone, so that it can be redirected. `--json` writes the same rows unrounded.
"""

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from tether import load_model
from tether.models.hardware import device_name, measured_peak, synchronise
from tether.models.load import DTYPES, LoadedModel
from tether.training.api import grow_allocator_segments

SHAPE = "shape:"
SHAPES: dict[str, Any] = {
    "3b": Qwen2Config(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "1.5b": Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}
"""As large as Qwen2.5-3B, Qwen2.5-1.5B and SmolLM2-135M."""

GIB = 2.0**30
Row = Mapping[str, float | str | None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Machine:
    """What the device was measured to do."""

    name: str
    flops: float
    """A second, in a large product."""
    bytes: float
    """A second, read and written by a large copy."""


@dataclass(frozen=True)
class ModelSize:
    """What a model asks of a machine."""

    layer_weights: int
    """Of the matrices of all layers."""
    head_weights: int
    attention_width: int
    """Query heads x their width."""
    num_layers: int
    weight_bytes: int
    """Layers and head: what one decoding step reads."""
    cache_bytes: int
    """Keys and values of one token."""

    def forward_flops(self, tokens: float, predicted: float, seen: float) -> float:
        """Of the matrix products: layers for every token, the head where a token is predicted, attention over `seen` (query, key) pairs."""
        return 2.0 * tokens * self.layer_weights + 2.0 * predicted * self.head_weights + 4.0 * seen * self.attention_width * self.num_layers


def seen_by(start: int, count: int) -> float:
    """(query, key) pairs of `count` new tokens after `start` earlier ones: each sees all before it, and itself."""
    return count * start + count * (count + 1) / 2


def add_model_options(parser: argparse.ArgumentParser, default: str = "smollm2") -> None:
    parser.add_argument("--model", default=default, help=f"any name load_model takes, or {', '.join(SHAPE + name for name in SHAPES)}")
    parser.add_argument("--device", default=None, help="cpu, cuda; the GPU if there is one")
    parser.add_argument("--dtype", default=None, choices=list(DTYPES), help="if not given: bfloat16 for a shape, else float32")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, default=None, help="write the rows here too, unrounded")


def measured_model(name: str, device: str | None = None, dtype: str | None = None) -> LoadedModel:
    """A model by name, or of a shape with random weights; memory is held as a run holds it."""
    grow_allocator_segments()
    if not name.startswith(SHAPE):
        return load_model(name, device=device, dtype=dtype)
    config, kind = shape_config(name), DTYPES[dtype or "bfloat16"]
    torch.manual_seed(0)
    with torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")):
        model = AutoModelForCausalLM.from_config(config, dtype=kind).eval()
    return LoadedModel(model, load_model("tiny", device="cpu").tokenizer)


def shape_config(name: str) -> Any:
    chosen = name.removeprefix(SHAPE)
    if chosen not in SHAPES:
        raise SystemExit(f"there is no shape '{chosen}'; there are {', '.join(SHAPES)}")
    return SHAPES[chosen]


def size_of(model: Any) -> ModelSize:
    config = model.config
    layers = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name and "lm_head" not in name)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head = config.vocab_size * config.hidden_size
    width = model.dtype.itemsize
    return ModelSize(
        layer_weights=layers,
        head_weights=head,
        attention_width=config.num_attention_heads * head_dim,
        num_layers=config.num_hidden_layers,
        weight_bytes=(layers + head) * width,
        cache_bytes=2 * config.num_key_value_heads * head_dim * config.num_hidden_layers * width,
    )


def measure_machine(model: Any) -> Machine:
    """The device of a model, in the model's precision."""
    return Machine(device_name(model.device), measured_peak(model.device, model.dtype), copy_rate(model.device))


@torch.inference_mode()
def copy_rate(device: torch.device) -> float:
    size = 2**30 if device.type == "cuda" else 2**26
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    target.copy_(source)
    return 2.0 * size / best_of(5, device, lambda: target.copy_(source))[0]


def precision(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def best_of(repeats: int, device: torch.device, job: Callable[[], Result]) -> tuple[float, Result]:
    """The shortest of several times, with the result it gave."""
    return min((timed(device, job) for _ in range(repeats)), key=lambda pair: pair[0])


def timed(device: torch.device, job: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds until the device has done the job, and what it gave."""
    synchronise(device)
    began = time.perf_counter()
    result = job()
    synchronise(device)
    return time.perf_counter() - began, result


def forget_peak(device: torch.device) -> None:
    """Begin a new peak of memory, what nobody holds any more given back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """The most memory held since `forget_peak` on a GPU; on a CPU by the whole process so far, of which no peak can be forgotten."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB


def say(text: str) -> None:
    """Progress, beside the table."""
    print(text, file=sys.stderr, flush=True)


def publish(rows: Sequence[Row], path: Path | None) -> None:
    """Print the table, and write it."""
    print(markdown(rows), flush=True)
    if path is not None:
        path.write_text(json.dumps(list(rows), indent=1) + "\n", encoding="utf-8")


def markdown(rows: Sequence[Row]) -> str:
    """A table with the columns of all rows, in the order in which they first come; what a row lacks is a dash."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    return "\n".join([head, *(f"| {' | '.join(cell(row.get(column)) for column in columns)} |" for row in rows)])


def cell(value: float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
