"""The contract that every environment with named actions keeps, whatever its game."""

import hashlib
import os
import random
import subprocess
import sys
from itertools import combinations
from typing import Any, get_args

import numpy as np
import pytest

from tether.core.errors import BadInput, ConfigError
from tether.core.grammar import FORMAT_RULE
from tether.core.images import Image
from tether.envs.base import NOTHING_EXECUTED
from tether.envs.frozen_lake.env import FrozenLake, FrozenLakeOptions
from tether.envs.frozen_lake.generator import Lake
from tether.envs.grid_image import PictureOptions, Style
from tether.envs.registry import make_env
from tether.envs.sokoban.env import Sokoban, SokobanOptions
from tether.envs.sokoban.levels import Level

NAMES = ["frozen_lake", "sokoban"]
OPEN_LAKE = Lake.of(["SFFF", "FFFF", "FFFF", "FFFG"])


def open_lake(**options: object) -> FrozenLake:
    """A lake without holes and without slips: nothing happens that the test does not make happen."""
    return FrozenLake(FrozenLakeOptions.model_validate({"slip": 0.0} | options), generator=lambda seed, split: OPEN_LAKE)


def test_observation_tells_turns_and_actions_left() -> None:
    env = open_lake(max_turns=3, actions_per_turn=2)
    assert env.reset(0).text == "Turn 1 of 3, 6 actions left.\nP___\n____\n____\n___G"
    assert env.step("Right").observation.text == "Turn 2 of 3, 4 actions left.\n_P__\n____\n____\n___G"


def test_last_action_is_singular() -> None:
    assert open_lake(max_turns=1, actions_per_turn=1).reset(0).text.startswith("Turn 1 of 1, 1 action left.\n")


def test_surplus_actions_are_cut_without_a_word() -> None:
    env = open_lake()
    env.reset(0)
    step = env.step("Right || Down || Down || Down")
    assert step.info["executed"] == ["Right", "Down"]
    assert step.info["valid"] is True
    assert env.player == 5


@pytest.mark.parametrize(
    ("answer", "executed", "valid"),
    [
        ("right||DOWN", ["Right", "Down"], True),
        ("|| Right ||", ["Right"], True),
        ("Right || Jump", ["Right"], False),
        ("Jump || Right", ["Right"], False),
        ("Right Down", ["Right", "Down"], True),
        ("Right or Down", [], False),
        ("", [], False),
        ("||", [], False),
    ],
)
def test_answers_are_matched_by_name(answer: str, executed: list[str], valid: bool) -> None:
    env = open_lake()
    env.reset(0)
    step = env.step(answer)
    assert (step.info["executed"], step.info["valid"]) == (executed, valid)
    assert step.info["lenient"] is (answer == "Right Down")


def test_the_strict_reading_is_an_option() -> None:
    env = open_lake(lenient=False)
    env.reset(0)
    step = env.step("Right Down")
    assert (step.info["executed"], step.info["valid"], step.info["lenient"]) == ([], False, False)


def test_answer_without_action_costs_a_turn_and_warns() -> None:
    env = open_lake(max_turns=2)
    env.reset(0)
    step = env.step("Jump")
    assert (
        step.observation.text
        == f"{NOTHING_EXECUTED} Name at least one action: Left, Down, Right, Up.\nTurn 2 of 2, 2 actions left.\nP___\n____\n____\n___G"
    )
    assert (step.reward, step.done) == (0.0, False)
    assert NOTHING_EXECUTED not in env.step("Jump || Up").observation.text


def test_running_out_of_turns_is_truncation_not_failure() -> None:
    env = open_lake(max_turns=2)
    env.reset(0)
    assert env.step("Up").done is False
    step = env.step("Up")
    assert (step.done, step.success, step.info["truncated"]) == (True, False, True)
    assert step.observation.text.startswith("No turns left.\n")


def test_success_in_the_last_turn_is_not_truncation() -> None:
    env = open_lake(max_turns=1, actions_per_turn=9)
    env.reset(0)
    step = env.step("Right || Right || Right || Down || Down || Down || Left")
    assert (step.done, step.success, step.info["truncated"], len(step.info["executed"])) == (True, True, False, 6)
    assert step.observation.text.startswith("Solved.\n")


