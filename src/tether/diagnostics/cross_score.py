"""Cross-scores: the log-probability of every reasoning under every prompt, L[n, j] = sum_t log p(z_n,t | x_j, z_n,<t).

One prompt is one column. A prompt that occurs twice is scored once and its column copied. A scorer with `score_many` gets one
call per distinct prompt, so that the prompt's forward pass is shared by all reasonings; a scorer with `score` gets one per pair.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tether.core.errors import BadInput
from tether.core.protocols import BatchScorer, Scorer


def cross_score(scorer: Any, prompts: Sequence[Sequence[int]], reasonings: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """The [N, P] matrix of sequence log-probs, exact.

    Args:
        scorer: a Hugging Face causal language model, or anything with `.score(prompt, reasoning) -> float`.
        prompts: P lists of token ids, each ending where the reasoning would begin.
        reasonings: N lists of token ids.
    """
    columns = [[int(token) for token in prompt] for prompt in prompts]
    rows = [[int(token) for token in reasoning] for reasoning in reasonings]
    for what, sequences in (("prompt", columns), ("reasoning", rows)):
        empty = [index for index, sequence in enumerate(sequences) if not sequence]
        if not sequences or empty:
            found = f"{what} {empty[0]} has no tokens" if empty else f"there are no {what}s"
            raise BadInput(f"{found}; cross-scoring needs at least one token in every {what}")
    scorer = as_scorer(scorer)
    scores = np.empty((len(rows), len(columns)), dtype=np.float64)
    first: dict[tuple[int, ...], int] = {}
    for column, prompt in enumerate(columns):
        earlier = first.setdefault(tuple(prompt), column)
        if earlier < column:
            scores[:, column] = scores[:, earlier]
            continue
        if isinstance(scorer, BatchScorer):
            scores[:, column] = scorer.score_many(prompt, rows)
        else:
            scores[:, column] = [scorer.score(prompt, row) for row in rows]
    return scores


def as_scorer(scorer: Any) -> Scorer | BatchScorer:
    """The object itself if it scores, a prefix-sharing scorer over it if it is a Hugging Face causal language model."""
    if isinstance(scorer, BatchScorer | Scorer):
        return scorer
    if hasattr(scorer, "config") and hasattr(scorer, "get_output_embeddings"):
        from tether.models.scorer import PrefixScorer  # torch is only needed here

        return PrefixScorer(scorer)
    raise BadInput(f"a scorer must be a Hugging Face causal LM or have .score(prompt, reasoning); got {type(scorer).__name__}")
