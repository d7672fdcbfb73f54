"""Instructions: the presets, the example and the worked examples of every built-in environment, and a file in their place."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tether import VectorEnv, make_env
from tether.core.enums import Split
from tether.core.errors import BadInput, TetherError, UnknownName
from tether.core.grammar import ANSWER_TAGS, FORMAT_RULE, parse_response
from tether.envs.base import ActionEnv, Outcome, TextEnv, TurnEnv, TurnOptions
from tether.envs.countdown.expression import check_answer
from tether.envs.countdown.generator import Puzzle
from tether.envs.countdown.solver import solve as solve_countdown
from tether.envs.frozen_lake.generator import Lake, shortest_walk
from tether.envs.registry import ENVIRONMENTS
from tether.envs.sokoban.levels import Level
from tether.envs.sokoban.solver import solve
from tether.envs.splits import split_of
from tether.envs.wording import DRAWS_IN_VAIN, Example, draw_examples, replacement, way

ROOT = Path(__file__).parents[3]
NAMES = ["countdown", "deepcoder", "frozen_lake", "metamathqa", "qa", "searchqa", "sokoban", "webshop"]
GENERATED = ["frozen_lake", "sokoban", "countdown"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    *(
        (name, {"observation": mode})
        for name in ("frozen_lake", "sokoban")
        for mode in ("coordinates", "grid_coordinates", "image", "grid_image")
    ),
    *((name, {"actions_per_turn": 1}) for name in ("frozen_lake", "sokoban")),
    ("frozen_lake", {"slip": 0.0}),
    ("countdown", {"use": "exactly_once"}),
    ("metamathqa", {"attempts": 3}),
    ("searchqa", {"format": "tags"}),
    ("deepcoder", {"max_turns": 2}),
]


def made(name: str, **options: Any) -> TurnEnv[Any]:
    env = make_env(name, **options)
    assert isinstance(env, TurnEnv)
    return env


def test_all_built_in_environments_are_here() -> None:
    assert set(NAMES) <= set(ENVIRONMENTS.names())


@pytest.mark.parametrize(
    ("name", "options", "text"), json.loads((ROOT / "tests/fixtures/plain_instructions.json").read_text(encoding="utf-8"))
)
def test_plain_is_the_wording_of_tether_0_1(name: str, options: dict[str, Any], text: str) -> None:
    """The fixture was written by that version."""
    assert made(name, **options, instructions="plain").instructions == text


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_the_example_is_a_reply_in_the_expected_form(name: str, options: dict[str, Any]) -> None:
    env = made(name, **options)
    assert env.example is not None
    assert env.example.reply in env.instructions and env.example.state in env.instructions and env.refused in env.instructions
    tags = getattr(env, "reply_tags", ANSWER_TAGS)
    parsed = parse_response(env.example.reply.removeprefix("<think>"), tags)
    assert parsed.reasoning == env.example.reasoning
    if tags == ANSWER_TAGS:
        assert parsed.answer == env.example.answer
    if isinstance(env, ActionEnv):
        env.reset(0)
        assert env.example is not None
        step = env.step(env.example.answer)
        assert step.info["valid"] and not step.info["lenient"]
        assert len(step.info["executed"]) <= env.options.actions_per_turn
        assert ("||" in env.instructions) == (env.options.actions_per_turn > 1)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_papers_frame(name: str, options: dict[str, Any]) -> None:
    text = made(name, **options, instructions="paper").instructions
    assert text.startswith("You're a helpful assistant. ")
    assert "<think>" in text and "</think>" in text and "<answer>" in text
    if name in ("frozen_lake", "sokoban"):
        budget = 5 * options.get("actions_per_turn", 2)
        assert f'You can make up to {budget} actions, separated by the action separator " || "' in text
        assert ("The meaning of each symbol in the state is:" in text) == (options.get("observation") != "image")


def test_the_example_is_never_about_the_instance_being_asked() -> None:
    from tether.envs.countdown.env import Countdown
    from tether.envs.countdown.prompt import EXAMPLE_PUZZLES
    from tether.envs.frozen_lake.env import FrozenLake
    from tether.envs.frozen_lake.prompt import EXAMPLE_LAKES
    from tether.envs.sokoban.env import Sokoban
    from tether.envs.sokoban.prompt import EXAMPLE_LEVELS

    envs: list[tuple[Any, Any]] = [
        *((lake, FrozenLake(generator=lambda seed, split, lake=lake: lake)) for lake in EXAMPLE_LAKES),
        *((level, Sokoban(generator=lambda seed, split, level=level: level)) for level in EXAMPLE_LEVELS),
        *((puzzle, Countdown(generator=lambda seed, split, puzzle=puzzle: puzzle)) for puzzle in EXAMPLE_PUZZLES),
    ]
    for instance, env in envs:
        env.reset(0)
        assert env.example.instance != instance.fingerprint == env.instance


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preset", ["example", "plain", "paper"])
def test_worked_examples_follow_the_instructions(name: str, preset: str) -> None:
    without, with_three = made(name, instructions=preset), made(name, instructions=preset, examples=3)
    without.reset(4)
    with_three.reset(4)
    text = with_three.instructions
    assert text.startswith(without.instructions) and re.findall(r"^Example (\d):$", text, re.MULTILINE) == ["1", "2", "3"]
    assert text == with_three.instructions == made(name, instructions=preset, examples=3).instructions  # also before any reset
    for example in with_three.worked_examples(3):
        assert parse_response(example.reply.removeprefix("<think>")).answer == example.answer


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_an_example_without_its_picture_says_so(name: str) -> None:
    """Examples are text. What a picture would show is told as such, with all that it takes to follow the reasoning."""
    env = made(name, observation="image", examples=1)
    env.reset(0)
    states = [env.example.state if env.example else "", *(shown for shown, _ in env.few_shot)]
    assert len(states) == 4
    for state in states:
        assert (
            "(In the place of an image, what it would show, with positions as (row, column) from 0 at the top left.)\nBoard size:" in state
        )
    assert "Symbols" not in env.instructions and env.reset(1).text == "Turn 1 of 5, 10 actions left.\nSee the image."


# --- worked examples as turns ---


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
@pytest.mark.parametrize("options", [{}, {"observation": "grid_coordinates"}, {"actions_per_turn": 1, "max_turns": 10}])
def test_worked_examples_of_the_grids_are_games_played_to_the_end(name: str, options: dict[str, Any]) -> None:
    """Played in the environment: it shows what the examples show, takes what they answer, and is solved in the fewest actions."""
    more = {"slip": 0.0} if name == "frozen_lake" else {}
    env, played = made(name, **options, **more, few_shot=9), made(name, **options, **more)
    shown = env.few_shot
    assert len(shown) == 9 and [reply for _, reply in shown] == [example.reply for example in env.worked_examples(9)[:9]]
    games = 0
    for number, example in enumerate(env.worked_examples(9)[:9]):
        assert example.instance is not None and split_of(example.instance) is Split.TRAIN
        if example.turn == 1:
            games += 1
            seed = next(seed for draw in range(1000) if played.reset(seed := _example_seed(draw)) and played.instance == example.instance)
            observation, answers = played.reset(seed).text, 0
        assert shown[number][0] == observation
        step = played.step(example.answer)
        assert step.info["valid"] and not step.info["lenient"]
        answers += len(step.info["executed"])
        observation = step.observation.text
        if step.done:
            assert step.success and answers == _fewest_actions(played, seed)
    assert games > 1


def _fewest_actions(env: TurnEnv[Any], seed: int) -> int:
    env.reset(seed)
    if env.name == "sokoban":
        return len(solve(env.level) or [])  # type: ignore[attr-defined]
    lake = Lake(str(env.instance))
    return len(shortest_walk(lake.tiles, lake.size, lake.tiles.index("S"), lake.tiles.index("G")))


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_every_environment_shows_examples_as_turns(name: str, options: dict[str, Any]) -> None:
    env = made(name, **options)
    env.reset(4)
    assert len(env.few_shot) == env.default_few_shot
    tags = getattr(env, "reply_tags", ANSWER_TAGS)
    for shown, reply in env.few_shot:
        assert shown.startswith("Turn ") and reply.startswith("<think> ")
        assert parse_response(reply.removeprefix("<think>"), tags).well_formed
    first = env.reset(4).text.splitlines()[0]
    assert not env.few_shot or env.few_shot[0][0].startswith(f"{first}\n"), "the first example begins as an episode does"
    assert made(name, **options, few_shot=0).few_shot == ()
    for preset in ("plain", "paper"):
        assert made(name, **options, instructions=preset).few_shot == ()
        assert len(made(name, **options, instructions=preset, few_shot=1).few_shot) == 1


def test_the_game_of_the_shop_is_one_that_the_shop_would_play() -> None:
    from tether.envs.webshop import prompt
    from tether.envs.webshop.env import WebShop, WebShopOptions
    from tether.envs.webshop.products import Catalogue, synthetic_goals

    wanted = replace(prompt._LAMPS[1], instruction="x", instruction_attributes=("dimmable",))
    goal = replace(synthetic_goals([wanted])[0], text=prompt._LAMP)
    for style in ("text", "text_rich"):
        options = WebShopOptions(observation=style, split=Split.ALL, few_shot=6)
        env = WebShop(options, catalogue=Catalogue(prompt._LAMPS), generator=lambda seed, split: goal)
        observation = env.reset(0).text
        for example, (shown, _) in zip(prompt.worked(style, False), env.few_shot, strict=True):
            assert shown == observation
            step = env.step(example.answer)
            assert step.info["valid"], example
            observation = step.observation.text
        assert step.done


def test_an_episode_of_one_turn_has_no_examples_of_later_ones() -> None:
    env = made("sokoban", max_turns=1, few_shot=2)
    assert [shown.splitlines()[0] for shown, _ in env.few_shot] == ["Turn 1 of 1, 2 actions left."] * 2


def test_examples_as_turns_change_nothing_else() -> None:
    plain, shown = made("sokoban", few_shot=0), made("sokoban", few_shot=5)
    assert plain.instructions == shown.instructions
    for env in (plain, shown):
        env.reset(3)
    _ = shown.few_shot
    assert plain.step("Up").observation == shown.step("Up").observation


def _example_seed(number: int) -> int:
    from tether.core.seeding import derive_seed

    return derive_seed("worked example", number)


@pytest.mark.parametrize("use", ["at_most_once", "exactly_once"])
def test_worked_examples_of_countdown_solve_their_puzzle(use: Any) -> None:
    examples = made("countdown", use=use).worked_examples(5)
    assert len(examples) >= 6
    for number, example in enumerate(examples):
        target, numbers = re.fullmatch(r"Target: (\d+), nums: \[(.*)\]", example.state).groups()  # type: ignore[union-attr]
        puzzle = Puzzle(int(target), tuple(map(int, numbers.split(", "))))
        assert puzzle.fingerprint == example.instance
        out_of_reach = number in (1, 3, 5)
        assert check_answer(example.answer, puzzle, use).solved is not out_of_reach
        assert out_of_reach or split_of(puzzle.fingerprint) is Split.TRAIN
        assert (solve_countdown(puzzle.target, puzzle.numbers) is None) is out_of_reach
        for tried, value in re.findall(r"([\d+*/() -]+) = (\d+),", example.reasoning):
            assert check_answer(tried, puzzle, use).legal and check_answer(tried, puzzle, use).value == int(value)


def test_a_worked_example_of_countdown_by_hand() -> None:
    from tether.envs.countdown.prompt import worked

    example = worked(Puzzle(60, (2, 52, 6)))  # 60, 48; 2 - 52 is below zero
    assert example.reasoning == "2 + 52 - 6 = 48, 12 too few. 2 + 52 + 6 = 60, the target."
    example = worked(Puzzle(58, (44, 19, 35)))  # 98, 28, 60; 44 - 19 - 35 is below zero
    assert example.reasoning == "44 + 19 - 35 = 28, 30 too few. 44 - 19 + 35 = 60, 2 too many. The nearest is 44 - 19 + 35."
    assert example.answer == "44 - 19 + 35"


@pytest.mark.parametrize("name", GENERATED)
def test_a_worked_example_about_the_instance_asked_gives_way_to_another(name: str) -> None:
    env = made(name, examples=2, few_shot=2)
    first, *others = env.worked_examples(2)
    asked = next(seed for number in range(100) if env.reset(seed := _example_seed(number)) and env.instance == first.instance)
    env.reset(asked)
    kept = [example for example in others if example.instance != first.instance][:2]
    assert first.state not in env.instructions.rpartition("Example 1:")[2]
    assert all(example.reply in env.instructions for example in kept)
    assert [reply for _, reply in env.few_shot] == [example.reply for example in kept]


def test_more_examples_than_there_are() -> None:
    for option in ("examples", "few_shot"):
        with pytest.raises(BadInput, match=rf"^webshop: {option}=7, but there are 6 worked examples; use at most 6$"):
            make_env("webshop", **{option: 7})
    custom = Echo(TurnOptions(examples=1))
    with pytest.raises(BadInput, match="echo: examples=1, but there are 0 worked examples"):
        _ = custom.instructions


def test_draws_of_one_instance_count_once_and_missing_ones_not_at_all() -> None:
    seeds: list[int] = []

    def make(seed: int) -> list[Example]:
        seeds.append(seed)
        return [] if len(seeds) % 2 else [Example("s", "r", "a", instance=str(len(seeds) // 6))]

    assert [example.instance for example in draw_examples(1, make)] == ["0", "1"]
    assert len(set(seeds)) == len(seeds) == 6


def test_draws_without_an_example_end() -> None:
    seeds: list[int] = []
    assert draw_examples(3, lambda seed: seeds.append(seed) or ()) == []  # type: ignore[func-returns-value]
    assert len(seeds) == DRAWS_IN_VAIN == 16


def test_an_environment_whose_instances_have_no_examples_shows_none_by_itself() -> None:
    from tether.envs.sokoban.env import Sokoban, SokobanOptions

    hard = Level.of(["#########", *["#       #"] * 3, "#@$$$...#", *["#       #"] * 3, "#########"])
    env = Sokoban(SokobanOptions(), generator=lambda seed, split: hard)
    env.reset(0)
    assert len(env.few_shot) == 0  # the only instance is the one being played
    with pytest.raises(BadInput, match="few_shot=1, but there are 0 worked examples"):
        _ = Sokoban(SokobanOptions(few_shot=1), generator=lambda seed, split: Level.of(["#####", "#@ .#", "# $ #", "#####"])).few_shot


# --- a file ---


def test_a_file_takes_the_place_of_the_instructions(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Go to G.\nReply <think> ... </think> <answer> Up </answer>\n", encoding="utf-8")
    assert made("frozen_lake", instructions=str(path)).instructions == "Go to G.\nReply <think> ... </think> <answer> Up </answer>"
    assert made("frozen_lake", instructions=str(path), examples=1).instructions.startswith(
        "Go to G.\nReply <think> ... </think> <answer> Up </answer>\n\nExample 1:"
    )
    with VectorEnv("frozen_lake", 1, options={"instructions": str(path)}) as vector:
        assert vector.members[0].instructions.startswith("Go to G.")


@pytest.mark.parametrize(
    ("chosen", "kind", "message"),
    [
        ("exmaple", UnknownName, "sokoban: unknown instructions 'exmaple', and no such file: did you mean 'example'"),
        (
            "missing.txt",
            BadInput,
            "sokoban: instructions='missing.txt' does not exist; give the path of a text file, or one of example, plain, paper",
        ),
        (".", BadInput, "sokoban: instructions='.' is a folder"),
    ],
)
def test_a_wrong_name_is_one_clear_line(chosen: str, kind: type[TetherError], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)) as raised:
        make_env("sokoban", instructions=chosen)
    assert "\n" not in str(raised.value)


def test_a_file_must_hold_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b" \n")
    with pytest.raises(BadInput, match=r"has 0 characters; give a text of 1 to 100000"):
        replacement("env", str(path), ("example",))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="is not UTF-8 text"):
        replacement("env", str(path), ("example",))


# --- environments of one's own ---


class Echo(TextEnv[TurnOptions]):
    name = "echo"
    Options = TurnOptions
    task = "Say it again."

    def generate(self, seed: int) -> None:
        self.word = str(seed)

    def opening(self) -> str:
        return self.word

    def take(self, answer: str) -> Outcome:
        return Outcome("", float(answer == self.word), done=True, success=answer == self.word)


class EchoWithExample(Echo):
    example = Example("42", "The word is 42.", "42")
    refused = "Nothing but the word is accepted."


def test_a_custom_environment_without_an_example_says_the_format() -> None:
    assert Echo(TurnOptions()).instructions == f"Say it again.\n{FORMAT_RULE}"
    with pytest.raises(UnknownName, match="unknown instructions 'paper', and no such file"):
        Echo(TurnOptions(instructions="paper"))


def test_a_custom_environment_with_an_example_shows_it() -> None:
    env = EchoWithExample(TurnOptions())
    assert env.instructions.startswith("Say it again.\n")
    assert "<think> The word is 42. </think> <answer> 42 </answer>" in env.instructions
    assert env.instructions.endswith("Nothing but the word is accepted.")
    assert EchoWithExample(TurnOptions(instructions="plain")).instructions == f"Say it again.\n{FORMAT_RULE}"


def test_distances_in_words() -> None:
    assert (way(2, -1), way(-1, 0), way(0, 3), way(0, 0)) == ("2 down, 1 left", "1 up", "3 right", "here")
