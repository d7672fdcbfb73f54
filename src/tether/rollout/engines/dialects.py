"""What a sampling server is asked and how its answer is read: token ids in, token ids with log-probs and weight versions out.

| dialect | servers | draws | weights |
|---|---|---|---|
| `tether` | `tether serve` | the conversation's own uniforms | published over HTTP or by disk |
| `vllm` | vLLM's route of token ids (`--enable-scale-out`) | a seed per request | published through its weight-transfer routes |
| `completions` | any server with OpenAI's completions that returns token ids | a seed per request | vLLM's routes where it has them |
| `llama.cpp` | its own `/completion` | a seed per request | none: sampling only |

A server is told the texts that end a response only to save tokens; the engine's own stop rule decides. Log-probs must be those of the
distribution at the sampling temperature: vLLM needs `--logprobs-mode processed_logprobs` for that, and the first probe checks it.
"""

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tether.core.errors import BadInput
from tether.core.images import IMAGE_IDS, find_runs, has_images, image_digests, image_of, with_placeholders
from tether.core.protocols import Sampling
from tether.models.endpoint import Forbidden, ModelEndpoint, NoSuchRoute
from tether.models.vision import Vision

LINES = "application/x-ndjson"
"""The type of bodies that hold several requests, or answers: one a line, in JSON."""
MOST_LINES = 1024
"""Requests of such a body."""
IDS, LOGPROBS = "I", "d"
"""Of numbers that are sent packed: 32 bits without a sign, and a float's 64, both with the lowest byte first."""
UNVERSIONED = ""
"""The label of weights where the server reports none."""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One request for the next tokens of a conversation."""

    ids: tuple[int, ...]
    sampling: Sampling
    room: int
    """The most tokens to sample: what the response's budget has left."""
    stops: tuple[str, ...]
    end_of_turn_ids: tuple[int, ...]
    seed: int
    """For servers that draw by themselves."""
    generator: Mapping[str, Any]
    """The state of the conversation's generator, for servers that draw as the native engine does."""
    vision: Vision | None = None
    """How the model reads images; None where it reads text only."""

    @property
    def expanded(self) -> list[int]:
        """The tokens as the model's own processor writes them."""
        return list(self.ids) if self.vision is None else with_placeholders(self.ids, self.vision.placeholder_id)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a server sampled."""

    ids: list[int]
    logprobs: list[float]
    versions: list[str]
    """The label of the weights that sampled each token; UNVERSIONED where the server says nothing."""
    turn_ended: bool = False
    """The model ended its turn, by the server's word: with a token that may not be among the policy's own."""


def packed(numbers: Sequence[float], kind: str) -> str:
    """Numbers as the base64 of their bytes, exactly. As lists of JSON those of a request cost both sides more than all else about it.

    >>> packed([5, 700], IDS), unpacked("BQAAALwCAAA=", IDS)
    ('BQAAALwCAAA=', [5, 700])
    """
    return base64.b64encode(struct.pack(f"<{len(numbers)}{kind}", *numbers)).decode()


def unpacked(text: str, kind: str) -> list[Any]:
    """The numbers again; a ValueError where the text has another form."""
    data = base64.b64decode(text, validate=True)
    try:
        return [*struct.unpack(f"<{len(data) // struct.calcsize(kind)}{kind}", data)]
    except struct.error as error:
        raise ValueError(f"{len(data)} bytes of numbers ({error})") from error


class Malformed(ValueError):
    """An answer without what is needed: ids, or log-probs that are finite and as many as tokens."""


class Dialect:
    """How to speak with one kind of server."""

    name: str
    path: str
    """The route that samples."""
    draws_natively = False
    """Tokens are drawn by the conversation's own uniforms, as by the native engine."""
    has_logprobs = True
    """Answers carry the log-probs of the sampling temperature."""
    weights: Literal["tether", "vllm"] | None = None
    """Whose routes take new weights; None where there are none."""
    takes_images = False
    """The route that samples takes prompts with images."""
    takes_many = False
    """It takes several requests in one body, one a line (LINES), and answers each as soon as it can."""

    def body(self, model: str, request: TokenRequest) -> dict[str, Any]:
        """The request for the next tokens."""
        raise NotImplementedError

    def line(self, model: str, request: TokenRequest) -> dict[str, Any]:
        """The same as one of several in a body."""
        raise NotImplementedError

    def read(self, answer: Mapping[str, Any]) -> SampledTokens:
        """What the server sampled."""
        raise NotImplementedError

    def check_prompt(self, request: TokenRequest, answer: Mapping[str, Any]) -> None:
        """Refuse a server that read other tokens than those of the request, where that may be."""

    def tokenize(self, endpoint: ModelEndpoint, model: str, text: str) -> list[int] | None:
        """What the server's tokenizer makes of a text; None where it cannot be asked."""
        body = {"model": model, "prompt": text, "max_tokens": 1, "return_token_ids": True, "add_special_tokens": False}
        try:
            ids: Sequence[int] | None = _choice(endpoint.call("POST", "/v1/completions", body)).get("prompt_token_ids")
        except (BadInput, Malformed):
            if self.weights is not None:
                raise
            return None  # of a server that is no relative: it does not know a field
        return None if ids is None else list(ids)


