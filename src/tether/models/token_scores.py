"""log p of given tokens from the features that predict them, without ever holding the logits of all of them.

The vocabulary is wide: the logits of a thousand tokens take more memory than the model's layers did. They are made for a part of the
tokens at a time, in float32 also where the model computes in half precision (the product with the head is then accumulated and kept in
float32, not rounded to the model's precision first), and at temperature 1.

Shape legend: S tokens, D width of the features, V vocabulary.
"""

import torch
from torch import Tensor, nn

from tether.models.linear_logprobs import keeps_the_accumulator, linear_logprobs
from tether.models.policy import Policy

LOGIT_BYTES = {"cuda": 2**30, "cpu": 2**28}
"""Memory for the logits of one part, by device."""


class TokenScores:
    """Log-probs under a split model's head."""

    def __init__(self, split: Policy) -> None:
        self._split = split
        head = split.module.get_output_embeddings()
        half_precision = split.module.dtype in (torch.bfloat16, torch.float16)
        is_plain = split.separable_head and type(head) is nn.Linear and head.weight.is_floating_point()
        self._head: nn.Linear | None = head if half_precision and is_plain else None
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
        vocabulary = int(self._split.module.config.get_text_config().vocab_size)
        logit_bytes = LOGIT_BYTES.get(tensor_S.device.type, LOGIT_BYTES["cpu"])
        return tensor_S.split(max(1, logit_bytes // (8 * vocabulary)))  # logits and log-probs, four bytes each

    def _chosen(self, features_SD: Tensor, words_SN: Tensor) -> Tensor:
        """[S, N] log-probs of some words for each token."""
        logits_SV = self._split.logits(features_SD) if self._head is None else float32_product(self._head, features_SD)
        wide = torch.promote_types(logits_SV.dtype, torch.float32)
        if logits_SV.is_cuda:  # one fused pass, summed by a thousand threads
            return torch.log_softmax(logits_SV, dim=-1, dtype=wide).gather(1, words_SN)
        # On a CPU the same function adds up the vocabulary one word after another, and is off by 4e-5 a token, always to one side.
        logits_SV = logits_SV.to(wide)
        return logits_SV.gather(1, words_SN) - torch.logsumexp(logits_SV, dim=-1, keepdim=True)


def float32_product(head: nn.Linear, features_SD: Tensor) -> Tensor:
    """Logits of a head in half precision, in the float32 that they are summed in."""
    if keeps_the_accumulator(features_SD.device.type, features_SD.dtype):
        logits_SV = torch.mm(features_SD, head.weight.t(), out_dtype=torch.float32)
    else:
        logits_SV = features_SD.float() @ head.weight.float().t()
    return logits_SV if head.bias is None else logits_SV + head.bias
