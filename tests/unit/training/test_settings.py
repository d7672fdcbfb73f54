"""Settings: the paper's defaults, what is filled in, and what is refused before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tether.algorithms.presets import preset
from tether.core.config import dump_yaml, validate
from tether.core.errors import ConfigError
from tether.core.protocols import Sampling
from tether.models.policy import Policy
from tether.training import optim
from tether.training.build import episode_rules
from tether.training.resolve import run_settings
from tether.training.settings import SCHEDULES, TASKS, EnvSettings, ModelSettings, RunSettings

LAKE = {"env": {"name": "frozen_lake"}}


def _settings(**sections: Any) -> RunSettings:
    return validate(RunSettings, {**LAKE, **sections})


def test_defaults_are_the_papers() -> None:
    settings = _settings()
    rollout, learner = settings.rollout, settings.learner
    assert (rollout.num_groups, rollout.group_size, rollout.temperature, rollout.format_penalty) == (8, 16, 1.0, -0.1)
    assert (rollout.max_tokens, rollout.max_context) == (400, 3600)
    assert (settings.filter.strategy, settings.filter.keep, settings.filter.score, settings.filter.eps) == (
        "top_p",
        0.9,
        "reward_variance",
        0.01,
    )
    assert settings.filter.loss_scale == "kept_ratio"
    assert (learner.beta1, learner.beta2, learner.update_batch, learner.max_grad_norm) == (0.9, 0.999, 32, 1.0)
    assert (settings.evaluation.prompts, settings.evaluation.temperature) == (512, 0.5)
    algorithm = settings.algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.entropy_coef) == (0.2, 0.28, 0.001)
    assert settings.sampling().temperature == 1.0 and settings.evaluation_sampling().temperature == 0.5


def test_how_responses_are_drawn() -> None:
    """Training and validation differ in their temperature alone."""
    chosen = {"temperature": 0.8, "max_tokens": 90, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "stop_ids": [[5], [6, 7]]}
    settings = _settings(rollout=chosen, evaluation={"temperature": 0.0})
    assert settings.sampling() == Sampling(0.8, 90, top_k=20, top_p=0.9, min_p=0.05, stop_ids=((5,), (6, 7)))
    assert settings.evaluation_sampling() == Sampling(0.0, 90, top_k=20, top_p=0.9, min_p=0.05, stop_ids=((5,), (6, 7)))
    assert not _settings().sampling().truncates and settings.sampling().truncates and not settings.evaluation_sampling().truncates
    for key, bad in (
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("stop_ids", [[]]),
        ("stop_ids", [[-1]]),
        ("cache_gb", 0),
    ):
        with pytest.raises(ConfigError, match=f"rollout.{key}"):
            _settings(rollout={key: bad})


def test_departures_from_a_preset() -> None:
    algorithm = _settings(algorithm={"name": "dr_grpo", "clip_high": 0.3, "entropy_coef": 0.0}).algorithm
    assert (algorithm.name, algorithm.clip_low, algorithm.clip_high, algorithm.entropy_coef) == ("dr_grpo", 0.2, 0.3, 0.0)
    names = {"name": "ppo", "advantages": "bilevel_gae", "aggregation": "sequence_mean_token_sum", "divergence": "k1"}
    algorithm = _settings(algorithm={**names, "reference": "smollm2"}).algorithm
    assert (algorithm.advantages, algorithm.aggregation, algorithm.divergence) == ("bilevel_gae", "sequence_mean_token_sum", "k1")


@pytest.mark.parametrize(
    ("sections", "rate"),
    [
        ({}, 1e-4),
        ({"model": {"name": "tiny"}}, 1e-4),
        ({"model": {"name": "smollm2"}}, 1e-6),
        ({"model": {"name": "smollm2"}, "learner": {"learning_rate": None}}, 1e-6),
        ({"model": {"name": "smollm2"}, "learner": {"learning_rate": 0.01}}, 0.01),
    ],
)
def test_the_learning_rate_is_filled_in_by_model(sections: dict[str, Any], rate: float) -> None:
    settings = _settings(**sections)
    assert settings.learner.learning_rate == rate
    assert settings.critic.learning_rate == (1e-3 if settings.model.name == "tiny" else 1e-5)
    assert yaml.safe_load(dump_yaml(settings))["learner"]["learning_rate"] == rate


def test_the_learning_rate_is_filled_in_for_library_callers_too() -> None:
    settings = RunSettings(env=EnvSettings(name="frozen_lake"), model=ModelSettings(name="smollm2"))
    assert settings.learner.learning_rate == 1e-6


@pytest.mark.parametrize(
    "sections",
    [
        {"seed": 4, "filter": {"strategy": "band", "band": [0.25, 0.75]}},
        {"algorithm": {"name": "dapo"}, "filter": {"refill": 5}},
        {"also": [{"name": "sokoban", "weight": 0.5}], "lora": {"rank": 4, "targets": ["q_proj"]}, "model": {"name": "smollm2"}},
    ],
)
def test_a_dumped_config_is_the_same_settings(sections: dict[str, Any]) -> None:
    settings = _settings(**sections)
    assert validate(RunSettings, yaml.safe_load(dump_yaml(settings))) == settings


@pytest.mark.parametrize(
    ("engine", "algorithm", "cap"),
    [
        ("native", {}, None),
        ("http://h:1", {}, 2.0),
        ("http://h:1", {"importance_cap": None}, None),
        ("http://h:1", {"importance_cap": 5.0}, 5.0),
        ("native", {"importance_cap": 3.0}, 3.0),
    ],
)
def test_null_turns_the_importance_cap_off_and_servers_have_one_where_it_is_not_given(
    engine: str, algorithm: dict[str, Any], cap: float | None
) -> None:
    settings = validate(RunSettings, {"env": {"name": "frozen_lake"}, "rollout": {"engine": engine}, "algorithm": algorithm})
    assert settings.algorithm.importance_cap == cap
    assert validate(RunSettings, yaml.safe_load(dump_yaml(settings))).algorithm.importance_cap == cap


def test_dapo_brings_dynamic_sampling_and_overlong_shaping() -> None:
    settings = _settings(algorithm={"name": "dapo"})
    chosen = settings.filter
    assert (chosen.strategy, chosen.include_zero, chosen.score, chosen.loss_scale, chosen.refill) == (
        "all",
        False,
        "outcome_variance",
        "none",
        3,
    )
    assert settings.rollout.overlong_share == 0.2
    assert (settings.algorithm.kl_coef, settings.algorithm.entropy_coef) == (0, 0)


def test_what_dapo_brings_may_be_overruled() -> None:
    settings = _settings(algorithm={"name": "dapo"}, filter={"refill": 0, "strategy": "top_p"}, rollout={"overlong_share": 0})
    assert (settings.filter.refill, settings.filter.strategy, settings.rollout.overlong_share) == (0, "top_p", 0)
    assert (settings.filter.include_zero, settings.filter.loss_scale) == (False, "none")  # the rest stays


def test_the_other_algorithms_bring_nothing() -> None:
    for name in ("ppo", "grpo", "dr_grpo"):
        settings = _settings(algorithm={"name": name})
        assert (settings.filter, settings.rollout) == (_settings().filter, _settings().rollout)


@pytest.mark.parametrize("score", ["reward_variance", "reward_std", "outcome_variance", "entropy_variance"])
def test_a_variance_needs_two_members(score: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.group_size is 1 but filter.score is '{score}'"):
        _settings(rollout={"group_size": 1}, filter={"score": score})


def test_a_group_of_one_never_varies_so_dynamic_sampling_would_keep_nothing() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.group_size is 1 but filter\.score is 'outcome_variance'"):
        _settings(algorithm={"name": "dapo"}, rollout={"group_size": 1})
    assert _settings(algorithm={"name": "dapo"}, rollout={"group_size": 1}, filter={"include_zero": True}).filter.refill == 3


def test_a_group_of_one_is_fine_where_no_variance_is_asked_for() -> None:
    assert _settings(rollout={"group_size": 1}, filter={"strategy": "all"}).rollout.group_size == 1
    assert _settings(rollout={"group_size": 1}, filter={"score": "entropy"}).rollout.group_size == 1


@pytest.mark.parametrize("band", [None, [0.9, 0.1], [-0.5, 0.5], [0.5, 1.5], [0.5, 0.5]])
def test_a_band_is_checked_before_the_run(band: list[float] | None) -> None:
    with pytest.raises(ConfigError, match="band"):
        _settings(filter={"strategy": "band", "band": band})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"env": {"name": "frozenlake"}}, "did you mean 'frozen_lake'"),
        ({"algorithm": {"name": "grppo"}}, "did you mean 'grpo'"),
        ({"filter": {"strategy": "topp"}}, "did you mean 'top_p'"),
        ({"algorithm": {"advantages": "gea"}}, "is not a known advantages: did you mean 'gae'"),
        ({"algorithm": {"aggregation": "token_meen"}}, "is not a known aggregation: did you mean 'token_mean'"),
        ({"algorithm": {"divergence": "k4"}}, "is not a known divergence"),
        ({"algorithm": {"reward_placement": "end"}}, "algorithm.reward_placement"),
        ({"algorithm": {"dual_clip": 1.0}}, "algorithm.dual_clip': got 1.0; it should be greater than 1"),
        ({"learner": {"schedule": "cosin"}}, "is not a known schedule: did you mean 'cosine'"),
        ({"filter": {"loss_scale": "kept_rate"}}, "did you mean 'kept_ratio'"),
        ({"filter": {"refill": -1}}, "filter.refill': got -1"),
        ({"filter": {"members": 0}}, "filter.members': got 0"),
        ({"rollout": {"num_groups": 0}}, "rollout.num_groups': got 0; it should be greater than or equal to 1"),
        ({"rollout": {"num_groups": -3}}, "rollout.num_groups': got -3"),
        ({"rollout": {"context": "window"}}, "rollout.context"),
        ({"critic": {"warmup_steps": -1}}, "critic.warmup_steps"),
        ({"model": {"dtype": "float16"}}, "model.dtype"),
        ({"also": [{"name": "frozen_lake"}]}, "the run has an environment twice (frozen_lake, frozen_lake); give each once"),
        ({"also": [{"name": "sokobann"}]}, "did you mean 'sokoban'"),
        ({"also": [{"name": "sokoban", "weight": 0}]}, "weight"),
        ({"filter": {"keep": 0}}, "filter.keep': got 0; it should be greater than 0"),
        ({"filter": {"keep": 1.5}}, "should be less than or equal to 1"),
        ({"rollout": {"temperature": 0}}, "rollout.temperature"),
        ({"rollout": {"group_sise": 8}}, "unknown config key 'rollout.group_sise': did you mean 'rollout.group_size'"),
        ({"group_size": 8}, "unknown config key 'group_size': did you mean 'rollout.group_size'"),
        ({"learner": {"learning_rate": float("nan")}}, "learner.learning_rate"),
        ({"seed": -1}, "seed"),
        ({"steps": 0}, "steps"),
    ],
)
def test_what_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _settings(**sections)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_an_episode_lives_within_the_models_positions(tiny: Any) -> None:
    rules = episode_rules(_settings(rollout={"max_tokens": 100}), Policy(tiny.model))
    assert (rules.max_context, rules.max_tokens, rules.format_penalty) == (1024, 100, -0.1)
    assert episode_rules(_settings(rollout={"max_context": 600}), Policy(tiny.model)).max_context == 600
    shaped = {"max_tokens": 100, "overlong_share": 0.25, "overlong_penalty": 0.5, "context": "last_k", "last_k": 3}
    rules = episode_rules(_settings(rollout=shaped), Policy(tiny.model))
    assert (rules.overlong_buffer, rules.overlong_factor, rules.context, rules.last_k) == (25, 0.5, "last_k", 3)
    with pytest.raises(ValueError, match=r"rollout\.max_tokens is 1024 but a conversation holds only 1024 tokens"):
        episode_rules(_settings(rollout={"max_tokens": 1024}), Policy(tiny.model))


def test_schedules_that_need_no_torch_are_those_of_the_optimiser() -> None:
    assert tuple(optim.SCHEDULES) == SCHEDULES


def test_another_algorithm_than_that_of_a_saved_config(tmp_path: Path) -> None:
    """A saved config states every value of its preset; those are not changes that go over to another one."""
    saved = tmp_path / "config.yaml"
    saved.write_text(dump_yaml(_settings(algorithm={"name": "grpo", "kl_coef": 0.1})), encoding="utf-8")
    again = run_settings(None, saved, {"algorithm": {"name": "ppo"}}, resume=False, smoke=False)
    assert again.algorithm == preset("ppo", kl_coef=0.1)
    assert run_settings(None, saved, {}, resume=False, smoke=False).algorithm == preset("grpo", kl_coef=0.1)


def test_options_of_the_tasks_of_an_agent_need_no_name() -> None:
    """`--set env.options.validation=...` beside `--agent` and `--tasks`."""
    agent = {"target": "module:run", "tasks": "tasks.jsonl"}
    found = validate(RunSettings, {"agent": agent, "env": {"options": {"validation": 0.5}}}).env
    assert (found.name, found.options) == (TASKS, {"data": "tasks.jsonl", "validation": 0.5})
