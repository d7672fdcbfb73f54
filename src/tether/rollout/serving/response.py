"""A response that is asked of an engine: its prompt, how it is sampled, and the future that receives it. Needs no model, nor torch."""

from concurrent.futures import Future
from typing import Protocol

import numpy as np

from tether.core.errors import TetherError
from tether.core.images import Image
from tether.core.protocols import PromptTokens, Sampling
from tether.core.types import Completion

COMPUTE_ERRORS = (TetherError, RuntimeError, ValueError, MemoryError)
"""What a batch or a job may fail with; the clients are told, and the thread continues."""


class ResponseRequest:
    """A conversation of one response: the tokens of a request, and a future that receives the completion."""

    prefix_key = 0  # the engine compares the tokens too: equal prompts that wait together are computed once

    def __init__(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        uniforms: np.random.Generator,
        closing_tags: tuple[str, ...] = (),
        images: tuple[Image, ...] = (),
    ) -> None:
        self.prompt, self.sampling, self.uniforms, self.closing_tags = prompt, sampling, uniforms, closing_tags
        self.images = images
        """Those of the prompt: held as long as the engine may have to embed it, whatever becomes of the client."""
        self.done: Future[Completion] = Future()

    def begin(self) -> PromptTokens:
        # From here on the future cannot be cancelled; a client that went away before costs nothing.
        return self.prompt if not self.done.done() and self.done.set_running_or_notify_cancel() else None

    def receive(self, completion: Completion) -> PromptTokens:
        self.done.set_result(completion)
        return None


class Submits(Protocol):
    """Whatever takes such requests."""

    def submit(self, request: ResponseRequest) -> "Future[Completion]": ...
