"""FSDP (torch's `fully_shard`): weights, gradients and optimiser state of the update divided among the ranks, for models of which one card
does not hold all that.

Every trained model is there twice. The **full** model, in the precision that the run computes in, plays, scores and is saved: it is the same
object as without FSDP, and no part of a run but the learner knows of the other one. Its **twin** is what the learner computes gradients on. Of
the twin a rank holds a share of each float32 weight, of its gradient and of its two moments. A layer's weights are gathered when the layer is
called and let go afterwards, so the learner computes layers inside calls of their modules (`LlamaBackbone.through_modules`), and everything of a
micro-batch, the language head included, inside one call of `ShardedModel`. After the updates of a step the full model gets the twin's weights
(`ShardedModel.publish`).

Every rank must make the same calls, because every call is an exchange. The learner sees to it that all ranks have equally many micro-batches. A
rank that fails between two exchanges cannot tell the others, so that ends the run: RankFailure, and --resume.

Optimiser state is saved whole and in the form of `FP32MasterAdamW`: a checkpoint can be continued on any number of ranks, with or without FSDP.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from tether.core.errors import BadInput
from tether.models.policy import Policy
from tether.training.distributed.ranks import Ranks
from tether.training.optim import FUSED_DEVICES, HALVES, MOMENTS, MasterOptimizer, check_saved, clip_gradients


class _Root(nn.Module):
    """The outermost call: what is computed in it finds the weights that belong to no layer in place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        return compute()


