"""Tether's weight-transfer backend inside a vLLM server: `vllm serve ... --weight-transfer-config '{"backend": "tether"}'`.

vLLM finds it through the entry point `vllm.general_plugins`, so Tether must be installed where vLLM is. Named tensors arrive by broadcast in a
process group of torch.distributed that the learner leads (NCCL where both sides compute on GPUs, gloo otherwise), or are read from a
safetensors file. Either way they are loaded as checkpoint tensors, by vLLM's own layerwise reload.

`RequireToken` is middleware for a vLLM that the network can reach.

The module runs in another process than the rest of Tether and imports nothing of it.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

BACKEND = "tether"
TOKEN_VARIABLE = "VLLM_API_KEY"
OPEN_PATH = "/health"
GROUP_TIMEOUT = timedelta(seconds=600)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
"""Of a model's config. vLLM fuses and renames parameters, so their shapes cannot be compared before they are loaded."""
OTHER_SIZE = r"[a-z_]+ is \d+ in the trained model and \d+ in the served one"
"""What a worker says about another model, and the learner finds in vLLM's answer."""


def register() -> None:
    """Make the backend known to vLLM; called in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _backend_class())


class RequireToken:
    """Middleware that wants the token on every route but that of health. vLLM itself asks for it where text is generated, and leaves open what new
    weights arrive through, and a route that calls any method of its workers."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[TOKEN_VARIABLE]}".encode()

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """One connection, as ASGI servers hand it over."""
        sent = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or scope["path"] == OPEN_PATH or hmac.compare_digest(sent, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
        else:  # of a WebSocket, before it is accepted
            await send({"type": "websocket.close", "code": 1008})


def sizes_of(config: Any) -> dict[str, int]:
    """The sizes that a Hugging Face config names; of a model that sees, those of its language model."""
    text = config.get_text_config()
    return {name: value for name in SIZES if isinstance(value := getattr(text, name, None), int)}


def join_group(host: str, port: int, rank: int, size: int, kind: str, *, leads: bool = False) -> Any:
    """A process group of torch.distributed apart from all others; rank 0 leads it and holds its store."""
    import torch.distributed as dist

    store = dist.TCPStore(host, port, size, is_master=leads, timeout=GROUP_TIMEOUT, wait_for_workers=False)
    return _group(store, rank, size, kind)


def _group(store: Any, rank: int, size: int, kind: str) -> Any:
    import torch.distributed as dist

    if kind == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = GROUP_TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, GROUP_TIMEOUT)


def broadcast(group: Any, tensor: Any) -> None:
    """Send a tensor from rank 0 to all others, and wait for it."""
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


def _backend_class() -> Any:
    import torch
    from safetensors import safe_open
    from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class InitInfo(WeightTransferInitInfo):  # type: ignore[misc, unused-ignore]
        """What the learner trains, and where its group is; without a host the model is checked alone."""

        sizes: dict[str, int] = field(default_factory=dict)
        host: str | None = None
        port: int = 0
        size: int = 0
        kind: str = "gloo"

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc, unused-ignore]
        """The tensors that follow in the group, or the file that holds them."""

        names: list[str] = field(default_factory=list)
        dtypes: list[str] = field(default_factory=list)
        shapes: list[list[int]] = field(default_factory=list)
        path: str | None = None

    class TetherWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc, unused-ignore]
        """Receives what Tether's learner publishes."""

        init_info_cls, update_info_cls = InitInfo, UpdateInfo
        group: Any = None

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            own = sizes_of(self.model_config.hf_config)
            for name, trained in init_info.sizes.items():
                if own.get(name, trained) != trained:
                    raise ValueError(f"{name} is {trained} in the trained model and {own[name]} in the served one")
            if init_info.host is None:
                return
            config = self.parallel_config
            rank = 1 + config.data_parallel_index * config.world_size + config.rank
            self.group = join_group(init_info.host, init_info.port, rank, init_info.size, init_info.kind)

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        def receive_weights(self, update_info: UpdateInfo) -> None:
            if update_info.path is not None:
                with safe_open(update_info.path, framework="pt") as opened:
                    self.model.load_weights((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118 - no mapping
                return
            for name, dtype, shape in zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                broadcast(self.group, tensor)
                self.model.load_weights([(name, tensor)])

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            self.group = None

    return TetherWeightTransfer
