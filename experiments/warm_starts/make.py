"""Make the warm starts of a scale: supervised fine-tuning with LoRA, the adapters rounded to float16, so that they fit into the repository.

    export PYTHONPATH=src:experiments
    python -m warm_starts.make sokoban countdown --gguf FILE --out experiments/warm_starts
    python -m warm_starts.make --check experiments/warm_starts/qwen-sokoban --gguf FILE

A warm start is a folder of adapters: their weights, their configuration with the name of the model they belong to, how the agent is asked, and a
page with the recipe, success before and after, and two hashes: of the file and of the weights that `merged:FOLDER` begins with. --check says
whether both are the same here. --gguf FILE stands for the model where there is no hub: the file is converted and put into the hub's cache
(HF_HUB_CACHE) under the model's name. Its weights are not those of the hub, so whoever compares with cells from a file needs that very file.
"""

import argparse
import hashlib
import platform
import re
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import tether
from harness.command import current_commit
from harness.grid import Scale, read_library
from tether.core.config import merge
from tether.core.errors import BadInput
from tether.core.temporary import temporary_folder
from tether.models.catalog import MERGED
from tether.models.gguf import gguf_folder
from tether.models.hardware import default_device, device_name
from tether.models.load import load_model
from tether.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ALL_LINEAR
from tether.training.agent import AGENT
from tether.training.memory import shape_of

MOST_BYTES = 4_000_000
"""Of the adapters of a task: the repository keeps them."""
TEMPERATURE = 0.5
"""Of the evaluations, as in the cells."""
REVISION = "gguf"
"""Of a model in the hub's cache that is a converted file."""
HASH_OF_FILE, HASH_OF_START = "adapter_model.safetensors, sha256", "weights of the merged model in float32, sha256"

PAGE = """\
# {folder}

{model} on {task} after supervised fine-tuning with LoRA, where cells of `{scale}` begin. Made by

    {command}

|||
|---|---|
|base|{base}|
|recipe|{recipe}|
|trained|{trained}|
|validation success, {prompts} prompts at temperature {temperature}|{before} before, {after} after|
|made on|{machine}; commit {commit}|
|{hash_of_file}|`{file_hash}`|
|{hash_of_start}|`{start_hash}`|

These files are not changed: cells name the folder, so other weights need a folder with another name.
"""


def stand_in(file: Path, name: str) -> None:
    """Put a .gguf file into the hub's cache under the name of a model."""
    place = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    ref, link = place / "refs" / "main", place / "snapshots" / REVISION
    if ref.is_file() and ref.read_text() != REVISION:
        raise BadInput(f"the hub's cache holds '{name}' already; leave out --gguf, or set HF_HUB_CACHE to another folder")
    for folder in (ref.parent, link.parent):
        folder.mkdir(parents=True, exist_ok=True)
    converted = gguf_folder(file).resolve()
    if link.resolve() != converted:  # a program beside this one may be reading through the link
        link.unlink(missing_ok=True)
        link.symlink_to(converted)
    ref.write_text(REVISION)


def pack(made: Path, folder: Path) -> None:
    """What `tether sft` with LoRA wrote, with the adapters in float16, as a folder for the repository."""
    folder.mkdir(parents=True)
    for name in (ADAPTER_CONFIG, AGENT):
        (folder / name).write_bytes((made / name).read_bytes())
    halves = {name: tensor.half() for name, tensor in load_file(made / ADAPTER_WEIGHTS).items()}
    save_file(halves, folder / ADAPTER_WEIGHTS, {"format": "pt"})


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def start_hash(folder: Path) -> str:
    """Of the names and the float32 weights with which a run from the merged adapters begins."""
    digest = hashlib.sha256()
    for name, weight in sorted(load_model(f"{MERGED}{folder}", device="cpu").model.named_parameters()):
        digest.update(name.encode())
        digest.update(weight.detach().contiguous().numpy().data)
    return digest.hexdigest()


def check(folder: Path) -> bool:
    """Whether adapters and merged weights are those that the page of the folder names."""
    page = (folder / "README.md").read_text(encoding="utf-8")
    same = True
    for label, found in ((HASH_OF_FILE, file_hash(folder / ADAPTER_WEIGHTS)), (HASH_OF_START, start_hash(folder))):
        named = re.search(rf"\|{re.escape(label)}\|`(\w+)`\|", page)
        agrees = named is not None and named[1] == found
        print(f"{folder}: {label} {found}: {'as named' if agrees else 'not what README.md names'}")
        same &= agrees
    return same


def success(model: str, task: str, settings: Mapping[str, Any], prompts: int) -> str:
    """Validation success with its interval, in words."""
    options, rollout = settings["env"]["options"], settings["rollout"]
    found = tether.evaluate(model, task, prompts, temperature=TEMPERATURE, options=options, rollout=rollout)
    interval = found.intervals["success"]
    words = f"{found.metrics['success']:.1%}"
    return words if interval is None else f"{words} [{interval[0]:.1%}, {interval[1]:.1%}]"


