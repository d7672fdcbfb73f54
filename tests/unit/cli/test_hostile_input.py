"""Hostile arguments, files and folders: each ends with one clear line and exit code 2, and none with a traceback or gigabytes."""

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from tether.cli.main import main
from tether.core.errors import BadInput
from tether.runs.store import RunStore

SMALL = ["--set", "rollout.num_groups=2", "--steps", "1"]


def _refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line that a command ends with; it must be one, not long, and bad input."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    said = capsys.readouterr().err.strip()
    assert ended.value.code == 2, said
    assert said.startswith("tether: ") and len(said) < 5000, said[:500]
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "env.options.name=x"], "unknown frozen_lake option key 'name'"),
        (
            ["--seed", "99999999999999999999999"],
            "config key 'seed': got 99999999999999999999999; it should be less than 9223372036854775808",
        ),
        (["--set", "a=" + "[" * 100 + "]" * 100], "--set a: the value '[[["),
        (["--set", "a=" + "{x: " * 70 + "1" + "}" * 70], "does not parse"),
        (["--set", ".".join("a" * 3000) + "=1"], "it names 2999 sections inside each other"),
        (["--set", "seed=" + "1" * 100_000], "put that much into a file"),
        (["--set", "nonsense" * 5000], "write it as key=value"),
        (["--set", "env.options.x=\udcff"], "argument 8 is not UTF-8 text: 'env.options.x=\\udcff'"),
        (
            ["--set", "rollout.group_size=1000000000"],
            "config key 'rollout.group_size': got 1000000000; it should be less than or equal to 100000",
        ),
        (["--set", "env.weight=.nan"], "config key 'env.weight': got nan; it should be a finite number"),
        (["--set", "env: {name: a, name: b}"], "write it as key=value"),
        (["--set", "env.options={slip: 0.1, slip: 0.2}"], "does not parse"),
        (["--set", 'algorithm.name="\\e]0;owned\\a"'], "\\x1b]0;owned\\x07"),
    ],
)
def test_arguments(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in _refused(capsys, "train", "frozen_lake", *SMALL, *words)
    assert "\x1b" not in capsys.readouterr().err


def test_a_device_without_numbers() -> None:
    from tether.models.hardware import check_device

    with pytest.raises(BadInput, match="device 'meta:0' holds no numbers, only shapes; use cpu or cuda"):
        check_device("meta:0")


def test_words_that_are_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert "argument 1 is not UTF-8 text" in _refused(capsys, "\udcff\udcfe")
    assert "argument 2 is not UTF-8 text" in _refused(capsys, "train", "\udcff\udcfe")


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bomb.yaml", BOMB, "it holds more than 50000 values, aliases written out"),
        ("deep.yaml", "a: " + "[" * 2_000, "it is nested too deeply"),
        ("deep.toml", "a = " + "[" * 20_000, "it is nested too deeply"),
        ("twice.yaml", "seed: 1\nsteps: 2\nseed: 3\n", "key 'seed' is given twice (line 3)"),
        ("inner.yaml", "env:\n  options: {slip: 0.1, slip: 0.2}\n", "key 'slip' is given twice"),
        ("many.yaml", "".join(f"wrong{n}: 1\n" for n in range(5000)), "and 4981 more problems"),
        ("value.yaml", f"seed: '{'x' * 500_000}'\n", "config key 'seed': got 'xxx"),
        ("bytes.yaml", b"seed: \xff\xfe\n", "is not UTF-8 text"),
        ("long.yaml", "# " + "x" * 2**20, "it is longer than 1048576 bytes"),
    ],
)
def test_settings_files(name: str, content: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert said in _refused(capsys, "train", "--config", str(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


def test_devices_and_pipes_are_no_settings_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in ("/dev/zero", str(tmp_path / "zero.yaml"), str(tmp_path / "pipe.yaml")):
        assert "it is no file" in _refused(capsys, "train", "--config", path)


# --- rollout files ---


def _rollouts(path: Path, **more: Any) -> str:
    rows = [
        {"group": g, "prompt": f"p{g}", "response": f"<think>r{g}{m}</think>", "reward": float(m), **more}
        for g in range(4)
        for m in range(2)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"step": "9" * 4301}, "step has 4301 digits"),
        ({"reward": 1e200}, "reward is 1e+200; numbers beyond 1e+50 cannot be computed with"),
    ],
)
def test_rollouts_with_impossible_numbers(more: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in _refused(capsys, "diagnose", _rollouts(tmp_path / "r.jsonl", **more), "--model", "tiny")


def test_a_step_of_thousands_of_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(Path(_rollouts(path, step=7)).read_text().replace('"step": 7', f'"step": {"9" * 4301}'))
    assert "is not JSON" in _refused(capsys, "diagnose", str(path), "--model", "tiny")


def test_parquet_that_is_no_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    raw = pyarrow.array([b"\xff\xfe", b"\x80"], pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"prompt": raw, "response": ["a", "b"], "reward": [0.0, 1.0], "group": [0, 0]})
    parquet.write_table(table, tmp_path / "r.parquet")
    assert "holds text that is not UTF-8" in _refused(capsys, "diagnose", str(tmp_path / "r.parquet"), "--model", "tiny")


# --- run folders ---


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return RunStore.create(tmp_path / "run", "steps: 1\n", {"env": "frozen_lake", "model": "tiny", "algorithm": "grpo", "seed": 0}).folder


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run.json", "[" * 100_000, "run.json' does not parse"),
        ("run.json", '{"schema": 1, "about": 5}', "has a int as about; expected an object"),
        ("run.json", '{"schema": "x", "about": {}}', "schema"),
        ("run.json", '{"schema": 1, "about": {}, "machine": [1]}', "has a list as machine; expected an object"),
        ("timings.jsonl", '{"step": 0, "seconds": [1, 2]}', "seconds is [1, 2]; expected numbers by name"),
        ("timings.jsonl", '{"step": 0, "peak_memory": {"update": 1' + "0" * 400 + "}}", "expected numbers by name"),
        ("timings.jsonl", '{"step": 0, "seconds": {"rollout": "long"}}', "seconds is {'rollout': 'long'}; expected numbers by name"),
        ("timings.jsonl", '{"step": 0, "tokens_per_second": {"a": 1}}', "tokens_per_second is {'a': 1}; expected a number"),
        ("timings.jsonl", '{"step": [], "seconds": {"rollout": 1}}', "has no whole number as step"),
    ],
)
def test_damaged_run_folders(run: Path, name: str, content: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = RunStore.open(run)
    (run / "metrics.jsonl").write_text('{"step": 0, "metrics": {"rollout/success": 0.5}}\n')
    if name == "run.json":
        content = content.replace('"schema": 1', f'"schema": {store._run_json()["schema"]}')
    (run / name).write_text(content)
    assert said in _refused(capsys, "report", str(run))


def test_a_new_run_folder_is_private(run: Path, tmp_path: Path) -> None:
    assert run.stat().st_mode & 0o777 == 0o700
    shared = tmp_path / "mine"
    shared.mkdir(mode=0o755)
    before = shared.stat().st_mode
    RunStore.create(shared, "", {})
    assert shared.stat().st_mode == before, "a folder of the user's stays as it is"
