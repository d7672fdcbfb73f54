"""A small random model and batches written by hand, for tests of what an update does."""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from tether.algorithms.batch import Batch

WORDS = 61
TEMPERATURE = 0.8
GROUPS = (5, 5, 5, 2, 2, 9)
"""Of six trajectories: uneven groups, one of them alone."""


@pytest.fixture
def small_llama() -> Callable[..., Any]:
    """`small_llama(seed=0)`: two layers of width 32, with weights large enough that every number depends on who sees whom."""

    def build(seed: int = 0) -> Any:
        torch.manual_seed(seed)
        config = hf.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        model = hf.LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(6)
        return model

    return build


@pytest.fixture(scope="session")
def small_policy(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Callable[..., str]:
    """`small_policy(layers)`: the folder of a model of random weights with the words of `tiny`, for whole runs that must be quick.

    With `closes` every fourth or so of its tokens closes the reasoning, which a diagnosis needs: the first dimension is the same for all words.
    """

    @functools.cache
    def save(layers: int, closes: bool = False) -> str:
        folder = tmp_path_factory.mktemp("small")
        torch.manual_seed(0)
        config = hf.LlamaConfig(
            vocab_size=len(tiny.tokenizer),
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=tiny.tokenizer.eos_token_id,
        )
        model = hf.LlamaForCausalLM(config)
        if closes:
            with torch.no_grad():
                model.model.embed_tokens.weight[:, 0] = 1.0
                model.lm_head.weight[tiny.tokenizer.convert_tokens_to_ids("</think>"), 0] = 1.3
        model.save_pretrained(folder)
        tiny.tokenizer.save_pretrained(folder)
        return str(folder)

    return save


@pytest.fixture
def hand_made() -> Callable[..., Batch]:
    """`hand_made(model, rows=1)`: six trajectories of one to three turns; with `rows=3` every turn is a row of its own.

    The sampler was another than the model (log-probs are moved by up to `noise`), so that ratios lie on both sides of the clips. A turn
    earns a number of its own at its last token. There are no advantages yet.
    """

    def build(model: Any, rows: int = 1, noise: float = 0.6) -> Batch:
        draw = random.Random(3)
        rolled: list[tuple[int, list[tuple[int, int]]]] = []
        for owner in range(len(GROUPS)):
            turns = [(draw.randint(2, 6), draw.randint(2, 7)) for _ in range(1 + owner % 3)]
            rolled += [(owner, turns)] if rows == 1 else [(owner, [turn]) for turn in turns]
        lengths = [sum(fed + said for fed, said in turns) for _, turns in rolled]
        shape = (len(rolled), max(lengths))
        ids, mask, ends = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        rewards = torch.zeros(shape, dtype=torch.float64)
        for row, (_, turns) in enumerate(rolled):
            ids[row, : lengths[row]] = torch.tensor([draw.randrange(WORDS) for _ in range(lengths[row])])
            place = 0
            for fed, said in turns:
                mask[row, place + fed : place + fed + said] = True
                place += fed + said
                ends[row, place - 1] = True
                rewards[row, place - 1] = round(draw.uniform(-1, 2), 2)
        logprobs = torch.zeros(shape)
        for row, length in enumerate(lengths):
            with torch.inference_mode():
                table = torch.log_softmax(
                    model(input_ids=ids[row : row + 1, :length].to(model.device)).logits[0].float() / TEMPERATURE, dim=-1
                )
            for place in range(1, length):
                if mask[row, place]:
                    logprobs[row, place] = float(table[place - 1, ids[row, place]]) + draw.uniform(-noise, noise)
        owners = torch.tensor([owner for owner, _ in rolled])
        columns = (ids, mask, logprobs, rewards, ends, torch.tensor(lengths), owners, torch.tensor(GROUPS)[owners])
        return Batch(*(column.to(model.device) for column in columns))

    return build
