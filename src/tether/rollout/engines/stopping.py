"""Where a response ends: the end of the turn, a closing tag of its dialogue, a sequence of token ids, or its budget.

Nearly every token cannot end anything, and that is one lookup in a table, for all rows and tokens of a call at once. Only the others are
looked at one by one.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from tether.core.enums import FinishReason
from tether.core.grammar import ANSWER_CLOSE
from tether.core.protocols import Sampling

TAIL_TOKENS = 16
"""How far back to look for the closing tag: no tokenizer cuts it into more pieces."""


class StopRule:
    """Decides after each token whether a response is complete."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._end_of_turn = int(tokenizer.eos_token_id)
        # Only a token that contains the tag's last character can complete it.
        pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self._may_close = np.array([piece is not None and ANSWER_CLOSE[-1] in piece for piece in pieces])

    def suspects(self, ids_BK: npt.NDArray[np.int64], sampling: Sampling) -> npt.NDArray[np.bool_]:
        """[B, K]: which of these tokens may end a response, its budget apart."""
        last_ids = [sequence[-1] for sequence in sampling.stop_ids]
        known_BK = ids_BK < len(self._may_close)  # a model may have more words than its tokenizer
        closing_BK = self._may_close[np.where(known_BK, ids_BK, 0)] & known_BK
        suspect_BK: npt.NDArray[np.bool_] = closing_BK | np.isin(ids_BK, [self._end_of_turn, *last_ids])
        return suspect_BK

    def finished(
        self, ids: Sequence[int], sampling: Sampling, closing_tags: tuple[str, ...] = (ANSWER_CLOSE,), num_before: int = 0
    ) -> FinishReason | None:
        """Why a response ends with the last of these ids, or None; `num_before` tokens of it came before them, too long ago to matter."""
        last = ids[-1]
        if last == self._end_of_turn:
            return FinishReason.END_OF_TURN
        if any(tuple(ids[-len(sequence) :]) == sequence for sequence in sampling.stop_ids):
            return FinishReason.STOP_TEXT
        if last < len(self._may_close) and self._may_close[last]:
            tail = self._tokenizer.decode(list(ids[-TAIL_TOKENS:]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if any(tag in str(tail) for tag in closing_tags):
                return FinishReason.STOP_TEXT
        return FinishReason.LENGTH if num_before + len(ids) >= sampling.max_tokens else None
