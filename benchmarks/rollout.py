"""How many tokens a second the engine samples, beside transformers' generate and vLLM, and how far that is from the floor.

    python benchmarks/rollout.py --model smollm2 --rows 64 --prompt 150 --response 64        # CPU
    python benchmarks/rollout.py --model shape:3b                                   # 8 prompts x 16, 200 in, 100 out, GPU
    python benchmarks/rollout.py --model shape:3b --group 1                         # the same with 128 different prompts
    python benchmarks/rollout.py --model shape:3b --turns 5 --observed 80           # five turns

Ours is the engine that trains (`NativeEngine.run`) over conversations of fixed lengths, see workloads.py. The first run gives the start:
what building the engine and that run took longer than a later one, captures of CUDA graphs included. Later runs have other words; the best
of `--repeats` counts. Its memory holds all of the cache's (`--cache-gb`). "Decode only" leaves out the time of a run with the same lengths but responses of one token.

Peers are given prompts of the same lengths, sample at temperature 1 from all words, and may not stop early:
- transformers' generate with its dynamic cache, on the same model object. In a conversation of several turns it reads the whole history anew
  in each turn. `--peer-tokens N` times N tokens a turn and takes the others to last as long as these, which favours the peer, whose later
  tokens see more; 0 leaves it out.
- vLLM's offline engine in a process of its own (benchmarks/vllm_peer.py), with this Python, or with that of another environment by
  `--vllm-python PATH`; prefix caching on, a start of its own, the best of `--repeats`. Weights are made up, as for a shape. It runs after our
  model is gone.

The floor counts every weight and every cached key once a step and every product once, at rates measured here.
"""

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import vllm_peer
from shapes import (
    Row,
    add_json_option,
    add_model_options,
    best_of,
    forget_peak,
    measure_machine,
    measured_model,
    peak_gib,
    precision,
    publish,
    say,
    size_of,
    timed,
)
from workloads import Conversations, engine_for, grouped, make_conversations, num_sampled, rollout_floor

from tether.core.protocols import Sampling
from tether.core.types import Group

WARM_TOKENS = 2
"""That generate may sample before the clock runs."""


