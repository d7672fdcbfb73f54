"""Where a step of TRL on one of Tether's environments spends its time, beside TRL alone on the same first prompts.

    python benchmarks/trl_environment.py --model path/to/tiny [--bf16]

Three trainers, one step each after a warm-up step: TRL alone (one response for each prompt, as long as an episode may be), the plug-in with Tether's
engine, and the plug-in with TRL's generation. All on the CPU with the same rows, in seconds of CPU time, which a busy machine changes little. `bf16` is TRL's default; on a CPU without bfloat16 instructions it
decides everything.
"""

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


@contextmanager
def clock(seconds: Counter[str], name: str) -> Iterator[None]:
    start = time.process_time()
    yield
    seconds[name] += time.process_time() - start


def timed(owner: Any, method: str, seconds: Counter[str], name: str) -> None:
    """Count the time of a method of one object."""
    inner = getattr(owner, method)

    def outer(*args: Any, **kwargs: Any) -> Any:
        with clock(seconds, name):
            return inner(*args, **kwargs)

    setattr(owner, method, outer)


def lengths(completions: Any, **columns: Any) -> list[float]:
    return [float(len(completion[0]["content"]) % 7) for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or a Hugging Face id")
    parser.add_argument("--env", default="frozen_lake")
    parser.add_argument("--episodes", type=int, default=16, help="in groups of 4")
    parser.add_argument("--tokens", type=int, default=300, help="of an episode, at most")
    parser.add_argument("--bf16", action="store_true")
    asked = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from tether.integrations.trl import TetherCallback, TetherEnvironment, TetherGRPOTrainer

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    for name in ("TRL alone", "plug-in, Tether's engine", "plug-in, TRL's generation"):
        engine = "native" if "Tether" in name else "trl"
        place = TetherEnvironment(asked.env, tokenizer, num_prompts=asked.episodes, max_tokens=100, engine=engine)
        with tempfile.TemporaryDirectory() as out:
            args = GRPOConfig(
                output_dir=out, max_steps=2, per_device_train_batch_size=asked.episodes, num_generations=4, max_completion_length=asked.tokens,
                learning_rate=1e-6, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=asked.bf16, disable_tqdm=True, seed=3,
                gradient_checkpointing=False,
            )  # fmt: skip
            model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32)
            if name == "TRL alone":
                trainer: Any = GRPOTrainer(model, lengths, args=args, train_dataset=place.dataset, processing_class=tokenizer)
            else:
                trainer = TetherGRPOTrainer(
                    model, args=args, processing_class=tokenizer, callbacks=[TetherCallback(every=1)], **place.arguments
                )
            seconds: Counter[str] = Counter()
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, TetherCallback):
                    timed(callback, "observe", seconds, "probe")
            timed(trainer, "_generate", seconds, "sampling")
            timed(trainer, "_compute_loss", seconds, "loss")
            timed(trainer.accelerator, "backward", seconds, "backward")
            timed(trainer, "training_step", seconds, "step")
            begin, first = trainer._prepare_inputs, []

            def reset(*given: Any, _begin: Any = begin, _first: list[Any] = first, _seconds: Counter[str] = seconds) -> Any:
                """The first step holds what happens once."""
                if len(_first) == 1:
                    _seconds.clear()
                _first.append(None)
                return _begin(*given)

            trainer._prepare_inputs = reset
            trainer.train()
        log = [entry for entry in trainer.state.log_history if "step_time" in entry][-1]
        found = {part: round(value, 2) for part, value in seconds.items()}
        print(
            json.dumps({"what": name, "bf16": asked.bf16, "tokens": round(log["completions/mean_length"] * asked.episodes), **found}),
            flush=True,
        )


if __name__ == "__main__":
    main()
