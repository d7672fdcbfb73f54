"""examples/cluster, the images and docs/operations.md against what Tether offers: metrics, paths, ports, flags, settings and exit codes."""

import json
import os
import re
import shlex
import subprocess
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families

import tether
from tether.cli.main import app as tether_cli
from tether.cli.report import step_templates
from tether.core.config import merge, parse_overrides
from tether.core.errors import BadInput
from tether.core.http import SHUTDOWN_GRACE, serving_app
from tether.envs.remote.http_server import serving
from tether.envs.searchqa.corpus import Document, of_documents
from tether.envs.searchqa.index import open_index
from tether.envs.searchqa.server import create_app
from tether.models.load import load_model
from tether.rollout.serving.app import serving_model
from tether.runs.dashboard.app import make_app
from tether.runs.dashboard.catalogue import Catalogue
from tether.training.distributed.topology import check_room, load_topology
from tether.training.resolve import named_settings, resolve_settings

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The names of /metrics of every kind of server, by its verb; the server is healthy and ready."""
    runs = tmp_path_factory.mktemp("runs")
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("TETHER_CACHE", str(tmp_path_factory.mktemp("cache")))
        found = {
            "serve": stack.enter_context(serving_model(load_model("tiny", device="cpu"), "tiny", max_rows=2)),
            "serve-env": stack.enter_context(serving("frozen_lake")),
            "serve-search": stack.enter_context(serving_app(create_app(open_index(of_documents([Document("1", "", "a lake")]))), "search")),
            "gateway": stack.enter_context(tether.gateway("tiny", model={"device": "cpu"})).url,
            "dashboard": stack.enter_context(serving_app(make_app(Catalogue(runs), step_templates), "dashboard")),
        }
        return {verb: _metrics_of(url) for verb, url in found.items()}


def _metrics_of(url: str) -> set[str]:
    for path in ("/health", "/ready"):
        assert httpx.get(url + path, trust_env=False).status_code == 200, (url, path)
    httpx.get(f"{url}/nowhere", trust_env=False)
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def _named(text: str) -> set[str]:
    return set(re.findall(r"\b(?:tether|process)_[a-z_]+\b(?!\*)", text))


def test_the_dashboard_of_grafana_shows_metrics_that_exist(metrics: dict[str, set[str]]) -> None:
    dashboard = json.loads((CLUSTER / "grafana.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = _named(" ".join(expressions))
    assert len(dashboard["panels"]) == len({panel["id"] for panel in dashboard["panels"]}) > 5
    assert named and named <= set().union(*metrics.values()), named - set().union(*metrics.values())


def test_the_page_lists_every_metric_of_every_server(metrics: dict[str, set[str]]) -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    table, _, alerts = page.partition("## Metrics")[2].partition("## What to alert on")
    rows = re.findall(r"^\|(`tether_.*?)\|(.*?)\|", table, re.MULTILINE)
    listed = {verb: {name for names, who in rows if who == "all" or verb in who.split(", ") for name in _named(names)} for verb in metrics}
    for verb, found in metrics.items():
        plain = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in found if name.startswith("tether_")}
        plain = {name.removesuffix("_total") for name in plain}
        assert plain == {name.removesuffix("_total") for name in listed[verb]}, verb
    assert _named(alerts) - {"tether_"} <= set().union(*metrics.values())


# --------------------------------------------------------------------------------------------------------- the cluster's files

COMMAND = re.compile(r"(?:^|[\s(])tether ((?:train|serve|serve-env|serve-search|gateway|dashboard)\b.*)")
DOCUMENTS = {
    (path.name, document["kind"], document["metadata"]["name"]): document
    for path in [*sorted((CLUSTER / "kubernetes").glob("*.yaml")), CLUSTER / "rayjob.yaml"]
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
}


def _pods() -> dict[str, dict[str, Any]]:
    """The pod of every document that has one, by its name."""
    pods = {name: document["spec"]["template"]["spec"] for (_, kind, name), document in DOCUMENTS.items() if kind in PODS}
    cluster = DOCUMENTS["rayjob.yaml", "RayJob", "tether"]["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return pods | {f"ray {group.get('groupName', 'head')}": group["template"]["spec"] for group in groups}


PODS = ("Deployment", "StatefulSet", "Job")


def _calls(text: str) -> list[list[str]]:
    """The words of every `tether` command of a shell script."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [match[1] for line in lines if not line.lstrip().startswith("#") and (match := COMMAND.search(line))]
    return [shlex.split(call.partition(" || ")[0].rstrip(")")) for call in found]


