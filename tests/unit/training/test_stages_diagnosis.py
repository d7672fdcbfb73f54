"""The stage of diagnosis: the gradients as metrics, and that measuring changes nothing of the run.

Runs play an environment that pays by luck, two tokens an episode, on a small model of random weights.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tether.core.config import dump_yaml, merge, validate
from tether.core.errors import EnvironmentFailure
from tether.core.metrics import is_catalogued
from tether.core.types import Observation, Step
from tether.diagnostics.buckets import Bucket, SignalNoise
from tether.diagnostics.gradients import Bound, BucketGradients, Cosines, GradientDecomposition, gradient_metrics
from tether.diagnostics.monitor import Monitor
from tether.envs.base import ActionOptions
from tether.envs.registry import ENVIRONMENTS
from tether.rollout.engines.native import NativeEngine
from tether.runs.store import RunStore
from tether.training import stages
from tether.training.loop import Trainer
from tether.training.settings import RunSettings

# A decomposition as metrics.


def _row(number: int, **changes: Any) -> BucketGradients:
    values: dict[str, Any] = {
        "bucket": Bucket((number,), 0.1, 0.3, 0.2 * number),
        "num_trajectories": 4,
        "num_tokens": 40,
        "task_norm": 3.0,
        "kl_norm": 0.5,
        "entropy_norm": 0.25,
        "regulariser_norm": 1.0,
        "total_norm": 3.5,
        "with_bucket": Cosines(0.9, 0.8, 0.7),
        "with_batch": Cosines(0.6, -0.5, 0.4),
        "task_with_regulariser": -0.1,
        "halves": SignalNoise(4.0, 1.0),
        "bound": Bound(1.0, 4.0, 1.0),
    }
    return BucketGradients(**{**values, **changes})


def test_a_decomposition_as_metrics() -> None:
    absent = Cosines(0.3, None, None)
    second = _row(2, with_batch=absent, halves=SignalNoise(1.0, 0.0), task_with_regulariser=None, bound=Bound(3.0, 4.0, 1.0))
    third = _row(3, halves=None, task_norm=0.0, regulariser_norm=0.0, bound=None)
    found = gradient_metrics(GradientDecomposition((_row(1), second, third), 5.0, True, True, 10))
    first = {
        "rv_mean": 0.2,
        "task_norm": 3.0,
        "kl_norm": 0.5,
        "entropy_norm": 0.25,
        "regulariser_norm": 1.0,
        "dominance": 0.25,
        "task_cosine": 0.6,
        "kl_cosine": -0.5,
        "entropy_cosine": 0.4,
        "task_with_regulariser": -0.1,
        "snr": 2.0,
        "bound_used": 0.5,
    }
    assert {name.removesuffix("_1"): value for name, value in found.items() if name.endswith("_1")} == first
    assert found["rv_mean_2"] == 0.4 and found["bound_used_2"] == 1.5 and found["task_cosine_2"] == 0.3
    # None, and a signal without any noise, are left out.
    missing_2 = {"kl_cosine", "entropy_cosine", "task_with_regulariser", "snr"}
    assert {f"{name}_2" for name in first} - found.keys() == {f"{name}_2" for name in missing_2}
    assert {f"{name}_3" for name in first} - found.keys() == {"dominance_3", "snr_3", "bound_used_3"}
    assert (found["failed"], found["bound_broken"]) == (0, 1)
    assert all(is_catalogued(f"gradients/{name}") and math.isfinite(value) for name, value in found.items())


def test_a_bound_that_was_not_checked_is_not_called_unbroken() -> None:
    assert "bound_broken" not in gradient_metrics(GradientDecomposition((_row(1, bound=None),), 5.0, True, True, 10))


# In runs.

QUICK: dict[str, Any] = {
    "env": {"name": "lucky"},
    "model": {"device": "cpu"},
    "rollout": {"num_groups": 4, "group_size": 4, "max_tokens": 2, "format_penalty": 0.0},
    "filter": {"strategy": "top_k", "keep": 0.5},
    "learner": {"update_batch": 8, "learning_rate": 1e-3},
    "algorithm": {"name": "grpo", "kl_coef": 0.1, "entropy_coef": 0.01},
    "diagnosis": {"every": 0},
    "evaluation": {"prompts": 1},
    "checkpoint": {"every": 50, "best": False},
    "early_stop": {"invalid_steps": 0},
    "steps": 3,
}
GRADIENTS = {"gradients": {"every": 2, "buckets": 3}}


class _Lucky:
    """Pays what luck says."""

    name, max_turns, instructions = "lucky", 1, "Say anything."
    Options = ActionOptions
    work = "inline"

    def __init__(self, options: Any) -> None:
        self._pay = 0.0

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        self._pay = (env_seed or 0) % 1009 / 1009
        return Observation("begin")

    def step(self, answer: str) -> Step:
        return Step(Observation("over"), self._pay, True, self._pay > 0.5, {"valid": True, "truncated": False})


class _Broken(_Lucky):
    def step(self, answer: str) -> Step:
        raise OSError("no such level")


@pytest.fixture(autouse=True, scope="module")
def small_model(small_policy: Any) -> None:
    """Two layers, so that the last is not all of it."""
    QUICK["model"]["name"] = small_policy(2)


@pytest.fixture(autouse=True)
def lucky(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "lucky": _Lucky, "broken": _Broken})


def _run(folder: Path, **changes: Any) -> Trainer:
    settings = validate(RunSettings, merge(QUICK, changes))
    trainer = Trainer(settings, RunStore.create(folder, dump_yaml(settings), {}))
    trainer.run()
    return trainer


def _split(trainer: Trainer) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, float]]]:
    """By step: the gradients' metrics, and the others."""
    records = {record.step: record.metrics for record in trainer.store.steps()}
    return (
        {
            step: {n.removeprefix("gradients/"): v for n, v in metrics.items() if n.startswith("gradients/")}
            for step, metrics in records.items()
        },
        {step: {n: v for n, v in metrics.items() if not n.startswith("gradients/")} for step, metrics in records.items()},
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, small_model: None) -> Any:
    """A run without gradient metrics: its other metrics, its weights and its trajectories."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "lucky": _Lucky})
        trainer = _run(tmp_path_factory.mktemp("plain") / "run")
    gradients, others = _split(trainer)
    assert not any(gradients.values())
    return others, [parameter.detach().clone() for parameter in trainer.policy.module.parameters()], list(trainer.store.trajectories())


def _unchanged(trainer: Trainer, plain: Any) -> None:
    others, weights, trajectories = plain
    assert _split(trainer)[1] == others
    assert all(torch.equal(a, b) for a, b in zip(trainer.policy.module.parameters(), weights, strict=True))
    assert list(trainer.store.trajectories()) == trajectories


@pytest.mark.parametrize("parameters", ["last", "all", ["lm_head", "model.norm"]])
def test_gradients_of_the_steps_own_prompts(parameters: Any, tmp_path: Path, plain: Any) -> None:
    """Of all four groups, though the filter trains on two."""
    trainer = _run(tmp_path / "run", diagnosis=merge(GRADIENTS, {"gradients": {"parameters": parameters}}))
    _unchanged(trainer, plain)
    gradients, others = _split(trainer)
    assert [step for step, found in gradients.items() if found] == [1, 3]
    for step in (1, 3):
        found = gradients[step]
        assert (found["failed"], found["bound_broken"]) == (0, 0)
        means = [found[f"rv_mean_{bucket}"] for bucket in (1, 2, 3)]
        assert means == sorted(means) and "rv_mean_4" not in found
        rewards: dict[int, list[float]] = {}
        for played in trainer.store.trajectories(step=step, split="train"):
            rewards.setdefault(played["group"], []).append(played["reward"])
        variances = sorted(torch.tensor(paid, dtype=torch.float64).var().item() for paid in rewards.values())
        assert len(variances) == 4 and means[0] < sum(variances) / 4 < means[2]
        assert means[0] == pytest.approx(variances[0]) or means[0] == pytest.approx(sum(variances[:2]) / 2)
        assert all(found[f"task_norm_{bucket}"] > 0 and found[f"entropy_norm_{bucket}"] > 0 for bucket in (1, 2, 3))
        assert (found["kl_norm_1"] > 0) == (step == 3), "at the start the policy is the reference"
        assert others[step]["groups/kept"] == 2


def test_prompts_of_their_own_are_played_apart(tmp_path: Path, plain: Any) -> None:
    """They are on no record, and the step's own are the same."""
    trainer = _run(tmp_path / "run", diagnosis=merge(GRADIENTS, {"gradients": {"prompts": 5, "buckets": 5, "bound": False}}))
    _unchanged(trainer, plain)
    gradients = _split(trainer)[0]
    assert [step for step, found in gradients.items() if found] == [1, 3]
    assert "rv_mean_5" in gradients[1] and "bound_broken" not in gradients[1] and gradients[1]["failed"] == 0
    own = _split(_run(tmp_path / "own", diagnosis=GRADIENTS))[0]
    assert gradients[1]["rv_mean_1"] != own[1]["rv_mean_1"] and gradients[1]["rv_mean_1"] != gradients[3]["rv_mean_1"]


