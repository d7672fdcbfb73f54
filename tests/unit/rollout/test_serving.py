"""`tether serve` over real HTTP, with the embedded model: what it samples is what the native engine samples, whoever else is served."""

import base64
import copy
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save

from tether import make_env
from tether.core.config import cache_folder
from tether.core.http import serving_app
from tether.core.protocols import Sampling
from tether.core.types import Completion
from tether.models.fast.decoding.rows import position_bytes
from tether.models.load import LoadedModel
from tether.models.logprobs import score_tokens
from tether.models.policy import Policy
from tether.models.scoring.server import ServerScorer
from tether.models.tool_formats import FORMATS, ToolCall
from tether.rollout.engines.dialects import LINES
from tether.rollout.engines.native import NativeEngine
from tether.rollout.engines.publish import own_token
from tether.rollout.engines.stop_rule import MOST_TABLES, StopRule
from tether.rollout.serving.app import make_app, serving_model
from tether.rollout.serving.served import ServedModel

PROMPT = "The quick brown fox"


class OneResponse:
    """A conversation of one turn, for the native engine."""

    prefix_key = 0
    closing_tags: tuple[str, ...] = ()

    def __init__(self, prompt: tuple[int, ...], seed: int) -> None:
        self.prompt, self.uniforms = prompt, np.random.Generator(np.random.PCG64(seed))
        self.completion: Completion | None = None

    def begin(self) -> tuple[int, ...]:
        return self.prompt

    def receive(self, completion: Completion) -> None:
        self.completion = completion


@pytest.fixture(scope="module")
def url(tiny: Any) -> Iterator[str]:
    with serving_model(tiny, "tiny", max_rows=16) as address:
        yield address


@pytest.fixture
def changeable(tiny: Any) -> Iterator[tuple[str, LoadedModel]]:
    """A server whose weights a test may replace, and its model."""
    loaded = LoadedModel(copy.deepcopy(tiny.model), tiny.tokenizer)
    with serving_model(loaded, "tiny") as address:
        yield address, loaded


def _post(url: str, path: str, /, **body: Any) -> Any:
    reply = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def _refused(url: str, path: str, status: int = 400, /, **body: Any) -> str:
    # httpx's own JSON refuses halves of characters, which others send as escapes.
    reply = httpx.post(f"{url}{path}", content=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, timeout=60)
    assert reply.status_code == status, reply.text
    message = str(reply.json()["error"]["message"])
    assert len(message.splitlines()) == 1
    return message


def _native(tiny: Any, prompt: tuple[int, ...], seed: int, sampling: Sampling) -> Completion:
    conversation = OneResponse(prompt, seed)
    NativeEngine(Policy(*tiny), max_rows=4).run([conversation], sampling)
    assert conversation.completion is not None
    return conversation.completion


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_both_routes_sample_what_the_native_engine_samples(tiny: Any, chat: Any, url: str, temperature: float) -> None:
    ids = chat.encode(PROMPT)
    expected = _native(tiny, ids, 7, Sampling(temperature, 24))
    completions = _post(
        url, "/v1/completions", prompt=list(ids), max_tokens=24, temperature=temperature, seed=7, logprobs=0, return_token_ids=True
    )["choices"][0]
    generated = _post(
        url,
        "/inference/v1/generate",
        token_ids=list(ids),
        sampling_params={"max_tokens": 24, "temperature": temperature, "seed": 7, "logprobs": 0},
    )["choices"][0]
    assert tuple(completions["token_ids"]) == tuple(generated["token_ids"]) == expected.token_ids
    assert completions["logprobs"]["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-5)
    assert [entry["logprob"] for entry in generated["logprobs"]["content"]] == pytest.approx(expected.logprobs, abs=1e-5)
    assert [entry["token_id"] for entry in generated["logprobs"]["content"]] == list(expected.token_ids)
    assert completions["prompt_token_ids"] == list(ids)


def test_a_generator_continues_where_the_client_left_it(tiny: Any, chat: Any, url: str) -> None:
    """Two turns with the state of one generator: the tokens of the native engine, whose conversation goes on drawing from it."""
    ids, uniforms = chat.encode(PROMPT), np.random.Generator(np.random.PCG64(3))
    tokens: list[int] = []
    for turn in range(2):
        got = _post(
            url,
            "/inference/v1/generate",
            token_ids=[*ids, *tokens],
            sampling_params={"max_tokens": 7 + turn, "generator": uniforms.bit_generator.state},
        )["choices"][0]["token_ids"]
        uniforms.random(len(got), dtype=np.float32)
        tokens += got
    whole = _native(tiny, ids, 3, Sampling(1.0, 15))
    assert tuple(tokens) == whole.token_ids[: len(tokens)]


def test_a_seed_gives_the_same_tokens_in_any_batch(url: str) -> None:
    def ask(seed: int, temperature: float = 1.0) -> list[int]:
        body = {"prompt": PROMPT, "max_tokens": 20, "seed": seed, "temperature": temperature, "return_token_ids": True}
        return list(_post(url, "/v1/completions", **body)["choices"][0]["token_ids"])

    alone = [ask(seed) for seed in range(3)]
    with ThreadPoolExecutor(24) as threads:  # more than the server has rows, and of two temperatures
        others = [threads.submit(ask, seed, 0.7) for seed in range(20)]
        together = [threads.submit(ask, seed) for seed in range(3)]
        assert [future.result() for future in together] == alone
        assert all(future.result() for future in others)
    assert len({tuple(tokens) for tokens in alone}) > 1


def test_a_new_request_joins_those_that_decode(url: str) -> None:
    """A short request that comes later is answered before the long one: they decode in one batch."""
    order: list[str] = []

    def ask(name: str, tokens: int) -> None:
        _post(url, "/v1/completions", prompt=PROMPT, max_tokens=tokens, seed=1, temperature=0.0)
        order.append(name)

    long = threading.Thread(target=ask, args=("long", 500))
    long.start()
    while not httpx.get(f"{url}/health").json()["requests"]:
        time.sleep(0.01)
    ask("short", 2)
    long.join()
    assert order == ["short", "long"]


def _line(name: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"request_id": name, "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": tokens, "seed": 1, "logprobs": 0, **more}}


