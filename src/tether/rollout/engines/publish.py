"""New weights for sampling servers: named tensors with a version, through the routes that a server has.

- `tether serve`: start with the publisher's token and the version, tensors as safetensors bodies of a limited size, finish. A server of the same machine reads them from a file in
  shared memory instead, which is many times as fast as HTTP, and any server can read them from a folder on a disk that both see.
- vLLM: the same steps through its weight-transfer routes, with Tether's backend in the server (engines/vllm_plugin.py): the tensors go
  through a process group, NCCL between GPUs and gloo otherwise, or through a folder on a disk.

Weights of a model with adapters are published merged. A tied head is not sent twice.
"""

import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor

from tether.core.config import cache_folder
from tether.core.errors import BadInput, ModelUnavailable
from tether.core.http import free_port, is_loopback, token_for
from tether.models.endpoint import Conflict, ModelEndpoint, ServerUnreachable
from tether.models.lora import is_lora, merged
from tether.models.policy import Policy
from tether.rollout.engines.vllm_plugin import OTHER_SIZE, broadcast, join_group

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 2**20
"""Tensors are sent in bodies of about this size."""
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_SHARE = 0.8
"""Of what is free there, the most that weights may take."""
UPDATE_TIMEOUT = 600.0
"""Seconds that one call of an update may take: a server first finishes the responses in flight."""
PUBLISHER_VARIABLE = "TETHER_PUBLISH_TOKEN"
PUBLISHER_ADVICE = f"publish as the user who started the server, on its machine, or set {PUBLISHER_VARIABLE} to one secret on both sides"


class Publisher(Protocol):
    """Gives a server new weights."""

    def publish(self, endpoint: ModelEndpoint, weights: Mapping[str, Tensor], version: str) -> None: ...


def named_weights(policy: Policy) -> dict[str, Tensor]:
    """The weights as the plain Hugging Face model names them; those of adapters merged. Of a divided policy all ranks call it, and the first gets
    them, in host memory."""
    if policy.divided is not None:
        return policy.divided.gathered(policy.dtype) or {}
    module = merged(policy.module) if is_lora(policy.module) else policy.module
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


class TetherPublisher:
    """To `tether serve`."""

    def __init__(self, folder: Path | None = None, memory: Path | None = SHARED_MEMORY) -> None:
        """`folder`: a place that learner and server both see; None: shared memory where the server is on this machine, HTTP elsewhere."""
        self._folder, self._memory = folder, memory

    def publish(self, endpoint: ModelEndpoint, weights: Mapping[str, Tensor], version: str) -> None:
        with ExitStack() as files:
            path = self._written(endpoint, weights, files)  # before the update begins: a server waits only so long for the next call
            update = self._start(endpoint, weights, version)
            if path is not None:
                try:
                    endpoint.call("POST", f"/update_weights{update}", {"path": str(path)}, timeout=UPDATE_TIMEOUT)
                except (ServerUnreachable, Conflict):
                    raise
                except BadInput as error:
                    if self._folder is not None:
                        raise
                    self._without_memory(endpoint, error)  # the server is in a container of its own, or another user's
                    path, update = None, self._start(endpoint, weights, version)  # a server abandons what it refuses
            if path is None:
                for chunk in chunks(weights):
                    endpoint.call("POST", f"/update_weights{update}", content=save(chunk), timeout=UPDATE_TIMEOUT)
        endpoint.call("POST", f"/finish_weight_update{update}", delays=(), timeout=UPDATE_TIMEOUT)

    @staticmethod
    def _start(endpoint: ModelEndpoint, weights: Mapping[str, Tensor], version: str) -> str:
        """Begin an update, and refer to it; weights of another model are refused here. The token is that of this user on a server of this machine,
        or the one that the server wants of every client."""
        own = token_for(endpoint.base, PUBLISHER_VARIABLE)
        tokens = [own] if own else [own_token() if is_loopback(urlsplit(endpoint.base).hostname or "") else None, endpoint.token]
        refused = ModelUnavailable(f"the server at {endpoint.base} takes weights with the publisher's token; {PUBLISHER_ADVICE}")
        parameters = {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in weights.items()}
        for token in filter(None, tokens):
            body = {"token": token, "weight_version": version, "parameters": parameters}
            try:
                answer = endpoint.call("POST", "/start_weight_update", body, timeout=UPDATE_TIMEOUT)
            except ServerUnreachable:
                raise
            except ModelUnavailable:
                continue
            if "update" not in answer:
                raise BadInput(
                    f"the server at {endpoint.base} is an older tether serve, which takes weights in another way; start it with this version"
                )
            return f"?update={answer['update']}"
        raise refused

    def _written(self, endpoint: ModelEndpoint, weights: Mapping[str, Tensor], files: ExitStack) -> Path | None:
        """A file for the server to read, for as long as `files` are open; None where the weights go over HTTP."""
        if self._folder is not None:
            return files.enter_context(weights_on_disk(self._folder, weights))
        if self._memory is None or not is_loopback(urlsplit(endpoint.base).hostname or "") or not self._memory.is_dir():
            return None
        size, free = sum(tensor.nbytes for tensor in weights.values()), shutil.disk_usage(self._memory).free
        try:
            if size > SHARED_MEMORY_SHARE * free:
                raise BadInput(f"they have {size / 1e9:.1f} GB, and {self._memory} has {free / 1e9:.1f} free")
            return files.enter_context(weights_on_disk(self._memory, weights))
        except BadInput as error:
            self._without_memory(endpoint, error)
            return None

    def _without_memory(self, endpoint: ModelEndpoint, why: BadInput) -> None:
        """Use HTTP from now on, and say so once."""
        _LOG.warning("weights go to %s over HTTP, not through shared memory: %s", endpoint.base, why)
        self._memory = None


