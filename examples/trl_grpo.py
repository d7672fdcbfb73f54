"""A GRPO script as TRL's own examples are written, with two lines added: they are marked `tether`.

    pip install 'tether-agents[trl]'
    python examples/trl_grpo.py --model path/to/model --steps 20 --out runs/trl
    tether report runs/trl

The task is a sum of two numbers, so that the script needs no download. TRL's log holds the filter's numbers (groups/...), the information of the
reasoning about its prompt (information/...) and the alarms (alarms/...); the run folder holds the same, with every episode.
"""

import argparse
import re

try:
    from datasets import Dataset
    from trl import GRPOConfig
except ModuleNotFoundError as missing:
    raise SystemExit(f"this example needs TRL, and '{missing.name}' is not installed; run: pip install 'tether-agents[trl]'") from None

from tether.integrations.trl import TetherCallback, TetherGRPOTrainer  # tether: in place of trl.GRPOTrainer

SYSTEM = "Reply as: <think> your thoughts </think> <answer> the sum </answer>"


def make_dataset(size: int) -> Dataset:
    rows = []
    for number in range(size):
        a, b = 10 + 7 * number % 83, 3 + 5 * number % 47
        prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {a} + {b}?"}]
        rows.append({"prompt": prompt, "solution": str(a + b)})
    return Dataset.from_list(rows)


def accuracy_reward(completions, solution, **kwargs) -> list[float]:
    found = [re.search(r"<answer>\s*(-?\d+)", completion[0]["content"]) for completion in completions]
    return [float(bool(match) and match[1] == right) for match, right in zip(found, solution, strict=True)]


def format_reward(completions, **kwargs) -> list[float]:
    pattern = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
    return [0.1 * bool(pattern.search(completion[0]["content"])) for completion in completions]


def main(model: str, steps: int, out: str | None, **settings) -> TetherGRPOTrainer:
    args = GRPOConfig(
        **{
            "output_dir": "trl-grpo",
            "max_steps": steps,
            "per_device_train_batch_size": 16,
            "num_generations": 8,
            "max_completion_length": 128,
            "learning_rate": 1e-6,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            **settings,
        }
    )
    trainer = TetherGRPOTrainer(
        model=model,
        args=args,
        reward_funcs=[accuracy_reward, format_reward],
        train_dataset=make_dataset(256),
        group_filter="top_p:0.9", success_reward="accuracy_reward", callbacks=[TetherCallback(every=1, out=out)],  # tether
    )  # fmt: skip
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default=None, help="a run folder for tether report")
    main(**vars(parser.parse_args()))
