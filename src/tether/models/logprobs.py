"""Log-probabilities and entropies of the tokens a mask selects, with gradient: what the learner trains on.

A micro-batch goes through the trunk once; only the features that predict selected tokens go on, through the vocabulary and, where there is
one, a value head. Rows are padded on the right; with causal attention padding is seen by nothing that counts, so no attention mask is
needed. Whatever is computed for a micro-batch stands in the order of its rows of the batch, token by token: it lines up with
`field_BT[micro.index_M][mask_BT[micro.index_M]]`.

Shape legend: B rows of the batch, M of a micro-batch, T tokens, N selected tokens, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tether.core.errors import BadInput
from tether.models.head import SplitModel
from tether.models.packing import MicroBatch, micro_batches


class Selected(NamedTuple):
    """The selected tokens of a micro-batch."""

    features_ND: Tensor
    """What the trunk says at the position before each token: it predicts the token, and is the state a critic judges."""
    targets_N: Tensor
    """The tokens themselves."""


def forward(split: SplitModel, ids_BT: Tensor, mask_BT: Tensor, micro: MicroBatch) -> Selected:
    """One pass through the trunk over a micro-batch of the batch ids_BT; mask_BT selects tokens.

    The first token of a row has nothing before it and cannot be selected.
    """
    index_M = micro.index_M.to(ids_BT.device)
    sequence_N, column_N = mask_BT[index_M].nonzero(as_tuple=True)
    rows_M, starts_M, lengths_M = torch.tensor([place[1:] for place in micro.places], device=ids_BT.device).unbind(1)
    if bool((column_N == 0).any()):
        raise ValueError("the mask selects the first token of a row, which nothing predicts")
    if bool((column_N >= lengths_M[sequence_N]).any()):
        raise ValueError("the mask selects padding: a token beyond the length of its row")
    ids_RW, positions_RW = micro.laid_out(ids_BT)
    if micro.shares_rows and not split.packs:
        raise ValueError(f"models of type '{split.model.config.model_type}' do not take shared rows; cut micro-batches with together=False")
    # Positions are given only where they say something: a model then builds the general mask, which is slower than the causal one.
    positions = {"position_ids": positions_RW} if micro.shares_rows else {}
    features_RWD = split.features(input_ids=ids_RW, use_cache=False, **positions)
    features_ND = features_RWD[rows_M[sequence_N], starts_M[sequence_N] + column_N - 1]
    return Selected(features_ND, ids_BT[index_M[sequence_N], column_N])


def logprobs_and_entropy(split: SplitModel, features_ND: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log p of each token and entropy of the distribution it came from, at the sampling temperature, in float32."""
    logits_NV = split.logits(features_ND).float() / temperature
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    return logprobs_NV.gather(1, targets_N[:, None])[:, 0], entropy_N


@torch.no_grad()
def over_batch(
    split: SplitModel, ids_BT: Tensor, mask_BT: Tensor, lengths_B: Tensor, max_tokens: int, function: Callable[[Selected], Tensor]
) -> Tensor:
    """A number for every selected token of a whole batch, in row order, without gradient: `function` of each micro-batch's selection."""
    result_BT = torch.zeros(ids_BT.shape, device=ids_BT.device)
    for micro in micro_batches(lengths_B, max_tokens, together=split.packs):
        index_M = micro.index_M.to(ids_BT.device)
        part_MT = torch.zeros(len(index_M), ids_BT.shape[1], device=ids_BT.device)
        values_N = function(forward(split, ids_BT, mask_BT, micro)).float()
        result_BT[index_M] = part_MT.masked_scatter(mask_BT[index_M], values_N)
    return result_BT[mask_BT]


def token_logprobs(split: SplitModel, ids_BT: Tensor, mask_BT: Tensor, lengths_B: Tensor, temperature: float, *, max_tokens: int) -> Tensor:
    """log p of every selected token of a batch, in row order, without gradient."""
    return over_batch(split, ids_BT, mask_BT, lengths_B, max_tokens, lambda chosen: logprobs_and_entropy(split, *chosen, temperature)[0])


def check_same_vocabulary(model: SplitModel, policy: SplitModel, what: str) -> None:
    """Refuse a second model that does not read the policy's tokens."""
    got, want = (int(split.model.config.get_text_config().vocab_size) for split in (model, policy))
    if got != want:
        raise BadInput(f"{what} has a vocabulary of {got} tokens, the policy one of {want}; take a model with the policy's tokenizer")
