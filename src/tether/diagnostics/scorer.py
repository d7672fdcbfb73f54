"""`build_scorer`: the model that scores the reasoning of a run: the policy, the model the run started from, or a fixed third one.
`resolve_scorer`: the same for a loop that is not Tether's: a model, a function, or a name.
`SharedScorer` divides its work among ranks.

A collapsed policy also scores its own text poorly. A frozen scorer does not drift with the policy (paper, appendix F). The reference of a
run with adapters is the same model with the adapters it started with, if any, so no second copy is loaded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from tether.core.errors import BadInput, ModelUnavailable
from tether.core.protocols import Communicator
from tether.diagnostics.cross_score import cross_score
from tether.diagnostics.settings import POLICY, REFERENCE
from tether.models.hardware import memory_boundary
from tether.models.lora import as_at_start, is_lora
from tether.models.policy import Policy
from tether.models.scoring.local import PrefixScorer, scorer_for
from tether.models.scoring.make import RetokenizedScorer, make_scorer, ready_scorer


class StartScorer:
    """Scores with the model that a run with adapters started from."""

    def __init__(self, policy: Policy, start_model: str) -> None:
        self._at_start, self._scorer = as_at_start(policy.module, start_model), scorer_for(policy)

    def score_many(self, prompt: Sequence[int], reasonings: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """log p of every reasoning after one prompt, of the model before the run trained its adapters."""
        with self._at_start():
            return self._scorer.score_many(prompt, reasonings)


class SharedScorer:
    """A scorer of several ranks: each scores every reasoning under its prompts, and all get the whole matrix."""

    def __init__(self, scorer: Any, ranks: Communicator, no_memory: str) -> None:
        """`scorer`: anything that `cross_score` takes; `no_memory`: what to lower where a rank's part does not fit."""
        self._scorer, self._ranks, self._no_memory = scorer, ranks, no_memory
        model = scorer.scorer if isinstance(scorer, RetokenizedScorer) else scorer
        self._policy = model.policy if isinstance(model, PrefixScorer) else None
        """What computes the scores; None where it is not here."""

    def score_all(self, prompts: Sequence[Sequence[int]], reasonings: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """log p of every reasoning after every prompt, [reasonings, prompts]."""
        own = prompts[self._ranks.rank :: self._ranks.size]

        def score_part() -> npt.NDArray[np.float64]:
            return cross_score(self._scorer, own, reasonings) if own else np.empty((len(reasonings), 0))

        def score_own() -> npt.NDArray[np.float64]:
            with memory_boundary("diagnosis", self._no_memory):
                return score_part() if self._policy is None else self._policy.in_step(score_part)

        scores = np.empty((len(reasonings), len(prompts)))
        for rank, columns in enumerate(self._ranks.share(score_own)):
            scores[:, rank :: self._ranks.size] = columns
        return scores


def build_scorer(
    name: str,
    policy: Policy,
    start_model: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    divide: Callable[[str], Policy] | None = None,
) -> Any:
    """The scorer of a run; anything that `cross_score` takes.

    Args:
        name: `policy`, `reference`, the name of a model, or the address of a server (`diagnosis.scorer`).
        policy: the model that is trained. A model that is loaded here computes on its device and in its precision.
        start_model: the name of the model that the run started from, which is the reference.
        tokenizer: the policy's tokenizer; by default the one that `policy` carries. A model with another vocabulary gets re-encoded text.
        divide: loads a model by name that is divided among ranks; None: this process holds it whole.
    """
    if name == POLICY:
        return scorer_for(policy)
    if name == REFERENCE:
        if is_lora(policy.module):
            return StartScorer(policy, start_model)
        name = start_model
    local = "://" not in name
    try:
        if local and divide is not None:
            ready = ready_scorer(divide(name))
        else:
            place = {"device": str(policy.device), "dtype": str(policy.dtype).removeprefix("torch.")} if local else {}
            ready = make_scorer(name, **place)
    except ModelUnavailable as error:
        raise ModelUnavailable(f"diagnosis.scorer: {error}; or take {POLICY} or {REFERENCE}") from error
    except BadInput as error:
        raise BadInput(f"diagnosis.scorer: {error}; or take {POLICY} or {REFERENCE}") from error
    return ready.reading(tokenizer if tokenizer is not None else policy.tokenizer)


def resolve_scorer(scorer: Any, tokenizer: Any) -> tuple[Any, Any]:
    """What scores, and the tokenizer of the rows.

    A name is loaded (or, an address, connected to). Where its tokens are not those of `tokenizer`, which the rows are in, the rows are
    encoded again for it; without `tokenizer` the rows are in the scorer's own. A model whose embeddings are fewer than the tokenizer's words
    is refused: the tokenizer belongs to another model.
    """
    if isinstance(scorer, str):
        ready = make_scorer(scorer)
        return ready.reading(tokenizer), tokenizer if tokenizer is not None else ready.tokenizer
    embeddings = scorer.get_input_embeddings() if hasattr(scorer, "get_input_embeddings") else None
    known = getattr(embeddings, "num_embeddings", None)
    if known is not None and tokenizer is not None and hasattr(tokenizer, "get_vocab") and len(tokenizer) > known:
        raise BadInput(
            f"the tokenizer has {len(tokenizer)} tokens and the scorer's model {known}: the tokenizer belongs to another model; "
            "give the scorer's own, or name the scorer (a folder, an id), which then reads the text"
        )
    return scorer, tokenizer