def test_step_needs_a_running_episode() -> None:
    env = open_lake(max_turns=1)
    with pytest.raises(BadInput, match=r"^frozen_lake: step was called but the episode has not been reset; call reset\(seed\) first$"):
        env.step("Up")
    env.reset(0)
    env.step("Up")
    with pytest.raises(BadInput, match="the episode is over; call reset"):
        env.step("Up")
    env.reset(0)
    env.step("Up")


@pytest.mark.parametrize("name", NAMES)
def test_seed_must_be_whole_and_numpy_integers_count(name: str) -> None:
    env = make_env(name)
    with pytest.raises(BadInput, match=r"reset got seed 1\.5; give a whole number"):
        env.reset(1.5)  # type: ignore[arg-type]
    assert env.reset(np.int64(7)).text == env.reset(7).text  # type: ignore[arg-type]
    assert env.reset(-3).text != env.reset(3).text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["grid", "coordinates", "grid_coordinates", "image", "grid_image"])
def test_every_mode_shows_and_explains_what_it_should(name: str, mode: str) -> None:
    env = make_env(name, observation=mode)
    observation = env.reset(5)
    assert ("Symbols:" in env.instructions) == ("grid" in mode)
    assert ("counted from 0 at the top left" in env.instructions) == ("coordinates" in mode)
    assert ("Board size:" in observation.text) == ("coordinates" in mode)
    assert env.shows_images == ("image" in mode)  # type: ignore[attr-defined]
    if mode == "image":
        assert observation.text == "Turn 1 of 5, 10 actions left.\nSee the image."
    elif mode == "grid_image":
        assert observation.text == make_env(name).reset(5).text
    if "image" in mode:
        side = 4 if name == "frozen_lake" else 6
        assert observation.image is not None
        assert (observation.image.shape, observation.image.dtype) == ((16 * side, 16 * side, 3), np.uint8)
    else:
        assert observation.image is None


@pytest.mark.parametrize("name", NAMES)
def test_plain_instructions_are_short_and_end_with_the_format(name: str) -> None:
    env = make_env(name, instructions="plain")
    assert len(env.instructions.split()) <= 75
    assert env.instructions.endswith(FORMAT_RULE)
    assert "Give up to 2 per turn, separated by ||." in env.instructions
    assert "Give one per turn." in make_env(name, actions_per_turn=1).instructions


@pytest.mark.parametrize("name", NAMES)
def test_image_changes_with_the_state(name: str) -> None:
    env = make_env(name, observation="image")
    first = env.reset(1).image
    second = env.reset(2).image
    assert first is not None
    assert second is not None
    assert (first != second).any()
    again = env.reset(1).image
    assert again is not None
    assert (first == again).all()


@pytest.mark.parametrize("options", [FrozenLakeOptions, SokobanOptions])
@pytest.mark.parametrize("style", ["flat", "sprites"])
@pytest.mark.parametrize("palette", ["default", "dark", "colour_blind"])
def test_every_symbol_has_a_tile_of_its_own(options: type[PictureOptions], style: Any, palette: str) -> None:
    """Also where tiles are smallest: two of them differ by 3 of 255 levels in the mean over all pixels, at least."""
    drawn = {symbol: options(style=style, colours=palette, tile=8).draw([symbol]).astype(int) for symbol in options.tiles}
    for one, other in combinations(drawn, 2):
        assert abs(drawn[one] - drawn[other]).mean() >= 3, (one, other)


def test_the_picture_is_made_of_tiles_in_the_places_of_the_symbols() -> None:
    options = SokobanOptions(tile=24, style="sprites")
    corners = options.draw(["#_", "OX"])
    assert corners.shape == (48, 48, 3)
    assert (corners[:24, 24:] == options.draw(["_"])).all() and (corners[24:, :24] == options.draw(["O"])).all()


def test_pictures_have_not_changed() -> None:
    """Digests of whole pictures: a model that learned from them has to see the same ones. Drawn by numpy alone, so they hold everywhere."""
    drawn = {style: Image.of(SokobanOptions(style=style).draw(["####", "#P_#", "SXO√"])).digest for style in get_args(Style)}
    assert drawn == {"flat": "22f822eac35d", "sprites": "116f62454057"}
    assert SokobanOptions().draw(["X"])[4, 5].tolist() == [201, 146, 74]  # the colour of a box since the first version


