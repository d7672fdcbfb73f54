"""New weights for sampling servers: named tensors with a version, through the routes that a server has.

- `tether serve`: start, tensors as safetensors bodies of a limited size (or one folder on a disk that both see), finish with the version.
- vLLM: the same steps through its weight-transfer routes, with Tether's backend in the server (engines/vllm_plugin.py): the tensors go
  through a process group, NCCL between GPUs and gloo otherwise, or through a folder on a disk.

Weights of a model with adapters are published merged. A tied head is not sent twice.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from safetensors.torch import save, save_file
from torch import Tensor

from tether.core.errors import BadInput
from tether.models.endpoint import ModelEndpoint
from tether.models.lora import is_lora, merged
from tether.models.policy import Policy

CHUNK_BYTES = 256 * 2**20
"""Tensors are sent in bodies of about this size."""
UPDATE_TIMEOUT = 600.0
"""Seconds that one call of an update may take: a server first finishes the responses in flight."""


class Publisher(Protocol):
    """Gives a server new weights."""

    def publish(self, endpoint: ModelEndpoint, weights: Mapping[str, Tensor], version: str) -> None: ...


def named_weights(policy: Policy) -> dict[str, Tensor]:
    """The weights as the plain Hugging Face model names them; those of adapters merged."""
    module = merged(policy.module) if is_lora(policy.module) else policy.module
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


class TetherPublisher:
    """To `tether serve`."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: a place that learner and server both see; None sends the tensors over HTTP."""
        self._folder = folder

    def publish(self, endpoint: ModelEndpoint, weights: Mapping[str, Tensor], version: str) -> None:
        endpoint.call("POST", "/start_weight_update", timeout=UPDATE_TIMEOUT)
        if self._folder is None:
            for chunk in chunks(weights):
                endpoint.call("POST", "/update_weights", content=save(chunk), timeout=UPDATE_TIMEOUT)
        else:
            with weights_on_disk(self._folder, weights) as path:
                endpoint.call("POST", "/update_weights", {"path": str(path)}, timeout=UPDATE_TIMEOUT)
        endpoint.call("POST", "/finish_weight_update", {"weight_version": version}, timeout=UPDATE_TIMEOUT)


@contextmanager
def weights_on_disk(folder: Path, weights: Mapping[str, Tensor]) -> Iterator[Path]:
    """The weights as a safetensors file in a folder, for as long as the block lasts."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix="weights-", dir=folder)
    except OSError as error:
        raise BadInput(f"cannot write weights to '{folder}' ({error.strerror or error}); choose another server.weights_folder") from error
    with temporary:
        path = Path(temporary.name).resolve() / "model.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights.items()}, path, {"format": "pt"})
        yield path


def chunks(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors in parts of about CHUNK_BYTES, on the CPU."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        if part and size + tensor.nbytes > CHUNK_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    if part:
        yield part
