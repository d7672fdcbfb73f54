"""The report holds its numbers, escapes what models write, loads nothing from outside, and copes with missing pieces."""

import html.parser
import re
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from tether.core.enums import FinishReason, StopReason
from tether.core.errors import BadInput
from tether.core.metrics import CATALOGUE, is_catalogued, wilson_interval
from tether.core.types import Trajectory, Turn
from tether.runs.figures import curve, regime_plane
from tether.runs.panels import COST, SECTIONS, Panel
from tether.runs.report import write_report
from tether.runs.schema import StepRecord, trajectory_record
from tether.runs.store import RunStore
from tether.runs.timings import StepTimings

GRADIENT_CHARTS = 4
"""Norms of the first and of the last step, the share of the regularisers, the signal-to-noise ratio."""
OLD_COST_CHARTS = 2
"""Seconds, and tokens sampled per second: all that older runs timed."""
CONFIG = "algo: grpo\nenv:\n  name: frozen_lake\n"
HOSTILE = "<script>alert('owned')</script><img src=http://evil.example/x.png>"


def full_metrics(successes: int) -> dict[str, float]:
    low, high = wilson_interval(successes, 256)
    metrics = dict.fromkeys(CATALOGUE, 0.5) | {"validation/success": successes / 256, "validation/prompts": 256.0}
    return metrics | {
        "validation/success_low": low, "validation/success_high": high, "information/retrieval_acc": 0.81, "information/chance": 0.125,
        "information/num_prompts": 8.0, "information/num_reasonings": 128.0, "information/retrieval_acc_low": 0.74,
        "information/retrieval_acc_high": 0.88, "information/retrieval_p_value": 0.001, "information/mi_p_value": 0.001, "information/failed": 0.0, "gradients/failed": 0.0,
        "alarms/critical": 0.0, "alarms/warning": 0.0, "gradients/bound_broken": 0.0, "gradients/rv_mean_1": 0.0, "gradients/task_norm_1": 0.2,
        "gradients/regulariser_norm_1": 0.1, "gradients/dominance_1": 0.33, "gradients/snr_1": 0.5,
    }  # fmt: skip


