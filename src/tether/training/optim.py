"""The optimiser: AdamW on fp32 master weights, whatever the model computes in; and the learning rate of every step.

At a rate of 1e-6 an update is far below the resolution of bfloat16 (the next number after 1 is 1 + 1/128), so weights kept in bfloat16 would
not change. Each such parameter has an fp32 master weight here: the gradient of every micro-batch is added to the master's as soon as it
exists and is then freed, the update is made on the master, and the parameter is the rounded master. A float32 parameter is its own master.

Several ranks share the optimiser's state (ZeRO stage 1): every parameter has one owner, the owners' shares are alike in size, and only the owner
holds the master weight and the moments. Gradients are summed to their owners, the norm is that of all of them, the owner updates, and every
rank gets the owner's rounded weights. So all ranks hold the same bits. A checkpoint holds what a single rank would have written.

Beside master weights, gradients and Adam's two moments nothing of the size of the model is held, not even for a moment: the norm is computed
in pieces, and clipping, the fused update and the rounding work in place. A step waits for nothing: the fused update divides the gradient by what
it is too long by, and leaves everything as it was where it is told, on the device, that something was not finite.

The learning rate follows from the step alone, so a resumed run needs no state for it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tether.training.distributed.ranks import Ranks, balanced
from tether.training.masters import LowBits, joined

HALVES = (torch.bfloat16, torch.float16)
FUSED_DEVICES = ("cpu", "cuda")
"""Where torch updates weights and moments in one pass over them."""
PIECE = 2**24
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What Adam keeps of a parameter, in the order of its state."""


