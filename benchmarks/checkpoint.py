"""How long a checkpoint holds training up, and how fast it is written: random weights of a Qwen2 shape with master weights and Adam's moments.

python benchmarks/checkpoint.py --layers 28                       1.5 billion parameters, bfloat16 on a GPU
python benchmarks/checkpoint.py --layers 2 --device cpu --folder /tmp
"""

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tether.models.hardware import default_device, synchronise
from tether.models.load import load_model
from tether.training.checkpoint import save_best, save_checkpoint
from tether.training.optim import FP32MasterAdamW
from tether.training.snapshot import HostMemory, Snapshot, storage_bytes

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


def launches_a_second(device: torch.device, until: threading.Event, least: float = 0.5) -> float:
    """Small products that the main thread gets through while others work: what Python's lock leaves of a run that trains on."""
    factor, count, start = torch.ones(256, 256, device=device), 0, time.perf_counter()
    while not until.is_set() or time.perf_counter() - start < least:
        factor = (factor @ factor).clamp_(0, 1)
        count += 1
        if count % 100 == 0:
            synchronise(device)
    return count / (time.perf_counter() - start)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(layers: int, vocabulary: int, device: str, folder: Path) -> dict[str, float]:
    """Seconds and rates of one checkpoint of each kind; waiting is what training waits for."""
    model, tokenizer = model_of(layers, vocabulary, device), load_model("tiny", device="cpu").tokenizer
    place = model.device
    adam = FP32MasterAdamW(model.parameters(), learning_rate=1e-6, beta1=0.9, beta2=0.999, weight_decay=0.0, compute_dtype=torch.bfloat16)
    for master in adam._masters.values():
        master.grad = torch.full_like(master, 1e-3)
    adam.step()
    adam.zero_grad()
    state = {"learner": adam.state_dict()}
    memory = HostMemory(reuse=place.type != "cpu")
    found: dict[str, float] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    if place.type != "cpu":
        found["prepare_s"] = seconds(lambda: memory.prepare(adam.saved_sizes()), place)
    ended = threading.Event()
    ended.set()
    found["launches_per_s_alone"] = launches_a_second(place, ended)
    kinds: dict[str, tuple[dict[str, Any], Any]] = {
        "exact": (state, lambda taken: save_checkpoint(folder, 1, taken.model, tokenizer, taken.state, 1)),
        "bfloat16_moments": (state, lambda taken: save_checkpoint(folder, 2, taken.model, tokenizer, taken.state, 1, None, "bfloat16")),
        "last": (state, lambda taken: save_checkpoint(folder, 2, taken.model, tokenizer, taken.state, 1, None, "bfloat16", last=True)),
        "best": ({}, lambda taken: save_best(folder, 3, 0.5, taken.model, tokenizer)),
    }
    for name, (kept, write) in kinds.items():
        taken: list[Snapshot] = []
        found[f"{name}_copied_gb"] = storage_bytes(model, kept) / GB
        found[f"{name}_waiting_s"] = seconds(lambda kept=kept, taken=taken: taken.append(memory.snapshot(model, kept)), place)
        behind, ended = [0.0], threading.Event()

        def work(write: Any = write, taken: Any = taken, behind: list[float] = behind, ended: threading.Event = ended) -> None:
            behind[0] = seconds(lambda: write(taken[0]), torch.device("cpu"))
            ended.set()

        thread = threading.Thread(target=work)
        thread.start()
        found[f"{name}_launches_per_s"] = launches_a_second(place, ended, 0.0)
        thread.join()
        memory.release()
        written = size_of(folder / ("best" if name == "best" else f"step_{1 + (name != 'exact'):06d}"))
        found |= {f"{name}_behind_s": behind[0], f"{name}_bytes": written, f"{name}_gb_per_s": written / GB / behind[0]}
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        print(json.dumps(measure(arguments.layers, arguments.vocabulary, arguments.device, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
