"""Runs on a real Ray: placement from the page's own topology file, killed engines, environment workers and ranks. `make test-ray` runs this file.

What runs there must be the run of one process on this machine: same turns, same weights.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed; make test-ray installs it")

import tether  # noqa: E402
from tether.runs.store import RunStore  # noqa: E402

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "steps": 3,
    "model.device": "cpu",
    "env.options.max_turns": 2,
    "rollout.num_groups": 3,
    "rollout.group_size": 2,
    "rollout.max_tokens": 24,
    "learner.learning_rate": 0.00001,
    "learner.update_batch": 3,
    "evaluation.prompts": 2,
    "checkpoint.every": 1,
    "checkpoint.keep": 9,
    "diagnosis.every": 0,
    "filter.strategy": "all",
}
SMALL = """
learners: {ranks: 2, num_cpus: 0.5}
engines: {count: 1, num_cpus: 0.25, args: [--device, cpu, --max-rows, "8"]}
environments:
  - {env: frozen_lake, count: 1, num_cpus: 0.25}
"""

QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
"""Else Ray writes a token into the home folder, and its workers wait for everything else that runs on the machine."""


def _compare_ranks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_ranks", ROOT / "scripts" / "compare_ranks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, without Ray."""
    out = tmp_path_factory.mktemp("alone") / "run"
    tether.train("frozen_lake", out=out, **{**SETTINGS, "algorithm.importance_cap": 2.0})
    return out


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    os.environ.update(QUIET)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def _same_as(alone: Path, run: Path) -> None:
    """The turns of all steps, and the last weights within what ranks may differ by."""
    ranks = _compare_ranks()
    ours, theirs = RunStore.open(run), RunStore.open(alone)
    assert ranks.turns_of(ours) == ranks.turns_of(theirs)
    weights, moments = ranks.distances(theirs, ours)
    assert weights < ranks.WEIGHTS and moments < ranks.MOMENTS


class _Tether:
    """`tether train` in a process of its own; its lines are kept as they come."""

    def __init__(self, *words: str, **more: str) -> None:
        environment = {**os.environ, **QUIET, **more}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tether", "train", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.printed: list[str] = []
        self.complained: list[str] = []
        self._readers = [
            threading.Thread(target=lambda pipe=pipe, lines=lines: lines.extend(iter(pipe.readline, "")), daemon=True)
            for pipe, lines in ((self.process.stdout, self.printed), (self.process.stderr, self.complained))
        ]
        for reader in self._readers:
            reader.start()

    def wait_for(self, pattern: str, seconds: float = 900.0) -> "re.Match[str]":
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in list(self.printed):
                if found := re.search(pattern, line):
                    return found
            assert self.process.poll() is None, self.said()
            time.sleep(0.1)
        raise AssertionError(f"no line like '{pattern}': {self.said()}")

    def end(self, seconds: float = 900.0) -> int:
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(5)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code

    def said(self) -> str:
        return "".join([*self.printed, *self.complained])[-4000:]


