"""Questions of one's own, answered with the tools of an MCP server: `make_env("mcp:python server.py", data="rows.jsonl")`.

A reply ends with a call of a tool, <tool_call>{"name": ..., "arguments": {...}}</tool_call>, or with <answer>...</answer>, which ends the episode and
is graded as in the environment qa. The command is started once for an environment, or for every episode with restart=true: the protocol has no
reset. A server that crashes ends its episode as an error, and is started again for the next one.
"""

import asyncio
import json
import multiprocessing
import os
import shlex
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, ClassVar, TextIO

from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import INVALID_PARAMS
from pydantic import Field, field_validator

from tether.core.errors import BadInput, EnvironmentFailure, did_you_mean
from tether.core.importing import in_one_line
from tether.core.text import visible
from tether.envs.adapters.json_actions import read_object, without_titles
from tether.envs.base import Outcome, TurnOptions, Work
from tether.envs.dataset import BadRows
from tether.envs.qa import prompt
from tether.envs.qa.dataset import load
from tether.envs.qa.env import NO_ANSWER, Questions
from tether.envs.qa.rewards import OWN_THREADS, check_reward, make_grader
from tether.envs.remote.calls import Background

START_SECONDS = 60.0
"""What a server may take to start."""
END_SECONDS = 5.0
"""What it may take to end."""
CALL, ANSWER = "tool_call", "answer"


class McpOptions(TurnOptions):
    """Options of an environment with the tools of a server."""

    max_turns: int = Field(default=5, ge=1)
    """Calls of tools and the answer, in all."""
    data: str | None = None
    """A file or data set of questions; without it, questions about capitals."""
    reward: str = "exact_match"
    """How answers are graded: exact_match, math, or a function of yours as module:function."""
    fields: dict[str, str] = {}
    """Columns under other names, such as {question: Question, answer: Answer}."""
    bad_rows: BadRows = "error"
    """What to do with a malformed row."""
    env: list[str] = []
    """Variables of this process that the server gets, beside PATH and HOME."""
    restart: bool = False
    """Start the server anew for every episode, for one that keeps what agents did."""
    result_chars: int = Field(default=4000, ge=1)
    """Characters of a tool's result that are shown."""

    @field_validator("reward")
    @classmethod
    def _reward(cls, name: str) -> str:
        return check_reward(name)


