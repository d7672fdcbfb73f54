"""How long the dashboard takes to answer on a large run: 500 steps, gigabytes of trajectories.

    python benchmarks/dashboard.py                       500 steps, 0.5 GB of trajectories
    python benchmarks/dashboard.py --gigabytes 5         the size that docs/dashboard.md promises; needs that much disk
    python benchmarks/dashboard.py --folder DIR          keep the run folder there, and use it again

A run folder is written by the store itself (so the index is there), served as `tether dashboard` serves it, and asked over HTTP. For every page: the
first answer, when nothing has been read yet; the median and the slowest of the following ones, each after a step was appended (nothing that
depends on it is kept); and the median when nothing has changed. Milliseconds of the clock, and in brackets of the CPU: server and client together,
which other work on the machine changes little. Figures and the machine: docs/dashboard.md.
"""

import argparse
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx

from tether.core.metrics import CATALOGUE
from tether.runs.panels import SECTIONS
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore

STEPS, GROUPS, MEMBERS = 500, 8, 16
TOKENIZER = Path(__file__).parents[1] / "src" / "tether" / "models" / "tiny" / "tokenizer.json"
PAGES = {
    "runs": "/",
    "a run": "/run?run=run",
    "chart: success": "/figure?name=success&run=run",
    "chart: entropy, with alarms": "/figure?name=entropy&run=run",
    "regime plane": "/figure?name=plane&run=run",
    "trajectories, all": "/trajectories?run=run",
    "trajectories: failures of a step": "/trajectories?run=run&step=250&outcome=failure",
    "trajectories by reward": "/trajectories?run=run&order=reward_high",
    "trajectories: text that is rare": "/trajectories?run=run&q=needle",
    "trajectories: text that is nowhere": "/trajectories?run=run&q=xyzzy",
    "an episode": "/trajectory?run=run&key=250/train/3/5",
    "two episodes": "/trajectory?run=run&key=250/train/3/5&beside=250/train/4/5",
    "groups of a step": "/groups?run=run&step=250",
    "gradients": "/gradients?run=run",
}


