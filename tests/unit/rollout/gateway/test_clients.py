"""The packages that people write agents with, at a gateway with scripted replies: what each sends back continues the sampled tokens exactly.

The replies spell their calls otherwise than the template would (compact JSON), so that nothing here could be exact by rendering it again.
"""

import asyncio
import copy
import gc
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tether.core.enums import FinishReason
from tether.core.http import serving_app
from tether.core.protocols import Sampling
from tether.core.types import Completion
from tether.models.chat import ChatFormat
from tether.models.messages import AgentChat
from tether.rollout.gateway.app import Gateway
from tether.rollout.gateway.session import Budgets, Session
from tether.rollout.serving.response import ResponseRequest

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages' own: deprecations, connections that they leave open
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REPLIES = (
    '<think>first</think>I look. <tool_call>{"arguments":{"n":1},"name":"look"}</tool_call>',
    '<tool_call>{"name":"look","arguments":{"n":2}}</tool_call><tool_call>{"name":"look","arguments":{"n":3}}</tool_call>',
    "Done: \u201cseen\u201d.",
)
Played = Callable[..., tuple[str, Session]]


@pytest.fixture(scope="module")
def play(tiny: Any) -> Iterator[Played]:
    """Runs a client against a session whose replies are given; returns what it said last, and the session."""
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.chat_template = TEMPLATE
    gateway = Gateway(AgentChat(ChatFormat(tokenizer)), "policy")

    with serving_app(gateway.app(), "gateway") as url:

        def run(client: Callable[[str, str], str], replies: tuple[str, ...] = REPLIES) -> tuple[str, Session]:
            left = iter(replies)

            def submit(request: ResponseRequest) -> Future[Completion]:
                ids = (*tokenizer.encode(next(left), add_special_tokens=False), tokenizer.eos_token_id)
                request.done.set_result(Completion(ids, (0.0,) * len(ids), FinishReason.END_OF_TURN))
                return request.done

            gateway.submit = submit
            secret, session = gateway.open(0, Sampling(), Budgets(9, None, 20_000, 1000))
            said = client(f"{url}/sessions/{secret}/v1", secret)
            gateway.close(secret)
            return said, session

        yield run
        gc.collect()  # what the packages leave open ends here, and not in another test


def check_exact(said: str, session: Session) -> None:
    assert said == "Done: \u201cseen\u201d."
    assert [call.reason for call in session.calls] == ["first", "continues", "continues"]
    assert session.measures()["contexts"] == 1 and session.measures()["tool_calls"] == 3
    last = session.calls[-1]
    assert last.parent is not None and last.prompt[: len(last.parent.tokens)] == last.parent.tokens


@pytest.mark.parametrize("streams", [False, True])
def test_openai(play: Played, streams: bool) -> None:
    openai = pytest.importorskip("openai")
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}}

    def loop(url: str, key: str) -> str:
        client, messages = (
            openai.OpenAI(base_url=url, api_key=key),
            [{"role": "developer", "content": "Look."}, {"role": "user", "content": "Go."}],
        )
        while True:
            fields = {"model": "gpt-4o", "messages": messages, "tools": [tool]}
            if streams:
                with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
                    completion = stream.get_final_completion()
            else:
                completion = client.chat.completions.create(**fields, temperature=0.2)
            assert completion.usage.completion_tokens > 0
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
            for call in messages[-1].get("tool_calls", []):  # what the stream's helper adds is not for sending back
                call["function"] = {name: call["function"][name] for name in ("name", "arguments")}
            if not message.tool_calls:
                return str(message.content)
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "seen"} for call in message.tool_calls]

    check_exact(*play(loop))


@pytest.mark.parametrize("streams", [False, True])
def test_langgraph(play: Played, streams: bool) -> None:
    langchain, prebuilt, tools = (pytest.importorskip(name) for name in ("langchain_openai", "langgraph.prebuilt", "langchain_core.tools"))

    def look(n: int) -> str:
        """Look."""
        return "seen"

    def graph(url: str, key: str) -> str:
        model = langchain.ChatOpenAI(model="gpt-4o", base_url=url, api_key=key, streaming=streams, stream_usage=True)
        agent = prebuilt.create_react_agent(model, [tools.tool(look)], prompt="Look.")
        return str(agent.invoke({"messages": [("user", "Go.")]})["messages"][-1].content)

    check_exact(*play(graph))


@pytest.mark.parametrize("streams", [False, True])
def test_agents_sdk(play: Played, streams: bool) -> None:
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    agents.set_tracing_disabled(True)

    def look(n: int) -> str:
        """Look."""
        return "seen"

    async def run(url: str, key: str) -> str:
        model = agents.OpenAIChatCompletionsModel("gpt-4o", openai.AsyncOpenAI(base_url=url, api_key=key))
        agent = agents.Agent(name="a", instructions="Look.", tools=[agents.function_tool(look)], model=model)
        if not streams:
            return str((await agents.Runner.run(agent, "Go.")).final_output)
        result = agents.Runner.run_streamed(agent, "Go.")
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    check_exact(*play(lambda url, key: asyncio.run(run(url, key))))


def test_smolagents(play: Played) -> None:
    """It writes its history anew, as text: every call is a context of its own, and its first choice of tools is refused by name."""
    smolagents = pytest.importorskip("smolagents")

    class Look(smolagents.Tool):  # type: ignore[misc, name-defined]
        name, description, output_type = "look", "Look.", "string"
        inputs = {"n": {"type": "integer", "description": "how often"}}

        def forward(self, n: int) -> str:
            return "seen"

    def agent(url: str, key: str, **options: Any) -> str:
        model = smolagents.OpenAIServerModel("gpt-4o", api_base=url, api_key=key, **options)
        return str(smolagents.ToolCallingAgent(tools=[Look()], model=model, max_steps=4, verbosity_level=0).run("Go."))

    done = '<tool_call>{"name":"final_answer","arguments":{"answer":"seen"}}</tool_call>'
    said, session = play(lambda url, key: agent(url, key, tool_choice="auto"), (REPLIES[0], done))
    assert said == "seen" and [call.reason for call in session.calls] == ["first", "edited"]
    with pytest.raises(smolagents.AgentGenerationError, match="request key 'tool_choice': got 'required'; it should be 'auto' or 'none'"):
        play(agent)


def test_a_reply_goes_out_as_it_was_read(play: Played) -> None:
    """The wire of all clients: reasoning apart, calls with their arguments as JSON, ids that come back."""
    httpx = pytest.importorskip("httpx")

    def ask(url: str, key: str) -> str:
        tools = [{"type": "function", "function": {"name": "look"}}]
        body = {"messages": [{"role": "user", "content": "Go."}], "tools": tools}
        return json.dumps(httpx.post(f"{url}/chat/completions", json=body, trust_env=False).json()["choices"][0])

    said, _ = play(ask)
    function = {"name": "look", "arguments": '{"n": 1}'}
    assert json.loads(said) == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "I look. ",
            "reasoning_content": "first",
            "tool_calls": [{"id": "c00000000", "type": "function", "function": function}],
        },
        "finish_reason": "tool_calls",
        "logprobs": None,
    }
    broken = '<think>so</think><tool_call>{"name": </tool_call>'
    said, session = play(ask, (broken,))
    assert json.loads(said)["message"] == {"role": "assistant", "content": broken} and session.measures()["unparsed_calls"] == 1
