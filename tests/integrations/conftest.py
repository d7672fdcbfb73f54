"""What the tests of the plug-ins share: trainers of TRL on the embedded model, small enough for a CPU."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def uneven(completions: Any, **columns: Any) -> list[float]:
    """Rewards that differ within most groups; equal in every third prompt."""
    texts = [completion[0]["content"] for completion in completions]
    prompts = columns["prompts"]
    return [
        0.0 if int(prompt[-1]["content"].split()[1][:-1]) % 3 == 0 else len(text) % 5 / 4
        for text, prompt in zip(texts, prompts, strict=True)
    ]


@pytest.fixture(scope="session")
def float32_tiny(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` as a folder in float32: its weights are stored in bfloat16, which few CPUs can multiply quickly."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make_trainer(tmp_path: Path, float32_tiny: Path) -> Callable[..., Any]:
    """A trainer of any class: `make_trainer(GRPOTrainer, group_filter=..., args={...})`; prompts are numbered, the model is `tiny`."""

    def make(cls: Any, *, args: dict[str, Any] | None = None, config: Any = None, **options: Any) -> Any:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig

        settings = {
            "output_dir": str(tmp_path / "trl"), "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 3, "num_generations": 4, "max_completion_length": 12, "max_steps": 2, "logging_steps": 1, "report_to": [],
            "save_strategy": "no", "learning_rate": 1e-3, "seed": 3, "disable_tqdm": True, **(args or {}),
        }  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(float32_tiny)
        tokenizer = AutoTokenizer.from_pretrained(float32_tiny)
        rows = [{"prompt": [{"role": "user", "content": f"Number {n}. Up or left?"}]} for n in range(24)]
        given = {"reward_funcs": uneven, "train_dataset": Dataset.from_list(rows), **options}
        return cls(model, args=(config or GRPOConfig)(**settings), processing_class=tokenizer, **given)

    return make
