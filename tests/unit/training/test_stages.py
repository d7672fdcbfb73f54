"""The stages of a step in short real runs: filter and refill, members and weights, schedules, the critic's first steps, broken numbers.

The environment pays by luck alone, a few tokens an episode, and the model is small and random, so a run takes a moment.
"""

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from tether.core.config import dump_yaml, merge, validate
from tether.core.enums import FinishReason, StopReason
from tether.core.errors import EngineUnavailable
from tether.core.seeding import env_seed
from tether.core.types import Group, Observation, Step, Trajectory, Turn
from tether.diagnostics import monitor
from tether.envs.base import ActionOptions
from tether.envs.registry import ENVIRONMENTS
from tether.models.fast_path import DecoderChoice, fast_path_report
from tether.models.load import load_model
from tether.runs.checkpoints import best_checkpoint, list_checkpoints
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.runs.timings import StepTimings
from tether.training import build as build_module
from tether.training import stages
from tether.training.batch import SampledBatch, select
from tether.training.callbacks import Callback
from tether.training.checkpoint import load_state
from tether.training.loop import Trainer
from tether.training.memory import MemoryPlan
from tether.training.settings import RunSettings

QUICK: dict[str, Any] = {
    "env": {"name": "lucky"},
    "model": {"device": "cpu"},
    "rollout": {"num_groups": 4, "group_size": 4, "max_tokens": 4, "format_penalty": 0.0},
    "filter": {"strategy": "all"},
    "learner": {"update_batch": 64, "learning_rate": 1e-4},
    "diagnosis": {"every": 0},
    "evaluation": {"prompts": 2},
    "checkpoint": {"every": 50},
    "early_stop": {"invalid_steps": 0},
}


class _Lucky:
    """Pays what luck says; half of the episodes succeed."""

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


@pytest.fixture(autouse=True)
def lucky(monkeypatch: pytest.MonkeyPatch, small_policy: Callable[..., str]) -> None:
    monkeypatch.setitem(QUICK["model"], "name", small_policy(1))
    monkeypatch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "lucky": _Lucky})


@pytest.fixture
def start(small_policy: Callable[..., str]) -> hf.PreTrainedModel:
    """The model that every run begins with."""
    return load_model(small_policy(1), device="cpu").model


def _trainer(folder: Path, **changes: Any) -> Trainer:
    settings = validate(RunSettings, merge(QUICK, changes))
    return Trainer(settings, RunStore.create(folder, dump_yaml(settings), {}))


def _run(folder: Path, **changes: Any) -> Trainer:
    trainer = _trainer(folder, **changes)
    trainer.run()
    return trainer


def _metrics(trainer: Trainer) -> list[dict[str, float]]:
    """Of the trained steps."""
    return [record.metrics for record in trainer.store.steps() if record.step]


# Filter and refill.


def test_filtering_scales_the_loss(tmp_path: Path) -> None:
    """Half of the groups are kept, so the loss weighs a half, its root, or one; it is not zero, because the entropy bonus is in it."""
    losses = {}
    for scale in ("none", "kept_ratio", "sqrt"):
        rule = {"strategy": "top_k", "keep": 0.5, "loss_scale": scale}
        (metrics,) = _metrics(_run(tmp_path / scale, steps=1, filter=rule))
        assert metrics["groups/kept_ratio"] == 0.5
        losses[scale] = metrics["update/loss"]
    assert abs(losses["none"]) > 1e-6
    assert losses["kept_ratio"] == pytest.approx(0.5 * losses["none"], rel=1e-5)
    assert losses["sqrt"] == pytest.approx(0.5**0.5 * losses["none"], rel=1e-5)


