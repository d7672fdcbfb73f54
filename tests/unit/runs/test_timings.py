"""Timings: what is written is read again, older lines too; the table, the means and the charts say what the lines hold."""

from pathlib import Path

import pytest

from tether.runs.figures import curve
from tether.runs.panels import COST, Style
from tether.runs.report import write_report
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.runs.timings import STAGES, StepTimings, as_records, machine_words, mean_rates, stage_times, token_account

WHOLE = StepTimings(
    seconds={"rollout": 6.0, "select": 0.5, "update": 3.5},
    tokens_per_second=1000.0,
    update_tokens_per_second=4000.0,
    share_of_peak={"rollout": 0.02, "update": 0.5},
    peak_memory={"rollout": 3_000_000_000, "update": 9_000_000_000},
    unused_memory=2_000_000_000,
    engine={"sampled_tokens": 6000, "evictions": 2},
)
OLD = {"step": 2, "seconds": {"rollout": 90.0, "update": 10.0}, "tokens_per_second": 3000.0}


def test_there_and_back() -> None:
    assert StepTimings.from_json({"step": 1, "something": "newer", **WHOLE.to_json()}) == WHOLE
    assert StepTimings({"validation": 1.0}).to_json() == {"seconds": {"validation": 1.0}}
    assert StepTimings.from_json({"step": 3}) == StepTimings()
    assert StepTimings.from_json({"seconds": None}) == StepTimings()


def test_the_table_and_the_means() -> None:
    lines = [{"step": 1, **WHOLE.to_json()}, OLD]
    rows = stage_times(lines)
    assert [(row.stage, row.total, row.per_step, row.memory) for row in rows] == [
        ("rollout", "1 min 36 s", "48 s", "3 GB"),
        ("update", "13.5 s", "6.75 s", "9 GB"),
        ("select", "0.5 s", "0.25 s", ""),
    ]
    assert [row.share for row in rows] == pytest.approx([96 / 110, 13.5 / 110, 0.5 / 110])
    assert mean_rates(lines) == [
        ("tokens sampled per second", "2,000"),
        ("tokens trained per second", "4,000"),
        ("share of the device's peak in the rollout", "2.0%"),
        ("share of the device's peak in the update", "50.0%"),
        ("tokens sampled, per step", "6,000"),
        ("conversations evicted from the cache, per step", "2"),
    ]
    assert stage_times([]) == [] and mean_rates([]) == []


def test_timings_as_metrics() -> None:
    first, second = as_records([{"step": 1, **WHOLE.to_json()}, OLD])
    assert first == StepRecord(
        1,
        {
            "seconds/rollout": 6.0,
            "seconds/select": 0.5,
            "seconds/update": 3.5,
            "seconds/all": 10.0,
            "share/rollout": 0.02,
            "share/update": 0.5,
            "memory/rollout": 3.0,
            "memory/update": 9.0,
            "rate/rollout": 1000.0,
            "rate/update": 4000.0,
            "memory/unused": 2.0,
        },
    )
    assert second.metrics == {
        "seconds/rollout": 90.0,
        "seconds/select": 0.0,  # the layers of a stack need a height in every step
        "seconds/update": 10.0,
        "seconds/all": 100.0,
        "rate/rollout": 3000.0,
    }


def test_the_stages_are_stacked_and_the_axis_holds_their_sum() -> None:
    (panel,) = [panel for panel in COST.panels if panel.key == "cost_seconds"]
    assert [series.label for series in panel.series if series.style is Style.SHARE] == list(STAGES)
    figure = curve(panel, {"run": as_records([{"step": 1, **WHOLE.to_json()}, OLD])})
    assert figure is not None
    assert [(trace.name, trace.stackgroup) for trace in figure.data] == [
        ("rollout", "shares"), ("select", "shares"), ("update", "shares"), ("all", None),
    ]  # fmt: skip
    assert figure.layout.yaxis.range[1] > 100
    swapped = curve(panel, {"run": as_records([{**OLD, "step": 1}, {"step": 2, **WHOLE.to_json()}])})
    assert swapped is not None
    labels = [annotation.text for annotation in swapped.layout.annotations]
    assert labels == ["rollout", "update", "all"]  # on an axis of 110 seconds, half a second has no room for its name


def test_what_the_report_shows(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", "algo: grpo\n", {})
    for step in (1, 2):
        store.append(StepRecord(step, {"rollout/success": 0.5}))
        store.append_timings(step, WHOLE.to_json())
    store.computed_on({"device": "NVIDIA <H200>", "dtype": "bfloat16", "peak": 7.9e14, "engine": "paged"})
    store.finish("done")
    assert store.finished == "done" and store.machine()["engine"] == "paged"
    page = write_report([store], tmp_path / "report.html").read_text()
    assert "Computed on: NVIDIA &lt;H200&gt;; 790 TFLOP/s measured in bfloat16; engine: paged" in page
    assert "Where the time goes" in page and "Mean tokens trained per second: 4,000" in page and '<td class="num">9 GB</td>' in page
    for panel in COST.panels:
        assert page.count(f'id="chart-{panel.key}"') == 1


def test_the_machine_in_words() -> None:
    assert machine_words({}) == ""
    assert (
        machine_words({"device": "CPU, 2 threads", "peak": 5e10, "dtype": "float32"}) == "CPU, 2 threads; 0.05 TFLOP/s measured in float32"
    )


def test_the_account_of_tokens_is_one_line() -> None:
    told = {"rollout/tokens_sampled": 300.0, "groups/tokens_trained": 100.0}
    records = [StepRecord(0, {}), StepRecord(1, told), StepRecord(2, {**told, "groups/tokens_decisions": 80.0})]
    assert token_account(records) == (
        "600 tokens sampled, 200 trained on: 3.00 sampled per token trained on; 80 went to prompts that were not continued"
    )
    assert token_account(records[:1]) == ""
    assert token_account([StepRecord(1, {**told, "groups/tokens_trained": 0.0})]) == "300 tokens sampled, 0 trained on"
