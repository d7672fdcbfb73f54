"""Step records: alarms come back as they were written, and files from before there were any are read."""

import json
from pathlib import Path

import pytest

from tether.core.errors import BadInput
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore

ALARM = {"name": "length_collapse", "severity": "critical", "began": 4, "evidence": [{"steps": [3, 4]}], "cause": "c", "remedy": "r"}


def test_alarms_come_back_as_they_were_written(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", "", {})
    record = StepRecord(4, {"alarms/critical": 1.0}, None, ["a note"], [ALARM])
    store.append(record)
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 4, "metrics": {"alarms/critical": 1.0}, "regime": None, "notes": ["a note"], "alarms": [ALARM]}
    assert RunStore.open(tmp_path / "run").steps() == [record]


def test_a_record_from_before_there_were_alarms(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", "", {})
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 2, "metrics": {"rollout/success": 0.5}, "regime": null, "notes": []}\n')
    (record,) = store.steps()
    assert record == StepRecord(2, {"rollout/success": 0.5}) and record.alarms == []
    assert record.to_json()["alarms"] == []


def test_alarms_that_are_no_list() -> None:
    with pytest.raises(BadInput, match="not a step record"):
        StepRecord.from_json({"step": 1, "metrics": {}, "alarms": 3})
