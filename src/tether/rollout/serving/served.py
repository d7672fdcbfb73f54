"""A model that is served: its tokenizer and chat format, its engine thread, its weights and their version. The routes ask nothing else.

New weights come in the steps that vLLM's routes have: start, update as often as needed, finish with a version. Between start and finish requests
wait, so no client is served a mixture. An update names its tensors as the Hugging Face model does; one that is cut off leaves the server paused,
and the next start begins again. Finish refuses an update that left out a parameter.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor
from transformers import PreTrainedModel

from tether.core.enums import FinishReason
from tether.core.errors import BadInput
from tether.core.http import Refusal
from tether.core.types import Completion
from tether.models.chat import ChatFormat
from tether.models.load import LoadedModel
from tether.models.logprobs import score_tokens
from tether.models.lora import is_lora, merged
from tether.models.policy import Policy
from tether.rollout.engines.native import NativeEngine
from tether.rollout.serving.engine_thread import EngineThread, ResponseRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """One response, and the version of the weights that sampled it."""

    prompt: tuple[int, ...]
    completion: Completion
    version: str

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why the response ended."""
        return "length" if self.completion.finish is FinishReason.LENGTH else "stop"


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


class ServedModel:
    """One model for many clients."""

    def __init__(
        self, name: str, loaded: LoadedModel, *, max_rows: int = 64, max_context: int | None = None, cache_gb: float | None = None
    ) -> None:
        """Adapters are merged: weights that clients send are those of the plain model."""
        self.name = name
        self.policy = Policy(merged(loaded.model) if is_lora(loaded.model) else loaded.model, loaded.tokenizer, max_positions=max_context)
        self.tokenizer = loaded.tokenizer
        self.chat = ChatFormat(loaded.tokenizer, self.policy.end_of_turn_ids)
        self.weights = WeightUpdates(self.policy.module)
        self._engine = NativeEngine(
            self.policy, max_rows=max_rows, max_context=self.policy.max_positions, cache_gb=cache_gb, keeps_slots=True
        )
        self.max_positions = self._engine.capacity
        """The most tokens of a text. A longer one would not fit into the cache even alone, and the batch that it is in would fail with it."""
        self.thread = EngineThread(self._engine)

    def close(self) -> None:
        self.thread.close()

    @property
    def vocabulary_size(self) -> int:
        return int(self.policy.config.vocab_size)

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that fit after a prompt; a prompt with an id that the model does not have is refused."""
        if prompt and max(prompt) >= self.vocabulary_size:
            raise BadInput(f"the prompt holds token {max(prompt)}, but the model has {self.vocabulary_size}; send ids of its tokenizer")
        return self.max_positions - len(prompt)

    async def respond(self, requests: Sequence[ResponseRequest], gone: Callable[[], Awaitable[bool]]) -> list[Answer]:
        """The responses of some requests, in their order; where the client has gone, those that have not begun are dropped."""
        versions: dict[Future[Completion], str] = {}

        def note_version(done: Future[Completion]) -> None:
            versions[done] = self.weights.version  # in the engine's thread, before any job can change it

        for request in requests:
            request.done.add_done_callback(note_version)
        waiting = [asyncio.wrap_future(self.thread.submit(request)) for request in requests]
        pending: set[asyncio.Future[Completion]] = set(waiting)
        while pending:
            _, pending = await asyncio.wait(pending, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
            if pending and await gone():
                for future in pending:
                    future.cancel()
                raise Refusal(499, "the client has closed the connection")
            for future in set(waiting) - pending:
                future.result()  # raises what the batch failed with
        return [Answer(request.prompt, future.result(), versions[request.done]) for request, future in zip(requests, waiting, strict=True)]

    async def score(self, prompt: tuple[int, ...]) -> list[float]:
        """log p of every token of a prompt but the first, at temperature 1."""
        self.room(prompt)
        if len(prompt) > self.policy.max_positions:
            raise BadInput(f"the prompt has {len(prompt)} tokens, but a text may have {self.policy.max_positions}; send a shorter one")
        return await self.exclusive(lambda: score_tokens(self.policy, prompt))

    async def exclusive(self, job: Callable[[], T]) -> T:
        """Run a job in the engine's thread when no request decodes."""
        return await asyncio.wrap_future(self.thread.exclusive(job))

    # ------------------------------------------------------------------------------------------------------------ weights

    async def start_update(self) -> None:
        """Wait for the requests in flight, then hold back the others."""

        def start() -> None:
            self.thread.pause()
            self._engine.forget()
            self.weights.start()

        await self.exclusive(start)

    async def update(self, source: bytes | Path) -> int:
        """Take some tensors; returns how many."""
        weights = self.weights
        return await self.exclusive(
            lambda: weights.update_from_bytes(source) if isinstance(source, bytes) else weights.update_from_disk(source)
        )

    async def finish_update(self, version: str) -> None:
        """Label the new weights and serve them."""

        def finish() -> None:
            self.weights.finish(version)
            self.thread.resume()

        await self.exclusive(finish)
