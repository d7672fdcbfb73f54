"""examples/compare_models.py compares a loaded model and one behind an endpoint, and writes the leaderboard that it names."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tether.rollout.serving.app import serving_model

PATH = Path(__file__).parents[3] / "examples" / "compare_models.py"


def test_it_runs(tmp_path: Path, tiny: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TETHER_TOKEN", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("compare_models", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with serving_model(tiny, "served") as url:
        results = module.main(["tiny", f"{url}#served"], "frozen_lake", 4, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert len(results) == 2 and lines[0].startswith("tiny: success ") and "#served: success " in lines[1]
    assert "4 instances" in lines[2] and lines[3] == f"leaderboard: {tmp_path / 'leaderboard.html'}"
    assert (tmp_path / "leaderboard.html").is_file()
