"""The rule that ends a response, which every engine shares.

A response ends with an end-of-turn token of the model, a closing tag of its conversation, a configured stop string or sequence of token
ids, or at its token budget. Nearly every token cannot end anything: one table lookup for all rows and tokens of a call says so. Only behind the
other tokens the text is looked at.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from tether.core.enums import FinishReason
from tether.core.grammar import ANSWER_CLOSE
from tether.core.protocols import Sampling
from tether.models.chat import text_decoder

TAIL_TOKENS = 16
"""How many tokens back a closing tag can begin: no tokenizer cuts a tag into more pieces."""
MOST_TABLES = 64
"""Kept at a time; each has an entry for every token id."""


class StopRule:
    """Decides after each token whether a response is complete."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_of_turn_ids: Iterable[int] | None = None) -> None:
        """`end_of_turn_ids` are the ids with which the model ends its turn; None takes the tokenizer's end-of-sequence token."""
        self._decode = text_decoder(tokenizer)
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._spells_bytes = type(decoder).__name__ == "ByteLevel"
        """Whether the pieces of tokens spell their bytes, one character each: plain ASCII text stands there as it is."""
        self._end_of_turn = frozenset(end_of_turn_ids if end_of_turn_ids is not None else [int(tokenizer.eos_token_id)])
        self._pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self._closing: dict[frozenset[str], npt.NDArray[np.bool_]] = {}
        self._ending: dict[frozenset[str], npt.NDArray[np.bool_]] = {}

    @property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """The ids with which the model ends its turn, in order."""
        return tuple(sorted(self._end_of_turn))

    @staticmethod
    @lru_cache(maxsize=256)
    def tail_tokens(sampling: Sampling) -> int:
        """How many last tokens of a response decide whether it ends: every token of a stop string holds at least one of its bytes."""
        return max([TAIL_TOKENS, *map(len, sampling.stop_ids), *(len(text.encode()) for text in sampling.stop_strings)])

    def candidates(self, ids_BK: npt.NDArray[np.int64], sampling: Sampling) -> npt.NDArray[np.bool_]:
        """[B, K]: which of these tokens may end a response, its budget apart."""
        found_BK: npt.NDArray[np.bool_] = self._may_end(sampling).take(ids_BK, mode="clip")
        return found_BK | np.isin(ids_BK, [sequence[-1] for sequence in sampling.stop_ids]) if sampling.stop_ids else found_BK

    def finished(
        self, ids: Sequence[int], sampling: Sampling, closing_tags: tuple[str, ...] = (ANSWER_CLOSE,), num_before: int = 0
    ) -> FinishReason | None:
        """Why a response ends with the last of these ids, or None; `num_before` earlier tokens of the response are left out of `ids`."""
        last = ids[-1]
        if last in self._end_of_turn:
            return FinishReason.END_OF_TURN
        if any(tuple(ids[-len(sequence) :]) == sequence for sequence in sampling.stop_ids):
            return FinishReason.STOP_TEXT
        may_close = self._may_close(sampling)
        if last < len(may_close) and may_close[last]:
            stops = (*closing_tags, *sampling.stop_strings)
            text = self._text(ids[-self.tail_tokens(sampling) :], stops)
            if any(stop in text for stop in stops):
                return FinishReason.STOP_TEXT
        return FinishReason.LENGTH if num_before + len(ids) >= sampling.max_tokens else None

    def _text(self, ids: Sequence[int], stops: Sequence[str]) -> str:
        """Text in which these stops occur where they occur in the text of the tokens: their pieces, if that is sure, which are at hand."""
        if self._spells_bytes and all(_is_plain(stop) for stop in stops):
            return "".join([self._pieces[token] or "" for token in ids if token < len(self._pieces)])
        return self._decode(list(ids))

    def first_end(
        self, ids: Sequence[int], num_checked: int, sampling: Sampling, closing_tags: tuple[str, ...]
    ) -> tuple[int, FinishReason | None]:
        """How many of these tokens belong to the response, and why it ends with them, if it does; the first `num_checked` do not end it."""
        candidates = self.candidates(np.array([ids[num_checked:]], dtype=np.int64), sampling)[0] if len(ids) > num_checked else []
        for index in np.flatnonzero(candidates).tolist():
            length = num_checked + index + 1
            if length <= sampling.max_tokens and (reason := self.finished(ids[:length], sampling, closing_tags)) is not None:
                return length, reason
        return (sampling.max_tokens, FinishReason.LENGTH) if len(ids) >= sampling.max_tokens else (len(ids), None)

    def _may_end(self, sampling: Sampling) -> npt.NDArray[np.bool_]:
        """Per token id: whether it can end a response, sequences of ids apart. The last place is for all ids beyond the tokenizer's, which a model may have."""
        ends = _last_characters(sampling)
        if ends not in self._ending:
            may_close = self._may_close(sampling)
            table = np.zeros(max(len(may_close), *(token + 1 for token in self._end_of_turn)) + 1, dtype=np.bool_)
            table[: len(may_close)] = may_close
            table[list(self._end_of_turn)] = True
            self._ending[ends] = table
        return self._ending[ends]

    def _may_close(self, sampling: Sampling) -> npt.NDArray[np.bool_]:
        """Per token id: whether it can complete a closing tag or a stop string, that is, holds the last character of one.

        Tokenizers write some characters as others (a space as a special letter), so a stop string whose last character is not plain
        ASCII text makes every token a candidate.
        """
        ends = _last_characters(sampling)
        if ends not in self._closing:
            if len(self._closing) >= MOST_TABLES:  # clients of a server choose their stop strings
                self._closing.clear()
                self._ending.clear()
            plain = all(map(_is_plain, ends))
            self._closing[ends] = np.array(
                [not plain or (piece is not None and any(end in piece for end in ends)) for piece in self._pieces]
            )
        return self._closing[ends]


def _is_plain(text: str) -> bool:
    """Whether tokenizers write it as it is: ASCII without spaces or control characters."""
    return text.isascii() and text.isprintable() and " " not in text


@lru_cache(maxsize=256)
def _last_characters(sampling: Sampling) -> frozenset[str]:
    """Of everything that closes a response."""
    return frozenset((ANSWER_CLOSE[-1], *(text[-1] for text in sampling.stop_strings)))
