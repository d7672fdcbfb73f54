"""Environments by name, imported on use; options are checked against the class's own `Options` before anything is built.

An environment class has an attribute `Options` (a Settings class) and takes an instance of it as its only required argument.
"""

from typing import Any, Protocol, cast

from tether.core.config import Settings, validate
from tether.core.protocols import Env
from tether.core.registry import Registry


class EnvClass(Protocol):
    """What the registry needs of an environment class."""

    @property
    def Options(self) -> type[Settings]: ...

    def __call__(self, options: Any, /) -> Env: ...


ENVIRONMENTS = Registry(
    "environment",
    {
        "countdown": "tether.envs.countdown.env:Countdown",
        "deepcoder": "tether.envs.deepcoder.env:DeepCoder",
        "frozen_lake": "tether.envs.frozen_lake.env:FrozenLake",
        "metamathqa": "tether.envs.metamathqa.env:MetaMathQA",
        "searchqa": "tether.envs.searchqa.env:SearchQA",
        "sokoban": "tether.envs.sokoban.env:Sokoban",
        "webshop": "tether.envs.webshop.env:WebShop",
    },
)


def make_env(name: str, **options: Any) -> Env:
    """The environment of this name; an unknown name or option is one clear line that suggests the nearest known one."""
    cls = cast(EnvClass, ENVIRONMENTS.get(name))
    return cls(validate(cls.Options, options, what=f"{name} option"))


def register_env(name: str, cls: EnvClass) -> None:
    """Make an environment of your own available under a name."""
    ENVIRONMENTS.register(name, cls)
