"""A model behind a chat endpoint is evaluated like one that is loaded here: over real HTTP, by `tether serve` and by a server that misbehaves."""

import asyncio
import gc
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

import tether
from tether.cli.main import main
from tether.core.enums import StopReason
from tether.core.errors import BadInput, EngineUnavailable, ModelUnavailable
from tether.core.http import serving_app
from tether.core.protocols import few_shot_of
from tether.models import chat_endpoint, endpoint
from tether.rollout.serving.app import serving_model
from tether.training.callbacks import Callback

LAKE = {"max_turns": 2, "slip": 0.0, "instructions": "plain"}
ANSWER = "<think> down </think> <answer> Right || Down </answer>"
KEY = "sk-very-secret-123"

Reply = tuple[int, dict[str, Any], dict[str, str]]
"""Status, body, headers."""


def said(text: str | None, finish: str = "stop", usage: Any = (10, 5), **message: Any) -> Reply:
    counted = {} if usage is None else {"usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    return 200, {"choices": [choice], **counted}, {}


def refused(status: int, words: str, **headers: str) -> Reply:
    return status, {"error": {"message": words}}, headers


class ChatServer:
    """An OpenAI-compatible server that answers by a function of the request's body and number."""

    def __init__(self, respond: Callable[[dict[str, Any], int], Reply], models: tuple[str, ...] = ("m",)) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.app = FastAPI()
        lock = threading.Lock()

        @self.app.get("/v1/models")
        async def listed() -> Any:
            return {"data": [{"id": name} for name in models]}

        @self.app.post("/v1/chat/completions")
        async def chat(request: Request) -> JSONResponse:
            body = await request.json()
            with lock:
                number = len(self.requests)
                self.requests.append(body)
                self.headers.append(dict(request.headers))
            status, content, headers = respond(body, number)
            return JSONResponse(content, status, headers)


@contextmanager
def chat_server(respond: Callable[[dict[str, Any], int], Reply], models: tuple[str, ...] = ("m",)) -> Iterator[tuple[str, ChatServer]]:
    server = ChatServer(respond, models)
    with serving_app(server.app, "chat") as url:
        yield url, server


@pytest.fixture(scope="module", autouse=True)
def _older_objects_are_set_aside() -> Iterator[None]:
    """A collection after a test looks only at what this test made: through all that the worker holds it would take 0.2 s."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # what was imported is set aside again


@pytest.fixture(autouse=True)
def no_connection_left() -> Iterator[None]:
    """An evaluation that is given up closes its client under the threads that still ask. A connection that is being made in that moment is left to the
    garbage collector by httpx; it is collected here, so that no later test is blamed for it."""
    yield
    for thread in threading.enumerate():
        if thread.name == "RemotePlayer":
            thread.join(timeout=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts are short, and no key of the machine is sent."""
    monkeypatch.setattr(chat_endpoint, "RETRY_DELAYS", (0.01, 0.01, 0.01))
    monkeypatch.setattr(endpoint, "RETRY_DELAYS", (0.01,))
    for name in chat_endpoint.KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def play(url: str, prompts: int = 4, env: str = "frozen_lake", **more: Any) -> tether.Evaluation:
    options = more.pop("options", LAKE if env == "frozen_lake" else {})
    return tether.evaluate(f"{url}#m", env, prompts=prompts, options=options, **more)


# ----------------------------------------------------------------------------------------------------------- the real model


def test_a_served_model_answers_as_the_loaded_one(tiny: Any) -> None:
    """Greedy, one turn: the same prompts, the same texts, the same numbers, and token counts that are those of the tokenizer."""
    options = {**LAKE, "max_turns": 1}
    here = tether.evaluate("tiny", "frozen_lake", prompts=6, temperature=0.0, options=options, model={"device": "cpu"})
    with serving_model(tiny, "tiny") as url:
        there = tether.evaluate(f"{url}#tiny", "frozen_lake", prompts=6, temperature=0.0, options=options, concurrency=3)
    pairs = [(a.trajectories[0].turns[0], b.trajectories[0].turns[0]) for a, b in zip(here.groups, there.groups, strict=True)]
    for local, remote in pairs:
        assert remote.text.removeprefix("<think>") == local.text
        assert (remote.observation, remote.reward, remote.valid) == (local.observation, local.reward, local.valid)
        assert remote.usage is not None and remote.usage.completion_tokens == len(local.response_ids)
        assert remote.usage.prompt_tokens == len(local.context_ids)
        assert remote.response_ids == remote.context_ids == ()
    assert there.metrics == here.metrics
    assert here.metrics["success"] > 0


def test_samples_draw_apart_and_repeat(tiny: Any) -> None:
    """Several turns and samples: each sample has its own seed, and the same command gives the same replies."""
    with serving_model(tiny, "tiny") as url:
        runs = [
            tether.evaluate(f"{url}#tiny", "frozen_lake", prompts=2, samples=4, temperature=1.0, options=LAKE, **{"rollout.max_tokens": 40})
            for _ in range(2)
        ]
    texts = [[[turn.text for turn in t.turns] for group in run.groups for t in group.trajectories] for run in runs]
    assert texts[0] == texts[1]
    assert len({text[0] for text in texts[0][:4]}) > 1, "four samples of one prompt"
    assert {"pass_at_1", "pass_at_2", "pass_at_4"} <= set(runs[0].metrics)
    assert any(len(text) > 1 for text in texts[0])


@pytest.mark.parametrize("env", ["sokoban", "frozen_lake", "metamathqa", "countdown", "searchqa", "webshop", "deepcoder"])
def test_every_environment(env: str) -> None:
    """Conversations of several turns where the environment has them; the whole history is sent as messages, the examples in front of it."""
    replies = {"searchqa": "<search> river </search>", "webshop": "<answer> search[red shoes] </answer>"}
    text = f"<think> so </think> {replies.get(env, '<answer> 7 </answer>')}"
    with chat_server(lambda body, number: said(text)) as (url, server):
        result = play(url, 2, env)
    turns = [len(group.trajectories[0].turns) for group in result.groups]
    assert result.metrics["errors"] == 0 and result.metrics["prompts"] == 2
    longest = max(server.requests, key=lambda body: len(body["messages"]))["messages"]
    task = tether.make_env(env, **(LAKE if env == "frozen_lake" else {}))
    task.reset(0)
    shown = [reply for _, reply in few_shot_of(task)]
    assert [message["role"] for message in longest] == ["system", *["user", "assistant"] * (len(shown) + max(turns) - 1), "user"]
    assert [message["content"] for message in longest if message["role"] == "assistant"] == [*shown, *[text] * (max(turns) - 1)]
    assert (max(turns) > 1) == (env not in ("countdown", "deepcoder", "metamathqa")), "some environments have one turn by default"


# ------------------------------------------------------------------------------------------------------------- what is sent


def test_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with chat_server(lambda body, number: said(ANSWER)) as (url, server):
        play(
            url,
            1,
            temperature=0.7,
            api_key_env="MY_KEY",
            body={"user": "x", "seed": None},
            **{"rollout.top_p": 0.9, "rollout.max_tokens": 33},
        )
    body = server.requests[0]
    assert {name: body[name] for name in ("model", "temperature", "max_tokens", "top_p", "user")} == {
        "model": "m",
        "temperature": 0.7,
        "max_tokens": 33,
        "top_p": 0.9,
        "user": "x",
    }
    assert set(body) == {"model", "temperature", "max_tokens", "top_p", "user", "messages"}, "nothing that some server may not know"
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(("context", "lengths"), [("full", [2, 4, 6, 8]), ("last_k", [2, 4, 4, 4]), ("single_turn", [2, 2, 2, 2])])
def test_context_modes(context: str, lengths: list[int]) -> None:
    """The context modes of training, as messages: all turns, the last one, or a summary in one message."""
    wall = "<think> hm </think> <answer> Up </answer>"
    options = {**LAKE, "max_turns": 4}
    with chat_server(lambda body, number: said(wall)) as (url, server):
        result = play(url, 1, options=options, concurrency=1, **{"rollout.context": context, "rollout.last_k": 1})
    assert len(result.groups[0].trajectories[0].turns) == 4
    assert [len(body["messages"]) for body in server.requests] == lengths
    if context == "single_turn":
        assert "Turns so far:\n1. Up" in server.requests[-1]["messages"][1]["content"]


def test_fields_that_a_server_refuses_are_found_out_once() -> None:
    def respond(body: dict[str, Any], number: int) -> Reply:
        if "max_tokens" in body:
            return refused(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        if "seed" in body:
            return refused(422, "extra_forbidden: seed")
        return said(ANSWER)

    with chat_server(respond) as (url, server):
        result = play(url, 3, concurrency=1)
    assert result.metrics["errors"] == 0 and "takes no seed" in result.notes[0] and len(result.notes) == 1
    assert sum("max_tokens" in body for body in server.requests) == 1 and sum("seed" in body for body in server.requests) == 2


# ------------------------------------------------------------------------------------------------------------ what comes back


@pytest.mark.parametrize(
    ("reply", "valid", "text"),
    [
        (said(ANSWER + " and then <answer> Up </answer>"), True, ANSWER),
        (said("<answer> Right </answer>", reasoning_content="I think"), True, "<think>I think</think><answer> Right </answer>"),
        (said("<answer> Right </answer>"), False, "<answer> Right </answer>"),
        (said([{"type": "text", "text": ANSWER}]), True, ANSWER),  # type: ignore[arg-type]
        (said(None), False, ""),
        (said("<think> on and on", finish="length"), False, "<think> on and on"),
    ],
)
def test_replies(reply: Reply, valid: bool, text: str) -> None:
    with chat_server(lambda body, number: reply) as (url, server):
        result = play(url, 1, concurrency=1)
    turn = result.groups[0].trajectories[0].turns[0]
    assert (turn.valid, turn.text) == (valid, text)
    assert result.record["cut_responses"] == (2 if text.endswith("on and on") else 0)
    if valid and len(server.requests) > 1:  # reasoning that the server keeps apart is not sent back
        assert server.requests[1]["messages"][2]["content"] == text.rpartition("I think</think>")[2]


def test_reasoning_that_is_only_counted() -> None:
    reply = said("<answer> Right </answer>")
    reply[1]["usage"]["completion_tokens_details"] = {"reasoning_tokens": 3}
    with chat_server(lambda body, number: reply) as (url, _):
        result = play(url, 1)
    assert result.groups[0].trajectories[0].turns[0].valid and result.tokens["reasoning"] > 0


def test_tokens_and_cost() -> None:
    with chat_server(lambda body, number: said(ANSWER, usage=(1000, 100))) as (url, server):
        result = play(url, 3, price=(2.0, 10.0))
    count = len(server.requests)
    assert (result.tokens["prompt"], result.tokens["completion"]) == (1000 * count, 100 * count)
    assert result.record["tokens"]["cost"] == pytest.approx(count * (1000 * 2 + 100 * 10) / 1e6)
    assert result.metrics["response_tokens"] == 100


def test_a_server_that_does_not_count() -> None:
    with chat_server(lambda body, number: said(ANSWER, usage=None)) as (url, server):
        result = play(url, 1, price=(2.0, 10.0))
    assert result.tokens["uncounted"] == len(server.requests) and result.record["tokens"]["cost"] is None
    assert "response_tokens" not in result.metrics


# ------------------------------------------------------------------------------------------------------------- what goes wrong


def test_what_may_pass_is_asked_again() -> None:
    failures = [refused(429, "slow down", **{"retry-after": "0.2"}), refused(503, "loading"), refused(500, "oops")]
    with chat_server(lambda body, number: failures[number] if number < 3 else said(ANSWER)) as (url, server):
        result = play(url, 1)
    assert result.metrics["errors"] == 0 and server.requests[0] == server.requests[3]


def test_retry_after_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("tether.core.http_client.time.sleep", pauses.append)
    failures = [refused(429, "wait", **{"retry-after": "7"}), refused(429, "wait", **{"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"})]
    with chat_server(lambda body, number: failures[number] if number < 2 else said(ANSWER)) as (url, _):
        play(url, 1)
    assert pauses == [7.0, 0.01]


def test_one_conversation_that_fails_is_in_no_number(tmp_path: Path) -> None:
    """The server refuses the second prompt. It is counted with its reason, and the rate is that of the others."""

    def respond(body: dict[str, Any], number: int) -> Reply:
        return refused(400, "flagged by moderation") if body["messages"][-1]["content"] == bad else said(ANSWER)

    env = tether.make_env("frozen_lake", **LAKE, split="validation")
    from tether.core.seeding import validation_seed

    bad = env.reset(validation_seed(1)).text
    with chat_server(respond) as (url, _):
        result = play(url, 4, out=tmp_path)
    assert (result.metrics["errors"], result.metrics["prompts"]) == (1, 3)
    errored = result.groups[1].errored[0]
    assert errored.stop_reason is StopReason.MODEL_ERROR and "flagged by moderation" in str(errored.error)
    assert result.record["failed"] == [{"env": "frozen_lake", "prompt": 1, "sample": 0, "reason": errored.error}]
    alone = [group.trajectories[0].success for group in result.groups if group.trajectories]
    assert result.metrics["success"] == sum(alone) / 3
    # Asked again, the failed one alone is asked, and now the server takes it.
    with chat_server(lambda body, number: said(ANSWER)) as (url, server):
        journal = next(tmp_path.glob("*.conversations.jsonl"))
        again = _continue(tmp_path, url, journal, 4)
    assert again.metrics["errors"] == 0 and {body["messages"][1]["content"] for body in server.requests} == {bad}


def _continue(folder: Path, url: str, journal: Path, prompts: int, **more: Any) -> tether.Evaluation:
    """The same evaluation at another port: the file of conversations gets the name that belongs to this address."""
    from tether.runs.evaluations import file_stem
    from tether.training.evaluation_run import evaluated_specs, identity
    from tether.training.resolve import evaluation_settings

    given = {"evaluation": {"prompts": prompts, "temperature": 0.5, "samples": 1}, "env": {"options": LAKE}}
    settings = evaluation_settings(f"{url}#m", "frozen_lake", False, given)
    stem = file_stem(identity(settings, evaluated_specs(settings), f"{url}#m", {}))
    journal.rename(folder / f"{stem}.conversations.jsonl")
    return play(url, prompts, out=folder, **more)


def test_interrupted_and_continued(tmp_path: Path) -> None:
    """Ctrl-C after three conversations, and a last line that a kill tore: what ended is not asked again."""

    class Interrupt(Callback):
        left = 3

        def on_stage_progress(self) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    with chat_server(lambda body, number: said(ANSWER)) as (url, server):
        whole = play(url, 6)
        with pytest.raises(KeyboardInterrupt):
            play(url, 6, out=tmp_path, callbacks=[Interrupt()], concurrency=1)
        journal = next(tmp_path.glob("*.conversations.jsonl"))
        kept = journal.read_text().splitlines()
        assert len(kept) == 3
        journal.write_text("\n".join([*kept, kept[0][:40]]))
        before = len(server.requests)
        result = play(url, 6, out=tmp_path)
        asked = [body["messages"][1]["content"] for body in server.requests[before:] if len(body["messages"]) == 2]
        assert len(asked) == 3 and not {json.loads(line)["turns"][0]["observation"] for line in kept} & set(asked)
        assert result.metrics == whole.metrics and result.tokens == whole.tokens
        finished = len(server.requests)
        again = play(url, 6, out=tmp_path)
        assert len(server.requests) == finished, "nothing is asked any more"
        assert again.metrics == whole.metrics and "6 of 6 conversations" in again.notes[0]


def test_environment_errors_are_played_again_and_their_tokens_counted() -> None:
    """The second episode's environment fails once."""
    from tether.envs.frozen_lake import env as module

    left = [1]

    class Troubled(module.FrozenLake):
        def act(self, index: int) -> tuple[float, bool, bool]:
            if left:
                left.pop()
                raise RuntimeError("lost")
            return super().act(index)

    with pytest.MonkeyPatch.context() as patch, chat_server(lambda body, number: said(ANSWER)) as (url, server):
        patch.setattr(module, "FrozenLake", Troubled)
        result = play(url, 2, concurrency=1)
    assert result.metrics["errors"] == 0 and len(result.attempts) == 1
    assert result.tokens["responses"] == len(server.requests)


def test_a_conversation_that_does_not_fit(tiny: Any) -> None:
    """`tether serve` refuses a budget that its model has no room for: no episode can begin, and a rate of 0 would not be said so."""
    room = tiny.model.config.max_position_embeddings
    with serving_model(tiny, "m") as url, pytest.raises(BadInput, match=r"none of 1 episodes could begin: .* raise rollout\.max_context"):
        play(url, 1, **{"rollout.max_tokens": room})


@pytest.mark.parametrize(
    ("words"),
    [
        "This model's maximum context length is 8192 tokens.",
        "the request exceeds the available context size, try increasing it",
        "prompt is too long: 210000 tokens > 200000 maximum",
    ],
)
def test_words_of_a_full_context(words: str) -> None:
    def respond(body: dict[str, Any], number: int) -> Reply:
        return refused(400, words) if number else said(ANSWER)

    with chat_server(respond) as (url, _):
        trajectory = play(url, 1).groups[0].trajectories[0]
        assert trajectory.stop_reason is StopReason.CONTEXT_FULL and len(trajectory.turns) == 1
        with pytest.raises(BadInput, match="none of 1 episodes could begin"):
            play(url, 1)


def test_one_line_for_what_concerns_all(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelUnavailable, match=r"127.0.0.1:9 cannot be used.*check that it runs"):
        play("http://127.0.0.1:9")
    monkeypatch.setenv("MY_KEY", "wrong")
    with serving_model(tiny, "m", token=KEY) as url, pytest.raises(ModelUnavailable, match=r"refuses the key.*check the key in MY_KEY"):
        play(url, api_key_env="MY_KEY")
    with chat_server(lambda body, number: said(ANSWER), ("m-large", "other")) as (url, _):
        with pytest.raises(ModelUnavailable, match="has no model 'm': known: m-large, other"):
            play(url)
        with pytest.raises(BadInput, match="2 models; name one behind a #: m-large, other"):
            tether.evaluate(url, "frozen_lake", prompts=1)
    with pytest.raises(BadInput, match="'NO_SUCH', which is not set"):
        play("http://127.0.0.1:9", api_key_env="NO_SUCH")
    with pytest.raises(BadInput, match="holds an '@'"):
        tether.evaluate("http://user:pw@127.0.0.1:9#m", "frozen_lake", prompts=1)


def test_a_server_that_answers_nothing_is_given_up_after_one_conversation() -> None:
    with chat_server(lambda body, number: refused(400, "no such field 'x'")) as (url, server):
        with pytest.raises(EngineUnavailable, match=r"the first conversation failed .*no such field 'x'.*so did one more request"):
            play(url, 60)
        assert len(server.requests) <= 17  # those that were under way, and one more


@pytest.mark.parametrize(
    ("status", "first_failure", "asked"),
    [(500, 0, 5), (503, 0, 9), (500, 1, 9)],
    ids=["never replied: 4 attempts and a question", "says that it is starting: waited for", "fails in mid-run: waited for"],
)
def test_how_long_a_server_is_waited_for(status: int, first_failure: int, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "RETRY_DELAYS", (0.001,) * 7)
    with chat_server(lambda body, number: refused(status, "broken") if number >= first_failure else said("hm")) as (url, server):
        with pytest.raises(tether.TetherError, match="broken"):
            play(url, 1, concurrency=1)
        assert len(server.requests) == asked


def test_a_server_that_hangs_is_not_waited_for_again() -> None:
    over = threading.Event()
    server = ChatServer(lambda body, number: said(ANSWER))

    @server.app.middleware("http")
    async def hang(request: Request, go_on: Any) -> Any:
        if request.method == "POST":
            hung.append(request.url.path)
            while not over.is_set():
                await asyncio.sleep(0.01)
        return await go_on(request)

    hung: list[str] = []
    with serving_app(server.app, "chat") as url:
        with pytest.raises(EngineUnavailable, match=r"1 attempt: ReadTimeout.*so did one more request"):
            play(url, 1, **{"server.timeout": 0.5})
        over.set()
    assert len(hung) == 2


def test_conversations_that_all_fail_on_a_server_that_answers_are_given_up() -> None:
    def respond(body: dict[str, Any], number: int) -> Reply:
        return said("hello") if body["messages"][-1]["content"] == "Hello" else refused(400, "too long for me")

    with chat_server(respond) as (url, server):
        with pytest.raises(EngineUnavailable, match=r"20 conversations in a row failed.*too long for me"):
            play(url, 60)
        assert len(server.requests) < 40
        with pytest.raises(tether.TetherError, match=r"nothing was measured.*too long for me"):
            play(url, 3)


def test_keys_are_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    """The server quotes the key in a refusal; no file, log or message holds it."""
    monkeypatch.setenv("MY_KEY", KEY)
    caplog.set_level(0)
    with chat_server(lambda body, number: refused(400, f"bad key {KEY}") if number == 0 else said(ANSWER)) as (url, _):
        command = ["eval", f"{url}#m", "--env", "frozen_lake", "--prompts", "3", "--concurrency", "1", "--api-key-env", "MY_KEY"]
        with pytest.raises(SystemExit) as ended:
            main([*command, "--out", str(tmp_path / "out")])
    assert ended.value.code == 0
    shown = capsys.readouterr()
    assert "failed and are in no number: 1, the first: " in shown.out and "[the key]" in shown.out
    written = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "[the key]" in written
    assert KEY not in written + shown.out + shown.err + caplog.text


# ------------------------------------------------------------------------------------------------------- several models at once


def test_several_models_in_one_table(tmp_path: Path, tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A loaded model and two endpoints: each with its interval, every pair on the same instances, a file and a page each, one leaderboard."""
    wall = "<think> hm </think> <answer> Wait </answer>"
    options = [f"--set=env.options.{name}={value}" for name, value in LAKE.items()]
    with chat_server(lambda body, number: said(ANSWER)) as (good, _), chat_server(lambda body, number: said(wall), ("wall",)) as (bad, _):
        with pytest.raises(SystemExit) as ended:
            main(
                [
                    "eval",
                    "tiny",
                    f"{good}#m",
                    bad,
                    "--env",
                    "frozen_lake",
                    "--prompts",
                    "12",
                    *options,
                    "--out",
                    str(tmp_path),
                    "--price",
                    "1/2",
                ]
            )
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        with pytest.raises(SystemExit):
            main(["eval", f"{good}#m", f"{bad}#wall", "--env", "frozen_lake", "--prompts", "12", *options, "--json"])
        told = json.loads(capsys.readouterr().out)
    assert "differences on the same instances" in shown and " cost " in shown and "page: " in shown
    assert len([line for line in shown.splitlines() if "points above" in line]) == 3 and "asked in the same way" not in shown
    records = {record["model"]["name"]: record for record in map(json.loads, (path.read_text() for path in tmp_path.glob("*.json")))}
    assert set(records) == {"tiny", "m", bad}
    keys = [[instance["key"] for instance in record["instances"]] for record in records.values()]
    assert keys[0] == keys[1] == keys[2]
    found = tether.compare(records["m"], records[bad])
    assert found is not None and told["differences"][0]["success"] == found.success > 0
    assert (told["differences"][0]["success_low"], told["differences"][0]["success_high"]) == (found.low, found.high)
    assert [one["success"] for one in told["results"]] == [records["m"]["metrics"]["success"], 0.0]
    with pytest.raises(SystemExit):
        main(["leaderboard", str(tmp_path)])
    table = capsys.readouterr().out
    assert table.count("\n| ") == 5 and f"| 3 | {bad} | 0.0% |" in table


def test_records_tell_what_was_played(tmp_path: Path) -> None:
    """Data files by name and hash, categories of the rows, no path of this machine."""
    import hashlib

    rows = [
        {"problem": f"What is {n} + 1?", "answer": n + 1, "subject": "Algebra" if n % 2 else "Geometry", "level": 1 + n % 3}
        for n in range(6)
    ]
    data = tmp_path / "math.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with chat_server(lambda body, number: said("<think> x </think> <answer> 4 </answer>")) as (url, _):
        result = play(
            url, 6, "metamathqa", options={"data": str(data), "split": "all", "attempts": 1, "max_turns": 1}, out=tmp_path / "out"
        )
    record = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    assert record == result.record
    assert record["environments"][0]["data"] == {"data": {"name": "math.jsonl", "sha256": hashlib.sha256(data.read_bytes()).hexdigest()}}
    assert record["environments"][0]["options"]["split"] == "all" and "data" not in record["environments"][0]["options"]
    assert [instance["categories"] for instance in record["instances"]][:2] == [
        {"subject": "Geometry", "level": "1"},
        {"subject": "Algebra", "level": "2"},
    ]
    assert [instance["successes"] for instance in record["instances"]] == [[0], [0], [0], [1], [0], [0]]
    page = next((tmp_path / "out").glob("*.html")).read_text()
    assert "By subject" in page and "By level" in page
    assert str(tmp_path) not in json.dumps(record) + page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny", "tiny"], "given twice"),
        (["http://a#m", "--price", "cheap"], "--price got 'cheap'"),
        (["http://a#m", "http://b#m", "tiny", *["--price", "1/2"] * 3], "3 times for 2 endpoints"),
        (["http://a#m", "--body", "{"], "--body is not JSON"),
        (["http://a#m", "--body", "[]"], "--body is a list"),
        (["http://a#m", "--best"], "--best is for run folders"),
        (["http://a#m", "--engine", "vllm"], "has no use"),
    ],
)
def test_bad_input(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *arguments, "--env", "frozen_lake"])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert words in shown and len(shown.splitlines()) == 1
