"""Environments behind gymnasium's interface: gymnasium's own checker, make, vectors, seeds and pictures."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from tether.core.errors import BadInput, ConfigError, TetherError
from tether.core.types import Step
from tether.envs.gym_wrapper import AnyText, GymEnv, as_gymnasium, gymnasium_id, register_with_gymnasium
from tether.envs.registry import ENVIRONMENTS, make_env
from tether.envs.remote.vector import VectorEnv

sys.path.append(str(Path(__file__).parent))

from broken_environments import DoorOptions, Doors


@pytest.fixture(autouse=True)
def _own_ids() -> Iterator[None]:
    before = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


@pytest.mark.parametrize("render_mode", [None, "ansi", "rgb_array"])
@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_gymnasium_s_checker_has_nothing_to_say(name: str, render_mode: str | None) -> None:
    register_with_gymnasium()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(gymnasium_id(name), render_mode=render_mode).unwrapped)


def test_gymnasium_s_checker_on_one_made_by_hand() -> None:
    """Without `gymnasium.make` it can only say that it has no spec to make others from. A single turn it takes for a mistake."""
    with pytest.warns(UserWarning, match="not having a spec") as said:
        check_env(GymEnv(Doors()))
    assert len(said) == 1
    with pytest.raises(AssertionError, match="truncates after 1 step"):
        check_env(GymEnv(Doors(DoorOptions(max_turns=1))))


def test_plays_as_the_environment_does() -> None:
    env, plain = as_gymnasium("frozen_lake", slip=0.5), make_env("frozen_lake", slip=0.5)
    text, info = env.reset(seed=7, options={"env_seed": 3})
    assert text == plain.reset(7, env_seed=3).text
    assert info == {"instructions": plain.instructions}
    for answer in ("Right || Up", "jump", "Down"):
        step = plain.step(answer)
        text, reward, terminated, truncated, info = env.step(answer)
        assert (text, reward) == (step.observation.text, step.reward)
        assert (terminated, truncated) == (step.done and not step.info["truncated"], step.info["truncated"])
        assert info == {**step.info, "success": step.success, "instructions": plain.instructions}
        if step.done:
            break


def test_the_old_name_of_env_seed_works_for_one_release(caplog: pytest.LogCaptureFixture) -> None:
    env = as_gymnasium("frozen_lake", slip=1.0)
    env.reset(seed=7, options={"env_seed": 3})
    assert caplog.text == ""
    expected = env.step("Down || Down")[0]
    env.reset(seed=7, options={"luck": 3})
    assert env.step("Down || Down")[0] == expected
    assert [record.getMessage() for record in caplog.records] == [
        "reset option 'luck' is now called 'env_seed'; the old name works for one release"
    ]
    with pytest.raises(BadInput, match="reset got both 'env_seed' and its old name 'luck'"):
        env.reset(seed=7, options={"luck": 3, "env_seed": 3})


def test_endings_are_told_apart() -> None:
    env = as_gymnasium("sokoban", max_turns=1)
    env.reset(seed=0)
    assert env.step("")[2:4] == (False, True)
    lake = as_gymnasium("frozen_lake", slip=0)
    lake.reset(seed=0)
    assert lake.step("Right || Down")[1:4] == (0.0, True, False)  # a hole
    lake.reset(seed=0)
    lake.step("Down || Down")
    text, reward, terminated, truncated, info = lake.step("Down")
    assert text.startswith("Solved.") and (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)


def test_without_a_seed_instances_are_drawn() -> None:
    env = as_gymnasium("sokoban")
    first = [env.reset(seed=5)[0], *(env.reset()[0] for _ in range(5))]
    again = [env.reset(seed=5)[0], *(env.reset()[0] for _ in range(5))]
    assert first == again
    assert len(set(first)) > 3
    assert first[0] == make_env("sokoban").reset(5).text


def test_rendering() -> None:
    env = as_gymnasium("sokoban", render_mode="rgb_array")
    with pytest.raises(BadInput, match="nothing to render yet; call reset first"):
        env.render()
    env.reset(seed=0)
    before: Any = env.render()
    env.step("Up || Left")
    env.step("Down || Right")
    after: Any = env.render()
    assert before.shape == (96, 96, 3) and before.dtype == np.uint8 and (before != after).any()
    ansi = as_gymnasium("sokoban", render_mode="ansi")
    shown, _ = ansi.reset(seed=0)
    assert ansi.render() == shown
    assert ansi.step("Up")[0] == ansi.render()
    assert as_gymnasium("sokoban").render() is None
    with pytest.raises(BadInput, match="doors has no render mode 'rgb_array'; use one of ansi"):
        GymEnv(Doors(), render_mode="rgb_array")


def test_pictures_of_image_mode_are_in_info() -> None:
    env = as_gymnasium("frozen_lake", observation="image")
    text, info = env.reset(seed=0)
    assert text.endswith("See the image.") and info["image"].shape == (64, 64, 3)
    assert env.step("Left")[4]["image"].dtype == np.uint8


def test_mistakes() -> None:
    env = as_gymnasium("sokoban")
    with pytest.raises(BadInput, match="unknown reset option 'env_sede': did you mean"):
        env.reset(seed=1, options={"env_sede": 1})
    with pytest.raises(ConfigError, match="did you mean 'boxes'"):
        as_gymnasium("sokoban", boxs=1)
    with pytest.raises(BadInput, match="call reset"):
        as_gymnasium("sokoban").step("Up")


@pytest.mark.parametrize("text", ["", "a" * 10_000, "√\n\x00𝔘", "\ud800"])
def test_every_text_is_in_the_space(text: str) -> None:
    assert text in AnyText()


def test_space() -> None:
    assert 7 not in AnyText() and None not in AnyText()
    assert AnyText() == AnyText() and AnyText() != gymnasium.spaces.Text(32)
    one, other = AnyText(seed=1), AnyText(seed=1)
    samples = [one.sample() for _ in range(50)]
    assert samples == [other.sample() for _ in range(50)]
    assert len(set(samples)) > 40 and all(sample in one and len(sample) <= 32 for sample in samples)
    assert repr(one) == "AnyText()"


def test_registered_with_gymnasium_once() -> None:
    ids = register_with_gymnasium()
    assert len(ids) == len(set(ids)) == len(ENVIRONMENTS.names())
    assert {"tether/FrozenLake-v0", "tether/Sokoban-v0"} <= set(ids) <= set(gymnasium.registry)
    assert register_with_gymnasium() == ids  # a second registration would warn
    env = gymnasium.make("tether/Sokoban-v0", boxes=2, max_turns=2)
    text, _ = env.reset(seed=3)
    assert text == make_env("sokoban", boxes=2, max_turns=2).reset(3).text
    env.close()


def test_ids() -> None:
    assert gymnasium_id("my-own env2") == "tether/MyOwnEnv2-v0"


def test_vectors_of_gymnasium() -> None:
    register_with_gymnasium()
    vector = gymnasium.make_vec("tether/FrozenLake-v0", num_envs=3, vectorization_mode="sync", slip=0)
    texts, infos = vector.reset(seed=[0, 1, 0])
    assert texts == tuple(make_env("frozen_lake", slip=0).reset(seed).text for seed in (0, 1, 0))
    assert len(infos["instructions"]) == 3
    _, _, terminated, _, _ = vector.step(("Down || Down", "", "Right || Down"))
    assert list(terminated) == [False, False, True]
    _, rewards, terminated, truncated, infos = vector.step(("Down", "", "anything"))  # the third one is reset
    assert rewards[0] == 1 and list(terminated) == [True, False, False] and not truncated.any()
    assert infos["success"][0]
    vector.close()


def test_closing_closes_the_environment() -> None:
    class Closable(Doors):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    inner = Closable()
    GymEnv(inner).close()
    assert inner.closed == 1


# --- from gymnasium ---

WALK = {"action_names": ["Left", "Down", "Right", "Up"], "make": {"is_slippery": False}}


def test_an_environment_of_gymnasium_is_played_in_words() -> None:
    env = make_env("gymnasium:FrozenLake-v1", **WALK, actions_per_turn=3)
    assert "Frozen lake involves crossing a frozen lake" in env.instructions and "Actions: Left, Down, Right, Up." in env.instructions
    assert env.reset(3).text == "Turn 1 of 20, 60 actions left.\n[S]FFF\nFHFH\nFFFH\nHFFG"
    env.step("Down || Down || Right")
    step = env.step("Down || Right || Right")
    assert (step.reward, step.done, step.success) == (1.0, True, True)
    env.reset(3)
    failed = env.step("Right || Down")
    assert (failed.reward, failed.done, failed.success, failed.info["truncated"]) == (0.0, True, False, False)


def test_numbers_are_named_and_episodes_follow_from_their_seeds() -> None:
    options = {
        "action_names": ["push left", "push right"],
        "observation_names": ["position", "velocity", "angle", "spin"],
        "max_turns": 600,
    }
    env = make_env("gymnasium:CartPole-v1", **options)
    first = env.reset(1).text
    assert [line.partition(":")[0] for line in first.splitlines()[1:]] == options["observation_names"]
    assert (env.reset(1).text, env.reset(2).text != first) == (first, True)
    steps = [env.step("push left")]
    while not steps[-1].done:
        steps.append(env.step("push left"))
    assert len(steps) < 30 and not steps[-1].success and steps[-1].info["return"] == len(steps)


def test_chance_in_an_episode_follows_env_seed() -> None:
    def walked(env_seed: int) -> str:
        env = make_env("gymnasium:FrozenLake-v1", actions_per_turn=5)
        env.reset(1, env_seed=env_seed)
        return env.step("2 || 2 || 1 || 1 || 2").observation.text

    assert walked(4) == walked(4) and len({walked(seed) for seed in range(8)}) > 1


def test_it_runs_in_worker_processes() -> None:
    with VectorEnv("gymnasium:FrozenLake-v1", 2, options=WALK) as vector:
        assert vector.work == "process"
        assert all("[S]FFF" in getattr(seen, "text", "") for seen in vector.reset([0, 1]))
        assert all(isinstance(step, Step) for step in vector.step(["Right", "Down"]))


class Lamp(gymnasium.Env[int, int]):
    """On or off; a picture is its only rendering."""

    metadata = {"render_modes": ["rgb_array"]}
    observation_space, action_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        self.lit = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.lit = int(action)
        return self.lit, float(action), False, False, {}

    def render(self) -> Any:
        return np.full((4, 4, 3), 255 * self.lit, np.uint8)


def test_pictures_of_gymnasium_alone_and_beside_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        gymnasium.registry, "Lamp-v0", gymnasium.envs.registration.EnvSpec("Lamp-v0", entry_point=Lamp, disable_env_checker=True)
    )
    for mode, text in (("image", "See the image."), ("grid_image", "State: 1")):
        env = make_env("gymnasium:Lamp-v0", observation=mode)
        env.reset(0)
        shown = env.step("1").observation
        assert shown.text.split("\n")[-1] == text and shown.image is not None and (shown.image == 255).all()
        assert env.shows_images  # type: ignore[attr-defined]
    monkeypatch.setitem(Lamp.metadata, "render_modes", [])
    with pytest.raises(BadInput, match="observation=grid_image, but it renders no picture; use observation=grid"):
        make_env("gymnasium:Lamp-v0", observation="grid_image")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("Pendulum-v1", {}, "only environments with discrete actions"),
        ("Frozen-v1", {}, "gymnasium has no environment 'Frozen-v1'"),
        ("CartPole-v1", {"action_names": ["left"]}, "it has 2 actions; give each a name of its own"),
        ("CartPole-v1", {"make": {"gravity_": 3}}, "cannot be built"),
    ],
)
def test_what_cannot_be_played_is_one_line(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TetherError, match=said) as error:
        make_env(f"gymnasium:{name}", **options)
    assert "\n" not in str(error.value)
