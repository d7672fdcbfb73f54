"""What each kind of sampling server answers, as it was recorded from one, and how the engine reads it."""

from typing import Any

import pytest

from tether.rollout.engines.dialects import LlamaCppDialect, Malformed

# llama.cpp's server (xllamacpp 2026.10.11549), SmolLM2-135M-Instruct, "The capital of France is" at temperature 0 with n_probs=1 and
# return_tokens=true. Token 7042 is " Paris", 30 is ".". The fields that nobody reads are left out.
STOPPED: dict[str, Any] = {"content": " ", "tokens": [7042], "stop_type": "word", "stopping_word": "Paris"}
"""The stop text was all: no completion_probabilities at all."""
CUT: dict[str, Any] = {
    "content": " Paris",
    "tokens": [7042, 30],
    "stop_type": "word",
    "stopping_word": ".",
    "completion_probabilities": [{"id": 7042, "token": " Paris", "logprob": -0.229}],
}
"""Those of the stop text's tokens are left out."""


def test_llamacpp_returns_the_tokens_of_a_stop_text() -> None:
    sampled = [LlamaCppDialect().read(answer) for answer in (STOPPED, CUT)]
    assert [found.ids for found in sampled] == [[7042], [7042, 30]]
    assert all(len(found.logprobs) == len(found.ids) == len(found.versions) and not found.turn_ended for found in sampled)


def test_llamacpp_ends_a_turn_where_its_model_does() -> None:
    ended = LlamaCppDialect().read({"content": "", "tokens": [2], "stop_type": "eos", "stopping_word": ""})
    assert ended.turn_ended and ended.ids == [2]


def test_an_answer_without_tokens_is_malformed() -> None:
    with pytest.raises(Malformed, match="no token ids"):
        LlamaCppDialect().read({"content": "Paris", "stop_type": "limit"})
