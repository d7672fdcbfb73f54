"""log p(z | x) of many reasonings after many prompts: a prompt is computed once and shared by all reasonings.

Only the reasonings' positions go through the model after that, so scoring N reasonings under P prompts costs P prompts plus N * P
reasonings instead of N * P times both. There are three ways, and a model gets the first that its probe finds exact:

- shared: the prompts' keys and values are stored once and read by everyone (models/shared_prefix.py); no padding, no copies.
- copied: through a key/value cache into which the prompt is copied for every reasoning, for attention that is more than dot products.
- whole: prompt and reasoning together for each pair, for models without such a cache and texts longer than an attention window.

Log-probs come from float32 logits at temperature 1 and are summed in float64. `precision` names what the layers compute in.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.core.errors import BadInput
from tether.models.decoding.cached import CachedDecoder, decodes_with_cache, max_positions
from tether.models.policy import Policy
from tether.models.probing import evaluating
from tether.models.scorers import check_ids
from tether.models.shared_prefix import SharedPrefix, shares_prefix
from tether.models.token_scores import TokenScores

Ids = Sequence[int]
Scores = npt.NDArray[np.float64]
TOKENS_PER_CALL = 4096
"""Tokens of one forward pass on a CPU, where more bring nothing."""
UNSPLIT_BYTES = 2**29
"""Memory on a CPU for the logits of a model that makes them for every token of a pass."""
MOST_TOKENS_PER_CALL = 2**15
"""On a GPU, if memory allows: enough to be computed for longer than launching a pass takes, few enough to stay near its cache."""
SHARE_OF_MEMORY = 0.4
"""Of a GPU's free memory, for the tensors of one pass."""
MOST_PADDING = 2
"""Texts are computed together as long as padding them to the longest does not make them more than this many times as large."""

Predict = Callable[[Tensor], Tensor]
"""From reasoning ids [B, T] to the features that predict them [B, T, D], given a prompt."""


