"""Environments by name, imported on use; options are checked against the class's own `Options` before anything is built.

A name is one of: a built-in; one that user code registered; one that an installed distribution offers through the entry point group
`tether.environments`; "package.module:Class", which is imported as it stands; an environment of another package, such as "gymnasium:ID"
(envs/adapters); or the address of an environment served over HTTP.
An environment class has an attribute `Options` (a Settings class) and takes an instance of it as its only required argument.

An `EnvFactory` builds environments of one kind, in this process or in another one. Another process receives a reference to the class (its module
and its name there) and the options. So an environment that user code registered works there too, as long as its module can be imported; a class
defined inside a function cannot be.
"""

import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from multiprocessing import spawn
from typing import Any, Protocol, cast

from tether.core.config import Settings, validate
from tether.core.errors import BadInput, EnvironmentFailure, TetherError, UnknownName, did_you_mean, from_outside
from tether.core.importing import import_object, in_one_line, missing_module
from tether.core.protocols import Env, few_shot_of
from tether.envs.adapters.catalog import ADAPTERS, adapted_class, adapter_of
from tether.envs.base import check_reset_signature

ENTRY_POINTS = "tether.environments"
"""The entry point group in which a distribution offers environments: name = "package.module:Class"."""


class EnvClass(Protocol):
    """What the registry needs of an environment class."""

    @property
    def Options(self) -> type[Settings]: ...

    def __call__(self, options: Any, /) -> Env: ...


class EnvRegistry:
    """Built-in and registered environments, then those of installed distributions. A name of the first kind always wins.

    An entry is a class, or "module:Class" to import when it is asked for: listing names costs nothing.
    """

    def __init__(self, entries: Mapping[str, str]) -> None:
        self._entries: dict[str, Any] = dict(entries)

    def names(self) -> list[str]:
        return sorted({*self._entries, *_offers()})

    def register(self, name: str, entry: Any) -> None:
        """Add an entry. An existing name is refused."""
        if name in self._entries:
            raise UnknownName(f"environment '{name}' is registered already; choose another name")
        self._entries[name] = entry

    def get(self, name: str) -> Any:
        """The class of a name; an unknown name is an error that suggests the nearest one."""
        if name in self._entries:
            entry = self._entries[name]
            if not isinstance(entry, str):
                return entry
            module, _, attribute = entry.partition(":")
            try:
                return getattr(importlib.import_module(module), attribute)
            except ModuleNotFoundError as error:
                raise missing_module(f"environment '{name}'", error) from error
        offers = _offers().get(name)
        if offers is None:
            raise UnknownName(f"unknown environment '{name}': {did_you_mean(name, self.names())}")
        if len(offers) > 1:
            origins = " and ".join(_origin(offer) for offer in offers)
            raise BadInput(
                f"environment '{name}' is offered by {origins}; uninstall one of them, or name the class as package.module:Class"
            )
        return _load(offers[0])

    def clashes(self) -> list[str]:
        """One line for each offer that stays out of reach because its name is taken by a built-in or registered environment."""
        return [
            f"environment '{name}' of {_origin(offer)} is not used: the name is taken; use it as {offer.value}, or rename its entry point"
            for name, offers in sorted(_offers().items())
            if name in self._entries
            for offer in offers
        ]


ENVIRONMENTS = EnvRegistry(
    {
        "countdown": "tether.envs.countdown.env:Countdown",
        "deepcoder": "tether.envs.deepcoder.env:DeepCoder",
        "frozen_lake": "tether.envs.frozen_lake.env:FrozenLake",
        "metamathqa": "tether.envs.metamathqa.env:MetaMathQA",
        "qa": "tether.envs.qa.env:QA",
        "searchqa": "tether.envs.searchqa.env:SearchQA",
        "sokoban": "tether.envs.sokoban.env:Sokoban",
        "webshop": "tether.envs.webshop.env:WebShop",
    },
)


def make_env(name: str, /, **options: Any) -> Env:
    """The environment of this name; an unknown name or option is one clear line that suggests the nearest known one."""
    if is_address(name):
        from tether.envs.remote.http_client import connect

        return connect(name, **options)
    return build(find_class(name), name, options)


def register_env(name: str, cls: EnvClass) -> None:
    """Make an environment of your own available under a name."""
    ENVIRONMENTS.register(name, cls)


def is_address(name: str) -> bool:
    """Whether a name is the address of an environment served over HTTP."""
    return name.startswith(("http://", "https://"))