def make(task: str, scale: Scale, arguments: argparse.Namespace) -> None:
    """One warm start, evaluated before and after."""
    model, folder = arguments.model, Path(arguments.out) / f"{arguments.prefix}-{task}"
    settings = merge(scale.settings, scale.environments[task])
    rollout = {
        key: settings["rollout"][key]
        for key in ("max_tokens", "max_context", "max_rows", "cache_gb", "speculative_tokens")
        if key in settings["rollout"]
    }
    settings = {"env": {"options": {}, **settings.get("env", {})}, "rollout": rollout}
    targets = ALL_LINEAR if arguments.targets == ALL_LINEAR else arguments.targets.split(",")
    lora = {"lora.rank": arguments.rank, "lora.alpha": arguments.alpha or 2 * arguments.rank, "lora.targets": targets}
    recipe = {"learner.learning_rate": arguments.learning_rate, "experts.options": {task: settings["env"]["options"]}, **lora}
    numbers = {name: getattr(arguments, name) for name in ("episodes", "epochs", "steps", "seed") if getattr(arguments, name) is not None}
    if folder.exists():
        raise BadInput(f"'{folder}' exists; choose another --out or --prefix")
    check_size(model, arguments.rank, targets)
    before, began = success(model, task, settings, arguments.prompts), time.monotonic()
    print(f"{task}: {before} before", flush=True)

    def progress(stage: str, done: int, total: int, remark: str) -> None:
        if stage == "training" and done % 10 == 0:
            print(f"{task}: step {done} of {total}, {remark}, {time.monotonic() - began:.0f} s", flush=True)

    with temporary_folder("tether-warm-start-") as place:
        record = tether.sft(task, model, place / "made", progress=progress, **numbers, **recipe).record
        pack(place / "made", folder)
    print(f"{task}: {record['ended']} in {time.monotonic() - began:.0f} s", flush=True)
    after = success(f"{MERGED}{folder}", task, settings, arguments.prompts)
    losses, best = record["held_out_losses"], record["best_step"]
    held_out = f"held-out loss {losses[0]:.3f} -> {losses[best]:.3f} at step {best}" if losses else "nothing held out"
    base = f"`{model}`"
    if arguments.gguf is not None:
        base += f" as the file `{Path(arguments.gguf).name}`, sha256 `{file_hash(Path(arguments.gguf))}`"
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "peft"))
    words = ", ".join(f"{name} {','.join(value) if isinstance(value, list) else value}" for name, value in {**recipe, **numbers}.items())
    page = PAGE.format(
        folder=folder.name,
        model=model.rpartition("/")[2],
        task=task,
        scale=arguments.scale,
        command=f"python -m warm_starts.make {command_words(task, arguments)}",
        base=base,
        recipe=words,
        trained=f"{record['steps']} steps on {record['demonstrations']} demonstrations ({record['ended']}), {held_out}",
        prompts=arguments.prompts,
        temperature=TEMPERATURE,
        before=before,
        after=after,
        machine=f"{device_name(torch.device(default_device()))}, Python {platform.python_version()}, {versions}",
        commit=current_commit(),
        hash_of_file=HASH_OF_FILE,
        hash_of_start=HASH_OF_START,
        file_hash=file_hash(folder / ADAPTER_WEIGHTS),
        start_hash=start_hash(folder),
    )
    (folder / "README.md").write_text(page, encoding="utf-8")
    size = (folder / ADAPTER_WEIGHTS).stat().st_size / 1e6
    print(f"{task}: {before} before, {after} after, {size:.2f} MB in {folder}, {time.monotonic() - began:.0f} s", flush=True)


def check_size(model: str, rank: int, targets: str | Sequence[str]) -> None:
    """Refuse adapters that would be too large, before anything is trained."""
    shape = shape_of(model)
    if shape is None:
        raise BadInput(f"the sizes of '{model}' cannot be had; is it here? give --gguf FILE where there is no hub")
    size = 2 * rank * sum(shape.linear.get(name, 0) for name in (shape.linear if targets == ALL_LINEAR else targets))
    if size > MOST_BYTES:
        raise BadInput(
            f"rank {rank} on these layers takes {size / 1e6:.1f} MB; {MOST_BYTES / 1e6:g} MB are the most: lower --rank, or name fewer --targets"
        )


def command_words(task: str, arguments: argparse.Namespace) -> str:
    """The arguments that make one task's warm start again; a file is named without its folder."""
    given = {name: value for name, value in vars(arguments).items() if value is not None and name not in ("tasks", "check", "out", "gguf")}
    file = [f"--gguf {Path(arguments.gguf).name}"] if arguments.gguf is not None else []
    return " ".join([task, *(f"--{name.replace('_', '-')} {value}" for name, value in given.items()), *file])


def main(words: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help="environments of the scale")
    parser.add_argument(
        "--check", nargs="+", default=None, metavar="FOLDER", help="compare these warm starts with their pages, and make none"
    )
    parser.add_argument("--scale", default="qwen-1.5b", help="whose options of environments and lengths are taken")
    parser.add_argument("--model", default="Qwen/Qwen2.5-Coder-1.5B-Instruct")
    parser.add_argument("--gguf", default=None, metavar="FILE", help="stands for --model where there is no hub")
    parser.add_argument("--out", default="experiments/warm_starts", metavar="DIR")
    parser.add_argument("--prefix", default="qwen", help="folders are named PREFIX-TASK")
    parser.add_argument("--rank", type=int, default=7)
    parser.add_argument("--alpha", type=int, default=None, help="twice the rank unless it is given")
    parser.add_argument("--targets", default="q_proj,k_proj,v_proj,o_proj", help=f"names of layers, or {ALL_LINEAR}")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=None, help="as many as the epochs take unless they are given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=256, help="of the evaluations before and after")
    arguments = parser.parse_args(words)
    if arguments.gguf is not None:
        stand_in(Path(arguments.gguf), arguments.model)
    if arguments.check is not None:
        return sum(not check(Path(folder)) for folder in arguments.check)
    scale = read_library(Path(__file__).parents[1]).scale(arguments.scale)
    for task in arguments.tasks:
        make(task, scale, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
