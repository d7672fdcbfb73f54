"""`tether doctor`: what this machine has, what works, and how to fix what does not; with a model, whether it fits and how it is computed; with
a run folder, which of its files are damaged and which checkpoint is whole."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from tether.cli.console import SafeConsole
from tether.core.errors import BadInput, TetherError

EXAMPLES = """\b
Examples:
  tether doctor
  tether doctor --model Qwen/Qwen2.5-3B-Instruct --set lora.rank=16 --out /data/runs
  tether doctor runs/my-run
"""

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "gymnasium", "pydantic", "plotly",
    "tantivy", "math-verify", "rapidfuzz", "httpx", "fastapi", "uvicorn",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the output."""

    what: str
    good: bool
    detail: str
    needed: bool = True
    """A finding that is not good makes the command fail only if it is needed."""


def doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Check the files of this run folder instead of the machine; only reads.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Also check that training this model fits into memory, and which parts of the fast path serve it; loads it."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the run would be written: whether its disk has room.")] = Path(),
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of that training.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON array.")] = False,
) -> None:
    """Check this machine, or a run folder; exits 1 if training cannot work here, or if the run is damaged."""
    if set_ and model is None:
        raise BadInput("--set changes the training of a model; add --model NAME")
    if run is not None and model is not None:
        raise BadInput("give a run folder or --model, not both: the one checks files, the other this machine")
    console = SafeConsole()
    findings = (
        list(examine_run(run)) if run is not None else [*examine(out), *(_model(model, set_ or [], out) if model is not None else [])]
    )
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    for finding in [] if as_json else findings:
        mark = ("ok  ", "green") if finding.good else ("FAIL", "red") if finding.needed else ("note", "yellow")
        console.print(Text.assemble(mark, f" {finding.what}: {finding.detail}"), highlight=False, soft_wrap=True)
    if any(finding.needed and not finding.good for finding in findings):
        raise typer.Exit(1)


def examine(out: Path = Path()) -> Iterator[Finding]:
    """Everything worth knowing, most basic first; `out`: where runs would be written."""
    version = platform.python_version()
    yield Finding("python", (3, 11) <= sys.version_info[:2] <= (3, 13), f"{version} on {platform.machine()}; 3.11 to 3.13 are supported")
    for package in PACKAGES:
        try:
            yield Finding(package, True, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, False, f"missing; install with: pip install {package}")
    yield from _compute()
    yield from _models()
    yield _sandbox()
    for name in ("trl", "verl"):
        with suppress(importlib.metadata.PackageNotFoundError):
            yield _trainer(name, importlib.metadata.version(name))
    yield _disk(out)


def examine_run(folder: Path) -> Iterator[Finding]:
    """The files of a run: whether they can be read, whether its checkpoints are what was written, and where it would continue."""
    from tether.runs.checkpoints import BEST, MANIFEST, damage, step_folders
    from tether.runs.lock import lock_holder
    from tether.runs.store import METRICS, TRAJECTORIES, RunStore

    store = RunStore.open(folder)
    ended = store.finished
    holder = lock_holder(folder)
    yield Finding("run", True, f"being written by {holder}" if holder else f"ended: {ended}" if ended else "not ended; nobody writes it")
    try:
        store.config()
        records = store.steps()
        episodes = sum(1 for _ in store.trajectories())
    except TetherError as error:
        yield Finding("records", False, str(error))
    else:
        # Every step of a run writes its episodes before its record.
        emptied = not episodes and any(record.metrics.get("rollout/episodes") for record in records)
        lost = f"; {TRAJECTORIES} has lost its episodes, which their steps have played: restore it from a copy" if emptied else ""
        yield Finding("records", not emptied, f"{len(records)} steps, {episodes} episodes{lost}")
        for name in (METRICS, TRAJECTORIES):
            if torn := store.torn_lines.get(name):
                yield Finding(name, False, f"lines that a kill tore, which are skipped: {_listed(torn)}", needed=False)
    whole = []
    best = store.checkpoints / BEST
    for checkpoint in (*step_folders(store.checkpoints), *([best] if best.exists() else [])):
        found = damage(checkpoint)
        verified = (checkpoint / MANIFEST).is_file()
        words = "whole" if verified else "has no manifest: its files are there, and cannot be verified"
        yield Finding(checkpoint.name, not found and verified, f"damaged: {'; '.join(found)}" if found else words, needed=bool(found))
        whole += [checkpoint] if not found and checkpoint != best else []
    newest = step_folders(store.checkpoints)[-1:]
    if not whole:
        yield Finding("--resume", not newest, "starts from scratch" if not newest else "has no whole checkpoint to continue from")
    elif whole[-1:] == newest:
        yield Finding("--resume", True, f"continues from {whole[-1].name}")
    else:
        yield Finding("--resume", False, f"stops at {newest[0].name}; move it away, and it continues from {whole[-1].name}, which is whole")


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (f" and {len(numbers) - 10} more" if len(numbers) > 10 else "")


def _compute() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    from tether.models.hardware import describe_compute

    yield Finding("compute", True, describe_compute())
    yield Finding("cores", True, f"{os.cpu_count()} CPU cores")


def _disk(out: Path) -> Finding:
    """Room for a run of each embedded model that is at hand, with the default settings."""
    from tether.models.catalog import EMBEDDED, is_at_hand

    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = f"{shutil.disk_usage(there).free / 1e9:.1f} GB free in '{there.absolute()}'"
    if importlib.util.find_spec("torch") is None or not is_at_hand("tiny"):
        return Finding("disk", True, free)
    from tether.core.config import load
    from tether.training.disk import plan_disk
    from tether.training.settings import RunSettings

    try:
        names = [name for name in EMBEDDED if is_at_hand(name)]
        plans = {name: plan_disk(load(RunSettings, None, {"env": {"name": "frozen_lake"}, "model": {"name": name}}), out) for name in names}
    except BadInput as error:
        return Finding("disk", False, str(error))
    needed = ", ".join(f"{plan.total / 1e9:.1f} GB for {name}" for name, plan in plans.items() if plan is not None)
    enough = all(plan is None or plan.is_enough for plan in plans.values())
    return Finding("disk", enough, f"{free}; 100 steps take at most {needed}; --model NAME counts another", needed=False)


