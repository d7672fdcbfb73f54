"""Which wording a run plays: runs of tether 0.1 go on as they were made, `tiny` is played in the wording it was trained on."""

import shutil
from pathlib import Path

import pytest

from tether.core.config import dump_yaml
from tether.runs.store import RunStore
from tether.training.api import open_run
from tether.training.resolve import evaluation_settings, resolve_settings

RUN = Path(__file__).parents[2] / "fixtures" / "run_of_0_1" / "run"
LINE = "this run was made by tether 0.1.0: it keeps the instructions of that version (instructions=plain, lenient=false)"


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    shutil.copytree(RUN, tmp_path / "run")
    return tmp_path / "run"


def test_a_resumed_run_keeps_its_wording_and_says_so(old_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, settings = open_run(old_run, None, {}, resume=True, smoke=False)
    assert (settings.env.options["instructions"], settings.env.options["lenient"]) == ("plain", False)
    assert caplog.text.count(LINE) == 1
    assert "instructions" not in RunStore.open(old_run).config()["env"]["options"]  # nothing was changed, nothing is written


def test_with_more_steps_the_record_states_the_wording(old_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, settings = open_run(old_run, None, {"steps": 9}, resume=True, smoke=False)
    store.replace_config(dump_yaml(settings))  # as the run does once its checkpoint is accepted
    store.close()
    assert RunStore.open(old_run).config()["env"]["options"]["instructions"] == "plain"
    caplog.clear()
    open_run(old_run, None, {}, resume=True, smoke=False)
    assert LINE not in caplog.text


def test_a_run_that_is_older_than_examples_as_turns_goes_on_without_them(old_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = old_run / "config.yaml"
    path.write_text(path.read_text().replace("max_turns: 5", "max_turns: 5\n    instructions: example\n    lenient: true", 1))
    _, settings = open_run(old_run, None, {}, resume=True, smoke=False)
    assert settings.env.options["few_shot"] == 0
    assert LINE not in caplog.text  # its prompts are as they were: nothing to say


def test_an_evaluation_of_the_run_plays_its_wording(old_run: Path) -> None:
    options = evaluation_settings(str(old_run), None, False, {}).env.options
    assert (options["instructions"], options["lenient"]) == ("plain", False)
    other = evaluation_settings(str(old_run), "countdown", False, {}).env.options
    assert "instructions" not in other


def test_an_option_that_the_record_states_is_kept(old_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = old_run / "config.yaml"
    path.write_text(path.read_text().replace("max_turns: 5", "max_turns: 5\n    instructions: paper\n    lenient: true", 1))
    _, settings = open_run(old_run, None, {}, resume=True, smoke=False)
    assert (settings.env.options["instructions"], settings.env.options["lenient"]) == ("paper", True)
    assert LINE not in caplog.text


def test_tiny_is_played_in_the_wording_it_was_trained_on() -> None:
    def wording(model: str, **options: str) -> str:
        given = {"env": {"name": "countdown", "options": options}, "model": {"name": model}}
        return str(resolve_settings(None, given, {}).env.options["instructions"])

    assert (wording("tiny"), wording("tiny", instructions="paper"), wording("smollm2")) == ("plain", "paper", "example")
    assert evaluation_settings("tiny", "sokoban", False, {}).env.options["instructions"] == "plain"
