"""vLLM's part of rollout.py, real_run.py and vision.py, in a process and, where need be, an environment of its own: it imports nothing of Tether.

`ask` starts this file with the folder of a model's files and the workload as JSON; it prints one line of JSON. The weights are made up by vLLM
(`load_format="dummy"`), which changes no time. Turns go in lock-step, one `generate` call each over the whole conversations so far; the prefix
cache is on, so a turn computes what is new. The first run is not timed, the best of the others counts. Logs go to stderr.

With pictures, each prompt and observation shows a new one before its words, and vLLM's own processor reads it: the folder holds the files of
tokenizer and image processor. vLLM is sent one placeholder for a picture and makes the model's tokens of it, whose number is checked. The
pictures are drawn and named before the clock runs, so vLLM does not hash them; its cache of processed pictures is on, as it is by default.
The same lengths in words alone follow, on the same engine.

With episodes that a run has recorded, every turn is fed the very tokens that the run showed, and answered with as many as its model wrote; nothing
stands for the time that environments take. The first step is not timed, each of the others once.
"""

import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def ask(python: str | None, folder: str, asked: dict[str, Any]) -> dict[str, Any] | str:
    """vLLM's answer, or why there is none. `python`: of an environment that has vLLM; this one if it is None; 'none' leaves vLLM out."""
    if python == "none":
        return "left out"
    python = python or (sys.executable if importlib.util.find_spec("vllm") else None)
    if python is None:
        return "not installed"
    print("vLLM starts", file=sys.stderr, flush=True)
    done = subprocess.run([python, str(Path(__file__)), folder, json.dumps(asked)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return f"failed, exit code {done.returncode}"
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM logs to stdout; that is for the answer alone
    folder, asked = sys.argv[1], json.loads(sys.argv[2])
    began = time.perf_counter()
    import torch
    import vllm

    # vLLM's processors find the placeholder in the tokenizer's vocabulary.
    sight = {"limit_mm_per_prompt": {"image": asked["turns"], "video": 0}} if "picture" in asked else {"skip_tokenizer_init": True}
    model = vllm.LLM(
        model=folder,
        load_format="dummy",
        dtype=asked["dtype"],
        max_model_len=asked["longest"],
        max_num_seqs=asked["rows"],
        enable_prefix_caching=True,
        gpu_memory_utilization=0.85 if torch.cuda.is_available() else 0.4,  # of a CPU's memory too, where the caller still holds some
        **sight,
    )
    answer: dict[str, Any] = {"version": vllm.__version__}
    if "recorded" in asked:
        _, *timed = [play_recorded(model, episodes) for episodes in json.loads(Path(asked["recorded"]).read_text())]
        answer["recorded"] = {"sampled": sum(sampled for sampled, _ in timed), "seconds": sum(seconds for _, seconds in timed)}
        os.write(answers, json.dumps(answer).encode() + b"\n")
        return
    seeds = itertools.count()  # no run meets the words of an earlier one in the prefix cache
    for name, workload in workloads(asked).items():
        play(model, workload, next(seeds))
        passed = time.perf_counter() - began
        sampled, seconds = min((play(model, workload, next(seeds)) for _ in range(asked["repeats"])), key=lambda run: run[1])
        answer.setdefault("start", passed - seconds)
        answer[name] = {"sampled": sampled, "seconds": seconds}
    os.write(answers, json.dumps(answer).encode() + b"\n")


def workloads(asked: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By name: the one that is asked for and, where it has pictures, the same lengths in words."""
    if "picture" not in asked:
        return {"words": asked}
    shown = asked["picture"]["tokens"]
    words = {name: value for name, value in asked.items() if name != "picture"}
    return {"pictures": asked, "words": words | {"prompt": words["prompt"] + shown, "observed": words["observed"] + shown}}


def play(model: Any, asked: dict[str, Any], seed: int) -> tuple[int, float]:
    """Tokens sampled and seconds for all turns of all conversations."""
    from vllm import SamplingParams

    rng, num_sampled, outputs = random.Random(seed), 0, []
    rows, group, observed, picture = asked["rows"], asked["group"], asked["observed"], asked.get("picture")

    def feed(count: int) -> list[int]:
        """So many words; the picture stands before the last ones."""
        ids = [rng.randrange(asked["vocabulary"]) for _ in range(count)]
        return [*ids[: count - observed], picture["placeholder"], *ids[count - observed :]] if picture else ids

    prompts = [feed(asked["prompt"]) for _ in range(rows // group)]
    histories = [list(prompts[row // group]) for row in range(rows)]
    shown = pictures_of(asked, seed) if picture else None
    sampling = SamplingParams(temperature=1.0, max_tokens=asked["response"], ignore_eos=True, detokenize=False, logprobs=0)
    began = time.perf_counter()
    for turn in range(asked["turns"]):
        if turn:
            histories = [history + feed(observed) for history in histories]
        inputs = [{"prompt_token_ids": history, **(seen(shown[row][: turn + 1]) if shown else {})} for row, history in enumerate(histories)]
        outputs = model.generate(inputs, sampling, use_tqdm=False)
        drawn = [list(output.outputs[0].token_ids) for output in outputs]
        num_sampled += sum(map(len, drawn))
        if picture:  # a sampled placeholder would stand for a picture that is not there
            drawn = [[0 if token in picture["never"] else token for token in ids] for ids in drawn]
        histories = [history + ids for history, ids in zip(histories, drawn, strict=True)]
    seconds = time.perf_counter() - began
    if picture:
        check_prompts([output.prompt_token_ids for output in outputs], asked)
    return num_sampled, seconds


def play_recorded(model: Any, episodes: list[list[dict[str, Any]]]) -> tuple[int, float]:
    """Tokens sampled and seconds for the episodes of a step; a turn says what it shows, how many tokens answer, and whether it forgets what was before."""
    from vllm import SamplingParams

    histories: list[list[int]] = [[] for _ in episodes]
    num_sampled, began = 0, time.perf_counter()
    for number in range(max(map(len, episodes))):
        live = [row for row, turns in enumerate(episodes) if number < len(turns)]
        for row in live:
            turn = episodes[row][number]
            histories[row] = [*([] if turn["fresh"] else histories[row]), *turn["context"]]
        samplings = [
            SamplingParams(temperature=1.0, max_tokens=episodes[row][number]["response"], ignore_eos=True, detokenize=False, logprobs=0)
            for row in live
        ]
        outputs = model.generate([{"prompt_token_ids": histories[row]} for row in live], samplings, use_tqdm=False)
        for row, output in zip(live, outputs, strict=True):
            histories[row] += output.outputs[0].token_ids
            num_sampled += len(output.outputs[0].token_ids)
    return num_sampled, time.perf_counter() - began


def pictures_of(asked: dict[str, Any], seed: int) -> list[list[tuple[str, Any]]]:
    """For every conversation a picture a turn, each with its name; the first one is the group's, the others are its own."""
    import numpy as np
    from PIL import Image

    rng, side = np.random.default_rng(seed), asked["picture"]["side"]

    def drawn(*path: int) -> tuple[str, Any]:
        return "-".join(map(str, ("picture", seed, *path))), Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8))

    firsts = [drawn(group) for group in range(asked["rows"] // asked["group"])]
    return [[firsts[row // asked["group"]], *(drawn(row, turn) for turn in range(1, asked["turns"]))] for row in range(asked["rows"])]


def seen(pictures: list[tuple[str, Any]]) -> dict[str, Any]:
    """How a prompt brings its pictures."""
    return {
        "multi_modal_data": {"image": [image for _, image in pictures]},
        "multi_modal_uuids": {"image": [name for name, _ in pictures]},
    }


def check_prompts(prompts: list[list[int]], asked: dict[str, Any]) -> None:
    """Refuse a vLLM that made other tokens of the pictures than the model does here: it did other work. The prompts are those of the last turn."""
    turns, picture = asked["turns"], asked["picture"]
    length = asked["prompt"] + (turns - 1) * (asked["response"] + asked["observed"]) + turns * picture["tokens"]
    expected = (length, turns * picture["patches"])
    found = {(len(ids), ids.count(picture["placeholder"])) for ids in prompts}
    if found != {expected}:
        raise SystemExit(f"vLLM read prompts of (tokens, patches of pictures) {sorted(found)}, and the model here reads {expected}")


if __name__ == "__main__":
    main()
