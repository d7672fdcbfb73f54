"""Results, READMEs and plots: what they say, that they do not change when nothing changed, and that the committed ones are in step."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cells import CellFiles, CellRecord
from harness.grid import Library, read_library
from harness.page import END, plotted, table, write_pages
from harness.plots import Mark, Panel, Series, draw
from harness.results import compare, read_results
from tether.core.errors import BadInput
from tether.core.intervals import Estimate
from tether.runs.quantities import Quantity, estimate_words

Write = Callable[[Path, dict[str, Any]], Path]
REPOSITORY = Path(__file__).parents[3]

VALUES = {("none", 0): 0.10, ("none", 1): 0.30, ("none", 2): 0.50, ("top_p", 0): 0.20, ("top_p", 1): 0.41, ("top_p", 2): 0.62}


def fill(library: Library, folder: Path, values: dict[tuple[str, int], float] = VALUES) -> None:
    """Cells whose peak success is as given."""
    files = CellFiles(folder, "tiny")
    for (arm, seed), value in values.items():
        cell = library.cell("tiny", "sokoban", arm, seed)
        curves = {"validation/success": {0: 0.05, 15: value, 30: value / 2}}
        files.write(cell, CellRecord(cell.id, seed, 30, "all 30 steps done", 60.0, curves, {"machine": "one card"}))


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_page_of_an_experiment(library: Library) -> None:
    fill(library, library.folder)
    write_pages(library, ["one", "two"])
    text = (library.folder / "one" / "README.md").read_text(encoding="utf-8")
    assert "**holds**" in text and "sokoban: top_p - none: +11.0 [+8.5, +13.5], n = 3 paired (holds)" in text
    assert "| sokoban | no filter | 30.0 [3.9, 82.0], n = 3 |" in text
    assert "WebShop: not there." in text and "1\\|2" in text and "![Success](tiny_success.svg)" in text
    assert "6 cells, about 3 minutes" in text and "6 minutes of steps in all, on one card" in text
    results = read_results(library, "one", "tiny", CellFiles(library.folder, "tiny"))
    curves, bars, dots = (plotted(library, plot, results) for plot in library.grids["one"].plots)
    assert [trace.name for trace in curves.data if trace.name] == ["no filter", "top-p 0.9"]  # type: ignore[union-attr]
    assert list(curves.data[1].x) == [0, 15, 30] and list(curves.data[1].y) == pytest.approx([0.05, 0.3, 0.15])  # type: ignore[union-attr]
    assert bars.data[0].y == pytest.approx((0.3,)) and bars.data[0].error_y.array == pytest.approx((0.52,), abs=5e-3)  # type: ignore[union-attr]
    assert len(dots.data[0].x) == 3  # type: ignore[union-attr]
    assert (library.folder / "one" / "results" / "tiny.json").is_file()


def test_writing_again_changes_no_byte_and_keeps_what_was_written_by_hand(library: Library) -> None:
    fill(library, library.folder)
    write_pages(library, ["one", "two"])
    readme = library.folder / "one" / "README.md"
    readme.write_text(readme.read_text(encoding="utf-8") + "\n## By hand\n", encoding="utf-8")
    before = everything(library.folder)
    write_pages(library, ["one", "two"])
    assert everything(library.folder) == before and readme.read_text(encoding="utf-8").endswith("## By hand\n")


def test_a_readme_without_markers_is_refused(library: Library) -> None:
    (library.folder / "one" / "README.md").write_text("# mine\n", encoding="utf-8")
    with pytest.raises(BadInput, match="put them back"):
        write_pages(library, ["one"])


def test_nothing_run_is_said_so(library: Library) -> None:
    write_pages(library, ["one"])
    text = (library.folder / "one" / "README.md").read_text(encoding="utf-8")
    assert "Cells: 0 of 6 done." in text and "**not run**" in text and "![" not in text


def test_seeds_that_are_missing_change_no_verdict(library: Library) -> None:
    """Seeds 0 and 1 of three: 0.10 and 0.11 apart, 0.105 +- 12.706 x 0.005 = [4.1, 16.9] points, which holds; one arm alone says nothing."""
    fill(library, library.folder, {at: value for at, value in VALUES.items() if at[1] < 2})
    write_pages(library, ["one"])
    text = (library.folder / "one" / "README.md").read_text(encoding="utf-8")
    assert "Cells: 4 of 6 done." in text and "+10.5 [+4.1, +16.9], n = 2 paired (holds)" in text
    results = read_results(library, "one", "tiny", CellFiles(library.folder, "tiny"))
    assert [name.partition("-seed")[2][0] for name in results.missing] == ["2", "2"]


def test_own_settings_levels_and_budgets_are_on_the_page(tmp_path: Path, files: dict[str, Any], write_experiments: Write) -> None:
    plan = files["one"]["scales"]["tiny"]
    plan["targets"], plan["settings"] = {"sokoban": {"level": 0.24, "million_tokens": 3.0}}, {"evaluation": {"every": 5}}
    library = read_library(write_experiments(tmp_path, files))
    write_pages(library, ["one"])
    text = (tmp_path / "one" / "README.md").read_text(encoding="utf-8")
    assert "Here with `evaluation.every` 5.\n\nLevel of success and budget: sokoban 24%, 3 million tokens.\n" in text


def test_failed_cells_are_listed(library: Library) -> None:
    cell = library.own_cells("one", "tiny")[0]
    CellFiles(library.folder, "tiny").write_failure(cell, "exit code 1: no memory")
    write_pages(library, ["one"])
    assert f"failed: `{cell.id}`: exit code 1: no memory" in (library.folder / "one" / "README.md").read_text(encoding="utf-8")


def test_verdicts_at_a_glance(library: Library) -> None:
    fill(library, library.folder)
    glance = library.folder / "README.md"
    glance.write_text(f"# Experiments\n\n<!-- written by `tether reproduce`: do not edit -->\n{END}\nby hand\n", encoding="utf-8")
    write_pages(library, ["one"])
    text = glance.read_text(encoding="utf-8")
    assert "| [one](one/README.md) | The filter raises peak success. | not in the paper | holds |" in text
    assert text.endswith("by hand\n")


def test_a_run_that_stopped_is_drawn_with_its_last_value(library: Library) -> None:
    """One run goes 0.2, 0.4, 0.6; the other stops after step 20 of 30, at 0.0. Its line falls to 0.0 by then and stays there."""
    files = CellFiles(library.folder, "tiny")
    for seed, curve in enumerate(({0: 0.2, 15: 0.4, 30: 0.6}, {0: 0.2, 20: 0.0})):
        cell = library.cell("tiny", "sokoban", "none", seed)
        files.write(cell, CellRecord(cell.id, seed, 30, "done", 60.0, {"validation/success": curve}, {"machine": "one card"}))
    figure = plotted(library, library.grids["one"].plots[0], read_results(library, "one", "tiny", files))
    line = figure.data[-1]  # type: ignore[union-attr]
    assert list(line.x) == [0, 15, 20, 30] and list(line.y) == pytest.approx([0.2, 0.225, 7 / 30, 0.3])


def test_other_seeds_are_compared_with_the_published_levels(library: Library, tmp_path: Path) -> None:
    """Published none: 0.1, 0.3, 0.5. Again close by agrees; again at 0.99 does not; one seed cannot tell."""
    fill(library, library.folder)
    published = read_results(library, "one", "tiny", CellFiles(library.folder, "tiny"))
    answers = {}
    for name, values in (("near", (0.2, 0.3, 0.45)), ("far", (0.99, 0.99, 0.99)), ("few", (0.3,))):
        fill(library, tmp_path / name, {("none", 3 + number): value for number, value in enumerate(values)})
        again = read_results(library, "one", "tiny", CellFiles(tmp_path / name, "tiny"), [3, 4, 5])
        (pair,) = compare(published, again)
        answers[name] = pair.agrees
    assert answers == {"near": True, "far": False, "few": None}


def test_the_same_seeds_again_are_not_paired(library: Library, tmp_path: Path) -> None:
    fill(library, library.folder)
    fill(library, tmp_path / "again")
    published, again = (read_results(library, "one", "tiny", CellFiles(folder, "tiny")) for folder in (library.folder, tmp_path / "again"))
    assert [pair.difference.how for pair in compare(published, again)] == ["unpaired", "unpaired"]


def test_words_of_an_estimate() -> None:
    assert estimate_words(Estimate(0.1, 0.05, 0.15, 3, "paired"), Quantity("peak", "validation/success"), signed=True) == (
        "+10.0 [+5.0, +15.0], n = 3 paired"
    )
    assert estimate_words(Estimate(0.5, -float("inf"), float("inf"), 1, "seeds"), None) == "0.50, n = 1"


def test_tables_escape_bars() -> None:
    assert table(["a"], [["x|y"]]) == "| a |\n| --- |\n| x\\|y |"


@pytest.mark.parametrize("kind", ["curves", "bars", "scatter"])
def test_every_series_has_its_name_and_one_colour_in_all_panels(kind: str) -> None:
    panels = [Panel(env, [Series("a & b", [Mark(0, 0.1, 0.0, 0.2), Mark(10, 0.3, 0.2, 0.4)])]) for env in ("one", "two")]
    figure = draw("title", panels, kind=kind, x_label="step", y_label="y")
    named = [trace for trace in figure.data if trace.name == "a & b"]
    assert [trace.showlegend for trace in named] == [True, False]
    assert len({str((trace.line or trace.marker).color if kind == "curves" else trace.marker.color) for trace in named}) == 1


def test_the_committed_pages_are_in_step_with_the_committed_cells(tmp_path: Path) -> None:
    """Written again from the committed cells, no file of experiments/ changes."""
    shutil.copytree(REPOSITORY / "experiments", tmp_path / "experiments")
    before = everything(tmp_path)
    library = read_library(tmp_path / "experiments")
    write_pages(library, library.shared.order)
    after = everything(tmp_path)
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    assert changed == [], "run `tether reproduce all` on the finished cells, and commit what it writes"
