"""The data of the experiments: scales, arms and one grid per table or figure, read, checked and expanded into cells.

    experiments/scales.yaml        settings common to all runs of a scale, its environments, the probe, the order of importance
    experiments/arms.yaml          every arm by name: the settings in which it differs from the baseline
    experiments/NAME/grid.yaml     one table or figure: its arms, environments, seeds, claims, table and plots
    experiments/NAME/paper.yaml    the paper's values

A cell is environment x arm x seed at a scale: one `tether train` run. Arms have one definition for all grids, so equal cells of different
grids are one cell. Problems are collected and raised together, one line each.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from harness.cells import Cell
from harness.claims import Claim
from harness.harvest import DERIVED_METRICS
from harness.spending import SPENDING_METRICS, Target
from tether.core.config import Settings, merge, read_file, validate
from tether.core.errors import BadInput, ConfigError, UnknownName, did_you_mean
from tether.runs.quantities import DERIVED, Quantity, is_measured
from tether.training.sweep import parse_seeds

SCALES, ARMS, GRID, PAPER = "scales.yaml", "arms.yaml", "grid.yaml", "paper.yaml"
ALL = "all"
SMOKE_ARMS = 2

DERIVED.update(DERIVED_METRICS | SPENDING_METRICS)


class Scale(Settings):
    """What all runs of a scale share."""

    words: str
    """The scale in words, for pages."""
    settings: dict[str, Any]
    environments: dict[str, dict[str, Any]]
    """Environment to the settings in which its runs differ."""
    arms: dict[str, dict[str, Any]] = {}
    """Arm to the settings in which it differs at this scale from its definition."""
    minutes: Annotated[float, Field(gt=0)]
    """Rough minutes of device time per cell of the scale's steps with the device shared, for the cost before any cell was run."""

    def minutes_of(self, cells: Iterable[Cell]) -> float:
        """Of these cells, some of which may have more steps or fewer."""
        return self.minutes * sum(cell.steps for cell in cells) / int(self.settings["steps"])


class Probe(Settings):
    """The fixed probe, on which the information metrics are measured: its settings, in one place."""

    settings: dict[str, Any] = {}
    smoke: dict[str, Any] = {}
    """The same for --smoke."""


class Shared(Settings):
    """experiments/scales.yaml."""

    order: list[str]
    """Names of experiments, the most important first."""
    probe: Probe = Probe()
    smoke: dict[str, Any]
    """Laid on top of a cell's settings by --smoke."""
    scales: dict[str, Scale]


class Arm(Settings):
    """One way of training."""

    words: str
    settings: dict[str, Any] = {}


class Plan(Settings):
    """What an experiment runs at one scale."""

    environments: list[str]
    seeds: str
    arms: list[str] | None = None
    """Fewer arms than the grid has; None: all."""
    arm_seeds: dict[str, str] = {}
    """Arms that are run under other seeds than the rest."""
    settings: dict[str, Any] = {}
    """Settings in which all runs of the experiment differ from those of the scale; an arm's own go before them."""
    environment_settings: dict[str, dict[str, Any]] = {}
    """Environment to further settings in which its runs differ in this experiment."""
    targets: dict[str, Target] = {}
    """Environment to the level and the budget that the `spent/..._level` and `..._budget` quantities are about."""

    @field_validator("seeds", mode="before")
    @classmethod
    def _seeds(cls, text: Any) -> str:
        parse_seeds(str(text))
        return str(text)

    @field_validator("arm_seeds")
    @classmethod
    def _arm_seeds(cls, by_arm: dict[str, str]) -> dict[str, str]:
        for text in by_arm.values():
            parse_seeds(text)
        return by_arm

    def seeds_of(self, arm: str) -> list[int]:
        return parse_seeds(self.arm_seeds.get(arm, self.seeds))


class Plot(Settings):
    """One picture: curves over steps, bars of levels, or one run a dot."""

    file: Annotated[str, Field(pattern=r"^[a-z0-9_]+\.svg$")]
    title: str
    kind: Literal["curves", "bars", "scatter"]
    y: str
    """The metric of curves; the quantity of bars and dots."""
    x: str | None = None
    """The other quantity of dots."""
    arms: list[str] | None = None
    """Fewer arms than the grid has."""
    environments: list[str] | None = None

    def problems(self) -> list[str]:
        if self.kind == "curves":
            return [] if is_measured(self.y) else [f"plot {self.file} names no metric '{self.y}'"]
        return [
            *_not_parsed(self.y),
            *(_not_parsed(self.x) if self.x is not None else [f"plot {self.file} needs x"] * (self.kind == "scatter")),
        ]


