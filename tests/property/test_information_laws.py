"""measure_information on random matrices: bounds, and what must not change when rows, columns or constants move."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether import Information, measure_information

laws = settings(derandomize=True, max_examples=100, deadline=None, database=None)


@st.composite
def matrices(draw: st.DrawFn) -> dict[str, Any]:
    """Up to 8 x 6; coarse values, so that ties are common, down to very negative ones."""
    num, num_prompts = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    scale = draw(st.sampled_from([0.25, 1, 30, 5000]))
    cells = draw(st.lists(st.integers(-20, 0), min_size=num * num_prompts, max_size=num * num_prompts))
    return {
        "logprobs": scale * np.array(cells, dtype=float).reshape(num, num_prompts),
        "lengths": np.array(draw(st.lists(st.integers(1, 50), min_size=num, max_size=num))),
        "source": np.array(draw(st.lists(st.integers(0, num_prompts - 1), min_size=num, max_size=num))),
    }


def fields(info: Information) -> dict[str, float]:
    names = (
        "retrieval_acc",
        "chance",
        "mi",
        "mi_seq",
        "mi_token_mean",
        "mi_zscore",
        "sigma",
        "h_conditional",
        "h_marginal",
        "h_conditional_seq",
        "h_marginal_seq",
    )
    return {**{name: getattr(info, name) for name in names}, **{f"recall_{k}": value for k, value in info.recall.items()}}


def close(a: Information, b: Information, scale: float) -> None:
    """Equal up to rounding at the size of the scores (the z-score divides by 1e-3 at least)."""
    expected = fields(b)
    for name, value in fields(a).items():
        tolerance = (
            1e-14 * (1 + scale) * (1e3 if name == "mi_zscore" else 1) * (1 + abs(expected["mi_zscore"]) if name == "mi_zscore" else 1)
        )
        assert value == pytest.approx(expected[name], abs=tolerance), name


def size(matrix: dict[str, Any]) -> float:
    return float(np.abs(matrix["logprobs"]).max())


@laws
@given(matrices())
def test_bounds(matrix: dict[str, Any]) -> None:
    info = measure_information(**matrix, recall_at=(1, 2, 4, 8))
    num_prompts = matrix["logprobs"].shape[1]
    slack = 1e-14 * (1 + size(matrix))
    assert 0 <= info.retrieval_acc <= 1
    assert info.mi_seq <= math.log(num_prompts) + slack
    assert info.mi <= math.log(num_prompts) + slack
    assert info.sigma >= 0
    assert info.retrieval_acc == info.recall[1] <= info.recall[2] <= info.recall[4] <= info.recall[8] == 1
    assert info.h_conditional >= 0
    assert info.h_marginal >= -slack
    assert all(math.isfinite(value) for value in fields(info).values())


@laws
@given(matrices())
def test_the_identity_of_entropies(matrix: dict[str, Any]) -> None:
    info = measure_information(**matrix)
    assert info.h_marginal == pytest.approx(info.h_conditional + info.mi, rel=1e-12, abs=1e-12)
    assert info.h_marginal_seq == pytest.approx(info.h_conditional_seq + info.mi_seq, rel=1e-12, abs=1e-12)


@laws
@given(matrices(), st.randoms(use_true_random=False))
def test_prompts_have_no_order(matrix: dict[str, Any], random: Any) -> None:
    """Columns permuted, with the source relabelled."""
    num_prompts = matrix["logprobs"].shape[1]
    order = random.sample(range(num_prompts), num_prompts)
    moved = {**matrix, "logprobs": matrix["logprobs"][:, order], "source": np.argsort(order)[matrix["source"]]}
    first, second = measure_information(**matrix), measure_information(**moved)
    close(first, second, size(matrix))
    assert (first.retrieval_acc, first.recall) == (second.retrieval_acc, second.recall)


@laws
@given(matrices(), st.randoms(use_true_random=False))
def test_reasonings_have_no_order(matrix: dict[str, Any], random: Any) -> None:
    num = len(matrix["source"])
    order = random.sample(range(num), num)
    close(measure_information(**matrix), measure_information(**{name: values[order] for name, values in matrix.items()}), size(matrix))


@laws
@given(matrices(), st.integers(1, 40), st.data())
def test_a_less_likely_text_has_more_entropy_and_the_same_information(matrix: dict[str, Any], by: int, data: st.DataObject) -> None:
    """One row is less likely by the same factor under every prompt: both entropies rise alike."""
    row = data.draw(st.integers(0, len(matrix["source"]) - 1))
    lowered = matrix["logprobs"].copy()
    lowered[row] -= by
    before, after = measure_information(**matrix), measure_information(**{**matrix, "logprobs": lowered})
    slack = 1e-13 * (1 + size(matrix) + by)
    rise = by / len(matrix["source"])
    assert after.mi == pytest.approx(before.mi, abs=slack)
    assert after.mi_seq == pytest.approx(before.mi_seq, abs=slack)
    assert after.h_conditional_seq == pytest.approx(before.h_conditional_seq + rise, abs=slack)
    assert after.h_marginal_seq == pytest.approx(before.h_marginal_seq + rise, abs=slack)
    assert after.h_conditional == pytest.approx(before.h_conditional + rise / matrix["lengths"][row], abs=slack)
    assert (after.retrieval_acc, after.recall) == (before.retrieval_acc, before.recall)


@laws
@given(matrices())
def test_every_reasoning_twice_changes_nothing(matrix: dict[str, Any]) -> None:
    close(measure_information(**matrix), measure_information(**{name: np.concatenate([v, v]) for name, v in matrix.items()}), size(matrix))


@laws
@given(matrices())
def test_every_prompt_twice(matrix: dict[str, Any]) -> None:
    """The marginal stays, so entropies and information stay; a tie between the copies halves the retrieval."""
    doubled = {**matrix, "logprobs": np.concatenate([matrix["logprobs"], matrix["logprobs"]], axis=1)}
    first, second = measure_information(**matrix), measure_information(**doubled)
    slack = 1e-13 * (1 + size(matrix))
    for name in ("mi", "mi_seq", "h_conditional", "h_marginal", "sigma"):
        assert getattr(second, name) == pytest.approx(getattr(first, name), abs=slack), name
    assert second.retrieval_acc == pytest.approx(first.retrieval_acc / 2, abs=1e-12)
    assert second.recall[4] == pytest.approx(first.recall[2], abs=1e-12)


@laws
@given(matrices(), st.randoms(use_true_random=False))
def test_intervals_follow_the_estimates(matrix: dict[str, Any], random: Any) -> None:
    """Reasonings reordered and a constant added to all scores: the ends stay, or move with the entropy."""
    num = len(matrix["source"])
    order = random.sample(range(num), num)
    moved = {name: values[order] for name, values in matrix.items()}
    moved["logprobs"] = moved["logprobs"] - 8.0
    first, second = (measure_information(**given, bootstrap=20) for given in (matrix, moved))
    slack = 1e-9 * (1 + size(matrix))
    if len(set(matrix["source"].tolist())) > 1:  # otherwise reasonings are the units, and the draws follow their order
        assert second.intervals["retrieval_acc"] == pytest.approx(first.intervals["retrieval_acc"], abs=1e-9)
        assert second.intervals["mi_seq"] == pytest.approx(first.intervals["mi_seq"], abs=slack)
        ends = zip(first.intervals["h_conditional_seq"], second.intervals["h_conditional_seq"], strict=True)
        assert all(after == pytest.approx(8 + end, abs=slack) for end, after in ends if end > 0)  # one that would be below 0 ends there


@laws
@given(matrices())
def test_what_is_more_likely_under_its_own_prompt_tells_more(matrix: dict[str, Any]) -> None:
    own = np.arange(len(matrix["source"])), matrix["source"]
    raised = matrix["logprobs"].copy()
    raised[own] += 1
    before, after = measure_information(**matrix), measure_information(**{**matrix, "logprobs": raised})
    assert after.mi_seq >= before.mi_seq - 1e-13 * (1 + size(matrix))
    assert after.retrieval_acc >= before.retrieval_acc


@laws
@given(matrices(), st.integers(0, 2**32))
def test_resampling_is_bounded(matrix: dict[str, Any], seed: int) -> None:
    info = measure_information(**matrix, bootstrap=20, permutations=9, seed=seed)
    assert info.mi_interval is not None and info.retrieval_p_value is not None
    assert info.mi_interval == info.intervals["mi"]
    for name, value in fields(info).items():
        if name not in ("chance", "sigma"):
            low, high = info.intervals[name]
            assert low <= value <= high and math.isfinite(low) and math.isfinite(high), name
    for name in ("retrieval_acc", "recall_2", "recall_4", "recall_8"):
        assert info.intervals[name][0] >= 0 and info.intervals[name][1] <= 1, name
    for name in ("mi", "mi_seq", "mi_token_mean"):
        assert info.intervals[name][1] <= math.log(matrix["logprobs"].shape[1]) + 1e-13 * (1 + size(matrix)), name
    assert 0.1 <= info.retrieval_p_value <= 1
    assert info.mi_p_value is not None and 0.1 <= info.mi_p_value <= 1
