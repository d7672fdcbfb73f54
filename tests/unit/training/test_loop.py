"""A run follows from its seed, byte for byte; stopped and resumed it is the same run; steps that cannot learn are skipped and said."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tether.core.config import dump_yaml, merge, validate
from tether.core.errors import CheckpointError, EnvironmentFailure
from tether.core.types import Observation, Step
from tether.envs.base import ActionOptions
from tether.envs.registry import ENVIRONMENTS
from tether.models.load import load_model
from tether.runs.checkpoints import list_checkpoints
from tether.runs.store import RunStore
from tether.training.callbacks import Callback
from tether.training.loop import Trainer
from tether.training.optim import FP32MasterAdamW
from tether.training.settings import RunSettings

SMALL: dict[str, Any] = {
    "env": {"name": "lucky"},
    "model": {"device": "cpu"},
    "rollout": {"num_groups": 2, "group_size": 2, "max_tokens": 12, "max_rows": 3, "format_penalty": 0.0},
    "learner": {"update_batch": 2, "learning_rate": 1e-3},
    "filter": {"strategy": "all"},
    "diagnosis": {"every": 2},
    "evaluation": {"prompts": 1},
    "checkpoint": {"every": 2, "keep": 3},
}


class _Flat:
    """Pays everybody the same."""

    name, max_turns, instructions = "flat", 1, "Say anything."
    Options = ActionOptions
    work = "inline"

    def __init__(self, options: Any) -> None:
        self._pay = 0.5

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        return Observation(f"begin with {seed % 1009}")

    def step(self, answer: str) -> Step:
        return Step(Observation("over"), self._pay, True, self._pay > 0.5, {"valid": True, "truncated": False})


class _Lucky(_Flat):
    """Pays what luck says."""

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        self._pay = (env_seed or 0) % 1009 / 1009
        return super().reset(seed)


class _Broken(_Flat):
    """No episode of it comes to an end."""

    def step(self, answer: str) -> Step:
        raise OSError("no such level")


@pytest.fixture(scope="module", autouse=True)
def small_model(small_policy: Callable[..., str]) -> Iterator[hf.PreTrainedModel]:
    """Runs of a moment: a small random model, whose rewards are luck. Returns what every run begins with."""
    folder = small_policy(1, closes=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SMALL["model"], "name", folder)
        patch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "flat": _Flat, "lucky": _Lucky, "broken": _Broken})
        yield load_model(folder, device="cpu").model


def _settings(**changes: Any) -> RunSettings:
    return validate(RunSettings, merge(SMALL, changes))


def _run(folder: Path, **changes: Any) -> Trainer:
    settings = _settings(**changes)
    store = RunStore.open(folder) if folder.exists() else RunStore.create(folder, dump_yaml(settings), {})
    trainer = Trainer(settings, store)
    trainer.run()
    return trainer


def _lines(folder: Path, name: str = "metrics.jsonl") -> dict[int, Any]:
    """The last record of each step."""
    return {record["step"]: record for record in map(json.loads, (folder / name).read_text().splitlines())}


def _weights(folder: Path) -> bytes:
    return (list_checkpoints(folder / "checkpoints")[-1] / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, small_model: hf.PreTrainedModel) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    _run(folder, steps=3)
    assert _weights(folder) != (folder / "checkpoints" / "step_000002" / "model" / "model.safetensors").read_bytes(), "it learns"
    return folder


def test_one_seed_one_run(straight: Path, tmp_path: Path) -> None:
    _run(tmp_path / "again", steps=3)
    for name in ("metrics.jsonl", "trajectories.jsonl", "config.yaml"):
        assert (tmp_path / "again" / name).read_bytes() == (straight / name).read_bytes(), name
    assert _weights(tmp_path / "again") == _weights(straight)


def test_a_run_for_its_numbers_writes_no_last_checkpoint(straight: Path, tmp_path: Path) -> None:
    _run(tmp_path / "numbers", steps=3, checkpoint={"every": 3, "best": False, "last": False})
    assert list_checkpoints(tmp_path / "numbers" / "checkpoints") == []
    assert (tmp_path / "numbers" / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()


def test_another_seed_another_run(straight: Path, tmp_path: Path) -> None:
    _run(tmp_path / "other", steps=1, seed=1)
    here, other = (list(RunStore.open(folder).trajectories(step=1, split="train")) for folder in (straight, tmp_path / "other"))
    assert not {t["seed"] for t in here} & {t["seed"] for t in other}
    assert _lines(tmp_path / "other")[0] == _lines(straight)[0]  # the untrained policy, on the same validation prompts


def test_what_a_run_leaves_behind(straight: Path) -> None:
    store = RunStore.open(straight)
    assert store.finished == "all 3 steps done"
    records = {record.step: record for record in store.steps()}
    assert list(records) == [0, 1, 2, 3]
    assert [step for step, record in records.items() if "validation/success" in record.metrics] == [0, 3]
    assert [step for step, record in records.items() if "information/mi_seq" in record.metrics] == [1, 3]
    assert not any(record.regime for record in records.values()), "two prompts are too few for a regime"
    assert [path.name for path in list_checkpoints(store.checkpoints)] == ["step_000002", "step_000003"]
    assert store.trajectory_blocks() == [(0, "validation"), (1, "train"), (2, "train"), (3, "train"), (3, "validation")]
    assert len(list(store.trajectories(step=1))) == 4
    for step in (1, 2, 3):
        metrics = records[step].metrics
        assert metrics["update/num_updates"] == 2 and metrics["update/skipped"] == 0
        assert metrics["update/mismatch"] < 1e-4  # sampler and learner agree on the log-probs before the update
        assert metrics["update/tokens_trained"] == metrics["rollout/tokens_sampled"]


def test_a_resumed_run_is_the_same_run(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    _run(folder, steps=2)
    assert _weights(folder) == (straight / "checkpoints" / "step_000002" / "model" / "model.safetensors").read_bytes()
    trainer = _run(folder, steps=3)
    assert trainer.step == 3
    resumed, uncut = _lines(folder), _lines(straight)
    assert list(resumed) == [0, 1, 2, 3]  # step 2 was also evaluated when it was the last one
    assert [resumed[step] for step in (0, 1, 3)] == [uncut[step] for step in (0, 1, 3)]
    assert _weights(folder) == _weights(straight)


class _Stopped(Callback):
    """Raises Ctrl-C at the beginning of a chosen stage of a chosen step."""

    def __init__(self, stage: str, after: int) -> None:
        self._stage, self._left = stage, after

    def on_stage_begin(self, name: str, total: int) -> None:
        if name == self._stage:
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt


@pytest.mark.parametrize(("stage", "after", "saved"), [("rollout", 2, 1), pytest.param("checkpoint", 1, 2, marks=pytest.mark.long)])
def test_stopped_anywhere_it_continues_to_the_same_end(straight: Path, tmp_path: Path, stage: str, after: int, saved: int) -> None:
    folder, settings = tmp_path / "run", _settings(steps=3)
    trainer = Trainer(settings, RunStore.create(folder, dump_yaml(settings), {}), [_Stopped(stage, after)])
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert list_checkpoints(folder / "checkpoints")[-1].name == f"step_{saved:06d}"
    _run(folder, steps=3)
    assert _lines(folder) == _lines(straight)
    assert _weights(folder) == _weights(straight)


def test_a_step_torn_by_a_second_interrupt_is_not_saved(straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second optimiser update of step 2 is cut off: weights of half a step must not pass for a checkpoint of step 1."""
    folder, settings = tmp_path / "run", _settings(steps=3)
    trainer = Trainer(settings, RunStore.create(folder, dump_yaml(settings), {}))
    real, calls = FP32MasterAdamW.step, []

    def step(optimizer: FP32MasterAdamW, finite: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        real(optimizer, finite)

    monkeypatch.setattr(FP32MasterAdamW, "step", step)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    _run(folder, steps=3)
    assert _weights(folder) == _weights(straight)
    assert _lines(folder) == _lines(straight)


def test_an_unreadable_checkpoint_is_named_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _run(folder, steps=1)
    state = folder / "checkpoints" / "step_000001" / "state.pt"
    state.write_bytes(b"")
    with pytest.raises(CheckpointError, match="step_000001"):
        _run(folder, steps=2)
    weights = folder / "checkpoints" / "step_000001" / "model" / "model.safetensors"
    weights.write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="step_000001"):
        _run(folder, steps=2)
    assert state.exists() and weights.exists()


