"""log p(z | x) of many reasonings after many prompts: a prompt is computed once and shared by all reasonings.

Only the reasonings' positions go through the model after that, so scoring N reasonings under P prompts costs P prompts plus N * P
reasonings instead of N * P times both. There are three backends, and a model gets the first that its probe finds exact:

- shared: the prompts' keys and values are stored once and read by all texts (scoring/shared_prefix.py); no padding, no copies.
- copied: through a key/value cache into which the prompt is copied for every reasoning, for attention that is more than dot products.
- whole: prompt and reasoning together for each pair, for models without such a cache and texts longer than an attention window.

Log-probs come from float32 logits at temperature 1 and are summed in float64. `precision` names what the layers compute in.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.core.errors import BadInput
from tether.core.images import IMAGE_IDS
from tether.models.fast.decoding.rows import CachedDecoder, decodes_with_cache
from tether.models.fast.linear_logprobs import float32_product, linear_logprobs
from tether.models.policy import Policy
from tether.models.probing import HALF_TYPES, evaluating
from tether.models.scoring.shared_prefix import SharedPrefix, shares_prefix

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

SCORE_LOGIT_BYTES = {"cuda": 2**30, "cpu": 2**28}
"""Memory for the logits of one part, by device."""

Predict = Callable[[Tensor], Tensor]
"""From reasoning ids [B, T] to the features that predict them [B, T, D], given a prompt."""


def scorer_for(policy: Policy) -> "PrefixScorer":
    """The scorer on a model; the same one for every caller."""
    return policy.once("scorer", lambda: PrefixScorer(policy))


class PrefixScorer:
    """Scores reasonings under a Hugging Face causal language model."""

    def __init__(self, model: PreTrainedModel | Policy, tokens_per_call: int | None = None) -> None:
        """`model`: the policy's handle, whose probes are shared; a bare Hugging Face model gets a handle of its own."""
        self.policy = model if isinstance(model, Policy) else Policy(without_wrapper(model))
        self._model = self.policy.module
        self._shared = shares_prefix(self.policy)
        self._cache_reason = "" if self._shared.tokens is not None else decodes_with_cache(self.policy)
        self._tokens = TokenScores(self.policy)
        self._tokens_per_call = tokens_per_call
        self.precision: str = str(self.policy.dtype).removeprefix("torch.")
        embeddings: Any = self._model.get_input_embeddings()
        self.vocabulary_size: int = int(embeddings.num_embeddings)

    @property
    def backend(self) -> Literal["shared", "copied", "whole"]:
        """How texts within the model's attention window are computed."""
        return "shared" if self._shared.tokens is not None else "whole" if self._cache_reason else "copied"

    @property
    def reason(self) -> str:
        """Why a slower backend, or a slower attention, is used; "" where it is not."""
        return "; ".join(reason for reason in (self._shared.reason, self._cache_reason) if reason)

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
        budget = self._tokens_per_call or tokens_per_call(self.policy)
        rows = sorted(range(len(reasonings)), key=lambda n: len(reasonings[n]))
        columns = sorted(range(len(prompts)), key=lambda j: len(prompts[j]))
        longest = len(reasonings[rows[-1]]) - 1
        reach = self._shared.tokens
        near = [j for j in columns if reach is not None and len(prompts[j]) + longest <= reach]
        scores = np.empty((len(reasonings), len(prompts)), dtype=np.float64)
        texts = [reasonings[n] for n in rows]
        with evaluating(self._model):  # dropout would make scores random
            if near:
                # Nothing waits for the device before the end of a block.
                blocks = [[prompts[j] for j in near[block.start : block.stop]] for block in cuts([len(prompts[j]) for j in near], budget)]
                scores[np.ix_(rows, near)] = np.concatenate([self._share(block, texts, budget) for block in blocks], axis=1)
            for j in columns[len(near) :]:
                scores[rows, j] = self._one_prompt(prompts[j], texts, budget)
        return scores

    def _check(self, prompts: Sequence[Ids], reasonings: Sequence[Ids]) -> None:
        """Refuse what the model cannot read."""
        for texts in (prompts, reasonings):
            if not len(texts) or not all(len(text) for text in texts):
                raise BadInput("scoring needs a prompt and a reasoning, and at least one token in each; leave out empty ones")
            check_ids(texts, self.vocabulary_size, sees=self.policy.vision is not None)
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
        """Both ascending in length."""
        prefix = SharedPrefix(self.policy, prompts)
        firsts = torch.tensor([text[0] for text in texts], device=self._model.device)
        first_PN = self._tokens.of_words(prefix.last_PD, firsts)
        num_short = sum(len(text) == 1 for text in texts)  # they come first, and the prompts' last features score them
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
        fits = len(prompt) + len(texts[-1]) - 1 <= self.policy.max_positions
        copies = self.backend == "copied" and fits and self.policy.places is None
        extra = 0 if copies else len(prompt)  # what a row holds beside the reasoning
        parts = list(cuts([len(text) + extra for text in texts], budget, padded=True))
        predict = self._after_cached(prompt_1T, max(map(len, parts))) if copies else self._after_whole(prompt_1T)
        return np.concatenate([self._score_batch(predict, texts[part.start : part.stop]) for part in parts])

    def _after_cached(self, prompt_1T: Tensor, num_rows: int) -> Predict:
        """Compute the prompt once; every call reuses its keys and values."""
        decoder = CachedDecoder(self.policy, num_rows)
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
            return self.policy.features(input_ids=whole_BT, use_cache=False)[:, prompt_1T.shape[1] - 1 :]

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