def test_a_decomposition_that_fails_is_on_the_record_and_training_continues(tmp_path: Path, plain: Any) -> None:
    trainer = _run(tmp_path / "run", diagnosis=merge(GRADIENTS, {"gradients": {"parameters": ["lm_hed"]}}))
    _unchanged(trainer, plain)
    gradients = _split(trainer)[0]
    assert gradients[1] == gradients[3] == {"failed": 1} and gradients[2] == {}
    notes = {record.step: record.notes for record in trainer.store.steps()}
    assert [len(notes[step]) for step in (1, 2, 3)] == [2, 0, 1]  # the first step also says how many replies were valid
    assert notes[1][0].startswith("gradient decomposition failed: ") and "lm_hed" in notes[1][0] and "\n" not in notes[1][0]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_nothing_was_said(algorithm: str, tmp_path: Path) -> None:
    """Every episode was ended by an error: there is no gradient to take apart, and a note says so."""
    changes = {"steps": 1, "env": {"name": "broken"}, "algorithm": {"name": algorithm}, "diagnosis": {**GRADIENTS, "every": 1}}
    settings = validate(RunSettings, merge(QUICK, changes))
    trainer = Trainer(settings, RunStore.create(tmp_path / "run", dump_yaml(settings), {}))
    with pytest.raises(EnvironmentFailure, match="every episode of the run failed"):
        trainer.run()
    record = trainer.store.steps()[1]
    assert _split(trainer)[0][1] == {"failed": 1} and record.metrics["information/num_reasonings"] == 0
    assert "gradient decomposition failed: none of 16 episodes holds a response; look at their errors" in record.notes


