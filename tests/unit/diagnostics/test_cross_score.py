"""cross_score: exact sums from a scorer that is a table, no prompt scored twice, and a real model equal to one forward pass per pair."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tether import cross_score, load_model
from tether.diagnostics.cross_score import as_scorer
from tether.models.scoring.local import PrefixScorer

# log p of each token after a prompt whose first token is the key
TABLE = {1: {5: -0.5, 6: -1.0, 7: -2.0}, 2: {5: -4.0, 6: -0.25, 7: -0.125}, 3: {5: -8.0, 6: -16.0, 7: -32.0}}


class Unigram:
    """Adds up the table; remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def score(self, prompt: Sequence[int], reasoning: Sequence[int]) -> float:
        self.calls.append((tuple(prompt), tuple(reasoning)))
        return sum(TABLE[prompt[0]][token] for token in reasoning)


class ManyUnigram:
    """The same, a prompt at a time; `score` must not be needed."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], list[tuple[int, ...]]]] = []

    def score(self, prompt: Sequence[int], reasoning: Sequence[int]) -> float:
        raise AssertionError("score_many is there to be used")

    def score_many(self, prompt: Sequence[int], reasonings: Sequence[Sequence[int]]) -> np.ndarray:
        self.calls.append((tuple(prompt), [tuple(reasoning) for reasoning in reasonings]))
        return np.array([sum(TABLE[prompt[0]][token] for token in reasoning) for reasoning in reasonings])


class AllUnigram(ManyUnigram):
    """The same, everything at once; `score_many` must not be needed."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], list[list[int]]]] = []

    def score_many(self, prompt: Sequence[int], reasonings: Sequence[Sequence[int]]) -> np.ndarray:
        raise AssertionError("score_all is there to be used")

    def score_all(self, prompts: Sequence[Sequence[int]], reasonings: Sequence[Sequence[int]]) -> np.ndarray:
        self.asked.append(([list(x) for x in prompts], [list(z) for z in reasonings]))
        return np.array([[sum(TABLE[prompt[0]][token] for token in reasoning) for prompt in prompts] for reasoning in reasonings])


PROMPTS = [[1, 9], [2], [3, 9, 9]]
REASONINGS = [[5], [6, 7], [5, 5, 7], [7]]
EXPECTED = [[-0.5, -4, -8], [-3, -0.375, -48], [-3, -8.125, -48], [-2, -0.125, -32]]


@pytest.mark.parametrize("kind", [Unigram, ManyUnigram, AllUnigram])
def test_exact_sums(kind: Any) -> None:
    scores = cross_score(kind(), PROMPTS, REASONINGS)
    assert scores.dtype == np.float64
    assert scores.tolist() == EXPECTED


def test_one_call_per_pair() -> None:
    scorer = Unigram()
    cross_score(scorer, PROMPTS, REASONINGS)
    assert sorted(scorer.calls) == sorted((tuple(x), tuple(z)) for x in PROMPTS for z in REASONINGS)


def test_a_prompt_that_occurs_twice_is_scored_once() -> None:
    scorer = Unigram()
    scores = cross_score(scorer, [[1, 9], [2], (1, 9), [1], [2]], REASONINGS)
    assert len(scorer.calls) == 3 * 4, "(1, 9), (2) and (1); the last is another prompt with the same numbers"
    assert scores[:, 2].tolist() == scores[:, 0].tolist() == [row[0] for row in EXPECTED]
    assert scores[:, 4].tolist() == scores[:, 1].tolist() == [row[1] for row in EXPECTED]


def test_score_many_gets_every_reasoning_at_once() -> None:
    scorer = ManyUnigram()
    cross_score(scorer, [*PROMPTS, PROMPTS[0]], REASONINGS)
    assert [prompt for prompt, _ in scorer.calls] == [(1, 9), (2,), (3, 9, 9)]
    assert all(reasonings == [tuple(z) for z in REASONINGS] for _, reasonings in scorer.calls)


def test_score_all_gets_everything_at_once() -> None:
    scorer = AllUnigram()
    assert cross_score(scorer, [*PROMPTS, PROMPTS[0]], [*REASONINGS, REASONINGS[1]]).tolist() == [
        [*row, row[0]] for row in [*EXPECTED, EXPECTED[1]]
    ]
    assert scorer.asked == [(PROMPTS, REASONINGS)], "what occurs twice is asked for once"


@pytest.mark.parametrize("kind", [Unigram, ManyUnigram])
def test_a_reasoning_that_occurs_twice_is_scored_once(kind: Any) -> None:
    scorer = kind()
    scores = cross_score(scorer, PROMPTS, [REASONINGS[2], REASONINGS[0], tuple(REASONINGS[2])])
    assert scores.tolist() == [EXPECTED[2], EXPECTED[0], EXPECTED[2]]
    asked = len(scorer.calls) if kind is Unigram else sum(len(reasonings) for _, reasonings in scorer.calls)
    assert asked == 2 * 3


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_a_score_that_is_not_finite(value: float) -> None:
    """Named by its place in what was given, not in what was asked for: row 3 is a repetition of row 1."""

    class Broken:
        def score(self, prompt: Sequence[int], reasoning: Sequence[int]) -> float:
            return value if (prompt[0], reasoning[0]) == (2, 6) else -1.0

    with pytest.raises(ValueError, match=rf"log p = {value} for reasoning 1 after prompt 2; check the model's weights") as caught:
        cross_score(Broken(), [[1], [3], [2]], [[5], [6], [7]])
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"for reasoning 1 after prompt 2 and 1 other pairs;"):
        cross_score(Broken(), [[1], [3], [2]], [[5], [6], [7], [6]])


