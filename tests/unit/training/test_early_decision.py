"""Early decision in a run: what the records and the batch hold, the same run across a resume, and what settings are refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tether
from tether.algorithms.batch import Batch
from tether.algorithms.filters.group_filter import GroupFilter
from tether.core.enums import Decision, FinishReason, StopReason
from tether.core.errors import ConfigError
from tether.core.types import Group, Observation, Step, Trajectory, Turn
from tether.envs.base import TurnOptions
from tether.rollout.pack import pack
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.training.alarm_actions import AlarmActions
from tether.training.async_rollouts import BatchAhead, _from_json, _to_json
from tether.training.batch import FilterInputs, SampledBatch, reweight_batch, sample_batch
from tether.training.settings import RunSettings

RUN: dict[str, Any] = {
    "model": {"device": "cpu"},
    "rollout": {"num_groups": 2, "group_size": 4, "max_tokens": 24, "first_members": 2, "max_tries": 3, "explore": 0.5, "oversample": 2},
    "filter": {"strategy": "all", "include_zero": False},
    "diagnosis": {"every": 2},
    "evaluation": {"prompts": 0},
    "checkpoint": {"every": 1},
}


HERE = "tests.unit.training.test_early_decision" if __name__.startswith("tests.") else __name__


class Lots:
    """Pays 0, 1 or by the luck of the episode, as the instance says, whatever the answer: what is decided does not depend on a model."""

    name, max_turns, instructions, work = "lots", 1, "Draw.", "inline"
    Options = TurnOptions

    def __init__(self, options: TurnOptions) -> None:
        pass

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        self._reward = (0.0, 1.0, (env_seed or 0) % 5 / 4)[seed % 3]
        return Observation(f"Lot {seed % 7}.")

    def step(self, answer: str) -> Step:
        return Step(Observation("Done."), self._reward, True, self._reward == 1)


def _group(index: int, rewards: tuple[float, ...], decision: Decision | None) -> Group:
    def played(member: int, reward: float) -> Trajectory:
        turn = Turn((1, 2), (3,) * (member + 1), (-0.5,) * (member + 1), FinishReason.STOP_TEXT, "x", None, reward=reward, new_context=True)
        return Trajectory(index, member, index, [turn], StopReason.FAILURE, success=reward == 1, env="lake")

    return Group(index, index, [played(m, reward) for m, reward in enumerate(rewards)], env="lake", decision=decision)


GROUPS = [
    _group(0, (1, 1), Decision.NOT_CONTINUED),
    _group(1, (1, 0, 0, 0), Decision.CONTINUED),
    _group(2, (0, 0, 1, 0), Decision.EXPLORED),
    _group(3, (0, 1), Decision.SURPLUS),
    _group(4, (0, 1, 1, 1), Decision.CONTINUED),
]
"""Of a step that wants two groups; a member samples as many tokens as its number, from 1."""


def _sampled(rules: GroupFilter) -> SampledBatch:
    return sample_batch(lambda count, first: GROUPS, 2, rules, (), 2)


def test_numbers_come_from_first_members_and_the_batch_from_whole_groups() -> None:
    sampled = _sampled(GroupFilter("all", include_zero=False))
    assert [group.index for group in sampled.kept] == [1, 2, 4], "a group that was explored stands beside those that were wanted"
    assert [[t.member for t in group.trajectories] for group in sampled.first_round] == [[0, 1]] * 2
    metrics = sampled.metrics(tokens_batched=30)
    counts = ("sampled", "kept", "continued", "explored", "not_continued", "surplus")
    assert [metrics[name] for name in counts] == [5, 3, 2, 1, 1, 1]
    # Whole groups have 10 tokens, first members 3: 36 in all, 6 of them of prompts that were not continued.
    tokens = ("tokens_trained", "tokens_discarded", "tokens_decisions", "sampled_per_trained")
    assert [metrics[name] for name in tokens] == [30, 6, 6, 1.2]
    # First members: (1, 1), (1, 0), (0, 0), (0, 1), (0, 1), whose variances are 0, 1/2, 0, 1/2, 1/2.
    assert metrics["rv_mean"] == metrics["first_score/lake"] == pytest.approx(0.3) and metrics["zero_variance"] == 2
    assert (metrics["all_succeed"], metrics["all_fail"], metrics["mixed"]) == pytest.approx((0.2, 0.2, 0.6))
    assert metrics["explored_varied"] == 1.0


def test_explored_groups_count_as_often_as_they_stand_for() -> None:
    sampled = _sampled(GroupFilter("all", include_zero=False))
    batch: Batch = pack([t for group in sampled.kept for t in group.trajectories])
    batch = dataclasses.replace(batch, advantages_BT=batch.loss_mask_BT.float())
    weighed = reweight_batch(batch, sampled, GroupFilter("all"), explored_weight=20.0)
    assert weighed.advantages_BT is not None
    assert {int(g): float(row.max()) for g, row in zip(weighed.groups_B, weighed.advantages_BT, strict=True)} == {1: 1.0, 2: 20.0, 4: 1.0}
    plain = reweight_batch(batch, sampled, GroupFilter("all"))
    assert torch.equal(plain.advantages_BT, batch.advantages_BT)  # type: ignore[arg-type]


def test_a_step_is_told_the_mean_of_recent_steps_by_environment() -> None:
    settings = RunSettings.model_validate({"env": {"name": "frozen_lake"}})
    names = ("groups/first_score/frozen_lake", "groups/first_score/sokoban")
    records = [StepRecord(step, dict(zip(names, (step / 10, 1.0), strict=True))) for step in range(1, 21)]
    inputs = AlarmActions(settings).filter_inputs(records)
    assert inputs.first_scores == pytest.approx({"frozen_lake": float(np.mean(np.arange(11, 21))) / 10, "sokoban": 1.0})


def test_a_batch_that_was_sampled_ahead_comes_back_with_its_decisions() -> None:
    settings = RunSettings.model_validate({"env": {"name": "frozen_lake"}, "rollout": {"first_members": 2}, "filter": {"strategy": "all"}})
    sampled, inputs = _sampled(settings.filter), FilterInputs(settings.filter.keep, ())
    again = _from_json(json.loads(json.dumps(_to_json(BatchAhead(sampled, inputs)))), settings).sampled
    assert again.groups == sampled.groups and again.kept == sampled.kept and again.first_round == sampled.first_round
    assert again.metrics(7) == sampled.metrics(7) and again.groups[0].decision is Decision.NOT_CONTINUED


def test_a_resumed_run_is_the_same_run(tmp_path: Path, small_policy: Any) -> None:
    settings = {**RUN, "model": {"name": small_policy(1, True), "device": "cpu"}, "seed": 4}
    tether.train(f"{HERE}:Lots", out=tmp_path / "whole", steps=4, **settings)
    store = RunStore.open(tmp_path / "whole")
    decided = {record["decision"] for record in store.trajectories()}
    assert decided == {"continued", "explored", "not_continued", "surplus"}
    assert all(not record["kept"] for record in store.trajectories() if record["decision"] in ("not_continued", "surplus"))
    (score,) = (name for name in store.steps()[-1].metrics if name.startswith("groups/first_score/"))
    assert len({record.metrics[score] for record in store.steps()[1:]}) > 1, "later steps decide by other means"

    tether.train(f"{HERE}:Lots", out=tmp_path / "parts", steps=2, **settings)
    tether.train(out=tmp_path / "parts", resume=True, steps=4)
    parts = RunStore.open(tmp_path / "parts")
    assert [record.to_json() for record in parts.steps()] == [record.to_json() for record in store.steps()]
    assert list(parts.trajectories()) == list(store.trajectories())


@pytest.mark.parametrize("algo", ["ppo", "dapo", "dr_grpo"])
def test_every_algorithm_trains_on_what_was_continued(tmp_path: Path, small_policy: Any, algo: str) -> None:
    """DAPO with its refill, and a run of two environments whose shares of the batch stay."""
    settings = {name: section for name, section in RUN.items() if name != "filter"} | {
        "model": {"name": small_policy(1, True), "device": "cpu"}
    }
    settings["rollout"] = {**RUN["rollout"], "reweight_explored": True, "overlong_share": 0.0}
    mixed = {"also": [{"name": "frozen_lake", "options": {"max_turns": 1}}]} if algo == "dr_grpo" else {}
    tether.train(f"{HERE}:Lots", out=tmp_path / "run", algo=algo, steps=1, seed=2, **settings, **mixed)
    store = RunStore.open(tmp_path / "run")
    metrics, records = store.steps()[-1].metrics, list(store.trajectories())
    assert metrics["groups/continued"] > 0 and metrics["update/skipped"] == 0 and metrics["groups/tokens_trained"] > 0
    kept = {record["group"] for record in records if record["kept"]}
    assert all(sum(record["group"] == group for record in records) == 4 for group in kept), "whole groups"
    assert len({(record["group"], record["member"]) for record in records}) == len(records), "no round repeats another's episodes"
    if algo == "dapo":
        assert metrics["groups/kept"] >= 2 or metrics["groups/rounds"] == 4
    tried = {record["env"]: {r["group"] for r in records if r["env"] == record["env"]} for record in records}
    assert not mixed or (min(len(groups) for groups in tried.values()) >= 1 and len(tried) == 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout": {"first_members": 1}}, "it has first_members 1, and one trajectory shows no variance; give 2 or more"),
        ({"rollout": {"first_members": 17}}, "it has first_members 17, more than group_size 16; give at most 16"),
        ({"rollout": {"first_members": 2, "explore": 0, "reweight_explored": True}}, "it has reweight_explored, but explore is 0"),
        ({"rollout": {"first_members": 2, "explore": 1.5}}, "explore"),
        ({"rollout": {"first_members": 2}, "filter": {"score": "length"}}, "filter.score is 'length'; choose entropy_variance"),
        ({"rollout": {"first_members": 2}, "filter": {"order": "smallest"}}, "filter.order is 'smallest'; choose largest"),
        ({"rollout": {"first_members": 2}, "filter": {"strategy": "auto"}}, "filter.strategy 'auto' looks at the scores of all prompts"),
    ],
)
def test_what_cannot_decide_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tether.train("frozen_lake", out=tmp_path / "run", steps=1, **changes)
    assert said in str(caught.value) and not (tmp_path / "run").exists()