def test_a_refilled_batch_counts_in_full(tmp_path: Path) -> None:
    """Half of eight groups fill the batch of four: the kept ratio is a half, the share of the batch is one."""
    losses = {}
    for scale in ("none", "kept_ratio"):
        rule = {"strategy": "top_k", "keep": 0.5, "loss_scale": scale, "refill": 1}
        trainer = _run(tmp_path / scale, steps=1, filter=rule)
        (metrics,) = _metrics(trainer)
        losses[scale] = metrics["update/loss"]
    assert losses["none"] == losses["kept_ratio"] != 0
    assert [metrics[f"groups/{name}"] for name in ("sampled", "kept", "kept_ratio", "rounds")] == [8, 4, 0.5, 2]
    assert metrics["rollout/tokens_sampled"] == metrics["update/tokens_trained"] + metrics["groups/tokens_discarded"]
    assert metrics["update/tokens_trained"] == 4 * 4 * 4
    played = list(trainer.store.trajectories(step=1, split="train"))
    assert [t["group"] for t in played] == [group for group in range(8) for _ in range(4)]
    assert len({t["seed"] for t in played}) == 8
    assert sum(t["kept"] for t in played) == 16


def test_dapo_replaces_groups_that_all_fail_or_all_succeed(tmp_path: Path) -> None:
    """With two members half of the groups do; a round after the other is sampled until the batch is full."""
    trainer = _run(tmp_path / "run", steps=2, algorithm={"name": "dapo"}, rollout={"group_size": 2, "overlong_share": 0})
    for step, metrics in enumerate(_metrics(trainer), start=1):
        assert metrics["groups/kept"] == 4 and metrics["groups/rounds"] > 1
        assert metrics["rollout/tokens_sampled"] == metrics["update/tokens_trained"] + metrics["groups/tokens_discarded"]
        played = list(trainer.store.trajectories(step=step, split="train"))
        for group in {t["group"] for t in played}:
            members = [t for t in played if t["group"] == group]
            mixed = len({t["success"] for t in members}) == 2
            assert mixed or not any(t["kept"] for t in members)


@pytest.mark.parametrize(
    ("earlier", "steps", "keeps_all"),
    [([0.0, 0.0, 9.0], 2, False), ([9.0, 9.0, 0.0], 2, True), ([0.0, 0.0, 9.0], 1, True), ([0.0, 0.0, 9.0], 4, False)],
)
def test_auto_reads_the_ratios_of_recent_steps(tmp_path: Path, earlier: list[float], steps: int, keeps_all: bool) -> None:
    """The batch's own ratio lies between 0 and 1; with auto_steps - 1 steps before it the mean is above 1 or below."""
    trainer = _trainer(tmp_path / "run", filter={"strategy": "auto", "keep": 0.5, "auto_ratio": 1.2, "auto_steps": steps})
    for step, ratio in enumerate(earlier, start=1):
        trainer.store.append(StepRecord(step, {"groups/rv_ratio": ratio}))
    trainer.store.append(StepRecord(4, {"groups/rv_ratio": 1e9}))  # of a step that is played again
    trainer.step = 3
    trainer.save()
    trainer.saver.finish()
    resumed = Trainer(trainer.settings, RunStore.open(tmp_path / "run"))
    assert [record.step for record in resumed.records] == [1, 2, 3]
    sampled = resumed.rollouts.sample(4, resumed.alarm_actions.filter_inputs(resumed.records))
    assert 0 < sampled.selection.rv_ratio < 1.2
    assert (len(sampled.kept) == 4) is keeps_all


# Members and weights: the advantages come from the whole group.


def _own_advantages(group: Group) -> list[float]:
    mean, spread = statistics.fmean(group.rewards), statistics.stdev(group.rewards) + 1e-6
    return [(reward - mean) / spread for reward in group.rewards]


def _estimated(trainer: Trainer, sampled: SampledBatch) -> dict[tuple[int, ...], tuple[float, float]]:
    """Advantage (smallest and largest along the row) by the sampled tokens of the row."""
    batch, _ = stages.advantages(trainer, sampled)
    assert batch.advantages_BT is not None
    rows = {}
    for row in range(len(batch)):
        along = batch.advantages_BT[row][batch.loss_mask_BT[row]]
        ids = tuple(batch.ids_BT[row, : int(batch.lengths_B[row])].tolist())
        rows[ids] = (float(along.min()), float(along.max()))
    assert batch.trajectory_index_B.tolist() == list(range(len(batch)))
    return rows


