"""A model that is served: its tokenizer and chat format, its engine thread, its weights and their version. The routes ask nothing else.

New weights come in the steps that vLLM's routes have: start with a version, update as often as needed, finish. The tensors, named as the Hugging
Face model names them, are held in main memory until the update is finished, and the old weights serve meanwhile: whatever happens to a publisher,
clients are served, and never a mixture. A publisher that says at the start what it will send is refused there if the model is another one. An update
is abandoned when anything of it is refused, when its publisher is silent for too long, and when another is started; `abandoned` says which and why.
"""

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor
from transformers import PreTrainedModel

from tether.core.errors import BadInput
from tether.core.http import Refusal
from tether.core.images import IMAGE_IDS, Image, check_sent
from tether.core.types import Completion
from tether.models.chat import ChatFormat
from tether.models.load import LoadedModel
from tether.models.logprobs import score_tokens
from tether.models.lora import is_lora, merged
from tether.models.messages import AUTO, AgentChat
from tether.models.policy import Policy
from tether.rollout.engines.native import NativeEngine
from tether.rollout.engines.publish import SHARED_MEMORY
from tether.rollout.serving.engine_thread import EngineThread
from tether.rollout.serving.response import ResponseRequest

T = TypeVar("T")

Manifest = Mapping[str, tuple[str, list[int]]]
"""Of each tensor that a publisher will send: its dtype, as torch names it, and its shape."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One response, and the version of the weights that sampled it."""

    prompt: tuple[int, ...]
    completion: Completion
    version: str


@dataclass(frozen=True, slots=True)
class AbandonedUpdate:
    """An update that came to nothing: the version that it would have been, when it was abandoned, and why."""

    version: str
    since: float
    reason: str


