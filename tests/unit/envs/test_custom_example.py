"""What docs/environments/custom.md says is so: its example is the one in examples/, all three kinds keep the checks, the commands work."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tether.core.errors import BadInput
from tether.envs.checker import check_env
from tether.envs.checker.checks import CHECKS
from tether.envs.registry import ENVIRONMENTS, build, make_env
from tether.envs.tools import ToolEnv

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "custom_environment.py"
TOOLS = ROOT / "examples" / "tool_environment.py"
PAGE = (ROOT / "docs" / "environments" / "custom.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_page_shows_the_example_and_it_is_short() -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    assert BLOCKS[0] == source
    assert sum(1 for line in source.splitlines() if line.strip()) <= 40


def test_the_page_shows_the_example_with_a_tool_and_it_passes_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TOOLS.read_text(encoding="utf-8") in BLOCKS
    monkeypatch.syspath_prepend(str(TOOLS.parent))
    report = check_env("tool_environment:OrderDesk", episodes=60)
    assert report.ok, str(report)
    env = make_env("tool_environment:OrderDesk")
    assert env.reset(0).text == "Turn 1 of 5.\nWhat do A-10 and A-11 cost together?"
    assert env.step("price[A-10]").observation.text == "Turn 2 of 5.\nA-10 costs 33 dollars."
    wrong, right = env.step("the price is 33"), env.step("finish[73]")
    assert (wrong.info["valid"], wrong.done) == (False, False)
    assert "price[...]: The price of an article, by its code." in wrong.observation.text
    assert (right.reward, right.done, right.success, right.info["calls"]) == (1.0, True, True, 1)


class Graded(ToolEnv):
    name, task, tools = "graded", "Guess the number.", ("compare",)

    def compare(self, guess: str) -> str:
        return "larger" if float(guess) < self.row["number"] else "not larger"

    def grade(self, answer: str) -> float:
        return 1 / (1 + abs(self.row["number"] - float(answer)))


def test_rows_of_a_file_a_grade_of_ones_own_and_mistakes(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": f"Number {n}?", "number": n}) for n in range(40)))
    env = build(Graded, "graded", {"data": str(rows), "fields": {"question": "text"}, "split": "all"})
    assert env.reset(7).text.endswith("Number 7?") and env.step("compare[3]").observation.text.endswith("larger")
    step = env.step("finish[8]")
    assert (step.reward, step.done, step.success) == (0.5, True, False)
    with pytest.raises(BadInput, match="graded has no rows; give data=FILE, or the class an attribute `rows`"):
        build(Graded, "graded", {})
    with pytest.raises(BadInput, match="has no method 'look', which `tools` names"):
        build(type("Wrong", (Graded,), {"tools": ("look",), "rows": [{"question": "a"}]}), "wrong", {})


def test_the_page_lists_the_checks() -> None:
    rows = re.findall(r"^\| ?([^|]*?) ?\|.*\|$", PAGE.partition("## Test it")[2].partition("## In gymnasium")[0], re.MULTILINE)
    assert rows[2:] == [check.name for check in CHECKS]


@pytest.fixture
def classes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "my_env", raising=False)
    monkeypatch.setattr(ENVIRONMENTS, "_entries", dict(ENVIRONMENTS._entries))
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {}
    for block in BLOCKS[:6]:
        namespace: dict[str, Any] = {"__name__": "example"}
        exec(block, namespace)
        found = {**namespace, **found}  # SortNumbers of the page itself, not the one that later blocks import
    return found


@pytest.mark.parametrize("kind", ["SortNumbers", "SortWithExample", "Corridor", "Parity"])
def test_each_kind_passes_the_checks(kind: str, classes: dict[str, Any]) -> None:
    report = check_env(classes[kind])
    assert report.ok, str(report)
    skipped = {result.check for result in report.results if result.skipped}
    assert skipped == {"another process"} | ({"pictures"} if kind != "Corridor" else set())  # the page's classes are in no module


def test_random_play_solves_the_corridor_now_and_then(classes: dict[str, Any]) -> None:
    """Else the checks about success would say nothing."""
    from tether.envs.checker.episodes import play

    env = classes["Corridor"](classes["CorridorOptions"]())
    endings = [play(env, number).steps[-1] for number in range(60)]
    assert any(step.success for step in endings) and any(step.info["truncated"] for step in endings)


def _tether(folder: Path, *words: str, typed: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", "from tether.cli.main import main; main()", *words],
        cwd=folder,
        input=typed,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200", "PYTHONSAFEPATH": "1"},  # the current folder is on the path only if Tether puts it there
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with the example in it."""
    shutil.copy(EXAMPLE, tmp_path / "my_env.py")
    return tmp_path


def test_check_and_play_from_a_folder(folder: Path) -> None:
    out = _tether(folder, "envs", "--check", "my_env:SortNumbers", "--episodes", "30")
    shown = [line.split() for line in out.splitlines() if line.startswith("my_env")]
    assert [line[-1] for line in shown[:-1]] == ["ok"] * (len(CHECKS) - 1) and out.endswith("\n1 environment, all pass\n")
    out = _tether(folder, "play", "my_env:SortNumbers", "--seed", "1", typed="9 15 57 29\n9 15 29 57\n")
    quoted = re.search(r"\$ tether play my_env:SortNumbers --seed 1\n(.*?)\n\n    \$ tether train", PAGE, re.DOTALL)
    assert quoted
    lines = [re.sub(r"^(    )?(> .*)?", "", line) for line in quoted.group(1).splitlines()]
    played = [line.removeprefix("> ") for line in out[out.index("Turn 1 of 3.") :].splitlines()]
    assert [line for line in played if line] == [line for line in lines if line]


@pytest.mark.long
@pytest.mark.slow
def test_train_from_a_folder(folder: Path) -> None:
    small = ["rollout.num_groups=2", "rollout.group_size=2", "rollout.max_tokens=12", "evaluation.prompts=2", "diagnosis.every=0"]
    words = [word for setting in (*small, "env.options.max_turns=1") for word in ("--set", setting)]
    out = _tether(folder, "train", "my_env:SortNumbers", "--steps", "1", "--out", "run", *words)
    assert "step 1/1" in out
    assert (folder / "run" / "report.html").is_file()
    assert "my_env:SortNumbers" in (folder / "run" / "config.yaml").read_text()
