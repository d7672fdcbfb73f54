"""How long a whole training iteration takes and what memory it needs, with and without the filter.

    python benchmarks/iteration.py --model shape:3b                    # GPU: PPO, 8 prompts x 16, 5 turns x 100 tokens
    python benchmarks/iteration.py --model smollm2 --groups 4 --group 4 --turns 2
    python benchmarks/iteration.py --model tiny --groups 4 --group 8 --turns 2

It is the trainer of `tether train` that runs, on its own settings but for the sizes; nothing of it is replaced except the two things that a
model without sense cannot do. The model is saved to a temporary folder first, with an end of turn that it never draws, so that every response
has its full length; and the first three quarters of each response count as its reasoning, so that diagnosis has as much to score as in a run
that thinks. The environment is synthetic_env.py: prompts and observations of fixed lengths, and rewards whose variance differs from prompt to
prompt. Diagnosis is due in every iteration with its default budget, a share of that one iteration's work: what it costs on average.

The first iteration is not timed. Then `--steps` iterations train on all groups, and as many on those that the filter keeps (`top_p`, keep
0.9); each row is their mean. "Saved" is the share of an iteration's time that filtering takes away, with the share of groups it kept beside it:
one figure means little without the other. `select` is scoring the groups by reward variance and choosing.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from shapes import (
    SHAPE,
    Row,
    add_json_option,
    add_model_options,
    forget_peak,
    measured_model,
    peak_gib,
    precision,
    publish,
    say,
    timed,
)
from synthetic_env import TAG, shown
from workloads import endless

from tether.algorithms.filters.group_filter import GroupFilter
from tether.models.chat import ChatFormat
from tether.models.hardware import device_name
from tether.runs.store import RunStore
from tether.runs.timings import StepTimings
from tether.training.batch import Rollouts
from tether.training.loop import Trainer
from tether.training.settings import RunSettings

REASONING_SHARE = 0.75
LAST_STEP = 1_000_000
"""So far away that neither checkpoints nor evaluations are due."""
GB = 1e9


class ReadsReasoning(ChatFormat):
    """Reads every response as well formed, one letter a token, most of them reasoning; decodes it all the same, because a run does."""

    def decode(self, ids: tuple[int, ...]) -> str:
        super().decode(ids)
        thought = int(REASONING_SHARE * len(ids))
        return f"{'z' * thought}</think> <{TAG}>go</{TAG}>"

    def tokens_before(self, ids: tuple[int, ...], num_chars: int) -> int:
        super().tokens_before(ids, num_chars)
        return min(num_chars, len(ids))


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        settings = _settings(options, folder / "model")
        say("building the trainer")
        store = RunStore.create(folder / "run", "", {"benchmark": "iteration"})
        publish(_rows(options, Trainer(settings, store), store), options.json)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--algorithm", default="ppo", help="any of the presets")
    parser.add_argument("--groups", type=int, default=8, help="prompts of an iteration")
    parser.add_argument("--group", type=int, default=16, help="episodes of a prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt, as near as words allow")
    parser.add_argument("--response", type=int, default=100, help="tokens of a response")
    parser.add_argument("--observed", type=int, default=80, help="tokens between two responses, as near as words allow")
    parser.add_argument("--steps", type=int, default=2, help="iterations of each kind to time")
    parser.add_argument("--micro-tokens", type=int, default=None, help="learner.micro_tokens; its default if not given")
    parser.add_argument("--recompute", action="store_true", help="learner.gradient_checkpointing=true")
    add_json_option(parser)
    return parser.parse_args(arguments)


def _save(options: argparse.Namespace, folder: Path) -> tuple[dict[str, int], str]:
    """Save the model, to be loaded by the trainer; the options of the environment that make its texts as long as asked for, and the device."""
    say(f"saving {options.model}")
    model, given = measured_model(options.model, options.device, options.dtype if options.model.startswith(SHAPE) else None)
    tokenizer = endless(given)
    model.generation_config.eos_token_id = tokenizer.eos_token_id  # nothing else ends a response
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    first, later = _words(ChatFormat(tokenizer), options.prompt, options.observed)
    return {"max_turns": options.turns, "first_words": first, "words": later}, str(model.device)


def _settings(options: argparse.Namespace, folder: Path) -> RunSettings:
    env, device = _save(options, folder)
    forget_peak(torch.device(device))  # room for the trainer's own copy
    learner: dict[str, Any] = {"micro_tokens": options.micro_tokens} if options.micro_tokens is not None else {}
    if options.recompute:
        learner["gradient_checkpointing"] = True
    return RunSettings.model_validate(
        {
            "env": {"name": "synthetic_env:FixedTask", "options": env},
            "model": {"name": str(folder), "device": device, "dtype": options.dtype},
            "algorithm": {"name": options.algorithm},
            "rollout": {"num_groups": options.groups, "group_size": options.group, "max_tokens": options.response},
            "learner": learner,
            "diagnosis": {"every": 1},
            "checkpoint": {"every": LAST_STEP},
            "steps": LAST_STEP,
        }
    )


def _words(chat: ChatFormat, prompt: int, observed: int) -> tuple[int, int]:
    """How many words make a first prompt, and a later one, of at most so many tokens."""
    first = max((n for n in range(prompt) if len(chat.first_prompt("Go on.", shown(0, n))) <= prompt), default=0)
    later = max((n for n in range(observed) if len(chat.next_prompt(shown(0, n), ())) <= observed), default=0)
    sizes = len(chat.first_prompt("Go on.", shown(0, first))), len(chat.next_prompt(shown(0, later), ()))
    say(f"prompts of {sizes[0]} tokens, {sizes[1]} between two responses")
    return first, later


def _rows(options: argparse.Namespace, trainer: Trainer, store: RunStore) -> list[Row]:
    assert trainer.policy.tokenizer is not None  # loaded with the model
    trainer.sampler.chat = ReadsReasoning(trainer.policy.tokenizer)
    kinds = {"all groups": GroupFilter(strategy="all"), "top_p 0.9": GroupFilter(strategy="top_p", keep=0.9)}
    rows: list[Row] = []
    with trainer.sampler.pool:
        _filter_by(trainer, kinds["all groups"])
        say(f"first iteration: {timed(trainer.policy.device, partial(trainer.train_step, 1))[0]:.1f} s")
        if not store.steps()[-1].metrics.get("information/num_reasonings"):
            raise SystemExit("diagnosis found no reasoning to score: the times would leave it out")
        for name, rules in kinds.items():
            _filter_by(trainer, rules)
            rows.append({**_about(options, trainer), "groups": name, **_mean_row(options, trainer, store)})
    whole = float(rows[0]["seconds"] or 0.0)
    return [rows[0], {**rows[1], "saved": 1 - float(rows[1]["seconds"] or 0.0) / whole}]


def _filter_by(trainer: Trainer, rules: GroupFilter) -> None:
    """Let the next iterations filter by these rules."""
    trainer.settings = trainer.settings.model_copy(update={"filter": rules})
    trainer.alarm_actions.keep = rules.keep
    trainer.rollouts = Rollouts(trainer.settings, trainer.sampler, trainer.timer, trainer.callbacks)


def _about(options: argparse.Namespace, trainer: Trainer) -> Row:
    sizes = f"{options.groups} x {options.group}, {options.turns} turns, {options.prompt} in, {options.response} out, {options.observed} observed"
    device = f"{device_name(trainer.policy.device)}, {precision(trainer.policy.module)}"
    return {"model": options.model, "device, precision": device, "algorithm": options.algorithm, "iteration": sizes}


def _mean_row(options: argparse.Namespace, trainer: Trainer, store: RunStore) -> Row:
    """Means over the iterations of one kind, and the highest memory."""
    device, began = trainer.policy.device, trainer.step
    forget_peak(device)
    seconds = []
    for step in range(began + 1, began + 1 + options.steps):
        seconds.append(timed(device, partial(trainer.train_step, step))[0])
        say(f"iteration {step}: {seconds[-1]:.1f} s")
    timings = [StepTimings.from_json(line) for line in store.timings() if line["step"] > began]
    (*_, last) = store.steps()
    kept = [record.metrics["groups/kept_ratio"] for record in store.steps() if record.step > began]
    sampled = [record.metrics["rollout/tokens_sampled"] for record in store.steps() if record.step > began]
    stages = list(dict.fromkeys(stage for step in timings for stage in step.seconds))
    whole = statistics.mean(seconds)
    by_stage = {stage: statistics.mean(step.seconds.get(stage, 0.0) for step in timings) for stage in stages}
    memory = [max(step.peak_memory.values()) / GB for step in timings if step.peak_memory]
    return {
        "seconds": whole,
        **by_stage,
        "select, share": by_stage["select"] / whole if "select" in by_stage else None,
        "tokens sampled": statistics.mean(sampled),
        "groups kept": statistics.mean(kept),
        **{f"update, {name}": last.metrics[f"update/{name}"] for name in ("micro_tokens", "recompute", "memory_retries")},
        "peak GB": max(memory) if memory else peak_gib(device) * 2**30 / GB,
    }


if __name__ == "__main__":
    main()
