"""The optimiser: AdamW on fp32 master weights, whatever the model computes in; and the learning rate of every step.

At a rate of 1e-6 an update is far below the resolution of bfloat16 (the next number after 1 is 1 + 1/128), so weights kept in bfloat16 would
not change. Each such parameter has an fp32 master weight here: the gradient of every micro-batch is added to the master's as soon as it
exists and is then freed, the update is made on the master, and the parameter is the rounded master. A float32 parameter is its own master.

Beside master weights, gradients and Adam's two moments nothing of the size of the model is held, not even for a moment: the norm is computed
in pieces, and clipping, the fused update and the rounding work in place. The norm is the one number that a step waits for.

The learning rate follows from the step alone, so a resumed run needs no state for it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

HALVES = (torch.bfloat16, torch.float16)
FUSED_DEVICES = ("cpu", "cuda")
"""Where torch updates weights and moments in one pass over them."""
PIECE = 2**24


class FP32MasterAdamW:
    """AdamW over the fp32 master weights of some parameters.

    Build it on weights as they were loaded and let it cast them: `FP32MasterAdamW(parameters, ..., compute_dtype=torch.bfloat16)` copies the
    float32 values first, so nothing is rounded in the master weights. Parameters keep their identity.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """`compute_dtype` is what the parameters become; None leaves them as they are."""
        self._parameters = list(parameters)
        self._masters = [_master(parameter, compute_dtype) for parameter in self._parameters]
        # The parameters that are not their own master, with it.
        self._rounded = [(p, m) for p, m in zip(self._parameters, self._masters, strict=True) if p is not m]
        for parameter in self._parameters:
            parameter.data = parameter.data.to(compute_dtype or parameter.dtype)
        self._hooks = [parameter.register_post_accumulate_grad_hook(_gradient_mover(master)) for parameter, master in self._rounded]
        self._fused = all(master.device.type in FUSED_DEVICES for master in self._masters)
        self._adam = torch.optim.AdamW(
            self._masters, lr=learning_rate, betas=(beta1, beta2), weight_decay=weight_decay, fused=self._fused or None
        )

    @property
    def rate(self) -> float:
        return float(self._adam.param_groups[0]["lr"])

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next steps."""
        for group in self._adam.param_groups:
            group["lr"] = rate

    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to a norm of at most `max_norm`; returns the norm it had.

        A norm that is not finite is returned and nothing is scaled: the caller leaves that update out.
        """
        gradients = self._gradients()
        # In float64, because squares of finite float32 numbers can be infinite in float32; in pieces, because that makes a copy.
        pieces = [piece for gradient in gradients for piece in gradient.flatten().split(PIECE)]
        norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        if math.isfinite(norm) and norm > max_norm:
            torch._foreach_mul_(gradients, max_norm / norm)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Update the master weights by their gradients, and set the parameters to the rounded master weights."""
        self._adam.step()
        self._round()

    def zero_grad(self) -> None:
        """Forget the gradients, and their memory."""
        for tensor in (*self._masters, *self._parameters):  # a parameter has one where a backward pass broke off
            tensor.grad = None

    @property
    def bytes_to_come(self) -> int:
        """Memory that the next update will take beyond what is held now: gradients, and moments where there are none yet."""
        gradients = sum(master.nbytes for master in self._masters if master.grad is None)
        return gradients + sum(2 * master.nbytes for master in self._masters if master not in self._adam.state)

    def saved_sizes(self) -> list[int]:
        """Bytes of each storage that a checkpoint holds once moments exist: master weights and two moments of each."""
        storages = {master.untyped_storage().data_ptr(): master.untyped_storage().nbytes() for master in self._masters}
        return [*storages.values(), *(master.nbytes for master in self._masters for _ in range(2))]

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs: Adam's moments, and the master weights of parameters in half precision."""
        return {"adam": self._adam.state_dict(), "masters": [master.detach() for _, master in self._rounded]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; a ValueError or KeyError says that it is of other parameters, and nothing was changed."""
        moments, masters = state["adam"]["state"], state["masters"]
        own = [master for _, master in self._rounded]
        _check_shapes("masters", [tuple(m.shape) for m in masters], [tuple(m.shape) for m in own])
        for index, moment in moments.items():
            if index < len(self._masters):
                _check_shapes("moments", [tuple(moment["exp_avg"].shape)], [tuple(self._masters[index].shape)])
        # The saved groups say how the update was computed then; it is computed as here, whatever they say.
        groups = [{**group, "fused": self._fused or None} for group in state["adam"]["param_groups"]]
        self._adam.load_state_dict({**state["adam"], "param_groups": groups})
        for master, saved in zip(own, masters, strict=True):
            master.copy_(saved)
        self._round()

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Inside the block the parameters hold their master weights in float32, so that what is saved is exact."""
        rounded = [parameter.data for parameter, _ in self._rounded]
        for parameter, master in self._rounded:
            parameter.data = master.data
        try:
            yield
        finally:
            for (parameter, _), values in zip(self._rounded, rounded, strict=True):
                parameter.data = values

    def close(self) -> None:
        """Let go of the parameters: their gradients are their own again."""
        for hook in self._hooks:
            hook.remove()

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self._masters if master.grad is not None]

    @torch.no_grad()
    def _round(self) -> None:
        if self._rounded:
            torch._foreach_copy_([parameter for parameter, _ in self._rounded], [master for _, master in self._rounded])


def _master(parameter: nn.Parameter, compute_dtype: torch.dtype | None) -> nn.Parameter:
    """The parameter itself, or a float32 copy of one that computes in less."""
    if (compute_dtype or parameter.dtype) in HALVES:
        return nn.Parameter(parameter.detach().float().clone())
    return parameter


def _gradient_mover(master: nn.Parameter) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's new gradient to its master's, and frees it."""

    def move(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)

    return move


def _check_shapes(what: str, got: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, ...]]) -> None:
    if list(got) != list(wanted):
        raise ValueError(f"its optimiser's {what} have shapes {list(got)[:3]}, this model's have {list(wanted)[:3]}")


# From the share of the decay that has passed (0 at its start, 1 in the last step) to the share of the way down to the final rate.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda passed: 0.0,
    "linear": lambda passed: passed,
    "cosine": lambda passed: (1 - math.cos(math.pi * passed)) / 2,
}


def learning_rate(base: float, step: int, steps: int, schedule: str, warmup_steps: int, min_lr_ratio: float) -> float:
    """The rate of a step, of which there are `steps`, counted from 1.

    It rises in equal parts from base / warmup_steps in step 1 to base in step warmup_steps (in step 1 without warm-up), then falls as the
    schedule says, to min_lr_ratio * base in the last step.
    """
    if step < warmup_steps:
        return base * step / warmup_steps
    peak = max(warmup_steps, 1)
    passed = min(1.0, (step - peak) / (steps - peak)) if step > peak else 0.0
    return base * (1 - (1 - min_lr_ratio) * SCHEDULES[schedule](passed))
