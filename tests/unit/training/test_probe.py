"""The fixed probe in real runs of `tiny`: what it plays, that it disturbs nothing, and that a resumed run measures the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tether.core.config import dump_yaml, merge, validate
from tether.core.seeding import validation_seed
from tether.core.types import Observation, Step
from tether.diagnostics.pairs import rollout_rows
from tether.envs.base import Work
from tether.envs.frozen_lake.env import FrozenLake
from tether.envs.registry import ENVIRONMENTS, make_env
from tether.runs.store import RunStore
from tether.training.evaluate import play_validation
from tether.training.loop import Trainer
from tether.training.settings import RunSettings

SMALL: dict[str, Any] = {
    "env": {"name": "frozen_lake", "options": {"max_turns": 1}},
    "model": {"device": "cpu"},
    "rollout": {"num_groups": 2, "group_size": 2, "max_tokens": 40},
    "learner": {"update_batch": 2, "learning_rate": 1e-3},
    "filter": {"strategy": "all"},
    "diagnosis": {"every": 1, "probe_prompts": 4, "probe_samples": 2},
    "evaluation": {"prompts": 1},
    "checkpoint": {"every": 1, "keep": 9, "best": False},
    "steps": 2,
}


def _trainer(folder: Path, **changes: Any) -> Trainer:
    settings = validate(RunSettings, merge(SMALL, changes))
    return Trainer(settings, RunStore.open(folder) if folder.exists() else RunStore.create(folder, dump_yaml(settings), {}))


def _run(folder: Path, **changes: Any) -> Trainer:
    trainer = _trainer(folder, **changes)
    trainer.run()
    return trainer


def _metrics(folder: Path) -> dict[int, dict[str, float]]:
    """The metrics of the last record of each step."""
    return {record["step"]: record["metrics"] for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return _run(tmp_path_factory.mktemp("probed") / "run")


def test_every_measurement_is_on_the_same_validation_prompts(probed: Trainer) -> None:
    """Four prompts with two reasonings each, and from the second measurement on a change that is the difference of the levels."""
    found = _metrics(probed.store.folder)
    assert all(found[step]["information/num_prompts"] == 4 for step in (1, 2))
    assert all(found[step]["information/num_reasonings"] + found[step]["information/num_empty"] == 8 for step in (1, 2))
    assert "information/mi_seq_change" not in found[1]
    for name in ("mi_seq", "retrieval_acc", "h_conditional"):
        level = f"information/{name}"
        assert found[2][f"{level}_change"] == found[2][level] - found[1][level]
        assert found[2][f"{level}_change_low"] <= found[2][f"{level}_change"] <= found[2][f"{level}_change_high"]
    assert found[2]["information/mi_seq_change"] != 0
    seconds = {line["step"]: line["seconds"] for line in probed.store.timings()}
    assert all(seconds[step]["probe"] > 0 and seconds[step]["diagnosis"] > 0 for step in (1, 2))


def test_the_probe_disturbs_nothing(probed: Trainer, tmp_path: Path) -> None:
    """Without it, everything but the section of the first turn is the same: weights, trajectories, the other scope, what the engine counted."""
    plain = _run(tmp_path / "run", diagnosis={"probe_prompts": 0})
    assert all(torch.equal(a, b) for a, b in zip(probed.policy.module.parameters(), plain.policy.module.parameters(), strict=True))
    assert list(probed.store.trajectories()) == list(plain.store.trajectories())
    with_probe, without = _metrics(probed.store.folder), _metrics(plain.store.folder)
    for step in range(3):
        others = [
            {name: value for name, value in found[step].items() if not name.startswith("information/")} for found in (with_probe, without)
        ]
        assert others[0] == others[1]
    assert not any("probe" in name or "change" in name for name in without[2])
    engines = [[line.get("engine") for line in trainer.store.timings()] for trainer in (probed, plain)]
    assert engines[0] == engines[1]
    assert not any("probe" in line["seconds"] for line in plain.store.timings())


@pytest.mark.long
def test_a_run_that_was_killed_measures_the_same(probed: Trainer, tmp_path: Path) -> None:
    """Stopped after its first step and continued by another trainer: the change is still since the first measurement."""
    _run(tmp_path / "run", steps=1)
    resumed = _run(tmp_path / "run")
    found, whole = _metrics(resumed.store.folder), _metrics(probed.store.folder)
    assert "information/mi_seq_change" in found[2] and found[2] == whole[2]
    assert resumed.monitor.state() == probed.monitor.state()


def test_only_first_turns_are_played_and_no_environment_takes_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two environments by weight, each with its own first validation prompts."""
    mixture = {"env": {"options": {"max_turns": 2}}, "also": [{"name": "sokoban", "options": {"max_turns": 2}, "weight": 2.0}]}
    trainer = _trainer(tmp_path / "run", **mixture)

    def step(env: Any, answer: str) -> Step:
        raise AssertionError("no step is due")

    monkeypatch.setattr(FrozenLake, "step", step)
    how: dict[str, Any] = {"samples": 2, "stage": "probe", "first_turn_only": True}
    groups, again = (play_validation(trainer.sampler, 6, trainer.settings.sampling(), **how) for _ in range(2))
    assert [(group.env, group.seed) for group in groups] == [
        *(("frozen_lake", validation_seed(index)) for index in range(2)),
        *(("sokoban", validation_seed(index)) for index in range(4)),
    ]
    assert [len(t.turns) for group in groups for t in group.trajectories] == [1] * 12 and not any(group.errored for group in groups)
    assert rollout_rows(groups) == rollout_rows(again), "the draws are the same every time"
    for group in groups:
        shown = make_env(group.env, split="validation", max_turns=2, instructions="plain").reset(group.seed).text
        assert group.trajectories[0].turns[0].observation == shown
        first, second = (trajectory.turns[0].response_ids for trajectory in group.trajectories)
        assert first != second or len(first) < 40
    monkeypatch.undo()
    played = play_validation(trainer.sampler, 2, trainer.settings.sampling(), samples=1)
    assert any(len(t.turns) > 1 for group in played for t in group.trajectories), "an evaluation plays on"


class _Flaky(FrozenLake):
    """Fails at two of the validation prompts."""

    work: Work = "inline"

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        if seed in (validation_seed(1), validation_seed(3)):
            raise OSError("no such lake")
        return super().reset(seed, env_seed=env_seed)


def test_errors_are_counted_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "flaky": _Flaky})
    trainer = _run(tmp_path / "run", steps=1, env={"name": "flaky"})
    record = trainer.store.steps()[-1]
    found = record.metrics
    assert (found["information/probe_errors"], found["information/num_prompts"], found["information/failed"]) == (4, 2, 0)
    errors, columns = (note for note in record.notes if note.startswith("probe: "))
    assert (
        errors.startswith("probe: 4 of 8 episodes ended by an environment error and were left out, all with: ") and "no such lake" in errors
    )
    assert columns.startswith("probe: 2 columns, not 4")
