"""The dashboard over a real run, asked over HTTP: every page answers, filters filter, text stays text, strangers stay out."""

import json
import re
from pathlib import Path

import httpx
import pytest

from tether.core.http import serving_app
from tether.runs.dashboard.app import make_app
from tether.runs.dashboard.catalogue import Catalogue
from tether.runs.dashboard.charts import PANELS
from tether.runs.gradient_buckets import GRADIENTS
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore

HTML = {"accept": "text/html"}
EVIL = "<script>document.title='gone'</script><img src=x onerror=\"document.title='gone'\"> </script>"


def write_evil_step(run: Path, step: int = 3) -> None:
    """A step whose model wrote markup, as an observation, a response and an error hold it."""
    store = RunStore.open(run)
    record = next(episode for episode in store.trajectories(1, "train"))
    turn = {**record["turns"][0], "observation": EVIL, "response": EVIL, "response_ids": [], "logprobs": [], "reasoning_span": None}
    store.append_trajectories(
        [{**record, "step": step, "group": 0, "member": 0, "error": EVIL, "stop_reason": "env_error", "turns": [turn]}]
    )
    store.append(StepRecord(step, {"rollout/success": 0.5}, notes=[EVIL]))
    store.close()


def test_every_page_answers_with_the_policy(address: str, runs: Path) -> None:
    pages = [
        "/", "/run?run=first", "/trajectories?run=first", "/trajectory?run=first&key=2/train/0/0&beside=2/train/1/0", "/groups?run=first",
        "/groups?run=first&step=1", "/templates?run=first", "/templates/found?run=first&step=1", "/gradients?run=first", "/static/dashboard.css",
        "/static/dashboard.js", "/static/plotly.js", "/health", "/figure?name=plane&run=first", "/figure?name=groups&run=first&step=2",
    ]  # fmt: skip
    with httpx.Client(base_url=address, headers=HTML, timeout=60) as client:
        for page in pages:
            answer = client.get(page)
            assert answer.status_code == 200, f"{page}: {answer.text[:500]}"
            policy = answer.headers["content-security-policy"]
            assert "script-src 'self';" in policy and "unsafe" not in policy and "default-src 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert not re.search(r"<script(?! src=\"/static)|\sstyle=|\son\w+=|https?://", answer.text) or "plotly.js" in page, page
        for name in (*PANELS, *GRADIENTS):
            assert "reading" in client.get("/figure", params={"name": name, "run": "first"}).json()


def test_numbers_on_the_pages_are_those_of_the_run(address: str, runs: Path) -> None:
    store = RunStore.open(runs / "first")
    records = {record.step: record for record in store.steps()}
    with httpx.Client(base_url=address, timeout=60) as client:
        figure = client.get("/figure", params={"name": "success", "run": "first"}).json()["figure"]
        (training,) = [trace for trace in figure["data"] if trace.get("name") == "training"]
        assert dict(zip(training["x"], training["y"], strict=True)) == {step: records[step].metrics["rollout/success"] for step in (1, 2)}
        bars = client.get("/figure", params={"name": "step_groups", "run": "first", "step": 2}).json()["figure"]["data"]
        heights = [height for trace in bars for height in trace["y"]]
        assert sum(heights) / len(heights) == pytest.approx(records[2].metrics["groups/rv_mean"]), "the variance is that of the filter"
        assert len(bars[0]["x"]) == records[2].metrics["groups/kept"]
        groups = client.get("/groups", params={"run": "first", "step": 2}).text
        assert groups.count('<span class="badge good">kept</span>') == records[2].metrics["groups/kept"]
        episode = next(iter(store.trajectories(2, "train")))
        page = client.get("/trajectory", params={"run": "first", "key": f"2/train/{episode['group']}/{episode['member']}"}).text
        assert page.count('<section class="turn">') == len(episode["turns"])
        assert page.count("Everything the model was given") == 1, "later turns add to the context of the first"
        assert page.count("What the model was given after its last response") == len(episode["turns"]) - 1
        tokens = re.findall(r'<span class="token[^"]*?( think)?" title="log-prob (-?[\d.]+), id ([\d ]+)">', page)
        turns = episode["turns"]
        assert [int(number) for _, _, ids in tokens for number in ids.split()] == [
            number for turn in turns for number in turn["response_ids"]
        ]
        assert [float(chance) for _, chance, _ in tokens] == pytest.approx(
            [chance for turn in turns for chance in turn["logprobs"]], abs=6e-4
        )
        assert sum(bool(think) for think, _, _ in tokens) == sum(
            end - start for start, end in (turn["reasoning_span"] or (0, 0) for turn in turns)
        )


