"""Agents through the gateway: real HTTP, the embedded model, exact tokens; and everything that an agent can do wrong."""

import asyncio
import copy
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import httpx
import pytest

import tether
from tether.core.enums import StopReason
from tether.core.errors import BadInput, ConfigError, EnvironmentFailure
from tether.core.protocols import Sampling
from tether.core.types import Trajectory
from tether.models.chat import ChatFormat
from tether.models.policy import Policy
from tether.models.tool_formats import ToolCall
from tether.rollout.engines.native import NativeEngine
from tether.rollout.episode import EpisodeRules, EpisodeSeeds
from tether.rollout.gateway.agents import AgentFailure, CommandAgent, FunctionAgent, ModelAddress, Result, read_result
from tether.rollout.gateway.player import AgentPlayer, AgentRules
from tether.rollout.pack import pack
from tether.rollout.sampler import check_resets, group_trajectories

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # else every worker imports this module, and torch with it: 5 s

SAMPLING = Sampling(max_tokens=16)
RULES = EpisodeRules(max_context=600, max_tokens=16, format_penalty=-0.1)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def ask(llm: ModelAddress, messages: list[Any], headers: dict[str, str] | None = None, **fields: Any) -> Any:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        reply = await client.post(
            f"{llm.base_url}/chat/completions", json={"model": "any", "messages": messages, **fields}, headers=headers
        )
        reply.raise_for_status()
        return reply.json()["choices"][0]["message"]