def _row(trajectory: Trajectory) -> tuple[int, ...]:
    return tuple(trajectory.sequences[0].token_ids)


def _hand_made(rewards: list[list[float]]) -> SampledBatch:
    """Groups 3, 4, ... in which every trajectory says another word."""
    groups = []
    for index, paid in enumerate(rewards, start=3):
        trajectories = []
        for member, reward in enumerate(paid):
            turn = Turn((7, 8), (20 + 10 * index + member, 9), (-0.5, -0.25), FinishReason.LENGTH, "", None, reward, new_context=True)
            trajectories.append(Trajectory(index, member, index, [turn], StopReason.TURN_LIMIT))
        groups.append(Group(index, index, trajectories))
    return SampledBatch(groups, groups, select(groups, QUICK_FILTER), groups, 1, len(groups))


QUICK_FILTER = validate(RunSettings, {"env": {"name": "frozen_lake"}, "filter": {"strategy": "all"}}).filter
REWARDS = [[0.0, 1.0, 0.5, 0.25, 2.0], [3.0, 1.0, 1.0, 2.0, 1.0]]


def test_only_the_best_and_the_worst_are_trained_on(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path / "run", filter={"members": 1})
    sampled = _hand_made(REWARDS)
    rows = _estimated(trainer, sampled)
    extremes = {(3, 0), (3, 4), (4, 0), (4, 1)}  # of equal rewards the earlier
    expected = {
        _row(t): advantage
        for group in sampled.groups
        for t, advantage in zip(group.trajectories, _own_advantages(group), strict=True)
        if (t.group, t.member) in extremes
    }
    assert rows.keys() == expected.keys()
    for ids, advantage in expected.items():
        assert rows[ids] == pytest.approx((advantage, advantage), abs=1e-5)


def test_extreme_members_that_said_nothing(tmp_path: Path) -> None:
    """Their groups have nothing left to train on: the step is skipped, not broken."""
    trainer = _trainer(tmp_path / "run", filter={"members": 1})
    sampled = _hand_made([[0.0, 1.0, 2.0]])
    for member in (0, 2):
        trajectory = sampled.groups[0].trajectories[member]
        trajectory.turns[0].response_ids = trajectory.turns[0].logprobs = ()
    batch, _ = stages.advantages(trainer, sampled)
    assert len(batch) == 0 and stages.update(trainer, 1, batch, sampled) == {"skipped": 1}


def test_advantages_are_weighed_by_relative_variance(tmp_path: Path) -> None:
    """Variances 0.625 and 0.8 (ddof 1): the first group weighs 0.78125, the second 1."""
    trainer = _trainer(tmp_path / "run", filter={"reweight": True})
    sampled = _hand_made(REWARDS)
    assert [statistics.variance(group.rewards) for group in sampled.groups] == pytest.approx([0.625, 0.8])
    rows = _estimated(trainer, sampled)
    assert len(rows) == 10
    for group, weight in zip(sampled.groups, (0.78125, 1.0), strict=True):
        for trajectory, advantage in zip(group.trajectories, _own_advantages(group), strict=True):
            assert rows[_row(trajectory)] == pytest.approx((weight * advantage,) * 2, abs=1e-5)


def test_members_in_a_run(tmp_path: Path) -> None:
    (metrics,) = _metrics(_run(tmp_path / "run", steps=1, filter={"members": 1}))
    assert metrics["update/tokens_trained"] == metrics["groups/tokens_discarded"] == metrics["rollout/tokens_sampled"] / 2


# Epochs, schedules, the critic's first steps.


def test_epochs_and_minibatches(tmp_path: Path) -> None:
    (metrics,) = _metrics(_run(tmp_path / "run", steps=1, learner={"epochs": 2, "update_batch": 6}))
    assert metrics["update/num_updates"] == 6  # 16 trajectories by 6, twice
    assert metrics["update/tokens_trained"] == 2 * metrics["rollout/tokens_sampled"]