def own_token() -> str | None:
    """This user's secret for publishing to servers of this user on this machine: a file that nobody else can read, made when it is first
    needed. None where it can be neither read nor made."""
    path = cache_folder("publish") / "token"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, made = tempfile.mkstemp(dir=path.parent)  # readable by this user alone
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32))
            try:
                os.link(made, path)  # complete, or not there; the first of several processes wins
            except FileExistsError:
                pass
            finally:
                os.unlink(made)
        return path.read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeError) as error:
        _LOG.warning("the publisher's token '%s' cannot be used (%s); set %s to one secret on both sides", path, error, PUBLISHER_VARIABLE)
        return None


def publisher_tokens(token: str | None) -> list[str]:
    """What a server takes weights for: the secret of the environment variable, or else this user's and the server's own token."""
    chosen = os.environ.get(PUBLISHER_VARIABLE)
    return [chosen] if chosen else [known for known in (own_token(), token) if known]


@contextmanager
def weights_on_disk(folder: Path, weights: Mapping[str, Tensor]) -> Iterator[Path]:
    """The weights as a safetensors file in a folder, for as long as the block lasts."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix="weights-", dir=folder)
    except OSError as error:
        raise _cannot_write(folder, error.strerror or error) from error
    with temporary:
        path = Path(temporary.name).resolve() / "model.safetensors"
        try:
            save_file({name: tensor.cpu().contiguous() for name, tensor in weights.items()}, path, {"format": "pt"})
        except (OSError, SafetensorError) as error:  # a full disk
            raise _cannot_write(folder, error) from error
        yield path


def _cannot_write(folder: Path, why: object) -> BadInput:
    return BadInput(f"cannot write weights to '{folder}' ({why}); free some space, or choose another server.weights_folder")


def chunks(weights: Mapping[str, Tensor], device: torch.device | str = "cpu") -> Iterator[dict[str, Tensor]]:
    """The tensors in parts of about CHUNK_BYTES, on a device."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        if part and size + tensor.nbytes > CHUNK_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor.to(device).contiguous()
        size += tensor.nbytes
    if part:
        yield part


