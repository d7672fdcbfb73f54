"""What a run takes of each GPU, by model, number of GPUs and `learner.sharding`: arithmetic by the trainer's own memory plan; nothing is measured.

    python benchmarks/memory_table.py                       # the tables of docs/scaling.md, with more sizes
    python benchmarks/memory_table.py --card 141            # for a card with so many GB

The first table counts what GRPO holds at once on each card: the engine's whole weights in bfloat16, fp32 master weights, Adam's moments, gradients,
what FSDP gathers, the cache of one conversation, and the logits that are computed at a time (`tether.training.memory.counted`); where servers sample and
FSDP divides, neither whole weights nor a cache. What is left of the card is for more cache and for activations. The second one says how fast a card can decode and train at most, and how long ranks exchange
gradients and weights, with the rates of `simulate_scaling.Machine`.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
from simulate_scaling import Machine
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from tether.core.config import validate
from tether.training.memory import GB, MemoryPlan, Shape, counted, measured_shape
from tether.training.settings import RunSettings

CARDS = (1, 2, 4, 8, 16, 64)
ROWS, CONTEXT = 128, 1000
"""Conversations that a card decodes together, and the tokens that each has by then."""
ROOM = 0.9
"""A run fits where it holds at most this share of a card: the rest is for activations and for what torch keeps."""


def _qwen(width: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int = 152064, *, tied: bool = False) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
    )


MODELS: dict[str, PreTrainedConfig] = {
    "0.5B": _qwen(896, 4864, 24, 14, 2, 151936, tied=True),
    "1.5B": _qwen(1536, 8960, 28, 12, 2, 151936, tied=True),
    "3B": _qwen(2048, 11008, 36, 16, 2, 151936, tied=True),
    "7B": _qwen(3584, 18944, 28, 28, 4),
    "14B": _qwen(5120, 13824, 48, 40, 8),
    "32B": _qwen(5120, 27648, 64, 40, 8),
    "70B": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    ),
}
"""Published shapes: Qwen2.5, and Llama 3.1 for the largest."""


def shape(name: str) -> Shape:
    """The sizes of a model of the table."""
    with torch.device("meta"):
        return measured_shape(AutoModelForCausalLM.from_config(MODELS[name]))


def plan(sizes: Shape, cards: int, sharding: str, engine: str = "native") -> MemoryPlan:
    """What GRPO with the settings' defaults takes of each card."""
    chosen = {"learner": {"sharding": sharding}, "rollout": {"engine": engine}}
    settings = validate(RunSettings, {"env": {"name": "frozen_lake"}, "model": {"name": "m", "dtype": "bfloat16"}, **chosen})
    return counted(settings, torch.device("cuda"), 2**60, {"m": sizes}, cards)


class Rates(NamedTuple):
    """The most that one card can do, and what exchanging costs."""

    decoded: float
    """Tokens a second."""
    trained: float
    """Tokens a second."""
    zero1: float
    """Seconds an update: gradients to their owners in float32, weights back in bfloat16."""
    fsdp: float
    """Seconds a micro-batch: weights gathered for the forward and for the backward pass, gradients divided in float32."""
    publish: float
    """Seconds a step: float32 weights gathered for the engine."""


def rates(sizes: Shape, machine: Machine) -> Rates:
    """By the model's size alone: attention is left out, and exchanges do not overlap with anything."""
    weights = 2 * sizes.parameters
    step = machine.launch + (weights + ROWS * CONTEXT * 2 * sizes.cached) / machine.bandwidth
    exchanged = (4 * sizes.parameters + weights, 2 * weights + 4 * sizes.parameters, 4 * sizes.parameters)
    return Rates(ROWS / step, machine.flops / (6 * sizes.parameters), *(size / machine.network for size in exchanged))


def memory_table(shapes: dict[str, Shape], card: float) -> list[str]:
    """Gigabytes of each card; bold where they fit."""

    def cell(sizes: Shape, cards: int, sharding: str, engine: str = "native") -> str:
        size = plan(sizes, cards, sharding, engine).total / GB
        return f"**{size:,.0f}**" if size <= ROOM * card else f"{size:,.0f}"

    lines = [
        f"|model|`learner.sharding`|{'|'.join('1 GPU' if cards == 1 else f'{cards} GPUs' for cards in CARDS)}|",
        "|---" * (len(CARDS) + 2) + "|",
    ]
    for name, sizes in shapes.items():
        lines.append(f"|{name}|`zero1`|{'|'.join(cell(sizes, cards, 'zero1') for cards in CARDS)}|")
        for words, engine in (("`fsdp`", "native"), ("`fsdp`, servers sample", "ray")):
            lines.append(f"|{name}|{words}|-|{'|'.join(cell(sizes, cards, 'fsdp', engine) for cards in CARDS[1:])}|")
    return lines


def rate_table(shapes: dict[str, Shape], machine: Machine) -> list[str]:
    """Tokens a second of a card, and seconds of the exchanges."""
    lines = [
        "|model|parameters|decoded tokens/s|trained tokens/s|`zero1`: s an update|`fsdp`: s a micro-batch|`fsdp`: s a step|",
        "|---" * 7 + "|",
    ]
    for name, sizes in shapes.items():
        found = rates(sizes, machine)
        seconds = "|".join(f"{each:.2f}" for each in (found.zero1, found.fsdp, found.publish))
        lines.append(f"|{name}|{sizes.parameters / 1e9:.2f}e9|{found.decoded:,.0f}|{found.trained:,.0f}|{seconds}|")
    return lines


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--card", type=float, default=80.0, help="GB of one card (default 80)")
    arguments = parser.parse_args(words)
    shapes = {name: shape(name) for name in MODELS}
    print("\n".join([*memory_table(shapes, arguments.card), "", *rate_table(shapes, Machine())]))


if __name__ == "__main__":
    main()
