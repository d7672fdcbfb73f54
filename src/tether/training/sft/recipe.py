"""`tether warmstart`: from nothing to the embedded model, reproducibly; a recipe of supervised fine-tuning.

1. Fallible experts play three environments (training split) and write down what they think.
2. A tokenizer is trained on those words, a Llama-architecture model is initialised; both are seeded.
3. The model imitates the experts. In a first, long lesson it learns to read and to plan; in a second, short one from experts that seldom do
   so, the habit of not doing it.

Nothing is held out: the lessons have a fixed length, and the loss is bounded by the experts' own randomness. Responses end with the closing
answer tag, as in a rollout; the end of a turn is not taught. The result is a Hugging Face folder. The same settings on the same machine give
the same weights.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tether.core.grammar import ANSWER_CLOSE, ANSWER_OPEN, THINK_CLOSE, THINK_OPEN
from tether.core.protocols import Env
from tether.core.seeding import derive_seed, seed_everything
from tether.envs.registry import make_env
from tether.models.catalog import TRAINED_WORDING
from tether.models.chat import ChatFormat
from tether.models.policy import Policy
from tether.training.sft.experts import Experts, play_expert
from tether.training.sft.settings import EyesSettings, Lesson, SftLearnerSettings, WarmstartSettings
from tether.training.sft.trainer import SupervisedTrainer

TOKENIZER_EPISODES = 400
VOCABULARY = 1024
WORD = r" ?[A-Za-z]?[a-z]+| ?\|\||\s|."
CHAT_START, CHAT_END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENVIRONMENTS = ("frozen_lake", "sokoban", "countdown", "countdown")
"""Turn by turn; sums are harder to learn than boards, so they come twice as often."""

Progress = Callable[[str, int, int, str], None]
"""Called with stage, done, total, and a short remark."""


def warmstart(settings: WarmstartSettings, out: Path, device: str, progress: Progress) -> None:
    """Make the model and write it to `out`."""
    seed_everything(derive_seed("warmstart", settings.seed))
    envs = [make_env(name, instructions=TRAINED_WORDING["tiny"]) for name in ENVIRONMENTS]
    tokenizer = train_tokenizer(_texts(envs, settings))
    model: Any = LlamaForCausalLM(_architecture(settings, tokenizer))  # Any: a decorator of transformers hides the signature of .to
    model.to(device)
    teach(Policy(model), ChatFormat(tokenizer), envs, settings, (settings.skill, settings.habit), progress)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def teach(
    policy: Policy,
    chat: ChatFormat,
    envs: Sequence[Env],
    settings: WarmstartSettings | EyesSettings,
    lessons: Sequence[Lesson],
    progress: Progress,
) -> None:
    """Give the model one lesson after the other; no lesson repeats an episode of another."""
    dtype = torch.bfloat16 if policy.device.type == "cuda" else None  # over float32 master weights; float32 has no fast attention there
    first_episode = 0
    for number, lesson in enumerate(lessons, start=1):
        episodes = range(first_episode, first_episode + lesson.episodes)
        experts = Experts(envs, chat, lesson.weaknesses, end_of_turn=False, stream="warmstart", turns=lesson.turns)
        demonstrations = experts.record(settings.seed, episodes, partial(progress, f"lesson {number}: episodes"))
        seed = derive_seed("warmstart-order", settings.seed, number)
        learner = SftLearnerSettings(update_batch=settings.batch)
        trainer = SupervisedTrainer(policy, learner, rate=lesson.learning_rate, seed=seed, dtype=dtype)
        trainer.train(demonstrations, lesson.steps, partial(progress, f"lesson {number}: training"))
        first_episode = episodes.stop


def _texts(envs: Sequence[Env], settings: WarmstartSettings) -> list[str]:
    rng = random.Random(derive_seed("warmstart-words", settings.seed))
    texts = []
    for index in range(TOKENIZER_EPISODES):
        env = envs[index % len(envs)]
        texts.append(env.instructions)
        texts += [text for exchange in play_expert(env, index, rng, settings.skill.weaknesses).exchanges for text in exchange]
    return texts


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


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A small tokenizer trained on the environments' own words: byte-level BPE, so any text can be written, with chat markers and tags.

    Every symbol of a grid and every digit is a token of its own (only words with lower-case letters are merged): a model this small
    learns to read a board when a cell is a token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORD), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    markers: list[str | AddedToken] = [AddedToken(text, special=True, normalized=False) for text in (CHAT_START, CHAT_END)]
    tags: list[str | AddedToken] = [
        AddedToken(text, special=False, normalized=False) for text in (THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*markers, *tags],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=CHAT_END,
        pad_token=CHAT_END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
