"""Agents: a user's async function, or a command that is started for every episode. Each gets a task and an address, and returns a reward.

Whatever an agent raises, a time-out, no reward, or a reward that is no number ends its episode with an error and the cause. Such an episode is no evidence:
it is recorded, played again where the run says so, and never counts as a reward of 0.
"""

import asyncio
import importlib
import inspect
import json
import math
import os
import shlex
import shutil
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tether.core.child import Child, signal_name
from tether.core.errors import BadInput
from tether.core.importing import import_object, missing_module

Task = dict[str, Any]
AgentFunction = Callable[[Task, "ModelAddress"], Awaitable[Any]]

SHOWN_OUTPUT = 300
"""Characters of a program's last words in an error."""
POLL_SECONDS = 0.02


@dataclass(slots=True)
class Result:
    """What an agent returns, where a number is not enough."""

    reward: float
    success: bool | None = None
    """None: whether the reward is at least 1."""
    measures: dict[str, float] = field(default_factory=dict)
    """Numbers worth averaging over episodes."""


class AgentFailure(Exception):
    """An episode that is no evidence; the message is the cause."""


@dataclass(frozen=True, slots=True)
class ModelAddress:
    """Where an agent finds the model of its episode: what an OpenAI client takes."""

    base_url: str
    api_key: str
    model: str

    def client(self) -> Any:
        """An `openai.AsyncOpenAI` for this episode."""
        try:
            import openai
        except ModuleNotFoundError as error:
            raise missing_module("llm.client()", error, "importing 'openai' failed: ") from error
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=_http_client(openai.DefaultAsyncHttpxClient))


_TRANSPORTS: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any]" = weakref.WeakKeyDictionary()


def _http_client(kind: type[Any]) -> Any:
    """OpenAI's HTTP client over connections that the episodes of an event loop share: each would read the machine's certificates first (20 ms), and
    open a connection of its own."""
    loop = asyncio.get_running_loop()
    if loop not in _TRANSPORTS:
        library = importlib.import_module(kind.__mro__[1].__module__.partition(".")[0])  # httpx, or the one that followed it

        class Shared(library.AsyncHTTPTransport):  # type: ignore[name-defined]
            async def aclose(self) -> None:
                """The other episodes go on with it."""

        _TRANSPORTS[loop] = Shared(verify=False, limits=library.Limits(max_connections=None, max_keepalive_connections=None))
    return kind(transport=_TRANSPORTS[loop])


class Agent(Protocol):
    """Plays one task."""

    @property
    def name(self) -> str: ...

    async def play(self, task: Task, llm: ModelAddress) -> Result: ...


def read_result(returned: Any) -> Result:
    """What an agent returned: a number, a `Result`, or an object with `reward`."""
    if isinstance(returned, Mapping):
        known = {"reward", "success", "measures"}
        unknown = sorted(set(map(str, returned)) - known)
        if "reward" not in returned or unknown:
            raise AgentFailure(
                f"agent returned an object with {', '.join(map(str, returned)) or 'nothing'}; return reward, success, measures"
            )
        returned = Result(**{str(key): value for key, value in returned.items()})
    result = returned if isinstance(returned, Result) else Result(returned)
    reward = result.reward
    if isinstance(reward, str | bytes) or reward is None:
        raise AgentFailure(f"agent returned {reward!r:.60}; return a number")
    try:
        number = float(reward)
    except (TypeError, ValueError):
        raise AgentFailure(f"agent returned a {type(reward).__name__}; return a number") from None
    if not math.isfinite(number):
        raise AgentFailure(f"agent returned {number}; return a finite number")
    if result.success is not None and not isinstance(result.success, bool):
        raise AgentFailure(f"agent returned success={result.success!r:.40}; return True or False")
    try:
        measures = {str(name): float(value) for name, value in dict(result.measures or {}).items() if math.isfinite(float(value))}
    except (TypeError, ValueError):
        raise AgentFailure(f"agent returned measures={result.measures!r:.60}; return numbers by name") from None
    return Result(number, result.success, measures)


