"""`tether diagnose`: a verdict for people, one object for machines, one page for the browser, and one line for every mistake."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tether.cli.main import main


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report goes to the current folder unless told otherwise."""
    monkeypatch.chdir(tmp_path)


PLACES = ("attic", "cellar", "garden", "harbour", "kitchen", "library")


def _rollouts(path: Path, tied: bool, steps: int = 1, **more: Any) -> Path:
    lines = []
    for step in range(steps):
        for index, place in enumerate(PLACES):
            for member in range(4):
                thought = f"I look in the {place}, way {member}." if tied else f"I look around, way {(index + member * 3) % 4}."
                record = {"step": step, "prompt": f"Find what is in the {place}.", "response": f"<think>{thought}</think> <b>done</b>"}
                lines.append(json.dumps({**record, "reward": float(member % 2), "success": member % 2 == 0, **more}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _run(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["diagnose", *map(str, words)])
    out, err = capsys.readouterr()
    assert stopped.value.code == code, err
    return out, err


def _refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    out, err = _run(capsys, *words, code=2)
    lines = [line for line in err.splitlines() if line.strip()]
    assert out == "" and len(lines) == 1 and lines[0].startswith("tether: ") and "Traceback" not in err, err
    return err


FAST = ("--model", "tiny", "--device", "cpu", "--bootstrap", "100")


def test_a_verdict_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = _run(capsys, _rollouts(tmp_path / "tied.jsonl", tied=True), *FAST)
    lines = out.splitlines()
    assert lines[0] == "Tied to the input: the reasoning depends on its prompt."
    assert len(lines) <= 25 and "95% interval" in out and "Read 24 rollouts (generic) of 1 step" in out
    assert lines[-1] == "report: diagnosis.html" and (tmp_path / "diagnosis.html").read_text(encoding="utf-8").startswith("<!")
    out, _ = _run(capsys, _rollouts(tmp_path / "loose.jsonl", tied=False), *FAST)
    assert out.startswith("Template collapse: the reasoning varies, but not with its prompt.")
    assert "100%  I look around, way ⟨1⟩.   (slots: 1 noise)" in out


def test_one_object_and_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts = _rollouts(tmp_path / "r.jsonl", tied=True, steps=2)
    rollouts.write_text(rollouts.read_text(encoding="utf-8").replace("I look in", "<script>alert(1)</script>"), encoding="utf-8")
    page = tmp_path / "report.html"
    out, err = _run(capsys, rollouts, *FAST, "--json", "--out", page)
    found = json.loads(out)
    assert err.strip() == "" and out.count("\n") == 1
    assert found["verdict"]["code"] == "tied" and [window["step"] for window in found["windows"]] == [0, 1]
    assert found["trend"]["sentences"] and found["model"] == "tiny" and found["precision"] == "float32"
    html = page.read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)" in html and "<script>alert(1)" not in html
    assert found["verdict"]["headline"] in html and "chart-dependence" in html and "Content-Security-Policy" in html
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=", html)


def test_steps_and_pattern_and_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        json.dumps({"q": f"In the {place}?", "a": f"Thought: see the {place} {n} Action: go", "t": step})
        for step in (3, 7)
        for place in PLACES
        for n in range(3)
    ]
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(["{broken", *lines]), encoding="utf-8")
    options = ("--fields", "prompt=q,response=a,step=t", "--pattern", "Thought:(.*?)Action:", "--step", "7", "--skip-bad")
    found = json.loads(_run(capsys, path, *FAST, "--json", *options)[0])
    assert [window["steps"] for window in found["windows"]] == [[7]] and found["read"]["bad"] == 1
    assert "see the attic" in json.dumps(found["samples"]) and found["read"]["steps"] == 2
    assert any("could not be read" in note for note in found["notes"])


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = _rollouts(tmp_path / "r.jsonl", tied=True)
    assert "does not exist" in _refused(capsys, tmp_path / "none.jsonl", *FAST)
    assert "add --model" in _refused(capsys, good)
    assert "did you mean 'tiny'" in _refused(capsys, good, "--model", "tinny")
    assert "did you mean 'verl'" in _refused(capsys, good, *FAST, "--format", "verll")
    assert "did you mean 'trajectory'" in _refused(capsys, good, *FAST, "--scope", "trajectories")
    assert "step 9 is not in the rollouts" in _refused(capsys, good, *FAST, "--step", "9")
    assert "there is no folder" in _refused(capsys, good, *FAST, "--out", tmp_path / "nowhere" / "report.html")
    assert "--tokenizer" in _refused(capsys, good, "--model", "http://127.0.0.1:1/v1")
    broken = tmp_path / "broken.jsonl"
    broken.write_text(good.read_text(encoding="utf-8") + "{broken\n", encoding="utf-8")
    assert "broken.jsonl line 25" in _refused(capsys, broken, *FAST)
    one = _rollouts(tmp_path / "one.jsonl", tied=True, prompt="always the same")
    assert "all 16 sampled reasonings answer one prompt" in _refused(capsys, one, *FAST)
    silent = _rollouts(tmp_path / "silent.jsonl", tied=True, response="Left")
    assert "no response in scope holds reasoning" in _refused(capsys, silent, *FAST)
    foreign = _rollouts(tmp_path / "foreign.jsonl", tied=True, reasoning_ids=[10**6])
    assert "tokens do not fit the model's tokenizer" in _refused(capsys, foreign, *FAST)


def test_a_run_folder_needs_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    small = [
        "rollout.num_groups=4",
        "rollout.group_size=3",
        "rollout.max_tokens=40",
        "evaluation.prompts=1",
        "env.options.max_turns=1",
        "diagnosis.every=0",
    ]
    settings = [word for setting in small for word in ("--set", setting)]
    with pytest.raises(SystemExit) as trained:
        main(["train", "frozen_lake", "--steps", "1", "--out", str(run), *settings])
    assert trained.value.code == 0, capsys.readouterr().err
    capsys.readouterr()
    found = json.loads(_run(capsys, run, "--json", "--bootstrap", "100", "--scope", "trajectory")[0])
    assert found["format"] == "tether" and found["scope"] == "trajectory"
    assert found["model"] == "tiny" and any("the model that the run began with, tiny" in note for note in found["notes"])
    assert found["windows"][0]["measured"]["reasonings"] <= 16
    assert not list(tmp_path.rglob("diagnosis.html")), "with --json there is a page only if it was asked for"

    by_checkpoint = json.loads(_run(capsys, run, "--model", run, "--json", "--bootstrap", "100")[0])
    assert any("the run's last checkpoint, step_000001" in note for note in by_checkpoint["notes"])

    letters = _another_model(tmp_path / "letters")
    out, _ = _run(capsys, run, "--model", letters, "--bootstrap", "100")
    assert out.splitlines()[-1] == f"report: {run / 'diagnosis.html'}" and (run / "diagnosis.html").is_file()
    assert f"scored by {letters}" in out


def _another_model(folder: Path) -> Path:
    """A small model that reads letters: the run's token ids mean nothing to it, their text does."""
    alphabet = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
    words = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(alphabet), max_position_embeddings=4096, **size, **ids)).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder
