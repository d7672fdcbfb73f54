"""Gradients by reward variance in the report: read back from metric names, drawn on one scale, and put into words."""

from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from tether.runs.gradient_buckets import BucketRow, Decomposition, decompositions, norm_figure, reading, share_figure, table
from tether.runs.report import write_report
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore


def metrics(task: tuple[float, ...], regulariser: tuple[float, ...], **others: float) -> dict[str, float]:
    """Buckets with reward variances 0, 0.1, 0.2, ..."""
    values = {f"gradients/{name}": value for name, value in others.items()}
    for number, (own, reg) in enumerate(zip(task, regulariser, strict=True), start=1):
        values |= {
            f"gradients/rv_mean_{number}": (number - 1) / 10, f"gradients/task_norm_{number}": own, f"gradients/snr_{number}": own / 2,
            f"gradients/regulariser_norm_{number}": reg, f"gradients/dominance_{number}": reg / (own + reg),
        }  # fmt: skip
    return values


def of(task: tuple[float, ...], regulariser: tuple[float, ...], step: int = 1, **others: float) -> Decomposition:
    return decompositions([StepRecord(step, metrics(task, regulariser, **others))])[0]


def test_decompositions_are_read_back_in_order_of_buckets() -> None:
    values = {f"gradients/rv_mean_{number}": float(number) for number in (10, 11, 12, *range(1, 10))} | {
        "gradients/bound_broken": 2.0,
        "gradients/failed": 0.0,
    }
    found = decompositions([StepRecord(1, {"rollout/success": 0.5}), StepRecord(4, values), StepRecord(7, {"gradients/failed": 1.0})])
    assert [each.step for each in found] == [4]
    assert [bucket.values["rv_mean"] for bucket in found[0].buckets] == [float(number) for number in range(1, 13)]
    assert found[0].bound_broken == 2
    assert decompositions([StepRecord(1, {"gradients/task_norm_1": 0.5})])[0] == Decomposition(1, (BucketRow(1, {"task_norm": 0.5}),), None)


def test_zero_and_rounding_stand_on_the_floor_and_tell_their_value() -> None:
    figure = norm_figure(found := of((0.0, 0.05, 0.5), (0.001, 0.001, 1e-9)), [found])
    task, regulariser = figure.data
    assert (task.name, regulariser.name) == ("task", "regularisers")
    # Decades of what is drawn: 0.001 to 0.5 -> 10^-3 .. 10^0; the floor is a decade below.
    assert tuple(task.y) == pytest.approx((1e-4, 0.05, 0.5)) and tuple(task.customdata) == (0.0, 0.05, 0.5)
    assert tuple(regulariser.y) == pytest.approx((0.001, 0.001, 1e-4)) and tuple(regulariser.customdata) == (0.001, 0.001, 1e-9)
    assert tuple(task.marker.symbol) == ("circle-open", "circle", "circle")
    assert tuple(figure.layout.yaxis.ticktext) == ("0", "0.001", "0.01", "0.1", "1") and figure.layout.yaxis.type == "log"
    assert tuple(task.x) == ("1<br>0", "2<br>0.1", "3<br>0.2")


def test_two_decompositions_share_their_axis() -> None:
    first, last = of((0.1, 0.2), (0.02, 0.02)), of((5.0, 70.0), (0.02, 0.02), step=9)
    ranges = [tuple(norm_figure(each, [first, last]).layout.yaxis.range) for each in (first, last)]
    assert ranges[0] == ranges[1] == pytest.approx((-3.2, 2.2))


def test_nothing_but_zeros_still_draws() -> None:
    found = of((0.0, 0.0), (1e-300, 1e-300))
    zero = Decomposition(1, tuple(BucketRow(bucket.number, {**bucket.values, "regulariser_norm": 0.0}) for bucket in found.buckets), None)
    assert tuple(norm_figure(zero, [zero]).data[0].customdata) == (0.0, 0.0)


def test_shares_compare_the_first_with_the_last() -> None:
    first, last = of((1.0, 3.0), (1.0, 1.0)), of((0.0, 1.0), (1.0, 1.0), step=9)
    figure = share_figure("dominance", [first, last], percent=True)
    assert figure is not None
    assert [(trace.name, tuple(trace.x), tuple(trace.y)) for trace in figure.data] == [
        ("step 1", ("1", "2"), (0.5, 0.25)),
        ("step 9", ("1", "2"), (1.0, 0.5)),
    ]
    assert share_figure("bound_used", [first], percent=False) is None


def test_the_reading_says_who_dominates_and_whether_the_bound_holds() -> None:
    assert reading(of((0.0, 0.001, 0.25), (0.002, 0.002, 0.003), bound_broken=0.0)) == (
        "From the prompts of least reward variance to those of most (0 to 0.2), the norm of the task gradient goes from 0 to 0.25, that of the "
        "regularisers from 0.002 to 0.003. The regularisers are the larger part in buckets 1, 2: updates on these prompts push towards text "
        "that ignores the input. The Cauchy–Schwarz bound holds in every bucket."
    )
    one = reading(of((0.1, 1.0), (0.2, 0.1), bound_broken=1.0))
    assert "in bucket 1:" in one and "is broken in 1 of 2: a defect." in one
    none = reading(of((0.1, 1.0), (0.1, 0.1)))
    assert "The task gradient is the larger part in every bucket." in none and "bound" not in none


def test_the_table_marks_what_could_not_be_measured() -> None:
    rows = table(of((0.0, 0.05), (0.001, 0.001)))
    assert rows == [
        ["1", "0", "0", "0.001", "—", "—", "1", "0", "—", "—"],
        ["2", "0.1", "0.05", "0.001", "—", "—", "0.0196", "0.025", "—", "—"],
    ]


def page_of(records: list[StepRecord], folder: Path) -> str:
    store = RunStore.create(folder / "run", "", {})
    for record in records:
        store.append(record)
    return write_report([store], folder / "report.html").read_text().replace(get_plotlyjs(), "")


def test_the_page_shows_the_first_and_the_last_decomposition(tmp_path: Path) -> None:
    page = page_of([StepRecord(step, metrics((0.1, 0.2), (0.05, 0.05))) for step in (1, 4, 7)], tmp_path)
    assert "Gradient norms at step 1" in page and "Gradient norms at step 7" in page and "Gradient norms at step 4" not in page
    assert "All numbers of step 7" in page and "goes from 0.1 to 0.2" in page
    assert len(set(ids := [part.split('"')[0] for part in page.split('id="chart-gradients-')[1:]])) == len(ids) == 4


def test_gradients_that_were_not_taken_or_failed_are_named(tmp_path: Path) -> None:
    assert "Set diagnosis.gradients.every to decompose them" in page_of([StepRecord(1, {"rollout/success": 0.5})], tmp_path)
    (tmp_path / "failed").mkdir()
    failed = StepRecord(1, {"gradients/failed": 1.0}, None, ["gradient decomposition failed: no memory"])
    page = page_of([failed], tmp_path / "failed")
    assert "(gradients/task_norm_1, ...). The gradient decomposition failed at step 1: no memory." in page
    assert "Set diagnosis.gradients.every" not in page