def _failing_engine(monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """The engine runs out of memory in these of its runs, counted from 1: the first validation, the rollout of step 1, that for gradients."""
    real, seen = NativeEngine.run, []

    def run(*given: Any, **named: Any) -> None:
        seen.append(1)
        if len(seen) in calls:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        real(*given, **named)

    monkeypatch.setattr(NativeEngine, "run", run)


OWN_PROMPTS = merge(GRADIENTS, {"gradients": {"prompts": 2}})


def test_a_rollout_for_gradients_that_runs_out_of_memory_is_played_again(
    tmp_path: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half the rows, and the same episodes: the gradients are those of a run with enough memory."""
    roomy = _split(_run(tmp_path / "roomy", diagnosis=OWN_PROMPTS))[0]
    _failing_engine(monkeypatch, 3)
    trainer = _run(tmp_path / "run", diagnosis=OWN_PROMPTS)
    _unchanged(trainer, plain)
    assert _split(trainer)[0] == roomy and roomy[1]["failed"] == roomy[3]["failed"] == 0
    notes = [[note for note in record.notes if " replies was valid: " not in note] for record in trainer.store.steps()]
    assert notes == [[], ["out of memory in the rollout with rollout.max_rows=128; played again with 64"], [], []]
    assert trainer.sampler.max_rows == 64


def test_a_rollout_for_gradients_that_does_not_fit_ends_nothing(tmp_path: Path, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _failing_engine(monkeypatch, 3, 4)
    trainer = _run(tmp_path / "run", diagnosis=OWN_PROMPTS)
    _unchanged(trainer, plain)
    assert _split(trainer)[0][1] == {"failed": 1} and _split(trainer)[0][3]["failed"] == 0
    again, failed, _replies = trainer.store.steps()[1].notes
    assert again == "out of memory in the rollout with rollout.max_rows=128; played again with 64"
    assert failed.startswith("gradient decomposition failed: out of memory in the rollout (Tried") and "rollout.max_rows (now 64)" in failed


def test_the_budget_follows_the_work_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the monitor is told is the step's tokens, epochs counted, and the groups before the filter."""
    told = []
    real = Monitor.observe

    def observe(monitor: Any, step: int, *, groups: Any, work: float, **rows: Any) -> Any:
        told.append((step, len(set(groups)), work))
        return real(monitor, step, groups=groups, work=work, **rows)

    monkeypatch.setattr(Monitor, "observe", observe)
    trainer = _run(tmp_path / "run", steps=2, diagnosis={"every": 1}, learner={"epochs": 2})
    for step, count, work in told:
        tokens = {True: 0, False: 0}
        for played in trainer.store.trajectories(step=step, split="train"):
            tokens[played["kept"]] += sum(len(turn["context_ids"]) + len(turn["response_ids"]) for turn in played["turns"])
        assert count == 4 and work == tokens[True] + tokens[False] + 6 * tokens[True]
    assert [step for step, _, _ in told] == [1, 2]


def test_the_gradients_are_those_of_the_runs_own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temperature, budgets and buckets are the run's; the halves are dealt anew in every step."""
    asked: list[dict[str, Any]] = []
    real = stages.decompose_gradients

    def decompose(model: Any, batch: Any, algorithm: Any, variances: Any, **how: Any) -> GradientDecomposition:
        asked.append(how)
        return real(model, batch, algorithm, variances, **how)

    monkeypatch.setattr(stages, "decompose_gradients", decompose)
    changes = {"rollout": {"temperature": 0.7}, "learner": {"micro_tokens": 900}, "algorithm": {"name": "dr_grpo"}}
    trainer = _run(tmp_path / "run", steps=2, diagnosis={"gradients": {"every": 1, "buckets": 2, "bound": False}}, **changes)
    assert all(_split(trainer)[0][step]["failed"] == 0 for step in (1, 2))
    seeds = [how.pop("seed") for how in asked]
    assert all(how.pop("ranks") is trainer.ranks for how in asked)
    same = {"temperature": 0.7, "micro_tokens": 900, "max_tokens": 2, "parameters": "last", "num_buckets": 2, "with_bound": False}
    assert asked == [same, same] and len(set(seeds)) == 2
