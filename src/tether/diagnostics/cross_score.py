"""Cross-scores: the log-probability of every reasoning under every prompt, L[n, j] = sum_t log p(z_n,t | x_j, z_n,<t).

One prompt is one column. A duplicate, of a prompt or of a reasoning, is scored once and copied. A scorer with `score_all` gets everything in
one call; a scorer with `score_many` gets one call per prompt, so that all reasonings share the prompt's forward pass; a scorer with `score`
gets one call per pair. A score that is not finite is refused here, where the pair can still be named.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tether.core.errors import BadInput
from tether.core.protocols import BatchScorer, Scorer

Ids = Sequence[int]


@runtime_checkable
class MatrixScorer(Protocol):
    """A scorer that scores many reasonings after many prompts at once: [reasonings, prompts]."""

    def score_all(self, prompts: Sequence[Ids], reasonings: Sequence[Ids]) -> npt.NDArray[np.float64]: ...


def cross_score(scorer: Any, prompts: Sequence[Ids], reasonings: Sequence[Ids]) -> npt.NDArray[np.float64]:
    """The [N, P] matrix of sequence log-probs, exact.

    Args:
        scorer: a Hugging Face causal language model, anything with `.score(prompt, reasoning) -> float`, or a function of both.
        prompts: P lists of token ids, each ending where the reasoning would begin.
        reasonings: N lists of token ids.
    """
    columns = [tuple(int(token) for token in prompt) for prompt in prompts]
    rows = [tuple(int(token) for token in reasoning) for reasoning in reasonings]
    for what, sequences in (("prompt", columns), ("reasoning", rows)):
        empty = [index for index, sequence in enumerate(sequences) if not sequence]
        if not sequences or empty:
            found = f"{what} {empty[0]} has no tokens" if empty else f"there are no {what}s"
            raise BadInput(f"{found}; cross-scoring needs at least one token in every {what}")
    distinct_columns, distinct_rows = (list(dict.fromkeys(sequences)) for sequences in (columns, rows))
    distinct = _scored(as_scorer(scorer), distinct_columns, distinct_rows)
    place_of_column, place_of_row = ({ids: place for place, ids in enumerate(sequences)} for sequences in (distinct_columns, distinct_rows))
    scores: npt.NDArray[np.float64] = distinct[np.ix_([place_of_row[ids] for ids in rows], [place_of_column[ids] for ids in columns])]
    wrong = np.argwhere(~np.isfinite(scores))
    if len(wrong):
        row, column = wrong[0]
        others = f" and {len(wrong) - 1} other pairs" if len(wrong) > 1 else ""
        raise BadInput(
            f"the scorer gave log p = {scores[row, column]} for reasoning {row} after prompt {column}{others}; "
            "check the model's weights for non-finite values (float16 overflows: score in float32 or bfloat16), or leave out that reasoning"
        )
    return scores


def _scored(
    scorer: Scorer | BatchScorer | MatrixScorer, prompts: Sequence[tuple[int, ...]], reasonings: Sequence[tuple[int, ...]]
) -> npt.NDArray[np.float64]:
    columns, rows = [list(prompt) for prompt in prompts], [list(reasoning) for reasoning in reasonings]
    if isinstance(scorer, MatrixScorer):
        scores = np.asarray(scorer.score_all(columns, rows), dtype=np.float64)
    elif isinstance(scorer, BatchScorer):
        scores = np.stack([np.asarray(scorer.score_many(column, rows), dtype=np.float64) for column in columns], axis=1)
    else:
        scores = np.array([[scorer.score(column, row) for column in columns] for row in rows], dtype=np.float64)
    if scores.shape != (len(rows), len(columns)):
        raise BadInput(
            f"the scorer {type(scorer).__name__} answered scores of shape {scores.shape} for {len(rows)} reasonings and {len(columns)} prompts; "
            "score_many must return one number per reasoning, score_all one row per reasoning with one number per prompt"
        )
    return scores


def as_scorer(scorer: Any) -> Scorer | BatchScorer | MatrixScorer:
    """The object itself if it scores, a prefix-sharing scorer over it if it is a Hugging Face causal language model, else a function."""
    if isinstance(scorer, MatrixScorer | BatchScorer | Scorer):
        return scorer
    if hasattr(scorer, "config") and hasattr(scorer, "get_output_embeddings"):
        from tether.models.scoring.local import PrefixScorer  # torch is only needed here

        return PrefixScorer(scorer)
    if callable(scorer):
        return _FunctionScorer(scorer)
    raise BadInput(f"a scorer must be a Hugging Face causal LM, a function, or have .score(prompt, reasoning); got {type(scorer).__name__}")


class _FunctionScorer:
    """A function from prompt ids and reasoning ids to log p."""

    def __init__(self, function: Callable[[Ids, Ids], float]) -> None:
        self._function = function

    def score(self, prompt: Ids, reasoning: Ids) -> float:
        return float(self._function(prompt, reasoning))
