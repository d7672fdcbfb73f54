"""`tether export` writes what transformers loads: the very weights, merged and cast, with a card whose numbers are the run's own."""

import copy
import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tether
from tether.cli.export import DTYPES
from tether.cli.main import main
from tether.models import load
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.training.api import open_run
from tether.training.checkpoint import keep_best, save_checkpoint

CONFIG = "env:\n  name: frozen_lake\nalso:\n- name: sokoban\nsteps: 40\n"
IDS = torch.arange(20, 60)[None]


def _validated(step: int, success: float, low: float, high: float) -> StepRecord:
    names = ("validation/success", "validation/success_low", "validation/success_high", "validation/prompts")
    return StepRecord(step, dict(zip(names, (success, low, high, 64.0), strict=True)))


@pytest.fixture
def run(tmp_path: Path, tiny: Any) -> Path:
    """Checkpoints of steps 20 and 30, of which 20 validated best; step 30 was not evaluated. Weights differ from step to step."""
    folder = tmp_path / "run"
    store = RunStore.create(folder, CONFIG, {"env": "frozen_lake+sokoban", "model": "tiny", "algorithm": "dr_grpo", "seed": 7})
    store.append(_validated(0, 0.25, 0.16, 0.37))
    store.append(_validated(20, 0.625, 0.503, 0.733))
    store.append(StepRecord(30, {}))
    for step in (20, 30):
        save_checkpoint(store.checkpoints, step, _model(tiny, step), tiny.tokenizer, {}, keep=2)
    keep_best(store.checkpoints, 20, 0.625)
    return folder


def _model(tiny: Any, step: int) -> Any:
    model = copy.deepcopy(tiny.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + step / 100)
    return model


def _export(run: Path, out: Path, *words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["export", str(run), "--out", str(out), *words])
    return int(stopped.value.code or 0)


def _refused(run: Path, out: Path, *words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert _export(run, out, *words) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    return said


def _same_weights(model: Any, expected: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize(("words", "step"), [([], 30), (["--best"], 20), (["--step", "20"], 20), (["--step", "30"], 30)])
def test_the_checkpoint_that_was_asked_for(run: Path, tmp_path: Path, tiny: Any, words: list[str], step: int, capsys: Any) -> None:
    out = tmp_path / "new" / "agent"
    assert _export(run, out, *words) == 0
    assert capsys.readouterr().out.strip() == f"step {step} of {run} in float32: {out}"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32 and _same_weights(model, _model(tiny, step))
    tokenizer = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "go"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == tiny.tokenizer.apply_chat_template(chat, tokenize=False)
    assert f"| steps | {step} of 40 |" in (out / "README.md").read_text()
    assert [path.name for path in out.parent.iterdir()] == ["agent"]


def test_bfloat16(run: Path, tmp_path: Path, tiny: Any) -> None:
    assert _export(run, tmp_path / "agent", "--dtype", "bfloat16") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "agent")
    assert model.dtype == torch.bfloat16
    assert _same_weights(model, _model(tiny, 30).to(torch.bfloat16))
    assert "| weights | bfloat16 |" in (tmp_path / "agent" / "README.md").read_text()
    assert set(DTYPES) <= set(load.DTYPES)


def test_the_card(run: Path, tmp_path: Path) -> None:
    assert _export(run, tmp_path / "agent", "--best") == 0
    card = (tmp_path / "agent" / "README.md").read_text()
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", card, re.MULTILINE))
    assert rows == {
        "environment": "frozen_lake, sokoban",
        "starting model": "tiny",
        "algorithm": "dr_grpo",
        "steps": "20 of 40",
        "seed": "7",
        "validation success": "62.5% (95% interval 50.3% to 73.3%, 64 prompts)",
        "validation success before training": "25.0% (95% interval 16.0% to 37.0%, 64 prompts)",
        "weights": "float32",
        "Tether": f"{RunStore.open(run).version}, exported with {tether.__version__}",
    }
    assert card.startswith("---\nlibrary_name: transformers\n") and 'from_pretrained("agent")' in card
    assert str(tmp_path) not in card and str(tmp_path) not in (tmp_path / "agent" / "config.json").read_text()


@pytest.mark.parametrize("also", [[], ["sokoban"], ["sokoban", "countdown"]])
def test_the_card_names_each_environment_once(also: list[str], tmp_path: Path, tiny: Any) -> None:
    """On a folder as `tether train` makes it."""
    given = {"env": {"name": "frozen_lake"}, "also": [{"name": name} for name in also]}
    store, _ = open_run(tmp_path / "run", None, given, resume=False, smoke=False)
    save_checkpoint(store.checkpoints, 1, tiny.model, tiny.tokenizer, {}, keep=2)
    assert _export(tmp_path / "run", tmp_path / "agent") == 0
    card = (tmp_path / "agent" / "README.md").read_text()
    assert f"| environment | {', '.join(['frozen_lake', *also])} |" in card


def test_a_step_that_was_not_evaluated_says_so(run: Path, tmp_path: Path) -> None:
    assert _export(run, tmp_path / "agent") == 0
    assert "| validation success | not measured |" in (tmp_path / "agent" / "README.md").read_text()


def test_a_starting_model_in_a_folder_is_told_by_its_last_name(tmp_path: Path, tiny: Any) -> None:
    store = RunStore.create(tmp_path / "run", CONFIG, {"env": "frozen_lake", "model": str(tmp_path / "my-base"), "algorithm": "grpo"})
    save_checkpoint(store.checkpoints, 1, tiny.model, tiny.tokenizer, {}, keep=2)
    assert _export(tmp_path / "run", tmp_path / "agent") == 0
    card = (tmp_path / "agent" / "README.md").read_text()
    assert "| starting model | my-base |" in card and "| seed | unknown |" in card


def test_adapters_are_merged(tmp_path: Path, tiny: Any) -> None:
    pytest.importorskip("peft")
    from tether.models.lora import add_lora

    model = tether.load_model("tiny", device="cpu").model  # by name: the adapters remember it
    add_lora(model, rank=2, alpha=4, seed=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    store = RunStore.create(tmp_path / "run", CONFIG, {"env": "frozen_lake", "model": "tiny", "algorithm": "grpo", "seed": 0})
    path = save_checkpoint(store.checkpoints, 1, model, tiny.tokenizer, {}, keep=2)
    assert (path / "model" / "adapter_config.json").is_file()
    assert _export(tmp_path / "run", tmp_path / "agent") == 0
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "agent")
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in tiny.model.parameters())
    with torch.inference_mode():
        wanted, got, start = (m(input_ids=IDS).logits for m in (model, plain, tiny.model))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    assert (got - start).abs().max() > 0.1
    assert "float32, adapters merged" in (tmp_path / "agent" / "README.md").read_text()


