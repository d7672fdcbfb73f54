"""The server engine over real HTTP, against `tether serve` itself and behind a proxy that misbehaves as real servers do."""

import asyncio
import copy
import json
import re
import resource
import shutil
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI, Request, Response
from transformers import LlamaConfig, LlamaForCausalLM

from tether.core.errors import BadInput, EngineUnavailable, ModelUnavailable
from tether.core.http import serving_app
from tether.core.protocols import Sampling
from tether.core.types import Group
from tether.models.load import LoadedModel
from tether.models.logprobs import score_tokens
from tether.models.policy import Policy
from tether.rollout.engines import connection, server
from tether.rollout.engines.dialects import LINES
from tether.rollout.engines.native import NativeEngine
from tether.rollout.engines.publish import TetherPublisher, own_token, weights_on_disk
from tether.rollout.engines.server import ServerEngine, ServerOptions
from tether.rollout.episode import EpisodeRules
from tether.rollout.sampler import EnvPool, EnvSpec, play_plan, training_plan
from tether.rollout.serving.app import make_app, serving_model
from tether.rollout.serving.served import ServedModel, WeightUpdate

SAMPLING = Sampling(max_tokens=40)
RULES = EpisodeRules(max_context=900, max_tokens=40, format_penalty=-0.1)


class Proxy:
    """Stands between client and server: requests and replies may be changed, or fail."""

    def __init__(self, target: str) -> None:
        self.target, self.url = target, ""
        self.change_request: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda path, body: body
        self.change_reply: Callable[[str, dict[str, Any], dict[str, Any]], dict[str, Any]] = lambda path, body, reply: reply
        self.failures: list[int] = []
        """Statuses of the next replies to requests for tokens."""
        self.hangs = False
        """Whether requests for tokens are never answered."""
        self.asked: list[str] = []
        self.together: list[int] = []
        """How many requests came in each body of lines."""
        self.change_lines: Callable[[str], str] = lambda lines: lines
        self.missing: tuple[str, ...] = ()
        """Routes that an older server does not have."""
        self.off: tuple[str, ...] = ()
        """Routes that a server has switched off."""
        self.app = FastAPI()
        self.app.add_api_route("/{path:path}", self._pass_on, methods=["GET", "POST"])

    async def _pass_on(self, path: str, request: Request) -> Response:
        self.asked.append(path)
        if path in self.missing:
            return Response('{"detail": "Not Found"}', 404)
        if path in self.off:
            return Response('{"error": {"message": "Scale-out endpoints are disabled."}}', 403)
        if ("generate" in path or "completions" in path) and self.failures:
            return Response('{"error": "busy"}', self.failures.pop(0))
        if "generate" in path and self.hangs:
            await asyncio.sleep(3600)
        data, kind = await request.body(), request.headers.get("content-type", "")
        bodies = [json.loads(line) for line in data.splitlines()] if kind in ("application/json", LINES) else []
        if bodies:
            data = b"\n".join(json.dumps(self.change_request(path, body)).encode() for body in bodies)
        if kind == LINES:
            self.together.append(len(bodies))
            self.asked += [path] * (len(bodies) - 1)
        async with httpx.AsyncClient(timeout=60, verify=False) as client:
            reply = await client.request(
                request.method, f"{self.target}/{path}", content=data, headers={"Content-Type": kind} if kind else {}
            )
        if not reply.is_success:
            return Response(reply.content, reply.status_code)
        if kind == LINES:
            asked = {body["request_id"]: body for body in bodies}
            replies = [json.loads(line) for line in reply.content.splitlines()]
            changed = [self.change_reply(path, asked[each["request_id"]], each) for each in replies]
            return Response(self.change_lines("".join(json.dumps(each) + "\n" for each in changed)), media_type=LINES)
        return Response(json.dumps(self.change_reply(path, bodies[0] if bodies else {}, reply.json())), media_type="application/json")


@pytest.fixture(scope="module")
def url(tiny: Any) -> Iterator[str]:
    with serving_model(tiny, "tiny", max_rows=8) as address:
        yield address


@contextmanager
def _between(url: str) -> Iterator[Proxy]:
    made = Proxy(url)
    with serving_app(made.app, "proxy") as made.url:
        yield made


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    with _between(url) as made:
        yield made


@pytest.fixture(scope="module")
def policy(tiny: Any) -> Policy:
    return Policy(*tiny)


