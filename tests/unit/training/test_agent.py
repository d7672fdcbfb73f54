"""A trained agent is asked as it was trained, wherever its weights go: a checkpoint, an export, a model folder; and on equal terms with others."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import tether
from tether.cli.main import main
from tether.core.errors import BadInput
from tether.runs.store import RunStore
from tether.training.agent import AGENT, Agent
from tether.training.export import export_checkpoint
from tether.training.resolve import comparison_settings, evaluation_settings, run_settings

OPTIONS = {"size": 5, "max_turns": 3}
ROLLOUT = {"max_tokens": 40, "num_groups": 1, "group_size": 2, "context": "last_k", "last_k": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent") / "run"
    tether.train(
        "frozen_lake",
        steps=1,
        out=folder,
        options=OPTIONS,
        rollout=ROLLOUT,
        filter="all",
        evaluation={"prompts": 2},
        diagnosis={"every": 0},
        also=[{"name": "sokoban", "options": {"max_turns": 2}}],
    )
    return folder


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    out = run.parent / "agent"
    export_checkpoint(RunStore.open(run), run / "checkpoints" / "best", 1, out, "float32")
    return out


def _asked(settings: Any) -> tuple[Any, ...]:
    lake = next(env.options for env in settings.environments() if env.name == "frozen_lake")
    names = ("max_tokens", "context", "last_k", "max_context")
    return lake["size"], lake["max_turns"], lake["instructions"], *(getattr(settings.rollout, name) for name in names)


TERMS = (5, 3, "plain", 40, "last_k", 1, 3600)


def test_naming_the_runs_own_environment_keeps_its_options(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = evaluation_settings(str(run), "frozen_lake", False, {})
    assert _asked(named) == TERMS and [env.name for env in named.environments()] == ["frozen_lake"]
    assert "is asked as it was trained: frozen_lake with" in caplog.text and "size=5" in caplog.text
    own = evaluation_settings(str(run), None, False, {})
    assert _asked(own) == TERMS and len(own.environments()) == 2
    given = evaluation_settings(str(run), "frozen_lake", False, {"env": {"options": {"size": 4}}, "rollout": {"max_tokens": 33}})
    assert (given.env.options["size"], given.env.options["max_turns"], given.rollout.max_tokens) == (4, 3, 33)


@pytest.mark.parametrize("where", ["export", "best", "copied"])
def test_the_terms_travel_with_the_weights(where: str, run: Path, exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = exported if where == "export" else run / "checkpoints" / "best" / "model"
    if where == "copied":
        folder = shutil.copytree(folder, tmp_path / "elsewhere")
    assert _asked(evaluation_settings(str(folder), "frozen_lake", False, {})) == TERMS
    assert f"'{folder}' is asked as it was trained" in caplog.text
    played = evaluation_settings(str(folder), None, False, {})  # the folder knows its environments
    assert [env.name for env in played.environments()] == ["frozen_lake", "sokoban"] and _asked(played) == TERMS
    more = run_settings(None, None, {"env": {"name": "frozen_lake"}, "model": {"name": str(folder)}}, resume=False, smoke=False)
    assert _asked(more) == TERMS
    other = evaluation_settings(str(folder), "countdown", False, {})  # of an environment that it does not know: the wording
    assert other.env.options == {"instructions": "plain"}


def test_a_model_is_compared_with_a_run_on_equal_terms(run: Path, exported: Path, caplog: pytest.LogCaptureFixture) -> None:
    for targets in (["tiny", str(run)], [str(run), "tiny"], ["tiny", str(exported)]):
        assert {_asked(settings) for settings in comparison_settings(targets, "frozen_lake", False, {})} == {TERMS}
    assert "'tiny' is asked as" in caplog.text and "to compare them on equal terms" in caplog.text
    assert [env.name for env in comparison_settings(["tiny", str(run)], None, False, {})[0].environments()] == ["frozen_lake", "sokoban"]
    served, _ = comparison_settings(["http://localhost:9#big", str(run)], "frozen_lake", False, {})
    assert served.env.options["size"] == 5 and served.rollout.max_tokens == 400  # a served model has lengths of its own


def test_the_same_number_whatever_names_the_agent(run: Path, exported: Path) -> None:
    rates = {
        str(target): tether.evaluate(target, "frozen_lake", 4, temperature=0).record["instances"]
        for target in (run, exported, run / "checkpoints" / "best" / "model")
    }
    assert len({json.dumps(found) for found in rates.values()}) == 1


def test_a_folder_without_the_file_inside_its_run_is_asked_like_the_run(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "old")
    model = tmp_path / "old" / "checkpoints" / "best" / "model"
    (model / AGENT).unlink()
    assert _asked(evaluation_settings(str(model), "frozen_lake", False, {})) == TERMS


def test_an_evaluation_in_which_no_episode_can_begin_stops_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "tiny", "--env", "frozen_lake", "--prompts", "2", "--max-tokens", "1000", "--json"]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    said = capsys.readouterr()
    assert stopped.value.code == 2 and not said.out
    assert "none of 2 episodes could begin: the first prompt and a response of 1000 tokens do not fit into the context" in said.err


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 99, "environments": {}, "rollout": {}}', "[" * 5000])
def test_a_damaged_file_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / AGENT).write_text(text)
    with pytest.raises(BadInput, match=rf"{re.escape(AGENT)}' cannot be read .*delete it"):
        Agent.read(str(tmp_path))


def test_a_received_folder_imports_nothing_of_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sent_module.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)
    for environments in ({"sent_module:Env": {}}, {"qa": {"reward": "sent_module:reward"}}):
        (tmp_path / AGENT).write_text(json.dumps({"version": 1, "environments": environments, "rollout": {}}))
        with pytest.raises(BadInput, match="'sent_module' is not installed"):
            Agent.read(str(tmp_path))


def test_files_of_the_machine_are_left_out(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    Agent({"qa": {"file": str(data), "max_turns": 1}}, {"max_tokens": 9}).write(tmp_path)
    assert json.loads((tmp_path / AGENT).read_text())["environments"] == {"qa": {"max_turns": 1}}
