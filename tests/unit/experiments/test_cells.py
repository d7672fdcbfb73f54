"""Which runs are one cell, and the file of a finished one."""

from pathlib import Path

import pytest

from tether.core.errors import BadInput, ConfigError
from tether.experiments.cells import Cell, CellFiles, CellRecord, identity_of

PLAIN = {"env": {"name": "sokoban"}, "filter": {"strategy": "all"}, "seed": 1}


def test_a_default_that_is_spelled_out_is_the_same_cell() -> None:
    spelled = {**PLAIN, "model": {"name": "tiny"}, "rollout": {"num_groups": 8, "temperature": 1.0}, "learner": {"learning_rate": 1e-4}}
    assert identity_of(PLAIN) == identity_of(spelled)


def test_defaults_of_an_algorithm_are_not_part_of_an_identity() -> None:
    dapo = identity_of({"env": {"name": "sokoban"}, "algorithm": {"name": "dapo"}})
    assert not any(key.startswith("filter.") for key in dapo)


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"steps": 7}, {"algorithm": {"kl_coef": 0.1}}, {"env": {"name": "sokoban", "options": {"boxes": 2}}}]
)
def test_what_decides_the_result_makes_another_cell(change: dict) -> None:
    assert identity_of(PLAIN) != identity_of({**PLAIN, **change})


@pytest.mark.parametrize(
    "change",
    [{"checkpoint": {"every": 3, "best": False}}, {"rollout": {"max_rows": 7, "cache_gb": 1.0}}, {"learner": {"micro_tokens": 99}}],
)
def test_speed_memory_and_disk_do_not(change: dict) -> None:
    assert identity_of(PLAIN) == identity_of({**PLAIN, **change})


def test_ids_are_readable_and_stable() -> None:
    """The hash of this cell stands here: ids of published cells must not change with the code."""
    cell = Cell.of("tiny", "sokoban", "none", 1, PLAIN)
    assert cell.identity == {
        "algorithm.name": "grpo",
        "env.name": "sokoban",
        "filter.strategy": "all",
        "model.name": "tiny",
        "seed": 1,
        "steps": 100,
    }
    assert cell.id == "sokoban-none-seed1-87b3f351"


def test_a_wrong_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'filter\.keep'"):
        identity_of({**PLAIN, "filter": {"kep": 0.5}})


def record(cell: Cell) -> CellRecord:
    return CellRecord(cell.id, 1, 100, "all 100 steps done", 12.5, {"validation/success": {0: 0.1, 100: 0.5}}, {"commit": "abc"})


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    cell, files = Cell.of("tiny", "sokoban", "none", 1, PLAIN), CellFiles(tmp_path, "tiny")
    assert files.read(cell) is None and not files.has(cell)
    path = files.write(cell, record(cell))
    assert path == tmp_path / "cells" / "tiny" / f"{cell.id}.json"
    assert files.read(cell) == record(cell)


def test_a_failure_is_on_record_until_the_cell_is_done(tmp_path: Path) -> None:
    cell, files = Cell.of("tiny", "sokoban", "none", 1, PLAIN), CellFiles(tmp_path, "tiny")
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
