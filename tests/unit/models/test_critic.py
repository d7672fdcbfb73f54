"""Values of states: zero at the start, the head's own arithmetic afterwards, at the position before each token; saved and restored."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tether.core.errors import BadInput, CheckpointError, ModelUnavailable
from tether.models.critic import Critic, ValueHead, load_critic
from tether.models.packing import micro_batches
from tether.models.policy import Policy

IDS = torch.tensor([[5, 6, 0, 0, 0], [7, 8, 9, 10, 11], [12, 13, 14, 0, 0]])
LENGTHS = torch.tensor([2, 5, 3])
MASK = torch.tensor([[0, 1, 0, 0, 0], [0, 0, 1, 0, 1], [0, 1, 1, 0, 0]], dtype=torch.bool)
Build = Callable[..., Any]


def _stir(critic: Critic) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        critic.head.linear.weight.normal_()
        critic.head.linear.bias.fill_(0.25)


def _by_hand(critic: Critic) -> Tensor:
    """The head's product with the last hidden state just before each selected token, one sequence at a time."""
    values = []
    for ids, mask, length in zip(IDS, MASK, LENGTHS.tolist(), strict=True):
        with torch.no_grad():
            hidden = critic.policy.module.base_model(input_ids=ids[None, :length]).last_hidden_state[0].float()
        values += [hidden[t - 1] @ critic.head.linear.weight[0].detach() + 0.25 for t in mask.nonzero()[:, 0].tolist()]
    return torch.stack(values)


def test_a_head_by_hand() -> None:
    head = ValueHead(3)
    features = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 4.0]])
    assert head(features).tolist() == [0.0, 0.0]
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor([[2.0, 1.0, -1.0]]))
        head.linear.bias.fill_(0.5)
    assert head(features).tolist() == [1.5, -4.5]
    assert head(torch.zeros(0, 3)).shape == (0,)
    for rounded in (head(features.bfloat16()), head.bfloat16()(features)):  # all of these are numbers of bfloat16
        assert rounded.dtype == torch.float32 and rounded.tolist() == [1.5, -4.5]


def test_values_start_at_zero(tiny: Any) -> None:
    values = Critic(Policy(tiny.model), shared=True).values(IDS, MASK, LENGTHS, 100)
    assert values.tolist() == [0.0] * 5 and values.dtype == torch.float32


@pytest.mark.parametrize("max_tokens", [1, 100])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_values_by_hand(name: str, max_tokens: int, small_model: Build) -> None:
    critic = Critic(Policy(small_model(name)), shared=False)
    _stir(critic)
    values = critic.values(IDS, MASK, LENGTHS, max_tokens)
    torch.testing.assert_close(values, _by_hand(critic), rtol=0, atol=1e-4)
    assert not values.requires_grad
    for micro in micro_batches(LENGTHS, max_tokens, together=critic.policy.supports_packing):
        part = critic.micro_values(IDS, MASK, micro)
        assert part.requires_grad
        in_place = torch.zeros(MASK.shape).masked_scatter(MASK, values)
        torch.testing.assert_close(part.detach(), in_place[micro.index_M][MASK[micro.index_M]], rtol=0, atol=1e-5)


def test_what_is_trained(tiny_model: Any) -> None:
    policy = Policy(tiny_model)
    shared, own = Critic(policy, shared=True), Critic(policy, shared=False)
    assert shared.parameters() == list(shared.head.parameters()) and shared.backbone_parameters() == []
    assert own.parameters() == [*own.backbone_parameters(), *own.head.parameters()]
    backbone = {id(parameter) for parameter in tiny_model.base_model.parameters()}
    assert {id(parameter) for parameter in own.parameters()} == backbone | {id(parameter) for parameter in own.head.parameters()}
    (micro,) = micro_batches(LENGTHS, 100, together=True)
    _stir(own)
    own.micro_values(IDS, MASK, micro).sum().backward()
    assert all(parameter.grad is not None for parameter in own.parameters())


def test_a_frozen_trunk_is_not_trained(tiny_model: Any) -> None:
    own = Critic(Policy(tiny_model.requires_grad_(False)), shared=False)
    assert own.parameters() == list(own.head.parameters())


@pytest.mark.parametrize("shared", [True, False])
def test_saved_and_restored(shared: bool, small_model: Build, tmp_path: Any) -> None:
    critic = Critic(Policy(small_model("llama")), shared=shared)
    _stir(critic)
    want = critic.values(IDS, MASK, LENGTHS, 100)
    torch.save(critic.state(), tmp_path / "critic.pt")
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(1.0)
    assert not torch.equal(critic.values(IDS, MASK, LENGTHS, 100), want)
    before = [id(parameter) for parameter in critic.parameters()]
    critic.restore(torch.load(tmp_path / "critic.pt", weights_only=True))
    assert torch.equal(critic.values(IDS, MASK, LENGTHS, 100), want)
    assert [id(parameter) for parameter in critic.parameters()] == before  # an optimiser still holds them
    assert any(name.startswith("trunk.") for name in critic.state()) is not shared
    assert not any("lm_head" in name for name in critic.state())


def test_a_state_of_another_critic(small_model: Build) -> None:
    critic = Critic(Policy(small_model("llama")), shared=False)
    for other in (
        Critic(Policy(small_model("llama", hidden_size=64)), shared=False),
        Critic(Policy(small_model("gpt2")), shared=True),
    ):
        before = {name: tensor.clone() for name, tensor in critic.state().items()}
        with pytest.raises(CheckpointError, match=r"the saved critic does not fit this one \(\d+ tensors differ, .* among them\)"):
            critic.restore(other.state())
        assert all(torch.equal(before[name], tensor) for name, tensor in critic.state().items())


def test_a_model_that_does_not_split_carries_no_head(small_model: Build) -> None:
    with pytest.raises(BadInput, match="models of type 'gemma2' cannot carry a value head"):
        Critic(Policy(small_model("gemma2")), shared=True)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so, once
def test_loading_by_name(tiny: Any) -> None:
    policy = Policy(tiny.model)
    critic = load_critic("tiny", policy=policy, device="cpu", dtype="bfloat16")
    assert not critic.shared and critic.policy.module.dtype == torch.bfloat16
    assert critic.head.linear.weight.dtype == torch.float32
    assert not {id(p) for p in critic.parameters()} & {id(p) for p in tiny.model.parameters()}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiney", "critic.model: unknown model 'tiney': did you mean 'tiny'"),
        ("nobody/nothing-0b", "critic.model: Hugging Face model 'nobody/nothing-0b' is neither cached here nor reachable"),
    ],
)
def test_a_critic_that_cannot_load(name: str, words: str, tiny: Any) -> None:
    with pytest.raises(ModelUnavailable, match=words):
        load_critic(name, policy=Policy(tiny.model), device="cpu")


def test_a_critic_that_reads_other_tokens(tiny: Any, small_model: Build) -> None:
    size = tiny.model.config.vocab_size
    with pytest.raises(BadInput, match=rf"critic.model 'tiny' has a vocabulary of {size} tokens, the policy one of 97"):
        load_critic("tiny", policy=Policy(small_model("llama")), device="cpu")