class ShardedModel:
    """The twin of a policy's model, divided among the ranks."""

    def __init__(self, policy: Policy, dtype: torch.dtype | None, ranks: Ranks) -> None:
        """The policy's model is cast to `dtype`, in which both compute; the twin keeps the values from before."""
        full = policy.module
        layers = {name: layer for name, layer in full.named_modules() if isinstance(layer, GradientCheckpointingLayer)}
        if not layers:
            raise BadInput(f"models of type '{policy.model_type}' do not say what their layers are; train with learner.sharding=zero1")
        self._mesh = init_device_mesh(policy.device.type, (ranks.size,))
        precision = MixedPrecisionPolicy(
            param_dtype=dtype if dtype in HALVES else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # One layer at a time is copied whole, then divided.
        twin = copy.deepcopy(full, {id(layer): nn.Module() for layer in layers.values()})
        for name, layer in layers.items():
            copied = copy.deepcopy(layer)
            twin.set_submodule(name, copied)
            fully_shard(copied, mesh=self._mesh, mp_policy=precision)
        self._root = _Root(twin)
        fully_shard(self._root, mesh=self._mesh, mp_policy=precision)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):  # a sum over the ranks, not a mean: the weights of tokens are those of the whole minibatch
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        for parameter in full.parameters():
            parameter.data = parameter.data.to(dtype or parameter.dtype)
        self.pairs = dict(zip(full.parameters(), _sharded_parameters(twin), strict=True))
        """The twin's parameter of each of the full model's, in their order."""
        self.policy = policy.twin(twin)
        """The handle on the twin; to be used inside a call alone."""

    def __call__(self, compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` returns, with gradient; all ranks call it at the same time."""
        found: Tensor = self._root(compute)
        return found

    @torch.no_grad()
    def publish(self) -> None:
        """Give the full model the twin's weights, one after the other."""
        for full, shard in self.pairs.items():
            full.copy_(shard.full_tensor())

    def part_of(self, whole: Tensor, shard: DTensor) -> Tensor:
        """This rank's part of a tensor that is divided like the twin's parameter `shard`."""
        return _divided(whole, shard, self._mesh).to_local()


class ShardedAdamW(MasterOptimizer):
    """AdamW on the parameters of a `ShardedModel`; what the learner calls of `FP32MasterAdamW`, and the same saved state."""

    def __init__(
        self,
        model: ShardedModel,
        parameters: Iterable[nn.Parameter],
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        ranks: Ranks,
    ) -> None:
        """`parameters`: those of the full model that are trained."""
        self._model, self._ranks = model, ranks
        self._parameters = list(parameters)
        self._shards = [model.pairs[parameter] for parameter in self._parameters]
        self._rounded = [n for n, parameter in enumerate(self._parameters) if parameter.dtype in HALVES]
        self._fused = all(parameter.device.type in FUSED_DEVICES for parameter in self._parameters)
        self._adam = torch.optim.AdamW(
            [{"params": self._shards}], lr=learning_rate, betas=(beta1, beta2), weight_decay=weight_decay, fused=self._fused or None
        )

    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to a norm of at most `max_norm`; returns the norm it had. It was summed over the ranks when it was made."""
        return clip_gradients([_local(shard.grad) for shard in self._shards if shard.grad is not None], max_norm, self._ranks)

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's shares; the full model follows at the end of the step (`ShardedModel.publish`)."""
        self._adam.step()

    def zero_grad(self) -> None:
        """Forget the gradients, and their memory."""
        for shard in self._shards:
            shard.grad = None

    @property
    def bytes_to_come(self) -> int:
        """Memory that the next update will take beyond what is held now: gradients, and moments where there are none yet."""
        gradients = sum(_local(shard).nbytes for shard in self._shards if shard.grad is None)
        return gradients + sum(2 * _local(shard).nbytes for shard in self._shards if shard not in self._adam.state)

    def saved_sizes(self) -> list[int]:
        """Bytes of each storage that a checkpoint holds once moments exist: float32 weights and two moments of each."""
        own = (parameter.untyped_storage() for n, parameter in enumerate(self._parameters) if n not in self._rounded)
        storages = {storage.data_ptr(): storage.nbytes() for storage in own}
        sizes = [4 * parameter.numel() for parameter in self._parameters]
        return [*storages.values(), *(sizes[n] for n in self._rounded), *(size for size in sizes for _ in range(2))]

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as `FP32MasterAdamW` would save it. All ranks call it, rank 0 gets it."""
        state = {
            n: {name: self._collected(self._adam.state[shard][name]) for name in MOMENTS}
            for n, shard in enumerate(self._shards)
            if shard in self._adam.state
        }
        groups = [{**group, "params": list(range(len(self._shards)))} for group in self._adam.state_dict()["param_groups"]]
        masters = self._saved_masters()
        return {"adam": {"state": state, "param_groups": groups}, "masters": masters} if self._ranks.rank == 0 else {}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; a ValueError or KeyError says that it is of other parameters, and nothing was changed."""
        check_saved(state, self._parameters, self._rounded)
        moments, (group,) = state["adam"]["state"], state["adam"]["param_groups"]
        mesh = self._shards[0].device_mesh
        kept = {
            n: {name: value if name == "step" else _divided(value, self._shards[n], mesh) for name, value in moments[n].items()}
            for n in moments
            if n < len(self._shards)
        }
        here = {**group, "params": list(range(len(self._shards))), "fused": self._fused or None}
        self._adam.load_state_dict({"state": kept, "param_groups": [here]})
        for n, saved in zip(self._rounded, state["masters"], strict=True):
            self._parameters[n].copy_(saved)
            _local(self._shards[n]).copy_(self._model.part_of(saved, self._shards[n]))
        rounded = set(self._rounded)
        for n, shard in enumerate(self._shards):
            if n not in rounded:  # the full model is exact, and was restored before
                _local(shard).copy_(self._model.part_of(self._parameters[n], shard))

    def close(self) -> None:
        """Nothing is attached to the parameters."""

    def _all_masters(self) -> list[Tensor]:
        return [self._collected(self._shards[n].detach()) for n in self._rounded]

    def _collected(self, value: Tensor) -> Tensor:
        """A divided tensor as a whole: on rank 0 in host memory, elsewhere nothing of it is kept."""
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.cpu() if self._ranks.rank == 0 else whole.new_empty(0)


def _sharded_parameters(twin: nn.Module) -> list[DTensor]:
    found = list(twin.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in found)  # the root takes what belongs to no layer
    return found  # type: ignore[return-value]


def _divided(whole: Tensor, shard: DTensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that every rank has, divided like `shard`; nothing is sent."""
    return distribute_tensor(whole.detach().to(shard.device, shard.dtype), mesh, shard.placements, src_data_rank=None)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, in place."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part
