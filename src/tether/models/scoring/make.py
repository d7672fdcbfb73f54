"""`make_scorer`: one door for everything that scores.

A name that begins with http:// or https:// is an OpenAI-compatible server (`URL#model` names one of its models); any other is a model
that `load_model` knows, computed here.
"""

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
    from tether.models.scoring.local import scorer_for

    scorer = scorer_for(policy)
    return ReadyScorer(scorer, policy.tokenizer, scorer.vocabulary_size)
