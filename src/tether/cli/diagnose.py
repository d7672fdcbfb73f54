"""`tether diagnose`: an audit of saved rollouts of any framework, as a verdict in the terminal, a page, or one JSON object."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tether.core.enums import Scope
from tether.core.errors import BadInput, UnknownName, did_you_mean

EXAMPLES = """\b
Examples:
  tether diagnose runs/my-run
  tether diagnose rollouts.jsonl --model smollm2 --out report.html
  tether diagnose completions/ --model Qwen/Qwen2.5-0.5B-Instruct --json
  tether diagnose dump.jsonl --model smollm2 --fields prompt=input,response=output,reward=score --pattern 'Thought:(.*?)Action:'
"""

SCOPES = {"first-turn": Scope.FIRST_TURN, "trajectory": Scope.TRAJECTORY}
TEMPLATES_SHOWN = 3
REPORT = "diagnosis.html"
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
    format: Annotated[str | None, typer.Option(help="tether, trl, verl, ragen or generic; detected if left out.")] = None,
    fields: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FIELD,...", help="Field map for other names, such as prompt=input,response=output.")
    ] = None,
    pattern: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Where the reasoning is, as one (group); between think tags if left out.")
    ] = None,
    split: Annotated[str, typer.Option(help="Which episodes of a Tether run.")] = "train",
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
) -> None:
    """Does the reasoning of these rollouts depend on its input?"""
    if scope not in SCOPES:
        raise UnknownName(f"unknown scope '{scope}': {did_you_mean(scope, SCOPES)}")
    if out is not None and not out.parent.is_dir():  # said now, not after scoring
        raise BadInput(f"--out is '{out}', but there is no folder '{out.parent}'; make it or choose another")
    name, remark = _model(files, model)
    from tether.diagnostics.audit import AuditOptions, audit, collect, load_scorer, to_document
    from tether.diagnostics.rollouts import open_rollouts, parse_fields

    options = AuditOptions(scope=SCOPES[scope], prompts=prompts, samples=samples, steps=tuple(step or ()), seed=seed, bootstrap=bootstrap)
    with _bars(quiet=as_json) as bars:
        reader = open_rollouts(
            files,
            format=format,
            fields=parse_fields(fields or []),
            pattern=pattern,
            split=split,
            bad_lines="skip" if skip_bad else "raise",
            progress=bars.read,
        )
        collected = collect(reader, options)
        scorer = load_scorer(name, tokenizer=tokenizer or _writer(files, model), device=device)
        found = audit(collected, scorer, options, stage=bars.begin, advance=bars.advance)
    document = to_document(found)
    document["notes"] = [*([remark] if remark else []), *document["notes"]]
    _deliver(document, out or (None if as_json else (_run_folder(files) or Path()) / REPORT), as_json)


def _deliver(document: dict[str, Any], out: Path | None, as_json: bool) -> None:
    """Write the page, then print the result."""
    if out is not None:
        from tether.runs.audit_report import write_audit_report

        write_audit_report(document, out)
    if as_json:
        typer.echo(json.dumps(document, ensure_ascii=False))
    else:
        _show(document, out)


def _model(files: list[str], model: str | None) -> tuple[str, str | None]:
    """The model that scores, and a remark where it was found in a run folder; nothing heavy is loaded yet."""
    from tether.diagnostics.audit.scorer import is_server, resolve_model, starting_model
    from tether.models.catalog import check_name

    run = _run_folder(files)
    if model is None and run is None:
        raise BadInput("which model should score the rollouts? add --model with the one that wrote them, or a small one such as smollm2")
    name, remark = resolve_model(model) if model is not None else starting_model(run) if run else ("", None)
    if not is_server(name):
        check_name(name)
    return name, remark


def _run_folder(files: list[str]) -> Path | None:
    """The run that is to be audited, if it is one."""
    return Path(files[0]) if len(files) == 1 and (Path(files[0]) / "run.json").is_file() else None


def _writer(files: list[str], model: str | None) -> str | None:
    """The model whose token ids a run holds, where another one scores it."""
    from tether.diagnostics.audit.scorer import resolve_model

    run = _run_folder(files)
    return resolve_model(str(run))[0] if run and model else None


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
    with Progress(*columns, console=Console(stderr=True, quiet=quiet), transient=True) as bars:
        yield _Bar(bars)


def _show(document: dict[str, Any], out: Path | None) -> None:
    """The verdict, why, the trend, the largest templates and what was noted."""
    from tether.runs.audit_report import slot_words  # brings plotly, which help does not need

    console = Console(soft_wrap=True, markup=False, highlight=False)
    verdict, read = document["verdict"], document["read"]
    console.print(verdict["headline"], style=f"bold {COLOURS.get(verdict['code'], 'red')}")
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
        kinds = slot_words(template["slots"])
        console.print(f"  {template['share']:4.0%}  {_short(template['skeleton'])}{f'   (slots: {kinds})' if kinds else ''}")
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


def _short(text: str, most: int = 110) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
