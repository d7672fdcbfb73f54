"""A copy of model and training state in host memory, taken between two steps: a checkpoint is written from it while training goes on.

Storages are copied, whole and once. Tensors that share memory (tied weights, fused projections, master weights that are also the saved
weights) share it in the copy, so the files come out as they would from the originals. Nothing in the copy refers to a live tensor, list or
dictionary of the run.

Taking new pages from the system is slow (about 1 GB/s on a virtual machine with an H200), and so is copying into pages that CUDA does not know
(14 GB/s, registered ones 55). So a run on a GPU keeps the memory of its copies, and touches and registers it before the first one (`prepare`). A run
on a CPU gives it back after each checkpoint: there it is the memory that the model trains in.
"""

import copy
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda import cudart
from transformers import PreTrainedModel

from tether.models.hardware import available_memory, synchronise
from tether.models.lora import is_lora

USABLE = 0.8
"""Of the host memory that is free, the share that copies may take."""
TOUCHING_THREADS = 4
REGISTERED_BYTES = 2**20
"""Smaller storages may share a page with others, which is registered once; and they cost nothing."""


class Snapshot(NamedTuple):
    """What a checkpoint is written from."""

    model: PreTrainedModel
    """The model's structure with host copies of the tensors that are saved; it computes nothing."""
    state: dict[str, Any]


class HostMemory:
    """Makes host copies of tensors, in memory that may be used again."""

    def __init__(self, *, reuse: bool) -> None:
        self._reuse = reuse
        self._free: dict[int, list[torch.UntypedStorage]] = defaultdict(list)
        self._copies: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
        """Of the snapshot that is held, by device and address of the storage that was copied."""

    def snapshot(self, model: PreTrainedModel, state: dict[str, Any]) -> Snapshot:
        """Copy both. One snapshot at a time: the one before must have been released."""
        assert not self._copies, "the snapshot before this one is still held"
        taken = Snapshot(self._model(model), self._tree(state))
        for device in {device for device, _ in self._copies}:  # copies into registered memory are under way
            synchronise(device)
        return taken

    def release(self) -> None:
        """The snapshot is no longer needed: its memory serves the next one, or goes back to the system."""
        if self._reuse:
            for storage in self._copies.values():
                self._free[storage.nbytes()].append(storage)
        self._copies = {}

    def fits(self, num_bytes: int) -> bool:
        """Whether a copy of this size finds room beside everything else in host memory; what is held already counts as free."""
        free = available_memory(torch.device("cpu"))
        held = sum(size * len(storages) for size, storages in self._free.items())
        return free is None or num_bytes - held <= USABLE * free

    def prepare(self, sizes: Iterable[int]) -> None:
        """Take storages of these sizes, touch every page, so that copying does not wait for the system to find them, and register them with CUDA."""

        def touched(num_bytes: int) -> torch.UntypedStorage:
            storage = torch.UntypedStorage(num_bytes)
            _as_bytes(storage).numpy().fill(0)  # by numpy, in this thread alone: torch would ask its pool, which the run computes with
            return storage

        registered: list[torch.UntypedStorage] = []
        weakref.finalize(self, _unregister, registered).atexit = False  # the end of the process does it
        with ThreadPoolExecutor(TOUCHING_THREADS) as threads:
            for storage in threads.map(touched, sizes):
                self._free[storage.nbytes()].append(storage)
                large = storage.nbytes() >= REGISTERED_BYTES and torch.cuda.is_available()
                if large and not int(cudart().cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0)):
                    registered.append(storage)  # where that fails, copies are slower

    def _model(self, model: PreTrainedModel) -> PreTrainedModel:
        memo: dict[int, Any] = {}
        for parameter, saved in saved_parameters(model):
            values = self._tensor(parameter.data) if saved else torch.empty_like(parameter.data, device="meta")
            memo[id(parameter)] = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = self._tensor(buffer)
        return copy.deepcopy(model, memo)

    def _tree(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return self._tensor(tree)
        if isinstance(tree, dict):
            return {key: self._tree(value) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(map(self._tree, tree))
        return tree  # a number, a text or None

    def _tensor(self, tensor: Tensor) -> Tensor:
        source = tensor.untyped_storage()
        key = (tensor.device, source.data_ptr())
        host = self._copies.get(key)
        if host is None or not source.nbytes():
            free = self._free.get(source.nbytes())
            host = free.pop() if free else torch.UntypedStorage(source.nbytes())
            _as_bytes(host).copy_(_as_bytes(source), non_blocking=True)
            self._copies[key] = host
        return torch.empty(0, dtype=tensor.dtype).set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())


def saved_parameters(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Parameter, bool]]:
    """Every parameter, and whether a checkpoint holds it: all of a model, of one with adapters the adapters."""
    adapters = is_lora(model)
    for name, parameter in model.named_parameters():
        yield parameter, not adapters or parameter.requires_grad or ".lora_" in name


def storage_bytes(model: PreTrainedModel, state: dict[str, Any]) -> int:
    """The size of a snapshot."""
    tensors = [parameter.data for parameter, saved in saved_parameters(model) if saved]
    storages = {(tensor.device, tensor.untyped_storage().data_ptr()): tensor for tensor in (*tensors, *_tensors(state))}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(value)


def _unregister(storages: list[torch.UntypedStorage]) -> None:
    for storage in storages:
        cudart().cudaHostUnregister(storage.data_ptr())
    storages.clear()


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
