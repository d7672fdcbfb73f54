"""`tether.audit`: the audit of saved rollouts from Python, with everything that `tether diagnose` has; the command calls it.

Files and options are checked before a model is loaded. A run folder of Tether needs no model: the one that the run began with scores it.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tether.core.enums import Scope, Split
from tether.core.errors import BadInput, UnknownName, did_you_mean
from tether.diagnostics.audit.run import Audit, AuditOptions, audit_sample, collect
from tether.diagnostics.audit.scorer import AuditScorer, is_server, load_scorer, loaded_scorer, resolve_model, starting_model
from tether.diagnostics.rollouts import open_rollouts, parse_fields
from tether.models.catalog import check_name
from tether.runs.store import RunStore

if TYPE_CHECKING:
    from tether.models.load import LoadedModel

SCOPES = {"first-turn": Scope.FIRST_TURN, "trajectory": Scope.TRAJECTORY}
FEWEST_RESAMPLES = 100

Rollouts = str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]]


class AuditProgress(Protocol):
    """What a caller may want to show while an audit runs."""

    def read(self, done: int, total: int) -> None:
        """Bytes read so far, and in all."""

    def begin(self, stage: str, total: int) -> None:
        """A stage of so many parts begins."""

    def advance(self, count: int) -> None:
        """So many parts of it are done."""


def audit(
    rollouts: Rollouts,
    model: "str | LoadedModel | AuditScorer | None" = None,
    *,
    format: str | None = None,
    fields: Mapping[str, str] | str | Sequence[str] | None = None,
    pattern: str | None = None,
    split: str | None = "train",
    skip_bad: bool = False,
    steps: int | Sequence[int] = (),
    scope: Scope | str = "first-turn",
    prompts: int = 32,
    samples: int = 16,
    seed: int = 0,
    bootstrap: int = 1000,
    device: str | None = None,
    tokenizer: str | None = None,
    out: Path | str | None = None,
    progress: AuditProgress | None = None,
) -> Audit:
    """Does the reasoning of these rollouts depend on its input?

    Args:
        rollouts: a file or a folder of any framework, several of them, a run folder of Tether, or rows: an iterable of mappings.
        model: the model that scores: tiny, smollm2, a folder, a Hugging Face id, a .gguf file, a run folder (its last checkpoint), a server's http
            address, or a loaded model (`tether.load_model`). May be left out for a run folder of Tether.
        format: tether, trl, verl, ragen, skyrl, openrlhf, areal, slime, verifiers, prime_rl or generic; detected if left out.
        fields: a field map for other names, such as {"prompt": "input", "response": "output"} or "prompt=input,response=output".
        pattern: a regular expression whose one group is the reasoning; between think tags if left out.
        split: which episodes of a Tether run, or of a folder that holds training and evaluation; None for all.
        skip_bad: leave unreadable records out and count them.
        steps: measure these steps only.
        scope: "first-turn", or "trajectory": one turn of each episode, drawn at random.
        prompts: prompts per step.
        samples: reasonings per prompt; with fewer, more prompts are taken at the same cost.
        seed: of what is sampled and shuffled.
        bootstrap: resamples for the intervals, 100 or more.
        device: where the model computes; the GPU if there is one.
        tokenizer: the model whose token ids the rollouts hold, if it is not the one that scores; needed for a server.
        out: where an HTML report goes; none is written if left out.
        progress: told of bytes read and prompts scored.
    """
    out = None if out is None else Path(out)
    if out is not None and not out.parent.is_dir():  # said now, not after scoring
        raise BadInput(f"--out is '{out}', but there is no folder '{out.parent}'; make it or choose another")
    options = AuditOptions(
        scope=_scope(scope),
        prompts=_at_least("prompts", prompts, 2),
        samples=_at_least("samples", samples, 1),
        steps=(steps,) if isinstance(steps, int) else tuple(steps),
        seed=seed,
        bootstrap=_at_least("bootstrap", bootstrap, FEWEST_RESAMPLES),
    )
    run = run_folder(rollouts)
    name, remark = _named(run, model) if model is None or isinstance(model, str) else ("", None)
    reader = open_rollouts(
        rollouts,
        format=format,
        fields=fields if fields is None or isinstance(fields, Mapping) else parse_fields([fields] if isinstance(fields, str) else fields),
        pattern=pattern,
        split=split,
        bad_lines="skip" if skip_bad else "raise",
        progress=progress.read if progress else None,
    )
    collected = collect(reader, options)
    if isinstance(model, AuditScorer):
        scorer = model
    elif model is None or isinstance(model, str):
        written = resolve_model(str(run))[0] if run and model else None  # the model whose ids a run holds, where another one scores it
        scorer = load_scorer(name, tokenizer=tokenizer or written, device=device)
    else:
        scorer = loaded_scorer(model, tokenizer=tokenizer)
    notes = (remark,) if remark else ()
    found = audit_sample(
        collected,
        scorer,
        options,
        notes=notes,
        recorded=_recorded(run) if run is not None and split == Split.TRAIN and options.scope is Scope.FIRST_TURN else None,
        stage=progress.begin if progress else None,
        advance=progress.advance if progress else None,
    )
    if out is not None:
        found.report(out)
    return found


def run_folder(rollouts: Rollouts) -> Path | None:
    """The run of Tether that is to be audited, if it is one."""
    named = rollouts[0] if isinstance(rollouts, list | tuple) and len(rollouts) == 1 else rollouts
    return Path(named) if isinstance(named, str | Path) and (Path(named) / "run.json").is_file() else None


def _recorded(run: Path) -> dict[int, dict[str, float]]:
    """What a run of Tether measured itself, by step; a fixed probe was not measured on the rollouts of its step, and does not count here."""
    records = RunStore.open(run).steps()
    return {record.step: record.metrics for record in records if "information/probe_tokens_sampled" not in record.metrics}


def _named(run: Path | None, model: str | None) -> tuple[str, str | None]:
    """The model that scores, and a remark where it was found in a run folder; nothing heavy is loaded yet."""
    if model is None and run is None:
        raise BadInput(
            "which model should score the rollouts? add --model (model=... in Python) with the one that wrote them, or a small one such as smollm2"
        )
    name, remark = resolve_model(model) if model is not None else starting_model(run) if run else ("", None)
    if not is_server(name):
        check_name(name)
    return name, remark


def _scope(scope: Scope | str) -> Scope:
    name = str(scope).replace("_", "-")
    if name not in SCOPES:
        raise UnknownName(f"unknown scope '{scope}': {did_you_mean(name, SCOPES)}")
    return SCOPES[name]


def _at_least(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadInput(f"{name} is {value!r}; expected a whole number from {least}")
    return value
