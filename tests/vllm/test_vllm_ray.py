"""vLLM as an engine that Ray places: a run through it, its token, and a vLLM that is killed. `make test-vllm` runs this file.

Skipped where Ray or vLLM is missing; TETHER_TEST_VLLM names vLLM's command.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray", reason="Ray is not installed; make test-vllm installs it")

from tether.runs.store import RunStore

COMMAND = os.environ.get("TETHER_TEST_VLLM", "vllm")
CLOSE = 1e-4
TOPOLOGY = "learners: {ranks: 1, num_cpus: 0.5}\nengines: {count: 1, backend: vllm, num_cpus: 0.5}\n"
SETTINGS = {
    "steps": 3,
    "model.device": "cpu",
    "env.options.max_turns": 2,
    "rollout.num_groups": 2,
    "rollout.group_size": 3,
    "rollout.max_tokens": 40,
    "rollout.max_context": 900,
    "evaluation.prompts": 2,
    "diagnosis.every": 0,
    "filter.strategy": "all",
    "server.vllm_command": COMMAND,
    "server.patience": 5,  # much less than vLLM takes to start
}
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
    "RAY_worker_niceness": "0",  # else its workers wait for everything else that runs on the machine
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
SECONDS = 900.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(COMMAND) is None, reason=f"there is no vLLM ('{COMMAND}'); run make test-vllm"),
]


def _wait_for(pattern: str, log: Path, process: "subprocess.Popen[bytes]") -> str:
    """The first group of the first line like this; fails where the process ends without it."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        if found := re.search(pattern, log.read_text()):
            return found[1]
        assert not ended, log.read_text()
        time.sleep(0.2)
    raise AssertionError(f"no line like '{pattern}': {log.read_text()}")


def _vllm_processes(port: str) -> list[int]:
    """The processes of the vLLM that serves on a port: those of its session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
            session = os.getsid(int(folder.name))
        except (OSError, UnicodeDecodeError):
            continue
        found.append((int(folder.name), session, "serve" in words and port in words and "-c" not in words))
    sessions = {session for _, session, serves in found if serves}
    return sorted((pid for pid, session, _ in found if session in sessions), key=lambda pid: pid not in sessions)


def _lives(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_run_through_a_placed_vllm_that_is_killed(tmp_path: Path) -> None:
    topology, log, out = tmp_path / "topology.yaml", tmp_path / "log", tmp_path / "run"
    topology.write_text(TOPOLOGY, encoding="utf-8")
    words = ["frozen_lake", "--ray", "local", "--topology", str(topology), "--out", str(out)]
    words += [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tether", "train", *words], stdout=output, stderr=output, env={**os.environ, **ENVIRONMENT}
        )
    try:
        address = _wait_for(r"ray: engine 0 at (http://\S+)", log, process)
        assert httpx.get(f"{address}/health", trust_env=False).is_success
        for path in ("/v1/completions", "/collective_rpc", "/update_weights", "/pause"):
            assert httpx.post(f"{address}{path}", json={"method": "check_health"}, trust_env=False).status_code == 401, path
        _wait_for(r"step (1)/3", log, process)
        first = _vllm_processes(address.rpartition(":")[2])
        assert len(first) > 1, "vLLM has workers"
        os.kill(first[0], signal.SIGKILL)
        second = _wait_for(r"ray: engine 0 was replaced, now at (http://\S+)", log, process)
        assert process.wait(SECONDS) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text()
    assert second != address and not any(_lives(pid) for pid in [*first, *_vllm_processes(second.rpartition(":")[2])])
    store = RunStore.open(out)
    assert json.loads((out / "run.json").read_text())["machine"]["engine"] == "server (vllm)"
    assert [record.step for record in store.steps()] == [0, 1, 2, 3]
    for record in store.steps()[1:]:
        assert record.metrics["update/mismatch"] < CLOSE and record.metrics["update/probe_difference"] < CLOSE
        assert record.metrics["rollout/staleness"] == 0 and not record.metrics.get("rollout/errors", 0)
