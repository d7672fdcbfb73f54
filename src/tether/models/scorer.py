"""log p(z | x) of many reasonings after one prompt: the prompt is computed once and its cache shared by all of them.

Only the reasoning's positions go through the model after that, so scoring N reasonings under P prompts costs P prompts plus
N * P reasonings instead of N * P times both. Sums are taken in float64 over float32 log-probs at temperature 1.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.models.decoder import CachedDecoder
from tether.models.head import SplitModel

TOKENS_PER_CALL = 8192
"""Padded reasoning tokens of one forward pass; keeps memory flat."""


class PrefixScorer:
    """Scores reasonings under a Hugging Face causal language model."""

    def __init__(self, model: PreTrainedModel, tokens_per_call: int = TOKENS_PER_CALL) -> None:
        self._model = model
        self._split = SplitModel(model)
        self._tokens_per_call = tokens_per_call

    def score(self, prompt: Sequence[int], reasoning: Sequence[int]) -> float:
        """log p(reasoning | prompt)."""
        return float(self.score_many(prompt, [reasoning])[0])

    @torch.inference_mode()
    def score_many(self, prompt: Sequence[int], reasonings: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """log p of every reasoning after one prompt."""
        was_training = self._model.training
        self._model.eval()  # dropout would make scores random
        try:
            return self._score(prompt, reasonings)
        finally:
            self._model.train(was_training)

    def _score(self, prompt: Sequence[int], reasonings: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        order = sorted(range(len(reasonings)), key=lambda n: len(reasonings[n]))  # similar lengths together: little padding
        batches = self._batches([len(reasonings[n]) for n in order])
        decoder = CachedDecoder(self._model, max(stop - start for start, stop in batches), self._split)
        device = self._model.device
        prompt_1T = torch.tensor([list(prompt)], device=device)
        last_D = decoder.extend(slice(0, 1), prompt_1T, torch.zeros(1, dtype=torch.long, device=device))[0, -1]
        decoder.cache.copy_row(0, slice(0, decoder.cache.num_rows), len(prompt))
        scores = np.empty(len(reasonings), dtype=np.float64)
        for start, stop in batches:
            rows = [reasonings[n] for n in order[start:stop]]
            scores[order[start:stop]] = self._score_batch(decoder, len(prompt), last_D, rows)
        return scores

    def _score_batch(self, decoder: CachedDecoder, num_prompt: int, last_D: Tensor, rows: list[Sequence[int]]) -> npt.NDArray[np.float64]:
        device = self._model.device
        lengths_B = torch.tensor([len(row) for row in rows], device=device)
        longest = int(lengths_B.max())
        ids_BT = torch.zeros(len(rows), longest, dtype=torch.long, device=device)
        for index, row in enumerate(rows):
            ids_BT[index, : len(row)] = torch.tensor(list(row), device=device)
        features_BTD = last_D.expand(len(rows), 1, -1)  # the prompt's last position predicts the first reasoning token
        if longest > 1:
            starts_B = torch.full((len(rows),), num_prompt, device=device)
            features_BTD = torch.cat([features_BTD, decoder.extend(slice(0, len(rows)), ids_BT[:, :-1], starts_B)], dim=1)
        inside_BT = torch.arange(longest, device=device) < lengths_B[:, None]
        logits_NV = decoder.logits(features_BTD[inside_BT])
        # gather before subtracting the normaliser: no second tensor as wide as the vocabulary
        chosen_N = logits_NV.gather(1, ids_BT[inside_BT][:, None])[:, 0] - torch.logsumexp(logits_NV, dim=1)
        logprobs_BT = torch.zeros(inside_BT.shape, dtype=torch.float64, device=device).masked_scatter_(inside_BT, chosen_N.double())
        sums: npt.NDArray[np.float64] = logprobs_BT.sum(dim=1).cpu().numpy()
        return sums

    def _batches(self, lengths: list[int]) -> list[tuple[int, int]]:
        """Ranges over ascending lengths whose padded size stays within the budget."""
        batches, start = [], 0
        for index, length in enumerate(lengths):
            if index > start and (index - start + 1) * length > self._tokens_per_call:
                batches.append((start, index))
                start = index
        batches.append((start, len(lengths)))
        return batches
