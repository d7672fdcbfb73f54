"""qa: rows of every file format, the three rewards and one of the user's own, turns, splits, and who may name code."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tether.core.errors import BadInput, EnvironmentFailure, MissingDependency, TetherError, UnknownName
from tether.core.types import Observation
from tether.envs.checker.data import check_data
from tether.envs.dataset import Row
from tether.envs.qa.dataset import read_exact, with_picture
from tether.envs.qa.env import QA
from tether.envs.registry import make_env
from tether.envs.remote.http_server import Service

sys.path.append(str(Path(__file__).parents[1]))
from hostile_images import BOMB, CUT_SHORT, GOOD, JPEG

ROWS = [{"question": f"What comes after {number}?", "answer": str(number + 1)} for number in range(40)]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def qa(**options: Any) -> QA:
    env = make_env("qa", **options)
    assert isinstance(env, QA)
    return env


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that a user works in; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


def test_a_right_answer_ends_the_episode_and_pays_one(tmp_path: Path) -> None:
    env = qa(data=written(tmp_path / "rows.jsonl", ROWS), split="all")
    assert env.num_instances == 40 and env.reset(3).text == "Turn 1 of 1.\nWhat comes after 3?"
    step = env.step("The 4.")
    assert (step.reward, step.done, step.success) == (1.0, True, True)
    env.reset(3)
    step = env.step("5")
    assert (step.reward, step.done, step.success, step.info["truncated"]) == (0.0, True, False, False)
    assert step.observation.text == "Failed.\nIncorrect."


# --- pictures ---


def pictured(folder: Path, *cells: Any, column: str = "image") -> str:
    (folder / "pictures").mkdir(exist_ok=True)
    (folder / "pictures" / "a.png").write_bytes(GOOD)
    rows = [{"question": "<image>\nWhat is this?", "answer": str(number), column: cell} for number, cell in enumerate(cells)]
    return written(folder / "pictures.jsonl", rows)


def test_rows_may_have_pictures(tmp_path: Path) -> None:
    """As a path beside the data file, base64, a data URL, and Hugging Face's dictionary; the question alone where the cell is empty."""
    packed = base64.b64encode(GOOD).decode()
    photo = base64.b64encode(JPEG).decode()  # begins like an absolute path
    data = pictured(
        tmp_path, "pictures/a.png", packed, f"data:image/png;base64,{packed}", {"bytes": None, "path": "pictures/a.png"}, [photo], None
    )
    env = qa(data=data, split="all", max_turns=2)
    assert env.shows_images and env.num_instances == 6 and not qa().shows_images
    for seed, shape in enumerate([(4, 5, 3)] * 4 + [(64, 64, 3)]):
        observation = env.reset(seed)
        assert observation.image is not None and observation.image.shape == shape and observation.image.dtype == np.uint8
        assert observation.text == "Turn 1 of 2.\nWhat is this?"
        assert env.step("no").observation.image is None  # the conversation shows it already
    assert env.reset(0).image.ravel().tolist() == list(range(60))  # type: ignore[union-attr]
    assert env.reset(5) == Observation("Turn 1 of 2.\n<image>\nWhat is this?")
    assert len({env.reset(seed) and env.instance for seed in (0, 1, 4, 5)}) == 4, "the picture is part of the instance"
    assert not qa(data=data, split="all", image_column=None).shows_images