def _all_calls() -> dict[str, list[list[str]]]:
    """Of every file; a container without a command starts with the image's, which is tether."""
    found = {name: _calls((CLUSTER / name).read_text(encoding="utf-8")) for name in ("train.sbatch", "skypilot.yaml", "rayjob.yaml")}
    for name, pod in _pods().items():
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            script = (container.get("command", []) + container.get("args", []))[-1:]
            found[name] = found.get(name, []) + (
                [container["args"]] if "args" in container and "command" not in container else _calls("".join(script))
            )
    return found


def _parsed(words: list[str]) -> dict[str, Any]:
    command: Any = typer.main.get_command(tether_cli)
    words = [re.sub(r"^\$\w+$", "8", word) for word in words]
    return dict(command.commands[words[0]].make_context("tether", words[1:]).params)


def test_every_command_is_one_of_tether_and_every_run_resumes() -> None:
    calls = _all_calls()
    for name in ("train.sbatch", "skypilot.yaml", "rayjob.yaml", "learner"):
        resumed, new = sorted((_parsed(words) for words in calls[name]), key=lambda params: not params["resume"])
        assert resumed["resume"] and not new["resume"] and resumed["out"] == new["out"] is not None, name
        assert (resumed["ray"], resumed["topology"], resumed["gpus"]) == (new["ray"], new["topology"], new["gpus"])
        given = merge(named_settings(new["env"], new["model"], None, None, new["steps"], None), parse_overrides(new["set_"]))
        engine = {"rollout": {"engine": "ray" if new["ray"] else new["engine"] or "native"}}
        settings = resolve_settings(None, merge(given, engine), {})
        assert not settings.divides_weights(8) or not settings.diagnosis.gradients.every, "refused on ranks without whole weights"
        assert settings.checkpoint.every <= 10
    for name in ("tether", "sampler"):
        (words,) = calls[name]
        assert _parsed(words)["host"] == "0.0.0.0"


def test_servers_are_probed_where_they_answer_and_get_the_time_that_they_need(metrics: dict[str, set[str]]) -> None:
    assert "tether_ready" in metrics["serve"]  # whose fixture has asked for /health and /ready
    for name in ("tether", "sampler"):
        (container,), pod = _pods()[name]["containers"], _pods()[name]
        params = _parsed(container["args"])
        (port,) = container["ports"]
        assert port["containerPort"] == params["port"]
        for probe, path in (("startupProbe", "/health"), ("livenessProbe", "/health"), ("readinessProbe", "/ready")):
            assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
        waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] > waits + params["grace"] + SHUTDOWN_GRACE
        assert any(variable["name"] == "TETHER_TOKEN" for variable in container["env"]), "another address than this machine's needs one"
    assert _pods()["learner"]["terminationGracePeriodSeconds"] > 240  # TETHER_GRACE of the manifest


