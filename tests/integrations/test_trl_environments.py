"""Tether's environments inside TRL: whole episodes, members of a group on one instance, the numbers of Tether's own trainer; two processes."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("trl", reason="TRL is not installed here; `make test-trl` runs these tests")

import tether
from tether.algorithms.filters.select import select_groups
from tether.core.errors import BadInput, UnknownName
from tether.diagnostics.alarms.repetition import rollout_repetition
from tether.diagnostics.monitor import Monitor
from tether.diagnostics.pairs import rollout_rows
from tether.diagnostics.settings import AlarmRules
from tether.diagnostics.summary import group_summary, rollout_summary
from tether.integrations.rows import Row, flatten
from tether.integrations.trl import TetherCallback, TetherEnvironment, TetherGRPOTrainer
from tether.integrations.trl.batch import GenerationBatch, as_generations

pytestmark = pytest.mark.filterwarnings("default")
Make = Callable[..., Any]
LAKE: dict[str, Any] = {"options": {"slip": 0.0, "instructions": "plain", "max_turns": 2}, "max_tokens": 40}
ARGS = {"max_completion_length": 140, "gradient_accumulation_steps": 2, "learning_rate": 1e-4, "max_steps": 1}


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("engine", ["native", "trl"])
def test_a_run_on_frozen_lake(make_trainer: Make, tiny: Any, tmp_path: Path, engine: str) -> None:
    lake = TetherEnvironment("frozen_lake", tiny.tokenizer, num_prompts=6, engine=engine, **LAKE)
    seen: list[Any] = []
    rollout = lake.rollout
    given = {**lake.arguments, "rollout_func": lambda prompts, trainer: seen.append((prompts, rollout(prompts, trainer))) or seen[-1][1]}
    trainer = make_trainer(TetherGRPOTrainer, args=ARGS, callbacks=[TetherCallback(every=1, out=tmp_path / "run", budget=1.0)], **given)
    trainer.train()
    prompts, columns = seen[0]
    assert len(prompts) == len(columns["completion_ids"]) == 8
    for start in (0, 4):
        members = columns["prompt_ids"][start : start + 4]
        assert all(member == members[0] for member in members), "members of a group start alike"
    longest = max(map(len, columns["prompt_ids"]))
    for prompt, ids, mask in zip(columns["prompt_ids"], columns["completion_ids"], columns["env_mask"], strict=True):
        assert len(ids) == len(mask) <= ARGS["max_completion_length"] + longest - len(prompt) and mask[0] == 1
    assert all(reward is not None for reward in columns["tether_reward"]), "every prompt has room for a response"
    assert any(0 in mask for mask in columns["env_mask"]), "later observations are in the sequence and not in the loss"
    assert columns["logprobs"] is None or all(len(a) == len(b) for a, b in zip(columns["logprobs"], columns["completion_ids"], strict=True))
    assert logged(trainer, "rollout/turns")[0] > 1 and logged(trainer, "reward") == pytest.approx(logged(trainer, "rollout/reward_mean"))
    ((used, _),) = lake._engines.values()
    assert used.statistics.dropped_tokens <= len(prompts) * 2 * 2, "a response ends at its closing tag, not after max_completion_length"
    assert "generate" not in vars(trainer.model) and trainer.generation_config.max_new_tokens == ARGS["max_completion_length"]
    run = tether.Run(tmp_path / "run")
    episodes = list(run.store.trajectories(1))
    assert len(episodes) == 8 and max(len(episode["turns"]) for episode in episodes) == 2
    assert "information_trajectory/mi_seq" in run.records[0].metrics


def test_metrics_are_those_of_tethers_own_trainer(tiny: Any) -> None:
    """The same episodes, once as Tether's trainer sees them and once as rows of TRL: every number both have is the same."""
    groups = tether.play("frozen_lake", "tiny", prompts=3, group_size=4, seed=5, rollout={"max_tokens": 60}, options=LAKE["options"])
    trajectories = [t for group in groups for t in group.trajectories]
    flat = [flatten(t) for t in trajectories]
    rows = [
        Row(str(t.group), tuple(f.prompt_ids), tuple(f.completion_ids), tuple(map(bool, f.mask)), t.success, None)
        for t, f in zip(trajectories, flat, strict=True)
    ]
    batch = GenerationBatch(rows, [t.reward for t in trajectories], [t.success for t in trajectories], 4)
    decode = lambda ids: tiny.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)  # noqa: E731
    theirs = as_generations(batch, decode, TetherCallback()._rule).groups
    chosen = select_groups([t.reward for t in trajectories], [t.group for t in trajectories], keep=0.9)
    assert group_summary(theirs, chosen) == group_summary(groups, chosen)
    mine, found = rollout_summary(groups), rollout_summary(theirs)
    for name in (
        "success",
        "reward_mean",
        "reward_std",
        "turns",
        "response_tokens",
        "response_tokens_max",
        "reasoning_tokens",
        "tokens_sampled",
    ):
        assert found[name] == pytest.approx(mine[name]), name
    limit = AlarmRules().repeated_part
    assert rollout_repetition(theirs, limit) == rollout_repetition(groups, limit)
    options: dict[str, Any] = {"scopes": ["trajectory"], "seed": 1, "tokenizer": tiny.tokenizer}
    own, other = (Monitor(tiny.model, **options).observe(1, **rollout_rows(each)) for each in (groups, theirs))
    assert own.information == other.information and own.metrics == other.metrics


