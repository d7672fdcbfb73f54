"""How cost grows: rollout, update and cross-scoring at doubled turns, group size, prompts and prompt length, measured and fitted.

    python benchmarks/growth.py --out runs/growth                      # `tiny` on a CPU, about three minutes
    python benchmarks/growth.py --model shape:3b --scale 4 --out runs/growth

One size is doubled again and again while the others stay where they are. The rollout is `NativeEngine.run` over conversations of fixed
lengths, the update `Learner.update` (GRPO) on what they said, cross-scoring the scorer of diagnosis over all prompts x the first turn's responses.
Each figure is the best of `--repeats`, after one call that is not timed.

Two exponents stand beside each other: of the seconds, and of the matrix products that the work asks for at the same sizes (a prompt that a group
shares once, attention over what is seen). 1 means twice the time for twice the size. Seconds that grow faster than the products would be a term
that need not be there; they often grow more slowly, because small sizes use a machine badly. A fit goes through the larger half of the sizes.
Writes growth.html (a panel per size, log-log, products as dashed lines through the largest size) and prints the table.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from learner import Training, training
from plotly.subplots import make_subplots
from shapes import Row, add_json_option, add_model_options, best_of, precision, publish, say, seen_by, size_of
from workloads import Conversations, engine_for, grouped, make_conversations, pay, train_flops

from tether.core.protocols import Sampling
from tether.core.types import Group
from tether.models.hardware import device_name
from tether.models.scoring.local import PrefixScorer
from tether.training.settings import LearnerSettings

AXES = ("turns", "group size", "prompts", "prompt length")
COLOURS = {"rollout": "#2a78d6", "update": "#e34948", "cross-scoring": "#eda100"}


@dataclass(frozen=True)
class Point:
    """One measurement."""

    axis: str
    """What is doubled."""
    stage: str
    size: int
    seconds: float
    flops: float


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    start = _start(options.scale)
    own = training(options.model, options.device, options.dtype, "grpo", LearnerSettings(update_batch=1024), start.response)
    bench = _Bench(own, options.repeats)
    axes = _axes(start, options.doublings)
    points = [point for axis in options.axes for point in _measure(bench, axis, axes[axis])]
    options.out.mkdir(parents=True, exist_ok=True)
    figure(points).write_html(options.out / "growth.html", include_plotlyjs=True)
    say(f"wrote {options.out / 'growth.html'}")
    about: Row = {"model": options.model, "device, precision": f"{device_name(own.model.device)}, {precision(own.model)}"}
    publish([{**about, **row} for row in rows_of(points)], options.json)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, default="tiny")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES), help="what to double")
    parser.add_argument("--doublings", type=int, default=3, help="how often each size is doubled")
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths it begins with")
    parser.add_argument("--repeats", type=int, default=2, help="of each measurement, the best of which counts")
    parser.add_argument("--out", type=Path, default=Path("runs/growth"), help="folder of growth.html")
    add_json_option(parser)
    return parser.parse_args(arguments)


def _start(scale: float) -> Conversations:
    sizes = {name: max(2, round(size * scale)) for name, size in {"prompt": 64, "response": 32, "observed": 16}.items()}
    return Conversations(groups=2, group_size=2, turns=1, **sizes)


def _axes(start: Conversations, doublings: int) -> dict[str, list[Conversations]]:
    """What is doubled, and the work at each size; turns need a history, so they are doubled at a short prompt."""
    factors = [2**n for n in range(doublings + 1)]
    return {
        "turns": [replace(start, turns=factor) for factor in factors],
        "group size": [replace(start, group_size=start.group_size * factor) for factor in factors],
        "prompts": [replace(start, groups=start.groups * factor) for factor in factors],
        "prompt length": [replace(start, prompt=start.prompt * factor) for factor in factors],
    }


class _Bench:
    """The three stages over one model."""

    def __init__(self, own: Training, repeats: int) -> None:
        self._own, self._repeats = own, repeats
        self._scorer = PrefixScorer(own.model)
        self.size = size_of(own.model)

    def rollout(self, work: Conversations) -> tuple[float, list[Group]]:
        engine = engine_for(self._own.model, self._own.loaded.tokenizer, work)
        vocabulary = int(self._own.model.config.vocab_size)

        def play() -> list[Group]:
            conversations = make_conversations(work, vocabulary)
            engine.run(conversations, Sampling(1.0, work.response))
            return grouped(conversations)

        seconds, groups = self._best(play)
        pay(groups)
        return seconds, groups

    def update(self, groups: Sequence[Group]) -> float:
        batch = self._own.completed(groups)
        return self._best(lambda: self._own.update(batch))[0]

    def cross_score(self, groups: Sequence[Group]) -> float:
        prompts = [group.trajectories[0].turns[0].context_ids for group in groups]
        reasonings = [trajectory.turns[0].response_ids for group in groups for trajectory in group.trajectories]
        return self._best(lambda: self._scorer.score_all(prompts, reasonings))[0]

    def _best(self, job: Callable[[], Any]) -> tuple[float, Any]:
        job()
        return best_of(self._repeats, self._own.model.device, job)


def _measure(bench: _Bench, axis: str, works: Sequence[Conversations]) -> list[Point]:
    points = []
    for work in works:
        number = {"turns": work.turns, "group size": work.group_size, "prompts": work.groups, "prompt length": work.prompt}[axis]
        seconds, groups = bench.rollout(work)
        points.append(Point(axis, "rollout", number, seconds, rollout_flops(work, bench)))
        points.append(Point(axis, "update", number, bench.update(groups), train_flops(groups, bench.size, all_predicted=False)))
        if axis != "turns":
            points.append(Point(axis, "cross-scoring", number, bench.cross_score(groups), cross_score_flops(work, bench)))
        say(f"{axis} {number}: " + ", ".join(f"{p.stage} {p.seconds:.2f} s" for p in points if p.size == number))
    return points


def rollout_flops(work: Conversations, bench: _Bench) -> float:
    """Every prompt once, every other token of a conversation once, the head for sampled ones."""
    later = work.longest - work.prompt
    tokens = work.groups * work.prompt + work.rows * later
    seen = work.groups * seen_by(0, work.prompt) + work.rows * seen_by(work.prompt, later)
    return bench.size.forward_flops(tokens, work.rows * work.turns * work.response, seen)


def cross_score_flops(work: Conversations, bench: _Bench) -> float:
    """Every prompt once, every response under every prompt once."""
    pairs = work.groups * work.rows
    tokens = work.groups * work.prompt + pairs * work.response
    seen = work.groups * seen_by(0, work.prompt) + pairs * seen_by(work.prompt, work.response)
    return bench.size.forward_flops(tokens, pairs * work.response, seen)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """b of the least-squares fit log value = a + b log size."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((p - mean_x) * (q - mean_y) for p, q in zip(x, y, strict=True))
    return above / sum((p - mean_x) ** 2 for p in x)


