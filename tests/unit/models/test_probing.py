"""What a probe takes for rounding, which positions it looks at, how it computes in float32, and what it does with errors."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tether.models.probing import attempt, disagreement, evaluating, float32_parts, probe_ids, probe_positions

EXPECTED = torch.tensor([[4.0, 0.0], [0.0, 4.0]])
OFF = torch.tensor([[1.0, 0.0], [0.0, 0.0]])


def _never() -> Any:
    raise AssertionError("float32 needs no other reference")


def test_what_counts_as_rounding_in_float32() -> None:
    """A thousandth of the largest value, here 4."""
    assert disagreement(EXPECTED + 0.0039 * OFF, EXPECTED, _never, torch.float32) == ""
    found = disagreement(EXPECTED + 0.0041 * OFF, EXPECTED, _never, torch.float32)
    assert found == "differs from the module by 0.001 in float32"


def test_what_counts_as_rounding_in_half_precision() -> None:
    """Twice the module's own error and a hundredth. One of four entries is off by d: the error is d / 2, the values have sqrt(8)."""
    module = EXPECTED + 0.2 * OFF  # an error of 0.1 / 2.83 = 0.0354, so 0.0807 is allowed: d up to 0.4566
    assert disagreement(EXPECTED + 0.456 * OFF, module, lambda: EXPECTED, torch.bfloat16) == ""
    assert disagreement(EXPECTED - 0.456 * OFF, module, lambda: EXPECTED, torch.bfloat16) == "", "they may err to different sides"
    found = disagreement(EXPECTED + 0.458 * OFF, module, lambda: EXPECTED, torch.bfloat16)
    assert found == "differs from float32 by 0.081 where the module differs by 0.035"


def test_one_token_that_rounding_carried_away_does_not_count() -> None:
    """Of 16 tokens the two worst: all values have 1, and the module's are off by 0.02, so 0.05 is allowed to the 14 others."""
    exact = torch.ones(16, 2)
    module = exact + 0.02
    fast = exact + 0.049
    fast[3:5] += 10.0
    assert disagreement(fast, module, lambda: exact, torch.bfloat16) == ""
    fast[9] += 1.0  # a third one: sqrt((13 * 0.049 ** 2 + 1.049 ** 2) / 14) = 0.284
    found = disagreement(fast, module, lambda: exact, torch.bfloat16)
    assert found == "differs from float32 by 0.28 where the module differs by 0.02"
    fast = exact + 0.049
    fast[3, 0] = torch.nan
    assert disagreement(fast, module, lambda: exact, torch.bfloat16), "one that is no number always counts"


def test_results_that_are_not_numbers_disagree() -> None:
    assert disagreement(EXPECTED * torch.nan, EXPECTED, _never, torch.float32)
    assert disagreement(EXPECTED * torch.nan, EXPECTED, lambda: EXPECTED, torch.bfloat16)
    assert disagreement(EXPECTED[:1], EXPECTED, _never, torch.float32) == "gives shape (1, 2) where the module gives (2, 2)"


def test_positions_reach_from_the_first_to_the_last() -> None:
    for limit in (1, 5, 24, 25, 40, 128, 1000, 2**17):
        positions = probe_positions(limit)
        assert positions[0] == 0 and positions[-1] == limit - 1 and len(positions) == min(24, limit)
        assert all(a < b for a, b in itertools.pairwise(positions))
    far = probe_positions(8192)
    assert far[:8] == list(range(8)) and far[-8:] == list(range(8184, 8192)) and max(b - a for a, b in itertools.pairwise(far)) < 1200


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_float32_without_a_second_copy(name: str, small_model: Callable[..., Any]) -> None:
    """The weights are those of half precision, the arithmetic is that of float32, and the very tensors come back."""
    half = small_model(name).to(torch.bfloat16)
    inv_freq = {key: buffer.clone() for key, buffer in half.named_buffers()}
    whole = small_model(name)
    whole.load_state_dict(half.state_dict())  # rounded weights in float32
    for key, buffer in whole.named_buffers():
        buffer.copy_(inv_freq[key])
    addresses = [parameter.data_ptr() for parameter in half.parameters()]
    ids = probe_ids(half, 12)
    with torch.no_grad():
        with float32_parts(half.base_model):
            found = half.base_model(input_ids=ids, use_cache=False).last_hidden_state
        expected = whole.base_model(input_ids=ids, use_cache=False).last_hidden_state
        coarse = half.base_model(input_ids=ids, use_cache=False).last_hidden_state
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    assert (coarse - expected).abs().max() > 10 * (found - expected).abs().max()
    assert [parameter.data_ptr() for parameter in half.parameters()] == addresses and half.dtype == torch.bfloat16
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in half.modules())


def test_weights_come_back_where_a_pass_fails(small_model: Callable[..., Any]) -> None:
    half = small_model("llama").to(torch.bfloat16)
    half.model.layers[1].mlp.down_proj.forward = lambda x: _never()
    with pytest.raises(AssertionError), float32_parts(half.base_model):
        half.base_model(input_ids=probe_ids(half, 4))
    assert all(parameter.dtype == torch.bfloat16 for parameter in half.parameters())


@pytest.mark.parametrize(
    "error", [RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError, AssertionError, NotImplementedError]
)
def test_what_a_probe_raises_is_named(error: type[Exception]) -> None:
    def fails() -> None:
        raise error("no\n  such thing")

    value, reason = attempt(fails)
    assert value is None and reason.startswith(f"{error.__name__}: ") and "such thing" in reason and "\n" not in reason
    assert attempt(lambda: 3) == (3, "")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt, MemoryError])
def test_what_says_nothing_about_the_model_is_raised(error: type[BaseException]) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(error):
        attempt(fails)


def test_dropout_is_off_inside_and_back_afterwards(small_model: Callable[..., Any]) -> None:
    model = small_model("llama").train()
    with evaluating(model):
        assert not model.training
    assert model.training
