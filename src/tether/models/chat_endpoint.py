"""A model behind an OpenAI-compatible chat endpoint: messages in, one reply with its token counts out.

Nothing is known of the model but its name: no tokenizer, no log-probs. What may pass (429, 5xx, a lost connection) is tried again with growing
pauses, or after the pause that the server asks for. Servers differ in what they accept:

- A server that wants `max_completion_tokens` instead of `max_tokens` gets it, and one that refuses `seed` gets none; both are found out once,
  from the words of the refusal. Any other field is the user's to change (`body`).
- A server may keep the reasoning apart from the content (`reasoning_content`, `reasoning`), or only count its tokens. Where the content closes no
  think tag itself, such reasoning counts as the thoughts before the answer. It is not sent back: servers want the content alone.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tether.core.errors import BadInput, ModelUnavailable
from tether.core.grammar import THINK_CLOSE, THINK_OPEN
from tether.core.protocols import Sampling
from tether.core.types import Usage
from tether.models.endpoint import ModelEndpoint, NoSuchRoute

KEY_VARIABLES = ("TETHER_TOKEN", "OPENAI_API_KEY")
"""Where the key comes from unless a variable is named; a key is never part of settings, records or messages."""
RETRY_DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0)
LONGEST_PAUSE = 120.0
PROBE_SECONDS = 60.0
"""How long a single question may take that is asked to see whether the server replies at all."""

_CONTEXT_FULL = re.compile(
    r"context[ _-]?(length|size|window)|maximum context|prompt is too long|input is too long|too many (input )?tokens|but a text may have \d+",
    re.IGNORECASE,
)
"""What servers say of a conversation that does not fit (OpenAI, vLLM, llama.cpp, Anthropic, tether serve)."""


class ContextFull(BadInput):
    """The conversation does not fit into the model's context."""


class BadReply(BadInput):
    """An answer without a message."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """The address of a model: http://HOST:PORT#NAME."""

    url: str
    name: str | None
    """None takes the only one that the server has."""

    @classmethod
    def parse(cls, address: str) -> "RemoteModel":
        url, _, name = address.partition("#")
        if "@" in url:
            raise BadInput(
                "the address of a model holds an '@': a key does not belong there; put it into a variable and name that: --api-key-env"
            )
        return cls(url, name or None)


def is_endpoint(name: str) -> bool:
    """Whether the name of a model is an address.

    >>> is_endpoint("http://localhost:8000#tiny"), is_endpoint("org/name")
    (True, False)
    """
    return name.startswith(("http://", "https://"))


