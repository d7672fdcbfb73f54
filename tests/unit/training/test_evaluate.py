"""Evaluation plays the fixed validation prompts of the validation split and gives the success rate with its Wilson interval."""

import math
from typing import Any

import pytest

from tether.core.config import Settings
from tether.core.protocols import Sampling
from tether.core.seeding import validation_seed
from tether.core.types import Completion, Observation, Step
from tether.envs.registry import ENVIRONMENTS, make_env
from tether.envs.splits import Split, split_of
from tether.rollout.engines.native import NativeEngine
from tether.rollout.episode import EpisodeRules
from tether.training.evaluate import evaluate
from tether.training.settings import EnvSettings

RULES = EpisodeRules(900, 45, -0.1)
LAKE = EnvSettings(name="frozen_lake", options={"max_turns": 1, "slip": 0.0})


class Answers:
    """An engine that says one thing."""

    def __init__(self, chat: Any, text: str) -> None:
        self._ids = chat.encode(text)

    def run(self, dialogues: Any, sampling: Sampling, on_finished: Any = None) -> None:
        for dialogue in dialogues:
            feed = dialogue.begin()
            while feed is not None:
                feed = dialogue.receive(Completion(self._ids, (-1.0,) * len(self._ids), "stop_text"))

    def sync(self) -> None:
        pass


def test_the_rate_and_its_interval(chat: Any) -> None:
    """One answer reaches some of the goals; which ones is played out here by hand."""
    wins = 0
    for index in range(60):
        env = make_env("frozen_lake", **LAKE.options, split="validation")
        env.reset(validation_seed(index))
        wins += env.step("Right || Down").success
    assert 0 < wins < 60
    result = evaluate(LAKE, Answers(chat, " </think> <answer> Right || Down </answer>"), chat, 60, Sampling(0.5, 45), RULES)
    rate, z = wins / 60, 1.959964
    half = z * math.sqrt(rate * (1 - rate) / 60 + z * z / (4 * 60**2))
    assert result.metrics["success"] == rate and result.metrics["prompts"] == 60
    assert result.metrics["success_low"] == pytest.approx((rate + z * z / 120 - half) / (1 + z * z / 60))
    assert result.metrics["success_high"] == pytest.approx((rate + z * z / 120 + half) / (1 + z * z / 60))
    assert (result.metrics["turns"], result.metrics["format_valid"], result.metrics["errors"]) == (1, 1, 0)


@pytest.mark.parametrize(("wins", "interval"), [(0, (0.0, 0.277533)), (10, (0.722467, 1.0))])
def test_literal_ends(chat: Any, wins: int, interval: tuple[float, float]) -> None:
    """Ten of ten and none of ten have the Wilson interval of every table; nobody wins without an action, and all win in a lake of goals."""
    from tether.envs.frozen_lake import env as module

    class Easy(module.FrozenLake):
        def _act(self, index: int) -> tuple[float, bool, bool]:
            return 1.0, True, True

    text = " </think> <answer> Right </answer>" if wins else " nothing"
    settings = EnvSettings(name="frozen_lake", options={"max_turns": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FrozenLake", Easy)
        result = evaluate(settings, Answers(chat, text), chat, 10, Sampling(0.5, 45), RULES)
    assert result.metrics["success"] == wins / 10
    assert (result.metrics["success_low"], result.metrics["success_high"]) == pytest.approx(interval, abs=1e-6)


def test_prompts_are_the_fixed_ones_of_the_validation_split(tiny: Any, chat: Any) -> None:
    engine = NativeEngine(tiny.model, tiny.tokenizer)
    settings = EnvSettings(name="frozen_lake", options={"max_turns": 1, "split": "train"})  # the split is not the user's to choose here
    first = evaluate(settings, engine, chat, 3, Sampling(0.5, 45), RULES)
    again = evaluate(settings, engine, chat, 3, Sampling(0.5, 45), RULES)
    assert [group.seed for group in first.groups] == [validation_seed(index) for index in range(3)]
    assert [t.turns for g in first.groups for t in g.trajectories] == [t.turns for g in again.groups for t in g.trajectories]
    for group in first.groups:
        env = make_env("frozen_lake", max_turns=1, split="validation")
        shown = env.reset(group.seed).text
        assert split_of(env.lake.fingerprint) is Split.VALIDATION
        assert group.trajectories[0].turns[0].observation == shown


class Plain:
    """A bare environment without splits."""

    class Options(Settings):
        pass

    name, max_turns, instructions = "plain", 1, "Say Right."

    def __init__(self, options: Options) -> None:
        pass

    def reset(self, seed: int, *, luck: int | None = None) -> Observation:
        return Observation("Say it.")

    def step(self, answer: str) -> Step:
        return Step(Observation("Said."), 1.0, True, answer == "Right", {"valid": True, "truncated": False})


def test_an_environment_without_splits_is_evaluated_as_it_is(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "plain": Plain})
    result = evaluate(EnvSettings(name="plain"), Answers(chat, " </think> <answer> Right </answer>"), chat, 3, Sampling(0.5, 45), RULES)
    assert result.metrics["success"] == 1.0
