"""The words of other trainers for the settings of a run: what people try first.

A word for one setting is accepted in its place, alone (`lr`) or in its section (`learner.lr`), and said. A word for several is not guessed: the error
names them. `tether settings` finds settings by all of them.
"""

import logging
from collections.abc import Mapping
from typing import Any

from tether.core.config import flattened, merge
from tether.core.errors import ConfigError

_TABLE = """
learner.learning_rate: lr learning_rate actor_lr policy_lr
critic.learning_rate: critic_lr value_lr
learner.update_batch: mini_batch mini_batch_size minibatch_size ppo_mini_batch_size update_batch_size train_batch
learner.epochs: epochs num_epochs ppo_epochs num_train_epochs num_iterations inner_epochs
learner.micro_tokens: max_tokens_per_gpu micro_batch_tokens
learner.max_grad_norm: grad_clip gradient_clipping clip_grad grad_norm max_norm
learner.warmup_steps: warmup warmup_steps num_warmup_steps lr_warmup_steps
learner.schedule: scheduler lr_scheduler lr_scheduler_type lr_schedule
learner.weight_decay: wd
rollout.num_groups: num_prompts prompts_per_step prompts train_batch_size rollout_batch_size generation_batch_size
rollout.group_size: group_size num_generations n_samples_per_prompt rollout_n samples_per_prompt n g
rollout.temperature: temperature temp sampling_temperature
rollout.max_tokens: max_tokens max_new_tokens max_completion_length max_response_length response_length generate_max_len completion_length
rollout.max_context: max_context context_length max_context_length max_length max_seq_len max_seq_length max_model_len context_window seq_len sequence_length
rollout.engine: engine backend sampler
rollout.max_rows: max_num_seqs concurrency num_envs
algorithm.kl_coef: kl kl_coef kl_coeff kl_loss_coef kl_penalty kl_weight init_kl_coef beta
algorithm.entropy_coef: entropy_coef entropy_coeff entropy_bonus ent_coef
algorithm.gae_lambda: lam lambda
algorithm.gamma: discount
algorithm.reference: ref_model reference_model
filter.keep: keep_ratio
checkpoint.every: save_every save_steps save_freq save_interval checkpoint_every checkpoint_interval save
checkpoint.keep: save_total_limit keep_checkpoints max_checkpoints
evaluation.every: eval_every eval_steps test_freq eval_interval validate_every
evaluation.prompts: eval_prompts num_eval
lora.rank: lora_rank lora_r lora
lora.alpha: lora_alpha
model.dtype: dtype precision torch_dtype
model.device: device
model.name: model_name model_path model_name_or_path
algorithm.name: algo
env.name: environment env_name
env.options.data: data dataset train_file data_path train_files file
env.options.max_turns: max_turns num_turns
env.options.few_shot: few_shot shots
trackers: track tracker report_to logger log_with
steps: max_steps total_steps training_steps num_steps total_training_steps iterations
seed: random_seed random_state rng
"""
WORDS: dict[str, tuple[str, ...]] = {
    word: (key,) for line in _TABLE.strip().splitlines() for key, _, words in (line.partition(": "),) for word in words.split()
}
"""Word to settings, the likeliest first."""
WORDS |= {
    "batch_size": ("rollout.num_groups", "rollout.group_size", "learner.update_batch"),
    "batch": ("rollout.num_groups", "rollout.group_size", "learner.update_batch"),
    "clip": ("algorithm.clip_low", "algorithm.clip_high"),
    "clip_range": ("algorithm.clip_low", "algorithm.clip_high"),
    "cliprange": ("algorithm.clip_low", "algorithm.clip_high"),
    "epsilon": ("algorithm.clip_low", "algorithm.clip_high"),
    "clip_ratio": ("algorithm.clip_low", "algorithm.clip_high"),
    "betas": ("learner.beta1", "learner.beta2"),
    "adam": ("learner.beta1", "learner.beta2", "learner.weight_decay"),
    "top": ("rollout.top_p", "rollout.top_k"),
    "save_best": ("checkpoint.best",),
    "early_stopping": ("early_stop.variance_share", "early_stop.success_floor"),
    "length": ("rollout.max_tokens", "rollout.max_context"),
    "context": ("rollout.max_context", "rollout.context"),
    **dict.fromkeys(
        ("micro_batch", "micro_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"),
        ("learner.micro_tokens", "learner.update_batch"),
    ),
    **dict.fromkeys(("wandb", "tensorboard", "mlflow", "trackio"), ("trackers", "--track")),
    **dict.fromkeys(("bf16", "fp16", "float16", "bfloat16"), ("model.dtype", "--set model.dtype=bfloat16")),
    **dict.fromkeys(("gpus", "n_gpus", "num_gpus", "nproc_per_node"), ("model.device", "--gpus")),
    "vllm": ("rollout.engine", "server.vllm_command", "server.vllm_args"),
    "learning": ("learner.learning_rate", "critic.learning_rate"),
    "checkpoint": ("checkpoint.every", "checkpoint.keep"),
}

_LOG = logging.getLogger(__name__)
_SAID: set[str] = set()


def spelled(word: str) -> str:
    """A word as WORDS has it: "learning-rate", "Learning rate" and "learning_rate" are one."""
    return "_".join(word.lower().replace("-", " ").replace("_", " ").split())


def own_names(given: Mapping[str, Any], known: frozenset[str], other: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Nested settings with every word for one setting replaced by its key; `known` are the keys, `other` what some words mean here instead."""
    renamed: dict[str, Any] = {}
    kept = dict(given)
    for section, value in given.items():
        inner = value if isinstance(value, Mapping) and section in known else {}
        for word in [section] if section not in known else [f"{section}.{key}" for key in inner if f"{section}.{key}" not in known]:
            targets = WORDS.get(spelled(word.rpartition(".")[2]), ())
            key = (other or {}).get(spelled(word)) or (targets[0] if len(targets) == 1 else None)
            is_known = key is not None and (key in known or (key.startswith("env.options.") and "env.options" in known))
            if key is None or not is_known or ("." in word and key.partition(".")[0] != section) or key in flattened(given):
                continue  # refused with the likely ones named
            leaf = inner[word.partition(".")[2]] if "." in word else value
            if "." in word:
                kept[section] = {name: each for name, each in kept[section].items() if name != word.partition(".")[2]}
            else:
                del kept[section]
            if key in renamed:
                raise ConfigError(f"'{word}' and another word both mean '{key}'; give it once")
            renamed[key] = [leaf] if key == "trackers" and isinstance(leaf, str) else leaf
            if word not in _SAID:
                _SAID.add(word)
                _LOG.warning("'%s' is the setting %s", word, key)
    for key, value in renamed.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        kept = merge(kept, value)
    return kept