def _play(engine: Any, chat: Any, sampling: Sampling = SAMPLING) -> list[Group]:
    with EnvPool([EnvSpec("frozen_lake", {"instructions": "plain", "max_turns": 2})]) as pool:
        return play_plan(pool, training_plan(0, 1, 2, 3), engine, chat, sampling, RULES)


def _tokens(groups: list[Group]) -> list[Any]:
    return [[turn.response_ids for turn in t.turns] for group in groups for t in group.trajectories]


@pytest.fixture(scope="module")
def native(policy: Policy, chat: Any) -> list[Group]:
    return _play(NativeEngine(policy, max_rows=8, max_context=900), chat)


def _engine(url: str, policy: Policy, **options: Any) -> ServerEngine:
    return ServerEngine([url], policy, max_rows=8, max_context=900, options=ServerOptions(**options))


def test_trajectories_are_the_native_engines(url: str, policy: Policy, chat: Any, native: list[Group]) -> None:
    engine = _engine(url, policy)
    played = _play(engine, chat)
    assert _tokens(played) == _tokens(native)
    pairs = [
        (mine, theirs)
        for group, other in zip(played, native, strict=True)
        for mine, theirs in zip(group.trajectories, other.trajectories, strict=True)
    ]
    assert all(a.logprobs == pytest.approx(b.logprobs, abs=1e-5) for x, y in pairs for a, b in zip(x.turns, y.turns, strict=True))
    assert [x.reward for x, _ in pairs] == [y.reward for _, y in pairs]
    assert engine.statistics.sampled_tokens == sum(x.num_sampled for x, _ in pairs)
    assert engine.backend == "server (tether)" and engine.capabilities.weight_sync and not engine.capabilities.shares_weights


def test_the_engines_own_rule_ends_a_response(proxy: Any, policy: Policy, chat: Any, native: list[Group]) -> None:
    """A server that stops nowhere: tokens past the end are dropped. One that stops early: the conversation is sent again from there."""

    def stops_nowhere(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "sampling_params": {**body["sampling_params"], "stop": []}} if "generate" in path else body

    def stops_early(path: str, body: dict[str, Any]) -> dict[str, Any]:
        chosen = body.get("sampling_params", {})
        return {**body, "sampling_params": {**chosen, "max_tokens": min(16, chosen["max_tokens"])}} if chosen else body

    engine = _engine(proxy.url, policy)
    proxy.change_request = stops_nowhere
    assert _tokens(_play(engine, chat)) == _tokens(native)
    assert engine.statistics.dropped_tokens > 0
    proxy.change_request = stops_early
    assert _tokens(_play(engine, chat)) == _tokens(native)
    assert engine.statistics.decode_calls > sum(len(tokens) for tokens in _tokens(native))


