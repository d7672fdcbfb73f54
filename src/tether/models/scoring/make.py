"""`make_scorer`: one door for everything that scores, and scorers that read another model's tokens.

A name that begins with http:// or https:// is an OpenAI-compatible server (`URL#model` names one of its models); any other is a model
that `load_model` knows, computed here. Where the scorer's tokenizer is not the one that the ids were made with, text is decoded with the
latter and encoded with the scorer's (`RetokenizedScorer`). The boundary between prompt and reasoning stays where it was, because the two are
encoded apart. Special tokens that only the first tokenizer has become plain text for the scorer.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tether.core.errors import BadInput
from tether.core.images import has_images
from tether.core.protocols import BatchScorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tether.models.policy import Policy
    from tether.models.scoring.local import PrefixScorer
    from tether.models.scoring.server import ServerScorer


class ReadyScorer(NamedTuple):
    """A scorer, and what is known of its words."""

    scorer: "PrefixScorer | ServerScorer"
    tokenizer: "PreTrainedTokenizerBase | None"
    """None for a server, which does not hand out its tokenizer."""
    vocabulary_size: int | None
    """None for a server: it refuses ids that it does not know by itself."""

    def reading(self, written_with: Any) -> "PrefixScorer | ServerScorer | RetokenizedScorer":
        """The scorer for token ids of this tokenizer; None: they are the scorer's own."""
        if self.tokenizer is None or written_with is None or same_tokens(written_with, self.tokenizer):
            return self.scorer
        return RetokenizedScorer(self.scorer, written_with, self.tokenizer)


def make_scorer(name: str, *, device: str | None = None, dtype: str | None = None) -> ReadyScorer:
    """A scorer by name.

    Args:
        name: a server's address, or any name `load_model` takes.
        device: where to put a model; None picks the GPU if there is one.
        dtype: of a model, float32, bfloat16 or float16; None keeps float32.
    """
    if name.startswith(("http://", "https://")):
        from tether.models.scoring.server import ServerScorer  # torch is not needed for this

        if device or dtype:
            raise BadInput(f"'{name}' is a server, which computes where and how it was started; leave out the device and the dtype")
        url, _, model = name.partition("#")
        return ReadyScorer(ServerScorer(url, model or None), None, None)
    from tether.models.load import load_model
    from tether.models.policy import Policy

    return ready_scorer(Policy(*load_model(name, device=device, dtype=dtype)))


def ready_scorer(policy: "Policy") -> ReadyScorer:
    """The scorer of a model that is here."""
    from tether.models.scoring.local import scorer_for

    scorer = scorer_for(policy)
    return ReadyScorer(scorer, policy.tokenizer, scorer.vocabulary_size)


def same_tokens(first: "PreTrainedTokenizerBase", second: "PreTrainedTokenizerBase") -> bool:
    """Whether a token id means the same to both."""
    return bool(first.get_vocab() == second.get_vocab())


class RetokenizedScorer:
    """Scores token ids of `source` with a scorer that reads the ids of `target`."""

    def __init__(self, scorer: BatchScorer, source: "PreTrainedTokenizerBase", target: "PreTrainedTokenizerBase") -> None:
        self.scorer, self._source, self._target = scorer, source, target

    def score_many(self, prompt: Sequence[int], reasonings: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """log p of every reasoning after one prompt."""
        return np.asarray(self.scorer.score_many(self._read(prompt), [self._read(reasoning) for reasoning in reasonings]))

    def _read(self, ids: Sequence[int]) -> list[int]:
        if has_images(ids):
            raise BadInput("the prompts hold images, and the scorer reads text only; choose a diagnosis.scorer that reads images")
        text = self._source.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        read: list[int] = self._target.encode(text, add_special_tokens=False)
        if not read:
            raise BadInput(f"the scorer's tokenizer makes no tokens of {text!r}; choose another diagnosis.scorer")
        return read
