"""`tether diagnose`: an audit of saved rollouts of any framework, as a verdict in the terminal, a page, or one JSON object."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tether.cli.console import SafeConsole

EXAMPLES = """\b
Examples:
  tether diagnose runs/my-run
  tether diagnose rollouts.jsonl --model smollm2 --out report.html
  tether diagnose outputs/rollouts --model Qwen/Qwen2.5-0.5B-Instruct --split eval
  tether diagnose completions/ --model Qwen/Qwen2.5-0.5B-Instruct --json
  tether diagnose requests.jsonl --model smollm2 --group request.metadata.task_id
  tether diagnose dump.jsonl --model smollm2 --fields prompt=input,response=output,reward=score --pattern 'Thought:(.*?)Action:'
"""

TEMPLATES_SHOWN = 3
LONGEST_SKELETON = 110
REPORT = "diagnosis.html"
CONTROL_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
"""Characters that JSON may hold as they are and that some terminals obey."""
COLOURS = {"tied": "green", "weakly_tied": "yellow", "cannot_be_told": "yellow"}


def diagnose(
    files: Annotated[list[str], typer.Argument(metavar="FILE [FILE ...]", help="Rollout files or folders, or a Tether run folder.")],
    model: Annotated[
        str | None,
        typer.Option(help="The model that scores: tiny, smollm2, a folder, a Hugging Face id, a run folder, or a server's http address."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object, and nothing else.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the HTML report goes: diagnosis.html, in the run's folder if it is one; with --json only if given."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="tether, trl, verl, ragen, skyrl, openrlhf, areal, slime, verifiers, prime_rl, openai, litellm, langfuse, weave or generic; "
            "detected if left out."
        ),
    ] = None,
    fields: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FIELD,...", help="Field map for other names, such as prompt=input,response=output.")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="The field whose value tells which prompt a record answers, such as metadata.task_id."),
    ] = None,
    pattern: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Where the reasoning is, as one (group); between think tags if left out.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="Which episodes of a Tether run, or of a folder with training and evaluation: train, eval.")
    ] = "train",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave unreadable records out and count them.")] = False,
    prompts: Annotated[int, typer.Option(help="Prompts per step.", min=2)] = 32,
    samples: Annotated[int, typer.Option(help="Reasonings per prompt; with fewer, more prompts are taken at the same cost.", min=1)] = 16,
    step: Annotated[list[int] | None, typer.Option("--step", help="Measure this step only; may be given again.")] = None,
    scope: Annotated[str, typer.Option(help="first-turn, or trajectory: one turn of each episode, drawn at random.")] = "first-turn",
    seed: Annotated[int, typer.Option(help="Of what is sampled and shuffled.")] = 0,
    device: Annotated[str | None, typer.Option(help="Where the model computes; the GPU if there is one.")] = None,
    bootstrap: Annotated[int, typer.Option(help="Resamples for the intervals.", min=100)] = 1000,
    tokenizer: Annotated[
        str | None, typer.Option(help="The model whose token ids the rollouts hold, if it is not the one that scores; needed for a server.")
    ] = None,
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Leave pictures out of the prompts, for a model that reads text only.")
    ] = False,
) -> None:
    """Does the reasoning of these rollouts depend on its input?"""
    from tether.diagnostics.audit import audit
    from tether.diagnostics.audit.api import run_folder

    with _bars(quiet=as_json) as bars:
        found = audit(
            files,
            model,
            format=format,
            fields=fields,
            group=group,
            pattern=pattern,
            split=split,
            skip_bad=skip_bad,
            steps=step or (),
            scope=scope,
            prompts=prompts,
            samples=samples,
            seed=seed,
            bootstrap=bootstrap,
            device=device,
            tokenizer=tokenizer,
            text_only=text_only,
            out=out,
            progress=bars,
        )
    page = out
    if page is None and not as_json:
        page = found.report((run_folder(files) or Path()) / REPORT)
    document = found.document()
    if as_json:
        typer.echo(json.dumps(document, ensure_ascii=False).translate(CONTROL_ESCAPES))
    else:
        _show(document, page)


class _Bar:
    """The progress bar: bytes while reading, prompts while scoring."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task = bars.add_task("reading", total=None)

    def read(self, done: int, total: int) -> None:
        self._bars.update(self._task, completed=done, total=total)

    def begin(self, stage: str, total: int) -> None:
        self._bars.reset(self._task, description=stage, total=total)

    def advance(self, count: int) -> None:
        self._bars.advance(self._task, count)


@contextmanager
def _bars(quiet: bool) -> Iterator[_Bar]:
    columns = (TextColumn("{task.description:<8}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=SafeConsole(stderr=True, quiet=quiet), transient=True) as bars:
        yield _Bar(bars)


def _show(document: dict[str, Any], out: Path | None) -> None:
    """The verdict, why, the trend, the largest templates and what was noted."""
    from tether.runs.pages import slot_words  # brings plotly, which help does not need

    console = SafeConsole(soft_wrap=True, markup=False, highlight=False)
    verdict, read = document["verdict"], document["read"]
    console.print(verdict["headline"], style=f"bold {COLOURS.get(verdict['code'], 'red')}")
    console.print(f"  {verdict['next_step']}")
    for reason in verdict["reasons"]:
        console.print(f"  {reason}")
    for sentence in (document["trend"] or {}).get("sentences", []):
        console.print(f"  {sentence}")
    last = next(window for window in document["windows"] if window["name"] == document["verdict_step"])
    if (rewards := last["rewards"]) is not None:
        ratio = "" if rewards["rv_ratio"] is None else f", std / mean over prompts {rewards['rv_ratio']:.2f}"
        success = "" if last["success"] is None else f"; success {last['success']:.0%}"
        console.print(
            f"  Reward variance within a prompt {rewards['rv_mean']:.3g} (zero in {rewards['zero_share']:.0%} of the prompts{ratio}){success}."
        )
    templates = (document["templates"] or {}).get("templates", [])
    if templates:
        console.print("Templates", style="bold")
    for template in templates[:TEMPLATES_SHOWN]:
        kinds, skeleton = slot_words(template["slots"]), template["skeleton"]
        shown = skeleton if len(skeleton) <= LONGEST_SKELETON else f"{skeleton[: LONGEST_SKELETON - 1]}…"
        console.print(f"  {template['share']:4.0%}  {shown}{f'   (slots: {kinds})' if kinds else ''}")
    for alarm in document["alarms"]:
        console.print(f"Alarm {alarm['name']} since step {alarm['began']}: {alarm['cause']}", style="red")
    where = "" if document["windows"][-1]["step"] is None else f", verdict on step {document['verdict_step']}"
    console.print(
        f"Read {read['rollouts']} rollouts ({document['format']}) of {read['steps']} {'step' if read['steps'] == 1 else 'steps'}{where}; "
        f"scored by {document['model']} in {document['precision']}; scope {document['scope'].replace('_', ' ')}.",
        style="dim",
    )
    for note in document["notes"]:
        console.print(f"note: {note}", style="yellow")
    if out is not None:
        console.print(f"report: {out}")