class FunctionAgent:
    """An async function of two arguments: the task, and where the model is."""

    def __init__(self, function: AgentFunction, name: str | None = None) -> None:
        self.name: str = name or str(getattr(function, "__qualname__", "agent"))
        called = function if inspect.iscoroutinefunction(function) else getattr(function, "__call__", None)  # noqa: B004
        if not inspect.iscoroutinefunction(called):
            raise BadInput(
                f"agent '{self.name}' is no async function; write `async def {self.name.rpartition('.')[2]}(task, llm)`, and put "
                "code that blocks into asyncio.to_thread"
            )
        try:
            inspect.signature(function).bind({}, None)
        except TypeError as error:
            raise BadInput(f"agent '{self.name}' does not take (task, llm): {error}") from error
        self._function = function

    async def play(self, task: Task, llm: ModelAddress) -> Result:
        return read_result(await self._function(task, llm))


class CommandAgent:
    """A program that is started for every episode. It finds the model and its task in environment variables, and writes the reward as its
    last line of output ({"reward": 1.0}, or a number), or into the file that TETHER_RESULT names."""

    def __init__(self, command: str, environment: Mapping[str, str] | None = None) -> None:
        self.name = command
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise BadInput(f"agent command '{command}' cannot be read: {error}") from error
        if not self._words or shutil.which(self._words[0]) is None:
            raise BadInput(
                f"agent command '{command}': there is no program '{self._words[0] if self._words else ''}'; check the name, or give its path"
            )
        self._environment = dict(environment or {})

    async def play(self, task: Task, llm: ModelAddress) -> Result:
        with tempfile.TemporaryDirectory(prefix="tether-agent-") as place:
            folder = Path(place)
            (folder / "task.json").write_text(json.dumps(task, ensure_ascii=False), encoding="utf-8")
            given = {
                "TETHER_BASE_URL": llm.base_url,
                "TETHER_API_KEY": llm.api_key,
                "TETHER_MODEL": llm.model,
                "TETHER_TASK": str(folder / "task.json"),
                "TETHER_RESULT": str(folder / "result.json"),
            }
            own = {name: value.format(**given) for name, value in self._environment.items()}
            with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
                child = Child(self._words, "guard", environment={**os.environ, **given, **own}, stdout=out, stderr=err)
            try:
                while child.exit_code is None:
                    await asyncio.sleep(POLL_SECONDS)
                code = child.exit_code
            finally:
                await asyncio.to_thread(child.kill)  # what it started in its group too, also at a time-out
            if code:
                words = (folder / "err").read_text(encoding="utf-8", errors="replace").strip()[-SHOWN_OUTPUT:]
                ended = f"was ended by {signal_name(code - 128)}" if code > 128 else f"ended with exit code {code}"
                raise AgentFailure(f"agent command {ended}{': ' + ' '.join(words.split()) if words else ''}")
            return read_result(self._outcome(folder))

    def _outcome(self, folder: Path) -> Any:
        written = folder / "result.json"
        text = written.read_text(encoding="utf-8", errors="replace") if written.is_file() else ""
        if not text:
            lines = (folder / "out").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            text = lines[-1] if lines else ""
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise AgentFailure(
                f'agent command wrote no reward: its last line is {text[:80]!r}; write {{"reward": 1.0}} as the last line, or into TETHER_RESULT'
            ) from None


def find_agent(target: str | None, command: str | None, environment: Mapping[str, str] | None = None) -> Agent:
    """The agent of a run: a function as module:function, or a command."""
    if (target is None) == (command is None):
        raise BadInput("an agent is either a function (agent.target) or a command (agent.command); give one of them")
    if command is not None:
        return CommandAgent(command, environment)
    assert target is not None
    return FunctionAgent(_GIVEN.get(target) or import_object(target, "agent", inspect.iscoroutinefunction), target)


_GIVEN: dict[str, AgentFunction] = {}
"""Functions that were given as such, by the name that the settings have for them."""


def named_agent(function: AgentFunction) -> str:
    """The name by which settings know a function; it is found by that name in this process, and elsewhere where it can be imported."""
    agent = FunctionAgent(function)
    name = f"{getattr(function, '__module__', '__main__')}:{agent.name}"
    _GIVEN[name] = function
    return name