class NotRun(Settings):
    """Something of the paper's table or figure that is not run, and why."""

    what: str
    why: str


class Grid(Settings):
    """experiments/NAME/grid.yaml."""

    title: str
    claim: str
    """What is claimed, in one sentence."""
    arms: list[str] = []
    scales: dict[str, Plan] = {}
    reads: list[str] = []
    """Experiments whose cells this one also reads."""
    table: list[str] = []
    """Quantities, a column each."""
    correlations: list[str] = []
    """Quantities whose rank correlation with `correlate_with` is tabled."""
    correlate_with: str = "last validation/success"
    plots: list[Plot] = []
    claims: list[Claim]
    not_run: list[NotRun] = []
    notes: list[str] = []
    """Where the experiment differs from the paper's, and how to read it."""


@dataclass(frozen=True, eq=False)  # a library is itself alone: expanded cells are kept by it
class Library:
    """All experiments of a folder."""

    folder: Path
    shared: Shared
    arms: dict[str, Arm]
    grids: dict[str, Grid]
    papers: dict[str, dict[str, Any]]
    smoke: bool = False
    """Lay the settings of --smoke on top of every cell."""

    def names(self, name: str) -> list[str]:
        """The experiment of a name, or all in order of importance."""
        if name == ALL:
            return list(self.shared.order)
        if name not in self.grids:
            raise UnknownName(f"unknown experiment '{name}': {did_you_mean(name, [*self.grids, ALL])}")
        return [name]

    def scale(self, name: str) -> Scale:
        if name not in self.shared.scales:
            raise UnknownName(f"unknown scale '{name}': {did_you_mean(name, self.shared.scales)}")
        return self.shared.scales[name]

    def own_cells(self, name: str, scale: str, seeds: Sequence[int] | None = None) -> list[Cell]:
        """The cells that an experiment itself runs, seed by seed, so that whole comparisons finish early."""
        plan = self.grids[name].scales.get(scale)
        if plan is None:
            return []
        arms = plan.arms if plan.arms is not None else self.grids[name].arms
        chosen = {arm: seeds if seeds is not None else plan.seeds_of(arm) for arm in arms}
        return [
            self.cell(scale, env, arm, seed, name)
            for seed in dict.fromkeys(seed for own in chosen.values() for seed in own)
            for env in plan.environments
            for arm in arms
            if seed in chosen[arm]
        ]

    def cells(self, name: str, scale: str, seeds: Sequence[int] | None = None) -> list[Cell]:
        """Every cell that an experiment reads: its own and those of the experiments it names, each once. Where two of these run an arm with other
        settings, those of the first count: a seed of an arm is never there twice."""
        found: dict[tuple[str, str, int], Cell] = {}
        for source in (name, *self.grids[name].reads):
            for cell in self.own_cells(source, scale, seeds):
                found.setdefault((cell.env, cell.arm, cell.seed), cell)
        return list(found.values())

    def cell(self, scale: str, env: str, arm: str, seed: int, name: str | None = None) -> Cell:
        """The cell of an arm, as the experiment of that name runs it."""
        return _cell(self, scale, env, arm, seed, name)

    def in_small(self, name: str) -> "Library":
        """The library with this experiment reduced to what shows in two minutes whether it works: one environment, two arms, tiny runs."""
        source = next((known for known in (name, *self.grids[name].reads) if self.grids[known].scales), name)
        plans = self.grids[source].scales
        if "tiny" not in plans:
            raise BadInput(f"experiment '{name}' runs nothing at scale tiny; there is nothing to try")
        plan = plans["tiny"]
        arms = (plan.arms if plan.arms is not None else self.grids[source].arms)[:SMOKE_ARMS]
        small = plan.model_copy(update={"environments": plan.environments[:1], "seeds": "0-1", "arms": arms, "arm_seeds": {}})
        grid = self.grids[source].model_copy(update={"scales": {"tiny": small}})
        own = self.grids[name].model_copy(update={"reads": [source] if source != name else []})
        grids = {name: own, source: grid} if source != name else {name: grid}
        return Library(self.folder, self.shared, self.arms, grids, self.papers, smoke=True)


