"""The verbs that answer at once: eval with JSON, models, envs, doctor and the version."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tether
from tether.cli.main import main
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore


def _run(words: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    return int(stopped.value.code or 0)


def test_eval_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["eval", "tiny", "--env", "frozen_lake", "--prompts", "4", "--set", "rollout.max_tokens=60", "--set", "env.options.max_turns=2"]
    assert _run([*words, "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert len(out.splitlines()) == 1
    assert (found["env"], found["model"], found["prompts"]) == ("frozen_lake", "tiny", 4)
    assert found["success"] in (0, 0.25, 0.5, 0.75, 1)
    assert 0 <= found["success_low"] <= found["success"] <= found["success_high"] <= 1
    assert list(tmp_path.iterdir()) == []
    assert _run(words) == 0
    line = " ".join(capsys.readouterr().out.split())
    assert f"tiny on frozen_lake: success {found['success']:.1%}" in line and "4 prompts, temperature 0.5" in line


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["models"]) == 0
    rows = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith(("tiny", "smollm2"))}
    assert rows["tiny"] == "yes" and rows["smollm2"] in ("yes", "no")
    assert _run(["models", "get", "tiny"]) == 0
    assert "tiny is ready: " in capsys.readouterr().out


def test_envs(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["envs"]) == 0
    out = capsys.readouterr().out
    assert "frozen_lake" in out and "sokoban" in out
    assert _run(["envs", "frozen_lake"]) == 0
    out = capsys.readouterr().out
    assert "slip" in out and "0.02" in out and tether.make_env("frozen_lake").reset(0).text in out
    assert "Pictures: with observation=image or grid_image; see them with `tether play frozen_lake --images`." in out


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path))
    code = _run(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok   torch: ") for line in lines)
    assert "ok   model tiny: ships with Tether" in lines
    assert f"ok   cache: {tmp_path}/models" in lines
    assert code == any(line.startswith("FAIL") for line in lines)


def test_doctor_counts_what_training_a_model_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`tiny` has 2,324,928 parameters in float32: 9.3 MB, and twice that in moments."""
    _run(["doctor", "--model", "tiny"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "training" in line)
    assert line.startswith("ok   training tiny: ") and " = 0.2 GB of " in line
    monkeypatch.setattr("tether.training.memory.available_memory", lambda _: 10**7)
    assert _run(["doctor", "--model", "tiny", "--set", "algorithm.name=ppo", "--set", "model.device=cpu"]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "training" in line)
    assert line.startswith("FAIL training tiny: model 'tiny' does not fit on cpu: ") and "critic 0.0 GB" in line


def test_doctor_and_words_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["doctor", "--set", "lora.rank=4"]) == 2
    assert capsys.readouterr().err == "tether: --set changes the training of a model; add --model NAME\n"
    assert _run(["doctor", "--model", "smolm2"]) == 2
    assert "did you mean 'smollm2'?" in capsys.readouterr().err


def test_version_and_no_words_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["--version"]) == 0
    assert capsys.readouterr().out == f"tether {tether.__version__}\n"
    assert _run([]) == 0
    assert capsys.readouterr().out.startswith("Usage: tether")


@pytest.mark.parametrize("loaded", [True, False])
def test_ctrl_c_names_the_step_of_the_trainer(
    loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run resumed from step 6 has later steps on disk, of its first attempt; while the model loads there is no step to name."""
    store = RunStore.create(tmp_path / "run", "env: {name: frozen_lake}\nsteps: 9\n", {})
    store.append(StepRecord(8, {}))

    def interrupted(settings: Any, store: Any, callbacks: Any, *, resumed: bool, changed: bool, ranks: Any, ready: Any) -> None:
        if loaded:
            ready(SimpleNamespace(step=6, plan=None, disk=None))
        raise KeyboardInterrupt

    monkeypatch.setattr("tether.training.api.run_training", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--resume", "--out", str(store.folder)])
    assert stopped.value.code == 130
    assert ("stopped after step 6; the last checkpoint is none" in capsys.readouterr().out) is loaded
