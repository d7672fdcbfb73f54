"""Log-probabilities and entropies of the tokens a mask selects, with gradient: what the learner trains on.

Only selected positions go through the vocabulary. Rows are padded on the right; with causal attention padding is seen by nothing
that counts, so no attention mask is needed.
"""

import torch
from torch import Tensor

from tether.models.head import SplitModel


def token_logprobs(model: SplitModel, ids_BT: Tensor, mask_BT: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log p and entropy, at the sampling temperature, of every token where mask_BT is True, flattened in row order.

    The first token of a row has nothing before it and cannot be selected.
    """
    if bool(mask_BT[:, 0].any()):
        raise ValueError("the mask selects the first token of a row, which nothing predicts")
    features_BTD = model.features(input_ids=ids_BT, use_cache=False)
    chosen_NV = model.logits(features_BTD[:, :-1][mask_BT[:, 1:]]).float() / temperature
    logprobs_NV = torch.log_softmax(chosen_NV, dim=-1)
    targets_N = ids_BT[:, 1:][mask_BT[:, 1:]]
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    return logprobs_NV.gather(1, targets_N[:, None])[:, 0], entropy_N
