"""How fast reasonings are scored under prompts, beside one forward pass per pair, in one run.

    python benchmarks/cross_score.py --model smollm2 --plain-pairs 16
    python benchmarks/cross_score.py --model smollm2 --prompt-tokens 2000 --plain-pairs 8
    python benchmarks/cross_score.py --model shape:3b --device cuda
    python benchmarks/cross_score.py --model shape:135m --device cuda

The plain way gives each pair whole to the model and takes full logits, one pair at a time or `--plain-batch` at a time, whichever is
faster. `--plain-pairs` times that many random pairs and scales up; 0 times them all, the default on a GPU. Ours is timed whole, the best
of `--repeats`, the model's probe left out. A shape is a model with random weights in bfloat16, made on the device; its probabilities
are nearly flat, which no time depends on. The floor is the matrix products that no way can leave out, at the rate of a large product
measured here. The row is Markdown; `--header` prints the lines above it.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from shapes import add_model_options, best_of, measured_model, size_of, timed

from tether.core.seeding import generator
from tether.models.hardware import device_name, measured_peak
from tether.models.scoring.local import PrefixScorer

HEADER = """| model | device, precision | prompts x group, x, z | plain (pairs timed) | ours | ratio | floor | largest difference |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Work:
    """The pairs to score."""

    prompts: list[list[int]]
    reasonings: list[list[int]]

    @property
    def num_pairs(self) -> int:
        return len(self.prompts) * len(self.reasonings)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if options.header:
        print(HEADER)
    model = measured_model(options.model, options.device, options.dtype).model
    work = _work(options, int(model.config.vocab_size))
    scorer = PrefixScorer(model, options.tokens_per_call)
    _first_calls(scorer, work)
    ours, scores = best_of(options.repeats, model.device, lambda: scorer.score_all(work.prompts, work.reasonings))
    num_plain = options.plain_pairs if options.plain_pairs is not None else (16 if model.device.type == "cpu" else 0)
    plain, pairs, expected = _plain(model, work, num_plain or work.num_pairs, options.plain_batch)
    difference = max(abs(scores[n, j] - value) for (n, j), value in zip(pairs, expected, strict=True))
    floor = _flops(model, work) / measured_peak(model.device, model.dtype)
    shape = f"{options.prompts} x {options.group}, {options.prompt_tokens}, {options.reasoning_tokens}"
    print(
        f"| {options.model} | {device_name(model.device)}, {scorer.precision}, {scorer.backend} | {shape} | {plain:.2f} s ({len(pairs)} of {work.num_pairs}) "
        f"| {ours:.2f} s | {plain / ours:.1f} | {floor:.2f} s | {difference:.1e} nats |"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cross-scoring beside one forward pass per pair.")
    add_model_options(parser)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=16, help="reasonings per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--reasoning-tokens", type=int, default=100)
    parser.add_argument(
        "--plain-pairs", type=int, default=None, help="pairs to time the plain way on; 0 for all. Default 16 on a CPU, else 0"
    )
    parser.add_argument("--plain-batch", type=int, default=8, help="pairs per pass of the plain way, tried beside one")
    parser.add_argument("--tokens-per-call", type=int, default=None, help="of one pass of ours; by the device's memory if not given")
    parser.add_argument("--repeats", type=int, default=1, help="times to measure ours")
    parser.add_argument("--header", action="store_true", help="print the head of the table first")
    return parser.parse_args(arguments)


def _work(options: argparse.Namespace, vocabulary: int) -> Work:
    rng = generator("benchmark", "cross_score")
    sizes = (options.prompts, options.prompt_tokens), (options.prompts * options.group, options.reasoning_tokens)
    prompts, reasonings = (rng.integers(0, vocabulary, size).tolist() for size in sizes)
    return Work(prompts, reasonings)


def _first_calls(scorer: PrefixScorer, work: Work) -> None:
    """Let libraries choose their kernels and memory its place before the clock runs."""
    some = slice(None) if scorer._model.device.type == "cuda" else slice(0, 2)
    scorer.score_all(work.prompts[some], work.reasonings[some])


@torch.inference_mode()
def _plain(model: Any, work: Work, num_pairs: int, batch: int) -> tuple[float, list[tuple[int, int]], list[float]]:
    """Seconds for all pairs the plain way, the pairs that were timed, and their scores."""
    every = [(n, j) for n in range(len(work.reasonings)) for j in range(len(work.prompts))]
    chosen = generator("benchmark", "pairs").permutation(len(every))[: min(num_pairs, len(every))]
    pairs = [every[index] for index in chosen]
    best, scores = float("inf"), []
    for at_once in (1, batch):
        _plain_pass(model, work, pairs[:at_once])  # warm up
        parts = [pairs[start : start + at_once] for start in range(0, len(pairs), at_once)]
        seconds, answers = timed(model.device, partial(_plain_passes, model, work, parts))
        if seconds < best:
            best, scores = seconds, torch.cat(answers).tolist()
    return best * len(every) / len(pairs), pairs, scores


def _plain_passes(model: Any, work: Work, parts: Sequence[Sequence[tuple[int, int]]]) -> list[torch.Tensor]:
    return [_plain_pass(model, work, part) for part in parts]


def _plain_pass(model: Any, work: Work, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    ids_BT = torch.tensor([work.prompts[j] + work.reasonings[n] for n, j in pairs], device=model.device)
    start = len(work.prompts[0])
    logits = model(input_ids=ids_BT, use_cache=False).logits[:, start - 1 : -1].float()
    chosen = logits.gather(2, ids_BT[:, start:, None])[..., 0] - torch.logsumexp(logits, dim=-1)
    return chosen.double().sum(dim=1)


def _flops(model: Any, work: Work) -> float:
    """Of the products that no way can leave out: every prompt and every pair's reasoning once."""
    num_x, num_z, num_prompts = len(work.prompts[0]), len(work.reasonings[0]), len(work.prompts)
    tokens = num_prompts * num_x + work.num_pairs * (num_z - 1)
    seen = num_prompts * num_x * num_x / 2 + work.num_pairs * (num_z - 1) * (num_x + num_z / 2)
    return size_of(model).forward_flops(tokens, work.num_pairs * num_z, seen)


if __name__ == "__main__":
    main()