def before_diagnosis(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics as runs recorded them before there were intervals, alarms and gradients."""
    newer = re.compile(
        r".*_(low|high|p_value|token_mean|seq_error)|gradients/.*|alarms/.*|information/(failed|sampling_error)|.*/repeated_text"
    )
    return {name: value for name, value in metrics.items() if name.startswith("validation/") or not newer.fullmatch(name)}


def make_run(folder: Path, first: int = 79, last: int = 164, old: bool = False) -> RunStore:
    store = RunStore.create(folder, CONFIG, {"env": "frozen_lake", "model": HOSTILE})
    for step, successes in ((1, first), (2, last)):
        metrics = before_diagnosis(full_metrics(successes)) if old else full_metrics(successes)
        store.append(StepRecord(step, metrics, "diverse reasoning", [f"note of step {step}"]))
        timings = StepTimings({"rollout": 45.0, "update": 15.0}, 1500.0, 4000.0, {"update": 0.5}, {"rollout": 10**9, "update": 10**9})
        newer = {} if old else timings.to_json()
        store.append_timings(step, {"seconds": {"rollout": 45.0, "update": 15.0}, "tokens_per_second": 1500.0, **newer})
        episodes = []
        for group in range(5):
            text = f" think{group}at{step} {HOSTILE} </think> <answer> Up{group} </answer>"
            turn = Turn((1,), (2,), (-0.5,), FinishReason.STOP_TEXT, text, (0, 1), 1.0, valid=True, observation=f"P _\n_ G map{group}")
            episodes.append(Trajectory(group, 0, group, [turn], StopReason.SUCCESS, True))
        store.append_trajectories([trajectory_record(episode, step, "train", kept=True) for episode in episodes])
    store.finish("2 of 2 steps")
    return store


def page_of(stores: list[RunStore], out: Path) -> str:
    """The report without plotly.js itself, which the page holds exactly once."""
    text = write_report(stores, out).read_text()
    library = get_plotlyjs()
    assert text.count(library) == 1
    return text.replace(library, "")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of one run with everything in it."""
    folder = tmp_path_factory.mktemp("reported")
    return page_of([make_run(folder / "run")], folder / "report.html")


class Resources(html.parser.HTMLParser):
    """Collects what a browser would execute or load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_the_report_states_the_verdict_the_times_and_how_to_repeat(page: str) -> None:
    assert "Validation success rose from 31% to 64% (+33 points; 256 prompts; 95% interval +25 to +41)." in page
    assert "Tied to the input: the reasoning depends on its prompt. Regime: diverse reasoning." in page
    assert "finds the prompt of 81% of the reasonings (95% interval 74% to 88%; chance 12.5%, p 0.001)" in page
    assert "No alarm was raised." in page
    for words in (
        "1 min 30 s",
        "75%",
        "1,500",
        "algo: grpo",
        "tether train --config config.yaml --out NEW",
        "2 of 2 steps",
        "note of step 2",
    ):
        assert words in page
    assert '<td class="num">45 s</td>' in page
    charts = sum(len(section.panels) for section in (*SECTIONS, COST)) + 1 + GRADIENT_CHARTS
    assert page.count('class="plotly-graph-div"') == charts
    assert "Not recorded" not in page


def test_a_run_from_before_intervals_and_alarms_is_still_reported(tmp_path: Path) -> None:
    page = page_of([make_run(tmp_path / "run", old=True)], tmp_path / "report.html")
    assert (
        "Tied to the input: the reasoning depends on its prompt." in page
        and "This is step 2; at step 1 the prompts of 81% were found" in page
    )
    assert "this run did not check for alarms" in page and "Set diagnosis.gradients.every" in page
    assert page.count('class="plotly-graph-div"') == sum(len(section.panels) for section in SECTIONS) + 1 + OLD_COST_CHARTS
    assert "Drawn here: valid." in page  # and not the share of repeated text


def test_samples_come_from_four_prompts_at_the_first_and_the_last_step(page: str) -> None:
    assert re.findall(r"think\d+at\d+", page) == [f"think{group}at{step}" for step in (1, 2) for group in range(4)]
    assert "P _\n_ G map3" in page and "→ Up3" in page


def test_text_of_models_and_settings_is_escaped_and_nothing_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "<b>bold"
    page = page_of([make_run(folder)], tmp_path / "report.html")
    assert "alert(" in page
    assert "<script>alert" not in page and "<img" not in page and "<b>bold" not in page
    resources = Resources()
    resources.feed(page)
    assert resources.loaded and all(re.fullmatch(r"a href=#[a-z0-9-]+", found) for found in resources.loaded), "links within the page only"
    assert not {"link", "iframe", "img", "object", "base"} & set(resources.tags)
    assert not re.search(r"@import|url\(", page)
    assert "default-src 'none'" in page
    assert "</script" not in get_plotlyjs().lower()


def test_the_table_of_contents_links_to_every_section(page: str) -> None:
    contents = page[page.index('<nav class="toc"') : page.index("</nav>")]
    links = re.findall(r'<a href="#([^"]+)">([^<]+)</a>', contents)
    assert links == re.findall(r'<h2 id="([^"]+)">([^<]+)</h2>', page) and "<h2>" not in page
    assert [title for _, title in links][:2] == ["Alarms", "Does it solve the task?"] and len({place for place, _ in links}) == len(links)


def test_the_page_has_a_dark_look_by_system_and_by_switch(page: str) -> None:
    style = page[page.index("<style>") : page.index("</style>")]
    assert '@media screen and (prefers-color-scheme: dark) {\n:root:not([data-theme="light"])' in style
    assert '@media screen {\n:root[data-theme="dark"]' in style and "&#34;" not in style
    names = set(re.findall(r"(--[a-z-]+):", style.partition("\n* {")[0]))
    dark = style[style.index(':root[data-theme="dark"]') :]
    assert names - {"--mono"} == set(re.findall(r"(--[a-z-]+):", dark)), "every colour has a dark one"
    used = set(re.findall(r"var\((--[a-z-]+)\)", page))
    assert used <= names
    assert ':root[data-theme="dark"] .js-plotly-plot' in dark and 'id="theme"' in page


def test_several_runs_are_compared(tmp_path: Path) -> None:
    stores = [make_run(tmp_path / "alpha", 79, 164), make_run(tmp_path / "beta", 79, 90)]
    page = page_of(stores, tmp_path / "compare.html")
    assert "alpha ends with 64% validation success, beta with 35% (+29 points" in page
    assert "2 runs compared" in page and page.count("run-verdict") >= 2
    figure = curve(SECTIONS[0].panels[0], {store.folder.name: store.steps() for store in stores})
    assert figure is not None
    assert [trace.name for trace in figure.data if trace.name] == ["alpha", "beta"]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (None, ["No step was recorded", "No trajectories were recorded", "No timings were recorded"]),
        ({"rollout/success": 0.2}, ["No validation was recorded", "was not measured in this run", "no step measured information"]),
        ({"information/mi_seq": 0.0, "information/h_conditional": 1.0}, ["found no information above zero"]),
        ({"groups/rv_mean": 0.0}, ["learning cannot be assessed"]),
    ],
)
def test_missing_pieces_are_named(tmp_path: Path, metrics: dict[str, float] | None, words: list[str]) -> None:
    store = RunStore.create(tmp_path / "run", "", {})
    if metrics is not None:
        store.append(StepRecord(0, metrics))
    page = page_of([store], tmp_path / "report.html")
    for phrase in [*words, "Not recorded", "Not marked as finished"]:
        assert phrase in page


def test_a_run_without_steps_compares_with_one_that_has_them(tmp_path: Path) -> None:
    empty = RunStore.create(tmp_path / "empty", CONFIG, {})
    assert "cannot be ranked" in page_of([make_run(tmp_path / "run"), empty], tmp_path / "report.html")


def test_no_runs_too_many_runs_and_a_run_given_twice_are_refused(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", "", {})
    for stores, words in (([], "at least one run"), ([store] * 9, "at most 8 runs, got 9"), ([store, store], "given twice")):
        with pytest.raises(BadInput, match=words):
            write_report(stores, tmp_path / "report.html")


def test_the_regime_plane_divides_by_the_start() -> None:
    records = [
        StepRecord(step, {"information/h_conditional": h, "information/mi_seq": mi}) for step, h, mi in ((1, 2.0, 0.8), (2, 1.0, 0.2))
    ]
    figure = regime_plane({"run": records})
    assert figure is not None
    path = figure.data[0]
    assert (tuple(path.x), tuple(path.y)) == ((1.0, 0.5), (1.0, 0.25))
    assert path.marker.symbol[0] == "circle-open" and path.marker.symbol[-1] == "circle"
    names = {annotation.text.replace("<br>", " ") for annotation in figure.layout.annotations}
    assert {"diverse reasoning", "template collapse", "compressed reasoning", "low-entropy collapse"} <= names


def test_every_panel_reads_catalogued_metrics_and_draws_their_values() -> None:
    panels = [panel for section in SECTIONS for panel in section.panels]
    assert all(is_catalogued(series.metric) for panel in panels for series in panel.series)
    assert {end for panel in panels for series in panel.series for end in series.band or ()} <= CATALOGUE.keys()
    retrieval = next(panel for panel in panels if panel.key == "retrieval")
    figure = curve(retrieval, {"run": [StepRecord(1, full_metrics(9)), StepRecord(2, full_metrics(9))]})
    assert figure is not None
    assert {trace.name: tuple(trace.y) for trace in figure.data}["chance"] == (0.125, 0.125)
    assert curve(retrieval, {"run": [StepRecord(1, {"information/chance": 0.1})]}) is None


def panel_of(key: str) -> Panel:
    return next(panel for section in SECTIONS for panel in section.panels if panel.key == key)


@pytest.mark.parametrize("key", ["retrieval", "mi_seq", "mi", "entropy"])
def test_recorded_intervals_are_shaded_and_the_axis_has_room_for_them(key: str) -> None:
    main = panel_of(key).series[0]
    assert main.band == (f"{main.metric}_low", f"{main.metric}_high")
    records = [StepRecord(step, {main.metric: 0.5, main.band[0]: -0.4, main.band[1]: 3.0}) for step in (1, 2)]
    figure = curve(panel_of(key), {"run": records})
    assert figure is not None
    assert [tuple(trace.y) for trace in figure.data] == [(3.0, 3.0, -0.4, -0.4), (0.5, 0.5)]
    if not panel_of(key).percent:
        low, high = figure.layout.yaxis.range
        assert low <= -0.4 and high >= 3.0
    without = curve(panel_of(key), {"run": [StepRecord(1, {main.metric: 0.5})]})
    assert without is not None and len(without.data) == 1


def test_the_change_on_a_fixed_probe_is_said_beside_its_curve(tmp_path: Path) -> None:
    """Only for a single run, only where the last measurement has it, and only in the panel of its number."""
    level = {"information/mi_seq": 2.0, "information/h_conditional": 0.5}
    change = {"information/mi_seq_change": -0.4123, "information/mi_seq_change_low": -0.6, "information/mi_seq_change_high": -0.221}
    stores = []
    for name, last in (("probe", level | change), ("own", level)):
        store = RunStore.create(tmp_path / name, "", {})
        store.append(StepRecord(1, level))
        store.append(StepRecord(6, last))
        stores.append(store)
    said = "Change since the first measurement on the same prompts: −0.412 (95% interval −0.6 to −0.221)."
    assert page_of(stores[:1], tmp_path / "probe.html").count(said) == 1
    assert "Change since" not in page_of(stores[1:], tmp_path / "own.html")
    assert "Change since" not in page_of(stores, tmp_path / "both.html")


def test_other_scopes_are_dashed_lines_of_a_single_run_with_a_chance_of_their_own(tmp_path: Path) -> None:
    own = {"information/retrieval_acc": 0.5, "information/chance": 0.25}
    other = {"information_trajectory/retrieval_acc": 0.75, "information_trajectory/chance": 0.125}
    records = [StepRecord(step, own | other) for step in (1, 2)]
    figure = curve(panel_of("retrieval"), {"run": records})
    assert figure is not None
    looks = {trace.name: (tuple(trace.y), trace.line.dash) for trace in figure.data}
    assert looks["trajectory"] == ((0.75, 0.75), "dash") and looks["traj. chance"] == ((0.125, 0.125), "dash")
    assert looks["best 1"] == ((0.5, 0.5), "solid") and "turn" not in looks
    compared = curve(panel_of("retrieval"), {"a": records, "b": records})
    assert compared is not None
    assert [trace.name for trace in compared.data] == ["a", "a (chance)", "b", "b (chance)"]
    store = RunStore.create(tmp_path / "run", "", {})
    store.append(records[0])
    page = page_of([store], tmp_path / "report.html")
    assert page.count("Dashed: the same, purple, of one turn drawn from each trajectory.") == 1
    assert "information_trajectory/" not in page  # what is measured beside is not missed


@pytest.mark.parametrize(("scope", "label"), [("trajectory", "traj."), ("turn", "turn")])
def test_the_ceiling_of_another_scope_is_the_logarithm_of_its_contexts(scope: str, label: str) -> None:
    record = StepRecord(1, {f"information_{scope}/mi_seq": 1.0, f"information_{scope}/num_prompts": 32.0})
    figure = curve(panel_of("mi_seq"), {"run": [record]})
    assert figure is not None
    assert {trace.name: trace.y[0] for trace in figure.data} == {scope: 1.0, f"{label} log P": pytest.approx(3.465736, abs=1e-6)}
