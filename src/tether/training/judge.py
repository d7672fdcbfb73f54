"""Who judges the reasoning: the policy itself, the model the run started from, or a fixed third one (paper, appendix F).

A policy that has come to like every text equally would say so of itself; a judge that does not learn cannot be talked round. The reference
of a run with adapters is the same model with the adapters left out.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.core.errors import BadInput, ModelUnavailable
from tether.models.lora import is_lora, without_adapters
from tether.models.scoring.local import PrefixScorer
from tether.models.scoring.make import make_scorer
from tether.models.scoring.retokenized import RetokenizedScorer, same_tokens
from tether.training.diagnosis_settings import POLICY, REFERENCE
from tether.training.settings import RunSettings


class _WithoutAdapters:
    """A policy as it was before its adapters learned anything."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._scorer = model, PrefixScorer(model)

    def score(self, prompt: Sequence[int], reasoning: Sequence[int]) -> float:
        return float(self.score_many(prompt, [reasoning])[0])

    def score_many(self, prompt: Sequence[int], reasonings: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        with without_adapters(self._model):
            return self._scorer.score_many(prompt, reasonings)


def build_scorer(settings: RunSettings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The scorer that diagnosis uses; the policy's own where nothing is measured, so that no model is loaded for nothing."""
    name = settings.diagnosis.scorer
    if name == POLICY or not settings.diagnosis.every:
        return PrefixScorer(model)
    if name == REFERENCE:
        if is_lora(model):
            return _WithoutAdapters(model)
        name = settings.model.name
    local = "://" not in name
    try:
        ready = make_scorer(name, **({"device": str(model.device), "dtype": str(model.dtype).removeprefix("torch.")} if local else {}))
    except ModelUnavailable as error:
        raise ModelUnavailable(f"diagnosis.scorer: {error}; or take {POLICY} or {REFERENCE}") from error
    except BadInput as error:
        raise BadInput(f"diagnosis.scorer: {error}; or take {POLICY} or {REFERENCE}") from error
    if ready.tokenizer is None or same_tokens(tokenizer, ready.tokenizer):
        return ready.scorer
    return RetokenizedScorer(ready.scorer, tokenizer, ready.tokenizer)
