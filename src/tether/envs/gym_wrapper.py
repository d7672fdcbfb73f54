"""Any environment as a gymnasium.Env: texts in, texts out.

The seed of `reset` is the seed of the instance; without one it is drawn from `np_random`. `terminated` means that the task ended,
`truncated` that the turns ran out. `info` holds what the step says, `success`, the `instructions`, and the picture in image mode.
`register_with_gymnasium()` makes every environment available to `gymnasium.make`, as "tether/FrozenLake-v0" and the like.
"""

import logging
import string
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Text

from tether.core.errors import BadInput, did_you_mean
from tether.core.protocols import Env, checked_observation, checked_step
from tether.core.types import Observation
from tether.envs.registry import ENVIRONMENTS, make_env

_LOG = logging.getLogger(__name__)

SAMPLE_LENGTH = 32
"""Characters of a random action, at most."""


class AnyText(Text):
    """Every text is in this space, of any length and in any script; samples are short and printable.

    gymnasium's Text lists its characters one by one and has a greatest length. What an agent may write, and what a web page or a
    program's output may show it, has neither.
    """

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(SAMPLE_LENGTH, min_length=0, charset=string.ascii_letters + string.digits + " |[]", seed=seed)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText)

    def __repr__(self) -> str:
        return "AnyText()"


class GymEnv(gymnasium.Env[str, str]):
    """An environment behind gymnasium's interface."""

    def __init__(self, env: Env, render_mode: str | None = None) -> None:
        self.env = env
        modes = ["ansi", "rgb_array"] if hasattr(env, "state_image") else ["ansi"]
        if render_mode is not None and render_mode not in modes:
            raise BadInput(f"{env.name} has no render mode '{render_mode}'; use one of {', '.join(modes)}")
        self.metadata = {"render_modes": modes, "render_fps": 1}
        self.render_mode = render_mode
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self._shown: Observation | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start the instance of a seed. The only option is `env_seed`, the seed of the randomness inside the episode."""
        super().reset(seed=seed)
        chosen = dict(options or {})
        if "luck" in chosen:
            _LOG.warning("reset option 'luck' is now called 'env_seed'; the old name works for one release")
            if "env_seed" in chosen:
                raise BadInput("reset got both 'env_seed' and its old name 'luck'; give env_seed alone")
            chosen["env_seed"] = chosen.pop("luck")
        env_seed = chosen.pop("env_seed", None)
        if chosen:
            wrong = next(iter(chosen))
            raise BadInput(f"unknown reset option '{wrong}': {did_you_mean(wrong, ['env_seed'])}")
        chosen_seed = int(self.np_random.integers(2**63)) if seed is None else seed
        self._shown = checked_observation(self.env.reset(chosen_seed, env_seed=env_seed))
        return self._shown.text, self._info({})

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        step = checked_step(self.env.step(action))
        self._shown = step.observation
        truncated = step.info.get("truncated", False)
        info = self._info({**step.info, "success": step.success})
        return step.observation.text, step.reward, step.done and not truncated, truncated, info

    def render(self) -> str | npt.NDArray[np.uint8] | None:
        """The text last shown (ansi), or a picture of the state (rgb_array)."""
        if self.render_mode is None:
            return None
        if self._shown is None:
            raise BadInput(f"{self.env.name}: there is nothing to render yet; call reset first")
        if self.render_mode == "ansi":
            return self._shown.text
        picture: npt.NDArray[np.uint8] = self.env.state_image()  # type: ignore[attr-defined]
        return picture

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close is not None:
            close()

    def _info(self, more: dict[str, Any]) -> dict[str, Any]:
        assert self._shown is not None
        picture = {} if self._shown.image is None else {"image": self._shown.image}
        return {**more, "instructions": self.env.instructions, **picture}


def as_gymnasium(name: str, *, render_mode: str | None = None, **options: Any) -> GymEnv:
    """The environment of a name, for gymnasium."""
    return GymEnv(make_env(name, **options), render_mode)


def register_with_gymnasium() -> list[str]:
    """Register every environment with gymnasium, once; answers the ids, such as "tether/FrozenLake-v0"."""
    ids = [gymnasium_id(name) for name in ENVIRONMENTS.names()]
    for name, each in zip(ENVIRONMENTS.names(), ids, strict=True):
        if each not in gymnasium.registry:
            gymnasium.register(each, entry_point=f"{__name__}:as_gymnasium", kwargs={"name": name})
    return ids


def gymnasium_id(name: str) -> str:
    """The id of a name at gymnasium.

    >>> gymnasium_id("frozen_lake")
    'tether/FrozenLake-v0'
    """
    words = "".join(sign if sign.isalnum() else " " for sign in name).split()
    return f"tether/{''.join(word[0].upper() + word[1:] for word in words)}-v0"
