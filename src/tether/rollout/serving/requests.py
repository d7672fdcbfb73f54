"""The bodies that `tether serve` accepts, checked field by field, and what they ask of the engine (of chat: also chat.py).

Three routes, one kind of request: OpenAI's completions, OpenAI's chat completions, and vLLM's route of token ids. A field that the server
does not know, or cannot honour, is refused by name: a sampling option that is silently ignored changes what is sampled.
"""

import secrets
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationInfo, ValidatorFunctionWrapHandler, field_validator

from tether.core.config import Settings
from tether.core.errors import BadInput
from tether.core.images import IMAGE_IDS, MOST_IMAGES, MOST_PATCHES, Image, SentImages, image_digests, with_patches
from tether.core.protocols import Sampling
from tether.models.vision import Vision
from tether.rollout.engines.dialects import IDS, unpacked
from tether.rollout.serving.chat import MOST_STOPS, ChatFields, ResponseEnd
from tether.rollout.serving.response import ResponseRequest

MOST_CHOICES = 128
MOST_RESPONSES = 1024
"""Of one request: prompts times choices."""
LEAST_TEMPERATURE = 1e-3
"""Above 0: with less, logits overflow."""
COMPLETION_TOKENS = 16
"""The default of OpenAI's completions."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(fail_fast=True)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]


class PCG64State(Settings):
    """The state of numpy's PCG64, as `generator.bit_generator.state` has it: one float32 uniform is drawn from it for each token.

    A client that keeps the generator of a conversation sends its state and then draws as many uniforms as tokens came back. The tokens are
    then those of the native engine with the same generator, turn after turn.
    """

    bit_generator: Literal["PCG64"] = "PCG64"
    state: dict[Literal["state", "inc"], Annotated[int, Field(ge=0, lt=2**128)]]
    has_uint32: Literal[0, 1] = 0
    uinteger: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @field_validator("state")
    @classmethod
    def _complete(cls, state: dict[str, int]) -> dict[str, int]:
        if set(state) != {"state", "inc"}:
            raise ValueError("must hold the numbers state and inc")
        return state


class SamplingFields(ResponseEnd):
    """How tokens are drawn: the fields that all routes share."""

    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    """0 or -1 for all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop_token_ids: Annotated[Ids, Field(max_length=MOST_STOPS)] = []
    include_stop_str_in_output: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**128)] | None = None
    generator: PCG64State | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    # What other servers have and this one has not: accepted only at the value that changes nothing.
    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0

    @field_validator("temperature")
    @classmethod
    def _not_too_low(cls, temperature: float) -> float:
        if 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"must be 0, which takes the likeliest token, or at least {LEAST_TEMPERATURE:g}")
        return temperature

    def requests(
        self,
        prompt: tuple[int, ...],
        room: int,
        default_tokens: int,
        closing_tags: tuple[str, ...] = (),
        images: tuple[Image, ...] = (),
    ) -> list[ResponseRequest]:
        """The n requests of a prompt.

        Args:
            prompt: its tokens.
            room: tokens that the model has room for after the prompt.
            default_tokens: the budget where `max_tokens` is not given, at most the room.
            closing_tags: texts that end a response beside `stop`.
            images: those of the prompt.
        """
        wanted = self.max_tokens if self.max_tokens is not None else min(default_tokens, room)
        if not prompt:
            raise BadInput("the prompt holds no token; send at least one")
        if wanted < 1 or wanted > room:
            raise BadInput(
                f"the prompt has {len(prompt)} tokens and max_tokens is {wanted}, but a text may have {len(prompt) + room}; "
                "send a shorter prompt or lower max_tokens"
            )
        if self.generator is not None and self.n > 1:
            raise BadInput(f"n is {self.n}, but a generator draws for one response; send n requests")
        sampling = Sampling(
            self.temperature,
            wanted,
            max(0, self.top_k),
            self.top_p,
            self.min_p,
            tuple((token,) for token in self.stop_token_ids),
            self.stops,
        )
        return [ResponseRequest(prompt, sampling, self._uniforms(index), closing_tags, images) for index in range(self.n)]

    def _uniforms(self, index: int) -> np.random.Generator:
        """The source of one choice's draws: the client's generator, or its seed (and the number of the choice), or chance."""
        if self.generator is not None:
            bits: Any = np.random.PCG64(0)
            bits.state = self.generator.model_dump()
            return np.random.Generator(bits)
        seed = self.seed if self.seed is not None else secrets.randbits(63)
        return np.random.Generator(np.random.PCG64([seed, index] if index else seed))