class MasterOptimizer(ABC):
    """What the optimisers share, whether this rank holds whole master weights or a part of each (distributed/fsdp.py)."""

    _adam: Any
    _fused: bool
    _ranks: Ranks
    _parameters: list[nn.Parameter]
    _rounded: list[int]
    """The parameters that are not their own master."""
    _excess: Tensor | None = None
    """What the gradient is too long by, 1 where it is not; None before `clip`."""

    @property
    def rate(self) -> float:
        return float(self._adam.param_groups[0]["lr"])

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next steps."""
        for group in self._adam.param_groups:
            group["lr"] = rate

    def _clip(self, gradients: Sequence[Tensor], max_norm: float) -> Tensor:
        """The norm of a gradient of which this rank holds these parts; `_update` scales it down to `max_norm`."""
        norm = gradient_norm(gradients, self._ranks, self._parameters[0].device if self._parameters else torch.device("cpu"))
        self._excess = (norm / max_norm).clamp(1.0, torch.finfo(torch.float32).max).float()
        return norm

    def _update(self, gradients: Sequence[Tensor], finite: Tensor | None, *, on_device: bool) -> None:
        """Adam's update by the clipped gradient, none where something is not finite; `on_device`: without asking for either number here."""
        if on_device:  # as torch's GradScaler tells it
            self._adam.grad_scale, self._adam.found_inf = self._excess, None if finite is None else (~finite).float()
        elif finite is not None and not bool(finite):
            return
        elif self._excess is not None and (excess := float(self._excess)) > 1:
            torch._foreach_div_(list(gradients), excess)
        self._adam.step()

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Inside the block the parameters of rank 0 hold their master weights in float32, so that what is saved is exact."""
        rounded = [self._parameters[n].data for n in self._rounded]
        masters = self._all_masters()
        if self._ranks.rank == 0:
            for n, master in zip(self._rounded, masters, strict=True):
                self._parameters[n].data = master
        try:
            yield
        finally:
            for n, values in zip(self._rounded, rounded, strict=True):
                self._parameters[n].data = values

    @abstractmethod
    def _all_masters(self) -> list[Tensor]:
        """The master weights of all rounded parameters; complete on rank 0. All ranks call it."""


class FP32MasterAdamW(MasterOptimizer):
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
        ranks: Ranks | None = None,
    ) -> None:
        """`compute_dtype` is what the parameters become; None leaves them as they are. `ranks` share the state; by default there is one."""
        self._ranks = ranks or Ranks()
        self._parameters = list(parameters)
        self._owners = balanced([parameter.numel() for parameter in self._parameters], self._ranks.size)
        self._rounded = [n for n, parameter in enumerate(self._parameters) if (compute_dtype or parameter.dtype) in HALVES]
        rounded = set(self._rounded)
        self._masters = {
            n: nn.Parameter(parameter.detach().float().clone()) if n in rounded else parameter
            for n, parameter in enumerate(self._parameters)
            if self._owners[n] == self._ranks.rank
        }
        """The master weights that this rank holds, by the number of their parameter."""
        self._holders = [
            self._masters.get(n, _GradientSum() if n in rounded else parameter) for n, parameter in enumerate(self._parameters)
        ]
        """What holds the float32 gradient of each parameter."""
        self._keeps = False
        for parameter in self._parameters:
            parameter.data = parameter.data.to(compute_dtype or parameter.dtype)
        self._hooks = [self._parameters[n].register_post_accumulate_grad_hook(_gradient_mover(self._holders[n])) for n in self._rounded]
        self._fused = all(parameter.device.type in FUSED_DEVICES for parameter in self._parameters)
        self._adam = torch.optim.AdamW(
            [{"params": list(self._masters.values())}],  # a group, because a rank may own no parameter
            lr=learning_rate,
            betas=(beta1, beta2),
            weight_decay=weight_decay,
            fused=self._fused or None,
        )

    def clip(self, max_norm: float) -> Tensor:
        """Sum the gradient over the ranks, and let `step` scale it down to a norm of at most `max_norm`; returns the norm, a float64 on the device."""
        self._reduce()
        return self._clip(self._gradients, max_norm)

    @property
    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self._masters.values() if master.grad is not None]

    @torch.no_grad()
    def step(self, finite: Tensor | None = None) -> None:
        """Update the master weights by their clipped gradients, and set the parameters to the rounded master weights, on every rank.

        Nothing changes where `finite`, a bool on the device, is False.
        """
        self._update(self._gradients, finite, on_device=self._fused)
        if owned := [n for n in self._rounded if n in self._masters]:
            torch._foreach_copy_([self._parameters[n] for n in owned], [self._masters[n] for n in owned])
        self._ranks.broadcast(self._parameters, self._owners)

    def keep_gradients(self) -> list[Tensor]:
        """Give the float32 gradient of every rounded parameter a place that it keeps from now on; returns these."""
        self._keeps = True
        for n in self._rounded:
            if self._holders[n].grad is None:
                self._holders[n].grad = torch.zeros_like(self._parameters[n], dtype=torch.float32)
        return [gradient for n in self._rounded if (gradient := self._holders[n].grad) is not None]

    def zero_grad(self) -> None:
        """Forget the gradients, and their memory unless they keep it."""
        kept = {n for n in self._rounded if self._keeps and self._holders[n].grad is not None}
        for n, (holder, parameter) in enumerate(zip(self._holders, self._parameters, strict=True)):
            parameter.grad = None  # there is one where a backward pass broke off
            if n not in kept:
                holder.grad = None
        if kept:
            torch._foreach_zero_([gradient for n in kept if (gradient := self._holders[n].grad) is not None])

    @property
    def bytes_to_come(self) -> int:
        """Memory that the next update will take beyond what is held now: gradients, and moments where there are none yet."""
        gradients = sum(self._float_bytes(n) for n, holder in enumerate(self._holders) if holder.grad is None)
        return gradients + sum(2 * master.nbytes for master in self._masters.values() if master not in self._adam.state)

    def saved_sizes(self) -> list[int]:
        """Bytes of each storage that a checkpoint is written from once moments exist: weights, master weights and two moments of each."""
        kept = (*self._parameters, *self._masters.values())
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        received = [self._float_bytes(n) for n in self._rounded if n not in self._masters]
        return [*storages.values(), *received, *(self._float_bytes(n) for n in range(len(self._parameters)) for _ in range(2))]

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs: Adam's moments, and the master weights of parameters in half precision. All ranks call it, rank 0 gets it."""
        local = self._adam.state_dict()
        mine = {n: local["state"][place] for place, n in enumerate(self._masters) if place in local["state"]}
        known = sorted({n for numbers in self._ranks.all_gather(sorted(mine)) for n in numbers})
        state = {n: {name: self._ranks.gather_to_first(self._moment(mine, n, name), self._owners[n]) for name in MOMENTS} for n in known}
        groups = [{**group, "params": list(range(len(self._parameters)))} for group in local["param_groups"]]
        masters = self._all_masters()
        return {"adam": {"state": state, "param_groups": groups}, "masters": masters} if self._ranks.rank == 0 else {}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; a ValueError or KeyError says that it is of other parameters, and nothing was changed.

        Where it holds master weights as `LowBits`, the parameters must be those that were saved beside it.
        """
        check_saved(state, self._parameters, self._rounded)
        moments, masters, (group,) = state["adam"]["state"], state["masters"], state["adam"]["param_groups"]
        # The saved group says how the update was computed then; it is computed as here, whatever it says.
        here = {**group, "params": list(range(len(self._masters))), "fused": self._fused or None}
        owned = {place: moments[n] for place, n in enumerate(self._masters) if n in moments}
        if self._ranks.size > 1:  # copies: several ranks read a state that is mapped from its file, which they must not hold on to
            owned = {place: {name: moment.clone() for name, moment in kept.items()} for place, kept in owned.items()}
        self._adam.load_state_dict({"state": owned, "param_groups": [here]})
        for n, saved in zip(self._rounded, masters, strict=True):
            master = joined(self._parameters[n], saved) if isinstance(saved, LowBits) else saved
            self._parameters[n].copy_(master)
            if n in self._masters:
                self._masters[n].copy_(master)

    def close(self) -> None:
        """Let go of the parameters: their gradients are their own again."""
        for hook in self._hooks:
            hook.remove()

    def _reduce(self) -> None:
        """Sum every gradient to the owner of its parameter; the others let go of theirs."""
        if self._ranks.size == 1:
            return
        # A rank without micro-batches has no gradients. It takes part with zeros, but a parameter that no rank used has none anywhere.
        present = [any(flags) for flags in zip(*self._ranks.all_gather([holder.grad is not None for holder in self._holders]), strict=True)]
        used = [n for n, found in enumerate(present) if found]
        gradients = []
        for n in used:
            holder, parameter = self._holders[n], self._parameters[n]
            if holder.grad is None:
                holder.grad = torch.zeros(parameter.shape, dtype=self._float_type(n), device=parameter.device)
            gradients.append(holder.grad)
        self._ranks.reduce(gradients, [self._owners[n] for n in used])
        for n in used:
            if n not in self._masters:
                self._holders[n].grad = None

    def _all_masters(self) -> list[Tensor]:
        return [self._ranks.gather_to_first(self._master(n), self._owners[n]) for n in self._rounded]

    def _master(self, n: int) -> Tensor:
        """The master weight of a parameter, or its shape where another rank holds it."""
        if n in self._masters:
            return self._masters[n].detach()
        return torch.empty(self._parameters[n].shape, dtype=self._float_type(n), device="meta")

    def _moment(self, mine: dict[int, dict[str, Tensor]], n: int, name: str) -> Tensor:
        if n in mine:
            return mine[n][name]
        shape = () if name == "step" else self._parameters[n].shape
        return torch.empty(shape, dtype=torch.float32 if name == "step" else self._float_type(n), device="meta")

    def _float_type(self, n: int) -> torch.dtype:
        """What gradient, master weight and moments of a parameter are held in."""
        return torch.float32 if n in self._rounded else self._parameters[n].dtype

    def _float_bytes(self, n: int) -> int:
        return self._parameters[n].numel() * self._float_type(n).itemsize


class _GradientSum:
    """Holds the gradient of a parameter whose master weight another rank holds."""

    def __init__(self) -> None:
        self.grad: Tensor | None = None


def _gradient_mover(holder: nn.Parameter | _GradientSum) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's new gradient to the float32 one, and frees it."""

    def move(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if holder.grad is None:
            holder.grad = gradient.float()
        else:
            holder.grad.add_(gradient)

    return move


def gradient_norm(gradients: Sequence[Tensor], ranks: Ranks, device: torch.device) -> Tensor:
    """The norm of a gradient, of which each rank holds some parts: a float64 on the device, for which one rank does not wait."""
    # In float64, because squares of finite float32 numbers can be infinite in float32; in pieces, because a CPU makes a copy for that.
    pieces = [piece for gradient in gradients for piece in gradient.flatten().split(PIECE)]
    norms = torch._foreach_norm(pieces, 2, dtype=torch.float64) if pieces else [torch.zeros((), dtype=torch.float64, device=device)]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if ranks.size == 1:
        return norm
    return torch.tensor(math.hypot(*ranks.all_gather(float(norm))), dtype=torch.float64, device=device)


def check_saved(state: dict[str, Any], parameters: Sequence[Tensor], rounded: Sequence[int]) -> None:
    """Raise a ValueError or KeyError where an optimiser's saved state is of other parameters; `rounded` are those with master weights."""
    masters = [saved.low if isinstance(saved, LowBits) else saved for saved in state["masters"]]
    _check_shapes("masters", [tuple(master.shape) for master in masters], [tuple(parameters[n].shape) for n in rounded])
    for n, moment in state["adam"]["state"].items():
        if n < len(parameters):
            _check_shapes("moments", [tuple(moment["exp_avg"].shape)], [tuple(parameters[n].shape)])
    (group,) = state["adam"]["param_groups"]
    if len(group["params"]) != len(parameters):
        raise ValueError(f"its optimiser's parameter group holds {len(group['params'])}, this model's {len(parameters)}")


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