def check_name(name: str) -> str:
    """The name, if it may name an environment; no module is imported and nothing is built for that."""
    if not is_address(name) and ":" not in name and name not in ENVIRONMENTS.names():
        forms = [adapter.form for adapter in ADAPTERS.values()]
        raise UnknownName(f"unknown environment '{name}': {did_you_mean(name, [*ENVIRONMENTS.names(), *forms])}")
    return name


def check_received(name: str, where: str, what: str = "environment") -> None:
    """Refuse to import a module because a file says so, unless it is installed: a run folder or a settings file may have come from somebody else,
    with a module beside it.

    A module of the current folder is imported only where the user named it: on the command line, or in a call. Nothing is imported here.
    """
    if is_address(name) or ":" not in name:
        return
    if adapter_of(name) is not None:  # of an installed package; a command of MCP is a program that would be started
        command = name.removeprefix("mcp:")
        if command != name and not is_address(command):
            raise BadInput(
                f"{where} names the environment '{name}', and starts a program for it; if that is what you want, name it yourself"
            )
        return
    module = name.partition(":")[0].partition(".")[0]
    here = os.path.realpath(os.getcwd())
    chosen = {os.path.realpath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    installed = [path for path in sys.path if os.path.realpath(path) != here or here in chosen]
    finders = [(finder, installed if finder is PathFinder else None) for finder in sys.meta_path]  # the others are of editable installs
    if module in sys.modules or any(finder.find_spec(module, path) is not None for finder, path in finders):
        return
    ways = {
        "environment": f"add {name} to the command (tether train {name} ..., tether eval ... --env {name})",
        "agent": f"add --agent {name}",
    }
    named = ways.get(what, "set PYTHONPATH=.")
    raise BadInput(
        f"{where} names the {what} '{name}', and '{module}' is not installed; a module of this folder is imported only if you name it "
        f"yourself: {named}, or install it"
    )


def find_class(name: str) -> EnvClass:
    """The class of a name that is no address."""
    if adapter_of(name) is not None:
        return cast(EnvClass, adapted_class(name))
    found = (
        import_object(name, "environment", lambda value: inspect.isclass(value) and hasattr(value, "Options"))
        if ":" in name
        else ENVIRONMENTS.get(check_name(name))
    )
    if not callable(found) or not hasattr(found, "Options"):
        raise BadInput(
            f"environment '{name}' has no Options; give its class an attribute Options, a subclass of tether.envs.base.TurnOptions"
        )
    return cast(EnvClass, found)


def build(cls: EnvClass, name: str, options: Mapping[str, Any]) -> Env:
    """An environment of a class. An error of its constructor becomes one line; Tether's own errors are such lines already."""
    settings = validate(cls.Options, options, what=f"{name} option")
    try:
        env = cls(settings)
        if any(getattr(settings, name, 0) for name in ("examples", "few_shot")):
            _ = env.instructions, few_shot_of(env)  # more examples than there are: said here, before anything is played
    except TetherError:
        raise
    except BaseException as error:
        if from_outside(error):
            raise
        raise EnvironmentFailure(f"environment '{name}' cannot be built: {in_one_line(error)}") from error
    check_reset_signature(env, name)
    return env


def _offers() -> dict[str, list[EntryPoint]]:
    return _offers_on(tuple(sys.path))


@lru_cache(maxsize=4)
def _offers_on(search_path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    """The entry points by name, read once per search path (reading walks through every installed distribution)."""
    found: dict[str, list[EntryPoint]] = {}
    for offer in entry_points(group=ENTRY_POINTS):
        found.setdefault(offer.name, []).append(offer)
    return found


def _origin(offer: EntryPoint) -> str:
    distribution = offer.dist
    return f"distribution '{distribution.name} {distribution.version}'" if distribution else f"the entry point '{offer.value}'"


def _load(offer: EntryPoint) -> Any:
    try:
        return offer.load()
    except Exception as error:
        raise BadInput(
            f"environment '{offer.name}' of {_origin(offer)} cannot be loaded from '{offer.value}': "
            f"{in_one_line(error)}; fix or uninstall that distribution"
        ) from error


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
    if isinstance(source, str) and adapter_of(source) is not None:  # another process finds its class by this name
        return EnvFactory(source, partial(make_env, source, **chosen), find_class(source).Options)
    if isinstance(source, str):
        return _of_class(find_class(source), source, chosen)
    name = getattr(source, "name", None)
    label = name if isinstance(name, str) else getattr(source, "__name__", type(source).__name__)
    if hasattr(source, "Options"):
        return _of_class(cast(EnvClass, source), label, chosen)
    if chosen:
        raise BadInput(f"{label} takes no options, but got {', '.join(sorted(chosen))}; give it an attribute Options")
    return EnvFactory(label, partial(_call, source, label), None)


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
