"""Warm starts: made small enough for the repository, the same weights wherever they are loaded, and never another one under the same name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tether
from tether.core.errors import BadInput
from tether.models.catalog import shipped_folder
from tether.models.load import load_model
from warm_starts import make
from warm_starts.make import HASH_OF_FILE, MOST_BYTES, file_hash, main, stand_in, start_hash

WARM_STARTS = Path(make.__file__).parent
FEW = ["--model", "tiny", "--rank", "2", "--targets", "q_proj,v_proj", "--episodes", "12", "--steps", "2", "--prompts", "1"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("warm")
    assert main(["countdown", "--out", str(out), *FEW]) == 0
    return out / "qwen-countdown"


def test_a_run_begins_with_the_same_weights_anywhere(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {path.name for path in made.iterdir()} == {"README.md", "adapter_config.json", "adapter_model.safetensors", "agent.json"}
    assert {tensor.dtype for tensor in load_file(made / "adapter_model.safetensors").values()} == {torch.float16}
    found, base = start_hash(made), load_model("tiny", device="cpu").model
    page = (made / "README.md").read_text()
    assert f"`{found}`" in page and "python -m warm_starts.make countdown --scale qwen-1.5b --model tiny" in page
    moved = [
        name for name, weight in load_model(f"merged:{made}").model.named_parameters() if not torch.equal(weight, base.get_parameter(name))
    ]
    assert moved and all(name.endswith(("q_proj.weight", "v_proj.weight")) for name in moved)
    monkeypatch.chdir(made.parent)
    assert start_hash(Path(made.name)) == found
    monkeypatch.chdir(tmp_path)
    rollout = {"num_groups": 1, "group_size": 2, "max_tokens": 16, "max_context": 512}
    tether.train("countdown", f"merged:{made}", steps=1, out="run", filter="all", evaluation={"prompts": 0}, rollout=rollout)
    saved = load_model(str(next(Path("run/checkpoints").glob("step_*/model")))).model
    assert {name for name, _ in saved.named_parameters()} == {name for name, _ in base.named_parameters()}, "all weights were trained"


def test_other_adapters_under_the_same_name_are_seen(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", str(made)]) == 0
    other = tmp_path / "qwen-countdown"
    other.mkdir()
    for path in made.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    text = (other / "adapter_config.json").read_text()
    (other / "adapter_config.json").write_text(text.replace('"lora_alpha": 4', '"lora_alpha": 5'))
    assert main(["--check", str(made), str(other)]) == 1, "the file is the same, the weights are not"
    assert capsys.readouterr().out.count("not what README.md names") == 1
    with pytest.raises(BadInput, match="exists; choose another --out or --prefix"):
        main(["countdown", "--out", str(tmp_path), *FEW])


def test_adapters_that_are_too_large_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"rank 120 on these layers takes 4\.\d MB; 4 MB are the most"):
        main(["countdown", "--out", str(tmp_path), *FEW, "--rank", "120", "--targets", "all-linear"])
    assert not list(tmp_path.iterdir())


def test_a_file_stands_for_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "gguf_folder", lambda file: shipped_folder(file.stem))
    monkeypatch.setattr(make.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(make.constants, "HF_HUB_OFFLINE", True)
    for _ in range(2):
        stand_in(Path("tiny.gguf"), "some/model")
    model = load_model("some/model", device="cpu").model
    assert model.name_or_path == "some/model"  # what adapters on it are saved with
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0123")
    with pytest.raises(BadInput, match="the hub's cache holds 'some/model' already"):
        stand_in(Path("tiny.gguf"), "some/model")


def test_the_warm_starts_of_the_repository_are_those_that_their_pages_name() -> None:
    for weights in WARM_STARTS.glob("*/adapter_model.safetensors"):
        assert weights.stat().st_size <= MOST_BYTES
        assert f"|{HASH_OF_FILE}|`{file_hash(weights)}`|" in (weights.parent / "README.md").read_text()
        assert '"base_model_name_or_path": "Qwen/Qwen2.5-Coder-1.5B-Instruct"' in (weights.parent / "adapter_config.json").read_text()
