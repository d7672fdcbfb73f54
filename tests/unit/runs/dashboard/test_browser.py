"""The dashboard in a real browser: pages draw, filters filter as one types, updates arrive, and what a model wrote is never run."""

from pathlib import Path
from typing import Any

import pytest

from tether.runs.schema import StepRecord
from tether.runs.store import RunStore

pytestmark = pytest.mark.long  # starts Chromium

EVIL = "<script>document.title='gone'</script><img src=x onerror=\"document.title='gone'\"> </script>"
DRAWN = "document.querySelectorAll('.chart .main-svg').length > 0"


def _write_step(run: Path, step: int, text: str) -> None:
    """Add a step to a run as its trainer does, with one episode in which the model wrote this text."""
    store = RunStore.open(run)
    record = next(iter(store.trajectories(1, "train")))
    turn = {**record["turns"][0], "observation": text, "response": text, "response_ids": [], "logprobs": [], "reasoning_span": None}
    store.append_trajectories([{**record, "step": step, "group": 0, "member": 0, "turns": [turn]}])
    store.append(StepRecord(step, {"rollout/success": 0.5}, notes=[text]))
    store.close()


@pytest.fixture
def page(chromium: Any, address: str) -> Any:
    """The browser, at the list of runs."""
    chromium.messages()
    chromium.open(f"{address}/")
    yield chromium
    chromium.open("about:blank")  # closes the stream of updates, so that the server can stop


def test_pages_draw_updates_arrive_and_a_script_stays_text(page: Any, address: str, runs: Path) -> None:
    page.wait(DRAWN)
    page.open(f"{address}/run?run=first")
    page.wait("document.getElementById('live').textContent === 'live'")
    page.wait(DRAWN)
    assert page.text("#steps") == "3"
    _write_step(runs / "first", 3, EVIL)
    page.wait("document.getElementById('steps').textContent === '4'")
    last = "Math.max(...document.querySelector('[data-figure*=\"name=success\"]').data.flatMap(trace => trace.x))"
    page.wait(f"{last} === 3")
    page.open(f"{address}/trajectory?run=first&key=3/train/0/0")
    assert page.text("pre.observation") == EVIL and page.text(".response").strip() == EVIL
    assert page.run("return document.querySelectorAll('main script, main img').length") == 0
    assert "gone" not in page.run("return document.title")
    assert page.messages() == []


@pytest.mark.long
def test_the_policy_itself_stops_a_script(page: Any) -> None:
    """Were the text not escaped: an element with a handler and a script are put into the page, and neither runs."""
    page.run("document.body.insertAdjacentHTML('beforeend', arguments[0])", EVIL)
    page.run("const tag = document.createElement('script'); tag.textContent = \"document.title = 'gone'\"; document.body.append(tag)")
    page.wait("document.images.length > 0")
    assert "gone" not in page.run("return document.title")
    assert any("Content Security Policy" in line for line in page.messages())


@pytest.mark.long
def test_the_list_of_runs_filters_and_sorts_as_one_types(page: Any, address: str, runs: Path) -> None:
    store = RunStore.open(runs / "first")
    RunStore.create(runs / "second", store.config_text(), {**store.about(), "env": "sokoban", "tags": ["kept"]}).close()
    count = "document.getElementById('count').textContent"
    page.wait(f"{count}.startsWith('2 of 2')")  # it appeared by itself
    page.type("input[name=q]", "sokoban")
    page.wait(f"{count}.startsWith('1 of 2')")
    assert page.run("return [...document.querySelectorAll('#runs td.name')].map(cell => cell.textContent)") == ["second"]
    assert "q=sokoban" in page.run("return location.search"), "the address can be shared"
    page.type("input[name=q]", " ")
    page.wait(f"{count}.startsWith('2 of 2')")
    page.run("document.querySelector('th a[href*=\"sort=name\"]').click()")
    page.wait("document.querySelector('#runs td.name').textContent === 'first'")
    page.run("document.querySelector('th a[href*=\"sort=name\"]').click()")
    page.wait("document.querySelector('#runs td.name').textContent === 'second'")
    page.run(
        "document.querySelectorAll('#runs input').forEach(box => box.click()); document.querySelector('form[action=\"/compare\"] button').click()"
    )
    page.wait("location.pathname === '/compare' && document.querySelectorAll('.differences').length === 0")
    page.wait(DRAWN)
    assert page.messages() == []