class PrefixScorer:
    """Scores reasonings under a Hugging Face causal language model."""

    def __init__(self, model: PreTrainedModel, tokens_per_call: int | None = None) -> None:
        self._model = without_wrapper(model)
        with evaluating(self._model):
            self._split = Policy(self._model)
            self._reach = shares_prefix(self._split)
            self._decodes = self._reach is not None or decodes_with_cache(self._model, self._split)
        self._tokens = TokenScores(self._split)
        self._tokens_per_call = tokens_per_call
        self.precision: str = str(self._model.dtype).removeprefix("torch.")
        embeddings: Any = self._model.get_input_embeddings()
        self.vocabulary_size: int = int(embeddings.num_embeddings)

    @property
    def backend(self) -> Literal["shared", "copied", "whole"]:
        """How texts within the model's attention window are computed."""
        return "shared" if self._reach is not None else "copied" if self._decodes else "whole"

    def score(self, prompt: Ids, reasoning: Ids) -> float:
        """log p(reasoning | prompt)."""
        return float(self.score_all([prompt], [reasoning])[0, 0])

    def score_many(self, prompt: Ids, reasonings: Sequence[Ids]) -> Scores:
        """log p of every reasoning after one prompt."""
        column: Scores = self.score_all([prompt], reasonings)[:, 0]
        return column

    @torch.inference_mode()
    def score_all(self, prompts: Sequence[Ids], reasonings: Sequence[Ids]) -> Scores:
        """log p of every reasoning after every prompt, [reasonings, prompts]."""
        self._check(prompts, reasonings)
        budget = self._tokens_per_call or tokens_per_call(self._split)
        rows = sorted(range(len(reasonings)), key=lambda n: len(reasonings[n]))
        columns = sorted(range(len(prompts)), key=lambda j: len(prompts[j]))
        longest = len(reasonings[rows[-1]]) - 1
        near = [j for j in columns if self._reach is not None and len(prompts[j]) + longest <= self._reach]
        scores = np.empty((len(reasonings), len(prompts)), dtype=np.float64)
        texts = [reasonings[n] for n in rows]
        with evaluating(self._model):  # dropout would make scores random
            if near:
                scores[np.ix_(rows, near)] = self._share([prompts[j] for j in near], texts, budget)
            for j in columns[len(near) :]:
                scores[rows, j] = self._one_prompt(prompts[j], texts, budget)
        return scores

    def _check(self, prompts: Sequence[Ids], reasonings: Sequence[Ids]) -> None:
        """Refuse what the model cannot read."""
        for texts in (prompts, reasonings):
            if not len(texts) or not all(len(text) for text in texts):
                raise BadInput("scoring needs a prompt and a reasoning, and at least one token in each; leave out empty ones")
            check_ids(texts, self.vocabulary_size)
        positions = int(getattr(self._model.config.get_text_config(), "max_position_embeddings", 0) or 2**31)
        prompt = max(range(len(prompts)), key=lambda j: len(prompts[j]))
        reasoning = max(range(len(reasonings)), key=lambda n: len(reasonings[n]))
        together = len(prompts[prompt]) + len(reasonings[reasoning]) - 1
        if together > positions:
            raise BadInput(
                f"prompt {prompt} and reasoning {reasoning} are {together} tokens together, more than the model's {positions} positions; "
                "leave out the longest, or score with a model of longer context"
            )

    # ------------------------------------------------------------------------------------------------------------- shared

    def _share(self, prompts: Sequence[Ids], texts: Sequence[Ids], budget: int) -> Scores:
        """Both ascending in length. Nothing waits for the device before the end of a block."""
        columns = [self._share_block(prompts[block.start : block.stop], texts, budget) for block in cuts([len(p) for p in prompts], budget)]
        return np.concatenate(columns, axis=1)

    def _share_block(self, prompts: Sequence[Ids], texts: Sequence[Ids], budget: int) -> Scores:
        prefix = SharedPrefix(self._split, prompts)
        firsts = torch.tensor([text[0] for text in texts], device=self._model.device)
        first_PN = self._tokens.of_words(prefix.last_PD, firsts)
        num_short = sum(len(text) == 1 for text in texts)  # they come first, and the prompts have told all about them
        plan: list[tuple[range, range, npt.NDArray[np.int64]]] = []
        found = []
        for some in cuts([len(text) - 1 for text in texts[num_short:]], budget):
            rows = range(num_short + some.start, num_short + some.stop)
            at_once = max(1, budget // sum(len(texts[n]) - 1 for n in rows))
            for start in range(0, len(prompts), at_once):
                columns = range(start, min(start + at_once, len(prompts)))
                ahead = prefix.extend(columns, texts[rows.start : rows.stop])
                found.append(self._tokens.of(ahead.features_SD, ahead.targets_S))
                plan.append((rows, columns, ahead.lengths))
        scores: Scores = first_PN.cpu().numpy().astype(np.float64).T
        for (rows, columns, lengths), logprobs_S in zip(plan, found, strict=True):
            sums = np.add.reduceat(logprobs_S.cpu().numpy().astype(np.float64), np.cumsum(lengths) - lengths)
            scores[rows.start : rows.stop, columns.start : columns.stop] += sums.reshape(len(columns), len(rows)).T
        return scores

    # --------------------------------------------------------------------------------------------------- copied and whole

    def _one_prompt(self, prompt: Ids, texts: Sequence[Ids], budget: int) -> Scores:
        prompt_1T = torch.tensor([list(prompt)], device=self._model.device)
        fits = len(prompt) + len(texts[-1]) - 1 <= max_positions(self._model)
        copies = self._decodes and self._reach is None and fits
        extra = 0 if copies else len(prompt)  # what a row holds beside the reasoning
        parts = list(cuts([len(text) + extra for text in texts], budget, padded=True))
        predict = self._after_cached(prompt_1T, max(map(len, parts))) if copies else self._after_whole(prompt_1T)
        return np.concatenate([self._score_batch(predict, texts[part.start : part.stop]) for part in parts])

    def _after_cached(self, prompt_1T: Tensor, num_rows: int) -> Predict:
        """Compute the prompt once; every call reuses its keys and values."""
        decoder = CachedDecoder(self._model, num_rows, self._split)
        num_prompt = prompt_1T.shape[1]
        last_D = decoder.extend(slice(0, 1), prompt_1T, torch.zeros(1, dtype=torch.long, device=prompt_1T.device))[0, -1]
        decoder.cache.copy_row(0, slice(0, num_rows), num_prompt)

        def predict(ids_BT: Tensor) -> Tensor:
            first_B1D = last_D.expand(len(ids_BT), 1, -1)  # the prompt's last position predicts the first reasoning token
            if ids_BT.shape[1] == 1:
                return first_B1D
            starts_B = torch.full((len(ids_BT),), num_prompt, device=ids_BT.device)
            return torch.cat([first_B1D, decoder.extend(slice(0, len(ids_BT)), ids_BT[:, :-1], starts_B)], dim=1)

        return predict

    def _after_whole(self, prompt_1T: Tensor) -> Predict:
        """Prompt and reasoning together, each time."""

        def predict(ids_BT: Tensor) -> Tensor:
            whole_BT = torch.cat([prompt_1T.expand(len(ids_BT), -1), ids_BT[:, :-1]], dim=1)
            return self._split.features(input_ids=whole_BT, use_cache=False)[:, prompt_1T.shape[1] - 1 :]

        return predict

    def _score_batch(self, predict: Predict, texts: Sequence[Ids]) -> Scores:
        lengths = np.array([len(text) for text in texts])
        ids_BT = torch.zeros(len(texts), int(lengths.max()), dtype=torch.long)
        for index, text in enumerate(texts):
            ids_BT[index, : len(text)] = torch.tensor(list(text))
        inside_BT = torch.arange(ids_BT.shape[1]) < torch.from_numpy(lengths)[:, None]
        ids_BT, inside_BT = ids_BT.to(self._model.device), inside_BT.to(self._model.device)
        logprobs_S = self._tokens.of(predict(ids_BT)[inside_BT], ids_BT[inside_BT])
        sums: Scores = np.add.reduceat(logprobs_S.cpu().numpy().astype(np.float64), np.cumsum(lengths) - lengths)
        return sums


def cuts(lengths: Sequence[int], budget: int, padded: bool = False) -> Iterator[range]:
    """Ranges over ascending lengths with at most `budget` tokens each, or one text where that alone has more.

    `padded` says whether padding to the longest counts; where it does not, it is kept within bounds all the same.

    >>> list(cuts([2, 2, 3, 3], budget=7)), list(cuts([2, 2, 3, 3], budget=7, padded=True)), list(cuts([1, 1, 9], budget=99))
    ([range(0, 3), range(3, 4)], [range(0, 2), range(2, 4)], [range(0, 2), range(2, 3)])
    """
    start, tokens = 0, 0
    for index, length in enumerate(lengths):
        size = (index - start + 1) * length
        fits = size <= budget if padded else tokens + length <= budget and size <= MOST_PADDING * (tokens + length)
        if index > start and not fits:
            yield range(start, index)
            start, tokens = index, 0
        tokens += length
    if lengths:
        yield range(start, len(lengths))


def tokens_per_call(split: Policy) -> int:
    """How many tokens one pass may hold on the model's device."""
    config = split.module.config.get_text_config()
    if split.module.device.type != "cuda":
        return TOKENS_PER_CALL if split.separable_head else min(TOKENS_PER_CALL, max(1, UNSPLIT_BYTES // (4 * int(config.vocab_size))))
    hidden = int(config.hidden_size)
    widest = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    per_token = split.module.dtype.itemsize * (12 * hidden + 4 * widest) + (0 if split.separable_head else 8 * int(config.vocab_size))
    free, _ = torch.cuda.mem_get_info(split.module.device)
    free += torch.cuda.memory_reserved(split.module.device) - torch.cuda.memory_allocated(split.module.device)
    return min(max(int(SHARE_OF_MEMORY * free) // per_token, TOKENS_PER_CALL), MOST_TOKENS_PER_CALL)


def without_wrapper(model: Any) -> PreTrainedModel:
    """The model itself where adapters are wrapped around it: they sit in its layers."""
    if not hasattr(model, "get_base_model"):
        return model
    if getattr(model.active_peft_config, "is_prompt_learning", False):
        raise BadInput(f"a model with {model.active_peft_config.peft_type.value} cannot score: its learned prompt is no part of the layers")
    return model.get_base_model()
