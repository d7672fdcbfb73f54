"""The recipe of `tiny` gives a loadable folder, twice the same weights, and its experts always answer in the grammar."""

import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import tether
from tether.core.grammar import parse_response, split_actions
from tether.envs.countdown.env import Countdown
from tether.models.chat import ChatFormat
from tether.models.load import load_model
from tether.training.sft import recipe
from tether.training.sft.experts import HABITS, demonstrate, near_misses, play_expert, sums
from tether.training.sft.recipe import warmstart
from tether.training.sft.settings import Lesson, WarmstartSettings, Weaknesses

SURE = Weaknesses()
USUAL = WarmstartSettings().skill.weaknesses


def _lesson(steps: int, episodes: int) -> Lesson:
    return Lesson(weaknesses=USUAL, steps=steps, episodes=episodes, learning_rate=1e-3)


def _small(**changes: Any) -> WarmstartSettings:
    return WarmstartSettings(
        **{"skill": _lesson(2, 8), "habit": _lesson(1, 4), "batch": 4, "width": 32, "hidden": 48, "layers": 2, "heads": 2, **changes}
    )


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_experts_answer_in_the_grammar(name: str) -> None:
    env = tether.make_env(name)
    rng, named, all_turns = random.Random(0), 0, 0
    for seed in range(25):
        for shown, response in play_expert(env, seed, rng, USUAL).exchanges:
            parsed = parse_response(response)
            assert parsed.well_formed and parsed.reasoning and shown
            actions = split_actions(parsed.answer or "")
            assert actions == ["Wait"] or (1 <= len(actions) <= 2 and set(actions) <= {"Left", "Right", "Up", "Down"})
            named += actions != ["Wait"]
            all_turns += 1
    assert named > 0.8 * all_turns  # sloppy now and then, not as a rule


def test_a_sure_expert_solves_what_it_reads() -> None:
    for name, options in (("frozen_lake", {"slip": 0.0}), ("sokoban", {"max_turns": 30}), ("countdown", {})):
        env = tether.make_env(name, **options)
        for seed in range(10):
            env.reset(seed)
            rng = random.Random(seed)
            while not (step := env.step(demonstrate(env, rng, SURE).answer)).done:
                pass
            assert step.success, f"{name} {seed}"


def test_a_sure_expert_of_sums_writes_down_the_way_to_the_target() -> None:
    env = tether.make_env("countdown")
    assert isinstance(env, Countdown)
    for seed in range(20):
        env.reset(seed)
        thought = demonstrate(env, random.Random(seed), SURE)
        assert thought.answer == env.puzzle.solution
        assert thought.reasoning.startswith(f"I want {env.puzzle.target}. ") and thought.reasoning.endswith(f"= {env.puzzle.target}.")
        steps = thought.reasoning.removesuffix(".").split(". ")[1:]
        assert len(steps) == len(env.puzzle.numbers) - 1
        for step in steps:
            said, result = step.split(" = ")
            assert eval(said, {"__builtins__": {}}) == int(result), step


def test_an_expert_that_tries_comes_ever_nearer_and_computes_every_try() -> None:
    env, counts = tether.make_env("countdown"), set()
    assert isinstance(env, Countdown)
    for seed in range(40):
        env.reset(seed)
        thought, target = demonstrate(env, random.Random(seed), SURE, tries=3), env.puzzle.target
        *tries, solution, verdict = thought.reasoning.split(". ")
        assert (thought.answer, verdict) == (env.puzzle.solution, "That is the target.")
        results = [int(attempt.removesuffix(f", not {target}").rpartition(" = ")[2]) for attempt in [*tries, solution]]
        assert results[-1] == target and target not in results[:-1]
        distances = [abs(result - target) for result in results]
        assert distances == sorted(distances, reverse=True)
        for step in (step for attempt in [*tries, solution] for step in attempt.removesuffix(f", not {target}").split(", ")):
            said, result = step.split(" = ")
            assert eval(said, {"__builtins__": {}}) == float(Fraction(result)), step
        counts.add(len(tries))
    assert counts == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("target", "numbers", "count", "expected"),
    [
        # 12 + 21 = 33 (4 off), 7 + 15 = 22 (7), 3 * 12 = 36 (7), 7 * 3 = 21 (8); 7 / (3 / 12) = 28 has a fraction on the way
        (29, [7, 3, 12], 4, ["12 + (7 * 3)", "7 + (3 + 12)", "3 * 12", "7 * 3"]),
        (5, [2, 3], 9, ["2 * 3", "3 - 2"]),  # 6, 1; 5 is the target itself, 2 / 3 no whole number
        (5, [5], 9, []),
    ],
)
def test_near_misses_are_the_nearest_and_never_the_target(target: int, numbers: list[int], count: int, expected: list[str]) -> None:
    assert near_misses(target, numbers, count) == expected


