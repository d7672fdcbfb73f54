"""Every config that is checked in loads, says what it is, and states the paper's values: the tables here are copied from the paper, not the code."""

import base64
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tether.algorithms.presets import PRESETS
from tether.cli.main import main
from tether.core.config import load, read_file
from tether.core.errors import BadInput
from tether.core.images import Image
from tether.envs.deepcoder.sandbox.sandbox import describe_isolation
from tether.envs.registry import ENVIRONMENTS, make_env
from tether.runs.store import RunStore
from tether.training.resolve import SMOKE, run_settings
from tether.training.settings import RunSettings

ROOT = Path(__file__).parents[3]
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*") if path.is_file() and path.name != "README.md")
MODEL_FOLDERS = {"qwen2.5-1.5b": ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "models/qwen-{env}"), "smollm2": ("models/smollm2-{env}",)}
"""Folders of runs of one real model, and the names that it may have: its own, or the folder that `tether sft` writes."""
TASKS = [name for name in ENVIRONMENTS.names() if name != "qa"]  # qa is nothing without a file of the user's
PAIRS = list(product(TASKS, PRESETS))

# Appendix B.2; model, budgets of tokens and the period of evaluations are RAGEN's defaults (its config/base.yaml).
PAPER: dict[str, Any] = {
    "model.name": "Qwen/Qwen2.5-3B-Instruct",
    "algorithm.clip_low": 0.2,
    "algorithm.clip_high": 0.28,
    "algorithm.entropy_coef": 0.001,
    "rollout.num_groups": 8,
    "rollout.group_size": 16,
    "rollout.temperature": 1.0,
    "rollout.format_penalty": -0.1,
    "learner.learning_rate": 1e-6,
    "learner.beta1": 0.9,
    "learner.beta2": 0.999,
    "learner.update_batch": 32,
    "diagnosis.every": 5,
    "evaluation.every": 10,
    "evaluation.prompts": 512,
    "evaluation.temperature": 0.5,
    "early_stop.variance_share": 0.1,
    "early_stop.baseline_steps": 10,
    "early_stop.variance_steps": 5,
    "early_stop.success_floor": 0.01,
    "early_stop.success_evaluations": 5,
    "steps": 400,
}
# What changes memory and disk, not the result: our choice.
OURS: dict[str, Any] = {"learner.gradient_checkpointing": True, "checkpoint.every": 50, "checkpoint.keep": 1, "seed": 0}
TOP_P: dict[str, Any] = {  # sections 3.3 and 4.1, appendix G
    "filter.strategy": "top_p",
    "filter.keep": 0.9,
    "filter.score": "reward_variance",
    "filter.eps": 0.01,
    "filter.loss_scale": "kept_ratio",
}
OF_ALGORITHM: dict[str, dict[str, Any]] = {
    "ppo": {**TOP_P, "algorithm.gamma": 1.0, "algorithm.gae_lambda": 1.0, "critic.learning_rate": 1e-5},
    "grpo": TOP_P,
    "dr_grpo": TOP_P,
    # arXiv 2503.14476: equation 11 (dynamic sampling), equation 13 (4,096 of 20,480 tokens)
    "dapo": {
        "filter.strategy": "all",
        "filter.include_zero": False,
        "filter.loss_scale": "none",
        "filter.refill": 3,
        "rollout.overlong_share": 0.2,
    },
}
SHORT = {"rollout.max_tokens": 400, "rollout.max_context": 3600, "rollout.max_rows": 128}
GRID = {"env.options.max_turns": 5, "env.options.actions_per_turn": 2, **SHORT}
ONE_ANSWER = {"env.options.max_turns": 1, **SHORT}
OF_ENVIRONMENT: dict[str, dict[str, Any]] = {
    "sokoban": {**GRID, "env.options.height": 6, "env.options.width": 6, "env.options.boxes": 1},
    "frozen_lake": {**GRID, "env.options.slip": 0.02},
    "metamathqa": {**ONE_ANSWER, "env.options.attempts": 1},
    "countdown": {**ONE_ANSWER, "env.options.use": "at_most_once"},
    "searchqa": {"env.options.max_turns": 5, "rollout.max_tokens": 400, "rollout.max_context": 6000, "rollout.max_rows": 64},
    "webshop": {
        "env.options.max_turns": 9,
        "env.options.reward": "graded",
        "rollout.max_tokens": 400,
        "rollout.max_context": 12000,
        "rollout.max_rows": 32,
    },
    "deepcoder": {"env.options.max_turns": 1, "rollout.max_tokens": 4000, "rollout.max_context": 6000, "rollout.max_rows": 64},
}
GRADED = ("webshop", "deepcoder")
# Table 4, Qwen2.5-3B: peak success without the filter, and the change with it; it has no column for the other environments.
TABLE_4 = {
    "sokoban": {"ppo": "12.9% (+16.0)", "dapo": "16.2% (+5.1)", "grpo": "12.1% (+9.0)", "dr_grpo": "12.1% (-0.4)"},
    "frozen_lake": {"ppo": "67.0% (+10.9)", "dapo": "66.8% (+2.1)", "grpo": "70.9% (-3.0)", "dr_grpo": "23.2% (+0.6)"},
    "metamathqa": {"ppo": "92.6% (+0.6)", "dapo": "90.8% (+2.8)", "grpo": "91.2% (+1.2)", "dr_grpo": "91.2% (+1.4)"},
    "countdown": {"ppo": "97.9% (+0.0)", "dapo": "95.7% (+1.6)", "grpo": "95.7% (+2.2)", "dr_grpo": "96.5% (+1.4)"},
}
TABLE_4_INSTRUCT = {"sokoban": "22.5% (+14.2)", "frozen_lake": "83.6% (+2.3)", "metamathqa": "91.2% (+0.4)", "countdown": "96.3% (-0.6)"}


