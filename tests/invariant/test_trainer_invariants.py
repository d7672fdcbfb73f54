"""Settings that are about memory and speed must not change what a run does: the same tokens are sampled and the same loss comes out."""

from pathlib import Path
from typing import Any

import pytest

from tether.core.config import dump_yaml, validate
from tether.rollout.engines import native
from tether.runs.store import RunStore
from tether.training.settings import RunSettings
from tether.training.trainer import Trainer

BASE = {
    "env": {"name": "frozen_lake", "options": {"max_turns": 2}},
    "model": {"device": "cpu"},
    "rollout": {"num_groups": 2, "group_size": 2, "max_tokens": 40},
    "filter": {"strategy": "all"},
    "diagnosis": {"every": 1},
    "evaluation": {"prompts": 1},
    "steps": 1,
}


def _one_step(folder: Path, changes: dict[str, dict[str, Any]]) -> tuple[list[Any], dict[str, float]]:
    """What was sampled in the first step, and its numbers."""
    settings = validate(RunSettings, {**BASE, **{name: {**BASE.get(name, {}), **section} for name, section in changes.items()}})
    store = RunStore.create(folder, dump_yaml(settings), {})
    Trainer(settings, store).run()
    sampled = [[turn["response_ids"] for turn in t["turns"]] for t in store.trajectories(step=1)]
    return sampled, {record.step: record for record in store.steps()}[1].metrics


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, float]]:
    return _one_step(tmp_path_factory.mktemp("reference") / "run", {})


CASES = {
    "micro_tokens": ({"learner": {"micro_tokens": 1}}, {}),
    "max_rows": ({"rollout": {"max_rows": 1}}, {}),
    "FEED_SHARE": ({"rollout": {"max_rows": 3}}, {"FEED_SHARE": 1}),
    "PREFILL_TOKENS": ({}, {"PREFILL_TOKENS": 1, "FEED_SHARE": 10**9}),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_and_speed_do_not_change_the_result(case: str, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, constants = CASES[case]
    for name, value in constants.items():
        monkeypatch.setattr(native, name, value)
    sampled, metrics = _one_step(tmp_path / "run", changes)
    assert sampled == reference[0]
    assert metrics["update/loss"] == pytest.approx(reference[1]["update/loss"], abs=1e-5)
    assert metrics == pytest.approx(reference[1], rel=1e-4, abs=1e-4)
