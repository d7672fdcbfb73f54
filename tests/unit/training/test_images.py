"""Whole runs of a model that sees: what was sampled is what the learner computes, resumed it is the same run, and the record holds the pictures."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tests.unit.models.sighted import write_model

import tether
from tether.core.errors import BadInput
from tether.core.images import Image
from tether.core.types import Observation, Step
from tether.envs.base import ActionOptions
from tether.envs.registry import ENVIRONMENTS
from tether.models.load import load_model
from tether.rollout.serving.app import serving_model
from tether.runs.checkpoints import list_checkpoints


class _Pictures:
    """Shows a picture a turn and pays what luck says."""

    name, max_turns, instructions = "pictures", 2, "Say anything."
    Options = ActionOptions
    work = "inline"

    def __init__(self, options: Any) -> None:
        self._turn = 0

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        self._seed, self._turn, self._pay = seed, 0, (env_seed or 0) % 1009 / 1009
        return self._show()

    def _show(self) -> Observation:
        return Observation("Look.", np.random.default_rng([self._seed, self._turn]).integers(0, 255, (16, 24, 3), dtype=np.uint8))

    def step(self, answer: str) -> Step:
        self._turn += 1
        return Step(self._show(), self._pay * (self._turn == 2), self._turn == 2, self._turn == 2, {"valid": True, "truncated": False})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Settings of a run of a moment. The model closes its reasoning every few words: the first dimension is the same for all of them."""
    folder = tmp_path_factory.mktemp("sighted") / "model"
    model, tokenizer = load_model(str(write_model("qwen2_5_vl", folder)), device="cpu")
    whole: Any = model
    whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.detach().clone())
    whole.config.tie_word_embeddings = whole.config.text_config.tie_word_embeddings = False
    with torch.no_grad():
        whole.get_input_embeddings().weight[:, 0] = 1.0
        whole.lm_head.weight[tokenizer.convert_tokens_to_ids("</think>"), 0] = 0.6
    model.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "pictures": _Pictures})
        yield {
            "env": {"name": "pictures"},
            "model": {"name": str(folder), "device": "cpu"},
            "rollout": {"num_groups": 3, "group_size": 3, "max_tokens": 12, "max_context": 400, "format_penalty": 0.0},
            "learner": {"update_batch": 3, "learning_rate": 1e-3},
            "filter": {"strategy": "all"},
            "diagnosis": {"every": 1},
            "evaluation": {"prompts": 1},
            "checkpoint": {"every": 1, "keep": 3},
            "steps": 2,
        }


def _metrics(folder: Path) -> dict[int, dict[str, Any]]:
    return {record["step"]: record["metrics"] for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}


def _train(settings: dict[str, Any], out: Path) -> None:
    config = out.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(settings))
    tether.train(config=config, out=out)


@pytest.fixture(scope="module")
def run(small: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    _train(small, folder)
    return folder


def _last(folder: Path) -> Path:
    return list_checkpoints(folder / "checkpoints")[-1] / "model"


def test_a_run_is_exact_and_its_record_holds_the_pictures(small: dict[str, Any], run: Path) -> None:
    found = _metrics(run)
    assert all(found[step]["update/mismatch"] < 1e-5 for step in (1, 2)), found
    assert {"information/image_swapped", "information/image_blank"} <= found[1].keys() | found[2].keys()
    records = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    shown = {digest for record in records for turn in record["turns"] for _, _, digest, _ in turn["images"]}
    assert shown and shown == {path.stem for path in (run / "images").glob("*.png")}
    assert all(Image.read(run / "images" / f"{digest}.png").digest == digest for digest in shown)
    trained, start = load_model(str(_last(run)), device="cpu").model, load_model(small["model"]["name"], device="cpu").model
    pairs = zip(trained.named_parameters(), start.parameters(), strict=True)
    changed = {name for (name, parameter), before in pairs if not torch.equal(parameter, before)}
    assert changed and not any("visual" in name for name in changed), "the tower is frozen"


def test_through_a_server_it_is_the_same_run(small: dict[str, Any], run: Path, tmp_path: Path) -> None:
    with serving_model(load_model(small["model"]["name"], device="cpu"), "model", max_rows=4) as url:
        _train({**small, "rollout": {**small["rollout"], "engine": url}}, tmp_path / "served")
    sampled = [
        [[turn["response_ids"] for turn in json.loads(line)["turns"]] for line in (folder / "trajectories.jsonl").read_text().splitlines()]
        for folder in (run, tmp_path / "served")
    ]
    assert sampled[0] == sampled[1]
    assert all(_metrics(tmp_path / "served")[step]["update/mismatch"] < 1e-5 for step in (1, 2))


def test_resumed_it_is_the_same_run(small: dict[str, Any], run: Path, tmp_path: Path) -> None:
    _train({**small, "steps": 1}, tmp_path / "stopped")
    tether.train(out=tmp_path / "stopped", resume=True, steps=2)
    assert (_last(run) / "model.safetensors").read_bytes() == (_last(tmp_path / "stopped") / "model.safetensors").read_bytes()


def test_a_model_that_reads_text_only_is_refused_before_anything_is_played(small: dict[str, Any], tmp_path: Path) -> None:
    for env in ({"name": "frozen_lake", "options": {"observation": "image"}}, {"name": "pictures"}):
        with pytest.raises(BadInput, match=r"shows images, and (the )?model .*reads text only"):
            _train({**small, "env": env, "model": {"name": "tiny", "device": "cpu"}}, tmp_path / env["name"])


def test_a_trained_tower_learns(small: dict[str, Any], tmp_path: Path) -> None:
    learner = {**small["learner"], "train_vision": True}
    _train({**small, "learner": learner, "steps": 1}, tmp_path / "run")
    assert _metrics(tmp_path / "run")[1]["update/mismatch"] < 1e-5
    trained = load_model(str(list_checkpoints(tmp_path / "run" / "checkpoints")[-1] / "model"), device="cpu").model
    start = load_model(small["model"]["name"], device="cpu").model
    pairs = zip(trained.named_parameters(), start.parameters(), strict=True)
    assert any("visual" in name and not torch.equal(parameter, before) for (name, parameter), before in pairs)