@pytest.mark.long
def test_episodes_are_filtered_and_put_side_by_side(page: Any, address: str, runs: Path) -> None:
    episodes = list(RunStore.open(runs / "first").trajectories())
    page.open(f"{address}/trajectories?run=first")
    rows = "document.querySelectorAll('#episodes input[name=key]').length"
    assert page.run(f"return {rows}") == sum(episode["split"] == "train" for episode in episodes)
    assert page.run("return [...document.querySelectorAll('.excerpt')].every(each => each.textContent.length > 10)"), (
        "each row has a preview"
    )
    page.run(
        "const field = document.querySelector('select[name=split]'); field.value = 'validation'; field.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    page.wait(f"{rows} === {sum(episode['split'] == 'validation' for episode in episodes)}")
    page.type("input[name=q]", "no such text")
    page.wait(f"{rows} === 0")
    page.open(f"{address}/trajectory?run=first&key=2/train/0/0")
    assert page.run("return document.querySelectorAll('.token.think').length") > 0
    page.run("document.getElementById('beside').click()")
    page.wait("document.querySelectorAll('article.episode').length === 2")
    keys = page.run("return [...document.querySelectorAll('article')].map(each => each.dataset.key)")
    assert keys[0] == "2/train/0/0" and keys[1].split("/")[2] != "0"
    assert page.messages() == []


@pytest.mark.long
@pytest.mark.parametrize("path", ["/groups", "/templates", "/gradients"])
def test_the_other_pages_of_a_run_draw(page: Any, address: str, path: str) -> None:
    page.open(f"{address}{path}?run=first")
    page.wait(
        "document.querySelectorAll('.template').length > 0 || document.querySelector('.card .reading')" if path == "/templates" else DRAWN
    )
    assert page.run("return document.querySelectorAll('#error').length") == 0
    assert page.messages() == []


def _emulate(page: Any, width: int, look: str, media: str = "screen") -> None:
    """A window of this width, in a light or a dark system, on the screen or on paper."""
    page.command("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
    page.command("Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": look}])


@pytest.mark.long
def test_narrow_wide_dark_and_printed(page: Any, address: str, runs: Path) -> None:
    sweep = runs / "sweep-frozen_lake-learning-rate-and-filter"
    store = RunStore.open(runs / "first")
    for number in range(2):
        made = RunStore.create(
            sweep / f"frozen_lake-learning_rate=1e-{number}-strategy=top_p-seed0-5d45177f", store.config_text(), store.about()
        )
        made.append(StepRecord(1, {"rollout/success": number / 2, "validation/success": number / 2}, regime="low-entropy collapse"))
        made.close()
    try:
        _emulate(page, 1400, "light")
        page.open(f"{address}/?pool=no")
        page.wait("document.querySelectorAll('#runs td.name').length === 3")
        page.wait(DRAWN)
        ends = "return [...document.querySelectorAll('#runs th')].slice(0, 8).map(cell => cell.getBoundingClientRect().right)"
        assert max(page.run(ends)) < 1400, "run, state, step, success, retrieval, regime and alarms are in view"
        colours = "return Object.fromEntries([...document.querySelectorAll('td.name')].map(cell => [cell.querySelector('a').title || cell.textContent, cell.querySelector('.swatch').className]))"
        listed = page.run(colours)
        names = [f"{sweep.name}/{path.name}" for path in sorted(sweep.iterdir())]
        page.open(f"{address}/compare?run={names[0].replace('=', '%3D')}&run={names[1].replace('=', '%3D')}&pool=no")
        page.wait(DRAWN)
        compared = page.run(colours)
        assert len(compared) == 2 and {f"{sweep.name}/{name}": colour for name, colour in compared.items()}.items() <= listed.items()
        assert page.text("section.card h3").startswith("Where they differ most at the end: ")
        assert "{" not in page.text("#summary")
        ground = "return getComputedStyle(document.body).backgroundColor"
        light = page.run(ground)
        _emulate(page, 420, "dark")
        assert page.run(ground) != light
        page.open(f"{address}/groups?run=first")
        page.wait(DRAWN)
        assert max(page.run("return [...document.querySelectorAll('#groups tr')].map(row => row.offsetHeight)")) < 70
        assert page.run("return document.documentElement.scrollWidth") <= 420
        page.open(f"{address}/run?run=first")
        page.wait("document.querySelectorAll('[data-figure][data-stale]').length === 0")
        page.wait("[...document.querySelectorAll('.card:not(.empty) .chart')].every(chart => chart.dataset.drawn)")
        _emulate(page, 800, "light", "print")
        assert (
            page.run(
                "return [...document.querySelectorAll('.card .chart')].filter(each => each.offsetHeight && !each.children.length).length"
            )
            == 0
        )
        assert page.messages() == []
    finally:
        page.command("Emulation.clearDeviceMetricsOverride")
        page.command("Emulation.setEmulatedMedia", media="", features=[])
