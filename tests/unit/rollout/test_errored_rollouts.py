"""An errored rollout is no evidence: it is played again, recorded, and kept out of scores, baselines, loss and success rates."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tether.algorithms.filters.group_filter import GroupFilter
from tether.core.enums import StopReason
from tether.core.protocols import Sampling
from tether.core.types import Group, Observation, Step
from tether.diagnostics.summary import rollout_summary
from tether.rollout import sampler as module
from tether.rollout.engines.scripted import ScriptedEngine
from tether.rollout.episode import EpisodeRules
from tether.rollout.pack import pack
from tether.rollout.sampler import EnvPool, EnvSpec, error_note, play_plan, training_plan
from tether.training.batch import select

RULES = EpisodeRules(900, 45, 0.0)


class Backend:
    """One answer earns 1. For the episodes in `down` the environment raises `failures` times first."""

    name, max_turns, instructions = "backend", 1, "Answer."

    def __init__(self, calls: Counter[tuple[int, int]], down: set[tuple[int, int]], failures: int) -> None:
        self._calls, self._down, self._failures = calls, down, failures

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        self._episode = (seed, env_seed or 0)
        return Observation("Speak.")

    def step(self, answer: str) -> Step:
        self._calls[self._episode] += 1
        if self._episode in self._down and self._calls[self._episode] <= self._failures:
            raise ConnectionError("connection refused")
        return Step(Observation("Heard."), 1.0, True, True, {"valid": True, "truncated": False})


def play(monkeypatch: pytest.MonkeyPatch, chat: Any, *, failures: int, retries: int) -> list[Group]:
    """Two groups of four; the environment of every second member is down."""
    plan = training_plan(0, 1, 2, 4)
    down = {(seeds.instance, seeds.env_seed) for seeds in plan if seeds.member % 2}
    calls: Counter[tuple[int, int]] = Counter()

    def make_envs(name: str, options: Any, count: int, timeout: float) -> Any:
        return SimpleNamespace(envs=[Backend(calls, down, failures) for _ in range(count)], close=lambda: None)

    monkeypatch.setattr(module, "make_envs", make_envs)
    monkeypatch.setattr(module, "_metrics_of", lambda name: ())
    engine = ScriptedEngine(lambda context, conversation, turn: " </think> <answer> Right </answer>", chat._tokenizer)
    with EnvPool([EnvSpec("frozen_lake")]) as pool:
        return play_plan(pool, plan, engine, chat, Sampling(1.0, 45), RULES, error_retries=retries)


def test_half_of_a_group_down_is_no_reward_variance(monkeypatch: pytest.MonkeyPatch, chat: Any) -> None:
    """All who could answer earned the same, so there is no signal: the filter keeps nothing, where errors as zeros would look like the
    largest variance there is."""
    groups = play(monkeypatch, chat, failures=99, retries=1)
    assert [(len(group.trajectories), len(group.errored)) for group in groups] == [(2, 2), (2, 2)]
    selection = select(groups, GroupFilter())
    assert selection.kept == [] and selection.rv_mean == 0.0
    summary = rollout_summary(groups)
    assert (summary["success"], summary["errors"], summary["retries"], summary["reward_mean"]) == (1.0, 4, 4, 1.0)
    assert pack([t for group in groups for t in group.trajectories]).num_trajectories == 4
    assert all(t.stop_reason is StopReason.ENV_ERROR and t.error for group in groups for t in group.errored)
    note = error_note(groups)
    assert note is not None and note.startswith(
        "4 of 8 episodes ended by an environment error and were left out, all with: step 1: ConnectionError"
    )


def test_a_retry_plays_the_same_seeds_again(monkeypatch: pytest.MonkeyPatch, chat: Any) -> None:
    whole = play(monkeypatch, chat, failures=0, retries=0)
    again = play(monkeypatch, chat, failures=1, retries=1)
    assert [(len(group.trajectories), len(group.errored)) for group in again] == [(4, 0), (4, 0)]
    assert [[t.retries for t in group.trajectories] for group in again] == [[0, 1, 0, 1]] * 2
    for before, after in zip(whole, again, strict=True):
        assert [(t.seed, t.member, t.turns) for t in before.trajectories] == [(t.seed, t.member, t.turns) for t in after.trajectories]
    assert error_note(again) == "4 episodes failed in their environment and succeeded when played again"
    assert error_note(whole) is None


def test_without_retries_the_first_failure_counts(monkeypatch: pytest.MonkeyPatch, chat: Any) -> None:
    groups = play(monkeypatch, chat, failures=1, retries=0)
    assert sum(len(group.errored) for group in groups) == 4
    assert all(t.retries == 0 for group in groups for t in group.errored)


def test_a_step_whose_every_episode_errored_keeps_nothing() -> None:
    assert select([Group(0, 1, []), Group(1, 2, [])], GroupFilter(strategy="all")).kept == []
