"""`tether sft` as a user runs it: what it prints, the folder it leaves, and Ctrl-C."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tether.cli.main import main

pytestmark = pytest.mark.slow

TETHER = [sys.executable, "-c", "from tether.cli.main import main; main()"]
SFT = [
    "sft",
    "frozen_lake,countdown",
    "--model",
    "tiny",
    "--set",
    "model.device=cpu",
    "--episodes",
    "30",
    "--set",
    "learner.update_batch=4",
]


@pytest.mark.long
def test_a_folder_that_can_be_played_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "warm"
    done = subprocess.run([*TETHER, *SFT, "--out", str(out), "--steps", "4"], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "training 4/4 loss " in done.stdout and "held-out loss " in done.stdout
    assert done.stdout.splitlines()[-1] == f"model: {out}; next: tether train frozen_lake --also countdown --model {out}"
    words = ["eval", str(out), "--env", "frozen_lake", "--prompts", "4", "--json", "--set", "model.device=cpu"]
    with pytest.raises(SystemExit, match="0"):
        main(words)
    assert json.loads(capsys.readouterr().out)["format_valid"] > 0.5


@pytest.mark.long
def test_ctrl_c_says_what_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "warm"
    words = [*TETHER, *SFT, "--out", str(out), "--steps", "100", "--set", "evaluate_every=100"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("training 10/100"):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(timeout=120) == 130, process.stderr and process.stderr.read()
    record = json.loads((out / "sft.json").read_text())
    assert record["ended"] == "interrupted" and 10 <= record["steps"] < 100
    assert f"stopped after step {record['steps']}; the weights of step {record['best_step']} are kept in {out}" in rest
    assert (out / "model.safetensors").is_file()