@pytest.mark.long
def test_what_may_pass_is_tried_again_with_the_same_draw(proxy: Any, policy: Policy, chat: Any, native: list[Group]) -> None:
    engine = _engine(proxy.url, policy)
    left = [2]

    def forgets_once(path: str, body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        if "generate" in path and body["sampling_params"]["max_tokens"] == SAMPLING.max_tokens and left[0]:
            left[0] -= 1
            reply["choices"][0]["logprobs"] = None
        return reply

    proxy.failures, proxy.change_reply = [503, 429, 503, 500], forgets_once
    assert _tokens(_play(engine, chat)) == _tokens(native)
    assert not proxy.failures and not left[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines,
        lambda lines: "",
        lambda lines: lines[: len(lines) // 2],
        lambda lines: lines + lines,
        lambda lines: f"{'[' * 100_000}\n{lines.splitlines()[-1]}\n",
        lambda lines: f'5\n[]\n{{"request_id": "x"}}\n{{"request_id": "7000"}}\n{{"request_id": null}}\nhalf\n{lines.splitlines()[-1]}\n',
        lambda lines: lines.replace('"logprobs": "', '"logprobs": "!'),
        lambda lines: lines.replace('"token_ids": "', '"token_ids": "AAAA'),
        lambda lines: re.sub(r'"logprobs": "[^"]{11}', '"logprobs": "AAAAAAAA+H8', lines),
    ],
    ids=["all", "none", "cut", "twice", "nested", "nonsense", "no base64", "half a number", "no finite number"],
)
def test_requests_are_sent_together_and_what_is_not_answered_is_asked_alone(
    proxy: Any, policy: Policy, chat: Any, native: list[Group], change: Callable[[str], str], request: pytest.FixtureRequest
) -> None:
    engine = _engine(proxy.url, policy)
    _play(engine, chat, Sampling(max_tokens=1))  # what is asked of a new server comes before
    proxy.asked, proxy.together, proxy.change_lines = [], [], change
    assert _tokens(_play(engine, chat)) == _tokens(native)
    num_alone = proxy.asked.count("inference/v1/generate") - sum(proxy.together)
    assert proxy.together[0] == sum(len(group.trajectories) for group in native), "all begin together"
    assert (num_alone > 0) is (request.node.callspec.id not in ("all", "twice"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_in_what_is_sent_together_ends_the_run(url: str, policy: Policy, chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a defect")

    engine = _engine(url, policy)
    monkeypatch.setattr(connection.ServerConnection, "generate_many", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        _play(engine, chat)
    for thread in threading.enumerate():
        if thread.name == "_Run":
            thread.join(10)  # its exception is shown in this test, not in a later one


@pytest.mark.parametrize("limit", ["MOST_TOGETHER", "MOST_LINES"])
def test_what_is_sent_together_has_limits(
    proxy: Any, policy: Policy, chat: Any, native: list[Group], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine(proxy.url, policy)
    longest = max(len(turn.context_ids) for group in native for t in group.trajectories for turn in t.turns[:1])
    monkeypatch.setattr(server, limit, {"MOST_TOGETHER": 2 * longest, "MOST_LINES": 2}[limit])
    assert _tokens(_play(engine, chat)) == _tokens(native) and max(proxy.together) == 2


def test_a_server_that_draws_by_itself_gets_seeds_from_the_conversation(proxy: Any, policy: Policy, chat: Any) -> None:
    """Through the completions route, as of any OpenAI-compatible server: twice the same, with the log-probs of the model."""

    def foreign(path: str, body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        for entry in reply.get("data", []):
            entry["owned_by"] = "somebody"
        return reply

    proxy.change_reply = foreign
    engine = _engine(proxy.url, policy)
    assert engine.backend == "server (completions)" and not engine.capabilities.weight_sync
    played = _play(engine, chat)
    proxy.failures = [503] * 18  # every attempt of the first six requests: the server counts as lost, and is found again
    assert _tokens(played) == _tokens(_play(engine, chat)) and not proxy.failures
    sequence = played[0].trajectories[0].sequences[0]
    scores = [0.0, *score_tokens(policy, sequence.token_ids)]
    for mine, here, sampled in zip(sequence.sampled_logprobs, scores, sequence.loss_mask, strict=True):
        assert not sampled or mine == pytest.approx(here, abs=1e-4)


def test_several_servers_share_the_work_and_one_that_hangs_is_left_out(
    url: str, policy: Policy, chat: Any, native: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SEND_DELAYS", ())
    with _between(url) as first, _between(url) as second:
        options = ServerOptions(timeout=5.0)
        engine = ServerEngine([first.url, second.url], policy, max_rows=6, max_context=900, options=options)
        first.asked.clear(), second.asked.clear()  # type: ignore[func-returns-value]
        assert _tokens(_play(engine, chat)) == _tokens(native)
        shares = [proxy.asked.count("inference/v1/generate") for proxy in (first, second)]
        assert min(shares) >= len(native[0].trajectories) and sum(shares) >= engine.statistics.decode_calls, "three conversations each"
        first.hangs = True
        assert _tokens(_play(engine, chat)) == _tokens(native)
        assert [server.is_alive for server in engine.servers] == [False, True] and engine.statistics.recomputed_tokens > 0
        assert "ReadTimeout" in engine.servers[0].problem
        first.hangs = False
        _play(engine, chat)
        (left_out, back) = engine.take_notes()
        assert left_out.startswith(f"the server at {first.url} is left out (ReadTimeout")
        assert left_out.endswith("; its conversations continue on the others")
        assert back.startswith(f"the server at {first.url} is used again, after ") and engine.take_notes() == []


# ------------------------------------------------------------------------------------------------------------------ weights


@contextmanager
def _changeable(tiny: Any) -> Iterator[tuple[str, ServedModel]]:
    served = ServedModel("tiny", LoadedModel(copy.deepcopy(tiny.model), tiny.tokenizer), max_rows=8)
    with serving_app(make_app(served), "tiny") as address:
        yield address, served


def _nudge(model: Any, scale: float) -> None:
    """An update as small as training makes it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("way", ["memory", "http", pytest.param("disk", marks=pytest.mark.long)])
def test_published_weights_are_sampled_from(tiny: Any, chat: Any, tmp_path: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(copy.deepcopy(tiny.model), tiny.tokenizer)
    sources: list[bytes | Path] = []
    monkeypatch.setattr(WeightUpdate, "take", lambda self, source, take=WeightUpdate.take: sources.append(source) or take(self, source))
    with _changeable(tiny) as (url, _):
        engine = _engine(url, policy, weights_folder=tmp_path if way == "disk" else None)
        if way == "memory":
            engine.servers[0]._publisher = TetherPublisher(memory=tmp_path)
        elif way == "http":
            engine.servers[0]._publisher = TetherPublisher(memory=None)
        assert engine.sync()["probe_difference"] < 1e-6
        _nudge(policy.module, 0.003)
        assert engine.sync()["probe_difference"] < 1e-5
        played = _play(engine, chat)
    assert _tokens(played) == _tokens(_play(NativeEngine(policy, max_rows=8, max_context=900), chat))
    assert {version for group in played for t in group.trajectories for turn in t.turns for version in turn.versions} == {1}
    assert sources and all(isinstance(source, bytes if way == "http" else Path) for source in sources)
    assert not list(tmp_path.iterdir())


def test_without_shared_memory_weights_go_over_http(
    tiny: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is too small, and where the server cannot see it; that is said once."""
    policy = Policy(copy.deepcopy(tiny.model), tiny.tokenizer)
    with _changeable(tiny) as (url, _):
        engine = _engine(url, policy)
        engine.servers[0]._publisher = TetherPublisher(memory=tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: Namespace(free=10**6))
        for scale in (0.0, 0.003):
            _nudge(policy.module, scale)
            assert engine.sync()["probe_difference"] < 1e-5
        assert [record.message for record in caplog.records] == [
            f"weights go to {url} over HTTP, not through shared memory: they have 0.0 GB, and {tmp_path} has 0.0 free"
        ]
        monkeypatch.undo()
        caplog.clear()
        engine.servers[0]._publisher = TetherPublisher(memory=tmp_path)
        take = WeightUpdate.take
        elsewhere = lambda source: Path("/elsewhere") / source.name if isinstance(source, Path) else source  # noqa: E731
        monkeypatch.setattr(WeightUpdate, "take", lambda self, source: take(self, elsewhere(source)))
        assert engine.sync()["probe_difference"] < 1e-5
        assert "cannot read weights from '/elsewhere/model.safetensors' on the server" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_folder_without_room_for_weights_is_one_line(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))  # as on a full disk
    try:
        with (
            pytest.raises(BadInput, match=r"cannot write weights to .* free some space"),
            weights_on_disk(tmp_path, {"a": torch.zeros(2**19)}),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_a_server_that_ignores_updates_is_found_out(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers 200 to everything. A large update exceeds the tolerance; a small one is told by the weights before it."""
    for scale, said in ((0.05, "differ from the learner's by"), (5e-6, "still answers with the weights before the update")):
        policy = Policy(copy.deepcopy(tiny.model), tiny.tokenizer)
        with _changeable(tiny) as (url, _), monkeypatch.context() as patch:
            engine = _engine(url, policy)
            engine.sync()
            patch.setattr(WeightUpdate, "apply", lambda self: None)
            _nudge(policy.module, scale)
            with pytest.raises(EngineUnavailable, match=said):
                engine.sync()


def test_a_restarted_server_gets_the_published_weights_again(tiny: Any, chat: Any) -> None:
    """Not those that the learner has come to meanwhile."""
    policy = Policy(copy.deepcopy(tiny.model), tiny.tokenizer)
    _nudge(policy.module, 0.003)
    expected = _tokens(_play(NativeEngine(policy, max_rows=8, max_context=900), chat))
    with _changeable(tiny) as (url, served):
        engine = _engine(url, policy)
        engine.publish(engine.snapshot(7))
        _nudge(policy.module, 0.05)
        with torch.no_grad():  # as if it had been started again
            for parameter, first in zip(served.policy.module.parameters(), tiny.model.parameters(), strict=True):
                parameter.copy_(first)
        served.version = "0"
        played = _play(engine, chat)
    assert _tokens(played) == expected
    assert {version for group in played for t in group.trajectories for turn in t.turns for version in turn.versions} == {7}


def test_a_server_that_is_being_replaced_is_waited_for(tiny: Any, policy: Policy, chat: Any, native: list[Group]) -> None:
    """However long that takes; one that stays away keeps its address, and is given up after `patience`."""
    places: list[str | None] = [None]
    with _changeable(tiny) as (places[0], _):
        engine = _engine(str(places[0]), policy, patience=0.2, find=lambda: list(places))
        engine.sync()
    with _changeable(tiny) as (second, _):
        places[0] = None
        threading.Timer(0.7, places.__setitem__, [0, second]).start()
        assert _tokens(_play(engine, chat)) == _tokens(native)
    with pytest.raises(EngineUnavailable, match=rf"could be used for 0.2 s \(server.patience\): .*{second}"):
        _play(engine, chat)


def test_a_server_that_replaces_another_is_checked_against_the_published_weights(tiny: Any, chat: Any) -> None:
    """Not against the policy, which the learner of an asynchronous run has changed since."""
    policy = Policy(copy.deepcopy(tiny.model), tiny.tokenizer)
    _nudge(policy.module, 0.003)
    expected = _tokens(_play(NativeEngine(policy, max_rows=8, max_context=900), chat))
    places: list[str | None] = [None]
    with _changeable(tiny) as (places[0], _):
        engine = _engine(str(places[0]), policy, patience=5, find=lambda: list(places))
        engine.publish(engine.snapshot(7))
    _nudge(policy.module, 0.05)
    with _changeable(tiny) as (places[0], _):
        played = _play(engine, chat)
    assert _tokens(played) == expected


# ------------------------------------------------------------------------------------------------------------------- refusals


def test_a_server_whose_update_was_cut_off_is_used_and_gets_the_weights(tiny: Any, policy: Policy, chat: Any) -> None:
    with _changeable(tiny) as (url, served):
        body = {"token": own_token(), "weight_version": "killed-1"}
        assert httpx.post(f"{url}/start_weight_update", json=body).status_code == 200
        engine = _engine(url, policy)
        assert engine.sync(3)["probe_difference"] < 1e-5 and served.version.endswith("-3")


def test_a_publisher_without_the_token_is_told_so(tiny: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    with _changeable(tiny) as (url, served):
        engine = _engine(url, policy)
        monkeypatch.setenv("TETHER_PUBLISH_TOKEN", "another")
        with pytest.raises(BadInput, match="takes weights with the publisher's token; publish as the user who"):
            engine.sync(1)
        assert served.version == "0"


def test_other_models_are_refused(tiny: Any, url: str, policy: Policy, chat: Any) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=578, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    with serving_model(LoadedModel(LlamaForCausalLM(config).eval(), tiny.tokenizer), "other") as other:
        with pytest.raises(EngineUnavailable, match=r"does not hold the learner's weights: its log-probs on the probe differ"):
            _play(_engine(other, policy), chat)  # evaluation: nothing is published
        with pytest.raises(BadInput, match=r"has shape .* serve the model that is trained"):  # exit code 2: no scheduler tries it again
            _engine(other, policy).sync()


def test_another_tokenizer_is_refused(tiny: Any, policy: Policy) -> None:
    written = json.loads(tiny.tokenizer.backend_tokenizer.to_str())
    words = written["model"]["vocab"]
    words["a"], words["e"] = words["e"], words["a"]
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(written))
    with (
        serving_model(LoadedModel(tiny.model, tokenizer), "tiny") as other,
        pytest.raises(BadInput, match="whose tokenizer is another than the policy's"),
    ):
        _engine(other, policy)


@pytest.mark.parametrize(
    ("field", "said"),
    [("logprobs", "0 log-probs for 8 tokens; use tether serve, or vLLM"), ("token_ids", "no token ids; use tether serve")],
)
def test_no_logprobs_or_no_ids_are_refused(proxy: Any, policy: Policy, field: str, said: str) -> None:
    def lacks(path: str, body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        for choice in reply.get("choices", []) if "generate" in path else []:
            choice[field] = None
        return reply

    proxy.change_reply = lacks
    with pytest.raises(BadInput, match=said):
        _engine(proxy.url, policy)


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": [10**30], "logprobs": {"content": [{"logprob": -1.0}]}},
        {"token_ids": [-1], "logprobs": {"content": [{"logprob": -1.0}]}},
        {"token_ids": [578], "logprobs": {"content": [{"logprob": -1.0}]}},
        {"logprobs": ["x"]},
        {"logprobs": {"content": [None] * 8}},
        {"weight_versions": [{"version": "1"}]},
        {"weight_versions": [{"version": "1", "start": "a", "end": []}]},
    ],
)
def test_what_a_server_makes_up_is_refused_in_one_line(proxy: Any, policy: Policy, wrong: dict[str, Any]) -> None:
    """Ids that the policy does not have would fail in the learner; other forms were a traceback."""

    def changed(path: str, body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        if "generate" in path:
            reply["choices"][0].update(wrong)
        return reply

    proxy.change_reply = changed
    with pytest.raises(
        BadInput, match=r"the server at .* answers with (something in another form|no token ids|token \d+, but|\d+ log-probs)"
    ):
        _engine(proxy.url, policy)


def test_an_old_vllm_is_refused_with_what_it_lacks(proxy: Any, policy: Policy) -> None:
    """Older than token ids in completions; then with them, but older than the routes that take weights."""

    def old(path: str, body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        for entry in reply.get("data", []):
            entry["owned_by"] = "vllm"
        for choice in reply.get("choices", []) if without_ids else []:
            choice.pop("token_ids", None)
        return reply

    def known_fields(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in body.items() if name not in ("ignore_eos", "skip_special_tokens", "add_special_tokens")}

    without_ids, proxy.change_reply, proxy.change_request = True, old, known_fields
    proxy.missing = ("inference/v1/generate", "is_paused", "get_world_size", "start_weight_update")
    with pytest.raises(BadInput, match=r"answers with no token ids; use tether serve, or vLLM \(0.10.2 or newer\)"):
        _engine(proxy.url, policy)
    without_ids = False
    engine = _engine(proxy.url, policy)
    assert engine.backend == "server (completions)"
    proxy.missing, proxy.off = proxy.missing[1:], proxy.missing[:1]  # as vLLM answers without --enable-scale-out
    engine = _engine(proxy.url, policy)
    assert engine.backend == "server (completions)"
    with pytest.raises(BadInput, match=r"takes no weights .*; start tether serve, or vLLM with VLLM_SERVER_DEV_MODE=1"):
        engine.sync()


def test_logprobs_of_another_temperature_are_refused(proxy: Any, policy: Policy, chat: Any) -> None:
    """What vLLM returns without --logprobs-mode processed_logprobs."""

    def raw(path: str, body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        for choice in reply.get("choices", []) if "generate" in path else []:
            scores = score_tokens(policy, [*body["token_ids"], *choice["token_ids"]])[len(body["token_ids"]) - 1 :]
            for entry, score in zip(choice["logprobs"]["content"], scores, strict=True):
                entry["logprob"] = score
        return reply

    proxy.change_reply = raw
    with pytest.raises(EngineUnavailable, match="those of temperature 1; start vLLM with --logprobs-mode processed_logprobs"):
        _play(_engine(proxy.url, policy), chat)


def test_addresses_tokens_and_room_are_one_line_each(tiny: Any, url: str, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    from tether.models import endpoint

    monkeypatch.setattr(endpoint, "RETRY_DELAYS", ())
    with pytest.raises(ModelUnavailable, match=r"cannot be used, 1 attempt: ConnectError.*; start one with: tether serve MODEL"):
        _engine("http://127.0.0.1:9", policy)
    with pytest.raises(ModelUnavailable, match=r"the server at http://no-such-host.invalid:80 cannot be used"):
        _engine("http://no-such-host.invalid:80", policy)
    with pytest.raises(BadInput, match="'http://:80' is not a server's address"):
        _engine("http://:80", policy)
    with pytest.raises(BadInput, match="has no model 'gpt': known: tiny"):
        _engine(f"{url}#gpt", policy)
    with pytest.raises(BadInput, match=r"has room for 1024 tokens, but rollout.max_context is 4000"):
        ServerEngine([url], policy, max_context=4000)
    with serving_model(tiny, "tiny", token="s3cret") as guarded:
        with pytest.raises(ModelUnavailable, match="set TETHER_TOKEN to the server's token"):
            _engine(guarded, policy)
        monkeypatch.setenv("TETHER_TOKEN", "wrong")
        with pytest.raises(ModelUnavailable, match=r"refuses the key .*set TETHER_TOKEN to the server's token"):
            _engine(guarded, policy)
        monkeypatch.setenv("TETHER_TOKEN", "s3cret")
        assert np.isfinite(_engine(guarded, policy).sync()["probe_difference"])