def test_pictures_as_bytes_and_under_another_name(tmp_path: Path) -> None:
    """Parquet files hold bytes."""
    item = with_picture(read_exact)(
        Row({"question": "What?", "answer": "1", "image": {"bytes": GOOD, "path": "a.png"}}, "rows.parquet, row 1")
    )
    assert item.image is not None and item.image.image().pixels.shape == (4, 5, 3)
    data = pictured(tmp_path, "pictures/a.png", column="photo")
    assert qa(data=data, image_column="photo").shows_images and qa(data=data, fields={"image": "photo"}).shows_images
    assert not qa(data=data).shows_images


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        (
            "pictures/b.png",
            "image is 'pictures/b.png', and there is no file '{}/pictures/b.png'; give a path relative to the data file, or base64;",
        ),
        ("bomb.png", "image 'bomb.png' has 20000 x 4000 pixels; at most 67108864 are read: make it smaller;"),
        ("cut.png", "image 'cut.png' cannot be read as an image: "),
        ("cut.jpg", "image 'cut.jpg' cannot be read as an image: "),
        ("https://example.org/a.png", "image is the address 'https://example.org/a.png'; pictures are not fetched"),
        ("data:image/png;base64,AAA", "image is a data URL whose base64 is broken"),
        (["pictures/a.png"] * 2, "image is 2 pictures; expected one"),
        (7, "image is 7; expected one: a path, a data URL, base64, or bytes"),
    ],
)
def test_a_picture_that_cannot_be_shown_is_refused_before_anything_is_played(tmp_path: Path, cell: Any, line: str) -> None:
    for name, content in {"bomb.png": BOMB, "cut.png": CUT_SHORT, "cut.jpg": JPEG[:-40]}.items():
        (tmp_path / name).write_bytes(content)
    data = pictured(tmp_path, "pictures/a.png", cell)
    with pytest.raises(BadInput) as caught:
        qa(data=data)
    assert str(caught.value).startswith(f"{data}:2: {line.format(tmp_path)}") and "\n" not in str(caught.value)
    report = check_data("qa", data)
    assert (report.loaded, report.num_refused) == (1, 1)
    assert qa(data=data, bad_rows="skip", split="all").num_instances == 1


def test_a_named_column_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no column 'imag', which image_column names: did you mean 'image'"):
        qa(data=pictured(tmp_path, "pictures/a.png"), image_column="imag")


def test_several_turns_pay_the_last_answer_only(module: Path) -> None:
    (module / "my_reward.py").write_text("def graded(answer, row):\n    return len(answer) / 10\n")
    env = qa(data=written(module / "rows.jsonl", ROWS), reward="my_reward:graded", max_turns=3, split="all")
    env.reset(0)
    first, empty, last = env.step("aaaa"), env.step("  "), env.step("aa")
    assert (first.reward, first.done, first.observation.text) == (0.0, False, "Turn 2 of 3.\nIncorrect. Please think again.")
    assert (empty.info["valid"], empty.info["attempts"]) == (False, 1)
    assert (last.reward, last.done, last.success, last.info["attempts"]) == (0.2, True, False, 2)
    env.reset(0)
    done = env.step("a" * 12)
    assert (done.reward, done.done, done.success) == (1.2, True, True)  # at least 1 is a success


def test_a_reward_of_ones_own_gets_the_row_and_says_what_was_wrong(module: Path) -> None:
    (module / "my_reward.py").write_text(
        "def short(answer, row):\n"
        "    row['limit'] = 0  # a copy: the next call sees the row as it is in the file\n"
        "    return {'reward': 0.5, 'success': False, 'feedback': f\"{row['id']}: shorter\"}\n"
    )
    rows = [{"prompt": "Say something short.", "limit": 3, "id": "a"}, {"prompt": "Say it again.", "limit": 3, "id": "b"}]
    env = qa(data=written(module / "rows.jsonl", rows), reward="my_reward:short", max_turns=2, split="all")
    env.reset(1)
    assert env.step("hello").observation.text == "Turn 2 of 2.\nb: shorter"
    assert env.item.row["limit"] == 3
    assert env.step("hello").reward == 0.5
    assert env.example.reply in env.instructions and "your thoughts" not in env.instructions  # which small models copy


