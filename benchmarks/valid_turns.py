"""Can a model follow the instructions? Episodes without any training: how many turns were valid, how many needed the lenient reading.

One row per environment: the share of turns that were well formed with legal actions only, of turns that needed the lenient reading, of
episodes solved, and the mean length of a response and of a prompt in tokens. With --show N, the first N turns are printed as they were
written; with --json, every turn is written down.

    python benchmarks/valid_turns.py --model smollm2 --env frozen_lake sokoban --prompts 16
    python benchmarks/valid_turns.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --env all --prompts 16 --temperature 1 --show 3
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tether.core.config import validate
from tether.core.types import Group
from tether.models.chat import ChatFormat
from tether.models.load import load_model
from tether.models.policy import Policy
from tether.rollout.engines.registry import make_engine
from tether.rollout.sampler import EnvPool, play_plan, training_plan
from tether.training.build import compute_dtype, env_specs, episode_rules
from tether.training.settings import RunSettings

ENVIRONMENTS = ("frozen_lake", "sokoban", "countdown", "metamathqa", "searchqa", "webshop", "deepcoder")
WIDTH = 150
"""Of the tables, also where the output is a file."""
MAX_TOKENS = {"deepcoder": 600, "metamathqa": 300, "countdown": 300}
"""Budget of a response where the default of --max-tokens is too small for the task."""


def settings_of(args: argparse.Namespace, env: str) -> RunSettings:
    max_tokens = max(args.max_tokens, MAX_TOKENS.get(env, 0))
    options = {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in args.options)}
    given = {
        "env": {"name": env, "options": options},
        "model": {"name": args.model, "device": args.device, **({"dtype": args.dtype} if args.dtype else {})},
        "rollout": {
            "num_groups": args.prompts,
            "group_size": args.group_size,
            "temperature": args.temperature,
            "max_tokens": max_tokens,
            "max_context": args.max_context,
            "max_rows": args.max_rows,
            "context": args.context,
        },
        "filter": {"strategy": "all"},
        "seed": args.seed,
    }
    return validate(RunSettings, given)


def play_one(settings: RunSettings, policy: Policy, chat: ChatFormat) -> list[Group]:
    """The groups that the first training step of a run with these settings would sample."""
    rollout = settings.rollout
    rules = episode_rules(settings, policy)
    engine = make_engine(rollout.engine, policy, max_rows=rollout.max_rows, max_context=rules.max_context)
    with EnvPool(env_specs(settings.environments())) as pool, Progress(console=Console(stderr=True), transient=True) as progress:
        plan = training_plan(settings.seed, 1, rollout.num_groups, rollout.group_size, weights=pool.weights)
        episodes = progress.add_task(settings.env.name, total=len(plan))
        return play_plan(pool, plan, engine, chat, settings.sampling(), rules, lambda: progress.advance(episodes))


def row_of(env: str, groups: list[Group], seconds: float) -> dict[str, Any]:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    count = max(1, len(turns))
    return {
        "env": env,
        "turns": len(turns),
        "valid": sum(turn.valid for turn in turns) / count,
        "lenient": sum(turn.lenient for turn in turns) / count,
        "closed": sum(turn.reasoning_span is not None for turn in turns) / count,
        "success": sum(trajectory.success for trajectory in trajectories) / max(1, len(trajectories)),
        "reward": sum(trajectory.reward for trajectory in trajectories) / max(1, len(trajectories)),
        "response_tokens": sum(len(turn.response_ids) for turn in turns) / count,
        "prompt_tokens": sum(len(t.turns[0].context_ids) for t in trajectories if t.turns) / max(1, len(trajectories)),
        "cut": sum(str(turn.finish) == "length" for turn in turns) / count,
        "errors": sum(len(group.errored) for group in groups),
        "seconds": seconds,
        "texts": [
            {"seed": t.seed, "turn": number, "valid": turn.valid, "observation": turn.observation, "response": turn.text}
            for t in trajectories
            for number, turn in enumerate(t.turns, 1)
        ],
    }


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table("environment", "turns", "valid", "lenient", "think closed", "success", "reward", "tokens", "prompt", "cut", "seconds")
    for row in rows:
        shares = [f"{row[name]:.1%}" for name in ("valid", "lenient", "closed", "success")]
        numbers = [f"{row['reward']:.2f}", f"{row['response_tokens']:.0f}", f"{row['prompt_tokens']:.0f}", f"{row['cut']:.1%}"]
        table.add_row(row["env"], str(row["turns"]), *shares, *numbers, f"{row['seconds']:.0f}")
    console.print(table)


def show_texts(console: Console, row: dict[str, Any], count: int) -> None:
    for text in row["texts"][:count]:
        console.rule(f"{row['env']}, seed {text['seed']}, turn {text['turn']}, {'valid' if text['valid'] else 'NOT VALID'}")
        console.print(text["observation"], markup=False, highlight=False)
        console.print(f"<think>{text['response']}", markup=False, highlight=False, style="bold")


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--env", nargs="+", default=["all"], choices=("all", *ENVIRONMENTS))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--max-context", type=int, default=8192)
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--context", default="full", help="rollout.context: what the model sees of earlier turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument(
        "--options", nargs="*", default=[], metavar="KEY=VALUE", help="options of the environments, such as instructions=plain"
    )
    parser.add_argument("--show", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    names = ENVIRONMENTS if "all" in args.env else tuple(args.env)
    console, rows = Console(width=WIDTH), []
    settings = settings_of(args, names[0])
    loaded = load_model(args.model, device=settings.model.device, dtype=compute_dtype(settings))
    policy = Policy(loaded.model, loaded.tokenizer, max_positions=args.max_context)
    chat = ChatFormat(loaded.tokenizer, policy.end_of_turn_ids)
    for name in names:
        began = time.perf_counter()
        groups = play_one(settings_of(args, name), policy, chat)
        rows.append(row_of(name, groups, time.perf_counter() - began))
        show_texts(console, rows[-1], args.show)
        show(console, rows[-1:])
        if args.json is not None:  # after each environment: a run that is stopped keeps what it has
            args.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
    show(console, rows)


if __name__ == "__main__":
    main()