def write_run(folder: Path, gigabytes: float) -> None:
    """A run of 500 steps whose trajectories take so much."""
    store = RunStore.create(
        folder, "seed: 0\nsteps: 500\nfilter: {strategy: top_p, keep: 0.9}\n", {"env": "bench", "model": "tiny", "algorithm": "grpo"}
    )
    # Three turns; about 14 bytes a token, for its id, its log-prob and its place in the context of later turns.
    tokens = max(8, int(gigabytes * 1e9 / STEPS / GROUPS / MEMBERS / 3 / 28))
    drawn = {series.metric for section in SECTIONS for panel in section.panels for series in panel.series}
    names = [name for name in CATALOGUE if "<" not in name and ("/" in name)]
    names = [*dict.fromkeys([*sorted(drawn), *names])][:110]
    for step in range(STEPS + 1):
        metrics = {name: 0.5 + 0.4 * math.sin(step / 40 + place) for place, name in enumerate(names)}
        metrics |= {"information/num_prompts": 8.0, "information/num_reasonings": 128.0}  # enough for a verdict, so that the plane is drawn
        metrics |= {
            f"gradients/{name}_{bucket}": 0.1 * bucket for name in ("task_norm", "rv_mean") for bucket in range(1, 7) if step % 50 == 0
        }
        store.append(StepRecord(step, metrics, "diverse reasoning", [f"note {step}"] if step % 10 == 0 else [], _alarms(step)))
        store.append_timings(step, {"seconds": {"rollout": 3.0, "update": 2.0}})
        if step:
            store.append_trajectories([_episode(step, n // MEMBERS, n % MEMBERS, tokens) for n in range(GROUPS * MEMBERS)])
    store.close()
    model = folder / "checkpoints" / "step_000500" / "model"
    model.mkdir(parents=True)
    shutil.copy(TOKENIZER, model / TOKENIZER.name)


def _alarms(step: int) -> list[dict[str, Any]]:
    if step % 60 < 45:
        return []
    evidence = [{"metric": "information/h_conditional", "value": 0.2, "steps": [step - 3, step], "test": "p = 0.001"}]
    return [
        {
            "name": "entropy_collapse",
            "severity": "warning",
            "began": step - step % 60 + 45,
            "evidence": evidence,
            "cause": "c",
            "remedy": "r",
        }
    ]


def _episode(step: int, group: int, member: int, tokens: int) -> dict[str, Any]:
    solved = (step + group + member) % 3 == 0
    words = "the needle " if (step, group, member) == (3, 1, 1) else "I go left, then up. "
    ids = [200 + (place * 7) % 350 for place in range(tokens)]
    turn = {
        "observation": "Turn 1 of 5.\nP_O_\n____\n____\nG___", "response": words * (tokens // 8), "reasoning_span": [0, tokens // 2], "reward": 0.0,
        "penalty": 0.0, "overlong": 0.0, "valid": True, "lenient": False, "finish": "stop_text", "fresh": True, "context_ids": ids,
        "response_ids": ids, "logprobs": [-0.123456 * (place % 30) for place in range(tokens)],
    }  # fmt: skip
    return {
        "step": step, "split": "train", "env": "bench", "group": group, "member": member, "seed": group, "reward": float(solved), "success": solved,
        "stop_reason": "success" if solved else "turn_limit", "error": None, "measures": {}, "kept": group % 2 == 0, "turns": [turn] * 3,
    }  # fmt: skip


Took = tuple[float, float]
"""Milliseconds of the clock and of the CPU."""


def measure(folder: Path, repeats: int) -> Iterator[tuple[str, list[Took], list[Took], int]]:
    """Milliseconds of each page: first and after each appended step, then unchanged; and the bytes of its answer."""
    from tether.cli.report import step_templates
    from tether.core.http import serving_app
    from tether.runs.dashboard.app import make_app
    from tether.runs.dashboard.catalogue import Catalogue

    writer = RunStore.open(folder)
    last = writer.steps()[-1]
    episode = next(iter(writer.trajectories(250, "train")))
    for name, path in PAGES.items():
        with (
            serving_app(make_app(Catalogue(folder.parent), step_templates), "dashboard") as url,
            httpx.Client(base_url=url, timeout=60) as client,
        ):
            client.get("/health")
            changed, unchanged, size = [], [], 0
            for repeat in range(repeats):
                changed.append(_milliseconds(client, path)[0])
                took, size = _milliseconds(client, path)
                unchanged.append(took)
                writer.append(StepRecord(last.step, last.metrics, last.regime, last.notes, last.alarms))
                writer.append_trajectories([{**episode, "step": STEPS + 1 + repeat}])
        yield name, changed, unchanged, size
    writer.close()


def _milliseconds(client: httpx.Client, path: str) -> tuple[Took, int]:
    start, cpu = time.perf_counter(), time.process_time()
    answer = client.get(path, headers={"accept": "text/html"})
    took = (1000 * (time.perf_counter() - start), 1000 * (time.process_time() - cpu))
    answer.raise_for_status()
    return took, len(answer.content)


def _shown(took: list[Took], reduce: Callable[[list[float]], float]) -> str:
    return f"{reduce([clock for clock, _ in took]):.0f} ({reduce([cpu for _, cpu in took]):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where the run folder is kept; by default a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)) / "run"
        if not folder.exists():
            start = time.perf_counter()
            write_run(folder, options.gigabytes)
            print(f"written in {time.perf_counter() - start:.0f} s")
        print(
            f"{(folder / 'trajectories.jsonl').stat().st_size / 1e9:.2f} GB of trajectories, {STEPS} steps, {STEPS * GROUPS * MEMBERS} episodes"
        )
        print(f"{'page':36} {'first':>10} {'after a step: median':>21} {'slowest':>10} {'unchanged':>10} {'kB':>5}")
        for name, changed, unchanged, size in measure(folder, options.repeats):
            later = changed[1:] or changed
            cells = (_shown(changed[:1], max), _shown(later, statistics.median), _shown(later, max), _shown(unchanged, statistics.median))
            print(f"{name:36} {cells[0]:>10} {cells[1]:>21} {cells[2]:>10} {cells[3]:>10} {size / 1000:5.0f}", flush=True)


if __name__ == "__main__":
    main()
