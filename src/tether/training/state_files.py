"""What resuming needs, on disk.

    state.pt                     the step and all numbers and texts; tensors by their type and shape alone
    state-00001.safetensors ...  the tensors, under their place in the state, such as learner/optimizers/policy/adam/state/0/exp_avg

Master weights of a model that computes in bfloat16 are there in 16 bits, which with the weights in model/ are exact (masters.py). Moments are there
as they are, or rounded to bfloat16 (`checkpoint.moments`). A state.pt that holds its tensors itself is one of an earlier version.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tether.models.tensor_files import Entry, TensorFile, entry_of, shared_out
from tether.runs.checkpoints import STATE
from tether.training.masters import LowBits, in_bfloat16, low_pieces

STATE_TENSORS = "state-*.safetensors"
"""The pattern of their names."""
EXCEPTIONS = "masters_exceptions"
MOMENTS = ("exp_avg", "exp_avg_sq")


class StateFiles:
    """The files of one state: first those of tensors are written (`files`), then `write_rest`."""

    def __init__(self, folder: Path, state: Mapping[str, Any], moments: str) -> None:
        """`moments`: float32 or bfloat16."""
        self._folder, self._moments = folder, moments
        self._entries: dict[str, Entry] = {}
        self._exceptions: dict[str, list[Tensor]] = {}
        """Of master weights, by their place; found when they are written."""
        self._tree = self._without_tensors(state, "")
        self.files: list[TensorFile] = shared_out(self._entries, lambda number: folder / f"state-{number:05d}.safetensors")

    def write_rest(self) -> None:
        """Write state.pt, the last file."""
        torch.save({**self._tree, EXCEPTIONS: self._exceptions}, self._folder / STATE)

    def _without_tensors(self, tree: Any, place: str, *, in_halves: bool = False) -> Any:
        if isinstance(tree, Tensor):
            entry = self._entries[place] = self._entry(tree, place, in_halves)
            return torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        if isinstance(tree, Mapping):
            return {key: self._without_tensors(value, f"{place}/{key}", in_halves=key == "masters") for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(self._without_tensors(value, f"{place}/{number}", in_halves=in_halves) for number, value in enumerate(tree))
        return tree  # a number, a text or None

    def _entry(self, tensor: Tensor, place: str, in_halves: bool) -> Entry:
        if in_halves:
            return Entry(torch.int16, tensor.shape, partial(self._low, tensor, place))
        if self._moments == "bfloat16" and place.rpartition("/")[2] in MOMENTS and tensor.dtype == torch.float32:
            return Entry(torch.bfloat16, tensor.shape, partial(in_bfloat16, tensor))
        return entry_of(tensor)

    def _low(self, master: Tensor, place: str) -> Iterator[Tensor]:
        found: list[tuple[Tensor, Tensor]] = []
        yield from low_pieces(master, found)
        self._exceptions[place] = [torch.cat(parts) for parts in zip(*found, strict=True)]


def read_state(folder: Path, *, mapped: bool) -> dict[str, Any]:
    """The state of a folder; `mapped` leaves tensors in their files until they are used."""
    state: dict[str, Any] = torch.load(folder / STATE, map_location="cpu", weights_only=True, mmap=mapped)
    exceptions = state.pop(EXCEPTIONS, None)
    if exceptions is None:
        return state
    found: dict[str, Any] = {}
    for path in sorted(folder.glob(STATE_TENSORS)):
        with safe_open(path, "pt") as file:
            for place in file.keys():  # noqa: SIM118 - it is no dictionary
                tensor = file.get_tensor(place)
                found[place] = tensor if mapped else tensor.clone()
    found |= {place: LowBits(found[place], *rest) for place, rest in exceptions.items()}
    return {key: _with_tensors(value, f"/{key}", found.pop) for key, value in state.items()}


def _with_tensors(tree: Any, place: str, take: Callable[[str], Any]) -> Any:
    if isinstance(tree, Tensor):
        return take(place)
    if isinstance(tree, dict):
        return {key: _with_tensors(value, f"{place}/{key}", take) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_with_tensors(value, f"{place}/{number}", take) for number, value in enumerate(tree))
    return tree