class McpEnv(Questions[McpOptions]):
    """Questions, and the tools of a server; subclasses have its command or address."""

    server: ClassVar[str]
    Options = McpOptions
    metrics = ("attempts", "calls")
    owner_options = ("data", "reward", "env")
    reply_tags = (CALL, ANSWER)
    retries = False

    def __init__(self, options: McpOptions) -> None:
        questions = load(options.data, options.reward, options.bad_rows, tuple(options.fields.items()), None)
        super().__init__(options, questions, make_grader(options.reward), prompt.wording_of(options.reward))
        self._connection: Connection | None = None
        self._tools = self._connected().tools

    @property
    def work(self) -> Work:
        return "wait"

    @property
    def workers(self) -> int:
        return OWN_THREADS

    @property
    def example(self) -> None:  # type: ignore[override]  # an answer without a call would teach not to call
        return None

    @property
    def format_rule(self) -> str:
        tools = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self._tools.values())
        return (
            f"You may call these tools, one at a time:\n{tools}\n"
            f'Always reply as: <think> your thoughts </think> <{CALL}> {{"name": "NAME", "arguments": {{...}}}} </{CALL}> to call a tool and see '
            f"its result, or <think> your thoughts </think> <{ANSWER}> your answer </{ANSWER}>, which ends the task."
        )

    def generate(self, seed: int) -> None:
        if self.options.restart:
            self.close()
        self._connected()
        self._calls = 0
        super().generate(seed)

    def take(self, answer: str) -> Outcome:
        text = answer.strip()
        if text.startswith(f"<{ANSWER}>"):
            return super().take(text.removeprefix(f"<{ANSWER}>").removesuffix(f"</{ANSWER}>"))
        if not text.startswith(f"<{CALL}>"):
            return self._refused(NO_ANSWER)
        try:
            call = read_object(text.removeprefix(f"<{CALL}>").removesuffix(f"</{CALL}>"))
        except ValueError as error:
            return self._refused(f"The call is no JSON object: {error}.")
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or name not in self._tools:
            return self._refused(f"There is no tool {name!r:.60}: {did_you_mean(str(name), self._tools)}.")
        if not isinstance(arguments, dict):
            return self._refused(f"The arguments are {arguments!r:.60}, not an object in braces.")
        try:
            result = self._connected().call(name, arguments)
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                return self._refused(f"{name} does not take these arguments: {error.message}.")
            raise self._failure(error) from error
        except Exception as error:
            raise self._failure(error) from error
        self._calls += 1
        shown = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content) or "(nothing)"
        return Outcome(
            visible(f"{'Error: ' if result.is_error else ''}{shown}"[: self.options.result_chars]), info=self._info(correct=False)
        )

    def _refused(self, text: str) -> Outcome:
        return Outcome(visible(text), valid=False, info=self._info(correct=False))

    def _info(self, *, correct: bool) -> dict[str, Any]:
        return {**super()._info(correct=correct), "calls": self._calls}

    def _connected(self) -> "Connection":
        if self._connection is None:
            try:
                self._connection = Connection(self.server, self.options.env)
            except Exception as error:
                why = in_one_line(_first(error))
                raise EnvironmentFailure(f"{self.name}: the server does not start ({why}); try the command by itself") from error
        return self._connection

    def _failure(self, error: Exception) -> EnvironmentFailure:
        """What the server failed at. The next reset starts it again."""
        self.close()
        return EnvironmentFailure(f"{self.name}: {in_one_line(_first(error))}")

    def close(self) -> None:
        """End the server."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class Connection:
    """A server that runs. One task, on an event loop of its own, starts and ends it: the package's contexts have to be left by the task that entered them."""

    def __init__(self, server: str, variables: list[str]) -> None:
        self._background = Background(None)
        self._stop = asyncio.Event()
        self._started: Future[Client] = Future()
        self._owner = self._background.submit(self._own(server, variables))
        try:
            self._client = self._started.result(START_SECONDS)
            listed = self._run(self._client.list_tools()).tools
        except BaseException:
            self.close()
            raise
        self.tools = {
            tool.name: {"name": tool.name, "description": tool.description or "", "parameters": without_titles(tool.input_schema)}
            for tool in listed
        }

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        return self._run(self._client.call_tool(name, arguments))

    def close(self) -> None:
        self._run(self._ended())
        self._background.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._background.submit(work).result()

    async def _own(self, server: str, variables: list[str]) -> None:
        printed, output = multiprocessing.Pipe(duplex=False)
        self._background.show_output(printed)
        try:
            with open(output.fileno(), "w", closefd=False) as errors:
                async with Client(_transport(server, variables, errors)) as client:
                    output.close()
                    self._started.set_result(client)
                    await self._stop.wait()
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _ended(self) -> None:
        self._stop.set()
        await asyncio.wait([asyncio.wrap_future(self._owner)], timeout=END_SECONDS)


def _transport(server: str, variables: list[str], errors: TextIO) -> Any:
    if server.startswith(("http://", "https://")):
        return server
    command, *arguments = shlex.split(server)
    passed = {name: os.environ[name] for name in variables if name in os.environ}
    return stdio_client(StdioServerParameters(command=command, args=arguments, env=passed), errors)


def _first(error: BaseException) -> BaseException:
    """The error itself where groups are around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@lru_cache(maxsize=64)
def env_class(server: str) -> type[McpEnv]:
    """The class of a command or of an address."""
    try:
        shlex.split(server)
    except ValueError as error:
        raise BadInput(f"mcp got the command {server!r}: {error}") from error
    return type("McpEnv", (McpEnv,), {"name": f"mcp:{server}", "server": server, "__module__": __name__})