def say(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


Play = Callable[..., list[Trajectory]]


@pytest.fixture
def play(tiny: Any) -> Iterator[Play]:
    """Plays an agent; returns the trajectories of its episodes."""
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.chat_template = TEMPLATE
    policy = Policy(tiny.model, tokenizer)
    players: list[AgentPlayer] = []

    def run(
        agent: Any, episodes: int = 2, sampling: Sampling = SAMPLING, rules: EpisodeRules = RULES, plays: int = 1, **options: Any
    ) -> list[Trajectory]:
        engine = NativeEngine(policy, max_rows=8, max_context=600, keeps_slots=True)
        player = AgentPlayer(FunctionAgent(agent) if callable(agent) else agent, AgentRules(**options))
        players.append(player)
        plan = [EpisodeSeeds(0, n, 5, n, 1000 + n) for n in range(episodes)]
        for _ in range(plays):
            played = player.play(lambda seeds: {"n": seeds.member}, plan, engine, ChatFormat(tokenizer), sampling, rules, None)
        return played

    yield run
    for player in players:
        player.close()


# --- conversations ---


async def three_turns(task: Any, llm: ModelAddress) -> float:
    messages: list[Any] = [say("Be brief.", "system"), say(f"Task {task['n']}")]
    for _ in range(3):
        message = await ask(llm, messages)
        messages += [{"role": "assistant", "content": message["content"]}, say("and then?")]
    return 0.5


def test_a_conversation_is_one_sequence_of_the_very_tokens(play: Play) -> None:
    for trajectory in play(three_turns):
        assert (trajectory.stop_reason, trajectory.reward, len(trajectory.turns)) == (StopReason.FAILURE, 0.5, 3)
        (sequence,) = trajectory.sequences
        assert [turn.new_context for turn in trajectory.turns] == [True, False, False]
        assert trajectory.measures["calls"] == 3 and trajectory.measures["contexts"] == 1
        assert sum(sequence.loss_mask) == sum(len(turn.response_ids) for turn in trajectory.turns)
        assert all(len(turn.logprobs) == len(turn.response_ids) > 0 for turn in trajectory.turns)


def test_the_same_tokens_whatever_runs_beside(play: Play) -> None:
    alone, together = play(three_turns, 3, concurrency=1), play(three_turns, 3, concurrency=3)
    assert [turn.response_ids for one in alone for turn in one.turns] == [turn.response_ids for one in together for turn in one.turns]


def test_history_as_a_template_renders_it_is_trained_as_it_was_seen(play: Play) -> None:
    (exact,), (rendered,) = play(three_turns, 1), play(three_turns, 1, exact=False)
    assert exact.turns[0].response_ids == rendered.turns[0].response_ids
    assert exact.measures["contexts"] == 1 and 1 <= rendered.measures["contexts"] <= 3


async def forks(task: Any, llm: ModelAddress) -> float:
    first = [say("begin")]
    reply = await ask(llm, first)
    history = [*first, {"role": "assistant", "content": reply["content"]}]
    await asyncio.gather(*(ask(llm, [*history, say(word)]) for word in ("left", "right")))
    return 1.0


def test_two_continuations_of_one_reply_train_it_once(play: Play) -> None:
    for trajectory in play(forks):
        assert trajectory.stop_reason is StopReason.SUCCESS and trajectory.measures["contexts"] == 2
        first, second = trajectory.sequences
        assert len(first.turns) == 2 and len(second.turns) == 1
        opening = first.turns[0]
        assert second.turns[0].context_ids[: len(opening.context_ids)] == opening.context_ids
        assert sum(opening.response_ids == turn.response_ids for turn in trajectory.turns) == 1


async def rewrites(task: Any, llm: ModelAddress) -> float:
    reply = await ask(llm, [say("s", "system"), say("one")])
    await ask(llm, [say("s", "system"), say("one"), {"role": "assistant", "content": reply["content"] + "!"}, say("two")])
    await ask(llm, [say("You are a title writer.", "system"), say("Give a title.")])
    await ask(llm, [say("s", "system"), say("one")], tools=[TOOL])
    return 0.0


def test_why_contexts_began(play: Play) -> None:
    (trajectory,) = play(rewrites, 1)
    reasons = {name: trajectory.measures[f"contexts_{name}"] for name in ("edited", "other", "tools", "forked", "template")}
    assert reasons == {"edited": 1, "other": 1, "tools": 1, "forked": 0, "template": 0} and trajectory.measures["contexts"] == 4
    assert trajectory.turns[0].observation == "[system] s\n[user] one", "the context with tools comes first"


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_reward_stands_where_it_is_trained(play: Play, workers: int) -> None:
    (trajectory,) = play(rewarded, 1, train_calls="with_tools", workers=workers)
    assert [(turn.trained, turn.reward) for turn in trajectory.turns] == [(True, 1.0), (False, 0.0)]
    assert float(pack([trajectory]).rewards_BT.sum()) == trajectory.reward == 1.0
    with pytest.raises(BadInput, match=r"agent\.train_calls 'json:dumps' failed at call 0"):  # not hang, wherever it is played
        play(rewarded, 1, train_calls="json:dumps", workers=workers)


async def rewarded(task: Any, llm: ModelAddress) -> float:
    await ask(llm, [say("one")], tools=[TOOL])
    await ask(llm, [say("Give a title.")])
    return 1.0


def test_streams_are_the_same_reply(play: Play) -> None:
    said: dict[bool, str] = {}

    async def agent(task: Any, llm: ModelAddress) -> float:
        body = {
            "model": "x",
            "messages": [say("hello")],
            "stream": bool(task["n"]),
            "stream_options": {"include_usage": True} if task["n"] else None,
        }
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            reply = await client.post(f"{llm.base_url}/chat/completions", json=body)
        if task["n"]:
            events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
            assert reply.headers["content-type"].startswith("text/event-stream") and events[-1] == "[DONE]"
            chunks = [json.loads(event) for event in events[:-1]]
            assert chunks[-1]["usage"]["completion_tokens"] > 0
            said[True] = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
            assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]][-1] in ("stop", "length")
        else:
            said[False] = reply.json()["choices"][0]["message"]["content"]
        return 0.0

    play(agent, 2, Sampling(temperature=0.0, max_tokens=16))
    assert said[True] == said[False] != ""


def test_a_retry_is_joined_to_the_reply_that_it_waits_for(play: Play) -> None:
    async def agent(task: Any, llm: ModelAddress) -> float:
        waiting = asyncio.ensure_future(ask(llm, [say("x")]))
        await asyncio.sleep(0.1)
        first, again = await asyncio.gather(waiting, ask(llm, [say("x")], {"x-stainless-retry-count": "1"}))
        later = await ask(llm, [say("x")], {"x-stainless-retry-count": "2"})
        assert first == again == later
        other = await ask(llm, [say("x")])  # not a retry: another sample
        return float(other != first)

    (trajectory,) = play(agent, 1)
    assert trajectory.measures["calls"] == 2 and trajectory.error is None


# --- what goes wrong ---


async def crashes(task: Any, llm: ModelAddress) -> float:
    await ask(llm, [say("x")])
    if task["n"]:
        raise RuntimeError(f"boom at {llm.base_url}")
    return 1.0


