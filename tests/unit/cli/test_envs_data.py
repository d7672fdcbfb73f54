"""`tether envs --check --data`: what an environment makes of a file, row by row, with reasons and examples."""

import json
from pathlib import Path
from typing import Any

import pytest

from tether.cli.main import main
from tether.envs.checker.data import check_data, data_environments


def _run(words: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    return int(stopped.value.code or 0)


def _file(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_rows_loaded_refused_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": n + 1, "source": "by hand"} for n in range(20)]
    rows[3] = {"question": "", "answer": 4}
    rows[5] = {"question": "Why?", "answer": None}
    rows[9] = {"question": "Where?", "answer": None}
    source = _file(tmp_path / "rows.jsonl", rows)
    assert _run(["envs", "--check", "--env", "metamathqa", "--data", source]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"metamathqa, {source}"
    assert out[1].startswith("  loaded 17 rows (split=all; by hash: train ")
    assert out[2:5] == ["    What is 0 + 1? -> 1", "    What is 1 + 1? -> 2", "    What is 2 + 1? -> 3"]
    assert out[5:] == [
        "  refused 3 rows: fix them, or leave them out with bad_rows=skip",
        "    2 x answer is None; expected text",
        f"      {source}:6, {source}:10",
        "    1 x question is ''; expected text",
        f"      {source}:4",
        "  columns that are not read: source",
    ]


def test_columns_under_other_names_and_the_name_as_an_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = _file(tmp_path / "rows.jsonl", [{"Question": "What is 1 + 1?", "Answer": 2}] * 3)
    assert _run(["envs", "metamathqa", "--check", "--data", source]) == 1
    assert "    3 x has no question: expected query and response, question and answer" in capsys.readouterr().out
    for fields in (["--fields", "question=Question,answer=Answer"], ["--fields", "question=Question", "--fields", "answer=Answer"]):
        assert _run(["envs", "metamathqa", "--check", "--data", source, *fields]) == 0
        assert "loaded 3 rows" in capsys.readouterr().out


def test_without_a_name_every_environment_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = _file(tmp_path / "rows.jsonl", [{"target": 98, "nums": [44, 19, 35]}] * 4)
    assert _run(["envs", "--check", "--data", source]) == 0
    out = capsys.readouterr().out
    assert "countdown: 4 rows loaded, 0 refused" in out and "metamathqa: 0 rows loaded, 4 refused" in out
    assert "\n\ncountdown, " in out and "    98 from 44, 19, 35" in out
    assert data_environments() == ["countdown", "deepcoder", "metamathqa", "qa", "searchqa", "sokoban"]


def test_problems_that_cannot_be_judged_are_left_out_and_refuse_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = json.dumps({"inputs": ["1"], "outputs": ["2"]})
    rows = [
        {"question": "Add one.", "input_output": tests},
        {"question": "If there are many answers, print any of them.", "input_output": tests},
    ]
    source = _file(tmp_path / "rows.jsonl", rows)
    assert _run(["envs", "--check", "--env", "deepcoder", "--data", source]) == 0
    out = capsys.readouterr().out
    assert "  loaded 1 rows" in out and "    Add one.... (1 tests, standard input)" in out
    assert "  left out 1 rows: always left out\n    1 x the statement accepts several answers, which takes a special judge" in out


def test_levels_and_unanswerable_questions(tmp_path: Path) -> None:
    (tmp_path / "levels").mkdir()
    (tmp_path / "levels" / "a.txt").write_text("#####\n#@$.#\n#####\n\n###\n#@#\n###\n")
    report = check_data("sokoban", str(tmp_path / "levels"))
    assert (report.loaded, report.num_refused, report.examples) == (1, 1, ["3 x 5, 1 box"])
    assert next(iter(report.refused.values())).places == [f"levels file '{tmp_path}/levels/a.txt', line 5"]
    rows = [{"question": "q?", "answer": "a", "answerable": answerable} for answerable in (True, False)]
    report = check_data("searchqa", _file(tmp_path / "q.jsonl", rows))
    assert (report.loaded, report.num_left_out, report.num_refused, report.ok) == (1, 1, 0, True)


def test_reasons_that_differ_in_values_only_are_counted_as_one(tmp_path: Path) -> None:
    rows = [{"target": 10, "nums": [number]} for number in ("a", "b", 0.5, 7.25, 3)]
    report = check_data("countdown", _file(tmp_path / "rows.jsonl", rows))
    assert report.loaded == 1 and [rows.count for rows in report.refused.values()] == [4]
    assert next(iter(report.refused.values())).reason == "a number of nums is 'a'; expected a whole number from 1 to 1000000000"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "rows.jsonl"], "--data says which file to check; add --check"),
        (["--check", "--fields", "a=b"], "--fields names columns of a data file; add --data FILE"),
        (["--check", "--env", "metamathqa", "--data", "nothing.jsonl"], "does not exist"),
        (["--check", "--env", "metamathq", "--data", "nothing.jsonl"], "did you mean 'metamathqa'"),
        (
            ["--check", "--env", "webshop", "--data", "nothing.jsonl"],
            "reads no data file that can be checked row by row; those that do: countdown",
        ),
        (["--check", "frozen_lake", "--env", "sokoban", "--data", "x"], "got the environments 'frozen_lake' and 'sokoban'"),
        (
            ["--check", "--env", "metamathqa", "--data", "x.jsonl", "--fields", "question"],
            "--fields got 'question'; write it as NAME=COLUMN",
        ),
        (["--check", "--data", "nothing.jsonl"], "no environment reads 'nothing.jsonl'"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["envs", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and error.startswith("tether: ") and "\n" not in error