def _lines(*asked: dict[str, Any] | str) -> bytes:
    return "\n".join(each if isinstance(each, str) else json.dumps(each) for each in asked).encode()


def test_lines_of_one_body_are_answered_one_by_one(url: str) -> None:
    """As they are alone, as soon as they are sampled; what is wrong with one is said of that one."""
    wrong = [{**_line("id", 2), "token_ids": [10**6]}, _line("several", 2, n=2), {**_line("field", 2), "colour": 1}, "half"]
    lines = _lines(_line("long", 500, temperature=0), *wrong, _line("short", 2))
    with httpx.stream("POST", f"{url}/inference/v1/generate", content=lines, headers={"Content-Type": LINES}, timeout=60) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith(LINES)
        answers = [json.loads(line) for line in reply.iter_lines()]
    names = [answer["request_id"] for answer in answers]
    assert len(names) == 6 and names[-2:] == ["short", "long"]
    said = {answer["request_id"]: answer["error"] for answer in answers if "error" in answer}
    assert set(said) == {"id", "several", "field", None} and {error["code"] for error in said.values()} == {400}
    assert "send n lines" in said["several"]["message"] and "the line is not JSON" in said[None]["message"]
    alone = [_post(url, "/inference/v1/generate", **asked) for asked in (_line("short", 2), _line("long", 500, temperature=0))]
    for (mine,), (theirs,) in zip((answer["choices"] for answer in answers[-2:]), (answer["choices"] for answer in alone), strict=True):
        theirs["logprobs"] = {"content": [{"logprob": entry["logprob"]} for entry in theirs["logprobs"]["content"]]}
        assert mine == theirs
    refused = httpx.post(f"{url}/inference/v1/generate", content=_lines(*["{}"] * 1025), headers={"Content-Type": LINES})
    assert refused.status_code == 400 and "at most 1024" in refused.json()["error"]["message"]


def test_packed_numbers_are_the_same_numbers(url: str) -> None:
    plain = _line("plain", 9)
    text = base64.b64encode(np.array([5, 6, 7], "<u4").tobytes()).decode()
    asked = [plain, {**plain, "request_id": "packed", "packed": True, "token_ids": text}]
    reply = httpx.post(f"{url}/inference/v1/generate", content=_lines(*asked), headers={"Content-Type": LINES}, timeout=60)
    found = {answer["request_id"]: answer["choices"][0] for answer in map(json.loads, reply.iter_lines())}
    ids, logprobs = (base64.b64decode(found["packed"][name]) for name in ("token_ids", "logprobs"))
    assert np.frombuffer(ids, "<u4").tolist() == found["plain"]["token_ids"]
    assert np.frombuffer(logprobs, "<f8").tolist() == [entry["logprob"] for entry in found["plain"]["logprobs"]["content"]]
    alone = _post(url, "/inference/v1/generate", **asked[1])["choices"][0]
    assert alone["token_ids"] == found["packed"]["token_ids"] and isinstance(alone["logprobs"], str)


@pytest.mark.parametrize("ids", [[5, 6, 7], "", "BQ==", "BQAAAA==x", "BQ&AAA==", 5, None])
def test_ids_that_are_not_packed_are_refused(url: str, ids: Any) -> None:
    body = {**_line("one", 2), "packed": True, "token_ids": ids}
    reply = httpx.post(f"{url}/inference/v1/generate", json=body)
    assert reply.status_code == 400 and "token_ids" in reply.json()["error"]["message"]


