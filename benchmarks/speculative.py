"""Speculative decoding: the same step of training with drafts and without, calls, right tokens and time.

Each number of tokens plays the first training steps of a run on one engine; the first of them, in which kernels are compiled and graphs recorded, is
not timed. One row per number: decode calls, drafts, tokens of a draft that were right on average, tokens a second, and how many trajectories are
those without drafts, which rounding alone can change.

    python benchmarks/speculative.py --env sokoban
    python benchmarks/speculative.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --options observation=grid_coordinates --max-tokens 160 --tokens 3 5
"""

import argparse
import time

import yaml
from rich.console import Console
from rich.table import Table

from tether.core.config import validate
from tether.core.protocols import EngineStatistics
from tether.core.types import Group
from tether.models.chat import ChatFormat
from tether.models.fast.decoding.contiguous import ContiguousDecoder
from tether.models.load import load_model
from tether.models.policy import Policy
from tether.rollout.engines.native import NativeEngine
from tether.rollout.sampler import EnvPool, play_plan, training_plan
from tether.training.build import compute_dtype, env_specs, episode_rules
from tether.training.settings import RunSettings


def settings_of(args: argparse.Namespace) -> RunSettings:
    options = {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in args.options)}
    given = {
        "env": {"name": args.env, "options": options},
        "model": {"name": args.model, "device": args.device, **({"dtype": args.dtype} if args.dtype else {})},
        "rollout": {
            "num_groups": args.prompts,
            "group_size": args.group_size,
            "max_tokens": args.max_tokens,
            "max_context": args.max_context,
            "max_rows": 256,
        },
        "seed": args.seed,
    }
    return validate(RunSettings, given)


def responses(groups: list[Group]) -> list[list[tuple[int, ...]]]:
    return [[turn.response_ids for turn in trajectory.turns] for group in groups for trajectory in group.trajectories]


def played(
    settings: RunSettings, policy: Policy, chat: ChatFormat, tokens: int, steps: int, timed_from: int
) -> tuple[list[Group], list[EngineStatistics], float]:
    """The trajectories of the steps, what the engine did in those that are timed, and their seconds."""
    rollout, rules = settings.rollout, episode_rules(settings, policy)
    engine = NativeEngine(policy, max_rows=rollout.max_rows, max_context=rules.max_context, speculative_tokens=tokens)
    groups: list[Group] = []
    statistics, seconds = [], 0.0
    with EnvPool(env_specs(settings.environments())) as pool:
        for step in range(1, steps + 1):
            plan = training_plan(settings.seed, step, rollout.num_groups, rollout.group_size, weights=pool.weights)
            began = time.perf_counter()
            groups += play_plan(pool, plan, engine, chat, settings.sampling(), rules)
            if step >= timed_from:
                seconds += time.perf_counter() - began
                statistics.append(engine.statistics)
    return groups, statistics, seconds


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--env", default="frozen_lake")
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="options of the environment")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--max-context", type=int, default=2400)
    parser.add_argument("--tokens", type=int, nargs="+", default=[3], help="of a draft")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cpu-rows", type=int, default=None, help="draft for so many rows at most where there is no GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default=None)
    args = parser.parse_args(given)
    if args.cpu_rows is not None:
        ContiguousDecoder.most_drafted_rows = args.cpu_rows
    settings = settings_of(args)
    loaded = load_model(args.model, device=settings.model.device, dtype=compute_dtype(settings))
    policy = Policy(loaded.model, loaded.tokenizer, max_positions=args.max_context)
    chat = ChatFormat(loaded.tokenizer, policy.end_of_turn_ids)
    table = Table("tokens of a draft", "decode calls", "drafts", "right tokens a draft", "tokens/s", "trajectories as without")
    plain: list[list[tuple[int, ...]]] = []
    for tokens in (0, *args.tokens):
        groups, statistics, seconds = played(settings, policy, chat, tokens, args.steps, min(2, args.steps))
        found = responses(groups)
        plain = plain or found
        calls, drafts, right, sampled = (
            sum(getattr(one, name) for one in statistics) for name in ("decode_calls", "drafts", "accepted_tokens", "sampled_tokens")
        )
        same = sum(a == b for a, b in zip(found, plain, strict=True))
        table.add_row(
            str(tokens), str(calls), str(drafts), f"{right / max(1, drafts):.2f}", f"{sampled / seconds:.0f}", f"{same} of {len(plain)}"
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