@pytest.mark.parametrize(
    ("code", "name", "said"),
    [
        ("x = 1", "reward", "module 'my_reward' has no reward 'reward': known: none"),
        ("def rewards(answer, row): return 1", "reward", "did you mean 'rewards'?"),
        ("reward = 3", "reward", "reward 'my_reward:reward' is a int; name a function"),
        ("async def reward(answer, row): return 1", "reward", "is async; write a plain function"),
        ("def reward(answer): return 1", "reward", "cannot be called with an answer and a row"),
        ("1 / 0", "reward", "importing 'my_reward' failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_reward_is_one_line_before_anything_is_played(module: Path, code: str, name: str, said: str) -> None:
    (module / "my_reward.py").write_text(code)
    with pytest.raises(BadInput) as caught:
        qa(reward=f"my_reward:{name}")
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("reward", "kind", "said"),
    [
        ("exactmatch", UnknownName, "did you mean 'exact_match'?"),
        ("my_missing:reward", BadInput, "there is no module 'my_missing', neither installed nor in this folder"),
        ("rewards.py:reward", BadInput, "is written as a file; write it as a module, 'rewards:reward'"),
        ("code", BadInput, "reward=code needs problems with tests"),
    ],
)
def test_names_of_rewards_are_checked(module: Path, reward: str, kind: type[TetherError], said: str) -> None:
    with pytest.raises(TetherError) as caught:
        qa(reward=reward)
    assert said in str(caught.value)


def test_a_package_that_the_reward_needs_is_named(module: Path) -> None:
    (module / "my_reward.py").write_text("import no_such_package_at_all\n")
    with pytest.raises(MissingDependency, match="needs the package 'no_such_package_at_all'"):
        qa(reward="my_reward:reward")


@pytest.mark.parametrize("returned", ["'good'", "float('nan')", "{'rewards': 1}", "{'success': True}", "None"])
def test_what_a_reward_must_not_return(module: Path, returned: str) -> None:
    (module / "my_reward.py").write_text(f"def reward(answer, row):\n    return {returned}\n")
    env = qa(reward="my_reward:reward")
    env.reset(0)
    with pytest.raises(EnvironmentFailure, match="return a finite number, or a dictionary with reward, success, feedback"):
        env.step("x")


# --- data ---


def test_csv_fields_and_template(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(
        '\ufeffContext,Ask,Gold\n"Ann has a cat,\nTom a dog.",Who has a dog?,"[""Tom"", ""Thomas""]"\n\n"None, here",Who?,Eve\n'
    )
    env = qa(data=str(path), fields={"question": "Ask", "answer": "Gold"}, template="{Context} {question}", split="all")
    assert env.reset(0).text == "Turn 1 of 1.\nAnn has a cat,\nTom a dog. Who has a dog?"
    assert env.item.gold == ("Tom", "Thomas") and env.step("thomas").success
    env.reset(1)
    assert env.item.gold == ("Eve",)
    path.write_text("question,answer\na?,1,surplus\nb?,2\nc?\n")
    with pytest.raises(BadInput, match=r"rows\.csv:2: has 3 cells; the first line names 2 columns"):
        qa(data=str(path), split="all")
    assert qa(data=str(path), split="all", bad_rows="skip").num_instances == 1


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert qa(data=str(tmp_path / "rows.parquet"), split="all").num_instances == 40


@pytest.mark.parametrize(
    ("row", "options", "said"),
    [
        ({"text": "a?"}, {}, "has no question: expected a column named question, prompt, problem, query, input, got text"),
        ({"question": " ", "answer": "b"}, {}, "question is ' '; expected text"),
        ({"question": "a?"}, {}, "has no answer: expected a column named answer, answers, label, target, output, got question"),
        ({"question": "a?", "answer": None}, {}, "answer is None; expected text, a number, or a list of accepted answers"),
        ({"question": "a?", "answers": []}, {}, "answers is an empty list"),
        ({"question": "a?", "answer": "b"}, {"template": "{contxt}"}, "has no column 'contxt', which the template names"),
        ({"question": "a?", "answer": "b"}, {"reward": "code"}, "is of no known format"),
        ({"question": "a?", "answer": "a\nb"}, {"reward": "math"}, "answer has no label"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, row: dict[str, Any], options: dict[str, Any], said: str) -> None:
    source = written(tmp_path / "rows.jsonl", [row])
    with pytest.raises(BadInput) as caught:
        qa(data=source, **options)
    assert f"{source}:1: " in str(caught.value) and said in str(caught.value)


def test_answers_that_are_no_text(tmp_path: Path) -> None:
    rows = [{"question": f"{value}?", "answer": value} for value in (True, False, 3, 2.0, 2.5)]
    env = qa(data=written(tmp_path / "rows.jsonl", rows), split="all")
    golds = []
    for seed in range(len(rows)):
        env.reset(seed)
        golds.append(env.item.gold)
    assert golds == [("yes",), ("no",), ("3",), ("2",), ("2.5",)]


def test_one_question_is_never_in_two_splits(tmp_path: Path) -> None:
    rows = [{"question": f"Question {number % 50}?", "answer": str(number)} for number in range(150)]
    source = written(tmp_path / "rows.jsonl", rows)
    asked: dict[str, set[str]] = {}
    for split in ("train", "validation", "test"):
        env = qa(data=source, split=split)
        asked[split] = {env.reset(seed).text for seed in range(env.num_instances or 0)}
    assert sum(len(texts) for texts in asked.values()) == 50 == len(set().union(*asked.values()))


def test_a_data_file_is_checked_without_playing(tmp_path: Path) -> None:
    report = check_data("qa", written(tmp_path / "rows.jsonl", [*ROWS, {"question": "?"}]))
    assert (report.loaded, report.num_refused, report.examples[0]) == (40, 1, "What comes after 0? -> 1")


# --- mathematics and programs ---


def test_mathematics(tmp_path: Path) -> None:
    rows = [{"question": "Half?", "answer": "So it is #### 1/2"}, {"problem": "Root?", "solution": r"It is \boxed{3\sqrt{2}}."}]
    env = qa(data=written(tmp_path / "rows.jsonl", rows), reward="math", split="all", max_turns=2)
    env.reset(0)
    assert env.step("0.4").reward == 0.0 and env.step("0.5").reward == 1.0
    env.reset(1)
    assert env.item.gold == (r"3\sqrt{2}",)
    assert "LaTeX" in env.instructions and env.work == "wait"


def test_programs_are_paid_by_the_tests_they_pass(tmp_path: Path) -> None:
    rows = [
        {"question": "Write double(x).", "tests": ["assert double(1) == 2", "assert double(3) == 6"]},
        {"question": "Print the sum of two numbers.", "tests": [{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4"}]},
    ]
    env = qa(data=written(tmp_path / "rows.jsonl", rows), reward="code", split="all", max_turns=2)
    env.reset(0)
    prose = env.step("I would multiply it.")
    assert not prose.info["valid"] and prose.info["attempts"] == 0
    step = env.step("```python\ndef double(x):\n    return 2\n```")
    assert (step.reward, step.success) == (0.5, False) and "Passed 1 of 2 tests." in step.observation.text
    env.reset(1)
    assert env.step("```python\na, b = map(int, input().split())\nprint(a + b)\n```").success


# --- who may name code ---


def test_a_client_of_a_server_names_neither_code_nor_files(tmp_path: Path) -> None:
    source = written(tmp_path / "rows.jsonl", ROWS)
    service = Service("qa", {"data": source}, allowed=frozenset({"*"}))
    for wanted in ({"reward": "os:system"}, {"data": "/etc/passwd.jsonl"}):
        with pytest.raises(BadInput, match="decides what the server runs or reads; set it where the server is started"):
            service.build(wanted)
    assert service.build({"max_turns": 2, "data": source}).max_turns == 2


def test_a_row_cannot_name_its_reward(tmp_path: Path) -> None:
    env = qa(data=written(tmp_path / "rows.jsonl", [{**ROWS[0], "reward": "os:system"}]), split="all")
    env.reset(0)
    assert env.step("1").success
