"""Does `tiny` learn? Every environment it was warmed up on, under every algorithm, with several seeds, on the CPU.

Each run is a `tether train` of its own with configs/tiny/ENV.yaml; runs go side by side, one thread each. A run that is already in the
output folder is read, not repeated. The table gives validation success before and after training, per environment and algorithm: the
mean over seeds and each seed by itself.

    python benchmarks/learning.py --out runs/learning --jobs 2
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

ENVIRONMENTS = ("frozen_lake", "sokoban", "countdown")
ALGORITHMS = ("ppo", "grpo", "dapo", "dr_grpo")
CONFIGS = Path(__file__).parents[1] / "configs" / "tiny"
DAPO_GROUPS = {"frozen_lake": 4, "sokoban": 4, "countdown": 8}
"""Of DAPO the setting counts kept prompts, of which it samples up to four times as many: fewer, for about the same work."""
SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_folder(out: Path, env: str, algorithm: str, seed: int) -> Path:
    return out / f"{env}-{algorithm}-{seed}"


def train(out: Path, env: str, algorithm: str, seed: int, extra: list[str]) -> str | None:
    """Train once, unless that was done; what went wrong, if anything did."""
    folder = run_folder(out, env, algorithm, seed)
    if finished(folder):
        return None
    how = ["--resume"] if (folder / "run.json").is_file() else ["--config", str(CONFIGS / f"{env}.yaml"), "--algo", algorithm]
    if algorithm == "dapo":
        extra = [f"rollout.num_groups={DAPO_GROUPS[env]}", *extra]
    how += [] if "--resume" in how else ["--seed", str(seed), *(word for pair in extra for word in ("--set", pair))]
    command = [sys.executable, "-m", "tether", "train", *how, "--out", str(folder)]
    done = subprocess.run(command, env=os.environ | SINGLE_THREAD, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"{folder.name}: {(done.stderr.strip() or 'no message').splitlines()[-1]}"


def finished(folder: Path) -> bool:
    about = folder / "run.json"
    return about.is_file() and json.loads(about.read_text(encoding="utf-8"))["finished"] is not None


def success(folder: Path) -> tuple[float, float, int]:
    """Validation success before and after, and the number of training steps."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = {record["step"]: record["metrics"] for record in map(json.loads, lines)}
    measured = [step for step in sorted(records) if "validation/success" in records[step]]
    return records[measured[0]]["validation/success"], records[measured[-1]]["validation/success"], max(records)


def table(out: Path, cells: list[tuple[str, str]], seeds: list[int]) -> str:
    """Markdown: one row per environment and algorithm."""
    lines = ["| environment | algorithm | steps | before | after, mean | after, each seed | gain |", "|---|---|---|---|---|---|---|"]
    for env, algorithm in cells:
        folders = [run_folder(out, env, algorithm, seed) for seed in seeds]
        results = [success(folder) for folder in folders if finished(folder)]
        if results:
            before, after = (sum(result[n] for result in results) / len(results) for n in (0, 1))
            each = ", ".join(f"{result[1]:.1%}" for result in results)
            lines.append(
                f"| {env} | {algorithm} | {results[0][2]} | {before:.1%} | {after:.1%} | {each} | {100 * (after - before):+.1f} points |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--envs", nargs="+", default=ENVIRONMENTS, choices=ENVIRONMENTS)
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, choices=ALGORITHMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings on top of the config, for all runs")
    parser.add_argument("--read", action="store_true", help="train nothing, make the table of the runs that are there")
    chosen = parser.parse_args()
    cells = list(product(chosen.envs, chosen.algorithms))
    tasks = [] if chosen.read else [(env, algorithm, seed) for seed in chosen.seeds for env, algorithm in cells]
    console = Console(stderr=True)
    with Progress(console=console) as bars, ThreadPoolExecutor(chosen.jobs) as pool:
        bar = bars.add_task("runs", total=len(tasks))
        for problem in pool.map(lambda task: train(chosen.out, *task, chosen.set), tasks):
            bars.advance(bar)
            if problem:
                console.print(problem, style="red", highlight=False)
    Console(soft_wrap=True).print(table(chosen.out, cells, chosen.seeds), markup=False, highlight=False)


if __name__ == "__main__":
    main()
