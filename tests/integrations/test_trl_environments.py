"""Tether's environments inside TRL: whole episodes, members of a group on one instance, the numbers of Tether's own trainer; two processes."""

import json
import os
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


PROCESS = """
import json, os, sys
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig
from tether.integrations.trl import TetherCallback, TetherEnvironment, TetherGRPOTrainer

folder, out, kind, batch = sys.argv[1:5]
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(folder)
lake = TetherEnvironment("frozen_lake", tokenizer, num_prompts=8, options={"slip": 0.0, "instructions": "plain", "max_turns": 2}, max_tokens=40)
args = GRPOConfig(output_dir=out, use_cpu=True, bf16=False, gradient_checkpointing=False, per_device_train_batch_size=int(batch), num_generations=4,
    gradient_accumulation_steps=2, max_completion_length=140, max_steps=1, logging_steps=1, report_to=[], save_strategy="no", learning_rate=1e-3, seed=3,
    disable_tqdm=True, loss_type=kind, max_grad_norm=1e9, optim="sgd")
trainer = TetherGRPOTrainer(AutoModelForCausalLM.from_pretrained(folder), args=args, processing_class=tokenizer, group_filter="top_p:0.9",
    callbacks=[TetherCallback(every=1, out=f"{out}/run", budget=1.0)], **lake.arguments)
trainer.train()
if trainer.accelerator.is_main_process:
    torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), f"{out}/weights.pt")
    json.dump({**trainer.state.log_history[0], "processes": trainer.accelerator.num_processes}, open(f"{out}/log.json", "w"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dapo", "grpo"])
def test_two_processes_are_one(tmp_path: Path, float32_tiny: Path, kind: str) -> None:
    """The same sixteen episodes on one process and on two: the filter keeps the same groups, and the update is the same."""
    script = tmp_path / "train.py"
    script.write_text(PROCESS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(tether.__file__).parents[1]), "ACCELERATE_USE_CPU": "true"}
    found = []
    for count in (1, 2):
        out = tmp_path / f"{count}"
        out.mkdir()
        # accelerate's own launcher starts one process on a CPU; torch's sets the variables that accelerate reads.
        launch = [] if count == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
        command = [sys.executable, *launch, str(script), str(float32_tiny), str(out), kind, str(8 // count)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append((json.loads((out / "log.json").read_text()), torch.load(out / "weights.pt")))
    (one, start), (two, weights_two) = found
    assert (one["processes"], two["processes"]) == (1, 2)
    for name in (
        "groups/kept",
        "groups/rv_mean",
        "rollout/success",
        "rollout/tokens_sampled",
        "information/mi_seq",
        "information/retrieval_acc",
    ):
        assert two[name] == pytest.approx(one[name], abs=1e-4), name
    assert 0 < one["groups/kept"] < 4
    moved = 0.0
    before = load_file(float32_tiny / "model.safetensors")
    for name, value in start.items():
        assert torch.allclose(value, weights_two[name], atol=1e-6), name
        moved = max(moved, float((value - before[name]).abs().max())) if name in before else moved
    assert moved > 1e-5, "the update did something"
    assert len(tether.Run(tmp_path / "2" / "run").records) == 1
