"""FSDP (torch's `fully_shard`): weights, gradients and optimiser state of the update divided among the ranks, for models of which one card
does not hold all that.

Of a divided model a rank holds a share of each float32 weight, of its gradient and of its two moments. A layer's weights are gathered when the
layer is called and let go afterwards, so layers are computed inside calls of their modules (`LlamaBackbone.through_modules`), and everything of a
micro-batch, the language head included, inside one call of `ShardedModel`. There are two ways to have one:

- **beside** a full model, where the run samples natively. The full model, in the precision that the run computes in, plays, scores and is saved: it
  is the same object as without FSDP, and no part of a run but the learner knows of its divided twin. After the updates of a step it gets the
  twin's weights (`ShardedModel.publish`).
- **alone** (`divided_policy`), where servers sample: no device holds whole weights. The run's policy is the divided model itself, and what scores
  passes through it in step with the other ranks (`ShardedModel.in_step`). The first rank reads the weights into its host memory and hands them out
  one at a time; for servers and checkpoints they are gathered there, one at a time.

Every rank must make the same calls, because every call is an exchange. The learner sees to it that all ranks have equally many micro-batches;
`in_step` lets ranks that have fewer passes take part in those of the others. A rank that fails between two exchanges of a pass cannot tell the
others, so that ends the run: RankFailure, and --resume.

Optimiser state is saved whole and in the form of `FP32MasterAdamW`: a checkpoint can be continued on any number of ranks, with or without FSDP.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tether.core.errors import BadInput, RankFailure
from tether.models.fast.backbone import called
from tether.models.fast_path import fast_path_report
from tether.models.hardware import forget_failed
from tether.models.load import LoadedModel
from tether.models.policy import Policy
from tether.training.distributed.ranks import Ranks
from tether.training.masters import LowBits, joined
from tether.training.optim import FUSED_DEVICES, HALVES, MOMENTS, MasterOptimizer, check_saved

PROBED_LAYERS = 2
"""A divided model is probed on its first layers: so many, or as many as it takes to have one of every kind."""

Result = TypeVar("Result")


class _Root(nn.Module):
    """The outermost call: what is computed in it finds the weights that belong to no layer in place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Tensor | None]) -> Tensor | None:
        return compute()


