"""A run folder of tether 0.1.0 (tests/fixtures/run_of_0_1) opens, reports and resumes, and goes on as that version did."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

import tether
from tether.cli.main import main
from tether.runs.store import RunStore

FIXTURE = Path(__file__).parents[1] / "fixtures" / "run_of_0_1"


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, in a directory from which its model's relative name resolves."""
    shutil.copytree(FIXTURE / "run", tmp_path / "run")
    shutil.copytree(FIXTURE / "model", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def _later() -> dict[int, dict[str, Any]]:
    """The last record of each later step, as tether 0.1.0 wrote it."""
    return {record["step"]: record for record in map(json.loads, (FIXTURE / "later.jsonl").read_text().splitlines())}


def test_it_resumes_and_reproduces_the_later_steps(old_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tether.train(out=old_run, resume=True)
    assert run.finished == "all 4 steps done"
    said = caplog.text
    for old, new in {"lam": "gae_lambda", "kl_in": "kl_mode", "scale_by_std": "normalize_std", "reward_at": "reward_placement"}.items():
        assert f"algorithm.{old} is now algorithm.{new}" in said
    assert "learner.final_share is now learner.min_lr_ratio" in said
    for record in run.records[3:]:
        before = _later()[record.step]
        assert record.regime is None, "four prompts are too few for a regime, although version 0.1 named one"
        assert len(record.notes) == len(before["notes"])
        for name, value in before["metrics"].items():
            assert math.isclose(record.metrics[name], value, rel_tol=1e-3, abs_tol=1e-5), name


def test_it_opens_and_reports(old_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = RunStore.open(old_run)
    assert [record.step for record in store.steps()] == [0, 1, 2] and store.version == "0.1.0"
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(old_run)])
    assert stopped.value.code == 0
    assert "<html" in (old_run / "report.html").read_text()[:2000].lower()


def test_what_a_run_had_before_a_setting_was_added_stays(old_run: Path) -> None:
    """In effect nothing followed a truncated episode."""
    from tether.training.resolve import run_settings

    assert "bootstrap_truncated" not in (old_run / "config.yaml").read_text()
    assert run_settings(old_run, None, {}, resume=True, smoke=False).algorithm.bootstrap_truncated is False


def test_a_settings_file_with_former_names(caplog: pytest.LogCaptureFixture) -> None:
    """A user's file with the former names: the same settings, with a line that says the new ones."""
    from tether.core.config import load
    from tether.training.settings import RunSettings

    settings = load(RunSettings, FIXTURE / "settings.yaml")
    assert (settings.algorithm.gae_lambda, settings.algorithm.kl_mode, settings.learner.min_lr_ratio) == (0.95, "reward", 0.2)
    assert caplog.text.count("renamed settings") == 2
