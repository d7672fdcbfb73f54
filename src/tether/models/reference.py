"""The reference: log-probs under the model the run started from, frozen, for a KL term.

For a model with adapters it is the same model with the adapters it started with, or with none where it started without: only they take
memory. Otherwise it is a frozen copy, or a model of its own by name. A resumed run names the model it started from.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from tether.core.errors import ModelUnavailable
from tether.models.load import load_model
from tether.models.logprobs import check_same_vocabulary, token_logprobs
from tether.models.lora import as_at_start, is_lora
from tether.models.policy import Policy


class Reference:
    """Frozen log-probs; made by `reference_for`."""

    def __init__(self, policy: Policy, frozen: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._policy = policy
        self._frozen = frozen
        """Holds the model in its starting state while it computes."""

    def logprobs(self, ids_BT: Tensor, mask_BT: Tensor, lengths_B: Tensor, temperature: float, max_tokens: int) -> Tensor:
        """log p of every selected token, in row order."""
        with self._frozen():
            return token_logprobs(self._policy, ids_BT, mask_BT, lengths_B, temperature, max_tokens=max_tokens)


def reference_for(
    policy: Policy, name: str | None = None, divide: Callable[[str], Policy] | None = None, *, start_model: str | None = None
) -> Reference:
    """The reference of a policy.

    Args:
        policy: the model to be trained, as it starts.
        name: another model to compare with, by any name `load_model` takes; None takes the policy's own start.
        divide: loads a model by name that is divided among ranks; None: this process holds it whole.
        start_model: the name of the model that a policy with adapters started from; None: it starts as it is now.
    """
    model = policy.module
    if name is not None:
        try:
            if divide is not None:
                other = divide(name)
            else:
                loaded = load_model(name, device=str(policy.device), dtype=str(policy.dtype).removeprefix("torch."))
                other = Policy(loaded.model.requires_grad_(False), loaded.tokenizer, max_positions=policy.max_positions)
        except ModelUnavailable as error:
            raise ModelUnavailable(f"algorithm.reference: {error}") from error
        check_same_vocabulary(other, policy, f"algorithm.reference '{name}'")
        return Reference(other)
    if is_lora(model):
        return Reference(policy, as_at_start(model, start_model))
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    return Reference(Policy(frozen, policy.tokenizer, max_positions=policy.max_positions))
