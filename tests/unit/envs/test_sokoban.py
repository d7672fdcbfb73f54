"""Sokoban: known episodes, rewards to the tenth, and what is shown."""

import pytest

from tether.envs.registry import make_env
from tether.envs.sokoban.env import PushReward, Sokoban, SokobanOptions
from tether.envs.sokoban.levels import Level
from tether.envs.sokoban.solver import solve


def level_env(rows: list[str], **options: object) -> Sokoban:
    level = Level.of(rows)
    return Sokoban(SokobanOptions.model_validate(options), generator=lambda seed, split: level)


def grid(env: Sokoban) -> list[str]:
    return env.state_text().split("\n")


def test_a_push_onto_the_target_solves() -> None:
    env = level_env(["######", "#@ $.#", "######"])
    assert env.reset(0).text.split("\n")[1:] == ["######", "#P_XO#", "######"]
    step = env.step("Right || Right")
    assert step.reward == pytest.approx(10.8)
    assert (step.done, step.success) == (True, True)
    assert step.observation.text == "Solved.\n######\n#__P√#\n######"
    executed = {"executed": ["Right", "Right"], "lenient": False}
    assert step.info == {"valid": True, "truncated": False, **executed, "player": (1, 3), "boxes_on_target": 1}


def test_walls_and_boxes_in_a_row_do_not_move() -> None:
    env = level_env(["#######", "#@$$..#", "#######"])
    env.reset(0)
    step = env.step("Right || Left")
    assert step.reward == pytest.approx(-0.2)
    assert grid(env)[1] == "#PXXOO#"


def test_a_box_is_not_pulled() -> None:
    env = level_env(["########", "# $@ $.#", "#   .  #", "########"])
    env.reset(0)
    env.step("Right")
    assert grid(env)[1] == "#_X_PXO#"


def test_up_and_down_push_too() -> None:
    env = level_env(["#####", "# . #", "# $ #", "# @ #", "# $ #", "# . #", "#####"])
    env.reset(0)
    assert env.step("Up || Down").reward == pytest.approx(0.8)
    assert env.step("Down").reward == pytest.approx(10.9)


def test_bringing_a_box_off_its_target_costs_one() -> None:
    env = level_env(["#########", "#@*  $ .#", "#########"])
    env.reset(0)
    step = env.step("Right")
    assert step.reward == pytest.approx(-1.1)
    assert step.info["boxes_on_target"] == 0
    assert grid(env)[1] == "#_SX_X_O#"


def test_one_box_of_two_is_not_the_end() -> None:
    env = level_env(["########", "#@$. $.#", "########"])
    env.reset(0)
    step = env.step("Right")
    assert (step.done, step.success, step.info["boxes_on_target"]) == (False, False, 1)
    assert step.reward == pytest.approx(0.9)
    assert env.step("Right").reward == pytest.approx(-1.1)


def test_return_of_a_solution_is_eleven_minus_a_tenth_per_action() -> None:
    env = make_env("sokoban", max_turns=10)
    assert isinstance(env, Sokoban)
    checked = set()
    for seed in range(60):
        env.reset(seed)
        actions = solve(env.level)
        assert actions is not None
        steps = [env.step(" || ".join(actions[at : at + 2])) for at in range(0, len(actions), 2)]
        assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
        assert steps[-1].success
        assert sum(step.reward for step in steps) == pytest.approx(11 - 0.1 * len(actions))
        checked.add(len(actions))
    assert len(checked) >= 6


@pytest.mark.parametrize(
    ("before", "after", "solved", "paid"),
    [(0, 0, False, -0.1), (0, 1, False, 0.9), (2, 1, False, -1.1), (1, 2, True, 10.9)],
)
def test_reward_arithmetic(before: int, after: int, solved: bool, paid: float) -> None:
    assert PushReward()(before, after, solved) == pytest.approx(paid)


def test_coordinates_list_every_object_once() -> None:
    env = level_env(["######", "#+ $ #", "#*#$.#", "######"], observation="coordinates")
    assert env.reset(0).text.split("\n")[1:] == [
        "Board size: 4 rows x 6 cols (zero-indexed).",
        "Targets: (2, 4)",
        "Boxes: (1, 3), (2, 3)",
        "Boxes on target: (2, 1)",
        "Player on target: (1, 1)",
        "Inner walls: (2, 2)",
    ]


def test_grid_with_coordinates_needs_no_list_of_walls() -> None:
    env = level_env(["#####", "#@$.#", "#####"], observation="grid_coordinates")
    assert env.reset(0).text.split("\n")[1:] == [
        "Coordinates:",
        "Board size: 3 rows x 5 cols (zero-indexed).",
        "Targets: (1, 3)",
        "Boxes: (1, 2)",
        "Player: (1, 1)",
        "Grid Map:",
        "#####",
        "#PXO#",
        "#####",
    ]


def test_env_seed_changes_nothing() -> None:
    env = make_env("sokoban")
    runs = []
    for env_seed in (1, 2):
        text = env.reset(3, env_seed=env_seed).text
        runs.append((text, repr(env.step("Up || Left"))))
    assert runs[0] == runs[1]


def test_position_is_the_level_as_it_is_now() -> None:
    env = level_env(["#######", "#@ $ .#", "#######"])
    env.reset(0)
    assert solve(env.position()) == ["Right"] * 3
    env.step("Right || Right")
    assert solve(env.position()) == ["Right"]