def test_a_crash_is_no_evidence_and_keeps_the_secret(play: Play) -> None:
    fine, broken = play(crashes)
    assert fine.stop_reason is StopReason.SUCCESS
    assert (
        broken.stop_reason is StopReason.ENV_ERROR
        and broken.error is not None
        and broken.error.startswith("agent raised RuntimeError: boom at http")
    )
    assert "SECRET" in broken.error


@pytest.mark.parametrize(
    ("returned", "line"),
    [
        (None, "agent returned None; return a number"),
        ("1.0", "agent returned '1.0'; return a number"),
        (math.nan, "agent returned nan; return a finite number"),
        ({"score": 1}, "return reward, success, measures"),
        ([1], "agent returned a list"),
        (Result(1.0, success="yes"), "return True or False"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_reward(returned: Any, line: str) -> None:
    with pytest.raises(AgentFailure, match=line):
        read_result(returned)


def test_rewards() -> None:
    assert read_result(1) == Result(1.0) and read_result({"reward": 0.5, "success": True}) == Result(0.5, True)
    assert read_result(Result(1.0, measures={"steps": 3})).measures == {"steps": 3.0}


def test_an_agent_that_hangs_is_ended(play: Play) -> None:
    async def hangs(task: Any, llm: ModelAddress) -> float:
        await ask(llm, [say("x")])
        await asyncio.sleep(0 if task["n"] else 60)
        return 0.0

    begun = time.monotonic()
    late, fine = play(hangs, timeout=2.0)
    assert late.error == "agent ran for 2 s without an end (agent.timeout)" and fine.error is None
    assert time.monotonic() - begun < 30


def test_an_agent_that_never_asks_stops_the_run(play: Play) -> None:
    async def silent(task: Any, llm: ModelAddress) -> float:
        return 1.0

    groups = group_trajectories(play(silent))
    with pytest.raises(EnvironmentFailure, match=r"no episode of step 1 could begin: 2 of 2 .*the agent made no request to its address"):
        check_resets(groups, "step 1")


def test_some_that_fail_before_they_ask_do_not_end_the_others(play: Play) -> None:
    """Played again alone, they fail alike; and an agent that exits ends its episode, not the run."""

    async def exits(task: Any, llm: ModelAddress) -> float:
        if task["n"]:
            sys.exit(3)
        await ask(llm, [say("x")])
        return 1.0

    fine, *ended = play(exits, 3)
    assert fine.error is None and [one.error for one in ended] == ["agent raised SystemExit: 3"] * 2


def test_budgets_end_a_conversation_and_its_reward_counts(play: Play) -> None:
    async def talks_on(task: Any, llm: ModelAddress) -> float:
        for n in range(9):
            await ask(llm, [say(f"x {n}")])
        return 1.0

    (trajectory,) = play(talks_on, 1, max_calls=3)
    assert (trajectory.stop_reason, len(trajectory.turns), trajectory.error) == (StopReason.TURN_LIMIT, 3, None)
    (trajectory,) = play(talks_on, 1, max_tokens=1)
    assert (trajectory.stop_reason, len(trajectory.turns), trajectory.error) == (StopReason.TURN_LIMIT, 1, None)

    async def long_prompt(task: Any, llm: ModelAddress) -> float:
        await ask(llm, [say("x")])
        with pytest.raises(httpx.HTTPStatusError) as refused:
            await ask(llm, [say("word " * 2000)])
        assert refused.value.response.status_code == 400 and refused.value.response.json()["error"]["code"] == "context_length_exceeded"
        return 0.25

    (trajectory,) = play(long_prompt, 1)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.CONTEXT_FULL, 0.25)


def test_requests_after_the_end_and_to_unknown_addresses(play: Play) -> None:
    answers: list[int] = []
    waiting: list[asyncio.Task[None]] = []

    async def zombie(task: Any, llm: ModelAddress) -> float:
        await ask(llm, [say("x")])

        async def later() -> None:
            await asyncio.sleep(0.3)
            async with httpx.AsyncClient(trust_env=False) as client:
                for url in (llm.base_url, llm.base_url.replace(llm.api_key, "other")):
                    answers.append((await client.post(f"{url}/chat/completions", json={"messages": [say("x")]})).status_code)

        if task["n"] == 0:
            waiting.append(asyncio.ensure_future(later()))
        else:
            await asyncio.sleep(1.5)
        return 0.0

    play(zombie)
    assert answers == [410, 404] and waiting


DEEP = json.loads('{"a": ' * 150 + "1" + "}" * 150)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "request key 'n': got 2; it should be 1"),
    ({"tool_choice": "required", "tools": [TOOL]}, "request key 'tool_choice': got 'required'; it should be 'auto' or 'none'"),
    ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "request key 'tool_choice'"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "request key 'response_format.type': got 'json_schema'"),
    ({"logprobs": True}, "request key 'logprobs': got True"),
    ({"max_tokens": 0}, "request key 'max_tokens': got 0"),
    ({"max_tokens": 10**30}, "request key 'max_tokens'"),
    ({"temprature": 1}, "unknown request key 'temprature': did you mean 'temperature'"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "unknown request key 'chat_template_kwargs'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "the model reads text only"),
    ({"messages": [say("half \ud800")]}, "holds half of a character"),
    ({"tools": [{**TOOL, "function": {"name": "look", "description": "\udfff"}}]}, "holds half of a character"),
    ({"tools": [{**TOOL, "function": {"name": "look", "parameters": DEEP}}]}, "more than 100 levels"),
    ({"messages": [say("x", "critic")]}, "has the role 'critic'"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "has the role ['user']"),
    ({"messages": [{"role": "user", "content": 5}]}, "has content that is a int"),
    ({"messages": [{"role": "user", "content": [5]}]}, "has a part of type 'int'"),
    ({"messages": [{"role": "user"}]}, "has no content"),
    ({"messages": [{"role": "assistant", "tool_calls": "look"}]}, "tool_calls that are no function calls"),
    ({"messages": [{"role": "assistant", "tool_calls": 7}]}, "tool_calls that are no function calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{"}}]}]}, "arguments are no JSON"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": [1]}}]}]}, "arguments are no object"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": '{"a": "\\ud800"}'}}]}]},
        "half of a character",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": json.dumps(DEEP)}}]}]}, "more than 100"),
    ({"tools": [{"type": "web_search"}]}, "is of type 'web_search'"),
    ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0] is of type 'function'; send function tools with a name"),
    ({"tools": [{"type": "function", "function": {"name": "look", "parameters": []}}]}, "parameters that are no JSON schema"),
]
WRONG_TYPES = (
    *("model", "messages", "tools", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options", "n", "temperature", "top_p"),
    *("top_k", "min_p", "seed", "presence_penalty", "logit_bias", "response_format", "modalities", "user", "store", "metadata"),
    *("parallel_tool_calls", "service_tier", "reasoning_effort", "prompt_cache_key"),
)
REFUSED += [({name: [[]] if name != "messages" else {}}, f"request key '{name}") for name in WRONG_TYPES if name != "tools"]
REFUSED += [({"tools": "look"}, "request key 'tools'")]


def test_requests_that_cannot_be_honoured(play: Play) -> None:
    async def agent(task: Any, llm: ModelAddress) -> float:
        await ask(llm, [say("fine")], temperature=0.3, store=False, parallel_tool_calls=True)
        async with httpx.AsyncClient(trust_env=False) as client:
            for fields, line in REFUSED:
                body = json.dumps({"messages": [say("x")], **fields}).encode()
                reply = await client.post(f"{llm.base_url}/chat/completions", content=body, headers={"Content-Type": "application/json"})
                assert reply.status_code == 400 and line in (said := reply.json()["error"]["message"]), (fields, reply.text)
                assert "\n" not in said
        return 0.0

    (trajectory,) = play(agent, 1)
    assert trajectory.error is None and trajectory.measures["calls"] == 1


def test_functions_that_are_no_agents() -> None:
    def plain(task: Any, llm: Any) -> float:
        return 1.0

    async def one(task: Any) -> float:
        return 1.0

    with pytest.raises(BadInput, match="is no async function; write `async def plain"):
        FunctionAgent(plain)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"does not take \(task, llm\)"):
        FunctionAgent(one)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="there is no program 'no-such-program'"):
        CommandAgent("no-such-program --x")


