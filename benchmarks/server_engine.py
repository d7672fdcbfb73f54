"""The server engine beside the native one: the same conversations, and what new weights cost.

`tether serve` runs in a process of its own on the same machine. Each engine plays the first training steps of a run; every round is timed, and
the first, in which kernels are compiled and graphs recorded, is left out. Then the weights are published, through shared memory and over HTTP.

    python benchmarks/server_engine.py --model smollm2 --prompts 4 --group-size 4
    python benchmarks/server_engine.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --options observation=grid_coordinates --max-tokens 160
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import yaml

from tether.core.config import validate
from tether.models.chat import ChatFormat
from tether.models.load import load_model
from tether.models.policy import Policy
from tether.rollout.engines.publish import TetherPublisher
from tether.rollout.engines.registry import make_engine
from tether.rollout.sampler import EnvPool, play_plan, training_plan
from tether.training.build import compute_dtype, env_specs, episode_rules
from tether.training.settings import RunSettings

START_SECONDS = 180.0
"""How long the server may take to answer for the first time."""


def settings_of(args: argparse.Namespace) -> RunSettings:
    options = {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in args.options)}
    rollout = {"num_groups": args.prompts, "group_size": args.group_size, "max_tokens": args.max_tokens, "max_rows": args.max_rows}
    return validate(
        RunSettings,
        {"env": {"name": args.env, "options": options}, "model": {"name": args.model, "device": args.device}, "rollout": rollout},
    )


@contextmanager
def served(args: argparse.Namespace, max_context: int) -> Iterator[str]:
    """The address of a `tether serve` that lives as long as the block."""
    address = f"http://127.0.0.1:{args.port}"
    words = ["serve", args.model, "--port", str(args.port), "--max-rows", str(args.max_rows), "--max-context", str(max_context)]
    words += ["--device", args.device] if args.device else []
    words += ["--cache-gb", str(args.cache_gb)] if args.cache_gb else []
    process = subprocess.Popen([sys.executable, "-m", "tether", *words], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"tether serve did not start on port {args.port}")
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").is_success
    except httpx.TransportError:
        return False


def play(engine: Any, settings: RunSettings, policy: Policy, rounds: int) -> tuple[list[float], list[int], list[Any]]:
    """Seconds and sampled tokens of every round but the first, and the tokens of the first."""
    rollout, chat = settings.rollout, ChatFormat(policy.tokenizer, policy.end_of_turn_ids)
    seconds, tokens, first = [], [], []
    with EnvPool(env_specs(settings.environments())) as pool:
        for step in range(1, rounds + 2):
            plan = training_plan(settings.seed, step, rollout.num_groups, rollout.group_size, weights=pool.weights)
            begin = time.perf_counter()
            groups = play_plan(pool, plan, engine, chat, settings.sampling(), episode_rules(settings, policy))
            seconds.append(time.perf_counter() - begin)
            trajectories = [t for group in groups for t in group.trajectories]
            tokens.append(sum(t.num_sampled for t in trajectories))
            first = first or [[turn.response_ids for turn in t.turns] for t in trajectories]
    return seconds[1:], tokens[1:], first


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--env", default="frozen_lake")
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="options of the environment")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--max-rows", type=int, default=128)
    parser.add_argument("--cache-gb", type=float, default=None, help="of each of the two engines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--device", default=None)
    args = parser.parse_args(given)
    settings = settings_of(args)
    policy = Policy(*load_model(args.model, device=args.device, dtype=compute_dtype(settings)))
    max_context = episode_rules(settings, policy).max_context
    native = make_engine("native", policy, max_rows=args.max_rows, max_context=max_context, cache_gb=args.cache_gb)
    results = {"native": play(native, settings, policy, args.rounds)}
    with served(args, max_context) as address:
        engine = make_engine(address, policy, max_rows=args.max_rows, max_context=max_context)
        engine.sync()
        results["server"] = play(engine, settings, policy, args.rounds)
        published = {}
        for way, publisher in (("shared memory", TetherPublisher()), ("HTTP", TetherPublisher(memory=None))):
            engine.servers[0]._publisher = publisher  # type: ignore[attr-defined]
            published[way] = []
            for _ in range(args.rounds):
                begin = time.perf_counter()
                engine.sync()
                published[way].append(time.perf_counter() - begin)
    for name, (seconds, tokens, _) in results.items():
        print(
            f"{name:>14}: {sum(tokens) / sum(seconds):9,.0f} tokens/s, {statistics.median(seconds):.2f} s a rollout, median of {args.rounds}"
        )
    alike = sum(mine == theirs for mine, theirs in zip(results["native"][2], results["server"][2], strict=True))
    print(f"{'':>14}  {alike} of {len(results['native'][2])} trajectories of the first round are the same, token for token")
    size = sum(parameter.nbytes for parameter in policy.module.parameters())
    for way, times in published.items():
        took = statistics.median(times)
        print(f"{'publish':>14}: {took:.2f} s for {size / 1e9:.2f} GB through {way}, with the probe ({size / took / 1e9:.2f} GB/s)")


if __name__ == "__main__":
    main()
