"""`tether warmstart`: from nothing to the embedded model, reproducibly.

1. Fallible experts play three environments (training split) and write down what they think.
2. A tokenizer is trained on those words, a Llama-architecture model is initialised; both are seeded.
3. The model imitates the experts: cross-entropy on response tokens only, in the very token layout of a rollout. In a first, long lesson it
   learns to read and to plan; in a second, short one from experts that seldom do so, the habit of not doing it.

The result is a Hugging Face folder. The same settings on the same machine give the same weights.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from tether.core.config import Settings
from tether.core.grammar import parse_response
from tether.core.protocols import Env
from tether.core.seeding import derive_seed, seed_everything
from tether.envs.registry import make_env
from tether.models.chat import ChatFormat
from tether.models.policy import Policy
from tether.training.warmstart.demonstrators import Weaknesses, demonstrate
from tether.training.warmstart.tokenizer import train_tokenizer

TOKENIZER_EPISODES = 400
ENVIRONMENTS = ("frozen_lake", "sokoban", "countdown", "countdown")
"""Turn by turn; sums are harder to learn than boards, so they come twice as often."""

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]


class Lesson(Settings):
    """Experts to imitate, and for how long."""

    weaknesses: Weaknesses
    steps: Positive
    episodes: Positive
    """Demonstrated episodes of all environments; training goes round them as often as the steps need."""
    learning_rate: Rate


class WarmstartSettings(Settings):
    """What `tiny` is made of."""

    skill: Lesson = Lesson(
        weaknesses=Weaknesses(habit=0.6, confusion=0.3, indecision=0.6), steps=3300, episodes=50_000, learning_rate=1.5e-3
    )
    habit: Lesson = Lesson(weaknesses=Weaknesses(habit=0.7, confusion=0.1, indecision=0.3), steps=400, episodes=8_000, learning_rate=4e-4)
    batch: Positive = 64
    width: Positive = 192
    hidden: Positive = 512
    layers: Positive = 5
    heads: Positive = 4
    positions: Positive = 1024
    seed: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One episode as tokens; `responses` marks the expert's."""

    ids: list[int]
    responses: list[bool]


Progress = Callable[[str, int, int, str], None]
"""Called with stage, done, total, and a short remark."""


def warmstart(settings: WarmstartSettings, out: Path, device: str, progress: Progress) -> None:
    """Make the model and write it to `out`."""
    seed_everything(derive_seed("warmstart", settings.seed))
    envs = [make_env(name) for name in ENVIRONMENTS]
    tokenizer = train_tokenizer(_texts(envs, settings))
    model: Any = LlamaForCausalLM(_architecture(settings, tokenizer))  # Any: a decorator of transformers hides the signature of .to
    model.to(device)
    teach(Policy(model), ChatFormat(tokenizer), envs, settings, (settings.skill, settings.habit), progress)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def teach(
    model: Policy, chat: ChatFormat, envs: Sequence[Env], settings: WarmstartSettings, lessons: Sequence[Lesson], progress: Progress
) -> None:
    """Give the model one lesson after the other; no lesson repeats an episode of another."""
    first_episode = 0
    for number, lesson in enumerate(lessons, start=1):
        episodes = range(first_episode, first_episode + lesson.episodes)
        recorded = partial(progress, f"lesson {number}: episodes")
        demonstrations = _record(envs, chat, settings.seed, lesson.weaknesses, episodes, recorded)
        order = random.Random(derive_seed("warmstart-order", settings.seed, number))
        _train(model, demonstrations, lesson, settings.batch, order, partial(progress, f"lesson {number}: training"))
        first_episode = episodes.stop


def play_expert(env: Env, seed: int, rng: random.Random, weaknesses: Weaknesses) -> list[tuple[str, str]]:
    """An expert's episode as (observation, response) pairs."""
    shown, exchanges = env.reset(seed).text, []
    while True:
        thought = demonstrate(env, rng, weaknesses)
        exchanges.append((shown, thought.text))
        step = env.step(parse_response(thought.text).answer or "")
        if step.done:
            return exchanges
        shown = step.observation.text


def _texts(envs: Sequence[Env], settings: WarmstartSettings) -> list[str]:
    rng = random.Random(derive_seed("warmstart-words", settings.seed))
    texts = []
    for index in range(TOKENIZER_EPISODES):
        env = envs[index % len(envs)]
        texts.append(env.instructions)
        texts += [text for exchange in play_expert(env, index, rng, settings.skill.weaknesses) for text in exchange]
    return texts


def _record(
    envs: Sequence[Env], chat: ChatFormat, seed: int, weaknesses: Weaknesses, episodes: range, progress: Callable[[int, int, str], None]
) -> list[Demonstration]:
    demonstrations = []
    for index in episodes:
        env = envs[index % len(envs)]
        rng = random.Random(derive_seed("warmstart-expert", seed, index))
        exchanges = play_expert(env, derive_seed("warmstart-instance", seed, index), rng, weaknesses)
        demonstrations.append(_tokens(env, chat, exchanges))
        if len(demonstrations) % 500 == 0 or len(demonstrations) == len(episodes):
            progress(len(demonstrations), len(episodes), "")
    return demonstrations


def _tokens(env: Env, chat: ChatFormat, exchanges: list[tuple[str, str]]) -> Demonstration:
    ids: list[int] = []
    responses: list[bool] = []
    written: tuple[int, ...] = ()
    for turn, (observation, response) in enumerate(exchanges):
        context = chat.next_prompt(observation, written) if turn else chat.first_prompt(env.instructions, observation)
        written = chat.encode(response)
        ids += [*context, *written]
        responses += [False] * len(context) + [True] * len(written)
    return Demonstration(ids, responses)


def _architecture(settings: WarmstartSettings, tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.width,
        intermediate_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _train(
    model: Policy,
    demonstrations: list[Demonstration],
    lesson: Lesson,
    batch: int,
    order: random.Random,
    progress: Callable[[int, int, str], None],
) -> None:
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=lesson.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, lesson.steps))
    for step in range(lesson.steps):
        ids_BT, mask_BT = _batch(order.sample(demonstrations, min(batch, len(demonstrations))), model.module.device)
        features_BTD = model.features(input_ids=ids_BT, use_cache=False)
        logits_NV = model.logits(features_BTD[:, :-1][mask_BT[:, 1:]])
        loss = torch.nn.functional.cross_entropy(logits_NV.float(), ids_BT[:, 1:][mask_BT[:, 1:]])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 5 == 4 or step + 1 == lesson.steps:
            progress(step + 1, lesson.steps, f"loss {float(loss.detach()):.3f}")


def _rate(step: int, steps: int) -> float:
    """Linear warm-up over a twentieth of the steps, then a cosine down to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))


def _batch(demonstrations: list[Demonstration], device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(len(d.ids) for d in demonstrations)
    ids_BT = torch.zeros(len(demonstrations), longest, dtype=torch.long)
    mask_BT = torch.zeros(len(demonstrations), longest, dtype=torch.bool)
    for b, demonstration in enumerate(demonstrations):
        ids_BT[b, : len(demonstration.ids)] = torch.tensor(demonstration.ids)
        mask_BT[b, : len(demonstration.ids)] = torch.tensor(demonstration.responses)
    return ids_BT.to(device), mask_BT.to(device)