def api_key(variable: str | None) -> tuple[str | None, str]:
    """The key of an endpoint, and where it comes from in words. A variable that was named must be set."""
    if variable is not None:
        if not os.environ.get(variable):
            raise BadInput(f"--api-key-env names the variable '{variable}', which is not set; export it with the key")
        return os.environ[variable], f"check the key in {variable}"
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    return key, "put the key into a variable and name it: --api-key-env NAME"


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One reply of the model."""

    text: str
    """For the parser and for people: reasoning that the server keeps apart stands before the content, between think tags."""
    content: str
    """What the server expects to be sent back in the next turn."""
    cut: bool
    """The token budget was used up."""
    usage: Usage | None
    """None where the server does not count."""


class ChatEndpoint:
    """Asks one model for replies; several threads may ask at the same time. Use it as a context.

    Args:
        model: where it is.
        key: of the server.
        key_source: where the key comes from, in words, for the message about a refused one.
        timeout: seconds that one request may take.
        parallel: requests at the same time.
        body: further fields of every request; None leaves out a field that would be sent.
    """

    def __init__(
        self,
        model: RemoteModel,
        *,
        key: str | None = None,
        key_source: str = "set OPENAI_API_KEY",
        timeout: float = 600.0,
        parallel: int = 8,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        self._endpoint = ModelEndpoint(
            model.url, token=key, token_source=key_source, timeout=timeout, parallel=parallel, longest_pause=LONGEST_PAUSE
        )
        self._timeout = timeout
        self._root, self._wanted, self._body = "/v1", model.name, dict(body or {})
        self._limit_field, self._takes_seed = "max_tokens", True  # until a refusal says otherwise
        self.notes: list[str] = []
        """What the server does not take, one sentence each."""
        self.name = model.name or ""
        self._has_replied = False

    @property
    def address(self) -> str:
        return self._endpoint.base

    def __enter__(self) -> Self:
        self._endpoint.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._endpoint.close()

    def connect(self) -> None:
        """Find the model on the server. Nothing there, a refused key and an unknown name are one line each."""
        for root in ("/v1", ""):  # some servers have another word than v1 in their address
            try:
                self.name = str(self._endpoint.find_model(self._wanted, root)["id"])
            except NoSuchRoute:
                continue
            self._root = root
            return
        if self._wanted is None:
            raise BadInput(f"the server at {self.address} does not list its models; name one: {self.address}#NAME")

    def probe(self, sampling: Sampling) -> None:
        """Ask once, for anything at all; raises what the server does to that."""
        self._complete([{"role": "user", "content": "Hello"}], sampling, 0, (), min(PROBE_SECONDS, self._timeout))

    def complete(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, seed: int) -> ChatReply:
        """The model's reply to a conversation."""
        return self._complete(messages, sampling, seed, RETRY_DELAYS, self._timeout)

    def _complete(
        self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, seed: int, delays: Sequence[float], timeout: float
    ) -> ChatReply:
        path = f"{self._root}/chat/completions"
        for _ in range(3):  # two fields may be found to be refused
            body = self._request(messages, sampling, seed)
            try:
                answer = self._endpoint.call("POST", path, body, delays=delays, timeout=timeout, stranger=not self._has_replied)
                self._has_replied = True
                return _read(answer, self.address)
            except (NoSuchRoute, ModelUnavailable, BadReply):
                raise
            except BadInput as refusal:
                if _CONTEXT_FULL.search(str(refusal)):
                    raise ContextFull(str(refusal)) from refusal
                if not self._adapt(body, str(refusal)):
                    raise
        raise BadInput(f"the server at {self.address} refuses every form of the request")

    def _request(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, seed: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [dict(message) for message in messages],
            "temperature": sampling.temperature,
            self._limit_field: sampling.max_tokens,
        }
        if self._takes_seed:
            body["seed"] = seed
        for name, value, default in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0), ("min_p", sampling.min_p, 0.0)):
            if value != default:
                body[name] = value
        if sampling.stop_strings:
            body["stop"] = list(sampling.stop_strings)
        return {name: value for name, value in {**body, **self._body}.items() if value is not None}

    def _adapt(self, body: Mapping[str, Any], words: str) -> bool:
        """Whether a refusal names a field that can be done without; it is then not sent again."""
        if "max_tokens" in body and "max_completion_tokens" in words:
            self._limit_field = "max_completion_tokens"
        elif "seed" in body and re.search(r"\bseed\b", words):
            if self._takes_seed:
                self.notes.append("the server takes no seed: the same command will not sample the same replies")
            self._takes_seed = False
        else:
            return False
        return True


def _read(answer: Mapping[str, Any], address: str) -> ChatReply:
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise BadReply(f"the server at {address} answered without a message ({str(dict(answer))[:120]})")
    content = _text(message.get("content"))
    thoughts = _text(message.get("reasoning_content") or message.get("reasoning"))
    usage = _usage(answer.get("usage"))
    text = content
    if THINK_CLOSE not in content and (thoughts or (usage is not None and usage.reasoning_tokens)):
        text = f"{THINK_OPEN}{thoughts}{THINK_CLOSE}{content}"
    return ChatReply(text, content, choice.get("finish_reason") == "length", usage)


def _text(content: Any) -> str:
    """A message's content, which some servers send in parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _usage(counted: Any) -> Usage | None:
    if not isinstance(counted, dict) or not all(isinstance(counted.get(name), int) for name in ("prompt_tokens", "completion_tokens")):
        return None
    details = [(counted.get("completion_tokens_details"), "reasoning_tokens"), (counted.get("prompt_tokens_details"), "cached_tokens")]
    reasoning, cached = (part[name] if isinstance(part, dict) and isinstance(part.get(name), int) else 0 for part, name in details)
    return Usage(counted["prompt_tokens"], counted["completion_tokens"], reasoning, cached)
