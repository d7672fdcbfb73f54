"""A step of decoding on a GPU by the number of rows: products by the library beside products by kernels of our own, and what a draft adds.

Steps are recorded graphs, as in a rollout; the best of ten measurements of eight tokens, or of three drafts, counts. All rows hold the same number
of positions.

    python benchmarks/decode_step.py --model shape:1.5b
    python benchmarks/decode_step.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --positions 300
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from shapes import Row, add_json_option, add_model_options, measured_model, publish, say

from tether.core.protocols import Sampling
from tether.core.seeding import generator
from tether.models.fast.backbone import LlamaBackbone
from tether.models.fast.decoding.paged import BATCH_SIZES, DRAFT_ROUNDS, PagedDecoder
from tether.models.fast.decoding.protocol import DraftPlan, PrefillRequest
from tether.models.fast.float8 import Float8Mlps
from tether.models.policy import probe_backbone

SAMPLING = Sampling(1.0, 64)
TOKENS = 8
PREFILLED_AT_ONCE = 16


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, default="shape:1.5b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 64, 128], choices=BATCH_SIZES, help="sizes of a batch")
    parser.add_argument("--positions", type=int, default=700, help="that every row holds")
    parser.add_argument("--drafts", type=int, nargs="*", default=[1, 3, 7], help="tokens of a draft; none: leave drafts out")
    parser.add_argument("--precision", choices=["fp8"], default=None, help="rollout.precision; the model's own if not given")
    add_json_option(parser)
    args = parser.parse_args(given)
    if not torch.cuda.is_available():
        raise SystemExit("a step of decoding is recorded on a CUDA device, and there is none here; on a CPU: benchmarks/rollout.py")
    model = measured_model(args.model, args.device, args.dtype or "bfloat16").model
    backbone, reason = probe_backbone(model, 2 * args.positions)
    if backbone is None:
        raise SystemExit(f"'{args.model}' is computed by its own code: {reason}")
    decoder = filled_decoder(backbone, max(args.rows), args.positions, float8=args.precision is not None)
    rows: list[Row] = []
    for by_kernels in sorted({False, backbone.few_by_kernels}):
        backbone.few_by_kernels = by_kernels
        decoder.forget_recordings()  # they have the other products
        for num_rows in args.rows:
            row: Row = {"model": args.model, "products of few rows": "our kernels" if by_kernels else "the library", "rows": str(num_rows)}
            row["step, ms"] = step_ms(decoder, num_rows, args.positions)
            for tokens in args.drafts:
                row[f"draft of {tokens}, ms"] = draft_ms(decoder, num_rows, args.positions, tokens)
            rows.append(row)
            say(f"{row}")
    publish(rows, args.json)


def filled_decoder(backbone: LlamaBackbone, num_rows: int, positions: int, *, float8: bool = False) -> PagedDecoder:
    """With so many rows of random tokens."""
    copied = Float8Mlps(backbone.layers).layers if float8 else None
    decoder = PagedDecoder(backbone, backbone.model.get_output_embeddings(), num_rows, positions + 64, 32 << 30, copied)
    if not decoder.reserve(dict.fromkeys(range(num_rows), positions + 64)):
        raise SystemExit(f"{num_rows} rows of {positions} positions do not fit into 32 GB of cache")
    random = generator("decode_step")
    texts = [random.integers(0, 200, positions).tolist() for _ in range(num_rows)]
    for first in range(0, num_rows, PREFILLED_AT_ONCE):
        slots = range(first, min(first + PREFILLED_AT_ONCE, num_rows))
        requests = [PrefillRequest((slot,), 0, texts[slot]) for slot in slots]
        decoder.prefill(requests, SAMPLING, random.random(len(requests), dtype=np.float32))()
    return decoder


def step_ms(decoder: PagedDecoder, num_rows: int, positions: int) -> float:
    slots, uniforms_BK = list(range(num_rows)), np.full((num_rows, TOKENS), 0.5, dtype=np.float32)
    return _best(lambda: decoder.decode(slots, [positions] * num_rows, [5] * num_rows, SAMPLING, uniforms_BK), TOKENS)


def draft_ms(decoder: PagedDecoder, num_rows: int, positions: int, tokens: int) -> float:
    plan, slots = DraftPlan(DRAFT_ROUNDS, tokens), list(range(num_rows))
    uniforms_BK = np.full((num_rows, plan.most_sampled), 0.5, dtype=np.float32)
    decoder.start_drafts(tokens)
    return _best(lambda: decoder.speculate(slots, [positions] * num_rows, [5] * num_rows, plan, SAMPLING, uniforms_BK), plan.rounds)


def _best(call: Callable[[], object], steps: int) -> float:
    """Milliseconds a step of the best of ten calls, the copies of their inputs included; the first one, which records, does not count."""
    call()
    best = float("inf")
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / steps)
    return best


if __name__ == "__main__":
    main()
