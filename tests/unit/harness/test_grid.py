"""Grids: expanded, shared, refused with the nearest name; and all experiments of the repository."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.claims import Outcomes, Verdict
from harness.grid import Library, read_library
from tether.core.errors import BadInput, ConfigError, UnknownName
from tether.training.sweep import parse_seeds

EXPERIMENTS = Path(__file__).parents[3] / "experiments"

Files = dict[str, Any]
Write = Callable[[Path, Files], Path]


@pytest.fixture(scope="module")
def published() -> Library:
    return read_library(EXPERIMENTS)


# ------------------------------------------------------------------------------------------------------------ a small folder


def test_cells_go_seed_by_seed(library: Library) -> None:
    cells = library.own_cells("one", "tiny")
    assert [(cell.seed, cell.arm) for cell in cells] == [(seed, arm) for seed in (0, 1, 2) for arm in ("none", "top_p")]
    assert cells[1].settings["filter"] == {"strategy": "top_p", "keep": 0.9} and cells[1].settings["seed"] == 0
    assert library.cells("two", "tiny") == cells  # it has none of its own and reads those
    assert [cell.seed for cell in library.own_cells("one", "tiny", [7])] == [7, 7]


def test_probe_settings_enter_every_cell(tmp_path: Path, files: Files, write_experiments: Write) -> None:
    files["scales"]["probe"] = {"settings": {"diagnosis": {"every": 3}}, "smoke": {"diagnosis": {"every": 1}}}
    probed = read_library(write_experiments(tmp_path, files))
    assert probed.own_cells("one", "tiny")[0].settings["diagnosis"] == {"every": 3}
    assert probed.in_small("one").own_cells("one", "tiny")[0].settings["diagnosis"] == {"every": 1}


def test_an_arm_may_differ_at_a_scale(tmp_path: Path, files: Files, write_experiments: Write) -> None:
    files["scales"]["scales"]["tiny"]["arms"] = {"top_p": {"filter": {"keep": 0.5}}}
    none, top_p = read_library(write_experiments(tmp_path, files)).own_cells("one", "tiny", [0])
    assert top_p.settings["filter"] == {"strategy": "top_p", "keep": 0.5}
    assert none.settings.get("filter", {}).get("keep") != 0.5


def test_an_experiment_may_differ_at_a_scale_and_an_arm_may_have_other_seeds(
    tmp_path: Path, files: Files, write_experiments: Write
) -> None:
    plan = files["one"]["scales"]["tiny"]
    plan["settings"], plan["arm_seeds"] = {"evaluation": {"every": 3}, "steps": 60}, {"top_p": "0,4"}
    changed = read_library(write_experiments(tmp_path, files))
    cells = changed.own_cells("one", "tiny")
    assert [(cell.seed, cell.arm) for cell in cells] == [(0, "none"), (0, "top_p"), (1, "none"), (2, "none"), (4, "top_p")]
    assert all(cell.settings["evaluation"] == {"every": 3} and cell.steps == 60 for cell in cells)
    assert changed.scale("tiny").minutes_of(cells) == 5.0  # five cells of half a minute, twice as long
    assert changed.cell("tiny", "sokoban", "none", 0).steps == 30  # elsewhere
    assert changed.in_small("one").own_cells("one", "tiny")[0].settings["evaluation"] == {"every": 3}


def test_an_experiment_may_differ_in_an_environment_and_no_seed_of_an_arm_is_read_twice(
    tmp_path: Path, files: Files, write_experiments: Write
) -> None:
    """Cells of two warm starts, say: who reads both has of every seed of an arm that of the first, and of the second what the first does not run."""
    own = {"environments": ["sokoban", "frozen_lake"], "seeds": "0-2", "environment_settings": {"sokoban": {"steps": 60}}}
    files["one"]["scales"]["tiny"] = {**own, "seeds": "0-3"}
    files["two"] |= {"arms": ["none"], "scales": {"tiny": {**own, "environment_settings": {"sokoban": {"steps": 90}}}}}
    library = read_library(write_experiments(tmp_path, files))
    assert {(cell.env, cell.steps) for cell in library.own_cells("one", "tiny")} == {("sokoban", 60), ("frozen_lake", 30)}
    read = library.cells("two", "tiny")
    assert len(read) == len({(cell.env, cell.arm, cell.seed) for cell in read}) == 2 * 2 * 4
    assert {(cell.arm, cell.seed) for cell in read if cell.steps == 90} == {("none", 0), ("none", 1), ("none", 2)}
    assert {cell.arm for cell in read if cell.seed == 3} == {"none", "top_p"}


def test_smoke_is_one_environment_two_arms_and_small_runs(library: Library) -> None:
    for name in ("one", "two"):
        small = library.in_small(name)
        cells = small.cells(name, "tiny")
        assert [(cell.arm, cell.seed) for cell in cells] == [("none", 0), ("top_p", 0), ("none", 1), ("top_p", 1)]
        assert all(cell.steps == 2 and cell.settings["rollout"]["num_groups"] == 2 for cell in cells)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("one", "arms"), ["none", "top_q"], "names 'top_q', which is not there: did you mean 'top_p'"),
        (("one", "scales", "tiny", "environments"), ["sokobann"], "did you mean 'sokoban'"),
        (("one", "scales", "tiny", "seeds"), "2-0", "seeds are '2-0'"),
        (("one", "scales", "tiny", "arm_seeds"), {"top_q": "0-1"}, "did you mean 'top_p'"),
        (("one", "scales", "tiny", "arm_seeds"), {"top_p": "1-0"}, "seeds are '1-0'"),
        (("one", "scales", "tiny", "targets"), {"lake": {"level": 0.5, "million_tokens": 1}}, "targets names 'lake'"),
        (("one", "scales", "tiny", "environment_settings"), {"lake": {}}, "environment_settings names 'lake'"),
        (("one", "table"), ["peak validation/succes"], "validation/success"),
        (("one", "claims", 0, "rule", "contrast"), {"top_pp": 1}, "did you mean 'top_p'"),
        (("one", "claims", 0, "rule", "environments"), ["lake"], "names 'lake'"),
        (("one", "claims", 0, "rule", "kind"), "over", "claims.0.rule"),
        (("one", "plots", 0, "y"), "validation/sucess", "plot success.svg names no metric"),
        (("one", "titel"), "x", "unknown one/grid.yaml key 'titel': did you mean 'title'"),
        (("two", "reads"), ["on"], "did you mean 'one'"),
        (("scales", "order"), ["one"], "lacks two"),
        (
            ("scales", "scales", "tiny", "arms"),
            {"top_q": {}},
            "scales.yaml scale tiny names 'top_q', which is not there: did you mean 'top_p'",
        ),
        (("arms", "none", "words"), None, "arms.yaml none key 'words'"),
    ],
)
def test_a_name_that_refers_to_nothing_is_refused(
    tmp_path: Path, files: Files, write_experiments: Write, path: tuple[Any, ...], value: Any, message: str
) -> None:
    place: Any = files
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(ConfigError, match=message):
        read_library(write_experiments(tmp_path, files))


def test_a_folder_without_experiments_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--experiments DIR"):
        read_library(tmp_path)


def test_unknown_experiments_and_scales(library: Library) -> None:
    assert library.names("all") == ["one", "two"]
    with pytest.raises(UnknownName, match="did you mean 'one'"):
        library.names("ome")
    with pytest.raises(UnknownName, match="did you mean 'tiny'"):
        library.scale("tinny")


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "0,,1"])
def test_seeds_that_are_none(text: str) -> None:
    with pytest.raises(BadInput, match="write them as"):
        parse_seeds(text)


# ----------------------------------------------------------------------------------------------------------- the repository


def test_every_folder_is_in_the_order(published: Library) -> None:
    folders = {path.parent.name for path in EXPERIMENTS.glob("*/grid.yaml")}
    assert folders == set(published.shared.order) == set(published.papers) and len(folders) == 21
    assert all(published.papers.values()), "a folder lacks paper.yaml"


def test_every_cell_has_valid_settings_and_a_hash_of_its_own(published: Library) -> None:
    """Cells are checked by `tether train`'s own settings; two arms that are the same run would be run twice."""
    counts = {}
    for scale in published.shared.scales:
        cells = {cell.id: cell for name in published.grids for cell in published.own_cells(name, scale)}
        assert len({cell.id.rpartition("-")[2] for cell in cells.values()}) == len(cells)
        counts[scale] = len(cells)
    assert counts.pop("tiny") > 200 and counts == {"qwen-1.5b": 136, "tiny-vl": 24, "qwen-vl-3b": 24}