def test_schedules_reach_the_record(tmp_path: Path) -> None:
    chosen = {"learning_rate": 1e-4, "schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.2}
    rates = [metrics["update/learning_rate"] for metrics in _metrics(_run(tmp_path / "run", steps=4, learner=chosen))]
    assert rates == pytest.approx([5e-5, 1e-4, 6e-5, 2e-5])


@pytest.mark.parametrize("shared", [False, True])
def test_at_first_only_the_critic_learns(tmp_path: Path, shared: bool, start: hf.PreTrainedModel) -> None:
    changes = {"algorithm": {"name": "ppo"}, "critic": {"shared": shared, "warmup_steps": 2}, "checkpoint": {"every": 1, "keep": 3}}
    trainer = _run(tmp_path / "run", steps=3, **changes)
    weights = [load_file(path / "model" / "model.safetensors") for path in list_checkpoints(trainer.store.checkpoints)]
    states = [load_state(path) for path in list_checkpoints(trainer.store.checkpoints)]
    heads = [state["learner"]["critic"]["head.linear.weight"] for state in states]
    assert [all(torch.equal(tensor, saved[name]) for name, tensor in start.state_dict().items()) for saved in weights] == [
        True,
        True,
        False,
    ]
    assert heads[0].abs().max() > 0 and not torch.equal(heads[0], heads[1])
    metrics = _metrics(trainer)
    assert [step["update/learning_rate"] for step in metrics] == [0, 0, 1e-4]
    assert metrics[0]["update/value_mean"] == 0 and metrics[0]["update/explained_variance"] == 0  # the head starts at zero
    assert metrics[1]["update/value_mean"] > 0
    assert metrics[0]["update/return_mean"] == pytest.approx(metrics[0]["rollout/reward_mean"])  # gamma 1: every token expects it all


# Numbers that are not finite.


def test_updates_that_are_not_finite_end_the_run_with_a_checkpoint(tmp_path: Path, start: hf.PreTrainedModel) -> None:
    trainer = _trainer(
        tmp_path / "run", steps=9, algorithm={"name": "ppo"}, learner={"update_batch": 8}, early_stop={"nonfinite_updates": 4}
    )
    assert trainer.learner.critic is not None
    with torch.no_grad():
        trainer.learner.critic.head.linear.bias.fill_(math.nan)
    trainer.run()
    store = trainer.store
    reason = "the gradient was not finite in 4 updates in a row; lower learner.learning_rate or learner.max_grad_norm"
    assert store.finished == f"stopped early after step 2: {reason}"
    last = store.steps()[-1]
    assert last.notes == ["2 updates were skipped: their gradient was not finite", f"stopped early: {reason}"]
    assert [metrics["update/nonfinite_streak"] for metrics in _metrics(trainer)] == [2, 4]
    assert [metrics["update/num_updates"] for metrics in _metrics(trainer)] == [0, 0]
    assert all(math.isfinite(value) for metrics in _metrics(trainer) for value in metrics.values())
    assert "validation/success" in last.metrics
    assert [path.name for path in list_checkpoints(store.checkpoints)] == ["step_000002"]
    assert all(torch.equal(a, b) for a, b in zip(trainer.policy.module.parameters(), start.parameters(), strict=True))
    state = load_state(store.checkpoints / "step_000002")
    moments = [value for kept in state["learner"]["optimizers"]["policy"]["adam"]["state"].values() for value in kept.values()]
    assert state["learner"]["nonfinite_streak"] == 4 and not any(value.any() for value in moments)


# Running out of memory where training can continue.


def _out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


@pytest.mark.long
def test_out_of_memory_in_the_diagnosis_is_on_the_record_and_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other numbers and the weights are those of a run that does not diagnose."""
    monkeypatch.setattr(monitor, "cross_score", _out_of_memory)
    longer = {
        "model": {"name": "tiny"},
        "env": {"name": "frozen_lake", "options": {"max_turns": 1}},
        "rollout": {"max_tokens": 48},
    }  # different prompts, and a model that closes its reasoning
    trainer, plain = (_run(tmp_path / name, steps=2, diagnosis={"every": every}, **longer) for name, every in (("run", 2), ("plain", 0)))
    first, second = trainer.store.steps()[1:]
    cause = "failed: out of memory in the diagnosis (Tried to allocate 2.00 GiB); lower diagnosis.budget or set diagnosis.every=0"
    *failures, replies = first.notes
    assert failures == [f"diagnosis (first_turn) {cause}", f"diagnosis (trajectory) {cause}"] and first.regime is None
    assert replies.endswith(" replies were valid")
    information = {name: first.metrics.pop(name) for name in list(first.metrics) if name.startswith("information")}
    assert information["information/failed"] == information["information_trajectory/failed"] == 1
    assert information["information/num_reasonings"] > 0
    assert second.notes == [] and [first.metrics, second.metrics] == _metrics(plain)
    assert all(torch.equal(a, b) for a, b in zip(trainer.policy.module.parameters(), plain.policy.module.parameters(), strict=True))


# Environments that are down.


class _HalfDown(_Lucky):
    """Down for the odd members of every group; `recovers`: up again when an episode is played once more."""

    name = "half_down"
    equal_pay = False
    recovers = False
    resets: ClassVar[list[int | None]] = []
    """The env seeds of all training episodes, in the order of their resets."""

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        again = env_seed in self.resets
        if env_seed in MEMBER_OF:
            self.resets.append(env_seed)
        if MEMBER_OF.get(env_seed, 0) % 2 and not (again and self.recovers):
            raise OSError("the backend is down")
        shown = super().reset(seed, env_seed=env_seed)
        if self.equal_pay:
            self._pay = 0.75
        return shown


MEMBER_OF: dict[int | None, int] = {
    env_seed(0, step, group, member): member for step in (1, 2) for group in range(4) for member in range(4)
}
"""From the env seed of a training episode to its member."""


@pytest.fixture
def half_down(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`half_down(equal_pay=True)`: registers the environment and changes it."""

    def register(**changes: bool) -> None:
        monkeypatch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "half_down": _HalfDown})
        for name, value in {**changes, "resets": []}.items():
            monkeypatch.setattr(_HalfDown, name, value)

    return register