def test_filters_and_search(address: str, runs: Path) -> None:
    episodes = list(RunStore.open(runs / "first").trajectories())
    with httpx.Client(base_url=address, headers=HTML, timeout=60) as client:

        def count(**words: str | int) -> int:
            text = client.get("/trajectories", params={"run": "first", **words}).text
            return text.count('name="beside"')

        assert count(split="any") == len(episodes)
        assert 0 < count() == sum(episode["split"] == "train" for episode in episodes) < len(episodes), "training first, as it opens"
        assert count(step=1) == sum(episode["step"] == 1 for episode in episodes)
        assert count(outcome="success") == sum(episode["success"] is True for episode in episodes)
        assert count(kept="yes") == sum(episode["kept"] for episode in episodes) > 0
        assert count(split="validation", reward_min="0.5") == sum(
            each["split"] == "validation" and each["reward"] >= 0.5 for each in episodes
        )
        assert count(q="Turn 2 of") == sum(any("Turn 2 of" in turn["observation"] for turn in episode["turns"]) for episode in episodes)
        assert count(q="nothing like it") == 0
        for words, wrong in ({"step": "x"}, "step is"), ({"kept": "maybe"}, "kept is"), ({"outcome": "no"}, "outcome is"):
            answer = client.get("/trajectories", params={"run": "first", **words})
            assert answer.status_code == 400 and wrong in answer.text
        assert client.get("/nowhere").status_code == 404
        assert "did you mean" in client.get("/run", params={"run": "firs"}).text
        assert client.get("/run", params={"run": "../first"}).status_code == 400
        assert client.get("/static/..%2fapp.py").status_code == 404
        assert client.get("/groups", params={"run": "first", "step": 99}).status_code == 400


def test_markup_of_a_model_stays_text(address: str, runs: Path) -> None:
    write_evil_step(runs / "first")
    with httpx.Client(base_url=address, headers=HTML, timeout=60) as client:
        for page in (
            "/run?run=first", "/trajectory?run=first&key=3/train/0/0", "/trajectories?run=first&q=onerror", "/trajectories?run=first&q=%3Cscript",
            "/groups?run=first&step=3", "/templates/found?run=first&step=3", "/run?run=%3Cscript%3E",
        ):  # fmt: skip
            text = client.get(page).text
            assert "<script>" not in text and "<img" not in text, page
        assert "&lt;script&gt;" in client.get("/trajectory?run=first&key=3/train/0/0").text


def test_two_runs_compare_and_seeds_become_one_curve(address: str, runs: Path) -> None:
    store = RunStore.open(runs / "first")
    for name, seed in (("second", 4), ("third", 5)):
        other = RunStore.create(
            runs / name, store.config_text().replace("seed: 3", f"seed: {seed}"), {**store.about(), "seed": seed, "tags": [name]}
        )
        for record in store.steps():
            shifted = {metric: value / 2 if metric == "rollout/success" else value for metric, value in record.metrics.items()}
            other.append(StepRecord(record.step, shifted))
        other.close()
    before = {record.step: record.metrics["rollout/success"] for record in store.steps() if "rollout/success" in record.metrics}
    with httpx.Client(base_url=address, headers=HTML, timeout=60) as client:
        names = [("run", "first"), ("run", "second"), ("run", "third")]
        figure = client.get("/figure", params=[("name", "success"), ("pool", "yes"), *names]).json()["figure"]
        (training,) = [trace for trace in figure["data"] if trace.get("name") == "training"]
        assert training["y"] == pytest.approx([value * 2 / 3 for value in before.values()]), "the mean of three seeds"
        page = client.get("/compare", params=names).text
        assert "<code>seed</code>" in page and "* (3 seeds)" in page
        assert client.get("/compare", params={"run": "first"}).status_code == 400
        listed = client.get("/", params={"tag": "second"}).text
        assert "1 of 3 runs" in listed and ">second</a>" in listed and ">third</a>" not in listed


def test_a_change_reaches_the_stream(address: str, runs: Path) -> None:
    with httpx.Client(base_url=address, timeout=30) as client, client.stream("GET", "/events", params={"run": "first"}) as stream:
        lines = stream.iter_lines()
        assert next(line for line in lines if line.startswith("event:")) == "event: ready"
        store = RunStore.open(runs / "first")
        store.append(StepRecord(3, {"rollout/success": 1.0}))
        store.close()
        assert next(line for line in lines if line.startswith(("event:", ":"))) == "event: change", "a heartbeat came first"
        assert json.loads(next(lines).removeprefix("data: ")) == {"runs": ["first"]}


def test_a_dashboard_with_a_token_asks_for_it(runs: Path) -> None:
    app = make_app(Catalogue(runs), lambda *_: pytest.fail("nobody asked for templates"), token="s3cret")
    with serving_app(app, "dashboard") as url, httpx.Client(base_url=url, headers=HTML, timeout=30) as client:
        assert client.get("/run?run=first").status_code == 401
        assert "frozen_lake" not in client.get("/").text and 'action="/login"' in client.get("/").text
        assert client.get("/figure?name=success&run=first", headers={"accept": "*/*"}).status_code == 401
        wrong = client.post("/login", data={"token": "guess"})
        assert wrong.status_code == 401 and "not the token" in wrong.text and not wrong.cookies
        assert client.post("/login", data={"token": "x" * 5000}).status_code == 413
        right = client.post("/login", data={"token": "s3cret"})
        cookie = right.headers["set-cookie"]
        assert right.status_code == 303 and "HttpOnly" in cookie and "SameSite=strict" in cookie and "s3cret" not in cookie
        assert "frozen_lake" in client.get("/").text
        assert httpx.get(f"{url}/", headers={"authorization": "Bearer s3cret"}).status_code == 200
        assert httpx.get(f"{url}/", headers={"cookie": f"{next(iter(client.cookies))}=0", **HTML}).status_code == 401


def test_other_sites_cannot_reach_it_through_the_browser(address: str) -> None:
    assert httpx.get(f"{address}/", headers={"host": "evil.example"}).status_code == 403
