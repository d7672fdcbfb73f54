"""Does the engine that trains sample what transformers would? Greedy tokens and log-probs of a real model, in each precision.

    python benchmarks/against_transformers.py --model smollm2
    python benchmarks/against_transformers.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --guesses 0 7

The first prompts of an environment are answered by the engine and by transformers' generate, greedily, with as many tokens; then sampled at
temperature 1. One row per precision and number of guessed tokens (`rollout.speculative_tokens`):
- greedy tokens before the first that differs, of all that generate wrote;
- the difference between the engine's log-probs and those of one forward pass of transformers over the very tokens that the engine sampled, mean and
  largest, for the greedy tokens and for those at temperature 1.

In float32 the two should agree. In bfloat16 a near tie may fall the other way, and all tokens after it differ; the log-probs, which compare
the same tokens, show whether it was rounding.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from shapes import Row, add_json_option, publish, say
from workloads import FixedConversation

from tether.core.protocols import Sampling
from tether.core.seeding import generator
from tether.envs.registry import make_env
from tether.models.chat import ChatFormat
from tether.models.load import load_model
from tether.models.policy import Policy
from tether.rollout.engines.native import NativeEngine

Ids = tuple[int, ...]


def first_prompts(chat: ChatFormat, env_name: str, count: int) -> list[Ids]:
    env = make_env(env_name)
    prompts = []
    for seed in range(count):
        shown = env.reset(seed).text
        prompts.append(chat.first_prompt(env.instructions, shown))
    return prompts


def sample(policy: Policy, prompts: Sequence[Ids], sampling: Sampling, guesses: int) -> list[tuple[Ids, tuple[float, ...]]]:
    """Tokens and log-probs of the engine's responses; only the model's own end of turn ends one before its budget."""
    longest = max(map(len, prompts)) + sampling.max_tokens
    engine = NativeEngine(policy, max_rows=len(prompts), max_context=longest, speculative_tokens=guesses)
    conversations = [FixedConversation(i, 0, prompt, (), generator("benchmark", "draws", i)) for i, prompt in enumerate(prompts)]
    engine.run(conversations, sampling)
    engine.free()
    return [(turn.response_ids, turn.logprobs) for conversation in conversations for turn in conversation.trajectory.turns]


@torch.inference_mode()
def generate(model: Any, prompt: Ids, max_tokens: int, end_ids: Sequence[int]) -> Ids:
    ids = torch.tensor([prompt], device=model.device)
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        repetition_penalty=1.0,  # Qwen's generation config asks for another one
        max_new_tokens=max_tokens,
        eos_token_id=list(end_ids),
        pad_token_id=end_ids[0],
    )
    return tuple(written[0, len(prompt) :].tolist())


@torch.inference_mode()
def logprobs(model: Any, prompt: Ids, response: Ids) -> list[float]:
    """Of every token of a response, by one forward pass."""
    logits = model(torch.tensor([[*prompt, *response]], device=model.device)).logits[0, len(prompt) - 1 : -1].float()
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(response, device=model.device)[:, None])[:, 0].tolist()
    return found


def num_equal(ours: Ids, theirs: Ids) -> int:
    """Tokens before the first that differs."""
    return next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def differences(model: Any, prompts: Sequence[Ids], sampled: Sequence[tuple[Ids, tuple[float, ...]]]) -> list[float]:
    found: list[float] = []
    for prompt, (ids, ours) in zip(prompts, sampled, strict=True):
        found += [abs(a - b) for a, b in zip(ours, logprobs(model, prompt, ids), strict=True)]
    return found


def compare(args: argparse.Namespace, dtype: str) -> list[Row]:
    loaded = load_model(args.model, device=args.device, dtype=dtype)
    policy = Policy(loaded.model, loaded.tokenizer)
    chat = ChatFormat(loaded.tokenizer, policy.end_of_turn_ids)
    prompts = first_prompts(chat, args.env, args.prompts)
    say(f"{args.model}, {dtype}: generate")
    theirs = [generate(loaded.model, prompt, args.tokens, policy.end_of_turn_ids) for prompt in prompts]
    rows: list[Row] = []
    for guesses in args.guesses:
        say(f"{args.model}, {dtype}: the engine, guesses of {guesses}")
        greedy = sample(policy, prompts, Sampling(0.0, args.tokens), guesses)
        drawn = sample(policy, prompts, Sampling(1.0, args.tokens), guesses)
        row: dict[str, float | str | None] = {"model": args.model, "precision": dtype, "guesses": str(guesses)}
        equal = sum(num_equal(ours, other) for (ours, _), other in zip(greedy, theirs, strict=True))
        row["greedy tokens equal"] = f"{equal} of {sum(map(len, theirs))}"
        for name, sampled in (("greedy", greedy), ("temperature 1", drawn)):
            found = differences(loaded.model, prompts, sampled)
            row[f"log-probs, {name}: mean (largest)"] = f"{sum(found) / len(found):.5f} ({max(found):.4f})"
        rows.append(row)
    return rows


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="any name that tether train takes")
    parser.add_argument("--env", default="frozen_lake")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=60, help="of a response, at most")
    parser.add_argument("--guesses", type=int, nargs="+", default=[0], help="rollout.speculative_tokens")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default=None)
    add_json_option(parser)
    args = parser.parse_args(given)
    publish([row for dtype in args.dtype for row in compare(args, dtype)], args.json)


if __name__ == "__main__":
    main()
