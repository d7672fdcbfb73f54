"""Rows of data sets: every format, the place of each row, bad rows named or skipped, pools that keep their splits."""

import gzip
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from tether.core.enums import Split
from tether.core.errors import BadInput, MissingDependency
from tether.envs.dataset import Pool, Row, RowError, load_instances, read_rows
from tether.envs.registry import make_env
from tether.envs.splits import split_of

ROWS = [{"a": 1}, {"a": 2}, {"a": 3}]


def _number(row: Row) -> int:
    (value,) = row.fields("a")
    if not isinstance(value, int):
        raise RowError(f"'a' is {value!r}; expected a whole number")
    return value


def _load(source: Path | str, bad_rows: str = "error") -> list[int]:
    return load_instances(str(source), _number, env="sums", default="the generated sums", bad_rows=bad_rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.json.gz"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    text = "\n".join(map(json.dumps, ROWS)) if "jsonl" in name else json.dumps(ROWS, indent=1)
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if name.endswith("gz") else text.encode())
    assert _load(path) == [1, 2, 3]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert _load(tmp_path / "rows.parquet") == [1, 2, 3]
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(BadInput, match="cannot read"):
        _load(tmp_path / "bad.parquet")


def test_places_are_lines(tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [row.place for row in read_rows(str(lines), env="sums", default="d")] == [f"{lines}:1", f"{lines}:3"]
    array = tmp_path / "rows.json"
    array.write_text('[\n {"a": 1},\n {"a":\n 2},\n\n {"a": 3}]')
    assert [(row.value["a"], row.place) for row in read_rows(str(array), env="sums", default="d")] == [
        (1, f"{array}:2"),
        (2, f"{array}:3"),
        (3, f"{array}:6"),
    ]
    table = tmp_path / "table.json"
    table.write_text('{"x": [1], "y": [2]}')
    assert [row.value for row in read_rows(str(table), env="sums", default="d")] == [("x", [1]), ("y", [2])]


def test_lines_in_a_file_called_json_are_read_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    assert _load(path) == [1, 2, 3]
    path.write_text('{"a": 1}\n{"b": 2}\n')
    with pytest.raises(BadInput, match=r"rows\.json:2: has no field 'a'"):
        _load(path)


def test_integers_may_have_any_length(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.json"):
        (tmp_path / name).write_text(f'{"" if name.endswith("l") else "["}{{"a": {"9" * 6000}}}{"" if name.endswith("l") else "]"}')
        assert _load(tmp_path / name) == [10**6000 - 1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"b": 1}', "has no field 'a' \\(it has b\\)"),
        ("{}", "has no field 'a' \\(it has none\\)"),
        ("[1]", "is a list; expected an object with a"),
        ('{"a": "one"}', "'a' is 'one'; expected a whole number"),
        ("{", "is not JSON"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(tmp_path: Path, line: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n' + line + '\n{"a": 3}\n')
    with pytest.raises(BadInput, match=rf"rows.jsonl:2: {reason}.*bad_rows=skip"):
        _load(path)
    with caplog.at_level(logging.WARNING):
        assert _load(path, "skip") == [1, 3]
    assert "skipped 1 of 3 rows" in caplog.text and "rows.jsonl:2" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("rows.json", b'[{"a": 1}, {"a": ', "rows.json:1: is not JSON"),
        ("rows.json", b'[{"a": 1}', "not closed"),
        ("rows.json", b"nonsense", "is not JSON"),
        ("rows.jsonl", b'{"a": "\xff"}', "not UTF-8"),
        ("rows.jsonl.gz", b"not gzip", "cannot read"),
        ("rows.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 5000, mtime=0)[:-30], "cannot read"),
        ("rows.txt", b"1 2 3", "its ending is '.txt'"),
        ("rows.jsonl", b"", "holds no usable row; the generated sums"),
        ("rows.json", b"[]", "holds no usable row"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=reason) as caught:
        _load(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["no/such/file.jsonl", "nothing.json", "./here", "/there", "word", "a/b/c"])
def test_a_missing_file_names_the_option_and_the_default(source: str) -> None:
    with pytest.raises(BadInput, match=rf"sums: data='{source}' does not exist; .* leave it out for the generated sums"):
        _load(source)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is a folder"):
        _load(tmp_path)


def test_a_name_needs_the_package_that_fetches() -> None:
    try:
        import datasets  # noqa: F401
    except ImportError:
        with pytest.raises(MissingDependency, match=r"data='owner/name' .* needs datasets; run: pip install 'tether-agents\[data\]'"):
            _load("owner/name")


@dataclass(frozen=True)
class Word:
    fingerprint: str


def test_pools_are_disjoint_and_run_in_the_order_of_the_file() -> None:
    words = [Word(f"word {n}") for n in range(200)]
    pool = Pool(words, env="words", source="words.json")
    assert [pool(seed, Split.ALL) for seed in (0, 1, 199, 200)] == [words[0], words[1], words[199], words[0]]
    seen = {split: {pool(seed, split) for seed in range(200)} for split in (Split.TRAIN, Split.VALIDATION, Split.TEST)}
    assert all(split_of(word.fingerprint) is split for split, mine in seen.items() for word in mine)
    assert sum(map(len, seen.values())) == len(pool) == 200


def test_a_pool_without_an_instance_of_a_split_says_so() -> None:
    word = next(w for w in (Word(str(n)) for n in range(99)) if split_of(w.fingerprint) is Split.TRAIN)
    with pytest.raises(BadInput, match=r"none of the 1 rows of 'one\.json' is a test instance; use split=all"):
        Pool([word], env="words", source="one.json")(0, Split.TEST)


def test_columns_under_other_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"Question": "What is 2 + 3?", "Answer": 5, "body": "x", "hints": []}\n' * 2)
    with caplog.at_level(logging.WARNING):
        env = make_env("metamathqa", data=str(source), split="all", fields={"question": "Question", "answer": "Answer"})
    assert env.reset(0).text.endswith("What is 2 + 3?") and env.step("5").success
    assert caplog.messages == [f"metamathqa: of {source} the columns body, hints are not read"]


def test_a_mapped_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"Question": "What is 2 + 3?", "Answer": 5}\n')
    with pytest.raises(BadInput, match=r"rows.jsonl:1: has no column 'question', which fields maps to question: did you mean 'Question'"):
        make_env("metamathqa", data=str(source), fields={"question": "question", "answer": "Answer"})
    with pytest.raises(
        BadInput, match=r"has no question: expected query and response, .* got Question, Answer; name other columns with fields="
    ):
        make_env("metamathqa", data=str(source))


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffa, b\n1,"x, ""y""\nz"\n\n2,w\n', encoding="utf-8")
    rows = list(read_rows(str(path), env="sums", default="d"))
    assert [row.value for row in rows] == [{"a": "1", "b": 'x, "y"\nz'}, {"a": "2", "b": "w"}]
    assert [row.place for row in rows] == [f"{path}:3", f"{path}:5"]  # the line on which a row ends
    packed = tmp_path / "rows.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    assert [row.value for row in read_rows(str(packed), env="sums", default="d")] == [row.value for row in rows]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1\n", "rows.csv:2: has 1 cells; the first line names 2 columns"),
        ("a,b\n1,2,3,4\n", "rows.csv:2: has 4 cells; the first line names 2 columns"),
        ("a,a\n1,2\n", "rows.csv:1: has a column twice (a, a)"),
        ("a,\n1,2\n", "rows.csv:1: has no name for every column"),
        ("", "rows.csv:1: has no name for every column"),
        ('a,b\n1,"2\n', "is not CSV"),
    ],
)
def test_a_csv_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        load_instances(str(path), lambda row: row.value, env="sums", default="d", bad_rows="error")
    assert said in str(caught.value)
