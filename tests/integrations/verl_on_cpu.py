"""verl on a machine without GPUs: a platform `cpu` and a rollout backend `tiny`, registered where verl lets plug-ins register theirs.

    VERL_USE_EXTERNAL_MODULES=verl_on_cpu VERL_PLATFORM=cpu python -m verl.trainer.main_ppo ...

verl has neither. Everything else of a run is verl's own: trainer, TransferQueue, agent-loop workers, FSDP actor (over gloo), replay buffer.
"""

import asyncio
import contextlib
import types
from collections.abc import Iterator
from typing import Any

import ray
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


class _Device(types.ModuleType):
    """What verl calls of `torch.cuda`, where there is no memory to manage."""

    is_available = staticmethod(lambda: False)
    get_rng_state, set_rng_state = staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)
    mem_get_info = staticmethod(lambda *args: (0, 0))
    get_device_name = staticmethod(lambda *args: "cpu")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """A process is a device. Ray counts them as GPUs, which the run declares (`ray_init.num_gpus`)."""

    device_name = vendor_name = "cpu"
    device_module = _Device("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing


PlatformCPU.__abstractmethods__ = frozenset()


@ray.remote
class TinyServer:
    """An inference server: transformers' module, one token at a time."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self._model, self._tokenizer = AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
        self._version, self._random = 0, torch.Generator().manual_seed(0)

    async def load(self, weights: dict[str, torch.Tensor], version: int) -> None:
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        self._version = version

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **others: Any) -> TokenOutput:
        tokens, logprobs, stops = [], [], list(sampling_params.get("stop") or ())
        fed, cache = torch.tensor([prompt_ids]), None
        while len(tokens) < int(sampling_params.get("max_tokens", 40)):
            with torch.no_grad():
                output = self._model(input_ids=fed, past_key_values=cache, use_cache=True)
            logp = torch.log_softmax(output.logits[0, -1].float(), -1)
            token = int(torch.multinomial(logp.exp(), 1, generator=self._random))
            tokens.append(token)
            logprobs.append(float(logp[token]))
            fed, cache = torch.tensor([[token]]), output.past_key_values
            if token == self._tokenizer.eos_token_id or any(stop in self._tokenizer.decode(tokens) for stop in stops):
                break
            await asyncio.sleep(0)
        return TokenOutput(token_ids=tokens, log_probs=logprobs, stop_reason="completed", extra_fields={"global_steps": self._version})

    async def nothing(self, *args: Any, **kwargs: Any) -> None: ...

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing


class TinyReplica(RolloutReplica):
    """One server for each replica."""

    async def launch_servers(self) -> None:
        name = f"tiny-server-{self.replica_rank}"
        self._server_handle = TinyServer.options(name=name, num_cpus=0).remote(self.model_config.path)
        self.servers, self._server_address = [self._server_handle], name


class TinyAdapter(BaseRollout):
    """Inside an actor worker: hands the actor's weights to the server of this rank."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **kwargs: Any) -> None:
        whole = {name: tensor.detach().cpu().clone() for name, tensor in weights}
        await ray.get_actor(f"tiny-server-{torch.distributed.get_rank()}").load.remote(whole, int(global_steps or 0))


def _init_process_group(backend: str, *args: Any, _init: Any = torch.distributed.init_process_group, **kwargs: Any) -> None:
    """verl asks for the backends of the CPU and of the device, which are one here."""
    _init("gloo", *args, **kwargs)


torch.distributed.init_process_group = _init_process_group
RolloutReplicaRegistry.register("tiny", lambda: TinyReplica)
rollout_base._ROLLOUT_REGISTRY["tiny", "async"] = f"{__name__}.TinyAdapter"
