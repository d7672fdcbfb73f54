"""Each kernel starts through the launcher that was made for it, also when threads load launchers at the same time.

Up to version 3.6 Triton makes a C module for every signature of a kernel, and all of them have the name `__triton_launcher`. Where a file is
loaded a second time, Python does not make a module anew: it takes the one last loaded under that name, whichever that is, and puts the
contents of this file into it. A thread that had just loaded that other one and reads its `launch` a moment later would start its kernel
through a launcher of other arguments: an error where their number differs, and wrong results where only their types do.
"""

from threading import Lock
from types import ModuleType
from typing import Any

from triton.runtime import build

_load: Any = getattr(build, "_load_module_from_path", None)  # private, and later versions may do without
_loading = Lock()


def keep_launchers_apart() -> None:
    """From here on Triton's loader gives every caller a module of its own. Launchers are still built at the same time, outside the lock."""
    if _load is not None:
        build._load_module_from_path = _load_copy


def _load_copy(name: str, path: str) -> ModuleType:
    copy = ModuleType(name)
    with _loading:
        vars(copy).update(vars(_load(name, path)))
    return copy