def test_the_record_of_a_step_is_that_of_tethers_own_trainer(make_trainer: Make, tmp_path: Path) -> None:
    """A step of `tether.train`, its episodes read from the run folder as rows of TRL, and the callback's record of them."""
    mine = tether.train(
        "frozen_lake",
        model="tiny",
        steps=1,
        seed=3,
        filter="top_p:0.9",
        out=tmp_path / "mine",
        options=LAKE["options"],
        rollout={"num_groups": 3, "group_size": 4, "max_tokens": 40},
        evaluation={"prompts": 1},
        diagnosis={"every": 1, "budget": 1.0},
    )
    rows, rewards, successes = [], [], []
    for episode in mine.store.trajectories(1, "train"):
        first, *later = episode["turns"]
        ids, sampled = list(first["response_ids"]), [True] * len(first["response_ids"])
        for turn in later:
            ids += [*turn["context_ids"], *turn["response_ids"]]
            sampled += [False] * len(turn["context_ids"]) + [True] * len(turn["response_ids"])
        rows.append(Row(str(episode["group"]), tuple(first["context_ids"]), tuple(ids), tuple(sampled), episode["success"], None))
        rewards.append(episode["reward"])
        successes.append(episode["success"])
    batch = GenerationBatch(rows, rewards, successes, 4)
    probe = TetherCallback(every=1, out=tmp_path / "theirs", budget=1.0)
    trainer = make_trainer(TetherGRPOTrainer, group_filter="top_p:0.9", callbacks=[probe], args={"seed": 3})
    probe.attach(trainer)
    probe.on_train_begin(trainer.args, trainer.state, trainer.control)
    probe.observe(trainer, batch, trainer._tether_select(batch, {}, trainer.group_filter))
    own, (theirs,) = mine.records[-1], tether.Run(tmp_path / "theirs").records
    shared = [name for name in theirs.metrics if name.split("/")[0] in ("rollout", "groups", "information", "information_trajectory")]
    assert len(shared) > 50 and "information_trajectory/mi_seq" in shared and "groups/rv_mean" in shared
    apart = {
        name: (own.metrics[name], theirs.metrics[name])
        for name in shared
        if name in own.metrics and own.metrics[name] != pytest.approx(theirs.metrics[name], rel=1e-4, abs=1e-5)
    }
    assert not apart and own.regime == theirs.regime
    assert {name for name in shared if name not in own.metrics} <= {"groups/sampled", "groups/kept"}


def test_an_errored_episode_has_no_reward(make_trainer: Make, tiny: Any) -> None:
    lake = TetherEnvironment("frozen_lake", tiny.tokenizer, num_prompts=6, **LAKE)
    trainer = make_trainer(TetherGRPOTrainer, args=ARGS, group_filter="top_p:0.9", callbacks=[TetherCallback(every=0)], **lake.arguments)
    from tether.envs.frozen_lake.env import FrozenLake

    step, calls = FrozenLake.step, []

    def breaks(self: Any, answer: str) -> Any:
        calls.append(0)
        if len(calls) in (1, 9):  # an episode, and its second try
            raise RuntimeError("the ice machine is broken")
        return step(self, answer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrozenLake, "step", breaks)
        trainer.train()
    assert logged(trainer, "rollout/errors")[0] in (0.0, 1.0) and len(calls) >= 9