DOWN = "8 of 16 episodes ended by an environment error and were left out, all with: reset: OSError: the backend is down"


def test_errored_episodes_are_not_trained_on(tmp_path: Path, half_down: Any) -> None:
    """Two valid members of every group are left. They are all that is scored, trained on and counted."""
    half_down()
    trainer = _run(tmp_path / "run", steps=1, env={"name": "half_down"})
    played = list(trainer.store.trajectories(step=1, split="train"))
    valid, errored = ([t for t in played if (t["stop_reason"] == "env_error") is wrong] for wrong in (False, True))
    assert len(valid) == len(errored) == 8 and {t["member"] % 2 for t in valid} == {0}
    assert all(t["kept"] for t in valid) and not any(t["kept"] for t in errored)
    (metrics,) = _metrics(trainer)
    assert metrics["rollout/errors"] == 8 and metrics["update/skipped"] == 0
    assert metrics["update/tokens_trained"] == metrics["rollout/tokens_sampled"] == 8 * 4
    assert metrics["rollout/success"] == statistics.fmean(t["success"] for t in valid) > 0
    assert metrics["rollout/reward_mean"] == pytest.approx(statistics.fmean(t["reward"] for t in valid))
    rewards = [[t["reward"] for t in valid if t["group"] == group] for group in range(4)]
    assert metrics["groups/rv_mean"] == pytest.approx(statistics.fmean(statistics.variance(paid) for paid in rewards))
    assert [note for note in trainer.store.steps()[1].notes if "environment error" in note] == [DOWN]