def test_nothing_is_overwritten(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "agent"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert f"tether: '{out}' exists and is not overwritten; choose another --out" == _refused(run, out, capsys=capsys)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    assert "exists and is not overwritten" in _refused(run, out / "mine.txt", capsys=capsys)
    (out / "mine.txt").unlink()
    assert _export(run, out) == 0 and (out / "model.safetensors").is_file()


def test_bad_input(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "agent"
    assert "has no checkpoint of step 10; it has those of steps 20, 30" in _refused(run, out, "--step", "10", capsys=capsys)
    assert "--best and --step 20 ask for two checkpoints" in _refused(run, out, "--best", "--step", "20", capsys=capsys)
    assert "unknown dtype 'bfloat': did you mean 'bfloat16'?" in _refused(run, out, "--dtype", "bfloat", capsys=capsys)
    assert "is not a run folder" in _refused(tmp_path, out, capsys=capsys)
    empty = tmp_path / "empty"
    RunStore.create(empty, CONFIG, {})
    assert "has no checkpoint yet" in _refused(empty, out, capsys=capsys)
    assert "has no best checkpoint: none was evaluated yet" in _refused(empty, out, "--best", capsys=capsys)
    assert not out.exists()


def test_a_full_disk_leaves_nothing_behind(run: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(numbers[-1], os.strerror(numbers[-1]))

    monkeypatch.setattr(os, "fsync", fail)
    before, numbers = sorted(tmp_path.iterdir()), []
    for number, said in ((errno.ENOSPC, "No space left on device; free some space or choose"), (errno.EIO, "Input/output error; choose")):
        numbers.append(number)
        assert _export(run, tmp_path / "agent") == 1
        assert f"{said} another --out" in capsys.readouterr().err
        assert sorted(tmp_path.iterdir()) == before


def test_an_upload_without_a_network_leaves_the_folder_and_says_what_to_do(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    out = tmp_path / "agent"
    with pytest.raises(SystemExit) as stopped:
        main(["export", str(run), "--out", str(out), "--push-to-hub", "me/agent"])
    assert stopped.value.code
    assert (out / "README.md").is_file()
    error = " ".join(capsys.readouterr().err.split())
    assert error.startswith(f"tether: '{out}' is written, but could not be uploaded to 'me/agent': ")
    assert error.endswith(f"log in with `hf auth login`, check the network, then: hf upload me/agent {out}")


@pytest.mark.parametrize("name", ["agent", "me/agent/x", "me/bad name"])
def test_a_repository_that_cannot_be_one_is_refused_before_anything_is_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["export", str(run), "--out", str(tmp_path / "agent"), "--push-to-hub", name])
    assert stopped.value.code == 2
    assert f"--push-to-hub got '{name}'; write it as OWNER/NAME" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "agent").exists()
