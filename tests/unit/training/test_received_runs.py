"""A run folder or a settings file that somebody sent runs no code: not by its environment, not by a program it names, not by its model."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tether.core.config import dump_yaml, validate
from tether.core.errors import BadInput, ConfigError, ModelUnavailable
from tether.envs.registry import check_received, make_env
from tether.models.load import load_model
from tether.runs.store import RunStore
from tether.training.checkpoint import save_checkpoint
from tether.training.memory import shape_of
from tether.training.resolve import evaluation_settings, run_settings
from tether.training.settings import RunSettings

MODULE = """
import pathlib
from tether.envs.base import TurnOptions
from tether.core.types import Observation

pathlib.Path(__file__).with_name("imported").touch()

class Sort:
    name, max_turns, instructions, Options = "sort", 1, "Sort.", TurnOptions
    def __init__(self, options): self.options = options
    def reset(self, seed, *, env_seed=None): return Observation("1 2")
    def step(self, answer): raise NotImplementedError
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a module in it that leaves a trace when it is imported."""
    (tmp_path / "sent_env.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    sys.modules.pop("sent_env", None)


@pytest.fixture
def sent(folder: Path, tiny: Any) -> Path:
    """A run folder whose settings name that module."""
    settings = validate(RunSettings, {"env": {"name": "frozen_lake"}, "steps": 4})
    config = yaml.safe_load(dump_yaml(settings))
    config["env"] = {"name": "sent_env:Sort", "options": {}}
    store = RunStore.create(folder / "run", yaml.safe_dump(config), {})
    save_checkpoint(store.checkpoints, 1, tiny.model, tiny.tokenizer, {}, keep=1)
    store.close()
    return store.folder


def _imported(folder: Path) -> bool:
    return (folder / "imported").exists()


def _change(run: Path, **sections: Any) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    for section, values in sections.items():
        config[section] = {**(config.get(section) or {}), **values}
    (run / "config.yaml").write_text(yaml.safe_dump(config))


REFUSED = r"names the environment 'sent_env:Sort', and 'sent_env' is not installed; .* only if you name it yourself"


def test_resuming_imports_no_module_of_the_current_folder(folder: Path, sent: Path) -> None:
    with pytest.raises(BadInput, match=REFUSED):
        run_settings(sent, None, {}, resume=True, smoke=False)
    with pytest.raises(BadInput, match=REFUSED):
        run_settings(sent, None, {"steps": 9}, resume=True, smoke=False)
    assert not _imported(folder)
    named = run_settings(sent, None, {"env": {"name": "sent_env:Sort"}, "steps": 9}, resume=True, smoke=False)
    assert (named.env.name, named.steps, _imported(folder)) == ("sent_env:Sort", 9, True)


def test_other_settings_stay_the_runs_own(sent: Path) -> None:
    for given in ({"env": {"name": "sokoban"}}, {"env": {"name": "sent_env:Sort", "options": {}}}, {"also": [{"name": "sokoban"}]}):
        with pytest.raises(ConfigError, match="--resume continues with the run's own settings"):
            run_settings(sent, None, given, resume=True, smoke=False)


def test_evaluating_imports_none_either(folder: Path, sent: Path) -> None:
    with pytest.raises(BadInput, match=REFUSED):
        evaluation_settings(str(sent), None, False, {})
    assert evaluation_settings(str(sent), "frozen_lake", False, {}).env.name == "frozen_lake"
    _change(sent, env={"name": "frozen_lake"}, evaluation={"env": {"name": "sent_env:Sort"}})
    with pytest.raises(BadInput, match=REFUSED):
        evaluation_settings(str(sent), None, False, {})
    assert not _imported(folder)
    assert evaluation_settings(str(sent), "sent_env:Sort", False, {}).env.name == "sent_env:Sort"


def test_a_settings_file_imports_none_either(folder: Path) -> None:
    (folder / "settings.yaml").write_text("env:\n  name: sent_env:Sort\n")
    with pytest.raises(BadInput, match=rf"settings file '.*settings.yaml' {REFUSED}"):
        run_settings(None, folder / "settings.yaml", {}, resume=False, smoke=False)
    assert not _imported(folder)
    assert (
        run_settings(None, folder / "settings.yaml", {"env": {"name": "sent_env:Sort"}}, resume=False, smoke=False).env.name
        == "sent_env:Sort"
    )


def test_what_is_installed_or_imported_or_chosen_may_be_named_by_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_received("frozen_lake", "a file")
    check_received("http://127.0.0.1:1/x", "a file")
    check_received("tether.envs.sokoban.env:Sokoban", "a file")
    check_received("colorsys:Nothing", "a file")  # of the standard library: found, and not imported here
    for path in ("", ".", str(folder), str(folder / ".." / folder.name)):  # however the current folder came onto the search path
        monkeypatch.setattr(sys, "path", [path, *sys.path])
        with pytest.raises(BadInput, match=REFUSED):
            check_received("sent_env:Sort", "a file")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/elsewhere", str(folder)]))  # the user's own choice
    check_received("sent_env:Sort", "a file")
    monkeypatch.delenv("PYTHONPATH")
    make_env("sent_env:Sort")  # the user's own call
    check_received("sent_env:Sort", "a file")


@pytest.mark.parametrize(
    ("what", "sections"),
    [("score", {"filter": {"score": "sent_env:Sort"}}), ("reward", {"env": {"name": "qa", "options": {"reward": "sent_env:Sort"}}})],
)
def test_functions_that_a_run_folder_names_are_not_imported_either(
    folder: Path, sent: Path, monkeypatch: pytest.MonkeyPatch, what: str, sections: dict[str, Any]
) -> None:
    _change(sent, **{"env": {"name": "frozen_lake"}, **sections})
    with pytest.raises(BadInput, match=f"names the {what} 'sent_env:Sort', and 'sent_env' is not installed; .* set PYTHONPATH=."):
        run_settings(sent, None, {}, resume=True, smoke=False)
    assert not _imported(folder)
    monkeypatch.setenv("PYTHONPATH", ".")
    monkeypatch.syspath_prepend(folder)  # as Python does with that variable
    run_settings(sent, None, {}, resume=True, smoke=False)  # chosen by the user


@pytest.mark.parametrize("engine", ["vllm", "ray"])
def test_a_run_folder_starts_no_program(sent: Path, engine: str) -> None:
    """Neither vLLM on this machine nor one that Ray places."""
    _change(sent, env={"name": "frozen_lake"}, rollout={"engine": engine}, server={"vllm_command": "/tmp/evil"})
    with pytest.raises(BadInput, match=r"has server.vllm_command='/tmp/evil', and starts a program with it; .* --set server.vllm_command="):
        run_settings(sent, None, {}, resume=True, smoke=False)
    given = {"server": {"vllm_command": "/tmp/evil"}}
    assert run_settings(sent, None, given, resume=True, smoke=False).server.vllm_command == "/tmp/evil"
    assert evaluation_settings(str(sent), None, False, {"rollout": {"engine": "vllm"}}).server.vllm_command == "vllm"
    _change(sent, server={"vllm_command": "vllm", "vllm_args": ["--middleware", "evil.Code"]})
    with pytest.raises(BadInput, match=r"has server.vllm_args="):
        run_settings(sent, None, {}, resume=True, smoke=False)


def test_code_that_comes_with_a_model_is_not_run_and_nobody_is_asked(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*args: Any) -> str:
        raise AssertionError("a question on stdin")

    monkeypatch.setattr("builtins.input", ask)
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n")
    with pytest.raises(
        ModelUnavailable, match=r"it brings code of its own \(auto_map in its config.json\), which Tether does not run"
    ) as caught:
        load_model(str(tmp_path), device="cpu")
    assert "trust_remote_code" not in str(caught.value) and not (tmp_path / "imported").exists()
    assert shape_of(str(tmp_path)) is None


def test_a_native_run_that_goes_on_with_servers_gets_their_importance_cap(sent: Path) -> None:
    """Its record says null because the native engine needs no correction; nobody chose that for servers."""
    _change(sent, env={"name": "frozen_lake"}, algorithm={"importance_cap": None})
    given = {"rollout": {"engine": "http://h:1"}}
    assert run_settings(sent, None, given, resume=True, smoke=False).algorithm.importance_cap == 2.0
    _change(sent, rollout=given["rollout"])
    assert run_settings(sent, None, {}, resume=True, smoke=False).algorithm.importance_cap is None