def _words(out: Path, *more: str) -> list[str]:
    return ["frozen_lake", "--out", str(out), *(word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")), *more]


@contextmanager
def _running(*words: str) -> Iterator[_Tether]:
    run = _Tether(*words)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.end()


def _process_with(*words: str, environment: str = "") -> int:
    """The process whose arguments hold these words, and whose environment holds that line; not the guard, which holds the words too."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_text().split("\0")
            said = (folder / "environ").read_text().split("\0") if environment else [""]
        except (OSError, UnicodeDecodeError):
            continue
        if set(words) <= set(arguments) and "-c" not in arguments and environment in said:
            return int(folder.name)
    raise AssertionError(f"no process with {words}")


@pytest.fixture
def topology(tmp_path: Path) -> str:
    path = tmp_path / "topology.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return str(path)


def test_the_topology_of_the_page(alone: Path, tmp_path: Path) -> None:
    """On a cluster of this machine alone, which ends with the run."""
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    (block,) = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "learners:" in text]
    path, out = tmp_path / "topology.yaml", tmp_path / "run"
    path.write_text(block, encoding="utf-8")
    with _running(*_words(out, "--ray", "local", "--topology", str(path))) as run:
        assert run.end() == 0, run.said()
    assert "2 ranks -> " in run.said()
    _same_as(alone, out)
    machine = json.loads((out / "run.json").read_text())["machine"]
    assert machine["ranks"] == 2 and machine["engine"] == "server (tether)"
    assert RunStore.open(out).config()["rollout"]["engine"] == "ray"
    assert not any("Traceback" in line for line in run.complained)
    for port in re.findall(r"ray: .* at http://\S+:(\d+)", run.said()):
        with pytest.raises(AssertionError, match="no process with"):  # nothing is left behind
            _process_with(port)


def test_a_killed_engine_and_a_killed_worker_are_replaced(cluster: str, alone: Path, topology: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with _running(*_words(out, "--ray", cluster, "--topology", topology)) as run:
        engine = run.wait_for(r"engine 0 at http://\S+:(\d+)")[1]
        worker = run.wait_for(r"frozen_lake worker 0 at http://\S+:(\d+)")[1]
        run.wait_for(r"step 0/3")
        os.kill(_process_with("serve", engine), signal.SIGKILL)
        run.wait_for(r"step 1/3")
        os.kill(_process_with("serve-env", worker), signal.SIGKILL)
        assert run.end() == 0, run.said()
    for name in ("engine 0", "frozen_lake worker 0"):
        assert any(re.search(rf"ray: {name} was replaced, now at http", line) for line in run.printed), run.said()
    _same_as(alone, out)
    errors = [record.metrics.get("rollout/errors", 0) for record in RunStore.open(out).steps()]
    assert not any(errors), "what ended with its worker was played again"


def test_a_killed_rank_ends_the_run_and_resume_goes_on(cluster: str, alone: Path, topology: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with _running(*_words(out, "--ray", cluster, "--topology", topology)) as run:
        run.wait_for(r"step 1/3")
        os.kill(_process_with("train", "--engine", environment="RANK=1"), signal.SIGKILL)
        assert run.end() == 1, run.said()
    last = run.complained[-1].strip()
    assert re.fullmatch(
        r"tether: rank 1 of 2 was killed by SIGKILL .* continue from its last checkpoint, step_00000[12], with --resume", last
    ), run.said()
    with _running("--resume", "--out", str(out), "--ray", cluster, "--topology", topology) as run:
        assert run.end() == 0, run.said()
    _same_as(alone, out)


def test_a_supervised_run_goes_on_by_itself(cluster: str, alone: Path, topology: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with _running(*_words(out, "--ray", cluster, "--topology", topology, "--restarts", "2")) as run:
        run.wait_for(r"step 1/3")
        os.kill(_process_with("train", "--engine", environment="RANK=1"), signal.SIGKILL)
        assert run.end() == 0, run.said()
    (again,) = RunStore.open(out).attempts()
    assert again["attempt"] == 2 and "rank 1 of 2 was killed by SIGKILL" in again["cause"]
    _same_as(alone, out)


def test_ctrl_c_stops_with_a_checkpoint(cluster: str, topology: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with _running(*_words(out, "--ray", cluster, "--topology", topology, "--set", "steps=99", "--set", "checkpoint.every=99")) as run:
        run.wait_for(r"step 1/99")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130, run.said()
    assert re.search(r"stopped after step \d+; the last checkpoint is step_0000", run.said()), run.said()
    assert list((out / "checkpoints").glob("step_*"))


def _refused(*words: str, **environment: str) -> str:
    run = _Tether("frozen_lake", *words, **environment)
    assert run.end() == 2, run.said()
    (line,) = [line.strip() for line in run.complained]
    return line


def test_what_is_refused(cluster: str, topology: str, tmp_path: Path) -> None:
    greedy, broken = tmp_path / "greedy.yaml", tmp_path / "broken.yaml"
    greedy.write_text("learners: {ranks: 64}", encoding="utf-8")
    broken.write_text("engines: {count: 1, num_cpus: 0.1, args: [--max-rowz, '8']}\nlearners: {num_cpus: 0.1}", encoding="utf-8")
    assert _refused("--ray", "127.0.0.1:1", "--topology", topology).startswith("tether: nothing answers at 127.0.0.1:1 (")
    said = _refused("--ray", "local", "--topology", topology, RAY_gcs_server_port_wait_time_s="0")  # Ray waits half a minute otherwise
    assert said.startswith("tether: Ray did not start on this machine (Timed out waiting for file ") and said.endswith(
        "tether train --gpus N"
    ), said
    said = _refused("--ray", cluster, "--topology", str(greedy))
    assert said.startswith(f"tether: the topology asks for 64 CPUs, and the cluster at {cluster} has 2; lower "), said
    said = _refused("--ray", cluster, "--topology", str(broken))
    assert said.startswith("tether: engine 0 could not be started: No such option: --max-rowz"), said
