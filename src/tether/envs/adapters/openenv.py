"""An environment that an OpenEnv server offers: `make_env("openenv:http://127.0.0.1:8000")`.

An action is a JSON object of the server's schema, which the instructions show. One that the schema refuses is an invalid answer; what fails on
the server otherwise ends the episode as an error. Every environment has a WebSocket of its own, which is a session of the server. The seed of
a reset follows from split and seed; whether an episode follows from it is up to the server.
"""

import json
from functools import lru_cache
from typing import Any, ClassVar

import httpx
from openenv.core.generic_client import GenericEnvClient
from pydantic import Field

from tether.core.errors import BadInput, EnvironmentFailure
from tether.core.grammar import FORMAT_RULE
from tether.core.importing import in_one_line
from tether.core.seeding import derive_seed
from tether.envs.adapters.json_actions import read_object, without_titles, written
from tether.envs.base import Outcome, TextEnv, TurnOptions, Work

_REFUSED = ("VALIDATION_ERROR", "INVALID_JSON")
"""The server's codes for an action that is not of its schema."""
_CONNECT_SECONDS = 10.0


class OpenEnvOptions(TurnOptions):
    """Options of an environment of OpenEnv."""

    max_turns: int = Field(default=10, ge=1)
    """Answers per episode."""
    task: str = ""
    """The goal and the rules; by default the server's own description."""
    reset: dict[str, Any] = {}
    """Further arguments of the environment's reset."""
    success_return: float = 1.0
    """An episode that the server ends is a success if its rewards add up to this."""


class OpenEnv(TextEnv[OpenEnvOptions]):
    """An environment of an OpenEnv server; subclasses have its address."""

    address: ClassVar[str]
    Options = OpenEnvOptions
    work: Work = "wait"

    def __init__(self, options: OpenEnvOptions) -> None:
        super().__init__(options)
        self._schema = json.dumps(without_titles(_asked(self.address, "schema").get("action", {}), "metadata"), ensure_ascii=False)
        self._described = options.task or _asked(self.address, "metadata").get("description") or "Act for the largest reward."
        self._client: Any = None

    @property
    def task(self) -> str:
        return self._described

    @property
    def format_rule(self) -> str:
        return f"Every answer is one action: a JSON object of this schema, and nothing else.\n{self._schema}\n{FORMAT_RULE}"

    def generate(self, seed: int) -> None:
        if self._client is None:
            self._client = GenericEnvClient(self.address, connect_timeout_s=_CONNECT_SECONDS, message_timeout_s=1e6).sync()
        self._return = 0.0
        try:
            self._shown = self._client.reset(
                **self.options.reset, seed=derive_seed("openenv", self.options.split, seed) % 2**31
            ).observation
        except Exception as error:
            raise self._failure(error) from error

    def opening(self) -> str:
        return written(self._shown) or "The environment shows nothing."

    def take(self, answer: str) -> Outcome:
        try:
            action = read_object(answer)
        except ValueError as error:
            return Outcome(f"The answer is no JSON object: {error}. {self._form}", valid=False)
        try:
            result = self._client.step(action)
        except Exception as error:
            if any(code in str(error) for code in _REFUSED):
                return Outcome(f"This action is not of the schema. {self._form}", valid=False)
            raise self._failure(error) from error
        reward = float(result.reward or 0.0)
        self._return += reward
        done = bool(result.done)
        text = written(result.observation) or "The environment shows nothing."
        return Outcome(text, reward, done, done and self._return >= self.options.success_return, info={"return": self._return})

    @property
    def _form(self) -> str:
        return f"Answer with an object of this schema: {self._schema}"

    def _failure(self, error: Exception) -> EnvironmentFailure:
        """What the server, or the way to it, failed at. The next reset connects again."""
        self.close()
        why = in_one_line(error)
        # A full server says so and closes the connection; whoever is still sending only sees that it is closed.
        full = (
            "; if it is full, start it with a larger max_concurrent_envs" if "CAPACITY_REACHED" in why or "ConnectionClosed" in why else ""
        )
        return EnvironmentFailure(f"{self.name}: {why}{full}")

    def close(self) -> None:
        """Leave the server."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _asked(address: str, what: str) -> dict[str, Any]:
    try:
        answer = httpx.get(f"{address}/{what}", timeout=_CONNECT_SECONDS).raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise BadInput(
            f"openenv:{address}: no OpenEnv server answers there ({in_one_line(error)}); start it, or check the address"
        ) from error
    if not isinstance(answer, dict):
        raise BadInput(f"openenv:{address}: /{what} answered {answer!r:.60}; is it an OpenEnv server?")
    return answer


@lru_cache(maxsize=64)
def env_class(address: str) -> type[OpenEnv]:
    """The class of an address."""
    if not address.startswith(("http://", "https://")):
        raise BadInput(f"openenv got '{address}'; write the server's address, such as openenv:http://127.0.0.1:8000")
    base = address.rstrip("/")
    return type("OpenEnv", (OpenEnv,), {"name": f"openenv:{base}", "address": base, "__module__": __name__})
