"""FrozenLake: known episodes, slips against theory and against gymnasium itself, randomness apart from the map."""

import random
from collections import Counter

import pytest

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.envs.frozen_lake.env import FrozenLake, FrozenLakeOptions, choose, transitions
from tether.envs.frozen_lake.generator import Lake, RandomLake

LEFT, DOWN, RIGHT, UP = range(4)
CENTRE = Lake.of(["FFF", "FSF", "FFG"])


def lake_env(rows: list[str], **options: object) -> FrozenLake:
    lake = Lake.of(rows)
    return FrozenLake(FrozenLakeOptions.model_validate({"slip": 0.0} | options), generator=lambda seed, split: lake)


def test_reaching_the_goal_pays_one() -> None:
    env = lake_env(["SF", "HG"])
    assert env.reset(0).text.split("\n")[1:] == ["P_", "OG"]
    step = env.step("Right || Down")
    assert (step.reward, step.done, step.success) == (1.0, True, True)
    assert step.observation.text == "Solved.\n__\nO√"
    assert step.info == {"valid": True, "truncated": False, "executed": ["Right", "Down"], "lenient": False, "player": (1, 1), "slips": 0}


def test_a_hole_ends_the_episode_with_nothing() -> None:
    env = lake_env(["SF", "HG"])
    env.reset(0)
    step = env.step("Down || Right")
    assert (step.reward, step.done, step.success, step.info["executed"]) == (0.0, True, False, ["Down"])
    assert step.info["truncated"] is False
    assert step.observation.text == "Failed.\n__\nXG"


def test_the_edge_holds_the_player() -> None:
    env = lake_env(["SF", "HG"])
    env.reset(0)
    assert env.step("Left || Up").observation.text.split("\n")[1:] == ["P_", "OG"]


def test_coordinates() -> None:
    env = lake_env(["FHF", "FSH", "FFG"], observation="coordinates")
    assert env.reset(0).text == (
        "Turn 1 of 5, 10 actions left.\nBoard size: 3 rows x 3 cols (zero-indexed).\nGoal: (2, 2)\nPlayer: (1, 1)\nHoles: (0, 1), (1, 2)"
    )
    assert "Player in hole: (1, 2)" in env.step("Right").observation.text
    env.reset(0)
    assert "Player on goal: (2, 2)" in env.step("Down || Right").observation.text


def test_grid_with_coordinates() -> None:
    env = lake_env(["SF", "FG"], observation="grid_coordinates")
    assert env.reset(0).text.split("\n")[1:] == [
        "Coordinates:",
        "Board size: 2 rows x 2 cols (zero-indexed).",
        "Goal: (1, 1)",
        "Player: (0, 0)",
        "Grid Map:",
        "P_",
        "_G",
    ]


def shares(slip: float, action: str, plays: int = 4000) -> dict[int, float]:
    """Where one action leads from the centre, over many env_seeds."""
    env = FrozenLake(FrozenLakeOptions(slip=slip), generator=lambda seed, split: CENTRE)
    ends: Counter[int] = Counter()
    for env_seed in range(plays):
        env.reset(0, env_seed=env_seed)
        env.step(action)
        ends[env.player] += 1
    return {tile: count / plays for tile, count in ends.items()}


def test_slips_follow_the_theory() -> None:
    found = shares(0.3, "Up")
    assert set(found) == {1, 3, 5}  # ahead, left, right; never back
    assert found[1] == pytest.approx(0.7, abs=0.03)  # four standard deviations
    assert found[3] == pytest.approx(0.15, abs=0.023)
    assert found[5] == pytest.approx(0.15, abs=0.023)


def test_slip_one_never_goes_straight_and_slip_zero_always() -> None:
    assert set(shares(1.0, "Left", 500)) == {1, 7}
    assert shares(0.0, "Left", 500) == {3: 1.0}