@functools.lru_cache(maxsize=4096)
def _cell(library: Library, scale: str, env: str, arm: str, seed: int, name: str | None) -> Cell:
    chosen = library.scale(scale)
    probe = library.shared.probe
    plan = library.grids[name].scales[scale] if name is not None else None
    own = [plan.settings, plan.environment_settings.get(env, {})] if plan is not None else []
    of_arm = [library.arms[arm].settings, chosen.arms.get(arm, {})]
    layers = [chosen.settings, {"env": {"name": env}}, chosen.environments[env], probe.settings, *own, *of_arm, {"seed": seed}]
    if library.smoke:
        layers += [library.shared.smoke, probe.smoke]
    return Cell.at(scale, env, arm, seed, functools.reduce(merge, layers))


def read_library(folder: Path) -> Library:
    """All experiments of a folder, checked."""
    if not (folder / SCALES).is_file():
        raise BadInput(f"no experiments in '{folder}': {SCALES} is missing; run from the repository's root, or give --experiments DIR")
    shared = validate(Shared, read_file(folder / SCALES), SCALES)
    arms = {name: validate(Arm, given, f"{ARMS} {name}") for name, given in read_file(folder / ARMS).items()}
    grids, papers = {}, {}
    for path in sorted(folder.glob(f"*/{GRID}")):
        name = path.parent.name
        grids[name] = validate(Grid, read_file(path), f"{name}/{GRID}")
        papers[name] = read_file(path.parent / PAPER) if (path.parent / PAPER).is_file() else {}
    library = Library(folder, shared, arms, grids, papers)
    problems = list(_problems(library))
    if problems:
        raise ConfigError("\n".join(problems))
    return library


def _problems(library: Library) -> Iterable[str]:
    """Every name that refers to nothing."""
    yield from _unknown("order of scales.yaml", library.shared.order, library.grids)
    missing = set(library.grids) - set(library.shared.order)
    if missing:
        yield f"{SCALES} key 'order' lacks {', '.join(sorted(missing))}; add them by importance"
    for name, scale in library.shared.scales.items():
        yield from _unknown(f"{SCALES} scale {name}", scale.arms, library.arms)
    for name, grid in library.grids.items():
        where = f"{name}/{GRID}"
        yield from _unknown(where, grid.arms, library.arms)
        yield from _unknown(where, grid.scales, library.shared.scales)
        yield from _unknown(where, grid.reads, library.grids)
        for at, plan in grid.scales.items():
            if at in library.shared.scales:
                yield from _unknown(f"{where} scale {at}", plan.environments, library.shared.scales[at].environments)
            yield from _unknown(f"{where} scale {at}", [*(plan.arms or []), *plan.arm_seeds], grid.arms)
            yield from _unknown(f"{where} scale {at} targets", plan.targets, plan.environments)
            yield from _unknown(f"{where} scale {at} environment_settings", plan.environment_settings, plan.environments)
        read = [library.grids[other] for other in (name, *grid.reads) if other in library.grids]
        arms = {arm for source in read for arm in source.arms}
        environments = {env for source in read for plan in source.scales.values() for env in plan.environments}
        for claim in grid.claims:
            yield from _unknown(f"{where} claim '{claim.text}'", sorted(claim.rule.arms()), arms)
            yield from _unknown(f"{where} claim '{claim.text}'", sorted(claim.rule.environments_named()), environments)
        for quantity in (*grid.table, *grid.correlations, grid.correlate_with):
            yield from (f"{where}: {problem}" for problem in _not_parsed(quantity))
        for plot in grid.plots:
            yield from (f"{where}: {problem}" for problem in plot.problems())
            yield from _unknown(f"{where} plot {plot.file}", plot.arms or [], arms)
            yield from _unknown(f"{where} plot {plot.file}", plot.environments or [], environments)


def _unknown(where: str, names: Iterable[str], known: Iterable[str]) -> Iterable[str]:
    known = list(known)
    return [f"{where} names '{name}', which is not there: {did_you_mean(name, known)}" for name in names if name not in known]


def _not_parsed(quantity: str) -> list[str]:
    try:
        Quantity.parse(quantity)
    except BadInput as error:
        return [str(error)]
    return []
