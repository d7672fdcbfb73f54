"""What `tether train` writes down of an environment: every option it was made with, no secret, and a folder that can be made."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tether import make_env
from tether.core.errors import BadInput
from tether.training.api import ALLOCATOR_VARIABLES, _create, grow_allocator_segments
from tether.training.resolve import SECRET_NAME, resolve_settings


def _written(folder: Path, name: str, options: dict[str, Any]) -> dict[str, Any]:
    settings = resolve_settings(None, {"env": {"name": name, "options": options}}, {})
    _create(folder, settings, [])
    written: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())["env"]["options"]
    return written


def test_defaults_are_written_out(tmp_path: Path) -> None:
    """The noun test decides WebShop's score, so a run has to tell which one it used."""
    written = _written(tmp_path / "run", "webshop", {"max_turns": 4})
    assert (written["nouns"], written["reward"], written["max_turns"]) == ("light", "graded", 4)
    assert "split" not in written


def test_a_split_that_was_asked_for_is_written(tmp_path: Path) -> None:
    assert _written(tmp_path / "run", "countdown", {"split": "test"})["split"] == "test"


def test_a_token_is_not_written(tmp_path: Path) -> None:
    settings = resolve_settings(
        None, {"env": {"name": "searchqa", "options": {"retriever": "http://127.0.0.1:9", "retriever_token": "s3cret"}}}, {}
    )
    _create(tmp_path / "run", settings, [])
    assert settings.env.options["retriever_token"] == "s3cret"  # the run itself has it
    assert "s3cret" not in (tmp_path / "run" / "config.yaml").read_text()


def test_no_secret_of_any_environment_is_written(tmp_path: Path) -> None:
    options = {"retriever": "http://127.0.0.1:9", "retriever_token": "s3cret"}
    given = {"env": {"name": "searchqa", "options": options}, "evaluation": {"env": {"name": "searchqa", "options": options}}}
    settings = resolve_settings(None, given, {})
    _create(tmp_path / "run", settings, [])
    assert settings.evaluation.env is not None and settings.evaluation.env.options["retriever_token"] == "s3cret"
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path


@pytest.mark.parametrize("name", ["token", "api_key", "db_password", "secret", "hub_token", "AWS_SECRET", "credentials"])
def test_options_with_the_name_of_a_secret(name: str) -> None:
    assert SECRET_NAME.search(name)


@pytest.mark.parametrize("name", ["max_tokens", "tokens", "secretary", "key", "passwords_file"])
def test_and_those_without(name: str) -> None:
    assert not SECRET_NAME.search(name)


@pytest.mark.parametrize("address", ["http://user:s3cret@127.0.0.1:9", "http://127.0.0.1:9/?api_key=s3cret"])
def test_an_address_that_holds_a_secret_is_refused(address: str) -> None:
    with pytest.raises(BadInput, match="should hold no password and no query") as refused:
        make_env("searchqa", retriever=address)
    assert "s3cret" not in str(refused.value)


def test_a_folder_for_a_name_with_a_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = _create(None, resolve_settings(None, {"env": {"name": "tether.envs.countdown.env:Countdown"}}, {}), [])
    assert folder.parent.name == "runs" and folder.name.startswith("tether_envs_countdown_env_Countdown-grpo-")


def test_segments_grow_unless_the_user_has_set_the_allocator_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads the variable when it first uses a card."""
    first, second = ALLOCATOR_VARIABLES
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "max_split_size_mb:64")
        monkeypatch.delenv(first if name == second else second, raising=False)
        grow_allocator_segments()
        assert {key: os.environ.get(key) for key in ALLOCATOR_VARIABLES if key in os.environ} == {name: "max_split_size_mb:64"}
        monkeypatch.delenv(name)
    grow_allocator_segments()
    assert os.environ.pop(first) == "expandable_segments:True" and second not in os.environ
