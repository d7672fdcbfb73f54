"""Alarms in the report: when each stood, why, what was done, and where the curves show it."""

from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from tether.runs.alarms import AlarmSpan, alarm_history, are_recorded
from tether.runs.figures import ALARM_COLOURS, curve
from tether.runs.panels import SECTIONS
from tether.runs.report import write_report
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore

FALLS = {
    "metric": "information/mi_seq / log(prompts)", "value": 0.1234, "steps": [3, 6], "test": "rank-sum p = 0.001",
    "reference": 0.5, "reference_steps": [1, 2],
}  # fmt: skip
STANDS = {"metric": "groups/rv_mean", "value": 0.0, "steps": [2, 6], "test": "zero in 5 steps", "reference": None, "reference_steps": None}


def alarm(name: str, severity: str, evidence: dict[str, Any] = FALLS, cause: str = "why") -> dict[str, Any]:
    return {"name": name, "severity": severity, "began": 2, "evidence": [evidence], "cause": cause, "remedy": f"mend {name}"}


def course() -> list[StepRecord]:
    """information_falls stands at 2-3 (warning), 4 (critical) and 6 (critical, the last step); reward variance at 3 alone."""
    standing: dict[int, list[dict[str, Any]]] = {
        1: [],
        2: [alarm("information_falls", "warning", cause="an earlier cause")],
        3: [alarm("information_falls", "warning"), alarm("reward_variance_collapse", "critical", STANDS)],
        4: [alarm("information_falls", "critical")],
        5: [],
        6: [alarm("information_falls", "critical", cause="a <b>late</b> cause")],
    }
    notes = {
        2: [
            "warning: information_falls since step 2",
            "tighten_filter for information_falls: the filter keeps 0.8 from now on, instead of 0.9",
        ],
        3: [
            "stop for reward_variance_collapse: the run ends here",
            "room for improvement: none",
            "2 episodes ended by an environment error",
        ],
        5: ["checkpoint for information_falls: written at a step without it"],
    }
    metrics = {"information/mi_seq": 0.5, "information/retrieval_acc": 0.5, "groups/rv_mean": 0.1, "alarms/critical": 1.0}
    return [StepRecord(step, dict(metrics), None, notes.get(step, []), alarms) for step, alarms in standing.items()]


def test_an_alarm_is_followed_over_the_whole_run() -> None:
    falls, variance = alarm_history(course())
    assert falls.spans == (AlarmSpan(2, 3, "warning"), AlarmSpan(4, 4, "critical"), AlarmSpan(6, 6, "critical"))
    assert falls.when == "warning at steps 2–3, critical at step 4, critical at step 6"
    assert (falls.stands, falls.severity, falls.cause, falls.remedy) == (True, "critical", "a <b>late</b> cause", "mend information_falls")
    assert falls.evidence == ("information/mi_seq / log(prompts) 0.123 in steps 3–6, 0.5 in steps 1–2 (rank-sum p = 0.001)",)
    assert falls.actions == ((2, "tighten filter: the filter keeps 0.8 from now on, instead of 0.9"),)
    assert (falls.title, set(falls.metrics), falls.is_about_input) == ("information falls", {"information/mi_seq"}, True)
    assert (variance.stands, variance.is_about_input) == (False, False)
    assert variance.evidence == ("groups/rv_mean 0 in steps 2–6 (zero in 5 steps)",)
    assert variance.actions == ((3, "stop: the run ends here"),)


def test_the_gravest_come_first_then_those_that_stand_then_the_earliest() -> None:
    def at(step: int, *names: str) -> StepRecord:
        return StepRecord(step, {}, None, [], [alarm(name, "critical" if name.startswith("grave") else "warning") for name in names])

    records = [at(1, "past"), at(2, "old"), at(3, "old", "new", "grave_past"), at(4, "old", "new", "grave")]
    assert [each.name for each in alarm_history(records)] == ["grave", "grave_past", "old", "new", "past"]
    assert alarm_history([]) == [] and not are_recorded([StepRecord(1, {"alarms/warning": 1.0})])


def test_a_severity_that_falls_back_is_still_told() -> None:
    records = [StepRecord(1, {}, None, [], [alarm("a", "critical")]), StepRecord(2, {}, None, [], [alarm("a", "warning")])]
    (found,) = alarm_history(records)
    assert found.severity == "critical" and found.when == "critical at step 1, warning at step 2"


