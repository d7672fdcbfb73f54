"""A run folder that tether 0.1.0 wrote opens, is read and is reported."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tether.cli.main import app
from tether.core.alarms import Alarm
from tether.runs.store import RunStore

FOLDER = Path(__file__).parents[2] / "fixtures" / "run_of_0_1" / "run"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    copy = tmp_path / "run"
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("checkpoints"))
    return copy


def test_it_opens_and_its_records_are_read(run: Path) -> None:
    store = RunStore.open(run)
    records = store.steps()
    assert [record.step for record in records] == [0, 1, 2] and store.version == "0.1.0"
    assert "rollout/success" in records[1].metrics and "information/num_empty" in records[1].metrics
    assert all(Alarm.from_json(data).sentence() for record in records for data in record.alarms)
    assert list(store.trajectories(1, "train")) and store.timings()


def test_report_writes_its_page(run: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(run)])
    assert done.exit_code == 0, done.output
    page = (run / "report.html").read_text()
    assert "frozen_lake" in page and "Computed on: CPU, 2 threads" in page and 'class="plotly-graph-div"' in page
    assert "Fast path" not in page
