"""Sampled tokens a second of an agent through the gateway, beside the same conversations driven inside the engine.

    python benchmarks/gateway.py --model path/to/model --tasks tasks.jsonl                # tasks: python examples/sql_agent.py tasks.jsonl
    python benchmarks/gateway.py --model smollm2 --tasks tasks.jsonl --episodes 8 --agent http

Both ways play examples/sql_agent.py: the same prompts, tools and budgets. "Gateway" is what `tether train --agent` does: the agent's program asks
over HTTP, with OpenAI's client (`--agent openai`) or with httpx alone (`--agent http`: what the client costs is then left out). "Native" is the least that these
conversations cost: tools are called by the conversation itself, between two calls of the decoder. Each way samples its own replies, so rates
are compared, not texts. The ways alternate; the first round is not counted.
"""

import argparse
import asyncio
import json
import sqlite3
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from shapes import add_model_options, measured_model, say

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import sql_agent

from tether.core.protocols import PromptTokens, Sampling
from tether.core.seeding import generator
from tether.core.types import Completion
from tether.models.chat import ChatFormat
from tether.models.messages import AgentChat, read_messages, read_tools
from tether.models.policy import Policy
from tether.rollout.engines.native import NativeEngine
from tether.rollout.episode import EpisodeRules, EpisodeSeeds
from tether.rollout.gateway.agents import FunctionAgent, ModelAddress
from tether.rollout.gateway.player import AgentPlayer, AgentRules
from tether.rollout.gateway.session import Budgets, Session
from tether.rollout.serving.chat import reply_message

MAX_TOKENS, MAX_CONTEXT, MAX_CALLS = 200, 3000, 6


class NativeConversation:
    """The agent as a conversation of the engine: what the program does between two replies, without a program and without HTTP."""

    closing_tags: tuple[str, ...] = ()
    prefix_key = 0

    def __init__(self, task: dict[str, Any], chat: AgentChat, seed: int) -> None:
        self.uniforms = generator("benchmark", seed)
        self._session, self._chat = Session(chat, seed, Budgets(MAX_CALLS, None, MAX_CONTEXT, MAX_TOKENS)), chat
        self._db = sqlite3.connect(":memory:")
        self._db.executescript(task["sql"])
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": sql_agent.SYSTEM},
            {"role": "user", "content": task["question"]},
        ]
        self._tools, self._seen = read_tools(sql_agent.TOOLS), 0
        self.num_tokens = self.num_calls = 0

    def begin(self) -> PromptTokens:
        if self.num_calls == MAX_CALLS:
            return None
        self._call = self._session.begin(read_messages(self._messages), self._tools)
        if len(self._call.prompt) + MAX_TOKENS > MAX_CONTEXT:
            return None
        return self._call.prompt[self._seen :]

    def receive(self, completion: Completion) -> PromptTokens:
        self.num_tokens, self.num_calls = self.num_tokens + len(completion.token_ids), self.num_calls + 1
        self._session.finish(self._call, completion, self._chat.reply_text(completion))
        self._seen = len(self._call.tokens)
        assert self._call.reply is not None and self._call.message is not None
        message = reply_message(self._call.reply, self._call.message.call_ids)
        self._messages.append(message)
        for call in message.get("tool_calls", []):
            shown = sql_agent.run_tool(self._db, call["function"]["name"], json.loads(call["function"]["arguments"]))
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": shown[:600]})
        return self.begin() if message.get("tool_calls") else None