def _model(model: str, pairs: list[str], out: Path) -> Iterator[Finding]:
    """Whether training a model fits, and what computes it."""
    from tether.core.config import load, merge
    from tether.models.catalog import check_name
    from tether.training.resolve import overrides
    from tether.training.settings import RunSettings

    check_name(model)
    settings = load(RunSettings, None, merge({"env": {"name": "frozen_lake"}, "model": {"name": model}}, overrides(pairs)))
    fits = list(_fit(settings, out))
    yield from fits
    if all(finding.good or not finding.needed for finding in fits):
        yield from _fast_path(settings)


def _fast_path(settings: Any) -> Iterator[Finding]:
    """Which decoder, attention, scorer and head serve the model; it is loaded as a run would load it, and probed."""
    from tether.models.chat import ChatFormat
    from tether.models.fast_path import fast_path_report
    from tether.models.load import load_model
    from tether.models.policy import Policy
    from tether.training.build import compute_dtype

    what = f"computing {settings.model.name}"
    try:
        loaded = load_model(settings.model.name, device=settings.model.device, dtype=compute_dtype(settings))
    except TetherError as error:
        yield Finding(what, False, str(error))
        return
    policy = Policy(*loaded, max_positions=settings.rollout.max_context)
    first, *slow = fast_path_report(policy).lines()
    yield Finding(what, True, first)
    yield from (Finding(what, False, line, needed=False) for line in slow)
    yield from (
        Finding(what, False, note, needed=False) for note in ChatFormat(loaded.tokenizer, policy.end_of_turn_ids, policy.vision).notes
    )


def _fit(settings: Any, out: Path) -> Iterator[Finding]:
    """Whether training fits into memory and on the disk, counted without loading anything."""
    from tether.training.disk import plan_disk
    from tether.training.memory import plan_memory

    what = f"training {settings.model.name}"
    try:
        fit, disk = plan_memory(settings), plan_disk(settings, out)
    except BadInput as error:
        yield Finding(what, False, str(error))
        return
    if fit is None:
        yield Finding(what, False, "cannot be counted without loading the model", needed=False)
        return
    yield Finding(what, True, fit.words())
    yield from (Finding(what, False, note, needed=False) for note in fit.notes)
    if disk is not None:
        yield Finding(f"disk for {settings.model.name}", disk.is_enough, disk.words(), needed=False)


def _sandbox() -> Finding:
    """Which isolation the programs of deepcoder would get; found out by running one."""
    from tether.envs.deepcoder.sandbox.sandbox import describe_isolation

    level = describe_isolation()
    strength = "kernel isolation" if level.strong else "weaker isolation only" if level.name else "not available"
    return Finding("sandbox", level.strong, f"{strength}: {level.detail}", needed=False)


def _trainer(name: str, version: str) -> Finding:
    """Whether the plug-in for a trainer that is installed here really loads; verl swallows errors of loading it.

    It is loaded in a process of its own: these packages set up logging, plug-ins and devices when they are imported.
    """
    loads = {
        "trl": "import tether.integrations.trl; from tether.integrations.trl.config import check_version; print(check_version() or '')",
        "verl": (
            "import verl, sys; from tether.integrations.verl.plugin import NAME, check_version; "
            "from verl.experimental.agent_loop.agent_loop import _agent_loop_registry as known; import tether.integrations.verl.sampler; "
            "assert NAME in known, 'verl does not know the agent loop'; print(check_version() or '')"
        ),
    }
    what = f"plug-in for {name}"
    if name == "verl":
        offered = [point for point in importlib.metadata.entry_points(group="verl.plugins") if point.name == "tether"]
        policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").lower()
        if not offered:
            missing = "verl is not offered the plug-in: install Tether (pip install -e .) so that its entry point is known"
            return Finding(what, False, missing, needed=False)
        if policy != "auto" and "tether" not in policy.split(","):
            return Finding(what, False, f"VERL_USE_EXTERNAL_PLUGINS is '{policy}', so verl does not load it; set it to auto", needed=False)
    done = subprocess.run([sys.executable, "-c", loads[name]], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Finding(what, False, f"{name} {version} is here, but the plug-in does not load: {reason}", needed=False)
    remark = (done.stdout.strip().splitlines() or [""])[-1]
    return Finding(what, not remark, remark or f"loads with {name} {version}", needed=False)


def _models() -> Iterator[Finding]:
    from tether.models.catalog import SHIPPED, is_at_hand, models_folder

    for name in SHIPPED:
        yield Finding(f"model {name}", is_at_hand(name), "ships with Tether" if is_at_hand(name) else "missing; reinstall Tether")
    here = is_at_hand("smollm2")
    yield Finding("model smollm2", here, "at hand" if here else "not here; get it with: tether models get smollm2", needed=False)
    reading = all(importlib.util.find_spec(package) for package in ("gguf", "accelerate"))
    yield Finding("gguf files", reading, "readable" if reading else "pip install 'tether-agents[gguf]' to read them", needed=False)
    folder = models_folder()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(parent, os.W_OK)
    words = f"{folder}" if writable else f"{folder} cannot be written; set TETHER_CACHE to another folder"
    yield Finding("cache", writable, words, needed=False)