def check_ids(texts: Iterable[Sequence[int]], vocabulary_size: int | None, *, sees: bool = False) -> None:
    """Refuse texts with token ids that a vocabulary does not hold; None, an unknown size, refuses only negative ones. Images are for models that
    see."""
    for text in texts:
        if len(text) and max(text) >= IMAGE_IDS:
            if not sees:
                raise BadInput("the prompts hold images, and the scorer reads text only; score with a model that reads images")
            text = [token for token in text if token < IMAGE_IDS]
        if len(text) and (min(text) < 0 or (vocabulary_size is not None and max(text) >= vocabulary_size)):
            wrong = int(min(text) if min(text) < 0 else max(text))
            holds = "token ids from 0" if vocabulary_size is None else f"token ids 0 to {vocabulary_size - 1}"
            raise BadInput(
                f"the rollouts' tokens do not fit the scorer: found token id {wrong}, its vocabulary holds {holds}; "
                "score with a model that has the tokenizer of the rollouts, or give the rollouts as text"
            )


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


def tokens_per_call(policy: Policy) -> int:
    """How many tokens one pass may hold on the model's device."""
    config = policy.config
    if policy.device.type != "cuda":
        return TOKENS_PER_CALL if policy.separable_head else min(TOKENS_PER_CALL, max(1, UNSPLIT_BYTES // (4 * int(config.vocab_size))))
    hidden = int(config.hidden_size)
    widest = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    per_token = policy.dtype.itemsize * (12 * hidden + 4 * widest) + (0 if policy.separable_head else 8 * int(config.vocab_size))
    free, _ = torch.cuda.mem_get_info(policy.device)
    free += torch.cuda.memory_reserved(policy.device) - torch.cuda.memory_allocated(policy.device)
    return min(max(int(SHARE_OF_MEMORY * free) // per_token, TOKENS_PER_CALL), MOST_TOKENS_PER_CALL)


def without_wrapper(model: Any) -> PreTrainedModel:
    """The model itself where adapters are wrapped around it: they sit in its layers."""
    if not hasattr(model, "get_base_model"):
        return model
    if getattr(model.active_peft_config, "is_prompt_learning", False):
        raise BadInput(f"a model with {model.active_peft_config.peft_type.value} cannot score: its learned prompt is no part of the layers")
    return model.get_base_model()


class TokenScores:
    """Log-probs of given tokens, made for a part of the tokens at a time.

    The logits of a thousand tokens take more memory than the model's layers did. They are float32 also where the model computes in half
    precision: the product with the head is accumulated and kept in float32, not rounded first.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._head = policy.linear_head if policy.dtype in HALF_TYPES else None
        """A head that is one matrix product in half precision; its logits are made in float32 here."""

    def of(self, features_SD: Tensor, targets_S: Tensor) -> Tensor:
        """[S] log-probs, of one target for each token."""
        if self._head is not None and features_SD.is_cuda:  # one pass over the logits, in a kernel
            return linear_logprobs(features_SD, targets_S, self._head.weight, self._head.bias)[0]
        parts = zip(self._parts(features_SD), self._parts(targets_S), strict=True)
        return torch.cat([self._chosen(features, targets[:, None])[:, 0] for features, targets in parts])

    def of_words(self, features_SD: Tensor, words_N: Tensor) -> Tensor:
        """[S, N] log-probs, of the same words for every token."""
        return torch.cat([self._chosen(features, words_N.expand(len(features), -1)) for features in self._parts(features_SD)])

    def _parts(self, tensor_S: Tensor) -> tuple[Tensor, ...]:
        vocabulary = int(self._policy.config.vocab_size)
        logit_bytes = SCORE_LOGIT_BYTES.get(tensor_S.device.type, SCORE_LOGIT_BYTES["cpu"])
        return tensor_S.split(max(1, logit_bytes // (8 * vocabulary)))  # logits and log-probs, four bytes each

    def _chosen(self, features_SD: Tensor, words_SN: Tensor) -> Tensor:
        """[S, N] log-probs of some words for each token."""
        logits_SV = self._policy.logits(features_SD) if self._head is None else float32_product(self._head, features_SD)
        wide = torch.promote_types(logits_SV.dtype, torch.float32)
        if logits_SV.is_cuda:  # one fused pass, summed by a thousand threads
            return torch.log_softmax(logits_SV, dim=-1, dtype=wide).gather(1, words_SN)
        # On a CPU the same function adds up the vocabulary one word after another, and is off by 4e-5 a token, always to one side.
        logits_SV = logits_SV.to(wide)
        return logits_SV.gather(1, words_SN) - torch.logsumexp(logits_SV, dim=-1, keepdim=True)
