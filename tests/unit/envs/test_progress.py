"""A slow load says how far it is; a quick one says nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tether.envs import dataset
from tether.envs.dataset import load_instances, with_progress
from tether.envs.searchqa.corpus import Document, of_documents, of_file
from tether.envs.searchqa.index import write_index
from tether.envs.sokoban.levels import load_levels


def clock(*seconds: float) -> Iterator[float]:
    yield from seconds


def test_a_quick_load_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    times = clock(0.0, 0.5, 1.0, 1.9, 1.95)
    assert list(with_progress("abc", "reading", "rows", lambda: next(times))) == ["a", "b", "c"]
    assert not caplog.messages


def test_a_slow_load_says_how_far_it_is_and_when_it_is_done(caplog: pytest.LogCaptureFixture) -> None:
    times = clock(0.0, 1.0, 2.5, 3.0, 12.4, 12.6, 12.7, 13.0)
    assert len(list(with_progress("abcdef", "sums: reading rows.jsonl", "rows", lambda: next(times)))) == 6
    assert caplog.messages == [
        "sums: reading rows.jsonl: 2 rows in 2 s, continuing",
        "sums: reading rows.jsonl: 5 rows in 13 s, continuing",
        "sums: reading rows.jsonl: 6 rows, done in 13.0 s",
    ]


def test_time_after_the_last_item_counts(caplog: pytest.LogCaptureFixture) -> None:
    times = clock(0.0, 0.1, 5.0)
    list(with_progress("a", "reading", "rows", lambda: next(times)))
    assert caplog.messages == ["reading: 1 rows, done in 5.0 s"]


def test_every_load_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(dataset, "FIRST_SECONDS", 0.0)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": 0, "contents": "one"}\n')
    load_instances(str(rows), lambda row: row.value, env="sums", default="generated ones", bad_rows="error")
    assert f"sums: reading {rows}: 1 rows, done in 0.0 s" in caplog.messages
    of_file(str(rows), "error")
    assert f"searchqa: hashing {rows}: 1 MiB, done in 0.0 s" in caplog.messages
    (tmp_path / "index").mkdir()
    write_index(tmp_path / "index", of_documents([Document("0", "", "text")]).read())
    assert any(message.startswith("searchqa: indexing the corpus: 1 documents") for message in caplog.messages)
    levels = tmp_path / "levels.txt"
    levels.write_text("#####\n#@$.#\n#####\n")
    load_levels(levels)
    assert f"sokoban: reading {levels}: 1 levels, done in 0.0 s" in caplog.messages