VL = ROOT / "configs" / "qwen2.5-vl-3b" / "ENV_INPUT.yaml"
TABLE_4_VL = {
    "sokoban_text": "53.0% (+6.0)",
    "sokoban_vision": "65.0% (+12.0)",
    "frozen_lake_text": "16.0% (+53.5)",
    "frozen_lake_vision": "19.5% (+59.5)",
}


def _path(env: str, algo: str) -> Path:
    return ROOT / "configs" / env / f"{algo}.yaml"


def _header(path: Path) -> str:
    """The comment that opens a config."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))])


def _stated(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The dotted keys of nested sections."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _stated(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def test_there_is_one_for_each_environment_and_algorithm() -> None:
    assert len(PAIRS) == 28
    assert {_path(env, algo) for env, algo in PAIRS} | {ROOT / "configs" / "demo.yaml"} <= set(CONFIGS)


def test_a_config_loads_and_says_what_it_is(check_each: Any) -> None:
    def check(path: Path) -> None:
        name = path.relative_to(ROOT)
        settings = load(RunSettings, path)
        folder = path.parent.name
        if folder == "tiny":
            expected = ("tiny-vl", path.stem.removesuffix("_vision")) if path.stem.endswith("_vision") else ("tiny", path.stem)
            assert (settings.model.name, settings.env.name) == expected
        elif folder == VL.parent.name:
            assert path.stem in TABLE_4_VL and path.stem.startswith(settings.env.name)
        elif folder in MODEL_FOLDERS:
            env = settings.env.name
            assert env == path.stem and settings.model.name in [model.format(env=env) for model in MODEL_FOLDERS[folder]]
            made = settings.model.name.startswith("models/")
            assert (f"--out {settings.model.name}" in _header(path)) == made, "the header gives the command that makes the model"
        elif folder != "configs":
            assert (settings.env.name, settings.algorithm.name) == (folder, path.stem)
        header = _header(path)
        assert f"tether train --config {name}" in header, "the header gives the command that trains with this very file"
        assert "# Expected: " in header

    check_each(CONFIGS, check)


def test_the_values_of_the_paper_and_ours_are_stated(check_each: Any) -> None:
    def check(pair: tuple[str, str]) -> None:
        env, algo = pair
        expected = {**PAPER, **OURS, **OF_ALGORITHM[algo], **OF_ENVIRONMENT[env]}
        if algo == "dapo":
            expected["filter.score"] = "reward_variance" if env in GRADED else "outcome_variance"
        stated = _stated(read_file(_path(env, algo)))
        assert {key: stated.get(key, "not stated") for key in expected} == expected
        settings = load(RunSettings, _path(env, algo)).model_dump()
        resolved = _stated(settings)
        assert {key: resolved[key] for key in expected} == expected, "loading changes what the file states"

    check_each(PAIRS, check)


def test_the_page_of_the_configs_tells_the_same_values() -> None:
    page = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| `([^`]+)` \| .+ \|$", page, re.MULTILINE)
    assert {key: yaml.safe_load(value) for key, value in rows} == PAPER


def test_a_number_in_a_header_is_the_papers(check_each: Any) -> None:
    def check(pair: tuple[str, str]) -> None:
        env, algo = pair
        header = " ".join(_header(_path(env, algo)).replace("#", " ").split())
        if env not in TABLE_4:
            assert "Not measured here, and the paper gives no number" in header and "%" not in header
            return
        assert (
            f"not measured here. Paper, Table 4, peak validation success without its filter (change with it): {TABLE_4[env][algo]}"
            in header
        )
        assert "with Qwen2.5-3B, the base model" in header
        assert (f"{TABLE_4_INSTRUCT[env]} with Qwen2.5-3B-Instruct" in header) == (algo == "ppo")

    check_each(PAIRS, check)


@pytest.mark.parametrize("name", TABLE_4_VL)
def test_configs_of_the_model_that_sees_are_the_papers_with_another_model(name: str) -> None:
    """They differ from the PPO config of their environment in the model and in what is shown, and in nothing else."""
    env, _, kind = name.rpartition("_")
    path = VL.with_stem(name)
    stated, like = _stated(read_file(path)), _stated(read_file(_path(env, "ppo")))
    differing = {key: value for key, value in stated.items() if like.get(key) != value}
    assert like.keys() <= stated.keys() and differing.pop("model.name") == "Qwen/Qwen2.5-VL-3B-Instruct"
    shown = {"text": {"observation": "grid"}, "vision": {"observation": "image", "tile": 56, "style": "sprites"}}[kind]
    assert differing == {f"env.options.{key}": value for key, value in {**shown, "few_shot": 0}.items()}
    header = " ".join(_header(path).replace("#", " ").split())
    assert f"not measured here. Paper, Table 4, peak validation success without its filter (change with it): {TABLE_4_VL[name]}" in header
    built = make_env(env, **load(RunSettings, path).env.options)
    image = built.reset(0).image
    assert built.shows_images == (image is not None) == (kind == "vision")  # type: ignore[attr-defined]
    if image is not None:
        assert image.shape[0] == image.shape[1] == {"sokoban": 336, "frozen_lake": 224}[env], (
            "whole tokens of 28 pixels: nothing is resized"
        )


@pytest.mark.parametrize("env", TASKS)
def test_the_environment_of_a_config_builds_offline(env: str) -> None:
    sections = [load(RunSettings, _path(env, algo)).env for algo in PRESETS]
    assert all(section == sections[0] for section in sections), "the algorithms of an environment play the same game"
    options = dict(sections[0].options)
    if env == "deepcoder":
        options["isolation"] = describe_isolation().name or "process"
    built = make_env(env, **options)
    assert built.max_turns == OF_ENVIRONMENT[env]["env.options.max_turns"]
    assert built.reset(seed=0).text.startswith(f"Turn 1 of {built.max_turns}")


def test_smoke_fits_any_config_into_tiny(check_each: Any) -> None:
    def check(path: Path) -> None:
        settings, stated = load(RunSettings, path, SMOKE), load(RunSettings, path)
        assert (settings.model.name, settings.steps, settings.critic.model) == ("tiny", 2, None)
        assert settings.rollout.max_tokens < settings.rollout.max_context <= 1024
        assert settings.rollout.num_groups * settings.rollout.group_size <= 16 and settings.evaluation.prompts <= 16
        assert (settings.learner.learning_rate, settings.critic.learning_rate) == (1e-4, 1e-3)
        assert settings.env.options == {"instructions": "plain", **stated.env.options}, "tiny knows the plain wording alone"
        assert settings.filter.strategy == "all", "tiny may know nothing of the environment; it is to make an update all the same"
        same = ("lora", "early_stop", "seed")
        assert settings.model_dump(include=set(same)) == stated.model_dump(include=set(same)), "the rest of the run is the config's own"
        assert settings.algorithm.name == stated.algorithm.name

    check_each(CONFIGS, check)


def test_smoke_takes_the_small_model_that_sees_for_a_file_with_pictures(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "words.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    png = base64.b64encode(Image.of(np.zeros((8, 8, 3), dtype=np.uint8)).png).decode()
    (tmp_path / "pictures.jsonl").write_text("".join(f"{json.dumps({**row, 'image': png})}\n" for row in rows))
    for name, model in (("words", "tiny"), ("pictures", "tiny-vl")):
        given = {"env": {"name": "qa", "options": {"data": str(tmp_path / f"{name}.jsonl")}}}
        assert run_settings(None, None, given, resume=False, smoke=True).model.name == model
    with pytest.raises(BadInput, match="tiny"):
        run_settings(None, None, {**given, "model": {"name": "tiny"}}, resume=False, smoke=True)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("env", "algo"), [("countdown", "ppo"), ("metamathqa", "dapo")])
def test_smoke_trains(env: str, algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cheapest two: one answer an episode. One has a critic and learns; of the other, refill and a prompt that `tiny` cannot answer."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--config", str(_path(env, algo)), "--smoke", "--out", "run"])
    assert not stopped.value.code
    store = RunStore.open(tmp_path / "run")
    records = store.steps()
    assert [record.step for record in records] == [0, 1, 2]
    assert store.about()["model"] == "tiny" and (store.about()["env"], store.about()["algorithm"]) == (env, algo)
    metrics = [record.metrics for record in records[1:]]
    if algo == "ppo":
        assert any(step["update/skipped"] == 0 and step["update/value_loss"] > 0 for step in metrics)
        assert all(step["groups/sampled"] == 2 for step in metrics)
    else:
        assert all(step["groups/rounds"] == 4 or step["groups/kept"] == 2 for step in metrics)
    assert (tmp_path / "run" / "report.html").is_file()
