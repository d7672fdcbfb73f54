"""Objects of the user's own by "package.module:name": environments, rewards, scores.

A module is looked for among what is installed, then in the current folder. Such a name is code that will run: it is only taken from what a
user writes (the command line, a config, an argument), never from a row of data or from a client of a server.
"""

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tether.core.errors import BadInput, MissingDependency, TetherError, UnknownName, did_you_mean


def is_import_path(name: str) -> bool:
    """Whether a name is written as "module:name". An address ("http://...") is not."""
    return ":" in name and "://" not in name


def import_object(path: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    """The object of "package.module:name". `kind` ("environment") names it in errors; `fits` says which objects of the module to suggest."""
    module_name, _, attribute = path.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        stem = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise BadInput(f"{kind} '{path}' is written as a file; write it as a module, '{stem}:{attribute or 'NAME'}'")
    try:
        module = _import_module(module_name)
    except ModuleNotFoundError as error:
        raise _not_found(path, kind, module_name, error) from error
    except Exception as error:
        raise BadInput(f"{kind} '{path}': importing '{module_name}' failed: {in_one_line(error)}") from error
    if not hasattr(module, attribute):
        known = [key for key, value in vars(module).items() if not key.startswith("_") and fits(value)]
        raise UnknownName(f"module '{module_name}' has no {kind} '{attribute}': {did_you_mean(attribute, known)}")
    return getattr(module, attribute)


def in_one_line(error: BaseException) -> str:
    """An error of somebody else's code for a message of one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _import_module(name: str) -> ModuleType:
    """A module from the search path, else from the current folder, which is then searched last so that it hides nothing installed."""
    here = os.getcwd()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] or here in sys.path:
            raise
    sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name.partition(".")[0]:
            sys.path.remove(here)
        raise


def _not_found(path: str, kind: str, module_name: str, error: ModuleNotFoundError) -> TetherError:
    """Either the module itself cannot be found, or one that it imports."""
    missing = error.name or ""
    if "." not in missing and module_name.partition(".")[0] == missing:
        return BadInput(
            f"{kind} '{path}': there is no module '{missing}', neither installed nor in this folder; check the name, or run from its folder"
        )
    itself = module_name == missing or module_name.startswith(f"{missing}.")
    return missing_module(f"{kind} '{path}'", error, "" if itself else f"importing '{module_name}' failed: ")


def missing_module(what: str, error: ModuleNotFoundError, while_doing: str = "") -> TetherError:
    """The error of something that needs a module which is not there: a package to install, or a wrong name inside one that is installed.

    Python imports a package before its modules. So where a dotted name is missing, the package around it is there.
    """
    missing = error.name or ""
    package, _, _ = missing.rpartition(".")
    if not package:
        return MissingDependency(f"{what} needs the package '{missing}', which is not installed; run: pip install {missing}")
    folders = getattr(sys.modules.get(package), "__path__", None)
    if folders is None:
        hint = f"'{package}' is a module, not a package"
    else:
        hint = did_you_mean(missing, [f"{package}.{module.name}" for module in pkgutil.iter_modules(folders)])
    return BadInput(f"{what}: {while_doing}there is no module '{missing}': {hint}")
