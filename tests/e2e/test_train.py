"""`tether train` as a user runs it: the files it leaves, the same run from its own config, Ctrl-C and --resume, and a disk that takes no more."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tether.cli.main import main

pytestmark = pytest.mark.slow

TETHER = [sys.executable, "-c", "from tether.cli.main import main; main()"]
SMALL = [
    "rollout.num_groups=2",
    "rollout.group_size=2",
    "rollout.max_tokens=24",
    "env.options.max_turns=1",
    "evaluation.prompts=1",
    "model.device=cpu",
]
TRAIN = ["train", "frozen_lake", "--steps", "3", "--filter", "all", *(word for pair in SMALL for word in ("--set", pair))]


def _tether(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TETHER, *words], capture_output=True, text=True, check=False, timeout=300)


def _records(folder: Path) -> dict[int, Any]:
    """The last record of each step."""
    return {record["step"]: record for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("e2e") / "run"
    done = _tether([*TRAIN, "--out", str(folder)])
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stdout and "report: " in done.stdout
    return folder


def test_what_a_run_leaves_behind(run: Path) -> None:
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "report.html",
        "run.json",
        "timings.jsonl",
        "trajectories.jsonl",
        "trajectories.sqlite",
    ]
    assert (run / "checkpoints" / "step_000003" / "model" / "model.safetensors").is_file()
    assert json.loads((run / "run.json").read_text())["finished"] == "all 3 steps done"
    assert list(_records(run)) == [0, 1, 2, 3]
    page = (run / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html") and "frozen_lake" in page


def test_a_report_and_an_evaluation_of_the_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(run), "--out", str(tmp_path / "page.html")])
    assert stopped.value.code == 0 and (tmp_path / "page.html").stat().st_size > 10_000
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["eval", str(run), "--prompts", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert stopped.value.code == 0 and found["env"] == "frozen_lake"
    assert found["success"] == _records(run)[3]["metrics"]["validation/success"]  # the last checkpoint, the same prompt, the same draws


@pytest.mark.long
def test_interrupted_and_resumed_from_its_config_it_is_the_same_run(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    process = subprocess.Popen(
        [*TETHER, "train", "--config", str(run / "config.yaml"), "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and process.poll() is None:
            if (folder / "metrics.jsonl").exists() and 1 in _records_so_far(folder):
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert f"Continue with: tether train --resume --out {folder}" in " ".join(out.split())
    assert [path.name for path in (folder / "checkpoints").iterdir()] in (["step_000001"], ["step_000002"])
    assert json.loads((folder / "run.json").read_text())["finished"] is None
    done = _tether(["train", "--resume", "--out", str(folder)])
    assert done.returncode == 0, done.stderr
    assert _records(folder) == _records(run)
    weights = "checkpoints/step_000003/model/model.safetensors"
    assert (folder / weights).read_bytes() == (run / weights).read_bytes()


def _records_so_far(folder: Path) -> set[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return {json.loads(line)["step"] for line in lines if line.endswith("\n")}


@pytest.mark.long
def test_a_file_that_may_not_grow_is_said_plainly(run: Path) -> None:
    """The system refuses to make a file longer, as a full disk does. Runs last: it continues the run."""
    kept = {path: path.read_bytes() for path in (run / "metrics.jsonl", run / "trajectories.jsonl", run / "report.html")}
    most = len(kept[run / "trajectories.jsonl"]) + 1
    words = ["train", "--resume", "--steps", "4", "--out", str(run)]
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most})); from tether.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", limited, *words], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"tether: cannot write '{run / 'trajectories.jsonl'}': file too large; "
        "nothing already written is lost: raise the limit on the size of files (ulimit -f), then continue with --resume"
    )
    assert "Traceback" not in done.stderr
    for path, content in kept.items():
        assert path.read_bytes().startswith(content)
