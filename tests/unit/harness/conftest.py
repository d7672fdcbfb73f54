"""What the tests of experiments share: a small folder of experiments, and run folders written through the real store."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.cells import Cell
from harness.grid import Library, read_library
from tether.core.config import dump_yaml
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.training.resolve import resolve_settings

SCALES: dict[str, Any] = {
    "order": ["one", "two"],
    "smoke": {"steps": 2, "rollout": {"num_groups": 2, "group_size": 2}},
    "scales": {
        "tiny": {
            "words": "small runs",
            "minutes": 0.5,
            "settings": {"model": {"name": "tiny"}, "filter": {"strategy": "all"}, "steps": 30},
            "environments": {"sokoban": {}, "frozen_lake": {}},
        }
    },
}
ARMS: dict[str, Any] = {
    "none": {"words": "no filter"},
    "top_p": {"words": "top-p 0.9", "settings": {"filter": {"strategy": "top_p", "keep": 0.9}}},
}
ONE: dict[str, Any] = {
    "title": "Table 1",
    "claim": "The filter helps.",
    "arms": ["none", "top_p"],
    "scales": {"tiny": {"environments": ["sokoban"], "seeds": "0-2"}},
    "table": ["peak validation/success"],
    "plots": [
        {"file": "success.svg", "title": "Success", "kind": "curves", "y": "validation/success"},
        {"file": "peak.svg", "title": "Peak", "kind": "bars", "y": "peak validation/success"},
        {"file": "dots.svg", "title": "Dots", "kind": "scatter", "x": "last validation/success", "y": "peak validation/success"},
    ],
    "claims": [
        {
            "text": "The filter raises peak success.",
            "rule": {
                "kind": "above",
                "contrast": {"top_p": 1, "none": -1},
                "quantity": "peak validation/success",
                "environments": ["sokoban"],
                "margin": 0.03,
            },
        }
    ],
    "not_run": [{"what": "WebShop", "why": "not there"}],
}
TWO: dict[str, Any] = {
    "title": "Figure 2",
    "claim": "It shows.",
    "reads": ["one"],
    "correlations": ["peak validation/success"],
    "claims": [
        {"text": "It goes with it.", "rule": {"kind": "correlation", "x": "peak validation/success", "y": "last validation/success"}}
    ],
}


@pytest.fixture
def files() -> dict[str, Any]:
    """The data of the files of a small folder of experiments, by their short names; a test may change them."""
    return copy.deepcopy({"scales": SCALES, "arms": ARMS, "one": ONE, "two": TWO})


@pytest.fixture
def write_experiments() -> Callable[[Path, dict[str, Any]], Path]:
    return _write


def _write(folder: Path, data: dict[str, Any]) -> Path:
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "grid.yaml").write_text(yaml.safe_dump(data[name], sort_keys=False), encoding="utf-8")
    (folder / "one" / "paper.yaml").write_text(
        yaml.safe_dump({"source": "A paper, Table 1", "what": "Success.", "columns": ["arm", "success"], "rows": [["none", "1|2"]]}),
        encoding="utf-8",
    )
    for name in ("scales", "arms"):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(data[name], sort_keys=False), encoding="utf-8")
    return folder


@pytest.fixture
def library(tmp_path: Path, files: dict[str, Any]) -> Library:
    return read_library(_write(tmp_path / "experiments", files))


def episode(step: int, group: int, member: int, **changes: Any) -> dict[str, Any]:
    turn = {
        "observation": f"Turn 1 of 5, 10 actions left.\nboard {group}",
        "response": f"thought </think> <answer>answer {member}</answer>",
        "response_ids": [1, 2, 3],
        "logprobs": [-1.0, -2.0, -3.0],
    }
    plain = {"step": step, "split": "train", "group": group, "member": member, "reward": 0.0, "success": False, "error": None, "kept": True}
    return {**plain, "turns": [turn], **changes}


@pytest.fixture
def finished_run() -> Callable[..., Path]:
    """Writes the folder of a finished run of a cell."""

    def write(folder: Path, cell: Cell, success: float = 0.5, *, finished: bool = True) -> Path:
        settings = resolve_settings(None, cell.settings, {})
        store = RunStore.create(folder, dump_yaml(settings), {"env": cell.env})
        for step in range(cell.steps + 1):
            metrics = {"rollout/success": step / 10, "information/mi_seq": 1.0} if step else {}
            if step in (0, cell.steps):
                metrics["validation/success"] = success if step else 0.1
            store.append(StepRecord(step, metrics))
            store.append_timings(step, {"seconds": {"rollout": 0.5, "update": 1.5}, "peak_memory": {"update": 2_000_000_000}})
            if step:
                store.append_trajectories([episode(step, group, member) for group in range(2) for member in range(2)])
        store.computed_on({"device": "a machine"})
        if finished:
            store.finish(f"all {cell.steps} steps done")
        return folder

    return write