async def http_agent(task: dict[str, Any], llm: ModelAddress) -> float:
    """The same loop over httpx."""
    db = sqlite3.connect(":memory:")
    db.executescript(task["sql"])
    messages: list[dict[str, Any]] = [{"role": "system", "content": sql_agent.SYSTEM}, {"role": "user", "content": task["question"]}]
    for _ in range(MAX_CALLS):
        body = {"model": llm.model, "messages": messages, "tools": sql_agent.TOOLS, "max_tokens": MAX_TOKENS}
        reply = await _CLIENT[0].post(f"{llm.base_url}/chat/completions", json=body)
        reply.raise_for_status()
        message = reply.json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return float(sql_agent.is_right(message["content"] or "", task))
        for call in message["tool_calls"]:
            shown = sql_agent.run_tool(db, call["function"]["name"], json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": shown[:600]})
    return 0.0


_CLIENT: list[httpx.AsyncClient] = []


async def http_agent_in_loop(task: dict[str, Any], llm: ModelAddress) -> float:
    if not _CLIENT or _CLIENT[0].is_closed or getattr(_CLIENT[0], "loop", None) is not asyncio.get_running_loop():
        client = httpx.AsyncClient(timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None))
        client.loop = asyncio.get_running_loop()  # type: ignore[attr-defined]
        _CLIENT[:] = [client]
    return await http_agent(task, llm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--group", type=int, default=8, help="members that play one task")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--agent", choices=("openai", "http"), default="openai")
    parser.add_argument("--workers", type=int, default=8, help="processes that play the episodes; 0: this one")
    parser.add_argument("--speculative", type=int, default=8)
    options = parser.parse_args()
    loaded = measured_model(options.model, options.device, options.dtype)
    policy = Policy(loaded.model, loaded.tokenizer)
    format_ = ChatFormat(loaded.tokenizer, policy.end_of_turn_ids)
    tasks = [json.loads(line) for line in Path(options.tasks).read_text().splitlines()]
    agent = FunctionAgent(sql_agent.agent if options.agent == "openai" else http_agent_in_loop)
    player = AgentPlayer(agent, AgentRules(max_calls=MAX_CALLS, concurrency=options.episodes, workers=options.workers))
    sampling, rules = Sampling(max_tokens=MAX_TOKENS), EpisodeRules(MAX_CONTEXT, MAX_TOKENS, 0.0)

    def engine(keeps_slots: bool) -> NativeEngine:
        return NativeEngine(
            policy,
            max_rows=options.episodes,
            max_context=MAX_CONTEXT,
            cache_gb=None if policy.device.type == "cpu" else 20.0,
            keeps_slots=keeps_slots,
            speculative_tokens=options.speculative if policy.device.type == "cuda" else 0,
        )

    gateway_engine, native_engine = engine(True), engine(False)

    def by_gateway(number: int) -> tuple[int, int, str]:
        plan = [
            EpisodeSeeds(n // options.group, n % options.group, n // options.group, 0, number * 10_000 + n) for n in range(options.episodes)
        ]
        played = player.play(
            lambda seeds: tasks[(number * 100 + seeds.instance) % len(tasks)], plan, gateway_engine, format_, sampling, rules, None
        )
        errors = {t.error for t in played if t.error}
        turns = [turn for t in played for turn in t.turns]
        contexts = sum(turn.new_context for turn in turns)
        right = sum(t.success for t in played) / len(played)
        stats = gateway_engine.statistics
        said = f"{right:.0%} right, {contexts} contexts, fed {stats.fed_tokens}, shared {stats.shared_tokens}" + (
            f", ERRORS {list(errors)[:2]}" if errors else ""
        )
        return sum(len(turn.response_ids) for turn in turns), len(turns), said

    def by_native(number: int) -> tuple[int, int, str]:
        chat = AgentChat(format_)
        made = [
            NativeConversation(tasks[(number * 100 + n // options.group) % len(tasks)], chat, number * 10_000 + n)
            for n in range(options.episodes)
        ]
        native_engine.run(made, sampling)
        stats = native_engine.statistics
        return sum(c.num_tokens for c in made), sum(c.num_calls for c in made), f"fed {stats.fed_tokens}, shared {stats.shared_tokens}"

    rates: dict[str, list[float]] = {"native": [], "gateway": []}
    for number in range(options.rounds + 1):
        for name, way in (("native", by_native), ("gateway", by_gateway)):
            start = time.perf_counter()
            tokens, calls, said = way(number)
            seconds = time.perf_counter() - start
            say(
                f"round {number} {name:8}{seconds:7.2f} s, {calls} calls, {tokens} tokens, {tokens / calls:.0f} a call, "
                f"{tokens / seconds:.0f} tokens/s, {calls / seconds:.0f} calls/s; {said}"
            )
            if number:
                rates[name].append(tokens / seconds)
    native, gateway = (statistics.median(rates[name]) for name in ("native", "gateway"))
    say(f"native {native:.0f} tokens/s, gateway {gateway:.0f} tokens/s, {gateway / native:.2f} of native")
    player.close()


if __name__ == "__main__":
    main()
