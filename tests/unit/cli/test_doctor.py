"""`tether doctor --model` says what computes a model, and why something slow is used; `tether doctor RUN` what of a run is damaged."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tether.cli.main import main
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.training.checkpoint import keep_best, save_checkpoint

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "head_dim": 8,
}  # fmt: skip


def _doctor(*words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *words, "--set", "model.device=cpu"])
    assert caught.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_a_fast_model_takes_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    found = [line for line in _doctor("--model", "tiny", capsys=capsys) if "computing tiny" in line]
    assert found == [
        "ok   computing tiny: fast path (llama, float32 on cpu): decoder contiguous, learner attention flash kernel of torch, "
        "scorer shared, head linear, fused log-probs"
    ]


def test_slow_parts_are_notes_with_reasons(tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(hf.GemmaConfig(**SIZES, vocab_size=len(tiny.tokenizer))).save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    found = [line for line in _doctor("--model", str(tmp_path), capsys=capsys) if "computing" in line]
    assert found[0].startswith(f"ok   computing {tmp_path}: partly slow path (gemma, float32 on cpu): decoder generic")
    assert all(line.startswith(f"note computing {tmp_path}: ") for line in found[1:]) and len(found) == 3
    assert found[1].endswith("decoder is slow (generic): the last norm (GemmaRMSNorm) is not a root-mean-square norm")


# ------------------------------------------------------------------------------------------------------------ a run folder


@pytest.fixture
def run(tiny: Any, tmp_path: Path) -> Path:
    store = RunStore.create(tmp_path / "run", "steps: 2\n", {})
    for step in (1, 2):
        store.append(StepRecord(step, {}))
        store.append_trajectories([{"step": step, "split": "train", "turns": []}])
        save_checkpoint(store.checkpoints, step, tiny.model, tiny.tokenizer, {}, keep=2)
    keep_best(store.checkpoints, 1, 0.5)
    store.finish("all 2 steps done")
    store.close()
    return store.folder


def _of_run(run: Path, code: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(SystemExit) as caught:
        main(["doctor", str(run)])
    assert caught.value.code == code
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before  # it only reads
    return capsys.readouterr().out.splitlines()


def test_a_whole_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _of_run(run, 0, capsys) == [
        "ok   run: ended: all 2 steps done",
        "ok   records: 2 steps, 2 episodes",
        "ok   step_000001: whole",
        "ok   step_000002: whole",
        "ok   best: whole",
        "ok   --resume: continues from step_000002",
    ]


def test_what_is_damaged_and_what_is_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = run / "checkpoints" / "step_000002"
    weights = newest / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    (newest / "state.pt").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "met')
    found = _of_run(run, 1, capsys)
    assert "note metrics.jsonl: lines that a kill tore, which are skipped: 3" in found
    assert "FAIL step_000002: damaged: state.pt is missing; model/model.safetensors is not what was written (its sha256 differs)" in found
    assert found[-1] == "FAIL --resume: stops at step_000002; move it away, and it continues from step_000001, which is whole"
    (run / "checkpoints" / "step_000001" / "manifest.json").unlink()
    assert "note step_000001: has no manifest: its files are there, and cannot be verified" in _of_run(run, 1, capsys)


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", str(tmp_path)])
    assert caught.value.code == 2 and "is not a run folder" in capsys.readouterr().err
