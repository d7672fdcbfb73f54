"""Whole runs of verl on a CPU: its entry point, trainers, TransferQueue, agent-loop workers and FSDP actors in Ray's processes (`verl_on_cpu.py` has
the two parts that verl has for GPUs only). Tether's sampler, probe and agent loop are inside, as the config lines of docs/integrations.md put them.

Not here: `separate_async`, whose weights travel over NCCL.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here; `make test-verl` runs these tests")
pytest.importorskip("transfer_queue", reason="verl's TransferQueue is not installed here")

import tether
from tether.integrations.verl.agent_loop import write_prompts

ROOT = Path(__file__).parents[2]
LIMIT_S = 1200
FIXED = """
algorithm.adv_estimator=grpo data.train_batch_size=4 data.max_prompt_length=400 data.max_response_length=200 data.dataloader_num_workers=0
+actor_rollout_ref.model.override_config.attn_implementation=sdpa actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.model.enable_gradient_checkpointing=False actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
actor_rollout_ref.actor.fsdp_config.dtype=float32 +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.optim.lr=1e-4
actor_rollout_ref.rollout.name=tiny actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.n=3
actor_rollout_ref.rollout.agent.num_workers=1 actor_rollout_ref.rollout.agent.default_agent_loop=tether reward.num_workers=1
trainer.device=cpu trainer.nnodes=1 trainer.logger=[console] trainer.total_training_steps=2 trainer.val_before_train=False trainer.test_freq=-1
trainer.save_freq=-1 ray_kwargs.ray_init.num_cpus=8 +ray_kwargs.ray_init.num_gpus=2 +ray_kwargs.ray_init.include_dashboard=False
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
trainer.v1.sampler.custom_sampler.path=pkg://tether.integrations.verl.sampler
+trainer.v1.sampler.sampler_kwargs.probe.every=1 +trainer.v1.sampler.sampler_kwargs.probe.budget=1.0
"""
MODES = {
    "sync": """
trainer.n_gpus_per_node=2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3
trainer.v1.sampler.custom_sampler.name=TetherReplayBuffer +trainer.v1.sampler.sampler_kwargs.reward_variance_filtering.strategy=top_p
trainer.v1.sampler.sync_refill_failed_groups=True
""",
    "colocate_async": """
trainer.n_gpus_per_node=1 actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1200 actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=1200
trainer.v1.trainer_mode=colocate_async trainer.v1.sampler.custom_sampler.name=TetherReplayBufferAsync
""",
}
"""Ranks and micro-batches that do not divide the rows of the probe; dynamic batches, and rollouts of earlier weights."""


@pytest.mark.parametrize("mode", MODES)
def test_two_steps_of_verl(tiny: Any, tmp_path: Path, mode: str) -> None:
    model, prompts, out = tmp_path / "tiny", tmp_path / "lake.parquet", tmp_path / "run"
    tiny.model.float().save_pretrained(model)
    tiny.tokenizer.save_pretrained(model)
    write_prompts(prompts, "frozen_lake", 16, options={"slip": 0.0, "instructions": "plain", "max_turns": 2})
    given = [
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        f"actor_rollout_ref.model.path={model}",
        f"+trainer.v1.sampler.sampler_kwargs.probe.out={out}",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)]),
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *FIXED.split(), *MODES[mode].split(), *given]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    run = tether.Run(out)
    assert run.metrics("information/num_reasonings").keys() == {1, 2} and set(run.metrics("information/failed").values()) == {0.0}
    assert run.metrics("groups/sampled") == {1: 4.0, 2: 4.0} and "tether/probe/failed:0" in said and "tether/probe/failed:1" not in said
    stale = run.metrics("rollout/staleness")
    assert stale == {1: 0.0, 2: 0.0} if mode == "sync" else stale[2] > 0, stale
    assert ("earlier weights than those of the actor" in said) == (mode != "sync")
