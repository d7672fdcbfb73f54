"""The critic: the expected return from the state before each sampled token.

A value head is one linear layer on the last hidden states of a backbone. The backbone is either the policy's own (shared: the features are
computed anyway, the head costs nothing) or that of a second causal language model, whose language head is not used. The head starts at
zero, so every value starts at 0, and it computes in float32 whatever the types of backbone and head.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tether.core.errors import BadInput, CheckpointError, ModelUnavailable
from tether.models.load import load_model
from tether.models.logprobs import AnyMicroBatch, Passes, check_same_vocabulary, forward, over_batch
from tether.models.policy import Policy

TRUNK = "trunk."
"""What the names of the backbone's weights begin with in a saved critic."""


class ValueHead(torch.nn.Module):
    """From features [N, D] to values [N]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, 1)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, features_ND: Tensor) -> Tensor:
        weight_1D, bias_1 = self.linear.weight.float(), self.linear.bias.float()
        return torch.nn.functional.linear(features_ND.float(), weight_1D, bias_1)[:, 0]


class Critic:
    """A backbone with a value head. `policy` is the model it belongs to: the trained policy itself if `shared`, else a model of its own."""

    def __init__(self, policy: Policy, *, shared: bool) -> None:
        if not policy.separable_head:
            raise BadInput(
                f"models of type '{policy.model_type}' cannot carry a value head: their logits are more than a product with the "
                "last hidden states; take another critic.model (Llama, Qwen, Mistral, GPT-2), or an algorithm without a critic"
            )
        self.policy = policy
        self.shared = shared
        self.head = ValueHead(policy.width).to(policy.device)

    def parameters(self) -> list[torch.nn.Parameter]:
        """What the critic's optimiser trains."""
        return [*self.backbone_parameters(), *self.head.parameters()]

    def backbone_parameters(self) -> list[torch.nn.Parameter]:
        """All of that but the head; none where the backbone is shared: the policy's optimiser trains it."""
        return [] if self.shared else [parameter for parameter in self._backbone.parameters() if parameter.requires_grad]

    def values(self, ids_BT: Tensor, mask_BT: Tensor, lengths_B: Tensor, max_tokens: int) -> Tensor:
        """The value of the state before every selected token, in row order, float32, without gradient. The place behind the last token of a row
        may be selected too: the value there is that of the state after the row."""
        return over_batch(
            self.policy, ids_BT, mask_BT, lengths_B, max_tokens, lambda chosen: self.head(chosen.features_ND), after_last=True
        )

    def micro_values(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor,
        micro: AnyMicroBatch,
        *,
        recompute: bool = False,
        policy: Policy | None = None,
        passes: Passes | None = None,
    ) -> Tensor:
        """The same for one micro-batch, with gradient; `recompute` and `passes` as in `forward`. `policy`: a copy of the critic's model to compute on."""
        values_N: Tensor = self.head(forward(policy or self.policy, ids_BT, mask_BT, micro, recompute=recompute, passes=passes).features_ND)
        return values_N

    def state(self) -> dict[str, Tensor]:
        """Everything that training changes, as plain tensors; a shared backbone is saved with the policy. Where ranks hold parts, all call it and
        the first gets it."""
        if self.shared or self.policy.divided is None:
            return self._tensors()
        weights = self.policy.divided.gathered(self.policy.dtype) or {}  # float32 ones are the optimiser's
        backbone = {f"{TRUNK}{name.removeprefix(self._prefix)}": each for name, each in weights.items() if name.startswith(self._prefix)}
        return backbone | {name: tensor for name, tensor in self._tensors().items() if not name.startswith(TRUNK)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        own = self._tensors()
        strange = sorted(own.keys() ^ state.keys()) or sorted(name for name in own if own[name].shape != state[name].shape)
        if strange:
            raise CheckpointError(
                f"the saved critic does not fit this one ({len(strange)} tensors differ, {strange[0]} among them); "
                "resume with the critic the run was started with"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                if self.policy.divided is None or not name.startswith(TRUNK):
                    tensor.copy_(state[name])
        if self.policy.divided is not None and not self.shared:
            trunk = {name.removeprefix(TRUNK): tensor for name, tensor in state.items() if name.startswith(TRUNK)}
            self.policy.divided.load({f"{self._prefix}{name}": tensor for name, tensor in trunk.items()})

    def _tensors(self) -> dict[str, Tensor]:
        """What `state` saves, as it is held here."""
        backbone = {} if self.shared else {f"{TRUNK}{name}": tensor for name, tensor in self._backbone.state_dict().items()}
        return {**backbone, **{f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}}

    @property
    def _prefix(self) -> str:
        """What the names of the backbone's weights begin with in the whole model."""
        return "" if self._backbone is self.policy.module else f"{self.policy.module.base_model_prefix}."

    @property
    def _backbone(self) -> torch.nn.Module:
        backbone: torch.nn.Module = self.policy.module.base_model
        return backbone


def load_critic(
    name: str, *, policy: Policy, device: str | None = None, dtype: str | None = None, divide: Callable[[str], Policy] | None = None
) -> Critic:
    """A critic with a backbone of its own, from any name `load_model` takes; `divide` loads one that is divided among ranks."""
    try:
        own = divide(name) if divide else Policy(*load_model(name, device=device, dtype=dtype), max_positions=policy.max_positions)
    except ModelUnavailable as error:
        raise ModelUnavailable(f"critic.model: {error}") from error
    check_same_vocabulary(own, policy, f"critic.model '{name}'")
    return Critic(own, shared=False)
