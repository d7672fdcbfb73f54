"""How to build an environment, in this process or in another one.

An `EnvFactory` is made from a name and options, from an environment class and options, or from any callable without arguments. Another
process receives a reference to the class (its module and its name there) and the options. So an environment that user code registered
works there too, as long as its module can be imported; a class defined inside a function cannot be.
"""

import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import spawn
from typing import Any, cast

from tether.core.config import Settings
from tether.core.errors import BadInput
from tether.core.protocols import Env
from tether.envs.base import check_reset_signature
from tether.envs.registry import EnvClass, build, find_class, is_address, make_env

EnvSource = str | EnvClass | Callable[[], Env]
"""A name, an environment class, or a callable that makes an environment."""


@dataclass(frozen=True, slots=True)
class EnvFactory:
    """A way to build environments of one kind."""

    label: str
    """The environment's name in messages."""
    make: Callable[..., Env]
    """Builds one; takes further options, if the environment has options."""
    options: type[Settings] | None
    """The options it takes; None if they are not known here (a plain callable, an address)."""

    def pickled(self) -> bytes:
        """`make` for another process; BadInput if that process could not import the environment."""
        try:
            return pickle.dumps(self.make)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise BadInput(
                f"environment '{self.label}' cannot be built in another process ({error}); "
                "define its class, or the function that makes it, at the top level of a module"
            ) from error


def env_factory(source: EnvSource, options: Mapping[str, Any] | None = None) -> EnvFactory:
    """The factory of a name, a class or a callable."""
    chosen = dict(options or {})
    if isinstance(source, str) and is_address(source):
        return EnvFactory(source, partial(make_env, source, **chosen), None)
    if isinstance(source, str):
        return _of_class(find_class(source), source, chosen)
    if hasattr(source, "Options"):
        return _of_class(cast(EnvClass, source), _name_of(source), chosen)
    if chosen:
        raise BadInput(f"{_name_of(source)} takes no options, but got {', '.join(sorted(chosen))}; give it an attribute Options")
    return EnvFactory(_name_of(source), partial(_call, source, _name_of(source)), None)


MAIN_GUARD = "run a script from a file, with its work under: if __name__ == '__main__':"


def refuse_while_main_is_imported() -> None:
    """Raise BadInput while the main script is being imported.

    Worker processes import the main script. A script that starts workers at import time would start them again in each worker.
    """
    try:
        spawn.get_preparation_data("tether")
    except RuntimeError:
        raise BadInput(f"environments in other processes were requested while the main script is being imported; {MAIN_GUARD}") from None


def main_is_guarded() -> bool:
    """Whether the main script, which worker processes import, does its work only where it is the main script. Modules run with -m, and
    interactive sessions, are not imported."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if path is None or getattr(main, "__spec__", None) is not None:
        return True
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return "__main__" in file.read()
    except OSError:
        return False


def _of_class(cls: EnvClass, label: str, options: dict[str, Any]) -> EnvFactory:
    return EnvFactory(label, partial(_build, cls, label, options), cls.Options)


def _build(cls: EnvClass, label: str, options: dict[str, Any], **more: Any) -> Env:
    return build(cls, label, {**options, **more})


def _call(make: Callable[[], Env], label: str) -> Env:
    env = make()
    check_reset_signature(env, label)
    return env


def _name_of(source: Any) -> str:
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else getattr(source, "__name__", type(source).__name__)
