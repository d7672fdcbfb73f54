"""A run killed with SIGKILL, at chosen points and at random moments, and resumed each time, ends as one that was never stopped.

The killing is done by scripts/kill_many.py, which can be asked for many more than there is time for here.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tether.runs.checkpoints import file_sum, write_manifest
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.training.checkpoint import keep_best, load_state, save_checkpoint

pytestmark = pytest.mark.long  # kills whole processes; tests/unit/training/test_loop.py stops runs at the same places in one

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_many.py"
NUM_POINTS = 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "words", "kills"),
    [
        ("grpo", ["0", "--points"], NUM_POINTS),
        pytest.param("grpo", ["3"], 3, marks=pytest.mark.long),
        pytest.param("ppo", ["2"], 2, marks=pytest.mark.long),
    ],
)
def test_killed_and_resumed_it_is_the_same_run(algo: str, words: list[str], kills: int) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), *words, "--algo", algo], capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = [line.removeprefix(f"{algo}: ") for line in done.stdout.splitlines()]
    assert sum(line.startswith("killed: ") for line in lines) == kills
    assert sum(line.startswith("equal: ") for line in lines) == sum(line.startswith("ended: ") for line in lines) >= 1


# The comparison itself can tell runs apart.


@pytest.fixture(scope="module")
def kill_many() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kill_many", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(folder: Path, tiny: Any) -> Path:
    store = RunStore.create(folder, "steps: 1\n", {})
    store.append(StepRecord(1, {"rollout/success": 0.5}))
    store.append_trajectories([{"step": 1, "split": "train", "reward": 1.0}])
    save_checkpoint(store.checkpoints, 1, tiny.model, tiny.tokenizer, {"moments": [torch.ones(2)], "streak": 0}, keep=1)
    keep_best(store.checkpoints, 1, 0.5)
    store.finish("done")
    return folder


def _another_state(folder: Path, **changes: Any) -> None:
    path = folder / "checkpoints" / "step_000001" / "state.pt"
    torch.save({**load_state(path.parent), **changes}, path)
    (path.parent / "manifest.json").unlink()  # it would say so, too
    sums = {str(file.relative_to(path.parent)): file_sum(file) for file in path.parent.rglob("*") if file.is_file()}
    write_manifest(path.parent, 1, sums)


def _another_config(folder: Path) -> None:
    path = folder / "checkpoints" / "step_000001" / "model" / "config.json"
    text = path.read_text()
    path.unlink()
    path.write_text(text + " ")


CHANGES: dict[str, Callable[[Path], Any]] = {
    "records": lambda run: RunStore.open(run).append(StepRecord(1, {"rollout/success": 0.25})),
    "trajectories": lambda run: RunStore.open(run).append_trajectories([{"step": 1, "split": "train", "reward": 0.0}]),
    "how it ended": lambda run: RunStore.open(run).finish("otherwise"),
    "step_000001: model": _another_config,
    "step_000001: state": lambda run: _another_state(run, moments=[torch.tensor([1.0, 1.0000001])]),
    "best: model": lambda run: (run / "checkpoints" / "best" / "best.json").write_text(json.dumps({"step": 0, "success": 0.5})),
    "checkpoints: ": lambda run: shutil.rmtree(run / "checkpoints" / "best"),
    "checkpoints: ['.unfinished": lambda run: (run / "checkpoints" / ".unfinished-x").mkdir(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_comparison_sees(what: str, tmp_path: Path, tiny: Any, kill_many: ModuleType) -> None:
    one, two = _run(tmp_path / "one", tiny), _run(tmp_path / "two", tiny)
    assert kill_many.differences(one, two) == []
    CHANGES[what](two)
    (found,) = kill_many.differences(one, two)
    assert found.startswith(what)


@pytest.mark.parametrize("change", [{"streak": 1}, {"streak": None}, {"moments": [torch.ones(2, dtype=torch.float64)]}, {"moments": []}])
def test_the_comparison_sees_other_states(change: dict[str, Any], tmp_path: Path, tiny: Any, kill_many: ModuleType) -> None:
    one, two = _run(tmp_path / "one", tiny), _run(tmp_path / "two", tiny)
    _another_state(two, **change)
    assert kill_many.differences(one, two) == ["step_000001: state"]


def test_attempts_do_not_count(tmp_path: Path, tiny: Any, kill_many: ModuleType) -> None:
    """A run that was resumed wrote a step twice."""
    one, two = _run(tmp_path / "one", tiny), _run(tmp_path / "two", tiny)
    store = RunStore.open(two)
    store.append(StepRecord(1, {"rollout/success": 0.5}))
    store.append_trajectories([{"step": 1, "split": "train", "reward": 1.0}])
    assert kill_many.differences(one, two) == []


def test_a_torn_checkpoint_is_seen(tmp_path: Path, tiny: Any, kill_many: ModuleType) -> None:
    run = _run(tmp_path / "run", tiny)
    assert kill_many.unreadable(run / "checkpoints") == []
    (run / "checkpoints" / "step_000001" / "model" / "model.safetensors").write_bytes(b"half")
    (found,) = kill_many.unreadable(run / "checkpoints")
    assert found.startswith("step_000001: ")
    assert len(kill_many.POINTS) == NUM_POINTS