def test_colours_of_your_own() -> None:
    own = FrozenLakeOptions(colours={"player": "#ff8000", "hole": "#000000"})
    plain = FrozenLakeOptions()
    assert own.draw(["P"])[8, 8].tolist() == [255, 128, 0] and own.draw(["O"])[8, 8].tolist() == [0, 0, 0]
    assert (own.draw(["G_"]) == plain.draw(["G_"])).all()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tile": 7}, "sokoban option key 'tile': got 7; it should be greater than or equal to 8"),
        ({"tile": 1000}, "sokoban option key 'tile': got 1000; it should be less than or equal to 128"),
        ({"style": "sprite"}, "sokoban option key 'style': got 'sprite'; it should be 'flat' or 'sprites'"),
        ({"colours": "colourblind"}, "sokoban option key 'colours': unknown palette 'colourblind': did you mean 'colour_blind'?"),
        ({"colours": {"plyer": "#ffffff"}}, "sokoban option key 'colours': unknown piece 'plyer': did you mean 'player'?"),
        ({"colours": {"player": "red"}}, "it has 'red' for player; write a colour as \"#rrggbb\", in quotes"),
        ({"colours": {"player": None}}, 'it has None for player; write a colour as "#rrggbb", in quotes'),
        ({"colours": 3}, "it has to be a palette (default, dark, colour_blind) or colours of pieces"),
        ({"colours": {"wall": "#000000", "floor": "#000000"}}, "colours: wall and floor would look the same; choose colours that differ"),
    ],
)
def test_options_of_pictures_are_checked(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_env("sokoban", **options)
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_random_text_never_raises_and_always_ends(name: str) -> None:
    rng = random.Random(0)
    words = ["Up", "down", "LEFT", "Right", "||", "|", " ", "", "jump", "√", "\n", "</answer>", "上", "\x00", "🙂"]
    env = make_env(name)
    for seed in range(200):
        env.reset(seed)
        for turn in range(1, 6):  # noqa: B007 - read after the loop
            step = env.step("".join(rng.choice(words) for _ in range(rng.randrange(12))))
            assert np.isfinite(step.reward)
            if step.done:
                break
        assert step.done
        assert step.info["truncated"] == (turn == 5 and not step.success and "Failed" not in step.observation.text)


DIGEST = """
import hashlib
from tether.envs.registry import make_env
digest = hashlib.sha256()
for name in ("frozen_lake", "sokoban"):
    env = make_env(name, split="validation")
    for seed in range(40):
        digest.update(env.reset(seed).text.encode())
        digest.update(repr(env.step("Left || Up")).encode())
print(digest.hexdigest())
"""


def test_same_seed_gives_the_same_episode_in_every_process() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONHASHSEED": salt}
        ).stdout
        for salt in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == hashlib.sha256().digest_size * 2


def test_pinned_instances() -> None:
    """Change these only on purpose: every stored seed then means another instance."""
    assert make_env("frozen_lake").reset(0).text.split("\n")[1:] == ["_P__", "__O_", "____", "_G__"]
    assert make_env("sokoban").reset(0).text.split("\n")[1:] == ["######", "#__###", "##___#", "#PX__#", "##_O_#", "######"]


def test_global_random_state_is_neither_read_nor_changed() -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    texts = [make_env(name).reset(3).text for name in NAMES]
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index, union-attr]
    random.seed(2)
    np.random.seed(2)
    assert texts == [make_env(name).reset(3).text for name in NAMES]


def test_generator_and_reward_are_injected() -> None:
    level = Level.of(["#####", "#@$.#", "#####"])
    env = Sokoban(SokobanOptions(), generator=lambda seed, split: level, reward=lambda before, after, solved: 7.0)
    env.reset(0)
    assert env.step("Right").reward == 7.0
    lake = FrozenLake(FrozenLakeOptions(slip=0.0), generator=lambda seed, split: OPEN_LAKE, reward=lambda tile: {"F": -0.5}.get(tile, 0.0))
    lake.reset(0)
    assert lake.step("Right || Right").reward == -1.0