def test_as_many_answers_as_lines_whenever_they_end(tiny: Any) -> None:
    """The engine tells the loop once of several: none may be left behind."""
    served = ServedModel("tiny", tiny, max_rows=64)
    with serving_app(make_app(served), "tiny") as url:
        for seed in range(4):
            lines = _lines(*(_line(str(number), 1 + (7 * number + seed) % 5, seed=number) for number in range(200)))
            reply = httpx.post(f"{url}/inference/v1/generate", content=lines, headers={"Content-Type": LINES}, timeout=60)
            assert sorted(int(json.loads(line)["request_id"]) for line in reply.iter_lines()) == list(range(200))


def test_requests_of_one_body_are_queued_together(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So their prompts are computed in one pass."""
    served = ServedModel("tiny", tiny, max_rows=64)
    queued: list[int] = []
    submit_all = served.thread.submit_all
    monkeypatch.setattr(served.thread, "submit_all", lambda requests: (queued.append(len(requests)), submit_all(requests))[1])
    with serving_app(make_app(served), "tiny") as url:
        lines = _lines(*(_line(str(number), 2) for number in range(30)))
        httpx.post(f"{url}/inference/v1/generate", content=lines, headers={"Content-Type": LINES}, timeout=60)
    assert queued == [30]


def test_lines_whose_client_has_gone_are_dropped_unless_they_have_begun(tiny: Any) -> None:
    served = ServedModel("tiny", tiny, max_rows=1)
    with serving_app(make_app(served), "tiny") as url:
        lines = _lines(_line("first", 2), *(_line(str(number), 400, temperature=0) for number in range(20)))
        with httpx.stream("POST", f"{url}/inference/v1/generate", content=lines, headers={"Content-Type": LINES}, timeout=60) as reply:
            answers = reply.iter_lines()  # the reply is closed with it
            assert json.loads(next(answers))["request_id"] == "first"
            assert served.thread.num_requests > 10
        deadline = time.monotonic() + 30
        while served.thread.num_requests:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert served.thread.statistics.sampled_tokens < 10 * 400


def test_text_stops_and_choices(url: str) -> None:
    body = {"prompt": [PROMPT, PROMPT], "max_tokens": 30, "seed": 5, "n": 2, "return_token_ids": True}
    answer = _post(url, "/v1/completions", **body)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert choices[0]["token_ids"] == choices[2]["token_ids"] != choices[1]["token_ids"]
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    letter = next(piece for piece in choices[0]["text"] if piece.isalpha())
    cut = _post(url, "/v1/completions", **{**body, "n": 1, "prompt": PROMPT, "stop": letter})["choices"][0]
    assert cut["finish_reason"] == "stop" and letter not in cut["text"] and choices[0]["text"].startswith(cut["text"])
    kept = _post(url, "/v1/completions", **{**body, "n": 1, "prompt": PROMPT, "stop": [letter], "include_stop_str_in_output": True})
    assert letter in kept["choices"][0]["text"] and kept["choices"][0]["token_ids"] == cut["token_ids"]


def test_prompt_logprobs_are_the_models(tiny: Any, chat: Any, url: str) -> None:
    ids = list(chat.encode(PROMPT))
    answer = _post(url, "/v1/completions", prompt=ids, max_tokens=1, prompt_logprobs=0)
    tables = answer["choices"][0]["prompt_logprobs"]
    expected = score_tokens(Policy(*tiny), ids)
    assert tables[0] is None
    assert [table[str(token)]["logprob"] for token, table in zip(ids[1:], tables[1:], strict=True)] == pytest.approx(expected, abs=1e-5)
    assert ServerScorer(url).score(ids[:2], ids[2:]) == pytest.approx(sum(expected[1:]), abs=1e-4)


def test_chat_ends_as_in_training(chat: Any, deep_tiny: Any) -> None:
    with serving_model(deep_tiny, "tiny") as url:
        _chat_ends(chat, url)


def _chat_ends(chat: Any, url: str) -> None:
    env = make_env("frozen_lake", instructions="plain")
    shown = env.reset(0).text
    messages = [{"role": "system", "content": env.instructions}, {"role": "user", "content": shown}]
    body = {"messages": messages, "max_tokens": 60, "temperature": 0, "logprobs": True, "return_token_ids": True}
    choice = _post(url, "/v1/chat/completions", **body)["choices"][0]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"].startswith("<think>")
    assert tuple(choice["prompt_token_ids"]) == chat.first_prompt(env.instructions, shown)
    assert choice["message"]["content"].endswith("</answer>") and choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    more = [*messages, choice["message"], {"role": "user", "content": "And now?"}]
    assert _post(url, "/v1/chat/completions", messages=more, max_tokens=4)["choices"][0]["message"]["content"]


HERMES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}}


def test_chat_with_tools_is_the_templates(tiny: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tools, or of a model that was not trained on environments, nothing is added to the template; calls are read from the reply."""
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.chat_template = HERMES
    calls: list[ToolCall] = []
    monkeypatch.setitem(FORMATS, "given", lambda text, tools: ("" if calls else text, tuple(calls)))
    served = ServedModel("tiny", LoadedModel(tiny.model, tokenizer), tool_format="given")
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "seen"},
    ]
    body = {"model": "gpt-4o", "messages": messages, "tools": [LOOK], "max_completion_tokens": 6, "seed": 1, "return_token_ids": True}
    written = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nLook.<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "look", "arguments": {"n": 1}}\n</tool_call><|im_end|>\n<|im_start|>tool\nseen<|im_end|>\n<|im_start|>assistant\n'
    )
    with serving_app(make_app(served), "tiny") as url:
        choice = _post(url, "/v1/chat/completions", **body)["choices"][0]
        assert tuple(choice["prompt_token_ids"]) == served.chat.encode(written) and choice["finish_reason"] == "length"
        text = served.chat.decode(tuple(choice["token_ids"]))
        assert choice["message"] == {"role": "assistant", "content": text}
        reply = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": True, "n": 2, "stream_options": {"include_usage": True}})
        *events, done = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        chunks = [json.loads(event) for event in events]
        deltas = [
            chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"] and not chunk["choices"][0]["index"]
        ]
        assert done == "[DONE]" and "".join(deltas) == text and chunks[-1]["usage"]["completion_tokens"] == 12
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]].count("length") == 2
        calls.append(ToolCall("look", {"n": 2}))
        called = _post(url, "/v1/chat/completions", **{**body, "max_completion_tokens": 2})["choices"][0]
        assert called["finish_reason"] == "tool_calls" and called["message"]["content"] is None
        assert called["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"n": 2}'}
        assert caplog.messages == ["a client asks for the model 'gpt-4o'; every name is answered by 'tiny'"]
        assert "holds half of a character" in _refused(url, "/v1/completions", prompt="\ud800")
        for fields, said in (
            ({"messages": [{"role": "user", "content": "\ud800"}]}, "holds half of a character"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "the model reads text only"),
            ({"tool_choice": "required"}, "request key 'tool_choice': got 'required'"),
            ({"response_format": {"type": "json_object"}}, "request key 'response_format.type'"),
            ({"tools": [{"type": "web_search"}]}, "send function tools with a name"),
            ({"messages": 5}, "request key 'messages'"),
        ):
            assert said in _refused(url, "/v1/chat/completions", **{**body, **fields})


def test_tools_of_an_unknown_format_are_refused(url: str) -> None:
    said = _refused(url, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], tools=[LOOK])
    assert "writes tool calls in no format that is known here" in said and "--tool-format" in said


