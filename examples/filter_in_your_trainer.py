"""Tether in a training loop that is not Tether's: ten lines add the filter, the information, the alarms and a run folder.

    python examples/filter_in_your_trainer.py --steps 3 --out runs/my-loop
    tether report runs/my-loop

The loop is a plain policy gradient on Hugging Face's `generate`, with one-turn FrozenLake as its task. The lines marked with `tether` are all
that the filter and the diagnosis need; `Monitor` takes prompts and responses as token ids or as texts, and the model itself is the scorer.
"""

import argparse
from pathlib import Path

import torch

import tether

PROMPTS, SAMPLES, MAX_TOKENS = 4, 4, 60


def prompt_text(tokenizer, env, seed: int) -> str:
    messages = [{"role": "system", "content": env.instructions}, {"role": "user", "content": env.reset(seed).text}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + "<think>"


def reward_of(env, seed: int, response: str) -> tuple[float, bool]:
    env.reset(seed)
    step = env.step(response.partition("<answer>")[2].partition("</answer>")[0].strip())
    return step.reward - 0.1 * (not step.info["valid"]), step.success


def generate(model, tokenizer, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """SAMPLES responses to each prompt; all token ids, and a mask of the sampled ones."""
    inputs = tokenizer([text for text in prompts for _ in range(SAMPLES)], return_tensors="pt", padding=True, add_special_tokens=False)
    stop = {"stop_strings": ["</answer>"], "tokenizer": tokenizer}
    ids = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=True, pad_token_id=tokenizer.pad_token_id, **stop)
    sampled = torch.zeros_like(ids, dtype=torch.bool)
    start = inputs["input_ids"].shape[1]
    for row, tokens in enumerate(ids):
        ends = (tokens[start:] == tokenizer.pad_token_id).nonzero()
        sampled[row, start : start + int(ends[0]) if len(ends) else None] = True
    return ids, sampled


def main(steps: int, out: Path | None, seed: int = 0) -> list[tether.Health]:
    torch.manual_seed(seed)
    model, tokenizer = tether.load_model("tiny", device="cpu")
    tokenizer.padding_side = "left"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    env = tether.make_env("frozen_lake", slip=0.0, instructions="plain")
    monitor = tether.Monitor(model, every=1, tokenizer=tokenizer, out=out, about={"model": "tiny", "trainer": "my loop"})  # tether
    healths = []
    for step in range(1, steps + 1):
        seeds = [PROMPTS * step + n for n in range(PROMPTS)]
        prompts = [prompt_text(tokenizer, env, number) for number in seeds]
        ids, sampled = generate(model, tokenizer, prompts)
        responses = [tokens[mask].tolist() for tokens, mask in zip(ids, sampled, strict=True)]
        groups = [number for number in seeds for _ in range(SAMPLES)]
        paid = [reward_of(env, group, tokenizer.decode(tokens)) for group, tokens in zip(groups, responses, strict=True)]
        rewards, successes = [reward for reward, _ in paid], [success for _, success in paid]

        selection = tether.select_groups(rewards, groups, strategy="top_p", keep=0.9)  # tether: which prompts carry signal
        health = monitor.observe(  # tether: the whole batch, before the filter and before the update
            step,
            prompts=[text for text in prompts for _ in range(SAMPLES)],
            responses=responses,
            groups=groups,
            rewards=rewards,
            successes=successes,
            selection=selection,
        )
        healths.append(health)
        for alarm in health.new_alarms:  # tether
            print(alarm.sentence())

        kept = torch.from_numpy(selection.mask)  # tether: rows of dropped groups take no part in the loss
        baseline = torch.tensor(rewards).view(PROMPTS, SAMPLES).mean(1).repeat_interleave(SAMPLES)
        advantages = torch.tensor(rewards) - baseline
        if kept.any():
            logits = model(ids[kept], attention_mask=(ids[kept] != tokenizer.pad_token_id).long()).logits[:, :-1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[kept][:, 1:, None])[..., 0]
            mask = sampled[kept][:, 1:]
            loss = -(advantages[kept][:, None] * logprobs * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        known = health.metrics["information"]
        print(
            f"step {step}: reward {sum(rewards) / len(rewards):.3f}, kept {len(selection.kept)} of {PROMPTS} prompts, "
            f"retrieval {known.get('retrieval_acc', float('nan')):.2f} (chance {known.get('chance', float('nan')):.2f}), regime {health.regime}"
        )
    if monitor.logger is not None:
        monitor.logger.finish(f"all {steps} steps done")  # tether
    return healths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="a run folder for tether report")
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