def test_what_names_something_names_what_is_there() -> None:
    """Selectors, claims, addresses of servers, the container of the Job's rules, the topology of Ray and the GPUs that it asks for."""
    labels = {name: document["spec"]["template"]["metadata"]["labels"] for (_, kind, name), document in DOCUMENTS.items() if kind in PODS}
    for (_, kind, name), document in DOCUMENTS.items():
        spec = document.get("spec", {})
        if kind in ("Service", "PodDisruptionBudget", "Deployment", "StatefulSet"):
            selector = spec["selector"].get("matchLabels", spec["selector"])
            assert selector.items() <= labels[name].items(), (kind, name)
        if kind in ("Deployment", "StatefulSet"):
            assert ("file", "PodDisruptionBudget", name)[1:] in [key[1:] for key in DOCUMENTS], "no budget"
        if kind == "PodMonitor":
            (rule,) = spec["selector"]["matchExpressions"]
            assert set(rule["values"]) == {labels["tether"]["app"], labels["sampler"]["app"]}
    learner, sampler = DOCUMENTS["learner.yaml", "Job", "learner"]["spec"], DOCUMENTS["learner.yaml", "StatefulSet", "sampler"]["spec"]
    new = _parsed(_all_calls()["learner"][1])
    names = [f"http://sampler-{number}.{sampler['serviceName']}:8000" for number in range(sampler["replicas"])]
    assert new["engine"].split(",") == names and sampler["template"]["spec"]["containers"][0]["args"][1] == new["model"]
    (exits, disrupted) = learner["podFailurePolicy"]["rules"]
    assert exits["onExitCodes"] == {
        "containerName": _pods()["learner"]["containers"][0]["name"],
        "operator": "In",
        "values": [BadInput.exit_code],
    }
    assert disrupted["action"] == "Ignore" and learner["template"]["spec"]["restartPolicy"] == "Never" and learner["backoffLimit"] > 0
    assert new["gpus"] == _pods()["learner"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    for name, pod in _pods().items():
        known = {volume["name"] for volume in pod.get("volumes", [])}
        assert {mount["name"] for container in pod["containers"] for mount in container.get("volumeMounts", [])} <= known, name
        assert pod["securityContext"]["runAsNonRoot"], name
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            if "sh" in container.get("command", []):
                subprocess.run(["sh", "-n"], input=[*container["command"], *container.get("args", [])][-1], text=True, check=True)


def test_the_cluster_of_ray_holds_its_topology(tmp_path: Path) -> None:
    files, job = DOCUMENTS["rayjob.yaml", "ConfigMap", "tether-run"]["data"], DOCUMENTS["rayjob.yaml", "RayJob", "tether"]["spec"]
    (tmp_path / "topology.yaml").write_text(files["topology.yaml"])
    assert job["entrypoint"] == "sh /etc/tether/train.sh" and "--topology /etc/tether/topology.yaml" in files["train.sh"]
    subprocess.run(["sh", "-n"], input=files["train.sh"], text=True, check=True)
    topology = load_topology(tmp_path / "topology.yaml")
    cluster = job["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    node = {"CPU": float(container["resources"]["requests"]["cpu"]), "GPU": float(container["resources"]["limits"]["nvidia.com/gpu"])}
    check_room(topology, [node] * workers["replicas"], "the RayJob's cluster")
    assert (
        f"ray[default]=={cluster['rayVersion']}" in (ROOT / "Dockerfile").read_text()
        and f"ray=={cluster['rayVersion']}" in (ROOT / "Makefile").read_text()
    )


def test_the_batch_script_is_bash_and_asks_slurm_for_what_tether_needs() -> None:
    script = CLUSTER / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script.read_text(), re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] and "requeue" in asked and asked["open-mode"] == "append"
    name, _, seconds = asked["signal"].partition("@")
    grace = re.search(r"TETHER_GRACE=(\d+)", script.read_text())
    assert name == "TERM" and grace and int(seconds) > int(grace[1])


@pytest.mark.parametrize(
    ("is_there", "code", "restarts", "ends", "requeued"),
    [
        (False, 0, "0", 0, False),
        (True, 143, "0", 0, True),
        (True, 143, "20", 143, False),
        (True, 2, "0", 2, False),
        (False, 1, "3", 0, True),
    ],
)
def test_the_batch_script_resumes_and_queues_itself_again(
    is_there: bool, code: int, restarts: str, ends: int, requeued: bool, tmp_path: Path
) -> None:
    """With an srun that notes its arguments and ends as Tether would, and a scontrol that notes its own."""
    for name, lines in {
        "srun": f'echo "$@" > {tmp_path}/srun.said; exit {code}',
        "scontrol": f'echo "$@" > {tmp_path}/scontrol.said',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    out = tmp_path / "run"
    if is_there:
        out.mkdir()
        (out / "run.json").write_text("{}")
    slurm = {"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": restarts, "OUT": str(out)}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(CLUSTER / "train.sbatch")], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == ends, done.stderr
    said = (tmp_path / "srun.said").read_text()
    assert ("--resume" in said) is is_there and f"--out {out}" in said
    noted = tmp_path / "scontrol.said"
    assert (noted.read_text() if noted.exists() else "") == ("requeue 77\n" if requeued else "")


def test_images_are_built_from_what_is_there_and_are_not_root() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    names = [re.match(r"\S+ AS (\w+)", stage)[1] for stage in stages]  # type: ignore[index]
    assert names == ["build", "serving", "training"]
    for stage, name in zip(stages, names, strict=True):
        users = re.findall(r"^USER (\w+)$", stage, re.MULTILINE)
        assert name == "build" or users[-1] == "1000"
        for line in re.findall(r"^COPY (?!--from)(.*)$", stage, re.MULTILINE):
            assert all((ROOT / source).exists() for source in line.split()[:-1]), line
        assert "pip" not in stage or "onstraint" in stage or name == "training"  # which has its base's
    copied = set(re.findall(r"^COPY (?!--from)(\w+) ", stages[0], re.MULTILINE))
    links = {path.resolve().relative_to(ROOT).parts[0] for path in (ROOT / "src" / "tether").iterdir() if path.is_symlink()}
    assert {"src", *links} <= copied, "the wheel would lack what a link leads to"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = re.search(r"tether-agents\[([\w,-]+)\]", text)
    assert wanted and set(wanted[1].split(",")) <= extras.keys()
    images = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["images"]
    assert set(images["strategy"]["matrix"]["target"]) == set(names) - {"build"}
    for step in images["steps"]:
        for call in re.findall(r"tether-(?:serving|training) (.*)$", step.get("run", ""), re.MULTILINE):
            if not call.startswith("."):
                _parsed(shlex.split(call))
