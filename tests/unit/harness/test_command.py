"""`tether reproduce`: what is refused in one line, the list, and pages from the cells that are there."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from harness.cells import CellFiles
from harness.command import Harvester
from harness.grid import Library
from tether.cli import reproduce
from tether.cli.main import main

EXPERIMENTS = Path(__file__).parents[3] / "experiments"


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *words])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "which experiment? name one"),
        (("tabel_4",), "unknown experiment 'tabel_4': did you mean 'table_4'?"),
        (("table_4", "--scale", "small"), "unknown scale 'small'"),
        (("table_4", "--seeds", "x"), "seeds are 'x'; write them as 0-2"),
        (("table_4", "--jobs", "0"), "--jobs is 0; give at least 1"),
        (("table_4", "--max-minutes", "0"), "--max-minutes is 0; give more than 0"),
        (("all", "--again"), "--again takes one experiment"),
        (("table_5", "--scale", "qwen-1.5b"), "table_5 has no cells at scale qwen-1.5b"),
        (("table_4", "--experiments", "nowhere"), "no experiments in 'nowhere'"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = () if "--experiments" in words else ("--experiments", str(EXPERIMENTS))
    assert call(*words, *folder) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.strip().splitlines()) == 1


def test_the_list_names_every_experiment_and_loads_no_torch(library: Library) -> None:
    """Of a small folder: the committed pages (test_page.py) are written from the results of the real ones."""
    code = "import sys; from tether.cli.main import main\ntry:\n    main(['reproduce', '--list', '--experiments', sys.argv[1]])\nexcept SystemExit:\n    pass\n"
    code += "print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code, str(library.folder)], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "False"
    assert [line.split()[0] for line in said.splitlines() if not line.startswith((" ", "all at", "False"))] == ["one", "two"]
    assert "all at tiny: 0 of 6 cells, about 3 min of one GPU left" in said


@pytest.mark.long
def test_pages_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(EXPERIMENTS, tmp_path / "experiments"))
    readme = folder / "table_6" / "README.md"
    readme.unlink(missing_ok=True)
    assert call("table_6", "--no-run", "--experiments", str(folder)) == 0
    assert readme.is_file() and "Peak success falls from Q1 to Q4." in capsys.readouterr().out


def test_outside_a_clone_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "__file__", str(tmp_path / "lib" / "site-packages" / "tether" / "cli" / "reproduce.py"))
    assert call("--list") == 2
    said = capsys.readouterr().err
    assert "clone Tether's repository" in said and len(said.strip().splitlines()) == 1


def test_a_finished_run_is_harvested_and_cleared_away(library: Library, tmp_path: Path, finished_run: Callable[..., Path]) -> None:
    cell, other = library.own_cells("one", "tiny", [0])[:2]
    files = CellFiles(tmp_path, "tiny")
    folder = finished_run(tmp_path / "runs" / cell.id, cell)
    (folder / "report.html").write_text("x")
    harvester = Harvester([cell, other], files, Console(quiet=True))
    harvester.on_finished(cell, folder)
    harvester.on_failed(other, "exit code 3: the model does not fit")
    assert files.read(cell).curves["validation/success"] == {0: 0.1, 30: 0.5}  # type: ignore[union-attr]
    left = {path.name for path in folder.iterdir()}
    assert not left & {"checkpoints", "report.html", "trajectories.jsonl", "trajectories.sqlite"} and "metrics.jsonl" in left
    assert files.failure(other) == "exit code 3: the model does not fit"