# --- commands ---

PROGRAM = """
import json, os, sys, subprocess, time, urllib.request
task = json.load(open(os.environ["TETHER_TASK"]))
body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
request = urllib.request.Request(os.environ["TETHER_BASE_URL"] + "/chat/completions", body, {"Content-Type": "application/json"})
json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request))
if task["n"] == 1:
    sys.exit("no luck")
if task["n"] == 2:
    subprocess.Popen(["sleep", "61.MARK"])
    time.sleep(60)
print("thinking")
print("no reward" if task["n"] == 3 else json.dumps({"reward": 1.0, "measures": {"lines": 2}}))
"""


def test_a_program_per_episode(play: Play, tmp_path: Path) -> None:
    mark = str(os.getpid())  # others may run this test on the same machine
    (tmp_path / "agent.py").write_text(PROGRAM.replace("MARK", mark))
    fine, exits, hangs, silent = play(CommandAgent(f"{sys.executable} {tmp_path / 'agent.py'}"), 4, timeout=8.0)
    assert (fine.stop_reason, fine.reward, fine.measures["lines"], len(fine.turns)) == (StopReason.SUCCESS, 1.0, 2.0, 1)
    assert exits.error == "agent command ended with exit code 1: no luck"
    assert hangs.error == "agent ran for 8 s without an end (agent.timeout)"
    assert silent.error is not None and silent.error.startswith("agent command wrote no reward: its last line is 'no reward'")
    running = [Path(f"/proc/{pid.name}/cmdline").read_bytes() for pid in Path("/proc").glob("[0-9]*") if (pid / "cmdline").exists()]
    assert not any(f"61.{mark}\0".encode() in command for command in running), "what it started ended with it"


