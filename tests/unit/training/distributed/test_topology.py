"""The topology file of `tether train --ray`, its checks against a cluster, and what a rank reads about its servers; no Ray is needed."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tether.cli.main import main
from tether.cli.train import _without
from tether.core.child import GUARD
from tether.core.errors import BadInput, ConfigError
from tether.training.build import env_specs, server_options
from tether.training.distributed.ray_run import _Server
from tether.training.distributed.topology import (
    PLACEMENT_VARIABLE,
    Placement,
    Topology,
    check_environments,
    check_gpus_are_used,
    check_room,
    joined_placement,
    load_topology,
)
from tether.training.settings import EnvSettings, ServerSettings

WHOLE = {
    "learners": {"ranks": 2, "num_gpus": 1},
    "engines": {"count": 1, "num_gpus": 2, "num_cpus": 4},
    "environments": [{"env": "frozen_lake", "count": 2, "num_cpus": 0.5}],
}


def _file(folder: Path, content: Any) -> Path:
    path = folder / "topology.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_every_process_has_a_bundle(tmp_path: Path) -> None:
    assert load_topology(_file(tmp_path, WHOLE)).bundles() == [
        ("learner rank 0", {"CPU": 1, "GPU": 1}),
        ("learner rank 1", {"CPU": 1, "GPU": 1}),
        ("engine 0", {"CPU": 4, "GPU": 2}),
        ("frozen_lake worker 0", {"CPU": 0.5}),
        ("frozen_lake worker 1", {"CPU": 0.5}),
    ]
    nothing = load_topology(_file(tmp_path, {"learners": {"num_cpus": 0}}))
    assert nothing.bundles() == [("learner rank 0", {"CPU": 0.001})], "Ray places no empty bundle"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"learners": {"rank": 2}}, "unknown topology key 'learners.rank': did you mean 'learners.ranks'?"),
        ({"engine": {"count": 2}}, "unknown topology key 'engine': did you mean 'engines'?"),
        (
            {"environments": [{"env": "sokoban", "cuont": 2}]},
            "unknown topology environments key 'cuont': did you mean 'count'?",
        ),
        ({"environments": {"env": "sokoban"}}, "topology key 'environments': give a list"),
        ({"environments": [{"count": 2}]}, "topology environments key 'env' is missing"),
        ({"learners": {"ranks": 0}}, "topology key 'learners.ranks': got 0; it should be greater than or equal to 1"),
        ({"engines": {"backend": "sglang"}}, "topology key 'engines.backend': got 'sglang'; it should be 'serve' or 'vllm'"),
    ],
)
def test_bad_files(content: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as said:
        load_topology(_file(tmp_path, content))
    assert str(said.value).startswith(line)


def test_workers_are_of_the_runs_environments(tmp_path: Path) -> None:
    topology = load_topology(_file(tmp_path, WHOLE))
    check_environments(topology, ["sokoban", "frozen_lake"])
    with pytest.raises(BadInput, match="workers of 'frozen_lake', which the run does not play: did you mean 'frozen_lakes'"):
        check_environments(topology, ["frozen_lakes"])
    twice = topology.model_copy(update={"environments": topology.environments * 2})
    with pytest.raises(BadInput, match="2 entries of 'frozen_lake'; give one"):
        check_environments(twice, ["frozen_lake"])


def test_more_than_the_cluster_has(tmp_path: Path) -> None:
    topology = load_topology(_file(tmp_path, WHOLE))  # 7 CPUs and 4 GPUs
    check_room(topology, [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 3.0, "GPU": 2.0}], "the cluster")
    with pytest.raises(BadInput, match=r"asks for 4 GPUs, and the cluster has 2; lower ranks, counts or num_gpus"):
        check_room(topology, [{"CPU": 64.0, "GPU": 2.0}], "the cluster")
    with pytest.raises(BadInput, match=r"asks for 7 CPUs, and the cluster has 6; lower ranks, counts or num_cpus"):
        check_room(topology, [{"CPU": 6.0, "GPU": 8.0}], "the cluster")
    with pytest.raises(BadInput, match=r"asks for 4 CPU and 2 GPU for engine 0, and no machine of the cluster has that"):
        check_room(topology, [{"CPU": 4.0, "GPU": 1.0}] * 4, "the cluster")


def test_gpus_that_nobody_uses(tmp_path: Path) -> None:
    gpus = [{"CPU": 8.0, "GPU": 8.0}]
    check_gpus_are_used(load_topology(_file(tmp_path, WHOLE)), gpus, "the cluster")
    check_gpus_are_used(Topology(), [{"CPU": 8.0}], "the cluster")
    check_gpus_are_used(load_topology(_file(tmp_path, {"learners": {"num_gpus": 1}})), gpus, "the cluster")
    with pytest.raises(BadInput, match=r"the cluster has 8 GPUs, and the topology gives its learners none; set num_gpus there"):
        check_gpus_are_used(Topology(), gpus, "the cluster")
    with pytest.raises(BadInput, match=r"gives its learners and engines none"):
        check_gpus_are_used(load_topology(_file(tmp_path, {"engines": {"count": 1}})), gpus, "the cluster")


def test_a_placement_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert joined_placement() is None and server_options(ServerSettings()).find is None
    placement = Placement(tmp_path / "addresses.json")
    placement.write(["http://a:1", None], {"frozen_lake": ["http://c:3", None]})
    monkeypatch.setenv(PLACEMENT_VARIABLE, str(tmp_path / "addresses.json"))
    find = server_options(ServerSettings()).find
    assert find is not None and find() == ["http://a:1", None]
    lake, sokoban = env_specs([EnvSettings(name="frozen_lake"), EnvSettings(name="sokoban")])
    assert sokoban.workers is None and lake.workers is not None and lake.workers() == ["http://c:3"] and lake.label == "frozen_lake"
    placement.write(["http://a:1", "http://b:2"], {"frozen_lake": ["http://c:3", "http://d:4"]})
    assert find() == ["http://a:1", "http://b:2"] and lake.workers() == ["http://c:3", "http://d:4"]
    (tmp_path / "addresses.json").unlink()
    with pytest.raises(BadInput, match=r"TETHER_PLACEMENT is '.*', which cannot be read"):
        find()


def _refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["train", "frozen_lake", *words])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_refused_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(_file(tmp_path, {"learners": {"ranks": 1}}))
    assert "belong together" in _refusal(capsys, "--ray", "local")
    assert "leave out --gpus" in _refusal(capsys, "--ray", "local", "--topology", path, "--gpus", "2")
    assert "--engine is given beside --ray" in _refusal(capsys, "--ray", "local", "--topology", path, "--engine", "native")
    assert "the topology has no engines" in _refusal(capsys, "--ray", "local", "--topology", path, "--set", "rollout.engine=ray")
    if importlib.util.find_spec("ray") is None:
        assert _refusal(capsys, "--ray", "local", "--topology", path).endswith("install it with: pip install 'tether-agents[ray]'")


def test_the_ranks_get_the_other_words() -> None:
    words = ["train", "frozen_lake", "--ray", "local", "--steps", "2", "--topology=t.yaml", "--gpus", "2"]
    assert _without(words, "--ray", "--topology", "--gpus") == ["train", "frozen_lake", "--steps", "2"]


@pytest.mark.parametrize(("program", "code"), [("import sys; sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 128 + 9)])
def test_the_guard_exits_as_its_child(program: str, code: int) -> None:
    with subprocess.Popen([sys.executable, "-c", GUARD, sys.executable, "-c", program], stdin=subprocess.PIPE) as guard:
        assert guard.wait(30) == code


def test_the_guard_passes_ctrl_c_on_even_where_it_is_blocked() -> None:
    waits = "import time\ntry:\n    print('up', flush=True)\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    raise SystemExit(130)"
    command = [sys.executable, "-c", GUARD, sys.executable, "-c", waits]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as in Ray's workers; children inherit it
    try:
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with guard:
        assert guard.stdin is not None and guard.stdout is not None and guard.stdout.readline() == "up\n"
        guard.stdin.write("INT\n")
        guard.stdin.flush()
        assert guard.wait(30) == 130


@pytest.mark.parametrize("killed", ["guard", "child"])
def test_nothing_outlives_a_killed_guard_or_a_killed_child(killed: str) -> None:
    """The child's own children neither, as vLLM has them."""
    waits = "import time; print('up', flush=True); time.sleep(600)"
    starts = f"import os, subprocess, sys, time; print(os.getpid(), flush=True); subprocess.Popen([sys.executable, '-c', {waits!r}]); time.sleep(600)"
    command = [sys.executable, "-c", GUARD, sys.executable, "-c", starts]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as guard:
        assert guard.stdout is not None
        child = int(guard.stdout.readline())
        assert guard.stdout.readline() == "up\n"
        os.kill(guard.pid if killed == "guard" else child, signal.SIGKILL)
        start = time.monotonic()
        assert guard.stdout.read() == "" and time.monotonic() - start < 300, "all of them had the pipe open, and are gone"


def test_ranks_are_told_to_wait_for_an_engine_only_while_it_is_started() -> None:
    engine = _Server("engine 0", None, address="http://a:1", last_address="http://a:1")
    assert engine.as_engine(now=50.0, longest=10.0) == "http://a:1"
    engine.address, engine.ended_at = None, 100.0
    assert engine.as_engine(now=109.0, longest=10.0) is None
    assert engine.as_engine(now=111.0, longest=10.0) == "http://a:1", "it takes longer than the topology allows"
    engine.lost = True
    assert engine.as_engine(now=101.0, longest=10.0) == "http://a:1", "Ray does not start it again"


def test_defaults_are_one_native_rank() -> None:
    assert Topology().bundles() == [("learner rank 0", {"CPU": 1.0})]
