"""`tether reproduce --smoke` for real: processes, training, harvest, page; and an interrupted cell that is resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TETHER = [sys.executable, "-m", "tether", "reproduce"]

pytestmark = [pytest.mark.slow, pytest.mark.long]  # forty seconds of processes


def test_smoke_runs_cells_and_leaves_the_experiments_alone(tmp_path: Path) -> None:
    before = _times()
    words = [*TETHER, "table_7", "--smoke", "--seeds", "0", "--jobs", "2", "--experiments", str(EXPERIMENTS)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "table_7: 2 of 2 cells" in done.stdout and done.stdout.count("all 2 steps done") == 2
    assert list(tmp_path.iterdir()) == [] and _times() == before


def _times() -> dict[Path, int]:
    """When each file was written, but for the modules that Python compiles."""
    return {path: path.stat().st_mtime_ns for path in EXPERIMENTS.rglob("*") if "harness" not in path.parts}


@pytest.mark.long
def test_an_interrupted_cell_is_resumed_and_a_finished_one_is_not_run_again(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXPERIMENTS, tmp_path / "experiments", ignore=shutil.ignore_patterns("cells", "results")))
    shared = yaml.safe_load((folder / "scales.yaml").read_text(encoding="utf-8"))
    shared["scales"]["tiny"]["settings"] = {
        **shared["smoke"],
        "rollout": {**shared["smoke"]["rollout"], "group_size": 4},
        "steps": 4,
        "diagnosis": {"every": 0},
        "filter": {"strategy": "all"},
    }
    (folder / "scales.yaml").write_text(yaml.safe_dump(shared, sort_keys=False), encoding="utf-8")
    rule = {"kind": "correlation", "x": "last rollout/success", "y": "last validation/success"}
    plan = {"environments": ["countdown"], "seeds": "0"}
    grid = {"title": "T", "claim": "C", "arms": ["none"], "scales": {"tiny": plan}, "claims": [{"text": "X", "rule": rule}]}
    (folder / "table_6" / "grid.yaml").write_text(yaml.safe_dump(grid, sort_keys=False), encoding="utf-8")
    words = [*TETHER, "table_6", "--jobs", "1"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}

    first = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment)
    runs = tmp_path / "runs" / "reproduce" / "tiny"
    while first.poll() is None and not any('"step": 2' in path.read_text() for path in runs.glob("*/metrics.jsonl")):
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=120)
    assert first.returncode == 130 and "interrupted; 1 cells are left, and the same command continues them" in said
    assert list(runs.glob("*/checkpoints/step_*")) and not (folder / "cells").exists()

    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0 and "all 4 steps done" in done.stdout, done.stdout + done.stderr
    steps = [json.loads(line)["step"] for path in runs.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    assert max(steps) == 4 and steps.count(1) == 1  # the second call went on behind the first step
    cells = list((folder / "cells" / "tiny").glob("*.json"))
    assert len(cells) == 1 and "Cells: 1 of 1 done." in (folder / "table_6" / "README.md").read_text(encoding="utf-8")

    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0 and "done:" not in done.stdout