@pytest.mark.parametrize(
    ("expression", "steps"),
    [
        ("1 + ((5 * 6) - 7)", ["5 * 6 = 30", "30 - 7 = 23", "1 + 23 = 24"]),
        ("8 / 2", ["8 / 2 = 4"]),
        ("(10 - 4) * (9 / 3)", ["10 - 4 = 6", "9 / 3 = 3", "6 * 3 = 18"]),
        ("12", []),
        ("3 + x", []),
    ],
)
def test_sums_innermost_first(expression: str, steps: list[str]) -> None:
    assert sums(expression) == steps


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban", "countdown"])
def test_out_of_habit_the_task_is_not_looked_at(name: str) -> None:
    """The thoughts of two tasks are drawn from the same few sentences; the first words are those of a habit."""
    env = tether.make_env(name)
    always = Weaknesses(habit=1, confusion=0, indecision=0, sloppiness=0)
    for seed in range(10):
        env.reset(seed)
        assert demonstrate(env, random.Random(seed), always).reasoning.startswith(HABITS)
        assert not demonstrate(env, random.Random(seed), SURE).reasoning.startswith(HABITS)


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_the_weaknesses_on_a_board(name: str) -> None:
    opposite = {"Left": "Right", "Right": "Left", "Up": "Down", "Down": "Up"}
    env = tether.make_env(name)
    for seed in range(10):
        env.reset(seed)
        plan, confused, undecided, sloppy = (
            demonstrate(env, random.Random(seed), SURE.model_copy(update=change)).answer
            for change in ({}, {"confusion": 1}, {"indecision": 1}, {"sloppiness": 1})
        )
        assert split_actions(confused) == [opposite[action] for action in split_actions(plan)]
        first = split_actions(plan)[0]
        assert split_actions(undecided) == [first, opposite[first]]
        assert sloppy == "Wait"


def test_a_lesson_may_be_configured_in_part() -> None:
    settings = WarmstartSettings.model_validate({"skill": {"steps": 50, "weaknesses": {"habit": 0.1}}, "seed": 3})
    usual = WarmstartSettings()
    assert (settings.skill.steps, settings.skill.episodes, settings.habit, settings.seed) == (50, 50_000, usual.habit, 3)
    assert settings.skill.weaknesses == usual.skill.weaknesses.model_copy(update={"habit": 0.1})


@pytest.mark.parametrize("change", [{"habit": 1.5}, {"confusion": -0.1}])
def test_a_weakness_is_a_probability(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        Weaknesses(**change)


def test_there_is_no_expert_for_other_environments() -> None:
    with pytest.raises(TypeError, match="there is no demonstrator for object"):
        demonstrate(object(), random.Random(0), SURE)  # type: ignore[arg-type]


def test_two_lessons_make_a_loadable_folder_and_the_same_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "TOKENIZER_EPISODES", 20)
    stages: list[str] = []
    for name in ("one", "two"):
        warmstart(_small(), tmp_path / name, "cpu", lambda stage, done, total, remark: stages.append(stage))
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (tmp_path / "two" / "model.safetensors").read_bytes()
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()
    assert list(dict.fromkeys(stages)) == [f"lesson {number}: {stage}" for number in (1, 2) for stage in ("episodes", "training")]
    loaded = load_model(str(tmp_path / "one"), device="cpu")
    chat = ChatFormat(loaded.tokenizer)
    assert chat.decode(chat.first_prompt("Rules.", "_P_G")).endswith("_P_G<|im_end|>\n<|im_start|>assistant\n<think>")
    assert len(chat.encode("_P_G")) == 4  # every cell of a board is a token of its own
    assert len(chat.encode("48")) == 2  # and every digit
    assert loaded.model.config.vocab_size == len(loaded.tokenizer)


def test_a_batch_larger_than_the_episodes_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "TOKENIZER_EPISODES", 4)
    warmstart(_small(skill=_lesson(1, 2), habit=_lesson(1, 2)), tmp_path / "few", "cpu", lambda *_: None)
    assert (tmp_path / "few" / "model.safetensors").is_file()
