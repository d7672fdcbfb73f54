"""New weights for a served model, in the steps that vLLM's routes have: start, update as often as needed, finish with a version.

Between start and finish requests wait, so no client is served a mixture. An update names its tensors as the Hugging Face model does; one
that is cut off leaves the server paused, and the next start begins again. Finish refuses an update that left out a parameter.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor
from transformers import PreTrainedModel

from tether.core.errors import BadInput


class WeightUpdates:
    """The weights of a model that clients may replace, with their version."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self.version = "0"
        """The label of the weights; "0" for those that the server began with."""
        self._outstanding: set[str] | None = None
        """Parameters that the update in progress has not brought; None while there is none."""

    @property
    def in_progress(self) -> bool:
        return self._outstanding is not None

    def start(self) -> None:
        """Begin an update, or begin again with one that was cut off."""
        self._outstanding = {name for name, _ in self._module.named_parameters()}

    def update_from_bytes(self, data: bytes) -> int:
        """Take the tensors of a safetensors file; returns how many."""
        try:
            return self._update(load(data))
        except SafetensorError as error:
            raise BadInput(f"the body is no safetensors file ({error}); send one with Content-Type: application/octet-stream") from error

    def update_from_disk(self, path: Path) -> int:
        """Take the tensors of a .safetensors file, or of every such file of a folder, on this machine; returns how many."""
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise BadInput(f"folder '{path}' holds no .safetensors file; write the model there first")
        count = 0
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    count += self._update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 - no mapping
            except (OSError, SafetensorError) as error:
                raise BadInput(f"cannot read weights from '{file}' on the server: {error}; give a path that the server can read") from error
        return count

    def finish(self, version: str) -> None:
        """Label the weights; every parameter must have been brought."""
        if self._outstanding is None:
            raise BadInput("no weight update was started; call /start_weight_update first")
        if self._outstanding:
            raise BadInput(f"the update left out {len(self._outstanding)} parameters, {min(self._outstanding)} among them; send all")
        self._outstanding = None
        self.version = version

    @torch.no_grad()
    def _update(self, tensors: Mapping[str, Tensor]) -> int:
        if self._outstanding is None:
            raise BadInput("no weight update was started; call /start_weight_update first")
        own = self._module.state_dict(keep_vars=True)  # also the second names of tied weights
        for name, tensor in sorted(tensors.items(), key=lambda item: item[0]):  # a file is read in no fixed order
            if name not in own:
                raise BadInput(f"the served model has no parameter '{name}'; serve the model that is trained")
            if own[name].shape != tensor.shape:
                raise BadInput(
                    f"parameter '{name}' has shape {list(tensor.shape)} in the update and {list(own[name].shape)} in the served model; "
                    "serve the model that is trained"
                )
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
            self._outstanding.discard(name)
        return len(tensors)