@pytest.mark.parametrize(("env", "strategy"), [("flat", "top_p"), ("broken", "top_p"), ("broken", "all")])
def test_a_step_with_nothing_to_learn_is_skipped_counted_and_said(
    tmp_path: Path, env: str, strategy: str, small_model: hf.PreTrainedModel
) -> None:
    changes = {"env": {"name": env}, "filter": {"strategy": strategy}, "diagnosis": {"every": 0}}
    trainer = _start(tmp_path, changes)
    record = RunStore.open(tmp_path / "run").steps()[1]
    assert record.metrics["update/skipped"] == 1
    assert record.metrics["rollout/errors"] == (4 if env == "broken" else 0)
    assert any("the update was skipped" in note for note in record.notes)
    assert all(torch.equal(a, b) for a, b in zip(trainer.policy.module.parameters(), small_model.parameters(), strict=True))


def _start(tmp_path: Path, changes: dict[str, Any]) -> Trainer:
    data = {**SMALL, **changes, "steps": 1, "rollout": {**SMALL["rollout"], "max_tokens": 4, "format_penalty": 0.0}}
    settings = validate(RunSettings, data)
    trainer = Trainer(settings, RunStore.create(tmp_path / "run", dump_yaml(settings), {}))
    failing = pytest.raises(EnvironmentFailure, match="every episode of the run failed") if settings.env.name == "broken" else nullcontext()
    with failing:
        trainer.run()
    return trainer


def test_filtering_drops_groups(tmp_path: Path) -> None:
    _run(tmp_path / "run", steps=1, filter={"strategy": "top_k", "keep": 0.5, "score": "length"})
    store = RunStore.open(tmp_path / "run")
    metrics = store.steps()[1].metrics
    kept = [t for t in store.trajectories(step=1, split="train") if t["kept"]]
    assert metrics["groups/kept_ratio"] == 0.5 and len({t["group"] for t in kept}) == 1 and len(kept) == 2
    assert metrics["update/tokens_trained"] == sum(len(turn["response_ids"]) for t in kept for turn in t["turns"])
