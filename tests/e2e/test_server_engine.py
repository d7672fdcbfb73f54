"""Training through servers over real HTTP: the same run as with the native engine, with dead servers, and refused where weights differ."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tether
from tether.models.load import LoadedModel
from tether.rollout.serving.app import serving_model
from tether.runs.store import RunStore

SETTINGS: dict[str, Any] = {
    "steps": 2,
    "rollout": {"num_groups": 2, "group_size": 4, "max_tokens": 40, "max_context": 900, "max_rows": 8},
    "learner": {"update_batch": 4, "learning_rate": 1e-4},
    "evaluation": {"prompts": 2},
    "diagnosis": {"every": 0},
    "algorithm": {"importance_cap": 2.0},
    "filter": "all",
    "checkpoint": {"every": 1},
}


def _train(out: Path, engine: str, **more: Any) -> RunStore:
    settings = {**SETTINGS, **more}
    settings["rollout"] = {**SETTINGS["rollout"], "engine": engine}
    tether.train("frozen_lake", out=out, **settings)
    return RunStore.open(out)


def _weights(store: RunStore, step: int) -> dict[str, torch.Tensor]:
    return load_file(store.checkpoints / f"step_{step:06d}" / "model" / "model.safetensors")


def _responses(store: RunStore) -> list[Any]:
    lines = (store.folder / "trajectories.jsonl").read_text().splitlines()
    return [[turn["response_ids"] for turn in json.loads(line)["turns"]] for line in lines]


@contextmanager
def _served(tiny: Any) -> Iterator[str]:
    with serving_model(LoadedModel(copy.deepcopy(tiny.model), tiny.tokenizer), "tiny", max_rows=8) as url:
        yield url


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    return _train(tmp_path_factory.mktemp("native") / "run", "native")


def test_a_run_through_a_server_is_the_native_run(tiny: Any, native: RunStore, tmp_path: Path) -> None:
    with _served(tiny) as url:
        served = _train(tmp_path / "run", url)
    assert _responses(served) == _responses(native)
    for name, tensor in _weights(served, 2).items():
        assert torch.allclose(tensor, _weights(native, 2)[name], rtol=0, atol=1e-5), name
    assert not torch.equal(_weights(served, 2)["model.norm.weight"], _weights(served, 1)["model.norm.weight"])
    for record in served.steps()[1:]:
        assert record.metrics["update/mismatch"] < 1e-4
        assert record.metrics["update/probe_difference"] < 1e-5
        assert record.metrics["rollout/staleness"] == 0
    assert json.loads((served.folder / "run.json").read_text())["machine"]["engine"] == "server (tether)"