def test_every_published_cell_is_found_by_its_settings(published: Library) -> None:
    """A setting that is added later must not change the id of a run that was made before."""
    for scale in published.shared.scales:
        stored = {path.stem for path in (EXPERIMENTS / "cells" / scale).glob("*.json")}
        seeds = sorted({int(name.rpartition("-seed")[2].partition("-")[0]) for name in stored})
        ids = {cell.id for name in published.grids for cell in published.own_cells(name, scale, seeds)}
        assert bool(stored) == (scale != "qwen-vl-3b") and not stored - ids, "of these no cell was run"


@pytest.mark.parametrize("name", [path.parent.name for path in sorted(EXPERIMENTS.glob("*/grid.yaml"))])
def test_every_experiment_can_be_judged_and_tried(published: Library, name: str) -> None:
    grid = published.grids[name]
    assert grid.claims
    for claim in grid.claims:
        assert claim.rule.judge(Outcomes([])).verdict is Verdict.NOT_RUN
    if name == "modality":  # of a model that sees
        with pytest.raises(BadInput, match="runs nothing at scale tiny"):
            published.in_small(name)
        return
    plan = next((published.grids[source].scales.get("tiny") for source in (name, *grid.reads) if published.grids[source].scales), None)
    assert plan is not None and len(parse_seeds(plan.seeds)) >= 3
    assert 1 <= len(published.in_small(name).cells(name, "tiny")) <= 4


@pytest.mark.parametrize("name", [path.parent.name for path in sorted(EXPERIMENTS.glob("*/grid.yaml"))])
def test_tables_of_the_paper_are_complete(published: Library, name: str) -> None:
    paper = published.papers[name]
    assert {"source", "what"} <= set(paper) and "arXiv 2604.06268v1" in paper["source"]
    assert all(len(row) == len(paper["columns"]) for row in paper.get("rows", []))