def _drawing(request: TokenRequest) -> dict[str, Any]:
    """The fields that all servers name alike."""
    sampling = request.sampling
    return {
        "max_tokens": request.room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "stop": list(request.stops),
        "include_stop_str_in_output": True,
        "logprobs": 0,
    }


class TokenRoute(Dialect):
    """The route of token ids that `tether serve` and vLLM have."""

    path = "/inference/v1/generate"

    def read(self, answer: Mapping[str, Any]) -> SampledTokens:
        choice = _choice(answer)
        content = (choice.get("logprobs") or {}).get("content") or []
        return _checked(choice.get("token_ids"), [entry.get("logprob") for entry in content], choice.get("weight_versions"))


class TetherDialect(TokenRoute):
    """`tether serve`: the native engine's own draws."""

    name, draws_natively, weights, takes_images, takes_many = "tether", True, "tether", True, True

    def body(self, model: str, request: TokenRequest) -> dict[str, Any]:
        single = [sequence[0] for sequence in request.sampling.stop_ids if len(sequence) == 1]
        sampling = {**_drawing(request), "stop_token_ids": single, "generator": dict(request.generator)}
        body: dict[str, Any] = {"model": model, "token_ids": request.expanded, "sampling_params": sampling}
        if request.vision is not None and (runs := find_runs(request.ids)):
            body["images"] = {"runs": runs, "urls": {run.digest: image_of(run.digest).data_url for run in runs}}
        return body

    def line(self, model: str, request: TokenRequest) -> dict[str, Any]:
        body = self.body(model, request)
        return {**body, "token_ids": packed(body["token_ids"], IDS), "packed": True}

    def read(self, answer: Mapping[str, Any]) -> SampledTokens:
        choice = _choice(answer)
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if not isinstance(ids, str) or not isinstance(logprobs, str):
            return super().read(answer)
        try:
            return _checked(unpacked(ids, IDS), unpacked(logprobs, LOGPROBS), choice.get("weight_versions"))
        except ValueError as error:
            raise Malformed(str(error)) from error


