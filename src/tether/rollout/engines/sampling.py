"""Drawing tokens: inverse CDF on uniforms that belong to the dialogue, and the rule that ends a response.

A draw needs one softmax, one cumulative sum and one binary search; torch.multinomial over a large vocabulary costs ten times as much
on a CPU. The uniforms come from the dialogue's own generator, so a sample does not depend on which other rows share its batch.
"""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tether.core.enums import FinishReason
from tether.core.grammar import ANSWER_CLOSE

TAIL_TOKENS = 16
"""How far back to look for the closing tag: no tokenizer cuts it into more pieces."""


def draw(logits_BV: Tensor, temperature: float, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Sampled ids [B] and their log-probs [B] at the sampling temperature; temperature 0 takes the most likely token.

    A uniform u picks the first token whose cumulative probability exceeds u, so a token of probability zero is never drawn. Of logits
    that are not finite some token is drawn, with a log-prob that is not a number: it is for the caller to notice.
    """
    logprobs_BV = torch.log_softmax(logits_BV.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        ids_B = logits_BV.argmax(dim=-1)
    else:
        cumulative_BV = logprobs_BV.exp().cumsum(dim=-1)
        total_B = cumulative_BV[:, -1]
        # Rounding must not lift the target to the total: nothing exceeds that.
        targets_B = torch.minimum(uniforms_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
        ids_B = torch.searchsorted(cumulative_BV, targets_B[:, None], right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)
    return ids_B, logprobs_BV.gather(1, ids_B[:, None])[:, 0]


class StopRule:
    """Decides after each token whether a response is complete: end of turn, a closing tag of its dialogue, or the budget."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._end_of_turn = int(tokenizer.eos_token_id)
        # Only a token that contains the tag's last character can complete it: nearly every token is settled by one lookup.
        pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self._may_close = {index for index, piece in enumerate(pieces) if piece is not None and ANSWER_CLOSE[-1] in piece}

    def finished(self, ids: list[int], max_tokens: int, closing_tags: tuple[str, ...] = (ANSWER_CLOSE,)) -> FinishReason | None:
        """Why the response ends here, or None."""
        if ids[-1] == self._end_of_turn:
            return FinishReason.END_OF_TURN
        if ids[-1] in self._may_close:
            tail = self._tokenizer.decode(ids[-TAIL_TOKENS:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if any(tag in str(tail) for tag in closing_tags):
                return FinishReason.STOP_TEXT
        return FinishReason.LENGTH if len(ids) >= max_tokens else None