def test_a_train_client_of_verifiers_is_answered(url: str) -> None:
    """It sends skip_special_tokens, and reads token ids from the log-probs as vLLM writes them."""
    params = {"max_tokens": 3, "logprobs": 1, "skip_special_tokens": False, "detokenize": False}
    choice = _post(url, "/inference/v1/generate", token_ids=[5, 6], sampling_params=params)["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in choice["token_ids"]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": PROMPT, "max_token": 3}, "unknown request key 'max_token': did you mean 'max_tokens'?"),
        ({"prompt": PROMPT, "temperature": -1}, "request key 'temperature': got -1"),
        ({"prompt": [999999]}, "the prompt holds token 999999, but the model has 578"),
        ({"prompt": [1, 2], "max_tokens": 5000}, "max_tokens is 5000, but a text may have 1024"),
        ({"prompt": []}, "the prompt holds no token"),
        ({"prompt": PROMPT, "logprobs": 5}, "request key 'logprobs': got 5"),
        ({"prompt": PROMPT, "frequency_penalty": 0.5}, "request key 'frequency_penalty': got 0.5"),
        ({"prompt": PROMPT, "stream": True}, "request key 'stream': got True"),
        ({}, "request key 'prompt' is missing"),
    ],
)
def test_bad_requests_get_one_line(url: str, body: dict[str, Any], said: str) -> None:
    assert said in _refused(url, "/v1/completions", **body)