def test_the_tool_form(tiny: Any) -> None:
    lake = TetherEnvironment("frozen_lake", tiny.tokenizer, num_prompts=2, **LAKE)
    row = lake.tool_dataset[0]
    first, second = lake.factory(), lake.factory()
    shown = first.reset(**row)
    assert shown == second.reset(**row) and row["prompt"][1]["content"] == ""
    assert shown in {user for _, user in lake.instances}
    assert isinstance(first.act("Up"), str)
    first.act("nonsense")
    assert first.get_reward() <= -0.1 and first.act("Up") == "The episode is over."
    assert second.get_reward() == 0.0


def test_bad_input(make_trainer: Make, tiny: Any) -> None:
    with pytest.raises(UnknownName, match="did you mean 'native'"):
        TetherEnvironment("frozen_lake", tiny.tokenizer, engine="nativ")
    with pytest.raises(BadInput, match=r"has only \d+ different first observations"):
        _ = TetherEnvironment("frozen_lake", tiny.tokenizer, num_prompts=500, options={"size": 2}).instances
    lake = TetherEnvironment("frozen_lake", tiny.tokenizer, num_prompts=2, **LAKE)
    with pytest.raises(BadInput, match="comes with its rollouts"):
        lake.reward(["a"])
    with pytest.raises(BadInput, match="mask_truncated_completions would mask every episode"):
        make_trainer(TetherGRPOTrainer, args={**ARGS, "mask_truncated_completions": True}, **lake.arguments).train()
    with pytest.raises(BadInput, match=r"train on its \.dataset"):
        make_trainer(TetherGRPOTrainer, args=ARGS, rollout_func=lake.rollout).train()


SCRIPT = Path(__file__).with_name("lake_training.py")
KINDS = ("dapo", "grpo")
SHARED = (
    "groups/kept",
    "groups/rv_mean",
    "rollout/success",
    "rollout/tokens_sampled",
    "information/mi_seq",
    "information/retrieval_acc",
    "information_trajectory/mi_seq",
)


def test_two_processes_are_one(tmp_path: Path, float32_tiny: Path) -> None:
    """The same twelve episodes on one process and on two: the filter keeps the same groups, and the update is the same.

    The second of the three groups lies on both processes. The launcher is torch's, which sets the variables that accelerate reads
    (accelerate's own starts one process on a CPU). `--standalone` chooses a free port; `--master-port 0` would hand the 0 to the processes, which then
    wait for each other forever.
    """
    paths = [str(Path(tether.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "ACCELERATE_USE_CPU": "true"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--local-addr", "127.0.0.1"]
    command = [*launch, str(SCRIPT), str(float32_tiny), str(tmp_path / "two"), "3", *KINDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    update = runpy.run_path(str(SCRIPT))["update"]
    before = load_file(float32_tiny / "model.safetensors")
    for kind in KINDS:
        two, weights_two = (
            json.loads((tmp_path / "two" / kind / "log.json").read_text()),
            torch.load(tmp_path / "two" / kind / "weights.pt"),
        )
        alone = update(float32_tiny, tmp_path / "one" / kind, kind, 6)
        one = alone["log"]
        assert (alone["processes"], two["processes"]) == (1, 2)
        for name in SHARED:
            assert two[name] == pytest.approx(one[name], abs=1e-4), (kind, name)
        assert 0 < one["groups/kept"] < one["groups/sampled"] == 3
        moved = max(float((value - before[name]).abs().max()) for name, value in alone["weights"].items() if name in before)
        apart = max(float((value - weights_two[name]).abs().max()) for name, value in alone["weights"].items())
        assert moved > 1e-5, "the update did something"
        assert apart < 1e-6 and apart < moved / 100, kind
        records = tether.Run(tmp_path / "two" / kind / "run").records
        assert len(records) == 1 and records[0].metrics["groups/rv_mean"] == pytest.approx(one["groups/rv_mean"])
