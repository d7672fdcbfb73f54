"""`tether report`: one self-contained HTML page about one run or several.

Templates are found here, because the files of a run (tether.runs) and diagnosis (tether.diagnostics) do not know each other.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tether.cli.console import SafeConsole
from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.core.grammar import parse_response
from tether.core.seeding import generator
from tether.runs.store import RunStore

if TYPE_CHECKING:
    from tether.runs.reasoning_view import StepTemplates

MOST_REASONINGS = 300
"""Searched for templates at one step; whole prompts are drawn, because ties show between reasonings of one prompt."""
LONGEST_REASONING = 1200
"""Characters of a reasoning that are searched. Both bounds keep the search to a few seconds a step."""

EXAMPLES = """\b
Examples:
  tether report runs/my-run
  tether report runs/filtered runs/unfiltered --out comparison.html
"""


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help="Run folders.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; by default report.html in the (first) run folder.")] = None,
) -> None:
    """Write a report with the verdict, alarms, curves, gradients, templates and sample trajectories."""
    from tether.runs.files import as_written

    with as_written(runs[0] if len(runs) == 1 else Path(", ".join(map(str, runs)))):
        path = full_report([RunStore.open(run) for run in runs], out or runs[0] / "report.html")
    SafeConsole().say(f"report: {path}")


def full_report(stores: Sequence[RunStore], out: Path) -> Path:
    """The report of some runs, with what their reasoning is made of."""
    return begun_report(stores)(out)


def begun_report(stores: Sequence[RunStore]) -> Callable[[Path], Path]:
    """What takes longest about the report of some runs, done; the rest writes it to a path."""
    from tether.runs.report import write_report  # with the library that draws

    return partial(write_report, stores, templates=[run_templates(store) for store in stores])


def run_templates(store: RunStore) -> list["StepTemplates"]:
    """The templates in the first-turn reasonings of the first and the last recorded step; of training, which has several per prompt."""
    steps: dict[str, list[int]] = {}
    for step, split in store.trajectory_blocks():
        steps.setdefault(split, []).append(step)
    if not steps:
        return []
    split = Split.TRAIN.value if Split.TRAIN in steps else next(iter(steps))
    ends = dict.fromkeys((steps[split][0], steps[split][-1]))
    return [step_templates(step, split, store.trajectories(step, split)) for step in ends]


def step_templates(step: int, split: str, episodes: Iterable[dict[str, Any]]) -> "StepTemplates":
    """The templates in the first-turn reasonings of some episodes of a step."""
    from tether.diagnostics.templates import find_templates
    from tether.runs.reasoning_view import StepTemplates

    reasonings: dict[str, list[str]] = {}
    for episode in episodes:
        if turns := episode.get("turns"):
            thought = parse_response(turns[0].get("response", "")).reasoning or ""
            reasonings.setdefault(f"{episode.get('env', '')}\n{turns[0].get('observation', '')}", []).append(thought[:LONGEST_REASONING])
    prompts, texts = _sampled(reasonings, step)
    left_out = sum(map(len, reasonings.values())) - len(texts)
    try:
        found = find_templates(texts, prompts)
    except BadInput as error:
        return StepTemplates(step, split, left_out, None, f"Nothing to search for templates: {error}.")
    return StepTemplates(step, split, left_out, dataclasses.asdict(found))


def _sampled(reasonings: dict[str, list[str]], step: int) -> tuple[list[str], list[str]]:
    """Prompts and reasonings in equal order: all of them, or those of randomly drawn prompts, of two prompts at the least."""
    chosen = reasonings
    if sum(map(len, reasonings.values())) > MOST_REASONINGS:
        names = list(reasonings)
        chosen, room = {}, MOST_REASONINGS
        for place in generator("report templates", step).permutation(len(names)):
            chosen[names[place]] = reasonings[names[place]][: min(room, MOST_REASONINGS // 2)]
            room -= len(chosen[names[place]])
    pairs = [(prompt, text) for prompt, texts in chosen.items() for text in texts]
    return [prompt for prompt, _ in pairs], [text for _, text in pairs]
