"""TRL's part of learner.py --step, in a process and, where need be, an environment of its own: it imports nothing of Tether.

Called by learner.py with the folder of a model and the sizes of a GRPO step as JSON; prints one line of JSON. A step samples group_size
completions of `response` tokens for each of `groups` prompts of `prompt` tokens and makes one update, micro-batches of 8, rewards 0 or 1 at random, no
reference model. The best step but the first counts. Logs go to stderr.
"""

import json
import os
import random
import sys
import tempfile
import time
from typing import Any

MICRO_ROWS = 8


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # progress bars and logs may go to stdout; that is for the answer alone
    folder, asked = sys.argv[1], json.loads(sys.argv[2])
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows, rng = asked["groups"] * asked["group_size"], random.Random(0)
    prompts = [prompt_of(tokenizer, asked["prompt"], number) for number in range(asked["groups"])]
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seconds.append(-time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds[-1] += time.perf_counter()

    with tempfile.TemporaryDirectory() as out:
        config = trl.GRPOConfig(
            output_dir=out,
            max_steps=asked["steps"],
            per_device_train_batch_size=min(MICRO_ROWS, rows),
            gradient_accumulation_steps=max(1, rows // MICRO_ROWS),
            num_generations=asked["group_size"],
            max_completion_length=asked["response"],
            generation_kwargs={"min_new_tokens": asked["response"]},
            temperature=1.0,
            top_k=0,
            beta=0.0,
            learning_rate=1e-6,
            bf16=asked["dtype"] == "bfloat16",
            gradient_checkpointing=False,
            use_cpu=asked["cpu"],
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, asked["dtype"])),
            reward_funcs=lambda completions, **_: [float(rng.randrange(2)) for _ in completions],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    line = json.dumps({"seconds": min(seconds[1:] or seconds), "steps": seconds, "version": trl.__version__})
    os.write(answers, line.encode() + b"\n")


def prompt_of(tokenizer: Any, size: int, number: int) -> str:
    """A text of so many tokens that begins with a number of its own."""
    text = str(number)
    while len(tokenizer.encode(text, add_special_tokens=False)) < size:
        text += " the"
    return text


if __name__ == "__main__":
    main()
