"""`tether sweep`: every combination of some settings under several seeds, side by side, and one table with intervals."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tether.cli.console import SafeConsole, plain_table, show_table
from tether.cli.options import AlgorithmName, Device, Jobs, ModelName, complete_config_or_env, complete_override
from tether.core.config import find_config, is_config, merge, read_file
from tether.core.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tether.training.sweep import Row, Trial

EXAMPLES = """\b
Examples:
  tether sweep frozen_lake --seeds 0-4 --set learner.learning_rate=1e-5,1e-4 --steps 20
  tether sweep tiny/frozen_lake --seeds 0-2 --set filter.strategy=top_p,all --set rollout.group_size=4,8 --out runs/filters
  tether sweep my_config.yaml --seeds 0,1 --jobs 2 --metric "peak validation/success" --json
"""

METRICS = ("last validation/success", "peak validation/success", "last information/retrieval_acc")


def sweep(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|ENV", help="A config, by file or by name, or an environment.", autocompletion=complete_config_or_env
        ),
    ],
    seeds: Annotated[str, typer.Option(help="Seeds of every combination, such as 0-4 or 0,2.")] = "0-2",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE[,VALUE]",
            help="A setting; one with several values is varied. May be given again.",
            autocompletion=complete_override,
        ),
    ] = None,
    model: ModelName = None,
    algo: AlgorithmName = None,
    filter_: Annotated[str | None, typer.Option("--filter", help="Strategy and share to keep, such as top_p:0.9.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs; the same folder resumes. [default: runs/sweep-NAME]")] = None,
    jobs: Jobs = None,
    max_minutes: Annotated[float | None, typer.Option(help="End cleanly after this time; the same command continues.")] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar='"WINDOW METRIC"', help='A column, such as "last validation/success"; may be given again.'),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as one JSON object, and nothing else to stdout.")] = False,
) -> None:
    """Train every combination of settings under every seed, side by side; finished runs are never made again; one table at the end."""
    from tether.cli.side_by_side import SweepView, end
    from tether.runs.files import write_whole
    from tether.runs.quantities import Quantity
    from tether.training.resolve import chosen, named_settings
    from tether.training.side_by_side import sweep as run_sweep
    from tether.training.sweep import RESULT, is_finished, parse_seeds, sweep_trials, table_rows, to_json, variants

    if max_minutes is not None and max_minutes <= 0:
        raise BadInput(f"--max-minutes is {max_minutes:g}; give more than 0")
    combinations, quantities = variants(set_ or []), [Quantity.parse(text) for text in metric or METRICS]
    given = merge(named_settings(None, model, algo, filter_, steps, None), chosen({"model.device": device}))
    trials = sweep_trials(merge(_base(what), given), combinations, parse_seeds(seeds))
    folder = out or Path("runs") / f"sweep-{Path(what).with_suffix('').as_posix().replace('/', '-').replace(':', '-')}"
    console = SafeConsole(soft_wrap=True, stderr=as_json)
    console.print(f"{len(combinations)} x {len({trial.seed for trial in trials})} runs -> {folder}", highlight=False)
    fitting = None if jobs is not None or all(is_finished(folder / trial.id) for trial in trials) else _fitting(trials)
    view = SweepView(console, "runs")
    with view.drawing():
        state = run_sweep(trials, folder, jobs=jobs, at_most=fitting, max_minutes=max_minutes, observer=view)
    rows = table_rows(trials, folder, combinations, quantities)
    write_whole(folder / RESULT, to_json(rows, state.failed))
    if as_json:
        typer.echo(json.dumps(json.loads(to_json(rows, state.failed))))
    else:
        _show(rows, [str(quantity) for quantity in quantities])
    for name, reason in state.failed.items():
        console.print(f"failed: {name}: {reason} (log: {folder / name}.log)", style="red", highlight=False, markup=False)
    if not as_json:
        console.print(f"table: {folder / RESULT}; a run: tether report {folder / trials[0].id}", highlight=False)
    end(state, console, "runs")


def _base(what: str) -> dict[str, Any]:
    """The settings of a config, or of an environment with everything else at its default."""
    from tether.envs.registry import ENVIRONMENTS, is_address

    if what in ENVIRONMENTS.names() or is_address(what) or (":" in what and not is_config(what)):
        return {"env": {"name": what}}
    return read_file(find_config(what, also=ENVIRONMENTS.names()))


def _fitting(trials: "Sequence[Trial]") -> int | None:
    """How many runs fit into memory side by side, by the largest of them; None where that cannot be counted.

    The embedded model always fits: torch is not loaded to find that out.
    """
    from tether.models.catalog import SHIPPED
    from tether.training.resolve import resolve_settings

    different = {json.dumps({**trial.settings, "seed": 0}, sort_keys=True, default=str): trial.settings for trial in trials}
    large = [settings for one in different.values() if (settings := resolve_settings(None, one, {})).model.name not in SHIPPED]
    if not large:
        return None
    from tether.training.memory import plan_memory

    plans = [plan_memory(settings) for settings in large]
    if any(plan is None for plan in plans):
        return None
    return max(1, min(plan.available // max(1, plan.total) for plan in plans if plan is not None))


def _show(rows: "list[Row]", quantities: list[str]) -> None:
    """The table: a row for each combination, intervals over seeds, and the difference to the first row."""
    from tether.runs.quantities import Quantity, estimate_words

    keys = list(rows[0].values)
    parsed = {name: Quantity.parse(name) for name in quantities}
    columns = [f"{name}{' (%)' if quantity.is_share else ''}" for name, quantity in parsed.items()]
    last = ["against the first row"] if len(rows) > 1 else []
    table = plain_table(*(keys or ["settings"]), "runs", *columns, *last, right=["runs"], header_style="bold")
    for row in rows:
        cells = [row.values[key] for key in keys] or ["as given"]
        cells.append(f"{row.done} of {row.planned}")
        cells += [estimate_words(row.levels[name], quantity) if name in row.levels else "-" for name, quantity in parsed.items()]
        if len(rows) > 1:
            cells.append(estimate_words(row.difference, parsed[quantities[0]], signed=True) if row.difference is not None else "-")
        table.add_row(*cells)
    show_table(table, "Mean over seeds [95% interval].")