class Ours(NamedTuple):
    """What playing the conversations with the engine took."""

    seconds: float
    decode_seconds: float
    start: float
    memory: float
    groups: list[Group]
    backend: str
    """Which of the engine's decoders it was."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    work = _work(options)
    say(f"{options.model}: {work}")
    loaded = measured_model(options.model, options.device, options.dtype)
    model = loaded.model
    machine, size, kind = measure_machine(model), size_of(model), precision(model)
    vocabulary = int(model.config.vocab_size)
    ours = _ours(model, loaded.tokenizer, work, options)
    sampled, turns = num_sampled(ours.groups), sum(len(t.turns) for group in ours.groups for t in group.trajectories)
    floor = rollout_floor(ours.groups, size, machine)
    best = floor.prefill + floor.decode
    rows: list[dict[str, float | str | None]] = [
        {
            "who": f"tether, {ours.backend}",
            "sampled tokens/s": sampled / ours.seconds,
            "decode only": (sampled - turns) / ours.decode_seconds,
            "seconds": ours.seconds,
            "start, s": ours.start,
            "peak GiB": ours.memory,
            "share of the floor": best / ours.seconds,
            "tokens": float(sampled),
        },
        _generate_row(model, work, options.peer_tokens, ours),
    ]
    config = model.config
    del model, loaded
    forget_peak(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    rows.append(_vllm_row(options, work, config, vocabulary, kind, ours))
    rows.append({"who": "floor", "sampled tokens/s": sampled / best, "decode only": sampled / floor.decode, "seconds": best})
    publish([_titled(options.model, machine.name, kind, work, row) for row in rows], options.json)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--rows", type=int, default=128, help="conversations side by side")
    parser.add_argument(
        "--group", type=int, default=None, help="conversations of one prompt, a divisor of --rows; as for 8 prompts if not given"
    )
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=100, help="tokens of a response")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--observed", type=int, default=80, help="tokens shown between two responses")
    parser.add_argument("--repeats", type=int, default=2, help="runs after the first, the best of which counts")
    parser.add_argument(
        "--peer-tokens", type=int, default=None, help="tokens a turn to time generate on; all if not given, 0 leaves it out"
    )
    parser.add_argument("--cache-gb", type=float, default=None, help="rollout.cache_gb; if not given, half of the memory that is free")
    parser.add_argument("--precision", choices=["fp8"], default=None, help="rollout.precision; the model's own if not given")
    parser.add_argument("--vllm-python", default=None, help="Python of an environment that has vLLM; 'none' leaves it out")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    options.group = options.group or max(1, options.rows // 8)
    if options.rows % options.group:
        parser.error(f"--rows {options.rows} is no multiple of --group {options.group}; change one of them")
    return options


def _work(options: argparse.Namespace) -> Conversations:
    observed = options.observed if options.turns > 1 else 0
    return Conversations(options.rows // options.group, options.group, options.prompt, options.response, options.turns, observed)


def _titled(model: str, machine: str, kind: str, work: Conversations, row: Row) -> Row:
    return {"model": model, "device, precision": f"{machine}, {kind}", "workload": str(work), **row}


def _ours(model: Any, tokenizer: Any, work: Conversations, options: argparse.Namespace) -> Ours:
    """Play the conversations: once with a new engine, then again with other words, then with responses of one token."""
    device, vocabulary, repeats = model.device, int(model.config.vocab_size), options.repeats
    forget_peak(device)
    building, engine = timed(device, lambda: engine_for(model, tokenizer, work, options.cache_gb, options.precision))

    def play(max_tokens: int, run: int) -> list[Group]:
        conversations = make_conversations(work, vocabulary, run)
        engine.run(conversations, Sampling(1.0, max_tokens))
        return grouped(conversations)

    first, _ = timed(device, lambda: play(work.response, 0))
    say(f"first run {first:.2f} s after {building:.2f} s of building")
    runs = iter(range(1, 2 * repeats + 1))
    seconds, groups = best_of(repeats, device, lambda: play(work.response, next(runs)))
    reading, _ = best_of(repeats, device, lambda: play(1, next(runs)))
    say(f"best run {seconds:.2f} s, {reading:.2f} s with one token a response")
    return Ours(seconds, max(seconds - reading, 1e-9), max(building + first - seconds, 0.0), peak_gib(device), groups, engine.backend)


def _generate_row(model: Any, work: Conversations, peer_tokens: int | None, ours: Ours) -> dict[str, float | str | None]:
    name = "transformers generate"
    if peer_tokens == 0:
        return {"who": f"{name}: left out"}
    counted = min(peer_tokens or work.response, work.response)
    forget_peak(model.device)
    seconds = _generate_seconds(model, work, counted)
    sampled = work.rows * work.response * work.turns
    scaled = "" if counted == work.response else f" ({counted} tokens a turn timed)"
    ratio = (num_sampled(ours.groups) / ours.seconds) / (sampled / seconds)
    return {
        "who": name + scaled,
        "sampled tokens/s": sampled / seconds,
        "seconds": seconds,
        "peak GiB": peak_gib(model.device),
        "tether is faster by": ratio,
    }


@torch.inference_mode()
def _generate_seconds(model: Any, work: Conversations, counted: int) -> float:
    """All turns of all conversations; the tokens of a turn that are not timed last as long as those that are."""
    model.generation_config.eos_token_id = None  # nothing but the length ends a response
    device, vocabulary, total = model.device, int(model.config.vocab_size), 0.0

    def generate(length: int, tokens: int) -> None:
        ids_BT = torch.randint(vocabulary, (work.rows, length), device=device)
        mask_BT = torch.ones_like(ids_BT)
        choices = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
        drawn = model.generate(input_ids=ids_BT, attention_mask=mask_BT, max_new_tokens=tokens, **choices)
        assert drawn.shape[1] == length + tokens

    generate(work.prompt, WARM_TOKENS)
    for turn in range(work.turns):
        length = work.prompt + turn * (work.response + work.observed)
        seconds = timed(device, partial(generate, length, counted))[0]
        if counted < work.response:
            first = timed(device, partial(generate, length, 1))[0]
            seconds = first + (work.response - 1) * max(seconds - first, 0.0) / (counted - 1) if counted > 1 else work.response * first
        say(f"generate, turn {turn + 1}: {seconds:.2f} s")
        total += seconds
    return total


def _vllm_row(
    options: argparse.Namespace, work: Conversations, config: Any, vocabulary: int, kind: str, ours: Ours
) -> dict[str, float | str | None]:
    """vLLM's, as vllm_peer.py measured it where there is one."""
    asked = {
        "vocabulary": vocabulary,
        "dtype": kind,
        "rows": work.rows,
        "group": work.group_size,
        "prompt": work.prompt,
        "response": work.response,
        "turns": work.turns,
        "observed": work.observed,
        "longest": work.longest + 1,
        "repeats": options.repeats,
    }
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        answer = vllm_peer.ask(options.vllm_python, folder, asked)
    if isinstance(answer, str):
        return {"who": f"vLLM: {answer}"}
    rate = answer["words"]["sampled"] / answer["words"]["seconds"]
    return {
        "who": f"vLLM {answer['version']}",
        "sampled tokens/s": rate,
        "seconds": answer["words"]["seconds"],
        "start, s": answer["start"],
        "tether is faster by": num_sampled(ours.groups) / ours.seconds / rate,
    }


if __name__ == "__main__":
    main()