@pytest.mark.parametrize("shape", [(4,), (3, 4), (4, 2)])
def test_scores_of_another_shape(shape: tuple[int, ...]) -> None:
    class Wrong:
        def score_all(self, prompts: Any, reasonings: Any) -> np.ndarray:
            return np.zeros(shape)

    with pytest.raises(ValueError, match=r"answered scores of shape .* for 4 reasonings and 3 prompts; score_many must"):
        cross_score(Wrong(), PROMPTS, REASONINGS)


def test_ids_of_any_kind() -> None:
    prompts = [np.array([1, 9]), torch.tensor([2]), (3, 9, 9)]
    reasonings = [torch.tensor([5]), np.array([6, 7]), [5, 5, 7], (7,)]
    assert cross_score(Unigram(), prompts, reasonings).tolist() == EXPECTED


@pytest.mark.parametrize(
    ("prompts", "reasonings", "words"),
    [
        ([], [[5]], "there are no prompts"),
        ([[1]], [], "there are no reasonings"),
        ([[1], []], [[5]], "prompt 1 has no tokens"),
        ([[1]], [[5], [6], []], "reasoning 2 has no tokens"),
    ],
)
def test_nothing_to_score(prompts: Any, reasonings: Any, words: str) -> None:
    scorer = Unigram()
    with pytest.raises(ValueError, match=words):
        cross_score(scorer, prompts, reasonings)
    assert scorer.calls == []


@pytest.mark.parametrize("wrong", [None, 3, "tiny", object()])
def test_not_a_scorer(wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"\.score\(prompt, reasoning\); got {type(wrong).__name__}"):
        cross_score(wrong, PROMPTS, REASONINGS)


def test_as_scorer_leaves_scorers_alone() -> None:
    for scorer in (Unigram(), ManyUnigram(), AllUnigram()):
        assert as_scorer(scorer) is scorer


# --------------------------------------------------------------------------------------------------------- a real model


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model("tiny", device="cpu").model
    torch.set_num_threads(threads)


def one_forward_per_pair(model: Any, prompts: list[list[int]], reasonings: list[list[int]]) -> np.ndarray:
    """No cache, no padding, no batch: the whole text through the model, and the log-probs of its tail added up."""
    scores = np.empty((len(reasonings), len(prompts)))
    with torch.inference_mode():
        for n, z in enumerate(reasonings):
            for j, x in enumerate(prompts):
                logits = model(torch.tensor([x + z]), use_cache=False).logits[0].double()
                logprobs = torch.log_softmax(logits, dim=-1)
                scores[n, j] = sum(float(logprobs[len(x) + t - 1, token]) for t, token in enumerate(z))
    return scores


def texts(lengths: list[int], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 470, size).tolist() for size in lengths]


@pytest.fixture(scope="module")
def sample(model: Any) -> tuple[list[list[int]], list[list[int]], np.ndarray]:
    """Uneven lengths, in no order; a reasoning and a prompt of one token among them."""
    prompts, reasonings = texts([11, 3, 1, 24], seed=0), texts([6, 1, 17, 2, 9], seed=1)
    return prompts, reasonings, one_forward_per_pair(model, prompts, reasonings)


def test_model_equals_one_forward_per_pair(model: Any, sample: Any) -> None:
    prompts, reasonings, expected = sample
    assert np.abs(cross_score(model, prompts, reasonings) - expected).max() < 1e-4
    assert np.ptp(expected) > 10, "the pairs differ"


@pytest.mark.parametrize("tokens_per_call", [1, 7, 12, 20, 40])
def test_batches_smaller_than_the_input(model: Any, sample: Any, tokens_per_call: int) -> None:
    prompts, reasonings, expected = sample
    assert np.abs(cross_score(PrefixScorer(model, tokens_per_call), prompts, reasonings) - expected).max() < 1e-4


def test_the_token_budget_of_a_call(model: Any) -> None:
    """Four reasonings of 5 tokens, 10 a call: the prompt, then two calls of two reasonings (last tokens predict nothing and are not fed)."""
    shapes: list[tuple[int, ...]] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape)))
    try:
        PrefixScorer(model, 10).score_many([3, 4, 5], texts([5, 5, 5, 5], seed=4))
    finally:
        hook.remove()
    assert shapes[-3:] == [(1, 3), (1, 8), (1, 8)]  # after the passes that probe the head


def test_order_does_not_matter(model: Any, sample: Any) -> None:
    prompts, reasonings, expected = sample
    columns, rows = [2, 0, 3, 1], [4, 2, 0, 1, 3]
    scores = cross_score(PrefixScorer(model, 20), [prompts[j] for j in columns], [reasonings[n] for n in rows])
    assert np.abs(scores - expected[rows][:, columns]).max() < 1e-4


def test_a_single_pair(model: Any, sample: Any) -> None:
    prompts, reasonings, expected = sample
    assert PrefixScorer(model).score(prompts[0], reasonings[2]) == pytest.approx(expected[2, 0], abs=1e-4)
    assert cross_score(model, prompts[1:2], reasonings[1:2]).tolist() == [[pytest.approx(expected[1, 1], abs=1e-4)]]


def test_reasoning_beyond_the_first_buffer(model: Any) -> None:
    """The cache starts with 256 positions and has to grow between the prompt and the reasoning."""
    prompts, reasonings = texts([250, 5], seed=2), texts([30, 4], seed=3)
    assert np.abs(cross_score(model, prompts, reasonings) - one_forward_per_pair(model, prompts, reasonings)).max() < 1e-4


def test_scoring_leaves_the_model_alone(model: Any, sample: Any) -> None:
    prompts, reasonings, _ = sample
    cross_score(model, prompts[:1], reasonings[:1])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()
