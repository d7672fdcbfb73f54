"""The runs behind docs/reading-the-signals.md: one that learns, and others that are made to go wrong, `tiny` on FrozenLake.

Each run is a `tether train` of its own with configs/tiny/frozen_lake.yaml, measured at every step; runs go side by side, one thread each, and
one that is already in the output folder is read, not repeated. Writes signals.html with the figures of that page.

    python benchmarks/signals.py --out runs/signals --jobs 2
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from rich.progress import Progress

CONFIG = Path(__file__).parents[1] / "configs" / "tiny" / "frozen_lake.yaml"
COMMON = [
    "steps=24",
    "evaluation.prompts=64",
    "diagnosis.every=1",
    "diagnosis.budget=0.3",
    "checkpoint.every=4",
    "checkpoint.keep=6",
    "alarms.rules.start_steps=6",
    "alarms.rules.recent_steps=5",
    "alarms.rules.step_p=0.005",
]
"""Measured at every step, and alarms with short windows: the runs are short."""
RUNS: dict[str, list[str]] = {
    "healthy": [],
    "ppo": ["algorithm.name=ppo"],
    "entropy bonus 0.1, half the signal kept": ["algorithm.entropy_coef=0.1", "filter.keep=0.5"],
    "learning rate 1e-3": ["learner.learning_rate=1e-3"],
    "strong KL": ["algorithm.kl_coef=1.0", "filter.strategy=all"],
    "low-variance prompts only": [
        "filter.strategy=top_k",
        "filter.keep=0.5",
        "filter.order=smallest",
        "algorithm.entropy_coef=0.02",
    ],
}
SHOWN = {"healthy": "#2a78d6", "learning rate 1e-3": "#e34948", "entropy bonus 0.1, half the signal kept": "#eda100"}
PANELS = {
    "rollout/success": "success of the training episodes",
    "information/mi_seq": "MI-Seq-Est, nats (at most 2.08)",
    "information/h_conditional": "H(Z|X), nats per token",
    "groups/rv_mean": "reward variance",
    "information/retrieval_acc": "retrieval accuracy (chance 12.5%)",
    "rollout/response_tokens": "tokens per response",
}


def folder_of(out: Path, name: str) -> Path:
    return out / "".join(letter if letter.isalnum() else "-" for letter in name)


def train(out: Path, name: str) -> None:
    """Train once, unless that was done."""
    folder = folder_of(out, name)
    if (folder / "report.html").is_file():
        return
    settings = [word for pair in (*COMMON, *RUNS[name]) for word in ("--set", pair)]
    how = ["--resume"] if (folder / "run.json").is_file() else ["--config", str(CONFIG), *settings]
    command = [sys.executable, "-m", "tether", "train", *how, "--out", str(folder)]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)


def records(folder: Path) -> dict[int, dict[str, float]]:
    """Step to metrics, the last record of a step."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {record["step"]: record["metrics"] for record in map(json.loads, lines)}


def curves(out: Path) -> go.Figure:
    """Small multiples: the runs that the page compares, one panel per number, with the interval where there is one."""
    figure = make_subplots(rows=2, cols=3, subplot_titles=list(PANELS.values()), vertical_spacing=0.14, horizontal_spacing=0.06)
    for name, colour in SHOWN.items():
        steps = {step: metrics for step, metrics in records(folder_of(out, name)).items() if step}
        for place, metric in enumerate(PANELS):
            row, column = divmod(place, 3)
            found = {step: metrics for step, metrics in steps.items() if metric in metrics}
            at, values = list(found), [metrics[metric] for metrics in found.values()]
            if all(f"{metric}_low" in metrics for metrics in found.values()):
                ends = [metrics[f"{metric}_high"] for metrics in found.values()] + [m[f"{metric}_low"] for m in reversed(found.values())]
                band = {"x": at + at[::-1], "y": ends, "fill": "toself", "fillcolor": colour, "opacity": 0.12, "line_width": 0}
                figure.add_scatter(**band, showlegend=False, hoverinfo="skip", row=row + 1, col=column + 1)
            style = {"line_color": colour, "name": name, "legendgroup": name, "showlegend": place == 0, "mode": "lines"}
            figure.add_scatter(x=at, y=values, **style, row=row + 1, col=column + 1)
    figure.update_layout(
        width=1200, height=620, template="plotly_white", legend={"orientation": "h", "y": -0.06}, margin={"t": 40, "b": 40}
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/signals"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    chosen = parser.parse_args()
    with Progress() as bars, ThreadPoolExecutor(chosen.jobs) as pool:
        bar = bars.add_task("runs", total=len(RUNS))
        for _ in pool.map(lambda name: train(chosen.out, name), RUNS):
            bars.advance(bar)
    curves(chosen.out).write_html(chosen.out / "signals.html")


if __name__ == "__main__":
    main()
