"""Escape sequences of models and environments are shown, never sent; colours of our own still are."""

import io
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from tether.cli.console import SafeConsole
from tether.cli.main import main
from tether.core.text import short_repr, shortened, visible

ESCAPES = "\x1b]0;owned\x07 \x1b[2J \x9b31m \x1b]52;c;aGk=\x07 \r\x08 \u202e"


def _sent(*shown: object, **arguments: object) -> str:
    out = io.StringIO()
    console = SafeConsole(file=out, force_terminal=True, width=200, **arguments)  # type: ignore[arg-type]
    console.print(*shown)
    return out.getvalue()


def test_shown_and_not_sent() -> None:
    table = Table("column")
    table.add_row(Text(ESCAPES))
    for shown in (ESCAPES, Text(ESCAPES, style="bold red"), table):
        sent = _sent(shown, markup=False)
        ours = re.sub(r"\x1b\[[0-9;]*m", "", sent)  # colours that rich itself sends
        assert "\\x1b]0;owned" in ours and "\\x9b31m" in ours
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", ours)
    assert "\x1b[1;31m" in _sent(Text("warning", style="bold red"))


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(), max_size=60))
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    made = visible(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", made)
    made.encode()
    if text.isprintable():
        assert made == text


def test_short_forms() -> None:
    assert len(short_repr("x" * 10**6)) < 300 and len(short_repr([[["x" * 10**5] * 1000] * 1000] * 1000)) < 600
    assert short_repr([1, "a", {"b": None}]) == "[1, 'a', {'b': None}]"
    assert shortened("x" * 300).endswith("... (300 characters)")


def test_play_shows_what_an_environment_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "escaping_env.py").write_text(
        "from tether.envs.base import Outcome, TextEnv, TurnOptions\n"
        "class Escaping(TextEnv[TurnOptions]):\n"
        "    name, Options, task = 'escaping', TurnOptions, 'Play \\x1b[2J.'\n"
        "    instructions = 'Rules \\x1b]0;owned\\x07'\n"
        "    def generate(self, seed): pass\n"
        "    def opening(self): return 'Begin \\x1b]52;c;aGk=\\x07'\n"
        "    def take(self, answer): return Outcome('x')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
    with pytest.raises(SystemExit):
        main(["play", "escaping_env:Escaping"])
    shown = capsys.readouterr().out
    assert "\\x1b]0;owned" in shown and "\\x1b]52;c;aGk=" in shown and "\x1b]" not in shown