def test_a_backend_that_is_down_is_no_reward_variance(tmp_path: Path, half_down: Any, start: hf.PreTrainedModel) -> None:
    """Every valid episode earns the same, so there is nothing to learn; errored ones used to count as zeros, which the filter prefers."""
    half_down(equal_pay=True)
    trainer = _run(tmp_path / "run", steps=1, env={"name": "half_down"}, filter={"strategy": "top_p"})
    (metrics,) = _metrics(trainer)
    assert (metrics["groups/kept"], metrics["groups/zero_variance"], metrics["groups/rv_mean"], metrics["update/skipped"]) == (0, 4, 0, 1)
    assert metrics["rollout/success"] == 1 and metrics["rollout/reward_mean"] == 0.75
    notes = trainer.store.steps()[1].notes
    assert DOWN in notes and not any("no group has reward variance" in note for note in notes), (
        "the errors are the cause, and have their note"
    )
    assert all(torch.equal(a, b) for a, b in zip(trainer.policy.module.parameters(), start.parameters(), strict=True))


def test_what_leaves_nothing_to_learn_is_a_note_of_the_first_step(tmp_path: Path) -> None:
    """Nearly greedy and without slipping, the members of a group do the same and earn the same."""
    rollout = {"num_groups": 2, "group_size": 2, "max_tokens": 60, "temperature": 0.01}
    trainer = _run(
        tmp_path / "run",
        steps=1,
        model={"name": "tiny"},
        evaluation={"prompts": 1},
        env={"name": "frozen_lake", "options": {"slip": 0.0}},
        rollout=rollout,
    )
    (metrics,) = _metrics(trainer)
    assert metrics["groups/rv_mean"] == 0 and metrics["rollout/format_valid"] > 0.5 and metrics["rollout/episodes"] == 4
    assert sum("the members of every group earn the same reward; play easier" in note for note in trainer.store.steps()[1].notes) == 1


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_errored_episodes_are_played_again_as_often_as_configured(retries: int, tmp_path: Path, half_down: Any) -> None:
    half_down()
    trainer = _run(tmp_path / "run", steps=1, env={"name": "half_down"}, rollout={"error_retries": retries})
    counts = Counter(MEMBER_OF[seed] % 2 for seed in _HalfDown.resets)
    assert counts == {0: 8, 1: 8 * (1 + retries)}
    assert _metrics(trainer)[0]["rollout/retries"] == 8 * retries and _metrics(trainer)[0]["rollout/errors"] == 8


def test_an_episode_that_succeeds_when_played_again_counts_as_any_other(tmp_path: Path, half_down: Any) -> None:
    """The same seeds: the run is the one whose environment was never down, and the note says what happened."""
    half_down(recovers=True)
    trainer, plain = (_run(tmp_path / name, steps=1, env={"name": name}) for name in ("half_down", "lucky"))
    (metrics,), (expected,) = _metrics(trainer), _metrics(plain)
    assert metrics["rollout/retries"] == 8 and metrics["rollout/errors"] == 0
    assert trainer.store.steps()[1].notes[0] == "8 episodes failed in their environment and succeeded when played again"
    said, wanted = ([t["turns"][0]["response_ids"] for t in run.store.trajectories(step=1, split="train")] for run in (trainer, plain))
    assert said == wanted
    assert {**metrics, "rollout/retries": 0} == pytest.approx(expected, rel=1e-4, abs=1e-6)  # episodes share calls with others: rounding


# Records in memory.