class CompletionBody(SamplingFields):
    """POST /v1/completions."""

    model: str | None = None
    prompt: str | Ids | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Ids], Field(fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """0 or 1: the log-prob of the sampled token. There are no alternatives to list."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """0 or 1: the log-probs of the prompt's own tokens, at temperature 1."""
    echo: Literal[False] = False
    return_token_ids: bool = False
    add_special_tokens: Literal[False] = False
    """Nothing is added to a prompt here; other servers add a token at the beginning unless this is false."""
    stream: Literal[False] = False

    def prompts(self, encode: Callable[[str], tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The prompts as tokens."""
        if isinstance(self.prompt, str):
            return [encode(self.prompt)]
        several: list[Any] = [self.prompt] if not self.prompt or isinstance(self.prompt[0], int) else list(self.prompt)
        if len(several) * self.n > MOST_RESPONSES:
            raise BadInput(
                f"{len(several)} prompts with n {self.n} are {len(several) * self.n} responses; ask for at most {MOST_RESPONSES} at a time"
            )
        return [encode(text) if isinstance(text, str) else tuple(text) for text in several]


class ChatBody(ChatFields, SamplingFields):
    """POST /v1/chat/completions."""

    logprobs: bool = False
    top_logprobs: Literal[0] | None = None
    return_token_ids: bool = False


class TokenSampling(SamplingFields):
    """`sampling_params` of the route of token ids."""

    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    """Both are accepted as vLLM has them; nothing is detokenized here but the texts that may end a response."""


class ImageFields(Settings):
    """`images` of the route of token ids: which of the tokens are patches of which images, and these."""

    runs: Annotated[list[tuple[TokenId, TokenId, Digest, TokenId]], Field(fail_fast=True)]
    """Of neighbouring patches of one image, where each token is the model's own image token: the place of the first, how many, the digest of the
    pixels (core/images.py), and the number of the first patch."""
    urls: Annotated[dict[Digest, str], Field(max_length=MOST_IMAGES)]
    """The images as data URLs, by their digests."""

    def placed(self, token_ids: list[int], vision: Vision | None) -> tuple[tuple[int, ...], tuple[Image, ...]]:
        """The tokens with patches, and their images; refuses patches that the model would not make of these images."""
        if vision is None:
            raise BadInput("images were sent, and the model reads text only; send tokens of a text")
        sent = SentImages()
        for digest, url in self.urls.items():
            found = sent.read(url, f"images.urls.{digest}").digest
            if found != digest:
                raise BadInput(f"images.urls.{digest} has pixels of the digest {found}; send the image that the runs name")
        end = 0
        for start, length, digest, patch in self.runs:
            if digest not in self.urls:
                raise BadInput(f"images.runs names the image {digest}, which is not among images.urls; send it")
            if start < end or patch + length > MOST_PATCHES:
                raise BadInput(
                    f"images.runs names {length} patches at place {start} from number {patch} on; send runs in order, each patch once"
                )
            tokens, end = token_ids[start : start + length], start + length
            if len(tokens) != length or set(tokens) != {vision.placeholder_id}:
                raise BadInput(
                    f"images.runs names {length} patches at place {start}, and token_ids has other tokens than the image token there"
                )
        ids = with_patches(token_ids, self.runs)
        shown, patches = image_digests(ids), [token for token in ids if token >= IMAGE_IDS]
        whole = {image.digest: [token for token in vision.expand(image) if token >= IMAGE_IDS] for image in sent.held}
        # Counted first: a hundred thousand beginnings of one image must not become as many images.
        if sum(len(whole[digest]) for digest in shown) != len(patches) or [token for digest in shown for token in whole[digest]] != patches:
            raise BadInput("images.runs are not the patches that this model makes of these images; serve the model that is trained")
        return ids, tuple(sent.held)


class GenerateBody(Settings):
    """POST /inference/v1/generate, vLLM's route of token ids."""

    packed: bool = False
    """`token_ids` is text, and in the answer `token_ids` and `logprobs` are: see `packed` of engines/dialects.py."""
    token_ids: Annotated[Ids, Field(min_length=1)]
    images: ImageFields | None = None
    sampling_params: TokenSampling = TokenSampling()
    model: str | None = None
    request_id: str | None = None
    stream: Literal[False] = False
    # Without meaning here: caches end with their weights, and requests are taken in order.
    cache_salt: str | None = None
    priority: int = 0

    @field_validator("token_ids", mode="wrap")
    @classmethod
    def _unpacked(cls, given: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        if not info.data.get("packed"):
            return check(given)
        try:
            ids = unpacked(given, IDS)
        except (TypeError, ValueError):
            ids = []
        if not ids:
            raise ValueError("must be base64 of one or more 32-bit integers, the lowest byte first, because packed is true")
        return ids
