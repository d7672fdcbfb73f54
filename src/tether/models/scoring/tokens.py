"""Whether token ids are those of a scorer; where its tokenizer is another, text is decoded with the policy's and encoded with the scorer's.

The boundary between prompt and reasoning stays where it was, because the two are encoded apart. Special tokens that only the policy's
tokenizer has become plain text for the scorer.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from tether.core.errors import BadInput
from tether.core.protocols import BatchScorer


def same_tokens(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Whether a token id means the same to both."""
    return bool(first.get_vocab() == second.get_vocab())


def check_ids(texts: Iterable[Sequence[int]], vocabulary_size: int | None) -> None:
    """Refuse texts with token ids that a vocabulary does not hold; None, an unknown size, refuses only negative ones."""
    for text in texts:
        if len(text) and (min(text) < 0 or (vocabulary_size is not None and max(text) >= vocabulary_size)):
            wrong = int(min(text) if min(text) < 0 else max(text))
            holds = "token ids from 0" if vocabulary_size is None else f"token ids 0 to {vocabulary_size - 1}"
            raise BadInput(
                f"the rollouts' tokens do not fit the scorer: found token id {wrong}, its vocabulary holds {holds}; "
                "score with a model that has the tokenizer of the rollouts, or give the rollouts as text"
            )


class RetokenizedScorer:
    """Scores token ids of `source` with a scorer that reads the ids of `target`."""

    def __init__(self, scorer: BatchScorer, source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> None:
        self.scorer, self._source, self._target = scorer, source, target

    def score(self, prompt: Sequence[int], reasoning: Sequence[int]) -> float:
        """log p(reasoning | prompt), both in the scorer's tokens."""
        return float(self.score_many(prompt, [reasoning])[0])

    def score_many(self, prompt: Sequence[int], reasonings: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """log p of every reasoning after one prompt."""
        return np.asarray(self.scorer.score_many(self._read(prompt), [self._read(reasoning) for reasoning in reasonings]))

    def _read(self, ids: Sequence[int]) -> list[int]:
        text = self._source.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        read: list[int] = self._target.encode(text, add_special_tokens=False)
        if not read:
            raise BadInput(f"the scorer's tokenizer makes no tokens of {text!r}; choose another diagnosis.scorer")
        return read
