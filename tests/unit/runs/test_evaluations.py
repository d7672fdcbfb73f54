"""Saved evaluations: paired differences by hand, tables by category, ranking within a task, pages that escape what models wrote."""

import json
from pathlib import Path
from typing import Any

import pytest

from tether.cli.main import main
from tether.core.errors import BadInput
from tether.core.intervals import difference_interval, mean_interval, student_t
from tether.runs.evaluations import boards, categories, compare, file_digest, read_results, task_title, write_result
from tether.runs.pages import difference_words, write_leaderboard, write_result_page


def result(name: str, outcomes: list[list[int]], rewards: list[list[float]] | None = None, **more: Any) -> dict[str, Any]:
    """A record with these outcomes, one list for each instance."""
    flat = [value for played in outcomes for value in played]
    rate = sum(flat) / len(flat)
    instances = [
        {
            "env": "e",
            "prompt": number,
            "seed": number,
            "key": f"k{number}",
            "categories": {"level": str(1 + number % 2)},
            "successes": played,
            "rewards": rewards[number] if rewards else [float(value) for value in played],
            "failed": 0,
        }
        for number, played in enumerate(outcomes)
    ]
    turn = {"observation": "<b>map</b>", "response": "<script>alert('x')</script>", "valid": True}
    example = {"env": "e", "prompt": 0, "sample": 0, "reward": 1.0, "stop_reason": "success", "turns": [turn]}
    return {
        "kind": "tether evaluation",
        "schema": 1,
        "created": "2026-01-01",
        "seconds": 1.0,
        "model": {"name": name, "address": None, "precision": None},
        "environments": [{"name": "e", "options": {"split": "test", "size": 4}, "data": {"data": {"name": "t.jsonl", "sha256": "ab"}}}],
        "protocol": {"prompts": len(outcomes), "samples": len(outcomes[0]), "temperature": 0.5, "max_tokens": 400},
        "versions": {"tether": "0"},
        "metrics": {
            "success": rate,
            "reward_mean": rate,
            "errors": 0,
            "instances": len(outcomes),
            "prompts": len(outcomes),
            "format_valid": 1.0,
        },
        "intervals": {"success": [rate / 2, (1 + rate) / 2], "reward_mean": None},
        "by_environment": {},
        "tokens": {"prompt": 10, "completion": 5, "reasoning": 0, "cached": 0, "responses": 1, "uncounted": 0},
        "cut_responses": 0,
        "instances": instances,
        "failed": [{"env": "e", "prompt": 1, "sample": 0, "reason": "<i>down</i>"}],
        "examples": {"successes": [example], "failures": []},
        "notes": [],
        **more,
    }


def test_paired_by_hand() -> None:
    """Two samples of three instances. A: 1, 0.5, 1; B: 0.5, 0, 1. Differences 0.5, 0.5, 0: mean 1/3, variance 1/12."""
    a, b = result("A", [[1, 1], [1, 0], [1, 1]]), result("B", [[1, 0], [0, 0], [1, 1]])
    found = compare(a, b)
    assert found is not None
    half = student_t(2) * (1 / 12 / 3 + 1 / 36) ** 0.5
    assert (found.success, found.low, found.high) == pytest.approx((1 / 3, 1 / 3 - half, 1.0)) and 1 / 3 + half > 1
    assert (found.first, found.second, found.num_instances, found.beyond_chance) == ("A", "B", 3, False)
    assert found.reward == pytest.approx(1 / 3) and found.reward_interval == pytest.approx(mean_interval([0.5, 0.5, 0.0]))
    back = compare(b, a)
    assert back is not None and (back.low, back.high) == pytest.approx((-found.high, -found.low))
    assert difference_words(found) == "A is 33.3 points above B (-68.1 to +100.0, 3 instances): within chance"
    assert difference_words(back).startswith("B is 33.3 points below A (-100.0 to +68.1")


def test_paired_on_what_both_played() -> None:
    """An instance without an outcome on one side takes no part; prompts that are the same instance are one."""
    a, b = result("A", [[1], [1], [0], [0]]), result("B", [[0], [], [0], [1]])
    assert compare(a, b).num_instances == 3  # type: ignore[union-attr]
    a["instances"][3]["key"] = b["instances"][3]["key"] = "k2"
    found = compare(a, b)
    assert found is not None and found.num_instances == 2
    # One episode of the first instance, two of the other: the difference is that of the rates over episodes, 1/3 - 1/3.
    assert found.success == pytest.approx(0)
    first, second = 1 / 3 + (1 - 1 / 3) * 2 / 3, 1 / 3 + (0 - 1 / 3) * 2 / 3
    assert (found.low, found.high) == pytest.approx(difference_interval([first - second, second - first], 1))
    for instance in b["instances"]:
        instance["key"] += "other"
    assert compare(a, b) is None


def test_categories() -> None:
    rows = categories(result("A", [[1], [0], [1], [1]]))["level"]
    assert [(row["value"], row["instances"], row["success"]) for row in rows] == [("1", 2, 1.0), ("2", 2, 0.5)]
    assert (rows[1]["low"], rows[1]["high"]) == pytest.approx((0.094531, 0.905469), abs=1e-5)