# --- training ---


async def learner_agent(task: dict[str, Any], llm: ModelAddress) -> float:
    """Two turns; in some episodes a sub-agent beside them; every fourth task crashes."""
    reply = await ask(llm, [say(task["question"])])
    history = [say(task["question"]), {"role": "assistant", "content": reply["content"]}]
    calls = [ask(llm, [*history, say("and?")])] + ([ask(llm, [*history, say("or?")])] if task["n"] % 2 else [])
    answers = await asyncio.gather(*calls)
    if task["n"] % 4 == 0:
        raise RuntimeError("boom")
    return (len(answers[0]["content"]) % 5) / 4


def train(folder: Path, tasks: Path, **more: Any) -> Any:
    rollout = {"num_groups": 3, "group_size": 2, "max_tokens": 8}
    settings: dict[str, Any] = {
        "model": {"device": "cpu"},
        "rollout": rollout,
        "evaluation": {"prompts": 1},
        "diagnosis": {"every": 0},
        **more,
    }
    return tether.train(agent=learner_agent, tasks=tasks, steps=2, out=folder, filter="all", **settings)


def test_a_run_with_an_agent_is_exact_and_repeats(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"id": str(n), "n": n, "question": f"What is {n}?"}) + "\n" for n in range(60)))
    first, again = train(tmp_path / "a", tasks), train(tmp_path / "b", tasks)
    assert first.finished == again.finished == "all 2 steps done"
    for step in (1, 2):
        assert first.metrics("update/mismatch")[step] < 1e-5
        for name in ("rollout/reward_mean", "rollout/env/agent/contexts", "rollout/errors"):
            assert first.metrics(name)[step] == again.metrics(name)[step], name
        # Calls join the batch as they come, and a batch of another size rounds otherwise: log-probs agree to their last digits.
        assert first.metrics("update/loss")[step] == pytest.approx(again.metrics("update/loss")[step], rel=1e-3)
    assert 0 < sum(first.metrics("rollout/errors")[step] for step in (1, 2)) < 12, "some of the episodes crashed"
    assert _said(tmp_path / "a") == _said(tmp_path / "b")


def _said(run: Path) -> list[Any]:
    """Every reply of a run, in the order of its record."""
    records = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    return [(record["step"], record["reward"], [turn["response"] for turn in record["turns"]]) for record in records]


async def tool_agent(task: dict[str, Any], llm: ModelAddress) -> float:
    """A title, which is no part of the task, then one request with tools."""
    await ask(llm, [say(f"A title for {task['n']}")])
    await ask(llm, [say(task["question"])], tools=[TOOL])
    return float(task["n"] % 2)


def everything_is_a_call(text: str, tools: Any) -> tuple[str, tuple[ToolCall, ...]]:
    return "", (ToolCall("look", {"at": text}),)