def rows_of(points: Sequence[Point]) -> list[Row]:
    """A row per size that was doubled and stage: the seconds at the smallest and the largest size, both exponents over the larger half."""
    rows: list[Row] = []
    for axis, stage in dict.fromkeys((point.axis, point.stage) for point in points):
        line = sorted((p for p in points if (p.axis, p.stage) == (axis, stage)), key=lambda p: p.size)
        half = line[(len(line) - 1) // 2 :]
        sizes = [p.size for p in half]
        rows.append(
            {
                "doubled": axis,
                "stage": stage,
                "sizes": f"{line[0].size} to {line[-1].size}",
                "first, s": line[0].seconds,
                "last, s": line[-1].seconds,
                "exponent of seconds": exponent(sizes, [p.seconds for p in half]),
                "exponent of products": exponent(sizes, [p.flops for p in half]),
            }
        )
    return rows


def figure(points: Sequence[Point]) -> go.Figure:
    """A panel per size that was doubled."""
    axes = list(dict.fromkeys(point.axis for point in points))
    drawn = make_subplots(rows=1, cols=len(axes), subplot_titles=axes, horizontal_spacing=0.05)
    for column, axis in enumerate(axes, start=1):
        for stage, colour in COLOURS.items():
            line = sorted((p for p in points if (p.axis, p.stage) == (axis, stage)), key=lambda p: p.size)
            if not line:
                continue
            sizes, common = [p.size for p in line], {"legendgroup": stage, "row": 1, "col": column}
            # turns has no cross-scoring, so its legend comes from the next panel
            shown = column == (2 if stage == "cross-scoring" and len(axes) > 1 else 1)
            seconds = [p.seconds for p in line]
            needed = [p.flops * seconds[-1] / line[-1].flops for p in line]
            drawn.add_scatter(x=sizes, y=seconds, name=stage, line_color=colour, mode="lines+markers", showlegend=shown, **common)
            dashed = {"color": colour, "dash": "dot", "width": 1}
            drawn.add_scatter(x=sizes, y=needed, name=f"{stage}, products", line=dashed, mode="lines", showlegend=False, **common)
        drawn.update_xaxes(type="log", tickvals=sorted({p.size for p in points if p.axis == axis}), row=1, col=column)
    drawn.update_yaxes(type="log")
    drawn.update_yaxes(title_text="seconds", row=1, col=1)
    layout = {"width": 1200, "height": 380, "template": "plotly_white", "margin": {"t": 40, "b": 40}}
    drawn.update_layout(legend={"orientation": "h", "y": -0.15}, **layout)
    return drawn


if __name__ == "__main__":
    main()