class WeightUpdate:
    """New weights on their way: tensors are checked as they come and held apart, and the model is not touched before all are there."""

    def __init__(self, module: PreTrainedModel, version: str, seconds: float, manifest: Manifest | None = None) -> None:
        """`manifest`: what the publisher will send, which is checked here."""
        self.id = secrets.token_hex(16)
        """Known to the publisher alone: every further call of the update names it."""
        self.version, self.seconds, self.since = version, seconds, time.time()
        self._calls = 0
        self._heard = time.monotonic()
        self._own = module.state_dict(keep_vars=True)  # also the second names of tied weights
        self._outstanding = {name for name, _ in module.named_parameters()}
        self._held: dict[str, Tensor] = {}
        if manifest is not None:
            for name, (dtype, shape) in sorted(manifest.items()):
                self._check(name, dtype, shape)
            self._check_nothing_left_out(self._outstanding - manifest.keys())

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call of the publisher: its silence begins when the call ends, however it ends."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._heard = time.monotonic()

    @property
    def seconds_left(self) -> float:
        """Until the publisher has been silent for too long."""
        return self.seconds if self._calls else self._heard + self.seconds - time.monotonic()

    def take(self, source: bytes | Path) -> int:
        """Take the tensors of a safetensors file: its bytes, its path on this machine, or a folder of such files; returns how many."""
        if isinstance(source, bytes):
            try:
                return self._hold(load(source))
            except SafetensorError as error:
                raise BadInput(
                    f"the body is no safetensors file ({error}); send one with Content-Type: application/octet-stream"
                ) from error
        files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
        if not files:
            raise BadInput(f"folder '{source}' holds no .safetensors file; write the model there first")
        count = 0
        for file in files:
            try:
                if not file.is_file():  # a pipe or a device could not be read to its end
                    raise FileNotFoundError("no such file")
                with safe_open(file, framework="pt") as opened:
                    found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            except (OSError, SafetensorError) as error:
                raise BadInput(f"cannot read weights from '{file}' on the server: {error}; give a path that the server can read") from error
            # These tensors are the file. Shared memory stays mapped when the publisher removes it; a file on a disk that others write may not.
            count += self._hold(found, copies=SHARED_MEMORY not in file.resolve().parents)
        return count

    def _hold(self, tensors: Mapping[str, Tensor], *, copies: bool = False) -> int:
        for name, tensor in sorted(tensors.items(), key=lambda item: item[0]):  # a file is read in no fixed order
            self._check(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        self._held.update({name: tensor.clone() for name, tensor in tensors.items()} if copies else tensors)
        self._outstanding -= tensors.keys()
        return len(tensors)

    def _check(self, name: str, dtype: str, shape: list[int]) -> None:
        """Refuse a tensor that is not one of the served model."""
        if name not in self._own:
            raise BadInput(f"the served model has no parameter '{name}'; serve the model that is trained")
        own = self._own[name]
        if list(own.shape) != shape:
            raise BadInput(
                f"parameter '{name}' has shape {shape} in the update and {list(own.shape)} in the served model; serve the model that is trained"
            )
        sent = getattr(torch, dtype, None)
        # Any float of 16 bits and more is rounded to the model's own. One of 8 bits means something only with scales, which are no parameters.
        if not isinstance(sent, torch.dtype) or own.is_floating_point() != sent.is_floating_point or sent.itemsize < min(2, own.itemsize):
            raise BadInput(f"parameter '{name}' is {dtype} in the update and {own.dtype} in the served model; send weights")

    @staticmethod
    def _check_nothing_left_out(missing: set[str]) -> None:
        if missing:
            raise BadInput(f"the update left out {len(missing)} parameters, {min(missing)} among them; serve the model that is trained")

    def check_complete(self) -> None:
        self._check_nothing_left_out(self._outstanding)

    @torch.no_grad()
    def apply(self) -> None:
        """Overwrite the model's weights."""
        for name, tensor in self._held.items():
            self._own[name].copy_(tensor)


class ServedModel:
    """One model for many clients."""

    def __init__(
        self,
        name: str,
        loaded: LoadedModel,
        *,
        max_rows: int = 64,
        max_context: int | None = None,
        cache_gb: float | None = None,
        as_trained: bool = True,
        tool_format: str = AUTO,
    ) -> None:
        """Adapters are merged: weights that clients send are those of the plain model. `as_trained`: chat without tools is asked as in training on
        environments, with a think tag and an answer; else as the template has it. `tool_format`: of `AgentChat`."""
        self.name, self.as_trained = name, as_trained
        self.policy = Policy(merged(loaded.model) if is_lora(loaded.model) else loaded.model, loaded.tokenizer, max_positions=max_context)
        self.tokenizer = loaded.tokenizer
        self.chat = ChatFormat(loaded.tokenizer, self.policy.end_of_turn_ids, self.policy.vision)
        self.agent_chat = AgentChat(self.chat, tool_format)
        self._has_noted_name = False
        self.version = "0"
        """The label of the weights; "0" for those that the server began with."""
        self.weights_since = time.time()
        """When they were put in place."""
        self._update: WeightUpdate | None = None
        self.updates = Counter[str](applied=0, replaced=0, expired=0, refused=0)
        """Weight updates by what became of them."""
        self.is_swapping = False
        """New weights wait for the requests in flight, or are being put in place: other requests wait."""
        self.abandoned: AbandonedUpdate | None = None
        """The latest update that came to nothing, if it came after the weights that are served."""
        self._engine = NativeEngine(
            self.policy, max_rows=max_rows, max_context=self.policy.max_positions, cache_gb=cache_gb, keeps_slots=True
        )
        self.vocabulary_size = int(self.policy.config.vocab_size)
        self.max_positions = self._engine.capacity
        """The most tokens of a text. A longer one would not fit into the cache even alone, and the batch that it is in would fail with it."""
        self.thread = EngineThread(self._engine)

    def close(self) -> None:
        self.thread.close()

    def note_name(self, wanted: str | None) -> None:
        """Say once that a chat client asks for another model: agents have names of their own in their code."""
        if wanted not in (None, self.name) and not self._has_noted_name:
            self._has_noted_name = True
            logging.getLogger(__name__).warning("a client asks for the model %r; every name is answered by %r", wanted, self.name)

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt."""
        self.check_text(len(text))
        return self.chat.encode(text)

    def check_text(self, num_characters: int) -> None:
        """Refuse a text that is too long whatever its tokens are: to tokenise it would keep others waiting."""
        if num_characters > self.max_positions * self.agent_chat.longest_token:
            raise BadInput(
                f"the prompt has {num_characters} characters, but a text may have {self.max_positions} tokens; send a shorter prompt"
            )

    async def look_at(self, images: Sequence[Image]) -> None:
        """Let the model's processor read images, while others are served: prompts with them are then quickly made."""
        if images and (vision := self.policy.vision) is not None:
            await asyncio.to_thread(lambda: [vision.expand(image) for image in images])

    def room(self, prompt: Sequence[int], images: Sequence[Image] = ()) -> int:
        """Tokens that fit after a prompt; refuses one with an id that the model does not have, or with images that did not come with it."""
        words = prompt if self.policy.vision is None else {token for token in prompt if token < IMAGE_IDS}
        if (largest := max(words, default=0)) >= self.vocabulary_size:
            raise BadInput(f"the prompt holds token {largest}, but the model has {self.vocabulary_size}; send ids of its tokenizer")
        if self.policy.vision is not None:
            if unseen := set(words).intersection(self.policy.vision.never_sampled):
                raise BadInput(
                    f"the prompt holds token {min(unseen)}, which stands for an image, without one; send images with their request"
                )
            check_sent(prompt, images)
        return self.max_positions - len(prompt)

    async def respond(self, requests: Sequence[ResponseRequest], gone: Callable[[], Awaitable[bool]]) -> list[Answer]:
        """The responses of some requests, in their order; where the client has gone, those that have not begun are dropped."""
        versions: dict[Future[Completion], str] = {}

        def note_version(done: Future[Completion]) -> None:
            versions[done] = self.version  # in the engine's thread, before any job can change it

        for request in requests:
            request.done.add_done_callback(note_version)
        waiting = [asyncio.wrap_future(self.thread.submit(request)) for request in requests]
        pending: set[asyncio.Future[Completion]] = set(waiting)
        try:
            while pending:
                _, pending = await asyncio.wait(pending, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
                if pending and await gone():
                    raise Refusal(499, "the client has closed the connection")
                for future in set(waiting) - pending:
                    future.result()  # raises what the batch failed with
        finally:
            for future in pending:
                future.cancel()
        return [Answer(request.prompt, future.result(), versions[request.done]) for request, future in zip(requests, waiting, strict=True)]

    async def answers(self, requests: Sequence[ResponseRequest]) -> AsyncGenerator[list[tuple[int, Answer | Exception]]]:
        """The responses of some requests, or what they failed with, by their numbers: each as soon as it is there. Where nobody waits for them any
        more, those that have not begun are dropped."""
        loop, is_there = asyncio.get_running_loop(), asyncio.Event()
        there: deque[tuple[int, Answer | Exception]] = deque()

        def take(number: int, done: Future[Completion]) -> None:
            if done.cancelled():
                return
            error = done.exception()  # `version`: in the engine's thread, before any job can change it
            failed = error if error is None or isinstance(error, Exception) else RuntimeError(str(error))
            there.append((number, failed or Answer(requests[number].prompt, done.result(), self.version)))
            if len(there) == 1:  # of several the loop is told once
                with suppress(RuntimeError):  # it has ended
                    loop.call_soon_threadsafe(is_there.set)

        for number, request in enumerate(requests):
            request.done.add_done_callback(partial(take, number))
        try:
            self.thread.submit_all(requests)
            num_left = len(requests)
            while num_left:
                await is_there.wait()
                is_there.clear()
                found = []
                while there:
                    found.append(there.popleft())
                num_left -= len(found)
                yield found
        finally:
            for request in requests:
                request.done.cancel()

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

    @property
    def update_in_progress(self) -> WeightUpdate | None:
        """What is being sent; where its publisher has been silent for too long, it is abandoned, and its memory given back."""
        update = self._update
        if update is not None and update.seconds_left < 0:
            self.abandon(update, "expired", f"its publisher was silent for {update.seconds:g} s")
        return self._update

    def start_update(self, version: str, seconds: float, manifest: Manifest | None = None) -> WeightUpdate:
        """Begin to take new weights. Those of another model are refused, and an update in progress goes on. Else that is abandoned: its publisher
        was cut off, or will be told."""
        try:
            update = WeightUpdate(self.policy.module, version, seconds, manifest)
        except BadInput:
            self.updates["refused"] += 1
            raise
        if (before := self.update_in_progress) is not None:
            self.abandon(before, "replaced", f"the update of version '{version}' was started")
        self._update = update
        return update

    def abandon(self, update: WeightUpdate, outcome: str, reason: str) -> None:
        """Forget an update, and count it; the weights that are served stay."""
        if self._update is update:
            self.updates[outcome] += 1
            self._update, self.abandoned = None, AbandonedUpdate(update.version, time.time(), reason)

    @contextmanager
    def receiving(self, wanted: str | None) -> Iterator[WeightUpdate]:
        """One call of a publisher to the update of this id. A refusal of what it sends abandons the update; a lost connection does not: the
        publisher may send the same again while `seconds` last."""
        update = self.find_update(wanted)
        try:
            with update.call():
                yield update
        except (BadInput, Refusal) as error:
            self.abandon(update, "refused", str(error))
            raise

    def find_update(self, wanted: str | None) -> WeightUpdate:
        """The update of this id, if it is still in progress."""
        update = self.update_in_progress
        if update is None or wanted is None or not hmac.compare_digest(update.id.encode(), wanted.encode(errors="replace")):
            now = "none is in progress" if update is None else f"that of version '{update.version}' is in progress"
            raise Refusal(
                409,
                f"this weight update was not started, took too long, was refused or was replaced by another ({now}); start it again, and let one run use a server",
            )
        return update

    async def finish_update(self, update: WeightUpdate) -> None:
        """Serve the new weights: after the requests in flight, before all others."""

        def swap() -> None:
            if self._update is not update:
                raise Refusal(409, "another weight update was started meanwhile; start this one again")
            self._engine.forget()
            update.apply()
            self.version, self._update, self.abandoned = update.version, None, None
            self.weights_since, self.thread.diverged = time.time(), False
            self.updates["applied"] += 1

        update.check_complete()
        self.is_swapping = True
        try:
            await self.exclusive(swap)
        finally:
            self.is_swapping = False

    @property
    def version_number(self) -> float:
        """The number at the end of the version's label, which runs count up; NaN where a publisher's label has none."""
        found = re.search(r"\d+$", self.version)
        return float(found[0]) if found else float("nan")
