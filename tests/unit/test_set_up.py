"""Set-up: when an environment counts as finished, when it is made afresh, what is never deleted, and what a failure says."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "set_up.py"
PYTHON = "CPython 3.11.7 linux aarch64"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("set_up", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


set_up = _load()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    return tmp_path


@pytest.fixture
def venv(root: Path) -> Path:
    """An environment as a finished set-up leaves it, as far as the record can tell."""
    venv = root / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    set_up.write_record(venv, PYTHON, made=True, installed=set_up.fingerprint(root, PYTHON), extras=["gguf"])
    return venv


def _fake_steps(monkeypatch: pytest.MonkeyPatch, fail_at: str | None = None) -> list[str]:
    """Replace the commands by a list of the steps; "make .venv" makes the folder's Python."""
    steps: list[str] = []

    def run_step(step: str, command: list[str], venv: Path) -> None:
        steps.append(" ".join(command))
        if fail_at and fail_at in step:
            raise set_up.SetUpError(step)
        if step == "make .venv":
            (venv / "bin").mkdir()
            (venv / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setattr(set_up, "run_step", run_step)
    monkeypatch.setattr(set_up, "python_identity", lambda: PYTHON)
    return steps


# ------------------------------------------------------------------------------------------------------------ fingerprint


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_fingerprint_changes_with_each_file(root: Path, name: str) -> None:
    before = set_up.fingerprint(root, PYTHON)
    assert set_up.fingerprint(root, PYTHON) == before
    (root / name).write_text("changed")
    assert set_up.fingerprint(root, PYTHON) != before


def test_fingerprint_changes_with_python(root: Path) -> None:
    assert set_up.fingerprint(root, PYTHON) != set_up.fingerprint(root, PYTHON.replace("3.11.7", "3.12.1"))


def test_more_extras_than_asked_for_is_fine_fewer_is_not() -> None:
    record = {"installed": "f", "extras": ["dev", "gguf"]}
    assert set_up.is_installed(record, "f", ["gguf"])
    assert set_up.is_installed(record, "f", ["gguf", "dev"])
    assert not set_up.is_installed({"installed": "f", "extras": ["gguf"]}, "f", ["gguf", "dev"])
    assert not set_up.is_installed(record, "other", ["gguf"])
    assert not set_up.is_installed({}, "f", [])


# ------------------------------------------------------------------------------------------------- usable, stale, not ours


def test_finished_environment_is_usable(venv: Path) -> None:
    assert set_up.why_unusable(venv, PYTHON) is None


def test_missing_or_half_made(root: Path) -> None:
    assert set_up.why_unusable(root / ".venv", PYTHON) == "is only half made"
    (root / ".venv").mkdir()
    set_up.write_record(root / ".venv", PYTHON, made=False)
    assert set_up.why_unusable(root / ".venv", PYTHON) == "is only half made"


def test_moved_checkout(venv: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    moved = venv.rename(tmp_path_factory.mktemp("elsewhere") / ".venv")
    assert set_up.why_unusable(moved, PYTHON) == "was made at another path"


def test_other_python(venv: Path) -> None:
    assert set_up.why_unusable(venv, "CPython 3.12.1 linux aarch64") == f"was made by {PYTHON}"


def test_python_gone(venv: Path) -> None:
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to("/nowhere/python")
    assert set_up.why_unusable(venv, PYTHON) == "has lost its Python"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"made": fal'])
def test_damaged_record_means_half_made_and_ours(venv: Path, content: str) -> None:
    (venv / set_up.RECORD).write_text(content)
    assert set_up.why_unusable(venv, PYTHON) == "is only half made"
    assert set_up.is_ours(venv)


def test_only_what_we_made_may_be_deleted(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = root / ".venv"
    folder.mkdir()
    assert set_up.is_ours(folder)
    (folder / set_up.DRAFT).touch()
    assert set_up.is_ours(folder), "killed while writing the first record"
    (folder / "pyvenv.cfg").touch()
    assert not set_up.is_ours(folder), "made by another tool"
    link = root / "link"
    link.symlink_to(tmp_path_factory.mktemp("target"))
    assert not set_up.is_ours(link)


def test_foreign_folder_is_refused_and_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_steps(monkeypatch)
    (root / ".venv").mkdir()
    (root / ".venv" / "thesis.txt").write_text("years of work")
    with pytest.raises(set_up.SetUpError, match="was not made by this script; remove it or move it away"):
        set_up.set_up(root, ["gguf"])
    assert (root / ".venv" / "thesis.txt").read_text() == "years of work"


# ------------------------------------------------------------------------------------------------------- the whole, no network


def test_first_run_installs_and_second_does_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = _fake_steps(monkeypatch)
    monkeypatch.setenv("TETHER_TORCH_INDEX", "file:///mirror")
    set_up.set_up(root, ["gguf"])
    assert len(steps) == 3
    assert steps[0].endswith(f"-m venv {root}/.venv")
    assert steps[2].endswith(f"-c {root}/constraints.txt --extra-index-url file:///mirror --no-build-isolation -e {root}[gguf]")
    set_up.set_up(root, ["gguf"])
    assert len(steps) == 3


def test_extras_add_up(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = _fake_steps(monkeypatch)
    monkeypatch.delenv("TETHER_TORCH_INDEX", raising=False)
    set_up.set_up(root, ["gguf"])
    set_up.set_up(root, ["dev"])
    assert steps[-1].endswith(f"--no-build-isolation -e {root}[dev,gguf]")
    assert len(steps) == 5, "the environment is made once"
    set_up.set_up(root, ["gguf"])
    assert len(steps) == 5


def test_the_packages_of_an_extra_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "pyproject.toml").write_text(
        '[project]\ndependencies = ["torch"]\n[project.optional-dependencies]\ndocs = ["mkdocs>=1.6", "b"]\n'
    )
    steps = _fake_steps(monkeypatch)
    monkeypatch.delenv("TETHER_TORCH_INDEX", raising=False)
    set_up.set_up(root, ["docs"], ".venv-docs", with_tether=False)
    assert len(steps) == 2
    assert steps[1].endswith(f"-c {root}/constraints.txt b mkdocs>=1.6")
    set_up.set_up(root, ["docs"], ".venv-docs", with_tether=False)
    assert len(steps) == 2


def test_failure_leaves_no_fingerprint_and_the_next_run_resumes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_steps(monkeypatch, fail_at="install tether")
    with pytest.raises(set_up.SetUpError):
        set_up.set_up(root, ["gguf"])
    record = json.loads((root / ".venv" / set_up.RECORD).read_text())
    assert record["made"] is True
    assert record["installed"] is None
    steps = _fake_steps(monkeypatch)
    set_up.set_up(root, ["gguf"])
    assert len(steps) == 2, "the environment that was made is kept"
    assert json.loads((root / ".venv" / set_up.RECORD).read_text())["installed"] == set_up.fingerprint(root, PYTHON)


def test_update_that_fails_forgets_the_old_fingerprint(root: Path, venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "constraints.txt").write_text("torch==2.14.0\n")
    _fake_steps(monkeypatch, fail_at="build tool")
    with pytest.raises(set_up.SetUpError):
        set_up.set_up(root, ["gguf"])
    assert set_up.read_record(venv)["installed"] is None


def test_fresh_environment_is_usable_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_steps(monkeypatch)
    set_up.make_environment(root / ".venv", PYTHON)
    assert set_up.why_unusable(root / ".venv", PYTHON) is None
    assert not set_up.is_installed(set_up.read_record(root / ".venv"), set_up.fingerprint(root, PYTHON), [])


def test_missing_ensurepip_names_the_package(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(set_up.SetUpError, match=r"has no module ensurepip; install it \(Debian, Ubuntu: python3\.1\d-venv\)"):
        set_up.make_environment(root / ".venv", PYTHON)
    assert not (root / ".venv").exists()


# --------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("log", "free", "expected"),
    [
        ("OSError: [Errno 28] No space left on device", 10**12, "the disk is full"),
        ("killed", 10**8, "the disk is full (0.1 GiB free, about 3 GiB needed)"),
        (
            "NewConnectionError: Failed to establish a new connection\nERROR: No matching distribution",
            10**12,
            "the package index was not reached",
        ),
        (
            "SSLError(SSLCertVerificationError: certificate verify failed); connection broken",
            10**12,
            "certificate was refused: set PIP_CERT",
        ),
        ("fatal error: Python.h: No such file", 10**12, "the Python headers are missing"),
        ("ERROR: Could not find a version that satisfies torch==2.13.0", 10**12, "lacks a pinned version"),
        ("The user requested (constraint) torch==2.13.0\nERROR: ResolutionImpossible", 10**12, "lacks a pinned version"),
        ("PermissionError: Permission denied", 10**12, "check who owns"),
        ("something else", 10**12, "read the log"),
    ],
)
def test_advice(log: str, free: int, expected: str) -> None:
    assert expected in set_up.advice(log, free)


def test_failure_message_shows_the_end_of_the_last_step_only(tmp_path: Path) -> None:
    log = tmp_path / "set-up.log"
    lines = [f"line {number}" for number in range(40)]
    log.write_text("\n== make .venv\nNo space left on device\n== install\n" + "\n".join(lines) + "\n")
    message = set_up.failure_message("install", log, 10**12).splitlines()
    assert message[0] == "set-up: failed at: install"
    assert message[1:16] == [f"  | line {number}" for number in range(25, 40)]
    assert message[16] == f"log: {log}"
    log.write_text("\n== install\nonly line\n")
    assert set_up.failure_message("install", log, 10**12).splitlines()[1:3] == ["  | only line", f"log: {log}"]
    assert message[17] == "what to do: read the log; `make clean` removes .venv for a fresh start; then run the same command again"


def test_failing_command_is_logged_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(set_up.SetUpError, match="the package index was not reached"):
        set_up.run_step("install", [sys.executable, "-c", "import sys; sys.exit('Connection timed out')"], tmp_path)
    assert "Connection timed out" in (tmp_path / set_up.LOG).read_text()
    assert capsys.readouterr().out == "set-up: install ... failed\n"


def test_settings_of_another_python_do_not_leak_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/other")
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "file:///mirror")
    show = "import os; print([os.environ.get(k) for k in ('PYTHONPATH', 'PIP_USER', 'PIP_INDEX_URL')])"
    set_up.run_step("show", [sys.executable, "-c", show], tmp_path)
    assert (tmp_path / set_up.LOG).read_text() == "\n== show\n[None, '0', 'file:///mirror']\n"


def test_wrong_python_is_one_line(tmp_path: Path) -> None:
    """The check stands before anything an older Python could stumble over; run it with the version it sees changed."""
    code = "import sys; sys.version_info = (3, 9, 2); exec(compile(open(sys.argv[1]).read(), 'set_up', 'exec'))"
    done = subprocess.run([sys.executable, "-c", code, str(SCRIPT)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Tether needs Python 3.11, 3.12 or 3.13, but " in done.stderr
    assert " is 3.9.2; " in done.stderr
    assert "make with PYTHON=" in done.stderr
