"""Help is instant and complete: every verb answers --help with exit code 0, ends with examples, and torch is never imported for it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from tether.cli.main import app


def _verbs(command: Any, words: str = "") -> Iterator[str]:
    """Every command below one, as the words that name it; "" is `tether` alone."""
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from _verbs(inner, f"{words} {name}".strip())


VERBS = list(_verbs(typer.main.get_command(app)))
PROBE = """
import contextlib, io, json, sys
from tether.cli.main import main
answers = {}
for verb in json.loads(sys.argv[1]):
    text, code = io.StringIO(), None
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            main([*verb.split(), "--help"])
        except SystemExit as exit:
            code = exit.code
    answers[verb] = (code, text.getvalue())
print(json.dumps([answers, sorted({"torch", "transformers"} & set(sys.modules))]))
"""


@pytest.fixture(scope="module")
def answers() -> tuple[dict[str, tuple[int, str]], list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(VERBS)], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "120"}
    )
    helps, heavy = json.loads(done.stdout)
    return helps, heavy


@pytest.mark.parametrize("verb", VERBS)
def test_help_ends_with_examples(verb: str, answers: tuple[dict[str, tuple[int, str]], list[str]]) -> None:
    code, text = answers[0][verb]
    assert code == 0
    assert text.startswith("Usage: tether")
    head, _, examples = text.rpartition("Examples:")
    assert head and examples
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    assert lines and all("tether" in line for line in lines)  # nothing follows the examples


def test_there_are_verbs() -> None:
    assert {"", "train", "eval", "diagnose", "report", "models get"} <= set(VERBS)


def test_help_imports_no_torch(answers: tuple[dict[str, tuple[int, str]], list[str]]) -> None:
    assert answers[1] == []
