"""vLLM's part of rollout.py, in a process and, where need be, an environment of its own: it imports nothing of Tether.

Called by rollout.py with the folder of a model's config and the workload as JSON; prints one line of JSON. The weights are made up by vLLM
(`load_format="dummy"`), which changes no time. Turns go in lock-step, one `generate` call each over the whole conversations so far; the prefix
cache is on, so a turn computes what is new. Logs go to stderr.
"""

import json
import os
import random
import sys
import time
from typing import Any


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM logs to stdout; that is for the answer alone
    folder, asked = sys.argv[1], json.loads(sys.argv[2])
    began = time.perf_counter()
    import torch
    import vllm

    model = vllm.LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=asked["dtype"],
        max_model_len=asked["longest"],
        max_num_seqs=asked["rows"],
        enable_prefix_caching=True,
        gpu_memory_utilization=0.85 if torch.cuda.is_available() else 0.4,  # of a CPU's memory too, where rollout.py still holds some
    )
    play(model, asked, seed=0)
    start = time.perf_counter() - began
    sampled, seconds = play(model, asked, seed=1)
    line = json.dumps({"sampled": sampled, "seconds": seconds, "start": start - seconds, "version": vllm.__version__})
    os.write(answers, line.encode() + b"\n")


def play(model: Any, asked: dict[str, Any], seed: int) -> tuple[int, float]:
    """Tokens sampled and seconds for all turns of all conversations."""
    from vllm import SamplingParams

    rng, num_sampled = random.Random(seed), 0

    def words(count: int) -> list[int]:
        return [rng.randrange(asked["vocabulary"]) for _ in range(count)]

    prompts = [words(asked["prompt"]) for _ in range(asked["rows"] // asked["group"])]
    histories = [list(prompts[row // asked["group"]]) for row in range(asked["rows"])]
    sampling = SamplingParams(temperature=1.0, max_tokens=asked["response"], ignore_eos=True, detokenize=False, logprobs=0)
    began = time.perf_counter()
    for turn in range(asked["turns"]):
        if turn:
            histories = [history + words(asked["observed"]) for history in histories]
        outputs = model.generate([{"prompt_token_ids": history} for history in histories], sampling, use_tqdm=False)
        drawn = [list(output.outputs[0].token_ids) for output in outputs]
        num_sampled += sum(map(len, drawn))
        histories = [history + ids for history, ids in zip(histories, drawn, strict=True)]
    return num_sampled, time.perf_counter() - began


if __name__ == "__main__":
    main()
