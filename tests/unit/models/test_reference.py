"""The reference says what the model said at the start, however far training has moved it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tether.core.errors import BadInput, ModelUnavailable
from tether.models.load import load_model
from tether.models.logprobs import token_logprobs
from tether.models.lora import add_lora, as_at_start, save_model
from tether.models.policy import Policy
from tether.models.reference import Reference, reference_for

LENGTHS = torch.tensor([4, 9, 6])
IDS = torch.arange(27).view(3, 9) + 20
MASK = (torch.arange(9) < LENGTHS[:, None]) & (torch.arange(9) > 0)


def _now(policy: Policy) -> Tensor:
    return token_logprobs(policy, IDS, MASK, LENGTHS, 0.8, max_tokens=20)


def _train(model: Any) -> None:
    """Move every weight that may move."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape))


def _says(reference: Reference) -> Tensor:
    return reference.logprobs(IDS, MASK, LENGTHS, 0.8, 20)


@pytest.mark.parametrize("lora", [True, False])
def test_the_start_is_kept(lora: bool, tiny_model: Any) -> None:
    if lora:
        add_lora(tiny_model, 4, 8, seed=0)
    policy = Policy(tiny_model)
    start = _now(policy)
    reference = reference_for(policy)
    assert torch.equal(_says(reference), start)
    trainable = [parameter.requires_grad for parameter in tiny_model.parameters()]
    _train(tiny_model)
    moved = _now(policy)
    assert (moved - start).abs().max() > 0.1
    assert torch.equal(_says(reference), start)
    assert torch.equal(_now(policy), moved)  # asking the reference leaves the policy as it is
    assert [parameter.requires_grad for parameter in tiny_model.parameters()] == trainable


def test_a_run_that_goes_on_with_adapters_keeps_its_start(tiny: Any, tiny_model: Any) -> None:
    """The adapters have moved already when the reference is made; it is the model without them, not a copy."""
    add_lora(tiny_model, 4, 8, seed=0)
    _train(tiny_model)
    assert torch.equal(_says(reference_for(Policy(tiny_model), start_model="tiny")), _now(Policy(tiny.model)))


def test_a_run_that_starts_from_adapters_is_compared_with_them(tiny: Any, tiny_model: Any, tmp_path: Path) -> None:
    """As `tether train` does after `tether sft`: at the start, after updates, and resumed with adapters that have moved on."""
    add_lora(tiny_model, 4, 8, seed=0)
    _train(tiny_model)
    save_model(tiny_model, tmp_path)
    policy = Policy(load_model(str(tmp_path), device="cpu").model)
    start = _now(policy)
    assert (start - _now(Policy(tiny.model))).abs().max() > 0.1  # what adapters left out would give
    reference = reference_for(policy, start_model=str(tmp_path))
    assert torch.equal(_says(reference), start)
    _train(policy.module)
    moved = _now(policy)
    assert (moved - start).abs().max() > 0.1
    for found in (reference, reference_for(policy, start_model=str(tmp_path))):
        assert torch.equal(_says(found), start) and torch.equal(_now(policy), moved)


def test_adapters_come_back_where_the_reference_fails(tiny_model: Any) -> None:
    add_lora(tiny_model, 4, 8, seed=0)
    at_start = as_at_start(tiny_model)
    _train(tiny_model)
    moved = _now(Policy(tiny_model))
    with pytest.raises(KeyError), at_start():
        raise KeyError
    assert torch.equal(_now(Policy(tiny_model)), moved)


def test_a_copy_is_frozen_and_without_dropout(tiny_model: Any) -> None:
    reference = reference_for(Policy(tiny_model.train()))
    copy = reference._policy.module
    assert copy is not tiny_model and not copy.training and tiny_model.training
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    assert not _says(reference).requires_grad


def test_another_model_by_name(tiny: Any, tiny_model: Any) -> None:
    start = _now(Policy(tiny.model))
    _train(tiny_model)
    reference = reference_for(Policy(tiny_model), "tiny")
    assert torch.equal(_says(reference), start)
    assert not any(parameter.requires_grad for parameter in reference._policy.module.parameters())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so, once
def test_a_named_reference_computes_like_the_policy(tiny_model: Any) -> None:
    reference = reference_for(Policy(tiny_model.to(torch.bfloat16)), "tiny")
    assert reference._policy.module.dtype == torch.bfloat16


def test_names_that_do_not_fit(tiny: Any, small_model: Callable[..., Any]) -> None:
    size = tiny.model.config.vocab_size
    with pytest.raises(
        BadInput, match=rf"algorithm.reference 'tiny' has a vocabulary of {size} tokens, the policy one of 97; take a model with"
    ):
        reference_for(Policy(small_model("llama")), "tiny")
    with pytest.raises(ModelUnavailable, match=r"algorithm.reference: unknown model 'tiney'"):
        reference_for(Policy(tiny.model), "tiney")