def test_a_run_measures_calls_and_trains_those_with_tools(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"n": n, "question": f"What is {n}?"}) + "\n" for n in range(60)))
    given: dict[str, Any] = {
        "model": {"device": "cpu"},
        "rollout": {"num_groups": 4, "group_size": 2, "max_tokens": 8},
        "evaluation": {"prompts": 1},
        "agent.tool_format": f"{__name__}:everything_is_a_call",
        "agent.train_calls": "with_tools",
    }
    run = tether.train(agent=tool_agent, tasks=tasks, steps=1, out=tmp_path / "run", filter="all", **given)
    assert run.metrics("information_calls/num_reasonings")[1] == 8 and 0 <= run.metrics("information_calls/retrieval_acc")[1] <= 1
    records = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    turns = [turn for record in records if record["split"] == "train" for turn in record["turns"]]
    assert [(turn.get("trained", True), "calls_span" in turn) for turn in turns] == [(True, True), (False, False)] * 8
    assert run.metrics("update/tokens_trained")[1] == sum(len(turn["response_ids"]) for turn in turns if turn.get("trained", True))
    with pytest.raises(BadInput, match="did you mean 'with_tools'"):
        tether.train(agent=tool_agent, tasks=tasks, out=tmp_path / "x", **{**given, "agent.train_calls": "with_tool"})


def test_settings_of_agents(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"q": 1}\n')
    with pytest.raises(ConfigError, match="has no tasks; give a file"):
        tether.train(agent=learner_agent, out=tmp_path / "x")
    with pytest.raises(ConfigError, match="choose grpo, dapo or dr_grpo"):
        tether.train(agent=learner_agent, tasks=tasks, algo="ppo", out=tmp_path / "x")
    with pytest.raises(BadInput, match="there is no module 'no_such_module'"):
        tether.train(agent="no_such_module:agent", tasks=tasks, out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


# --- workers ---


def test_workers_sample_the_same_tokens(play: Play) -> None:
    here, there = play(three_turns, 4), play(three_turns, 4, workers=2)
    assert [turn.response_ids for one in here for turn in one.turns] == [turn.response_ids for one in there for turn in one.turns]
    assert [one.measures for one in here] == [one.measures for one in there] and [one.member for one in there] == [0, 1, 2, 3]


async def kills_its_process(task: Any, llm: ModelAddress) -> float:
    await ask(llm, [say("begin")])
    if task["n"] == 0:
        os.kill(os.getpid(), 9)
    await asyncio.sleep(0.5)  # the other episode of the same worker goes with it, those of others do not
    return 1.0


def test_an_agent_that_kills_its_process_errors_the_episodes_of_that_worker(play: Play) -> None:
    first, second, *_ = played = play(kills_its_process, 4, workers=2)
    assert (first.stop_reason, first.error) == (StopReason.ENV_ERROR, "the process that played the agent was ended by SIGKILL")
    assert second.stop_reason is StopReason.SUCCESS and len(played) == 4


def test_an_agent_that_cannot_be_sent_is_played_here(play: Play) -> None:
    lock = threading.Lock()

    async def holds_a_lock(task: Any, llm: ModelAddress) -> float:
        with lock:
            await ask(llm, [say("begin")])
        return 1.0

    (trajectory,) = play(holds_a_lock, 1, workers=2)
    assert trajectory.stop_reason is StopReason.SUCCESS


async def leaves_requests_behind(task: Any, llm: ModelAddress) -> float:
    await ask(llm, [say("begin")], max_tokens=4)
    address = httpx.URL(f"{llm.base_url}/chat/completions")
    body = json.dumps({"messages": [say("a long one")]}).encode()
    head = f"POST {address.path} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writers = [(await asyncio.open_connection(address.host, address.port))[1] for _ in range(4)]
    for writer in writers:  # asked, and not waited for
        writer.write(head.encode() + body)
    await asyncio.sleep(0.15)  # until they are sampled
    for writer in writers:
        writer.close()
    return 1.0


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_request_that_outlives_its_episode_ends_no_later_rollout(play: Play, workers: int) -> None:
    sampling, rules = Sampling(max_tokens=500), EpisodeRules(max_context=600, max_tokens=500, format_penalty=0.0)
    (trajectory,) = play(leaves_requests_behind, 1, sampling, rules, plays=2, workers=workers)
    assert trajectory.stop_reason is StopReason.SUCCESS and trajectory.turns


def test_an_agent_whose_module_is_not_there_for_others(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone_agent.py").write_text("async def agent(task, llm):\n    return 1.0\n")
    with monkeypatch.context() as context:
        context.syspath_prepend(str(tmp_path))
        import gone_agent
    with pytest.raises(BadInput, match=r"cannot be loaded in another process: .*gone_agent.*agent.workers=0"):
        play(gone_agent.agent, 1, workers=1)
