"""Every block of the tutorials and of the notebook runs, in the order of the page, in an empty folder.

A python block runs in a namespace of its own, so it is complete when it is pasted alone; a line that ends with `# -> text`, or is one, prints that text. A
command runs at a small size: the words of `SMALL` are appended, and later options win. Models that are not at hand become `tiny`. `pip install` is
only checked against the extras of pyproject.toml. Equal training commands are run once, and their folder is copied.
"""

import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tether.cli.main import main
from tether.core.errors import BadInput

pytestmark = pytest.mark.long  # some fifteen small trainings

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
NOTEBOOK = ROOT / "examples" / "first_run.ipynb"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

MODELS = ("smollm2", "Qwen/Qwen2.5-Coder-1.5B-Instruct")
"""Models that the pages name and `tiny` stands in for."""

STEPS = ("--steps", "1")
SETTINGS = {
    "rollout.num_groups": 2,
    "rollout.group_size": 2,
    "rollout.max_tokens": 40,
    "env.options.max_turns": 1,
    "evaluation.prompts": 2,
}
TURNS = "env.options.max_turns=1"
SMALL: dict[str, tuple[str, ...]] = {
    "train": (*STEPS, *(word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}"))),
    "eval": ("--prompts", "2", "--samples", "1", "--set", "rollout.max_tokens=40", "--set", "env.options.max_turns=1"),
    "sft": ("--steps", "1"),
    "diagnose": ("--bootstrap", "100"),
}
RESUMED = ("--steps", "2")

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PRINTS = re.compile(r"# -> (.*)$", re.MULTILINE)
_FILE = re.compile(r"# ([\w-]+\.\w+)\n")

_runs: dict[tuple[str, ...], Path] = {}
"""Folders of the training commands that ran, by their words; the folder itself left out."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run_python(block: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a block alone; what it prints must be what its arrows say. Lines without an arrow may print as well."""
    capsys.readouterr()
    file = _FILE.match(block)
    if file:
        Path(file[1]).write_text(block, encoding="utf-8")
    exec(compile(block, name, "exec"), {"__name__": "__main__"})
    printed, expected = capsys.readouterr().out.splitlines(), _PRINTS.findall(block)
    assert [line for line in printed if line in expected] == expected, f"{name} prints {printed}"


def run_command(line: str) -> None:
    """Run a command of a page at a small size."""
    words = [str(ROOT / word) if word.startswith("configs/") else "tiny" if word in MODELS else word for word in shlex.split(line)]
    if words[:2] == ["pip", "install"]:
        wanted = re.fullmatch(r"tether-agents\[(.*)\]", words[2])
        assert wanted and set(wanted[1].split(",")) <= set(EXTRAS), line
        return
    assert words[0] == "tether", f"a tutorial can only run tether and pip: {line}"
    words = [*words[1:], *(RESUMED if "--resume" in words else SMALL.get(words[1], ()))]
    if {"--agent", "--agent-command"} & set(words):  # which has no environment
        at = words.index(TURNS)
        del words[at - 1 : at + 1]
    if words[0] == "train" and "--config" in words:  # which names a model
        words += ["--model", "tiny"]
    if words[0] == "train" and "--resume" not in words and "diagnosis.every=1" not in words:
        words += ["--set", "diagnosis.every=0"]
    out = Path(words[words.index("--out") + 1]) if "--out" in words else None
    key = tuple(word for word in words if word != str(out))
    if words[0] == "train" and key in _runs and out is not None:
        shutil.copytree(_runs[key], out)
        return
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0, line
    if words[0] == "train" and out is not None and "--resume" not in words:
        _runs[key] = out.resolve()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorial(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (kind, block) in enumerate(_BLOCK.findall(page.read_text(encoding="utf-8")), start=1):
        if kind == "python":
            run_python(block, f"{page.name}, block {number}", capsys)
        elif kind == "bash":
            for line in block.replace("\\\n", " ").splitlines():
                run_command(line)
        else:
            assert kind == "text", f"{page.name}, block {number}: {kind} is not run by the tests"


def test_notebook(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert book["nbformat"] == 4
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        assert cell["outputs"] == [] and cell["execution_count"] is None, "the notebook is kept without outputs"
        source = "".join(cell["source"])
        exec(compile(source, f"{NOTEBOOK.name}, cell {number}", "exec"), namespace)
        expected = _PRINTS.findall(source)
        printed = capsys.readouterr().out.splitlines()
        assert [line for line in printed if line in expected] == expected, printed
    assert cells


def test_a_wrong_block_or_command_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="prints"):
        run_python("print(1)  # -> 2\n", "block", capsys)
    run_python("import json\n", "first", capsys)
    with pytest.raises(NameError):
        run_python("json.dumps(1)\n", "second", capsys)
    with pytest.raises(BadInput):
        run_python("import tether\ntether.train('frozen_lake', rolout={})\n", "block", capsys)
    for line in (
        "tether train frozen_lake --set rolout.group_size=4",
        "tether trian frozen_lake",
        "pip install 'tether-agents[nope]'",
        "ls",
    ):
        with pytest.raises(AssertionError):
            run_command(line)
