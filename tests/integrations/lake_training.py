"""One update of TRL on FrozenLake, on as many processes as started it: the script of `test_two_processes_are_one`.

    python tests/integrations/lake_training.py MODEL OUT ROWS_PER_PROCESS LOSS_TYPE...

Run by torch's launcher in two processes, and imported for one.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def update(folder: Path, out: Path, kind: str, batch: int) -> dict[str, Any]:
    """The log of the update and the weights after it; `out` gets the run folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    from tether.integrations.trl import TetherCallback, TetherEnvironment, TetherGRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"slip": 0.0, "instructions": "plain", "max_turns": 2}
    lake = TetherEnvironment("frozen_lake", tokenizer, num_prompts=8, options=options, max_tokens=40)
    args = GRPOConfig(
        output_dir=str(out), use_cpu=True, bf16=False, gradient_checkpointing=False, per_device_train_batch_size=batch, num_generations=4,
        gradient_accumulation_steps=2, max_completion_length=140, max_steps=1, logging_steps=1, report_to=[], save_strategy="no", learning_rate=1e-3,
        seed=3, disable_tqdm=True, loss_type=kind, max_grad_norm=1e9, optim="sgd",
    )  # fmt: skip
    trainer = TetherGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder),
        args=args,
        processing_class=tokenizer,
        group_filter="top_p:0.9",
        callbacks=[TetherCallback(every=1, out=out / "run", budget=1.0)],
        **lake.arguments,
    )
    trainer.train()
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return {
        "log": trainer.state.log_history[0],
        "weights": weights,
        "processes": trainer.accelerator.num_processes,
        "first": trainer.accelerator.is_main_process,
    }


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    for each in sys.argv[4:]:
        place = Path(sys.argv[2]) / each
        place.mkdir(parents=True, exist_ok=True)
        found = update(Path(sys.argv[1]), place, each, int(sys.argv[3]))
        if found["first"]:
            torch.save(found["weights"], place / "weights.pt")
            (place / "log.json").write_text(json.dumps({**found["log"], "processes": found["processes"]}))