def test_a_request_larger_than_the_cache_is_refused_alone(tiny: Any, chat: Any) -> None:
    prompt, room = list(chat.encode(PROMPT)), 96
    served = ServedModel("tiny", tiny, max_rows=4, cache_gb=room * position_bytes(Policy(*tiny)) / 2**30)
    fits = {"prompt": prompt, "max_tokens": room - len(prompt), "seed": 3, "temperature": 1.0, "return_token_ids": True}
    with serving_app(make_app(served), "tiny") as url, ThreadPoolExecutor(4) as clients:
        others = [clients.submit(_post, url, "/v1/completions", **fits) for _ in range(3)]
        _refused(url, "/inference/v1/generate", 400, token_ids=prompt * (1 + room // len(prompt)))
        sampled = [other.result()["choices"][0]["token_ids"] for other in others]
        assert all(ids == sampled[0] and len(ids) <= room - len(prompt) for ids in sampled)
        said = _refused(url, "/v1/completions", 400, **{**fits, "max_tokens": room - len(prompt) + 1})
        assert f"a text may have {room}" in said
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == room
        message = {"role": "user", "content": PROMPT}  # without a budget a chat gets the room that there is
        assert _post(url, "/v1/chat/completions", messages=[message])["usage"]["total_tokens"] <= room


def test_other_models_and_other_hosts_are_refused(tiny: Any, url: str) -> None:
    assert "it serves 'tiny'" in _refused(url, "/v1/completions", 404, prompt=PROMPT, model="gpt-4")
    assert httpx.get(f"{url}/v1/models", headers={"Host": "example.org"}).status_code == 403
    with serving_model(tiny, "tiny", token="s3cret") as guarded:
        assert httpx.get(f"{guarded}/v1/models").status_code == 401
        assert httpx.get(f"{guarded}/v1/models", headers={"Authorization": "Bearer s3cret"}).json()["data"][0]["owned_by"] == "tether"


# ------------------------------------------------------------------------------------------------------------------ weights


BYTES = {"Content-Type": "application/octet-stream"}


def _start(url: str, version: str, **more: Any) -> str:
    """Start an update as this user; the end of the address of its further calls."""
    return "?update=" + _post(url, "/start_weight_update", token=own_token(), weight_version=version, **more)["update"]


def _send(url: str, update: str, tensors: dict[str, torch.Tensor]) -> httpx.Response:
    return httpx.post(f"{url}/update_weights{update}", content=save(tensors), headers=BYTES, timeout=60)


def _version(url: str) -> str:
    """Of the weights that answer a request now."""
    return str(_post(url, "/v1/completions", prompt=PROMPT, max_tokens=2)["choices"][0]["weight_versions"][0]["version"])


def _named(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _other(model: Any) -> dict[str, torch.Tensor]:
    """Weights that sample something else."""
    return {name: tensor * 1.1 for name, tensor in _named(model).items()}


def test_new_weights_are_served_with_their_version(changeable: tuple[str, LoadedModel], tiny: Any, chat: Any, tmp_path: Path) -> None:
    url, _ = changeable
    body = {"token_ids": list(chat.encode(PROMPT)), "sampling_params": {"max_tokens": 12, "temperature": 0, "logprobs": 0}}
    before = _post(url, "/inference/v1/generate", **body)["choices"][0]
    assert before["weight_versions"] == [{"version": "0", "start": 0, "end": len(before["token_ids"])}]
    other = copy.deepcopy(tiny.model)
    other.load_state_dict(_other(tiny.model), strict=False)
    expected = _native(LoadedModel(other, tiny.tokenizer), chat.encode(PROMPT), 0, Sampling(0, 12))

    update = _start(url, "1")
    assert _send(url, update, _named(other)).json()["tensors"] == len(_named(other))
    assert _post(url, f"/finish_weight_update{update}") == {"weight_version": "1"}
    after = _post(url, "/inference/v1/generate", **body)["choices"][0]
    assert tuple(after["token_ids"]) == expected.token_ids and after["weight_versions"][0]["version"] == "1"
    assert [entry["logprob"] for entry in after["logprobs"]["content"]] == pytest.approx(expected.logprobs, abs=1e-5)
    # A conversation that goes on: what the old weights left of it in the cache is not used.
    continued = (*chat.encode(PROMPT), *before["token_ids"], *chat.encode(" and"))
    body["token_ids"] = list(continued)
    expected = _native(LoadedModel(other, tiny.tokenizer), continued, 0, Sampling(0, 12))
    after = _post(url, "/inference/v1/generate", **body)["choices"][0]
    assert [entry["logprob"] for entry in after["logprobs"]["content"]] == pytest.approx(expected.logprobs, abs=1e-5)
    body["token_ids"] = list(chat.encode(PROMPT))

    tiny.model.save_pretrained(tmp_path / "model")
    update = _start(url, "2")
    _post(url, f"/update_weights{update}", path=str(tmp_path / "model"))
    _post(url, f"/finish_weight_update{update}")
    again = _post(url, "/inference/v1/generate", **body)["choices"][0]
    assert again["token_ids"] == before["token_ids"] and again["weight_versions"][0]["version"] == "2"


def test_old_weights_serve_until_all_new_ones_are_there(changeable: tuple[str, LoadedModel], tiny: Any) -> None:
    """A response in flight ends with the weights that it began with."""
    url, _ = changeable

    def ask(tokens: int) -> str:
        answer = _post(url, "/v1/completions", prompt=PROMPT, max_tokens=tokens, temperature=0.0)
        return str(answer["choices"][0]["weight_versions"][0]["version"])

    with ThreadPoolExecutor(4) as threads:
        update = _start(url, "new")
        _send(url, update, _other(tiny.model))
        assert ask(3) == "0"
        flying = threads.submit(ask, 400)
        while not httpx.get(f"{url}/health").json()["requests"]:
            time.sleep(0.01)
        _post(url, f"/finish_weight_update{update}")
        assert flying.result() == "0" and ask(3) == "new"


def test_updates_need_the_publishers_token_and_a_version(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them nothing happens, and requests are served (one such request once froze the server for everybody)."""
    with serving_model(tiny, "tiny") as url:
        assert "need the publisher's token; publish as the user who started the server" in _refused(url, "/start_weight_update", 401)
        assert "not the publisher's token" in _refused(url, "/start_weight_update", 401, token="guess", weight_version="1")
        for wrong in ({}, {"weight_version": ""}, {"weight_version": "a\nb"}, {"weight_version": "1", "seconds": 0}):
            assert "request key" in _refused(url, "/start_weight_update", token=own_token(), **wrong)
        for route in ("/update_weights", "/finish_weight_update?update=", "/update_weights?update=guess"):
            assert "none is in progress" in _refused(url, route, 409, path="/etc/passwd")
        assert _version(url) == "0"
    assert own_token() == own_token() and (cache_folder("publish") / "token").stat().st_mode & 0o077 == 0
    monkeypatch.setenv("TETHER_PUBLISH_TOKEN", "chosen")
    with serving_model(tiny, "tiny") as url:
        _refused(url, "/start_weight_update", 401, token=own_token(), weight_version="1")
        assert "update" in _post(url, "/start_weight_update", token="chosen", weight_version="1")
    monkeypatch.delenv("TETHER_PUBLISH_TOKEN")
    with serving_model(tiny, "tiny", token="s3cret") as url:
        body = {"token": "s3cret", "weight_version": "1"}
        assert httpx.post(f"{url}/start_weight_update", json=body).status_code == 401, "no bearer token"
        assert httpx.post(f"{url}/start_weight_update", json=body, headers={"Authorization": "Bearer s3cret"}).status_code == 200


def test_an_update_that_is_never_finished_is_given_up(changeable: tuple[str, LoadedModel], tiny: Any) -> None:
    """Its publisher was killed: the old weights serve, /health says what is true, and the memory is given back in time."""
    url, _ = changeable
    update = _start(url, "next", seconds=1)
    _send(url, update, _other(tiny.model))
    health = httpx.get(f"{url}/health").json()
    assert (health["status"], health["weight_version"], health["updating"]) == ("ok", "0", True)
    assert (
        health["update"]["weight_version"] == "next" and health["update"]["seconds"] == 1 and health["update"]["since"].endswith("+00:00")
    )
    assert _version(url) == "0"
    deadline = time.monotonic() + 20
    while (found := httpx.get(f"{url}/weight_info").json())["updating"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (found["weight_version"], found["abandoned"]["weight_version"]) == ("0", "next")
    assert found["abandoned"]["reason"] == "its publisher was silent for 1 s" and found["abandoned"]["since"].endswith("+00:00")
    assert "took too long" in _refused(url, f"/finish_weight_update{update}", 409)
    assert _version(url) == "0"


def test_of_two_publishers_the_later_one_is_served(changeable: tuple[str, LoadedModel], tiny: Any) -> None:
    url, loaded = changeable
    first = _start(url, "a-1")
    _send(url, first, _other(tiny.model))
    second = _start(url, "b-1")
    assert "that of version 'b-1' is in progress" in _send(url, first, _other(tiny.model)).json()["error"]["message"]
    assert "that of version 'b-1' is in progress" in _refused(url, f"/finish_weight_update{first}", 409)
    _send(url, second, _named(tiny.model))
    _post(url, f"/finish_weight_update{second}")
    assert _version(url) == "b-1"
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), tiny.model.parameters(), strict=True))


def test_wrong_weights_are_refused_and_nothing_of_them_is_served(changeable: tuple[str, LoadedModel], tiny: Any) -> None:
    url, loaded = changeable
    weights = _named(tiny.model)
    name = next(iter(weights))

    def refused(said: str, send: Callable[[str], httpx.Response]) -> None:
        """Whatever is refused abandons its update: nothing of it is served, nobody waits, and /weight_info says why."""
        reply = send(_start(url, "wrong"))
        message = reply.json()["error"]["message"]
        assert reply.status_code == 400 and said in message
        found = httpx.get(f"{url}/weight_info").json()
        assert (found["weight_version"], found["updating"]) == ("0", False)
        assert (found["abandoned"]["weight_version"], found["abandoned"]["reason"]) == ("wrong", message)
        assert _version(url) == "0"

    def send_part(update: str) -> httpx.Response:
        _send(url, update, {name: weights[name] + 1})
        return httpx.post(f"{url}/finish_weight_update{update}", json={})

    refused("has no parameter 'strange'", lambda update: _send(url, update, {"strange": torch.zeros(2)}))
    refused("has shape [2] in the update", lambda update: _send(url, update, {name: torch.zeros(2)}))
    numbers = torch.zeros(weights[name].shape, dtype=torch.int64)
    refused("is int64 in the update", lambda update: _send(url, update, {name: numbers}))
    refused("no safetensors file", lambda update: httpx.post(f"{url}/update_weights{update}", content=b"junk", headers=BYTES))
    for path in ("/nowhere", "/dev/zero", "a\x00b"):
        refused("cannot read weights from", lambda update, path=path: httpx.post(f"{url}/update_weights{update}", json={"path": path}))
    refused(f"left out {len(weights) - 1} parameters", send_part)
    assert torch.equal(dict(loaded.model.named_parameters())[name], weights[name]), "what has come is held apart"
    update = _start(url, "1")
    _send(url, update, weights)
    _post(url, f"/finish_weight_update{update}")
    assert httpx.get(f"{url}/weight_info").json() == {"weight_version": "1", "updating": False}


def test_metrics_follow_tokens_and_weights(changeable: tuple[str, LoadedModel], tiny: Any) -> None:
    url, _ = changeable

    def metric(name: str) -> float:
        lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(f"{name} ")]
        return float(lines[0].split()[1])

    answer = _post(url, "/v1/completions", prompt=PROMPT, max_tokens=7)
    assert metric("tether_sampled_tokens_total") == answer["usage"]["completion_tokens"]
    assert 0 < metric("tether_cache_used_ratio") < 1, "the prefix of the request is kept"
    assert metric("tether_queue_requests") == metric("tether_running_requests") == metric("tether_weights_version") == 0
    first = _start(url, "run-6")
    assert _send(url, first, {"strange": torch.zeros(2)}).status_code == 400
    _start(url, "run-6")
    second = _start(url, "run-7")
    _send(url, second, _named(tiny.model))
    _post(url, f"/finish_weight_update{second}")
    outcomes = {outcome: metric(f'tether_weight_updates_total{{outcome="{outcome}"}}') for outcome in ("applied", "refused", "replaced")}
    assert outcomes == {"applied": 1, "refused": 1, "replaced": 1}
    assert metric("tether_weights_version") == 7 and 0 <= metric("tether_weights_age_seconds") < 60
    assert metric("tether_cache_used_ratio") == 0


def test_a_stuck_engine_is_not_healthy(tiny: Any) -> None:
    served, released = ServedModel("tiny", tiny), threading.Event()
    served.thread._stuck_after = 0.3
    with serving_app(make_app(served), "tiny") as url:
        assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/ready").status_code == 200
        time.sleep(0.4)
        assert httpx.get(f"{url}/health").status_code == 200, "an idle engine is not stuck"
        stuck = served.thread.exclusive(lambda: released.wait(30))
        deadline = time.monotonic() + 20
        while (health := httpx.get(f"{url}/health")).status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert health.status_code == 503
        assert health.json()["error"]["message"].startswith("1 requests wait, and the engine computed nothing for")
        assert httpx.get(f"{url}/ready").status_code == 503
        released.set()
        assert stuck.result(20) and httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/ready").status_code == 200


def test_no_server_is_ready_while_weights_are_put_in_place(changeable: tuple[str, LoadedModel], tiny: Any) -> None:
    """Requests wait meanwhile: for the response in flight, and for the weights themselves."""
    url, _ = changeable
    update = _start(url, "1")
    _send(url, update, _named(tiny.model))
    assert httpx.get(f"{url}/ready").status_code == 200, "an update on its way holds nobody up"
    with ThreadPoolExecutor(2) as threads:
        flying = threads.submit(_post, url, "/v1/completions", prompt=PROMPT, max_tokens=200, temperature=0.0)
        while not httpx.get(f"{url}/health").json()["requests"]:
            time.sleep(0.01)
        finished = threads.submit(_post, url, f"/finish_weight_update{update}")
        said = set()
        while not finished.done():
            said.add(httpx.get(f"{url}/ready").text)
            time.sleep(0.03)
        assert any("new weights are being put in place" in text for text in said)
        flying.result()
    assert httpx.get(f"{url}/ready").status_code == 200


def test_weights_of_another_model_are_refused_before_an_update_begins(changeable: tuple[str, LoadedModel], tiny: Any) -> None:
    """The update of another publisher goes on."""
    url, _ = changeable
    right = {name: ["float32", list(tensor.shape)] for name, tensor in _named(tiny.model).items()}
    name = min(right)
    update = _start(url, "right", parameters=right)
    fewer = {other: entry for other, entry in right.items() if other != name}
    for said, parameters in (
        ("has no parameter 'strange'", {**right, "strange": ["float32", [2]]}),
        ("has shape [2] in the update", {**right, name: ["float32", [2]]}),
        ("is int64 in the update", {**right, name: ["int64", right[name][1]]}),
        ("is load in the update", {**right, name: ["load", right[name][1]]}),
        ("is float8_e4m3fn in the update", {**right, name: ["float8_e4m3fn", right[name][1]]}),
        (f"left out 1 parameters, {name}", fewer),
    ):
        body = {"token": own_token(), "weight_version": "wrong", "parameters": parameters}
        assert said in _refused(url, "/start_weight_update", **body)
    found = httpx.get(f"{url}/weight_info").json()
    assert found["update"]["weight_version"] == "right" and "abandoned" not in found
    _send(url, update, _named(tiny.model))
    _post(url, f"/finish_weight_update{update}")
    assert _version(url) == "right"


def test_a_connection_that_drops_inside_an_update_can_be_made_again_until_the_update_is_abandoned(
    changeable: tuple[str, LoadedModel], tiny: Any
) -> None:
    url, _ = changeable
    update = _start(url, "cut", seconds=1)
    body, address = save(_named(tiny.model)), httpx.URL(url)

    def drop() -> None:
        """Half of a body, then nothing."""
        head = f"POST /update_weights{update} HTTP/1.1\r\nHost: {address.host}\r\nContent-Type: application/octet-stream\r\nContent-Length: {len(body)}"
        with socket.create_connection((address.host, address.port)) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body[: len(body) // 2])
            time.sleep(1.2)  # longer than the publisher may be silent: it is not, while it sends
            assert httpx.get(f"{url}/weight_info").json()["updating"]

    drop()
    assert _send(url, update, _named(tiny.model)).status_code == 200
    drop()
    deadline = time.monotonic() + 10
    while httpx.get(f"{url}/weight_info").json()["updating"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert _version(url) == "0"


def test_diverged_weights_are_an_error_of_the_request_and_the_server_lives(changeable: tuple[str, LoadedModel], tiny: Any) -> None:
    url, _ = changeable
    update = _start(url, "1")
    _send(url, update, {name: torch.full_like(tensor, float("nan")) for name, tensor in _named(tiny.model).items()})
    _post(url, f"/finish_weight_update{update}")
    assert httpx.get(f"{url}/ready").status_code == 200, "nothing was computed with them yet"
    assert "weights have diverged" in _refused(url, "/v1/completions", 500, prompt=PROMPT)
    unready = httpx.get(f"{url}/ready")
    assert (unready.status_code, httpx.get(f"{url}/health").status_code) == (503, 200)
    assert "the weights of version '1' are not finite; publish others" in unready.text
    update = _start(url, "2")
    _send(url, update, _named(tiny.model))
    _post(url, f"/finish_weight_update{update}")
    assert httpx.get(f"{url}/ready").status_code == 200
    assert _version(url) == "2"


# ------------------------------------------------------------------------------------------------------------ hostile requests

HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": PROMPT, "temperature": 1e-300}, "must be 0, which takes the likeliest token, or at least 0.001"),
    ("/v1/completions", {"prompt": [[1]] * 1000, "n": 128}, "ask for at most 1024 at a time"),
    ("/v1/completions", {"prompt": [None] * 100_000}, "request key 'prompt"),
    ("/v1/completions", {"prompt": "x" * 1_000_000}, "has 1000000 characters, but a text may have"),
    ("/v1/completions", {"prompt": [5] * 1_000_000}, "but a text may have"),
    ("/v1/completions", {"prompt": PROMPT, "stop": ["x"] * 1000}, "request key 'stop"),
    ("/v1/completions", {"prompt": PROMPT, "seed": 10**4000}, "request key 'seed'"),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 10**18}, "request key 'max_tokens'"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 1_000_000}]}, "but a text may have"),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"temperature": 1e-38}}, "at least 0.001"),
]


def test_hostile_requests_get_one_line_and_nobody_else_notices(url: str) -> None:
    """A temperature near 0 made logits overflow, and the error failed every request of the batch."""
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(_post, url, "/v1/completions", prompt=PROMPT, max_tokens=500, temperature=0.0)
        for route, body, said in HOSTILE:
            assert said in _refused(url, route, **body)
        assert len(other.result()["choices"]) == 1
    for wrong in (b'{"prompt": ' + b"[" * 100_000, b'{"temperature": NaN, "prompt": "a"}', b'{"seed": ' + b"9" * 5000 + b"}", b"\xff"):
        reply = httpx.post(f"{url}/v1/completions", content=wrong, headers={"Content-Type": "application/json"}, timeout=60)
        assert reply.status_code == 400 and len(str(reply.json()["error"]["message"]).splitlines()) == 1


def test_a_job_that_nobody_waits_for_does_not_end_the_server(tiny: Any) -> None:
    served = ServedModel("tiny", tiny, max_rows=2)
    held, ran = threading.Event(), []
    served.thread.exclusive(lambda: held.wait(60))
    cancelled = served.thread.exclusive(lambda: ran.append(1))
    assert cancelled.cancel()
    held.set()
    assert served.thread.exclusive(lambda: 7).result(60) == 7 and served.thread.is_alive and not ran
    served.close()


def test_stop_texts_of_clients_take_a_bounded_amount_of_memory(tiny: Any) -> None:
    rule = StopRule(tiny.tokenizer)
    for number in range(3 * MOST_TABLES):
        rule.candidates(np.zeros((1, 1), dtype=np.int64), Sampling(stop_strings=(chr(1000 + number),)))
    assert len(rule._closing) <= MOST_TABLES and len(rule._ending) <= MOST_TABLES