def test_transitions_of_a_corner_are_gymnasiums() -> None:
    left, down = transitions(4, 0.2)[0][LEFT], transitions(4, 0.2)[0][DOWN]
    assert [tile for _, tile in left] == [0, 0, 4]  # Up, Left, Down
    assert [tile for _, tile in down] == [0, 4, 1]  # Left, Down, Right
    assert [total for total, _ in down] == pytest.approx([0.1, 0.9, 1.0])


def test_rounding_never_picks_an_impossible_outcome() -> None:
    assert choose(((0.5, 7), (0.5, 8), (0.9999999, 9)), 0.99999999) == 2
    assert choose(((0.0, 7), (0.9999999, 8), (0.9999999, 9)), 0.99999999) == 1
    assert choose(((0.0, 7), (1.0, 8), (1.0, 9)), 0.0) == 1


def test_whole_episodes_agree_with_gymnasium() -> None:
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

    answers = random.Random(1)
    env = FrozenLake(FrozenLakeOptions(slip=0.4, max_turns=30, actions_per_turn=1, frozen=0.7))
    for seed in range(40):
        env.reset(seed, env_seed=seed + 1000)
        theirs = FrozenLakeEnv(desc=env.lake.rows, success_rate=0.6)
        theirs.reset(seed=0)
        theirs.np_random = random.Random(seed + 1000)  # type: ignore[assignment] # all it needs is .random()
        done = False
        while not done:
            action = answers.randrange(4)
            step = env.step(env.actions[action])
            state, reward, terminated, _, _ = theirs.step(action)
            assert (env.player, step.reward, step.done and not step.info["truncated"]) == (state, reward, terminated)
            done = step.done


def test_members_share_the_map_not_the_slips() -> None:
    env = FrozenLake(FrozenLakeOptions(slip=0.5, max_turns=20, frozen=1.0, size=8))
    texts, paths = set(), set()
    for env_seed in range(8):
        texts.add(env.reset(11, env_seed=env_seed).text)
        path = []
        for _ in range(6):
            step = env.step("Right || Down")
            path.append(env.player)
            if step.done:
                break
        paths.add(tuple(path))
    assert len(texts) == 1
    assert len(paths) == 8


def test_env_seed_follows_from_the_seed_by_default() -> None:
    env = FrozenLake(FrozenLakeOptions(slip=0.5))
    runs = []
    for _ in range(2):
        env.reset(4)
        runs.append([env.step("Right || Left").info["player"] for _ in range(2)])
    assert runs[0] == runs[1]


def test_slips_are_counted() -> None:
    env = FrozenLake(FrozenLakeOptions(slip=1.0, frozen=1.0), generator=lambda seed, split: CENTRE)
    env.reset(0)
    assert env.step("Left").info["slips"] == 1
    assert "slippery" in env.instructions
    assert "slippery" not in lake_env(["SF", "FG"]).instructions


@pytest.mark.parametrize(("size", "frozen"), [(2, 0.0), (4, 0.9), (7, 0.6), (12, 0.9)])
def test_generated_lakes_have_a_way(size: int, frozen: float) -> None:
    for seed in range(30):
        lake = RandomLake(size, frozen)(seed, Split.TRAIN)
        assert lake.size == size
        here, seen = {lake.tiles.index("S")}, set[int]()
        while here:
            seen |= here
            here = {end for tile in here for action in range(4) for end in [transitions(size, 0.0)[tile][action][1][1]]} - seen
            here = {tile for tile in here if lake.tiles[tile] != "H"}
        assert lake.tiles.index("G") in seen


def test_share_of_ice() -> None:
    lakes = [RandomLake(8, 0.9)(seed, Split.TRAIN).tiles for seed in range(200)]
    assert sum(tiles.count("H") for tiles in lakes) / (200 * 62) == pytest.approx(0.1, abs=0.012)


@pytest.mark.parametrize("tiles", ["", "SFG", "SFFF", "SSGF", "SFXG"])
def test_a_map_that_is_none_is_refused(tiles: str) -> None:
    with pytest.raises(BadInput, match="is not a map; give a square"):
        Lake(tiles)
