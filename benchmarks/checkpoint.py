"""How long a checkpoint holds training up, and how fast it is written: random weights of a Qwen2 shape with master weights and Adam's moments.

python benchmarks/checkpoint.py --layers 28                       1.5 billion parameters, bfloat16 on a GPU
python benchmarks/checkpoint.py --layers 2 --device cpu --folder /tmp
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tether.models.hardware import default_device, synchronise
from tether.models.load import load_model
from tether.training.checkpoint import save_checkpoint
from tether.training.optim import FP32MasterAdamW
from tether.training.snapshot import HostMemory, storage_bytes

GB = 1e9


def model_of(layers: int, vocabulary: int, device: str) -> Qwen2ForCausalLM:
    """Qwen2.5-1.5B with another number of layers."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        return Qwen2ForCausalLM(config)


def seconds(work: Any, device: torch.device) -> float:
    """How long a call takes until the device is done."""
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start


def measure(layers: int, vocabulary: int, device: str, folder: Path) -> dict[str, float]:
    """Seconds and rates of each way to write the same checkpoint."""
    model, tokenizer = model_of(layers, vocabulary, device), load_model("tiny", device="cpu").tokenizer
    place = model.device
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    adam = FP32MasterAdamW(model.parameters(), learning_rate=1e-6, beta1=0.9, beta2=0.999, weight_decay=0.0, compute_dtype=dtype)
    for master in adam._masters.values():
        master.grad = torch.full_like(master, 1e-3)
    adam.step()
    adam.zero_grad()
    state = {"learner": adam.state_dict()}
    memory = HostMemory(reuse=place.type != "cpu")
    found: dict[str, float] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    if place.type != "cpu":
        found["prepare_s"] = seconds(lambda: memory.prepare(adam.saved_sizes()), place)
    with adam.full_precision():
        found["copied_gb"] = storage_bytes(model, state) / GB
        found["foreground_s"] = seconds(lambda: save_checkpoint(folder, 1, model, tokenizer, state, 1), place)
        taken = []
        for number in (1, 2):  # the second uses the memory of the first, on a GPU
            memory.release()
            found[f"copy_{number}_s"] = seconds(lambda: taken.append(memory.snapshot(model, state)), place)
    found["written_s"] = seconds(lambda: save_checkpoint(folder, 2, taken[-1].model, tokenizer, taken[-1].state, 1), place)
    found["written_gb"] = sum(path.stat().st_size for path in (folder / "step_000002").rglob("*") if path.is_file()) / GB
    found["written_gb_per_s"] = found["written_gb"] / found["written_s"]
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        print(json.dumps(measure(arguments.layers, arguments.vocabulary, arguments.device, Path(folder))))


if __name__ == "__main__":
    main()