class ShardedModel:
    """A model that is divided among the ranks, beside a full one or alone."""

    policy: Policy
    """The handle on the divided model; it computes inside a call or `in_step` alone."""

    def __init__(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype, ranks: Ranks, *, full: bool) -> None:
        """`model`: the full one, or without `full` one without memory (on device meta), whose weights are still to be loaded; `dtype` is what the
        divided one computes in."""
        self._layer_names = [name for name, layer in model.named_modules() if isinstance(layer, GradientCheckpointingLayer)]
        if not self._layer_names:
            kind = model.config.model_type
            raise BadInput(f"models of type '{kind}' do not say what their layers are; train with learner.sharding=zero1")
        self.dtype, self._ranks, self._device = dtype, ranks, device
        self._model, self.is_alone = model, not full
        self._mesh = init_device_mesh(device.type, (ranks.size,))
        held = model.dtype
        precision = MixedPrecisionPolicy(
            param_dtype=dtype if dtype != held and dtype in HALVES else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # One layer at a time is there whole, then divided.
        layers = {name: model.get_submodule(name) for name in self._layer_names}
        twin: PreTrainedModel = self._copied(model, layers.values())
        for name, layer in layers.items():
            twin.set_submodule(name, self._copied(layer))
            fully_shard(twin.get_submodule(name), mesh=self._mesh, mp_policy=precision)
        self._root = _Root(twin)
        fully_shard(self._root, mesh=self._mesh, mp_policy=precision)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):  # a sum over the ranks, not a mean: the weights of tokens are those of the whole minibatch
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.twin = twin
        """The divided model."""
        self._shards = {name: _sharded(parameter) for name, parameter in twin.named_parameters()}
        # Every parameter of the full model with the divided one, in their order; alone, the divided ones stand for themselves.
        originals = model.parameters() if full else self._shards.values()
        self.pairs: dict[Tensor, DTensor] = dict(zip(originals, self._shards.values(), strict=True))
        self._in_step = self._is_idle = self._passing = False
        self._layers = [twin.get_submodule(name) for name in self._layer_names]
        self._layers[0].register_forward_pre_hook(self._begin_pass, prepend=True)  # before FSDP's own
        self._layers[-1].register_forward_hook(self._end_pass)

    @classmethod
    def beside(cls, policy: Policy, dtype: torch.dtype | None, ranks: Ranks) -> "ShardedModel":
        """The twin of a policy's model, which is cast to `dtype`, in which both compute; the twin keeps the values from before."""
        twin = cls(policy.module, policy.device, dtype or policy.dtype, ranks, full=True)
        for parameter in policy.module.parameters():
            parameter.data = parameter.data.to(twin.dtype)
        twin.policy = policy.twin(twin.twin)
        return twin

    def __call__(self, compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` returns, with gradient; all ranks call it at the same time."""
        found: Tensor = self._root(compute)
        return found

    @torch.no_grad()
    def publish(self) -> None:
        """Give the full model, where there is one, the twin's weights, one after the other."""
        if not self.is_alone:
            for full, shard in self.pairs.items():
                full.copy_(shard.full_tensor())

    def part_of(self, whole: Tensor, shard: DTensor) -> Tensor:
        """This rank's part of a tensor that is divided like the parameter `shard`."""
        return _divided(whole, shard, self._mesh).to_local()

    # ------------------------------------------------------------------------------------------------------------- alone

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor] | None) -> None:
        for name in self._ranks.broadcast_object(lambda: list(weights or ())):
            shard = self._shards[name]
            whole = torch.empty(shard.shape, dtype=shard.dtype, device=self._device)
            if weights is not None and self._ranks.rank == 0:
                whole.copy_(weights[name])
            self._ranks.broadcast([whole], [0])
            local_part(shard).copy_(self.part_of(whole, shard))

    @torch.no_grad()
    def gathered(self, dtype: torch.dtype) -> dict[str, Tensor] | None:
        found = {}
        for name, shard in self._shards.items():
            whole = _whole(shard, dtype)
            if self._ranks.rank == 0:
                found[name] = whole.cpu()
        return found if self._ranks.rank == 0 else None

    def filled(self, weights: Mapping[str, Tensor]) -> PreTrainedModel:
        """The whole model with these weights, as they are."""
        model: PreTrainedModel = _rebuilt(self._model, lambda name, _: weights[name], torch.device("cpu"))
        return model

    def in_step(self, work: Callable[[], Result]) -> Result:
        """What `work` returns. Before each pass through the layers the ranks tell each other that there is one, so that a rank whose work is done
        can take part in those of the others, until all are done."""
        if self._in_step:
            return work()
        kept: list[Result] = []
        failures: list[BaseException] = []

        def until_all_are_done() -> None:
            try:
                with self._ranks.exchanging("scoring"):
                    kept.append(work())
            except RankFailure:
                raise
            except BaseException as error:
                if self._passing:  # the others wait for this rank's part of the pass
                    raise RankFailure(
                        f"rank {self._ranks.rank} of {self._ranks.size} failed in a pass through the divided model "
                        f"({type(error).__name__}: {' '.join(str(error).split())[:160]}); where memory ran out, lower learner.micro_tokens; "
                        "continue from the last checkpoint with --resume"
                    ) from error
                failures.append(error)
            while any(self._ranks.all_gather(False)):
                self._idle_pass()

        self._in_step = True
        try:
            with self._ranks.interrupts.exchanging(), self._ranks.exchanging("scoring"), torch.no_grad():
                self._root(until_all_are_done)
                self._let_go()
        finally:
            self._in_step = False
        if failures:
            raise failures[0]
        return kept[0]

    def _begin_pass(self, *_: object) -> None:
        if self._in_step and not self._is_idle:
            self._ranks.all_gather(True)
            self._passing = True

    def _end_pass(self, *_: object) -> None:
        self._passing = False

    def warm_up(self) -> None:
        """Have torch make the tensors that it gathers weights into: made while something is scored, they could not be trained with."""
        with torch.no_grad():
            self._root(self._idle_pass)
        self._let_go()

    def _let_go(self) -> None:
        """What belongs to no layer would stay whole until the next update."""
        assert isinstance(self._root, FSDPModule)
        self._root.reshard()

    def _idle_pass(self) -> None:
        """Gather every layer, as a pass does, and compute nothing."""
        self._is_idle = True
        for layer in self._layers:
            called(layer, lambda: None)
        self._is_idle = False

    def _copied(self, part: nn.Module, without: Iterable[nn.Module] = ()) -> Any:
        """A copy of a part of the model, without some layers; alone, on the device and with weights that are still to be loaded."""
        if not self.is_alone:
            return copy.deepcopy(part, {id(layer): nn.Module() for layer in without})

        def allocated(name: str, parameter: nn.Parameter) -> Tensor:
            return torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)

        return _rebuilt(part, allocated, self._device, without)

    def probed(self, tokenizer: Any, max_positions: int | None) -> Policy:
        """A policy over the first layers, gathered on this device, to be probed in place of the whole model."""
        model, (parent, *others) = self._model, {name.rpartition(".")[0] for name in self._layer_names}
        if others or not isinstance(model.get_submodule(parent), nn.ModuleList):
            raise BadInput(f"models of type '{model.config.model_type}' have no one list of layers; train with learner.sharding=zero1")
        layers, config = [model.get_submodule(name) for name in self._layer_names], model.config.get_text_config()
        named = getattr(config, "layer_types", None) or [""] * len(layers)
        kinds = [(type(each), [p.shape for p in each.parameters()], name) for each, name in zip(layers, named, strict=True)]
        count = min(len(layers), max(PROBED_LAYERS, *(kinds.index(kind) + 1 for kind in kinds)))

        def gathered(name: str, _: nn.Parameter) -> Tensor:
            return _whole(self._shards[name], self.dtype)

        shallow: PreTrainedModel = _rebuilt(model, gathered, self._device, layers[count:])
        stack = shallow.get_submodule(parent)
        assert isinstance(stack, nn.ModuleList)
        del stack[count:]
        shortened = shallow.config.get_text_config()
        if vars(shortened).get("layer_types"):  # some configs compute theirs from the number
            shortened.layer_types = shortened.layer_types[:count]
        shortened.num_hidden_layers = count
        return Policy(shallow, tokenizer, max_positions=max_positions)


def divided_policy(
    load: Callable[[], LoadedModel],
    device: torch.device,
    dtype: torch.dtype,
    ranks: Ranks,
    *,
    max_positions: int | None = None,
    is_trained: bool = True,
) -> Policy:
    """A policy whose weights no device holds whole. All ranks call it at the same time.

    Args:
        load: gives model and tokenizer in host memory; called on the first rank alone.
        device: where the parts are held and computed with.
        dtype: what the model computes in; its weights are held in what they were loaded in.
        ranks: that divide it.
        max_positions: as for a policy.
        is_trained: whether it gets gradients.
    """
    weights: dict[str, Tensor] = {}

    def read() -> tuple[PreTrainedModel, Any]:
        model, tokenizer = load()
        weights.update({name: parameter.detach() for name, parameter in model.named_parameters()})
        structure = _rebuilt(model, lambda _, parameter: torch.empty_like(parameter, device="meta"), torch.device("cpu"))
        return structure.requires_grad_(is_trained), tokenizer

    structure, tokenizer = ranks.broadcast_object(read)
    divided = ShardedModel(structure, device, dtype, ranks, full=False)
    divided.load(weights or None)
    weights.clear()
    probed = divided.probed(tokenizer, max_positions)
    fast_path_report(probed)  # asks for every probe: the divided model cannot be probed
    divided.policy = probed.twin(divided.twin, divided)
    del probed
    forget_failed(device)  # what was gathered for the probes hangs in cycles of objects
    divided.warm_up()
    return divided.policy


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
        """`parameters`: those that are trained, of the full model where there is one."""
        self._model, self._ranks = model, ranks
        self._parameters = list(parameters)
        self._shards = [model.pairs[parameter] for parameter in self._parameters]
        self._rounded = list(range(len(self._parameters))) if model.dtype in HALVES else []
        self._fused = all(parameter.device.type in FUSED_DEVICES for parameter in self._parameters)
        self._adam = torch.optim.AdamW(
            [{"params": self._shards}], lr=learning_rate, betas=(beta1, beta2), weight_decay=weight_decay, fused=self._fused or None
        )

    def clip(self, max_norm: float) -> Tensor:
        """Let `step` scale the gradient down to a norm of at most `max_norm`; returns the norm. It was summed over the ranks when it was made."""
        return self._clip(self._gradients, max_norm)

    @property
    def _gradients(self) -> list[Tensor]:
        return [local_part(shard.grad) for shard in self._shards if shard.grad is not None]

    @torch.no_grad()
    def step(self, finite: Tensor | None = None) -> None:
        """Update this rank's shares where everything is finite; the full model follows at the end of the step (`ShardedModel.publish`)."""
        self._update(self._gradients, finite, on_device=False)  # torch mixes divided tensors with none that are not

    def zero_grad(self) -> None:
        """Forget the gradients, and their memory."""
        for shard in self._shards:
            shard.grad = None

    @property
    def bytes_to_come(self) -> int:
        """Memory that the next update will take beyond what is held now: gradients, and moments where there are none yet."""
        gradients = sum(local_part(shard).nbytes for shard in self._shards if shard.grad is None)
        return gradients + sum(2 * local_part(shard).nbytes for shard in self._shards if shard not in self._adam.state)

    def saved_sizes(self) -> list[int]:
        """Bytes of each storage that a checkpoint is written from once moments exist: weights, master weights and two moments of each."""
        sizes = [4 * parameter.numel() for parameter in self._parameters]
        if self._model.is_alone:  # gathered, each in memory of its own
            weights = [self._model.dtype.itemsize * parameter.numel() for parameter in self._parameters]
        else:
            weights = list(
                {each.data_ptr(): each.nbytes() for each in (parameter.untyped_storage() for parameter in self._parameters)}.values()
            )
        return [*weights, *(sizes[n] for n in self._rounded), *(size for size in sizes for _ in range(2))]

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as `FP32MasterAdamW` would save it. All ranks call it, rank 0 gets it."""
        state = {
            n: {name: self._collected(self._adam.state[shard][name]) for name in MOMENTS}
            for n, shard in enumerate(self._shards)
            if shard in self._adam.state
        }
        groups = [{**group, "params": list(range(len(self._shards)))} for group in self._adam.state_dict()["param_groups"]]
        masters = self._all_masters()
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
            if isinstance(saved, LowBits):
                rounded = _whole(self._shards[n], self._model.dtype) if self._model.is_alone else self._parameters[n]
                saved = joined(rounded, saved)
            local_part(self._shards[n]).copy_(self._model.part_of(saved, self._shards[n]))
            if not self._model.is_alone:
                self._parameters[n].copy_(saved)
        if not self._rounded and not self._model.is_alone:  # the full model is exact, and was restored before
            for parameter, shard in zip(self._parameters, self._shards, strict=True):
                local_part(shard).copy_(self._model.part_of(parameter, shard))

    def close(self) -> None:
        """Nothing is attached to the parameters."""

    def _all_masters(self) -> list[Tensor]:
        return [self._collected(self._shards[n].detach()) for n in self._rounded]

    def _collected(self, value: Tensor) -> Tensor:
        """A divided tensor as a whole: on rank 0 in host memory, elsewhere nothing of it is kept."""
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.cpu() if self._ranks.rank == 0 else whole.new_empty(0)


def _sharded(parameter: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor)  # the root takes what belongs to no layer
    return parameter


def _divided(whole: Tensor, shard: DTensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that every rank has, divided like `shard`; nothing is sent."""
    return distribute_tensor(whole.detach().to(shard.device, shard.dtype), mesh, shard.placements, src_data_rank=None)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, in place."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


@torch.no_grad()
def _whole(shard: DTensor, dtype: torch.dtype) -> Tensor:
    """A divided tensor as a whole; all ranks call it at the same time."""
    cast = shard.detach().to(dtype)
    assert isinstance(cast, DTensor)
    return cast.full_tensor()


def _rebuilt(
    part: nn.Module, weight: Callable[[str, nn.Parameter], Tensor], device: torch.device, without: Iterable[nn.Module] = ()
) -> Any:
    """A copy of a module on another device with other weights, by name; some of its layers are left empty. What is tied stays tied."""
    memo: dict[int, Any] = {id(layer): nn.Module() for layer in without}
    left_out = {id(parameter) for layer in without for parameter in layer.parameters()}
    for name, parameter in part.named_parameters():
        if id(parameter) not in left_out:
            memo[id(parameter)] = nn.Parameter(weight(name, parameter), requires_grad=parameter.requires_grad)
    memo |= {id(buffer): buffer.to(device, copy=True) for buffer in part.buffers()}
    return copy.deepcopy(part, memo)
