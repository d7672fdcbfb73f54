"""ServerScorer against a real server: `tiny` behind the completions API over HTTP, in both dialects, must score as it does here.

The server is FastAPI in a thread on a port of its own. What it can be told to do wrong (refuse, fail for a while, leave out log-probs)
is what servers do.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from tether import cross_score
from tether.cli.main import main
from tether.core.errors import BadInput, ModelUnavailable
from tether.models import endpoint
from tether.models.scoring.local import PrefixScorer
from tether.models.scoring.make import make_scorer
from tether.models.scoring.server import ServerScorer

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [90, 1, 2, 3]]
REASONINGS = [[4], [20, 21, 22, 23, 24], [30, 31]]


@dataclass
class Behaviour:
    """What the server does, and what it was asked."""

    dialects: tuple[str, ...] = ("prompt_logprobs", "echo")
    refuses_unknown: bool = False
    models: tuple[str, ...] = ("tiny",)
    failures: list[int] = field(default_factory=list)
    """Statuses to answer the next completions with, first to last."""
    retry_after: str | None = None
    key: str | None = None
    extra_token: bool = False
    """Put a token of its own before every prompt, as servers do with text."""
    garbled: bool = False
    forgets: bool = False
    """Leave out log-probs after the first answer."""
    requests: list[dict[str, Any]] = field(default_factory=list)


def _app(model: Any, behaviour: Behaviour) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def check_key(request: Request, go_on: Callable[[Request], Any]) -> Any:
        if behaviour.key and request.headers.get("authorization") != f"Bearer {behaviour.key}":
            return JSONResponse({"error": {"message": "wrong key"}}, status_code=401)
        return await go_on(request)

    @app.get("/v1/models")
    def models() -> Any:
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in behaviour.models]}

    @app.post("/v1/completions")
    def completions(body: dict[str, Any]) -> Any:
        behaviour.requests.append(body)
        if behaviour.failures:
            headers = {"Retry-After": behaviour.retry_after} if behaviour.retry_after else {}
            return JSONResponse({"error": {"message": "busy"}}, status_code=behaviour.failures.pop(0), headers=headers)
        if behaviour.refuses_unknown and "prompt_logprobs" in body and "prompt_logprobs" not in behaviour.dialects:
            return JSONResponse({"error": {"message": "unknown field prompt_logprobs"}}, status_code=400)
        if behaviour.garbled:
            return {"choices": []}
        return _completion(model, body, behaviour)

    return app


def _completion(model: Any, body: dict[str, Any], behaviour: Behaviour) -> dict[str, Any]:
    ids = [3, *body["prompt"]] if behaviour.extra_token else body["prompt"]
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0] / body["temperature"]
    logprobs = logits.double().log_softmax(-1)
    of_prompt = [None, *(float(logprobs[t, token]) for t, token in enumerate(ids[1:]))]
    best = int(logprobs[-1].argmax())
    choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
    silent = behaviour.forgets and len(behaviour.requests) > 1
    if "prompt_logprobs" in behaviour.dialects and "prompt_logprobs" in body and not silent:
        tables = [{str(token): {"logprob": value, "rank": 1}} for token, value in zip(ids, of_prompt, strict=True)]
        choice["prompt_logprobs"] = [None, *tables[1:]]
    if "logprobs" in body:
        echoed = of_prompt if body.get("echo") and "echo" in behaviour.dialects else []
        choice["logprobs"] = {"token_logprobs": [*echoed, float(logprobs[-1, best])], "tokens": [""] * (len(echoed) + 1)}
    return {"object": "text_completion", "choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": 1}}


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def behaviour() -> Behaviour:
    return Behaviour()


@pytest.fixture
def url(tiny: Any, behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(endpoint, "RETRY_DELAYS", (0.01, 0.02))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving(_app(tiny.model, behaviour)) as address:
        yield address


@pytest.fixture(scope="module")
def expected(tiny: Any) -> np.ndarray:
    return PrefixScorer(tiny.model).score_all(PROMPTS, REASONINGS)


@pytest.mark.parametrize(
    ("dialects", "refuses"), [(("prompt_logprobs", "echo"), False), (("prompt_logprobs",), False), (("echo",), False), (("echo",), True)]
)
def test_both_dialects_score_as_the_model_does_here(url: str, behaviour: Behaviour, expected: Any, dialects: Any, refuses: bool) -> None:
    behaviour.dialects, behaviour.refuses_unknown = dialects, refuses
    scorer = ServerScorer(url, parallel=3)
    np.testing.assert_allclose(cross_score(scorer, PROMPTS, REASONINGS), expected, atol=1e-4)
    extra_for_the_probe = 0 if "prompt_logprobs" in dialects else 1
    assert len(behaviour.requests) == 9 + extra_for_the_probe
    asked = behaviour.requests[-1]
    assert ("echo" in asked) == ("prompt_logprobs" not in dialects)
    assert all(request["temperature"] == 1.0 and request["model"] == "tiny" for request in behaviour.requests)
    np.testing.assert_allclose(scorer.score_many(PROMPTS[0], REASONINGS), expected[:, 0], atol=1e-4)
    assert scorer.score(PROMPTS[1], REASONINGS[2]) == pytest.approx(expected[2, 1], abs=1e-4)
    assert len(behaviour.requests) == 9 + extra_for_the_probe + 4, "the dialect is found out once"


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
def test_the_address_with_or_without_its_path(url: str, expected: Any, tail: str) -> None:
    assert ServerScorer(url + tail).score(PROMPTS[0], REASONINGS[1]) == pytest.approx(expected[1, 0], abs=1e-4)


def test_numpy_ids(url: str, expected: Any) -> None:
    scores = ServerScorer(url).score_all([np.array(prompt) for prompt in PROMPTS], [np.array(reasoning) for reasoning in REASONINGS])
    np.testing.assert_allclose(scores, expected, atol=1e-4)


def test_a_server_without_prompt_log_probs(url: str, behaviour: Behaviour) -> None:
    behaviour.dialects = ()
    with pytest.raises(BadInput, match=r"returns no log-probs of prompt tokens from /completions; vLLM .* and SGLang .* do$"):
        ServerScorer(url).score([1, 2], [3])


def test_a_server_that_refuses_both_dialects(url: str, behaviour: Behaviour) -> None:
    behaviour.failures = [400, 422]
    with pytest.raises(BadInput, match=r"refuses the request \(HTTP 422: busy\); if the tokens are not .*: vLLM"):
        ServerScorer(url).score([1, 2], [3])


def test_passing_failures_are_tried_again(url: str, behaviour: Behaviour, expected: Any) -> None:
    behaviour.failures = [429, 503]
    assert ServerScorer(url).score(PROMPTS[0], REASONINGS[1]) == pytest.approx(expected[1, 0], abs=1e-4)
    assert len(behaviour.requests) == 3


def test_lasting_failures_end_with_one_line(url: str, behaviour: Behaviour) -> None:
    behaviour.failures = [500] * 3
    with pytest.raises(ModelUnavailable, match=r"cannot be used, 3 attempts: HTTP 500: busy; check that it runs"):
        ServerScorer(url).score(PROMPTS[0], REASONINGS[1])
    assert len(behaviour.requests) == 3


def test_a_server_that_asks_for_too_much_patience_is_not_waited_for(url: str, behaviour: Behaviour) -> None:
    behaviour.failures, behaviour.retry_after = [429] * 3, "3600"
    with pytest.raises(ModelUnavailable, match="HTTP 429"):
        ServerScorer(url).score(PROMPTS[0], REASONINGS[1])
    assert len(behaviour.requests) == 1


@pytest.mark.parametrize("wish", ["0.05", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_wished_pause(url: str, behaviour: Behaviour, wish: str) -> None:
    behaviour.failures, behaviour.retry_after = [429], wish
    assert np.isfinite(ServerScorer(url).score([1, 2], [3]))


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "RETRY_DELAYS", (0.01,))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ModelUnavailable, match=rf"http://127.0.0.1:{port} cannot be used, 2 attempts: ConnectError"):
        ServerScorer(f"http://127.0.0.1:{port}").score([1], [2])


def test_the_key(url: str, behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    behaviour.key = "secret"
    with pytest.raises(ModelUnavailable, match=r"refuses the key \(HTTP 401: wrong key\); set OPENAI_API_KEY"):
        ServerScorer(url).score([1, 2], [3])
    assert np.isfinite(ServerScorer(url, api_key="secret").score([1, 2], [3]))
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert np.isfinite(ServerScorer(url).score([1, 2], [3]))


def test_which_model(url: str, behaviour: Behaviour) -> None:
    behaviour.models = ("tiny", "large")
    with pytest.raises(BadInput, match=r"has 2 models; name one behind a #: tiny, large"):
        ServerScorer(url).score([1], [2])
    with pytest.raises(BadInput, match=r"has no model 'tniy': did you mean 'tiny'\?"):
        make_scorer(f"{url}#tniy").scorer.score([1], [2])
    assert np.isfinite(make_scorer(f"{url}#large").scorer.score([1, 2], [3]))
    assert behaviour.requests[-1]["model"] == "large"


def test_a_server_that_adds_tokens_is_refused(url: str, behaviour: Behaviour) -> None:
    behaviour.extra_token = True
    with pytest.raises(BadInput, match="read 3 tokens where 2 were sent"):
        ServerScorer(url).score([1], [2])


def test_answers_in_another_form(url: str, behaviour: Behaviour) -> None:
    behaviour.garbled = True
    with pytest.raises(BadInput, match="in a form that is not OpenAI's"):
        ServerScorer(url).score([1], [2])
    with pytest.raises(BadInput, match=r"refuses the request \(HTTP 404: Not Found\)"):
        ServerScorer(url + "/elsewhere").score([1], [2])


def test_log_probs_that_stop_coming(url: str, behaviour: Behaviour) -> None:
    behaviour.forgets = True
    with pytest.raises(ModelUnavailable, match="left out prompt log-probs"):
        ServerScorer(url, parallel=1).score_many([1, 2], [[3], [4]])


@pytest.mark.parametrize(
    ("address", "options", "words"),
    [
        ("localhost:8000", {}, "is not a server's address; give one such as http://localhost:8000"),
        ("http://", {}, "is not a server's address"),
        ("http://h", {"parallel": 0}, "parallel must be at least 1"),
        ("http://h", {"timeout": 0.0}, "timeout above 0"),
    ],
)
def test_bad_arguments(address: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        ServerScorer(address, **options)


def test_an_audit_by_a_server(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tether diagnose` says the same whether `tiny` computes here or is served."""
    lines = [
        {"prompt": f"Go to the {place}.", "reasoning": f"I go to the {place} by way {n}."}
        for place in ("left", "right", "up")
        for n in range(3)
    ]
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    found = []
    for words in (["--model", url, "--tokenizer", "tiny"], ["--model", "tiny", "--device", "cpu"]):
        with pytest.raises(SystemExit) as stopped:
            main(["diagnose", str(rollouts), "--json", "--bootstrap", "100", *words])
        out, err = capsys.readouterr()
        assert stopped.value.code == 0, err
        found.append(json.loads(out)["windows"][0]["measured"]["information"])
    assert found[0]["mi_seq"] == pytest.approx(found[1]["mi_seq"], abs=1e-4)
    assert found[0]["retrieval_acc"] == found[1]["retrieval_acc"]
