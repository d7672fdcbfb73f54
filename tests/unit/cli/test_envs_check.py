"""`tether envs --check`: a line for every environment and check, exit code 1 where one is broken, and plug-ins that harm nobody."""

import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tether.cli.main import main
from tether.envs import registry
from tether.envs.adapters import catalog
from tether.envs.checker.checks import CHECKS

sys.path.append(str(Path(__file__).parents[1] / "envs"))

from broken_environments import Doors, PaysNaN


@pytest.fixture(autouse=True)
def _few_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two built-in ones; the whole registry is checked elsewhere. A wide terminal, so that no line is folded."""
    entries = {name: entry for name, entry in registry.ENVIRONMENTS._entries.items() if name in ("frozen_lake", "sokoban")}
    monkeypatch.setattr(registry.ENVIRONMENTS, "_entries", entries)
    monkeypatch.setenv("COLUMNS", "400")


def _run(words: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    return int(stopped.value.code or 0)


def _rows(out: str) -> list[list[str]]:
    return [re.split(r" {2,}", line.strip()) for line in out.splitlines()]


def test_one_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["envs", "--check", "frozen_lake", "--episodes", "30"]) == 0
    rows = _rows(capsys.readouterr().out)
    assert rows[0] == ["environment", "check", "result", "reason"]
    assert rows[1 : len(CHECKS) + 1] == [["frozen_lake", check.name, "ok"] for check in CHECKS]
    assert rows[-1] == ["1 environment, all pass"]


def test_all_of_them_and_one_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    registry.register_env("generous", PaysNaN)
    assert _run(["envs", "--check", "--episodes", "20"]) == 1
    rows = _rows(capsys.readouterr().out)
    assert [row for row in rows if row[0] == "sokoban"] == [["sokoban", check.name, "ok"] for check in CHECKS]
    failed = [row for row in rows if "FAIL" in row]
    assert {tuple(row[:3]) for row in failed} == {("generous", "rewards", "FAIL")}
    assert "pays nan" in failed[0][3] and failed[0][3].startswith("reset(0), step('')")
    assert rows[-1] == ["generous: failed"]


def test_what_does_not_apply_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Plain(Doors):
        class Options(Doors.Options):  # type: ignore[name-defined, misc]
            pass

    registry.register_env("plain", Plain)
    assert _run(["envs", "--check", "plain", "--episodes", "20"]) == 0
    row = next(row for row in _rows(capsys.readouterr().out) if row[1:2] == ["another process"])
    assert row[2] == "-" and row[3].startswith("environment 'plain' cannot be built in another process")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sokobn"], "did you mean 'sokoban'"),
        (["nowhere:Echo"], "there is no module 'nowhere'"),
        (["sokoban", "--episodes", "0"], "--episodes"),
        (["sokoban", "--episodes", "few"], "--episodes"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["envs", "--check", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tether: ") and said in error and len(error.splitlines()) == 1


@pytest.fixture
def _plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution: one environment that works, one that cannot be imported, one with the name of a built-in."""
    (tmp_path / "plugged.py").write_text("from broken_environments import Doors\n")
    (tmp_path / "torn.py").write_text("import no_such_package_at_all\n")
    info = tmp_path / "plugged-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 0.3\n")
    offers = "[tether.environments]\ndoors = plugged:Doors\ntorn = torn:Env\nsokoban = plugged:Doors\n"
    (info / "entry_points.txt").write_text(offers)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._offers_on.cache_clear()
    importlib.invalidate_caches()
    yield
    registry._offers_on.cache_clear()
    for name in ("plugged", "torn"):
        sys.modules.pop(name, None)


TORN = "environment 'torn' of distribution 'plugged 0.3' cannot be loaded from 'torn:Env': ModuleNotFoundError: No module named"


@pytest.mark.usefixtures("_plugins")
def test_the_list_marks_broken_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["envs"]) == 0
    rows = {row[0]: row[1:] for row in _rows(capsys.readouterr().out)}
    assert rows["doors"] == ["3", "Behind one of two doors is a prize: answer left or right"]
    assert rows["frozen_lake"][0] == rows["sokoban"][0] == "5"
    assert rows["torn"][0] == "-" and rows["torn"][1].startswith(f"cannot be used: {TORN}")
    assert any(
        name.startswith("environment 'sokoban' of distribution 'plugged 0.3' is not used: the name is taken; use it as plugged:Doors")
        for name in rows
    )


@pytest.mark.usefixtures("_plugins")
def test_the_check_goes_on_after_a_broken_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["envs", "--check", "--episodes", "5"]) == 1
    rows = _rows(capsys.readouterr().out)
    failed = [row for row in rows if "FAIL" in row]
    assert [row[:3] for row in failed] == [["torn", "construction", "FAIL"]] and failed[0][3].startswith(TORN)
    assert [row for row in rows if row[0] == "doors"] == [["doors", check.name, "ok"] for check in CHECKS]
    assert _run(["envs", "--check", "torn"]) == 2  # asked for by name, it is the user's mistake


def test_one_of_the_user_s_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    source = """
        from broken_environments import Doors

        class Shy(Doors):
            instructions = "Guess."
    """
    (tmp_path / "own_environment.py").write_text(textwrap.dedent(source))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert _run(["envs", "--check", "own_environment:Shy", "--episodes", "20"]) == 1
    failed = [row for row in _rows(capsys.readouterr().out) if "FAIL" in row]
    assert [row[1] for row in failed] == ["instructions"] and "add tether.core.grammar.FORMAT_RULE" in failed[0][3]
    assert _run(["envs", "own_environment:Shy"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Guess.\n") and "You stand before house" in shown and "max_turns" in shown
    sys.modules.pop("own_environment")


def test_the_list_names_other_packages_and_how_to_install_them(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    known = catalog.importlib.util.find_spec
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: known(name) if name == "gymnasium" else None)
    assert _run(["envs"]) == 0
    rows = {row[0]: row[-1] for row in _rows(capsys.readouterr().out)}
    assert rows["gymnasium:ID"].startswith("gymnasium 1.") and rows["reasoning_gym:NAME"] == 'pip install "tether-agents[reasoning-gym]"'