def test_records_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations, the best checkpoint, early stopping, alarms and the automatic filter look at records; none of them reads the disk."""
    read: list[RunStore] = []
    real = RunStore.steps

    def steps(store: RunStore) -> list[StepRecord]:
        read.append(store)
        return real(store)

    monkeypatch.setattr(RunStore, "steps", steps)
    changes = {"evaluation": {"every": 1}, "checkpoint": {"every": 1}, "alarms": {"actions": {"critical": "stop"}}}
    trainer = _run(tmp_path / "run", steps=3, filter={"strategy": "auto", "auto_steps": 2}, **changes)
    assert trainer.step == 3 and len(read) <= 1
    assert trainer.records == real(RunStore.open(tmp_path / "run"))


# Truncated importance sampling.


def test_importance_weights_of_the_learners_own_engine_are_one(tmp_path: Path) -> None:
    """The engine samples with the learner's weights: the correction changes nothing but rounding, over two updates per step."""
    trainer, plain = (
        _run(tmp_path / name, steps=2, algorithm={"importance_cap": cap}, learner={"update_batch": 8})
        for name, cap in (("corrected", 2.0), ("plain", None))
    )
    for metrics, expected in zip(_metrics(trainer), _metrics(plain), strict=True):
        assert metrics.pop("update/importance_weight") == pytest.approx(1, abs=1e-4)
        assert "update/importance_weight" not in expected and expected["update/num_updates"] == 2
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)
    for one, other in zip(trainer.policy.module.parameters(), plain.policy.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


class _Copy:
    """In place of the copy in float8 that only a GPU can decode with; what is around it is the run's own."""

    layers = None

    def __init__(self) -> None:
        self.refreshed = 0

    def refresh(self) -> None:
        self.refreshed += 1


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> _Copy:
    copied = _Copy()
    monkeypatch.setattr(DecoderChoice, "check_float8", lambda _: None)
    monkeypatch.setattr(DecoderChoice, "float8", lambda _: copied)
    return copied


def test_rollouts_in_float8_are_corrected_refreshed_and_checked(copied: _Copy, tmp_path: Path) -> None:
    settings = validate(RunSettings, merge(QUICK, {"steps": 2, "rollout": {"precision": "fp8"}, "evaluation": {"prompts": 0}}))
    callback = _Notes()
    trainer = Trainer(settings, RunStore.create(tmp_path / "run", dump_yaml(settings), {}), [callback])
    trainer.run()
    said = "rollouts sample with the MLPs in fp8 (rollout.precision); importance weights up to 2 correct it, update/mismatch shows it"
    assert said in callback.notes
    assert copied.refreshed == 2, "after each update"
    for metrics in _metrics(trainer):
        assert metrics["update/checked_tokens"] > 0 and metrics["update/importance_weight"] == pytest.approx(1, abs=1e-4)
    assert trainer.store.machine()["engine"] == "contiguous, fp8"


def test_more_than_rounding_to_float8_stops_the_run(copied: _Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "FLOAT8_TOLERANCE", 1e-12)
    with pytest.raises(EngineUnavailable, match=r"step 1: rounding to fp8 does not explain the log-probs .* Leave rollout\.precision out"):
        _run(tmp_path / "run", steps=1, rollout={"precision": "fp8"}, evaluation={"prompts": 0})


# The best checkpoint.


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    """Success is luck here, the same in every evaluation: of equals the earliest is the best, though retention has deleted its folder."""
    trainer = _run(tmp_path / "run", steps=3, evaluation={"every": 1}, checkpoint={"every": 1, "keep": 1})
    checkpoints = trainer.store.checkpoints
    success = _metrics(trainer)[0]["validation/success"]
    assert best_checkpoint(checkpoints) == (1, success)
    assert [path.name for path in list_checkpoints(checkpoints)] == ["step_000003"]
    best, last = (load_file(checkpoints / name / "model" / "model.safetensors") for name in ("best", "step_000003"))
    assert any(not torch.equal(best[name], last[name]) for name in best)


def test_no_best_checkpoint_where_none_is_wanted(tmp_path: Path) -> None:
    trainer = _run(tmp_path / "run", steps=1, checkpoint={"best": False})
    assert best_checkpoint(trainer.store.checkpoints) is None


# What a step costs.


def test_what_a_step_cost_is_written_beside_its_numbers(tmp_path: Path) -> None:
    """Two rounds of refill: their tokens and what the engine counted are added up."""
    changes = {"filter": {"strategy": "top_k", "keep": 0.5, "refill": 1}, "checkpoint": {"every": 1}, "diagnosis": {"every": 1}}
    trainer = _run(tmp_path / "run", steps=1, learner={"epochs": 2}, algorithm={"name": "ppo"}, **changes)
    before, line = trainer.store.timings()
    assert list(before["seconds"]) == ["validation"] and "tokens_per_second" not in before and "engine" not in before
    (metrics,) = _metrics(trainer)
    assert metrics["groups/rounds"] == 2
    names = {"rollout", "select", "diagnosis", "advantages", "update", "record", "checkpoint", "validation"}
    assert line["seconds"].keys() == line["peak_memory"].keys() == names and all(seconds > 0 for seconds in line["seconds"].values())
    assert line["tokens_per_second"] * line["seconds"]["rollout"] == pytest.approx(metrics["rollout/tokens_sampled"])
    assert line["engine"]["sampled_tokens"] == metrics["rollout/tokens_sampled"]
    kept = [t for t in trainer.store.trajectories(step=1, split="train") if t["kept"]]
    tokens = sum(len(turn["context_ids"]) + len(turn["response_ids"]) for t in kept for turn in t["turns"])
    assert line["update_tokens_per_second"] * line["seconds"]["update"] == pytest.approx(2 * tokens)
    assert 0 < line["share_of_peak"]["rollout"] < 1 and 0 < line["share_of_peak"]["update"] < 1
    machine = trainer.store.machine()
    assert machine == {
        "device": machine["device"],
        "dtype": "float32",
        "peak": trainer.timer.peak,
        "engine": "contiguous",
        "ranks": 1,
        "fast_path": fast_path_report(trainer.policy).to_json(),
        "start": machine["start"],
    }
    assert {"memory_plan", "model", "learner", "engine", "scorer", "peak", "probe"} <= machine["start"].keys()
    assert machine["fast_path"]["decoder"] == "contiguous" and machine["fast_path"]["model_type"] == "llama"


class _Notes(Callback):
    """Keeps what a run reports."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.timings: list[StepTimings] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_step_end(self, record: StepRecord, timings: StepTimings) -> None:
        self.timings.append(timings)


def test_what_the_callbacks_are_told(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short memory and a slow path are reported before the first step, and the cost of each step after it. GPT-2 has no fast path."""
    config = hf.GPT2Config(vocab_size=len(tiny.tokenizer), n_positions=1024, n_embd=16, n_layer=1, n_head=2)
    config.bos_token_id, config.eos_token_id = None, tiny.tokenizer.eos_token_id
    hf.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tiny.tokenizer.save_pretrained(tmp_path / "gpt2")
    _change_plan(monkeypatch, notes=["memory is short"])
    settings = validate(RunSettings, merge(QUICK, {"steps": 1, "model": {"name": str(tmp_path / "gpt2")}}))
    callback = _Notes()
    trainer = Trainer(settings, RunStore.create(tmp_path / "run", dump_yaml(settings), {}), [callback])
    trainer.run()
    assert callback.notes == ["memory is short", *fast_path_report(trainer.policy).lines()]
    assert callback.notes[1].startswith("partly slow path (gpt2, float32 on cpu): decoder generic, ")
    assert callback.notes[2].startswith("decoder is slow (generic): ")

    def shown(timings: Mapping[str, Any]) -> dict[str, Any]:
        """Without what the last checkpoint took after the last step."""
        seconds = {stage: value for stage, value in timings["seconds"].items() if stage != "checkpoint"}
        return {**timings, "seconds": seconds, "step": None, "background": None, "peak_memory": None}

    assert [shown(timings.to_json()) for timings in callback.timings] == [shown(line) for line in trainer.store.timings()]


def _change_plan(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let the memory plan of the next runs say something else."""
    real = build_module.plan_memory

    def plan(*given: Any) -> MemoryPlan:
        found = real(*given)
        assert found is not None
        return dataclasses.replace(found, **changes)

    monkeypatch.setattr(build_module, "plan_memory", plan)


@pytest.mark.parametrize(("asked", "given"), [(0.25, 0.25), (None, 3.0)])
def test_the_cache_leaves_room_for_what_the_optimiser_will_take(
    asked: float | None, given: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _change_plan(monkeypatch, cache=3 * 2**30)
    engine: Any = _trainer(tmp_path / "run", rollout={"cache_gb": asked, "max_context": 900}).sampler.engine
    assert (engine._cache_gb, engine._max_context, engine._max_rows) == (given, 900, 128)
