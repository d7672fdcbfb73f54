"""`make_scorer`: one door for everything that scores, and the check that token ids belong to its vocabulary.

A name that begins with http:// or https:// is an OpenAI-compatible server (`URL#model` names one of its models); any other is a model
that `load_model` knows, computed here.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tether.core.errors import BadInput

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
    scorer = policy.scorer()
    return ReadyScorer(scorer, policy.tokenizer, scorer.vocabulary_size)


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
