"""An environment of gymnasium with discrete actions as one of Tether's: `make_env("gymnasium:FrozenLake-v1")`.

The state is shown as gymnasium renders it as text (`ansi`), else as the numbers of the observation, each with its name where `observation_names`
gives one; with observation=image as its picture, with observation=grid_image as those numbers and the picture. Actions are called by the names that the environment itself gives them, by `action_names`, or by
their numbers. The seed and the split decide the seed of gymnasium's reset; `env_seed` seeds what happens in the episode.
"""

import inspect
import re
from functools import lru_cache
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Discrete
from gymnasium.utils.seeding import np_random
from pydantic import Field

from tether.core.errors import BadInput, UnknownName, did_you_mean
from tether.core.importing import in_one_line
from tether.core.seeding import derive_seed
from tether.envs.base import ActionEnv, ActionOptions, Work

_MARKED = re.compile(r"\x1b\[4\dm(.)\x1b\[0m")
"""A coloured background marks the player in gymnasium's grids; it is written as brackets."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FEWEST_DIGITS = 4


class GymOptions(ActionOptions):
    """Options of an environment of gymnasium."""

    max_turns: int = Field(default=20, ge=1)
    """Answers per episode."""
    actions_per_turn: int = Field(default=1, ge=1)
    """Actions executed per answer."""
    make: dict[str, Any] = {}
    """Arguments for gymnasium.make, such as {map_name: 8x8}."""
    task: str = ""
    """The goal and the rules; by default the first paragraph of the environment's own description."""
    action_names: list[str] = []
    """What the actions are called, in order, such as [left, right]."""
    observation_names: list[str] = []
    """What the numbers of an observation are called, in order."""
    success_return: float | None = None
    """An episode is a success from this return on; by default where gymnasium's threshold is reached, or, without one, the last reward is above 0."""


class GymnasiumEnv(ActionEnv[GymOptions]):
    """An environment of gymnasium; subclasses have an id."""

    id: ClassVar[str]
    Options = GymOptions
    work: Work = "process"

    def __init__(self, options: GymOptions) -> None:
        modes = gymnasium.spec(self.id).make(**options.make).metadata.get("render_modes", [])
        wanted = "rgb_array" if "image" in options.observation else "ansi"
        if wanted == "rgb_array" and wanted not in modes:
            raise BadInput(f"{self.name}: observation={options.observation}, but it renders no picture; use observation=grid")
        self._gym: gymnasium.Env[Any, Any] = gymnasium.make(self.id, render_mode=wanted if wanted in modes else None, **options.make)
        space = self._gym.action_space
        if not isinstance(space, Discrete):
            raise BadInput(f"{self.name} has the action space {space}; only environments with discrete actions can be played in words")
        meanings = getattr(self._gym.unwrapped, "get_action_meanings", None)
        names = options.action_names or (meanings() if callable(meanings) else [str(number) for number in range(space.n)])
        if len(names) != space.n or len(set(names)) < len(names):
            raise BadInput(f"{self.name}: action_names={names}, but it has {space.n} actions; give each a name of its own")
        self.actions = tuple(map(str, names))  # type: ignore[misc]
        self._first = int(space.start)
        super().__init__(options)

    @property
    def task(self) -> str:
        if self.options.task:
            return self.options.task
        described = inspect.getdoc(self._gym.unwrapped) or ""
        paragraphs = [" ".join(part.split()) for part in described.split("\n\n") if part.strip() and not part.startswith("#")]
        return paragraphs[0] if paragraphs else f"Play {self.id} for the largest reward."

    def generate(self, seed: int) -> None:
        self._shown, _ = self._gym.reset(seed=derive_seed("gymnasium", self.options.split, seed) % 2**31)
        self._return, self._out_of_time = 0.0, False

    def seed_randomness(self, env_seed: int) -> None:
        self._gym.unwrapped.np_random, _ = np_random(env_seed % 2**32)

    def act(self, index: int) -> tuple[float, bool, bool]:
        self._shown, paid, terminated, self._out_of_time, info = self._gym.step(self._first + index)
        reward = float(paid)
        self._return += reward
        told = info.get("is_success", info.get("success"))
        spec = self._gym.spec
        needed = self.options.success_return if self.options.success_return is not None else spec.reward_threshold if spec else None
        if told is not None:
            success = bool(told)
        else:
            success = self._return >= needed if needed is not None else bool(terminated and reward > 0)
        over = bool(terminated or self._out_of_time)
        return reward, over, over and success

    def turn_info(self) -> dict[str, Any]:
        return {"return": self._return, **({"truncated": True} if self._out_of_time else {})}

    def state_text(self) -> str:
        if self._gym.render_mode == "ansi":
            return _COLOUR.sub("", _MARKED.sub(r"[\1]", str(self._gym.render()))).strip("\n")
        return _written(self._shown, self.options.observation_names)

    def state_image(self) -> npt.NDArray[np.uint8]:
        return np.asarray(self._gym.render(), np.uint8)

    def close(self) -> None:
        """Close gymnasium's environment."""
        self._gym.close()


def _written(observation: Any, names: list[str]) -> str:
    """An observation in words: its numbers, four digits of each."""
    if isinstance(observation, dict):
        return "\n".join(f"{name}: {_written(part, [])}" for name, part in observation.items())
    numbers = observation if isinstance(observation, tuple | list) else np.asarray(observation).ravel().tolist()
    texts = [f"{value:.{_FEWEST_DIGITS}g}" if isinstance(value, float) else str(value) for value in numbers]
    if len(names) == len(texts):
        return "\n".join(f"{name}: {text}" for name, text in zip(names, texts, strict=True))
    return f"State: {', '.join(texts)}"


@lru_cache(maxsize=64)
def env_class(id: str) -> type[GymnasiumEnv]:
    """The class of an id; one that gymnasium does not know, or cannot make, is one line."""
    try:
        gymnasium.spec(id)
    except gymnasium.error.Error as error:
        known = [known for known in gymnasium.registry if not known.startswith("tether/")]
        raise UnknownName(f"gymnasium has no environment '{id}' ({in_one_line(error)}): {did_you_mean(id, known, 12)}") from error
    return type(id, (GymnasiumEnv,), {"name": f"gymnasium:{id}", "id": id, "__module__": __name__, "__qualname__": id})
