"""The pool plays plans over several kinds of environments, keeps them from step to step, and closes them."""

from typing import Any

import pytest

from tether.core.protocols import Sampling
from tether.core.types import Observation, Step
from tether.envs.base import TurnOptions
from tether.rollout import sampler as module
from tether.rollout.engines.scripted import ScriptedEngine
from tether.rollout.episode import EpisodeRules
from tether.rollout.sampler import EnvPool, EnvSpec, play_plan, training_plan

RULES = EpisodeRules(900, 45, -0.1)
HERE = "tests.unit.rollout.test_sampler" if __name__.startswith("tests.") else __name__
LAKE = EnvSpec("frozen_lake", {"max_turns": 2, "slip": 0.0}, step_timeout=7.0, weight=3.0)
BOXES = EnvSpec("sokoban", {"max_turns": 1}, weight=1.0)


class Worker:
    """An environment that lives in another process, and says so of itself."""

    name, max_turns, instructions, work = "worker", 1, "Say something.", "process"
    Options = TurnOptions
    metrics = ("length", "is_long")

    def __init__(self, options: TurnOptions) -> None:
        pass

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        return Observation("Speak.")

    def step(self, answer: str) -> Step:
        return Step(Observation("Heard."), 0.0, True, False, {"length": len(answer), "is_long": len(answer) > 3, "other": 7})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, float]]:
    """What was built, how many of it, and how long a step of it may take."""
    built: list[tuple[str, int, float]] = []
    real = module.make_envs

    def make(name: str, options: Any, count: int, step_timeout: float) -> Any:
        built.append((name, count, step_timeout))
        return real(name, options, count, step_timeout)

    monkeypatch.setattr(module, "make_envs", make)
    return built


def _engine(chat: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda context, conversation, turn: " </think> <answer> Right </answer>", chat._tokenizer)


def _play(env_pool: EnvPool, chat: Any, plan: Any) -> Any:
    return play_plan(env_pool, plan, _engine(chat), chat, Sampling(0.0, 45), RULES)


def test_every_group_plays_its_environment(chat: Any) -> None:
    with EnvPool([LAKE, BOXES]) as env_pool:
        assert env_pool.weights == (3.0, 1.0)
        groups = _play(env_pool, chat, training_plan(0, 1, 4, 2, weights=env_pool.weights))
    assert [[t.env for t in group.trajectories] for group in groups] == [["frozen_lake"] * 2] * 3 + [["sokoban"] * 2]
    for group in groups:
        for trajectory in group.trajectories:
            boxes = trajectory.env == "sokoban"
            assert ("box" in trajectory.turns[0].observation or "#" in trajectory.turns[0].observation) is boxes
            assert trajectory.turns[0].observation.startswith("Turn 1 of 1," if boxes else "Turn 1 of 2,"), "its own options"
            assert list(trajectory.measures) == (["boxes_on_target"] if boxes else ["slips"])
            assert trajectory.seed == group.seed


def test_a_mixture_plays_what_each_environment_would_play_alone(chat: Any) -> None:
    plan = training_plan(0, 1, 4, 2, weights=(3.0, 1.0))
    with EnvPool([LAKE, BOXES]) as mixed, EnvPool([BOXES]) as alone:
        last = _play(mixed, chat, plan)[3]
        same = _play(alone, chat, training_plan(0, 1, 4, 2))[3]
    assert [t.turns for t in last.trajectories] == [t.turns for t in same.trajectories]


def test_environments_are_kept_and_grow_when_needed(chat: Any, made: Any) -> None:
    with EnvPool([LAKE, BOXES]) as env_pool:
        assert made == [], "nothing is built before it is needed"
        lake_only = [seeds for seeds in training_plan(0, 1, 4, 1, weights=env_pool.weights) if seeds.env_index == 0]
        _play(env_pool, chat, lake_only)
        assert made == [("frozen_lake", 3, 7.0)]
        _play(env_pool, chat, lake_only[:1])
        _play(env_pool, chat, training_plan(0, 2, 4, 1, weights=env_pool.weights))
        assert made == [("frozen_lake", 3, 7.0), ("sokoban", 1, 120.0)]
        groups = _play(env_pool, chat, training_plan(0, 3, 8, 1, weights=env_pool.weights))
        assert made[2:] == [("frozen_lake", 6, 7.0), ("sokoban", 2, 120.0)]
        assert len(groups) == 8


def test_whatever_was_built_is_closed(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what a larger pool replaced."""
    closed: list[str] = []
    monkeypatch.setattr(module.WorkerPool, "close", lambda self: closed.append(self.envs[0].name))
    with EnvPool([LAKE, BOXES]) as env_pool:
        _play(env_pool, chat, training_plan(0, 1, 4, 1, weights=env_pool.weights))
        _play(env_pool, chat, [seeds for seeds in training_plan(0, 1, 8, 1, weights=env_pool.weights) if seeds.env_index == 0])
        assert closed == ["frozen_lake"]
    assert sorted(closed) == ["frozen_lake", "frozen_lake", "sokoban"]


@pytest.mark.long
def test_numbers_come_through_another_process(chat: Any) -> None:
    with EnvPool([EnvSpec(f"{HERE}:Worker", step_timeout=60.0)]) as env_pool:
        (group,) = _play(env_pool, chat, training_plan(0, 1, 1, 1))
    (trajectory,) = group.trajectories
    assert (trajectory.error, trajectory.measures) == (None, {"length": 5.0, "is_long": 1.0})
    assert trajectory.env == f"{HERE}:Worker".replace(":", "_")


def test_word_of_every_finished_episode(chat: Any) -> None:
    heard: list[int] = []
    with EnvPool([BOXES]) as env_pool:
        play_plan(env_pool, training_plan(0, 1, 2, 3), _engine(chat), chat, Sampling(0.0, 45), RULES, lambda: heard.append(1))
    assert len(heard) == 6
