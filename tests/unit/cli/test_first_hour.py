"""What a newcomer reaches for first: -h, settings, configs by name, completion, quiet and JSON output."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tether
from tether.cli import options
from tether.cli.main import main
from tether.cli.train import _continues
from tether.core.config import ConfigError, config_names, find_config, known_keys
from tether.core.setting_docs import field_meanings, setting_docs
from tether.envs.qa.env import QAOptions
from tether.envs.registry import ENVIRONMENTS, find_class
from tether.runs.store import RunStore
from tether.training.resolve import CPU_PROMPTS, LARGE_CPU_PROMPTS, overrides, run_settings
from tether.training.settings import RunSettings
from tether.training.synonyms import WORDS

ROOT = Path(__file__).parents[3]


def _run(words: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    return int(stopped.value.code or 0)


@pytest.mark.parametrize("verb", [[], ["train"], ["models"], ["models", "get"], ["sweep"]])
def test_short_help(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run([*verb, "-h"]) == 0
    short = capsys.readouterr().out
    assert _run([*verb, "--help"]) == 0
    assert short == capsys.readouterr().out and "Examples:" in short


# --- settings ---


def test_every_setting_has_a_meaning_and_the_default_of_the_code() -> None:
    docs = {doc.key: doc for doc in setting_docs(RunSettings)}
    every = known_keys(RunSettings)
    assert list(docs) == [key for key in every if not any(other.startswith(f"{key}.") for other in every)]
    assert not [key for key, doc in docs.items() if not doc.meaning]
    size = docs["rollout.group_size"]
    assert (size.default, size.allowed, size.meaning) == ("16", "whole number, at least 1, at most 100000", "Trajectories per prompt, G.")
    assert docs["env.name"].default == "required" and docs["filter.band"].default == "null"
    assert docs["diagnosis.scopes"].default == "[first_turn, trajectory]"


@pytest.mark.parametrize("name", ENVIRONMENTS.names())
def test_options_of_environments_have_meanings_too(name: str) -> None:
    assert {"split", "max_turns"} <= set(field_meanings(find_class(name).Options))


def test_every_option_of_qa_has_a_meaning() -> None:
    assert set(field_meanings(QAOptions)) == set(QAOptions.model_fields)


def test_settings_by_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["settings", "lora"]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == ["lora.rank", "lora.alpha", "lora.targets"]
    assert _run(["settings", "learner.beta", "--json"]) == 0
    assert [row["key"] for row in json.loads(capsys.readouterr().out)] == ["learner.beta1", "learner.beta2"]
    assert _run(["settings", "group_sise"]) == 2
    assert "no setting is called or explained as 'group_sise': did you mean 'group_size'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("lr", "learner.learning_rate"),
        ("learning rate", "learner.learning_rate"),
        ("batch size", "rollout.num_groups"),
        ("kl", "algorithm.kl_coef"),
        ("max_new_tokens", "rollout.max_tokens"),
        ("context length", "rollout.max_context"),
        ("temperature", "rollout.temperature"),
        ("Group-Size", "rollout.group_size"),
        ("epochs", "learner.epochs"),
        ("seed", "seed"),
        ("save every", "checkpoint.every"),
        ("optimiser update", "learner.update_batch"),  # by its meaning
    ],
)
def test_settings_are_found_by_what_people_call_them(words: str, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["settings", *words.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["key"] == first


def test_words_of_other_trainers_are_taken_for_settings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("env: {name: frozen_lake}\nlearner: {lr: 3.0e-5, epochs: 2}\nrollout: {n: 5}\n")
    settings = run_settings(None, file, overrides(["kl=0.2", "max_new_tokens=50", "save_steps=7", "few_shot=1"]), resume=False, smoke=False)
    assert (settings.learner.learning_rate, settings.learner.epochs, settings.rollout.group_size) == (3e-5, 2, 5)
    assert (settings.algorithm.kl_coef, settings.rollout.max_tokens, settings.checkpoint.every) == (0.2, 50, 7)
    assert settings.env.options["few_shot"] == 1
    last = run_settings(None, file, overrides(["lr=1e-3"]), resume=False, smoke=False)  # what is given last counts, by whatever word
    assert last.learner.learning_rate == 1e-3
    named = {key for keys in WORDS.values() for key in keys if not key.startswith(("--", "env.options."))}
    assert named <= set(known_keys(RunSettings))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "frozen_lake", "--set", "learner.lr=-1"], "config key 'learner.learning_rate': got -1"),
        (["train", "frozen_lake", "--lr", "-1"], "config key 'learner.learning_rate': got -1"),
        (["train", "frozen_lake", "--set", "batch_size=4"], "did you mean 'rollout.num_groups' or 'rollout.group_size' or"),
        (["train", "frozen_lake", "--batch-size", "4"], "did you mean --set rollout.num_groups=... or"),
        (["train", "frozen_lake", "--set", "lr=1", "--set", "learner.learning_rate=2"], "unknown config key 'lr': did you mean"),
        (["train", "--data", "no.jsonl"], "qa: data='no.jsonl' does not exist"),
        (["eval", "tiny", "--data", "no.jsonl"], "qa: data='no.jsonl' does not exist"),
        (["eval", "tiny", "--set", "data=no.jsonl"], "qa: data='no.jsonl' does not exist"),
        (["eval", "tiny", "--env", "frozen_lake", "--data", "no.jsonl"], "unknown frozen_lake option key 'data'"),
        (["sweep", "frozen_lake", "--set", "lr=1,-1"], "config key 'learner.learning_rate': got -1"),
        (["sft", "frozen_lake", "--out", "x", "--set", "lr=-1"], "key 'learner.learning_rate': got -1"),
    ],
)
def test_words_that_people_try(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(words) == 2
    assert said in capsys.readouterr().err


# --- configs ---


def test_configs_are_part_of_the_package_and_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = {path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    assert set(config_names()) == shipped and "sokoban/ppo" in shipped
    for name in ("sokoban/ppo", "configs/sokoban/ppo.yaml", "sokoban/ppo.yaml", Path("configs/sokoban/ppo.yaml")):
        assert find_config(name).read_text() == (ROOT / "configs/sokoban/ppo.yaml").read_text()
    (tmp_path / "demo.yaml").write_text("steps: 3\n")
    assert find_config("demo.yaml") == Path("demo.yaml")  # a file that is there wins


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sokoban/pop", "unknown config 'sokoban/pop', and no such file: did you mean 'sokoban/ppo'? (known: countdown/dapo, "),
        (
            "sokobann/ppo.yaml",
            "config file 'sokobann/ppo.yaml' does not exist; check the path, or name a config that comes with Tether: did you mean 'sokoban/ppo'?",
        ),
        ("folder", "config 'folder' is a folder; give a file"),
    ],
)
def test_near_misses_of_configs(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError) as caught:
        find_config(name)
    assert str(caught.value).startswith(said)


# --- completion ---


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tether train --algo d", ["dapo", "dr_grpo"]),
        ("tether train --config sokoban/d", ["sokoban/dapo", "sokoban/dr_grpo"]),
        ("tether settings rollout.group", ["rollout.group_size"]),
    ],
)
def test_the_shell_completes_names(typed: str, offered: list[str]) -> None:
    """Through the entry point, as the shell calls it; no torch is loaded for it."""
    words = typed.split()
    env = {**os.environ, "_TETHER_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    code = "import sys; sys.argv = ['tether']\nfrom tether.cli.main import main\n"
    code += "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.split() == offered and done.stderr.split()[-1] == "False"


def test_completers() -> None:
    assert options.complete_env("froz") == ["frozen_lake"] and options.complete_model("sm") == ["smollm2"]
    assert options.complete_filter("top") == ["top_p", "top_k"] and options.complete_override("lora.r") == ["lora.rank="]
    assert options.complete_config_or_env("qa") == ["qa"]


# --- validation on a CPU ---


def test_a_cpu_plays_fewer_validation_prompts_unless_told_otherwise(tmp_path: Path) -> None:
    def prompts(given: dict[str, Any], config: Path | None = None, *, smoke: bool = False) -> int | None:
        on_cpu = {"env": {"name": "frozen_lake"}, "model": {"device": "cpu"}, **given}
        return run_settings(None, config, on_cpu, resume=False, smoke=smoke).evaluation.prompts

    assert prompts({}) == CPU_PROMPTS == 128
    assert prompts({"model": {"name": "smollm2", "device": "cpu"}}) == LARGE_CPU_PROMPTS == 16
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"0" * 1000)
    assert prompts({"model": {"name": str(folder), "device": "cpu"}}) == CPU_PROMPTS  # as small as tiny
    assert prompts({"evaluation": {"prompts": 512}}) == 512
    assert prompts({}, smoke=True) == 4
    config = tmp_path / "config.yaml"
    config.write_text("evaluation: {prompts: 512}\n")
    assert prompts({}, config) == 512
    assert prompts({"model": {"device": "cuda"}}) == 512


# --- output ---


def test_json_and_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    small = [
        "--smoke",
        "--steps",
        "1",
        "--set",
        "rollout.max_tokens=16",
        "--set",
        "evaluation.prompts=2",
        "--set",
        "env.options.max_turns=1",
    ]
    assert _run(["train", "frozen_lake", *small, "--device", "cpu", "--out", "run", "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["run"], told["finished"], told["step"], sorted(told["validation_success"])) == ("run", "all 1 steps done", 1, ["0", "1"])
    assert "report: run/report.html" in err and "step 1/1" not in err
    assert "device: cpu" in Path("run/config.yaml").read_text()
    assert _continues(RunStore.open(Path("run")), 3) == "resuming after step 1 of 3"
    assert _continues(RunStore.open(Path("run")), 1) == "all 1 steps are done; --steps with a larger number continues the run"
    seen: list[str | None] = []

    class Look(tether.Callback):
        def on_step_end(self, record: Any, timings: Any) -> None:
            seen.append(RunStore.open(Path("run")).finished)

    run = tether.train(out="run", resume=True, steps=2, callbacks=[Look()])
    assert (seen, run.finished) == ([None], "all 2 steps done")  # while it goes on, an extended run is not finished
    for words in (["models"], ["envs"], ["envs", "qa"]):
        assert _run([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)
