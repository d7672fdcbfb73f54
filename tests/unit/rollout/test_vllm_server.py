"""Starting and ending vLLM, as far as that goes without vLLM: how it is called, what it serves, and that it never outlives its run."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI

from tether.core.child import GUARD
from tether.core.errors import EngineUnavailable, MissingDependency
from tether.core.http import serving_app
from tether.models.load import load_model
from tether.models.logprobs import score_tokens
from tether.models.policy import Policy
from tether.rollout.engines.publish import own_address
from tether.rollout.engines.vllm_plugin import RequireToken
from tether.rollout.engines.vllm_server import VllmOptions, VllmServer, arguments, find_command, save_untied


def test_a_missing_vllm_is_named_with_what_installs_it(tiny: Any) -> None:
    with pytest.raises(MissingDependency, match=r"no command 'no-such-vllm'; install it where Tether is \(pip install vllm"):
        find_command("no-such-vllm")


def test_a_vllm_that_fails_is_one_line_with_its_log(tiny: Any, tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    script.write_text("#!/bin/sh\necho 'ValueError: no memory left'\nexit 3\n")
    script.chmod(0o755)
    with pytest.raises(EngineUnavailable, match=r"vLLM ended while it started: ValueError: no memory left; its output is in '.*vllm.log'"):
        VllmServer(Policy(*tiny), 900, VllmOptions(str(script), folder=tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vllm", "vllm.log"], "the model's copy is gone"


def test_the_served_copy_has_a_head_of_its_own(deep_tiny: Any, tmp_path: Path) -> None:
    policy = Policy(*deep_tiny)
    save_untied(policy, tmp_path)
    copy = Policy(*load_model(str(tmp_path), device="cpu"))
    assert copy.module.config.tie_word_embeddings is False and policy.module.config.tie_word_embeddings is True
    assert copy.module.lm_head.weight is not copy.module.model.embed_tokens.weight
    ids = [5, 6, 7, 8, 9]
    assert torch.equal(torch.tensor(score_tokens(copy, ids)), torch.tensor(score_tokens(policy, ids)))


def test_arguments(tiny: Any, tmp_path: Path) -> None:
    called = arguments(Policy(*tiny), tmp_path, 8123, 900, VllmOptions(arguments=("--max-num-seqs", "4")))
    for pair in (["--dtype", "float32"], ["--max-model-len", "900"], ["--logprobs-mode", "processed_logprobs"], ["--port", "8123"]):
        assert called[called.index(pair[0]) + 1] == pair[1]
    assert called[-2:] == ["--max-num-seqs", "4"] and "--enable-scale-out" in called and "--enforce-eager" in called
    placed = arguments(Policy(*tiny), tmp_path, 8123, 900, VllmOptions(host="10.0.0.1", own_gpus=True))
    assert placed[placed.index("--host") + 1] == "10.0.0.1" and not {"--enforce-eager", "--gpu-memory-utilization"} & set(placed)
    assert "--middleware" not in placed
    guarded = arguments(Policy(*tiny), tmp_path, 8123, 900, VllmOptions(token="s3cret"))
    module, _, name = guarded[guarded.index("--middleware") + 1].rpartition(".")
    assert getattr(importlib.import_module(module), name) is RequireToken and "s3cret" not in guarded


def test_every_route_but_health_wants_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    app = FastAPI()
    app.add_middleware(RequireToken)
    for path in ("/health", "/v1/models", "/collective_rpc"):
        app.add_api_route(path, lambda: {"ok": True}, methods=["GET", "POST"])
    with serving_app(app, "guarded") as url:
        assert httpx.get(f"{url}/health").is_success
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}, {"Authorization": ""}):
            answers = [httpx.get(f"{url}/v1/models", headers=headers), httpx.post(f"{url}/collective_rpc", headers=headers)]
            assert [answer.status_code for answer in answers] == [401, 401], headers
        assert httpx.post(f"{url}/collective_rpc", headers={"Authorization": "Bearer s3cret"}).json() == {"ok": True}


SERVER = """#!{python}
import http.server, os, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/exit":
            os._exit(1)
        if self.path == "/kill":
            os.kill(os.getpid(), 9)
    def log_message(self, *words):
        print("OSError: the GPU fell off")
        print("(APIServer) WARNING: this can cause an OSError", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


@pytest.mark.parametrize(
    ("path", "how"), [("kill", r"was killed by SIGKILL \(a machine .*\)"), ("exit", "ended with exit code 1: OSError: the GPU fell off")]
)
def test_a_vllm_that_ends_in_a_run_is_said_at_once(tiny: Any, tmp_path: Path, path: str, how: str) -> None:
    script = tmp_path / "vllm"
    script.write_text(SERVER.format(python=sys.executable))
    script.chmod(0o755)
    server = VllmServer(Policy(*tiny), 900, VllmOptions(str(script), folder=tmp_path))
    server.check_lives()
    httpx.get(f"{server.address}/{path}")
    server.wait()
    with pytest.raises(EngineUnavailable, match=rf"vLLM, which this run started, {how}; its output is in '.*vllm.log'"):
        server.check_lives()


def test_the_learner_is_where_a_server_of_this_machine_reaches_it() -> None:
    assert own_address("http://localhost:8000") == own_address("http://127.0.0.1:8000/v1") == "127.0.0.1"


def test_vllm_does_not_outlive_a_killed_run(tmp_path: Path) -> None:
    """A process that starts a server under the guard is killed with SIGKILL; the server and its workers end."""
    marker = tmp_path / "pids"
    server = f"sh -c 'sleep 300 & echo $! $$ > {marker}; wait'"
    run = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {GUARD!r}, 'sh', '-c', {server!r}], stdin=subprocess.PIPE); time.sleep(300)"
    process = subprocess.Popen([sys.executable, "-c", run])
    _until(lambda: marker.exists() and len(marker.read_text().split()) == 2)
    pids = [int(pid) for pid in marker.read_text().split()]
    assert all(_lives(pid) for pid in pids)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _until(lambda: not any(_lives(pid) for pid in pids))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" if Path("/proc").is_dir() else True


def _until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
