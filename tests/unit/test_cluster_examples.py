"""examples/cluster and docs/operations.md against what the servers offer: metrics, paths, ports and flags."""

import json
import re
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import tether
from tether.cli.report import step_templates
from tether.core.http import serving_app
from tether.envs.remote.http_server import serving
from tether.envs.searchqa.corpus import Document, of_documents
from tether.envs.searchqa.index import open_index
from tether.envs.searchqa.server import create_app
from tether.models.load import load_model
from tether.rollout.serving.app import serving_model
from tether.runs.dashboard.app import make_app
from tether.runs.dashboard.catalogue import Catalogue

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
