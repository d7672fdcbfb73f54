"""What `TetherCallback` with its defaults costs inside TRL: its seconds as a share of the steps' seconds.

    python benchmarks/trl_probe.py --model path/to/model --prompts 2 --generations 2 --tokens 32

A cycle of the default cadence: five steps, the first of which is measured. Prompts are sums of two numbers, the reward is the length of a completion, and
the whole completion counts as reasoning, so that any model has something to measure. The step is TRL's own `step_time`, which holds the
probe. The first step also holds what happens once: the probe of the scorer's fast path, and first calls.
"""

import argparse
import json
import os
import tempfile
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
STEPS = 5


def lengths(completions: Any, **columns: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or a Hugging Face id")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--generations", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--cpu", action="store_true")
    asked = parser.parse_args()
    from datasets import Dataset
    from trl import GRPOConfig

    from tether.integrations.trl import TetherCallback, TetherGRPOTrainer

    rows = [
        {"prompt": [{"role": "user", "content": f"What is {10 + 7 * n} + {3 + 5 * n}? Think aloud."}]} for n in range(asked.prompts * STEPS)
    ]
    with tempfile.TemporaryDirectory() as out:
        args = GRPOConfig(
            output_dir=out, max_steps=STEPS, per_device_train_batch_size=asked.prompts * asked.generations, num_generations=asked.generations,
            max_completion_length=asked.tokens, learning_rate=1e-6, logging_steps=1, save_strategy="no", report_to="none", use_cpu=asked.cpu,
            bf16=not asked.cpu, disable_tqdm=True,
        )  # fmt: skip
        trainer = TetherGRPOTrainer(
            model=asked.model,
            args=args,
            reward_funcs=lengths,
            train_dataset=Dataset.from_list(rows),
            callbacks=[TetherCallback(pattern="(?s)(.*)")],
        )
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "step_time" in entry]
    probe, whole = ([round(entry[name], 3) for entry in steps] for name in ("tether/probe_seconds", "step_time"))
    scored = [int(entry.get("information/num_reasonings", 0)) for entry in steps]
    print(json.dumps({"probe_seconds": probe, "step_seconds": whole, "reasonings": scored, "share": round(sum(probe) / sum(whole), 4)}))


if __name__ == "__main__":
    main()