def test_only_one_task_is_ranked_together() -> None:
    """Other options, another data file or another number of prompts are another task."""
    a, b = result("A", [[0], [1]] * 20), result("B", [[1], [1]] * 20)
    harder = result("C", [[1], [1]] * 20)
    harder["environments"][0]["options"]["size"] = 8
    other_file = result("D", [[1], [1]] * 20)
    other_file["environments"][0]["data"]["data"]["sha256"] = "cd"
    fewer = result("E", [[1], [1]])
    found = boards([a, b, harder, other_file, fewer])
    assert sorted([[r["model"]["name"] for r in board.results] for board in found]) == [["B", "A"], ["C"], ["D"], ["E"]]
    board = next(board for board in found if len(board.results) == 2)
    assert task_title(a) == "e, t.jsonl, split test, 40 prompts"
    assert {board.title for board in found} == {
        "e, t.jsonl, split test, 40 prompts (size 4, t.jsonl sha256 ab)",
        "e, t.jsonl, split test, 40 prompts (size 8, t.jsonl sha256 ab)",
        "e, t.jsonl, split test, 40 prompts (size 4, t.jsonl sha256 cd)",
        "e, t.jsonl, split test, 2 prompts",
    }, "no heading stands over two tables"
    assert board.beyond(board.results[0]) == ["A"] and board.beyond(board.results[1]) == ["B"]


def test_many_pairs_need_more() -> None:
    """A difference beyond chance by itself is not, among all pairs of ten models (45 pairs, each at 99.89%)."""
    base, better = [[0]] * 30, [[1]] * 6 + [[0]] * 24
    two = boards([result("A", better), result("B", base)])[0]
    assert two.differences[0].beyond_chance and two.level == 0.95
    many = boards([result("A", better), *(result(f"B{number}", base) for number in range(9))])[0]
    assert many.level == pytest.approx(1 - 0.05 / 45) and not any(difference.beyond_chance for difference in many.differences)


def test_a_model_evaluated_twice_has_two_names() -> None:
    twice = [result("A", [[1], [0]], file="a-1"), result("A", [[0], [0]], file="a-2")]
    names = [r["model"]["name"] for r in boards(twice)[0].results]
    assert names == ["A (temperature 0.5, 1)", "A (temperature 0.5, 2)"]


def test_pages_escape_what_models_wrote(tmp_path: Path) -> None:
    bad = result("<img src=x>", [[1], [0]])
    page = write_result_page(bad, tmp_path / "r.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert(" in page and "<img src" not in page and "<i>down" not in page
    assert "By level" in page and "SHA-256 ab" in page and "t.jsonl" in page and len(page) < 40_000
    board = write_leaderboard(boards([bad]), tmp_path / "l.html").read_text()
    assert "&lt;img src=x&gt;" in board and "<img src" not in board


def test_leaderboard_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, outcomes in (("A", [[0], [1]] * 20), ("B", [[1], [1]] * 20)):
        write_result(result(name, outcomes), tmp_path / f"{name}.json")
    (tmp_path / "other.json").write_text('{"kind": "something else"}')
    with pytest.raises(SystemExit) as ended:
        main(["leaderboard", str(tmp_path)])
    assert ended.value.code == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[:5] == [
        "## e, t.jsonl, split test, 40 prompts",
        "",
        "|  | model | success | 95% interval | reward | failed | beyond chance from |",
        "| ---: | --- | ---: | ---: | ---: | ---: | --- |",
        "| 1 | B | 100.0% | 50.0% to 100.0% | 1.000 | 0 | A |",
    ]
    assert "- B is 50.0 points above A (+33.0 to +67.0, 40 instances): beyond chance" in shown.out
    assert (tmp_path / "leaderboard.html").is_file() and "2 results of 1 task; page: " in shown.err and "leaderboard.html" in shown.err
    write_result(result("C", [[1]]), tmp_path / "C.json")
    with pytest.raises(SystemExit):
        main(["leaderboard", str(tmp_path), "--out", str(tmp_path / "other.html")])
    assert "1 task with one result: environment, options, data or number of prompts differ" in capsys.readouterr().err


def test_folders_without_results(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist; give the folder"):
        read_results(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="holds no results; write some with: tether eval"):
        read_results(tmp_path)
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(BadInput, match="does not parse"):
        read_results(tmp_path)
    (tmp_path / "torn.json").write_text(json.dumps({"kind": "tether evaluation", "schema": 2}))
    with pytest.raises(BadInput, match="has schema 2, this Tether reads 1"):
        read_results(tmp_path)


def test_hashes(tmp_path: Path) -> None:
    """SHA-256 of a file as any tool gives it; of a folder, that of `sha256sum`'s listing."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.txt").write_text("abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_digest(tmp_path / "d" / "a.txt") == known
    before = file_digest(tmp_path / "d")
    (tmp_path / "d" / "a.txt").rename(tmp_path / "d" / "b.txt")
    assert file_digest(tmp_path / "d") != before
