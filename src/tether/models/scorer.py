"""log p(z | x) of many reasonings after one prompt: the prompt is computed once and its cache shared by all of them.

Only the reasoning's positions go through the model after that, so scoring N reasonings under P prompts costs P prompts plus
N * P reasonings instead of N * P times both. A model that takes no such cache (a recurrent one, say) is scored the long way. Sums are taken in float64 over float32 log-probs at temperature 1.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.models.decoder import CachedDecoder, decodes_with_cache
from tether.models.head import SplitModel, evaluating

TOKENS_PER_CALL = 8192
"""Padded reasoning tokens of one forward pass; keeps memory flat."""

Predict = Callable[[Tensor], Tensor]
"""From reasoning ids [B, T] to the features that predict them [B, T, D], given a prompt."""


class PrefixScorer:
    """Scores reasonings under a Hugging Face causal language model."""

    def __init__(self, model: PreTrainedModel, tokens_per_call: int = TOKENS_PER_CALL) -> None:
        self._model = model
        with evaluating(model):
            self._split = SplitModel(model)
            self._cached = decodes_with_cache(model, self._split)
        self._tokens_per_call = tokens_per_call

    def score(self, prompt: Sequence[int], reasoning: Sequence[int]) -> float:
        """log p(reasoning | prompt)."""
        return float(self.score_many(prompt, [reasoning])[0])

    @torch.inference_mode()
    def score_many(self, prompt: Sequence[int], reasonings: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """log p of every reasoning after one prompt."""
        with evaluating(self._model):  # dropout would make scores random
            return self._score(prompt, reasonings)

    def _score(self, prompt: Sequence[int], reasonings: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        order = sorted(range(len(reasonings)), key=lambda n: len(reasonings[n]))  # similar lengths together: little padding
        batches = self._batches([len(reasonings[n]) for n in order])
        prompt_1T = torch.tensor([list(prompt)], device=self._model.device)
        most_rows = max(stop - start for start, stop in batches)
        predict = self._after_cached(prompt_1T, most_rows) if self._cached else self._after_whole(prompt_1T)
        scores = np.empty(len(reasonings), dtype=np.float64)
        for start, stop in batches:
            scores[order[start:stop]] = self._score_batch(predict, [reasonings[n] for n in order[start:stop]])
        return scores

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
        """For a model that takes no cache: compute prompt and reasoning together, each time."""

        def predict(ids_BT: Tensor) -> Tensor:
            whole_BT = torch.cat([prompt_1T.expand(len(ids_BT), -1), ids_BT], dim=1)
            return self._split.features(input_ids=whole_BT, use_cache=False)[:, prompt_1T.shape[1] - 1 : -1]

        return predict

    def _score_batch(self, predict: Predict, rows: list[Sequence[int]]) -> npt.NDArray[np.float64]:
        device = self._model.device
        lengths_B = torch.tensor([len(row) for row in rows], device=device)
        longest = int(lengths_B.max())
        ids_BT = torch.zeros(len(rows), longest, dtype=torch.long, device=device)
        for index, row in enumerate(rows):
            ids_BT[index, : len(row)] = torch.tensor(list(row), device=device)
        features_BTD = predict(ids_BT)
        inside_BT = torch.arange(longest, device=device) < lengths_B[:, None]
        logits_NV = self._split.logits(features_BTD[inside_BT]).float()
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
