"""Which runs are one cell, and the file of a finished one."""

from pathlib import Path

import pytest

from harness.cells import Cell, CellFiles, CellRecord
from tether.core.errors import BadInput

PLAIN = {"env": {"name": "sokoban"}, "filter": {"strategy": "all"}, "seed": 1}


def test_ids_are_readable_and_stable() -> None:
    """The hash of this cell stands here: ids of published cells must not change with the code."""
    cell = Cell.at("tiny", "sokoban", "none", 1, PLAIN)
    assert cell.identity == {
        "algorithm.name": "grpo",
        "env.name": "sokoban",
        "filter.strategy": "all",
        "model.name": "tiny",
        "seed": 1,
        "steps": 100,
    }
    assert cell.id == "sokoban-none-seed1-87b3f351"


def record(cell: Cell) -> CellRecord:
    return CellRecord(cell.id, 1, 100, "all 100 steps done", 12.5, {"validation/success": {0: 0.1, 100: 0.5}}, {"commit": "abc"})


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    cell, files = Cell.at("tiny", "sokoban", "none", 1, PLAIN), CellFiles(tmp_path, "tiny")
    assert files.read(cell) is None and not files.has(cell)
    path = files.write(cell, record(cell))
    assert path == tmp_path / "cells" / "tiny" / f"{cell.id}.json"
    assert files.read(cell) == record(cell)


def test_a_failure_is_on_record_until_the_cell_is_done(tmp_path: Path) -> None:
    cell, files = Cell.at("tiny", "sokoban", "none", 1, PLAIN), CellFiles(tmp_path, "tiny")
    files.write_failure(cell, "exit code 1: out of memory")
    assert files.failure(cell) == "exit code 1: out of memory" and not files.has(cell)
    files.write(cell, record(cell))
    assert files.failure(cell) is None


def test_a_broken_file_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"schema": 1, "id"', encoding="utf-8")
    with pytest.raises(BadInput, match="restore the file, or delete it"):
        CellRecord.read(tmp_path / "x.json")
    (tmp_path / "y.json").write_text('{"schema": 9}', encoding="utf-8")
    with pytest.raises(BadInput, match="schema 9"):
        CellRecord.read(tmp_path / "y.json")