def page_of(records: list[StepRecord], folder: Path) -> str:
    store = RunStore.create(folder / "run", "", {})
    for record in records:
        store.append(record)
    return write_report([store], folder / "report.html").read_text().replace(get_plotlyjs(), "")


def test_the_page_tells_when_why_and_what_to_change(tmp_path: Path) -> None:
    page = page_of(course(), tmp_path)
    for words in (
        "warning at steps 2–3, critical at step 4, critical at step 6",
        "information/mi_seq / log(prompts) 0.123 in steps 3–6, 0.5 in steps 1–2 (rank-sum p = 0.001).",
        "a &lt;b&gt;late&lt;/b&gt; cause.",
        "mend information_falls.",
        "step 2: tighten filter: the filter keeps 0.8 from now on, instead of 0.9.",
        "critical, stands at the end",
        "Critical at the end: information falls (since step 2).",
    ):
        assert words in page
    assert page.index("mend information_falls.") < page.index("mend reward_variance_collapse.") < page.index("Does it solve the task?</h2>")
    assert page.count('class="alarm critical"') == 2 and "No alarm was raised" not in page


def test_a_run_that_was_watched_and_a_run_that_was_not(tmp_path: Path) -> None:
    assert "No alarm was raised." in page_of([StepRecord(1, {"alarms/critical": 0.0})], tmp_path)
    (tmp_path / "old").mkdir()
    assert "this run did not check for alarms" in page_of([StepRecord(1, {})], tmp_path / "old")


def test_curves_shade_the_steps_at_which_an_alarm_of_their_metric_stood() -> None:
    panels = {panel.key: panel for section in SECTIONS for panel in section.panels}
    figure = curve(panels["mi_seq"], {"run": course()})
    assert figure is not None
    shaded = [(shape.x0, shape.x1, shape.fillcolor) for shape in figure.layout.shapes]
    amber, red = ALARM_COLOURS["warning"], ALARM_COLOURS["critical"]
    assert shaded == [(1.5, 3.5, amber), (3.5, 4.5, red), (5.5, 6.5, red)]
    strip = next(trace for trace in figure.data if trace.name == "information falls")
    assert (tuple(strip.x), tuple(strip.customdata)) == ((2, 3, 4, 6), ("warning", "warning", "critical", "critical"))
    low, high = figure.layout.yaxis.range
    assert all(low < height < high for height in strip.y)
    variance = curve(panels["reward_variance"], {"run": course()})
    assert variance is not None and [(shape.x0, shape.x1) for shape in variance.layout.shapes] == [(2.5, 3.5)]
    untouched = curve(panels["retrieval"], {"run": course()})
    compared = curve(panels["mi_seq"], {"a": course(), "b": course()})
    assert untouched is not None and compared is not None and not untouched.layout.shapes and not compared.layout.shapes


def test_repeated_text_is_shown_where_its_share_is_drawn() -> None:
    counted = {**STANDS, "metric": "share of reasonings that repeat themselves"}
    record = StepRecord(1, {"rollout/repeated_text": 0.5}, None, [], [alarm("repeated_text", "critical", counted)])
    figure = curve(next(panel for panel in SECTIONS[0].panels if panel.key == "format"), {"run": [record]})
    assert figure is not None and len(figure.layout.shapes) == 1


def test_what_diagnosis_raises_is_what_the_report_reads(tmp_path: Path) -> None:
    """The real rules, on a run whose reward variance vanishes: their record goes to disk, comes back and is told."""
    from tether.diagnostics.alarms.tracker import check

    records: list[StepRecord] = []
    store = RunStore.create(tmp_path / "run", "", {})
    for step in range(1, 21):
        record = StepRecord(step, {"groups/rv_mean": 0.2 if step <= 10 else 0.0, "rollout/success": 0.1})
        raised = StepRecord(step, record.metrics, None, [], [each.to_json() for each in check([*records, record])])
        records.append(raised)
        store.append(raised)
    (found,) = alarm_history(store.steps())
    assert found.name == "reward_variance_collapse" and found.stands and found.metrics == {"groups/rv_mean"}
    assert found.spans[0].last == 20 and found.evidence[0].startswith("groups/rv_mean 0 in steps ")