class VllmDialect(TokenRoute):
    """vLLM's route of token ids. It expands images by itself, so it is sent one token for each, and says what it made of them."""

    name, weights, takes_images = "vllm", "vllm", True

    def body(self, model: str, request: TokenRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": model, "token_ids": list(request.ids), "sampling_params": _vllm_sampling(request)}
        if request.vision is not None and has_images(request.ids):
            parts = [{"type": "image_url", "url": image_of(digest).data_url} for digest in image_digests(request.ids)]
            body |= {"token_ids": _unexpanded(request.ids, request.vision), "content_parts": parts, "return_token_ids": True}
        return body

    def check_prompt(self, request: TokenRequest, answer: Mapping[str, Any]) -> None:
        if request.vision is None or not has_images(request.ids):
            return
        read, own = answer.get("prompt_token_ids"), request.expanded
        if read != own:
            found = f"{len(read)} tokens" if isinstance(read, list) else "no prompt_token_ids"
            raise BadInput(
                f"vLLM made {found} of a prompt with images that has {len(own)} tokens here, or others; serve the files of the model that is "
                "trained, its image processor's too, with a vLLM whose route of token ids takes content_parts (0.32 does)"
            )


def _unexpanded(ids: Sequence[int], vision: Vision) -> list[int]:
    """The tokens with one placeholder for each image and what the processor writes around its patches."""
    made: list[int] = []
    done = 0
    for run in find_runs(ids):
        if run.patch == 0:
            expanded = vision.expand(image_of(run.digest))
            first = run.start - next(place for place, token in enumerate(expanded) if token >= IMAGE_IDS)
            made += [*ids[done:first], vision.placeholder_id]
            done = first + len(expanded)
    return [*made, *ids[done:]]


class CompletionsDialect(Dialect):
    """OpenAI's completions with token ids, as vLLM and servers like it have them."""

    name, path = "completions", "/v1/completions"

    def __init__(self, is_vllm: bool) -> None:
        self.weights = "vllm" if is_vllm else None

    def body(self, model: str, request: TokenRequest) -> dict[str, Any]:
        fields = _vllm_sampling(request) if self.weights == "vllm" else {**_drawing(request), "seed": request.seed}
        return {"model": model, "prompt": list(request.ids), **fields, "return_token_ids": True}

    def read(self, answer: Mapping[str, Any]) -> SampledTokens:
        choice = _choice(answer)
        ids = choice.get("token_ids")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        return _checked(ids, logprobs, choice.get("weight_versions"))


class LlamaCppDialect(Dialect):
    """llama.cpp's own route, which serves evaluation: it takes no weights, and no log-probs are read from it.

    Those that it offers are of temperature 1, and it leaves out the ones of the tokens that complete a stop text.
    """

    name, path, has_logprobs = "llama.cpp", "/completion", False

    def body(self, model: str, request: TokenRequest) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "prompt": list(request.ids),
            "n_predict": request.room,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "samplers": ["top_k", "top_p", "min_p", "temperature"],
            "seed": request.seed,
            "stop": list(request.stops),
            "return_tokens": True,
            "cache_prompt": True,
        }

    def read(self, answer: Mapping[str, Any]) -> SampledTokens:
        tokens = answer.get("tokens")
        logprobs = [0.0] * len(tokens) if isinstance(tokens, list) else None
        return _checked(tokens, logprobs, None, turn_ended=answer.get("stop_type") == "eos")

    def tokenize(self, endpoint: ModelEndpoint, model: str, text: str) -> list[int] | None:
        tokens = endpoint.call("POST", "/tokenize", {"content": text, "add_special": False, "parse_special": True}).get("tokens")
        return list(tokens) if isinstance(tokens, list) else None


def _vllm_sampling(request: TokenRequest) -> dict[str, Any]:
    """vLLM's own names. The tokens that end a turn are named, so that they are the engine's and not those of the server's files."""
    single = [sequence[0] for sequence in request.sampling.stop_ids if len(sequence) == 1]
    never = {} if request.vision is None else {"logit_bias": dict.fromkeys(request.vision.never_sampled, -100.0)}
    return {
        **_drawing(request),
        **never,
        "seed": request.seed,
        "ignore_eos": True,
        "stop_token_ids": [*request.end_of_turn_ids, *single],
        "skip_special_tokens": False,
    }


def _choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Malformed("no choices")
    return choices[0]


def _checked(ids: Any, logprobs: Any, spans: Any, turn_ended: bool = False) -> SampledTokens:
    """Ids and log-probs of an answer; refuses what cannot be trained on."""
    if not isinstance(ids, list) or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise Malformed("no token ids")
    if not ids and not turn_ended:
        raise Malformed("no tokens")
    if not isinstance(logprobs, list) or len(logprobs) != len(ids):
        raise Malformed(f"{len(logprobs) if isinstance(logprobs, list) else 'no'} log-probs for {len(ids)} tokens")
    if not all(isinstance(value, int | float) for value in logprobs) or not all(map(math.isfinite, logprobs)):
        raise Malformed("log-probs that are not finite numbers")
    return SampledTokens(ids, [*map(float, logprobs)], _versions(spans, len(ids)), turn_ended)


def _versions(spans: Any, count: int) -> list[str]:
    """The label of each token, from contiguous spans [start, end)."""
    labels = [UNVERSIONED] * count
    for span in spans if isinstance(spans, list) else []:
        start, end = (min(max(0, span[name]), count) for name in ("start", "end"))
        labels[start:end] = [str(span["version"])] * (end - start)
    return labels


def find_dialect(endpoint: ModelEndpoint, entry: Mapping[str, Any]) -> Dialect:
    """The dialect of a server, by what it says about itself and which routes it has."""
    owner = str(entry.get("owned_by", ""))
    if owner == "tether":
        return TetherDialect()
    if owner.startswith("llamacpp"):
        return LlamaCppDialect()
    if owner == "vllm":
        try:
            endpoint.call("POST", VllmDialect.path, {"model": entry["id"], "token_ids": [0], "sampling_params": {"max_tokens": 1}})
        except (NoSuchRoute, Forbidden):  # older than the route, or without --enable-scale-out: the key was good for the list of models
            return CompletionsDialect(is_vllm=True)
        return VllmDialect()
    return CompletionsDialect(is_vllm=False)