class VllmPublisher:
    """To vLLM with Tether's backend: pause, start, update, finish, reset the prefix cache, resume."""

    def __init__(self, folder: Path | None, device: torch.device, sizes: Mapping[str, int]) -> None:
        """`folder`: a place that learner and server both see; None sends the tensors through a process group. `device`: the learner's. `sizes`: of
        the model that is trained."""
        self._folder, self._sizes, self._is_checked = folder, dict(sizes), False
        self._group: Any = None
        self._kind, self._device = ("nccl", device) if device.type == "cuda" else ("gloo", torch.device("cpu"))

    def publish(self, endpoint: ModelEndpoint, weights: Mapping[str, Tensor], version: str) -> None:
        if not self._is_checked:
            self._check_model(endpoint)
        if self._folder is None and self._group is None:
            self._join(endpoint)
        with weights_on_disk(self._folder, weights) if self._folder is not None else nullcontext() as path:
            endpoint.call("POST", "/pause?mode=wait", timeout=UPDATE_TIMEOUT)
            endpoint.call("POST", "/start_weight_update", timeout=UPDATE_TIMEOUT)
            if path is not None:
                endpoint.call("POST", "/update_weights", {"update_info": {"path": str(path)}}, delays=(), timeout=UPDATE_TIMEOUT)
            else:
                self._broadcast(endpoint, weights)
        endpoint.call("POST", "/finish_weight_update", {"weight_version": version}, delays=(), timeout=UPDATE_TIMEOUT)
        endpoint.call("POST", "/reset_prefix_cache", timeout=UPDATE_TIMEOUT)
        endpoint.call("POST", "/resume", timeout=UPDATE_TIMEOUT)

    def _check_model(self, endpoint: ModelEndpoint) -> None:
        """Refuse a server of another model before it is paused: vLLM loads weights in place, and stays paused where that fails."""
        try:
            endpoint.call("POST", "/init_weight_transfer_engine", {"init_info": {"sizes": self._sizes}}, delays=(), timeout=UPDATE_TIMEOUT)
        except ServerUnreachable as error:  # vLLM answers 500 for whatever a worker raises
            if (found := re.search(OTHER_SIZE, str(error))) is None:
                raise
            raise BadInput(f"the server at {endpoint.base} serves another model: {found[0]}") from error
        self._is_checked = True

    def _join(self, endpoint: ModelEndpoint) -> None:
        """Found the group of the learner and the server's workers: the server joins while this thread waits for it."""
        size = 1 + int(endpoint.call("GET", "/get_world_size")["world_size"])
        host, port = own_address(endpoint.base), free_port("")
        info = {"host": host, "port": port, "size": size, "kind": self._kind}
        with ThreadPoolExecutor(1) as threads:
            joined = threads.submit(
                endpoint.call, "POST", "/init_weight_transfer_engine", {"init_info": info}, delays=(), timeout=UPDATE_TIMEOUT
            )
            self._group = _while_server_works(joined, lambda: join_group(host, port, 0, size, self._kind, leads=True))

    def _broadcast(self, endpoint: ModelEndpoint, weights: Mapping[str, Tensor]) -> None:
        for part in chunks(weights, self._device):
            info = {
                "names": list(part),
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in part.values()],
                "shapes": [list(tensor.shape) for tensor in part.values()],
            }

            def send(part: Mapping[str, Tensor] = part) -> None:
                for tensor in part.values():
                    broadcast(self._group, tensor)

            with ThreadPoolExecutor(1) as threads:
                received = threads.submit(
                    endpoint.call, "POST", "/update_weights", {"update_info": info}, delays=(), timeout=UPDATE_TIMEOUT
                )
                _while_server_works(received, send)


def _while_server_works(request: "Future[dict[str, Any]]", work: Callable[[], T]) -> T:
    """The result of `work`, which needs the server's part of it; an error of the server comes first, as it is the cause."""
    try:
        result = work()
    except RuntimeError as error:  # torch.distributed: the other side has gone
        request.result()
        raise ServerUnreachable(f"the weights could not be sent ({' '.join(str(error).split())[:200]})") from error
    request.result()
    return result


def own_address(url: str) -> str:
    """The address of this machine on its way to a server: the name of a machine or container is often unknown to others."""
    parts = urlsplit(url)
    ways = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, place = min(ways, key=lambda way: way[0] != socket.AF_INET)
    with socket.socket(family, kind, protocol) as unsent:
        unsent.connect(place)
        return str(unsent.getsockname()[0])


def with_head(weights: Mapping[str, Tensor], policy: Policy) -> dict[str, Tensor]:
    """The weights with a tied head under its own name: a server that keeps the head apart needs it, others skip it."""
    head = policy.module.get_output_embeddings()
    named = dict(weights)
    if isinstance(head, torch.nn.Linear) and named and "lm_head.weight" not in named:
        tied = next(name for name, parameter in policy.module.named_parameters() if parameter is head.weight)
        named["lm_head.weight"] = named.get(tied, head.weight).detach().clone()
    return named
