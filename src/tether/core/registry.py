"""Names to objects, imported on use.

A registry maps a name to "module:attribute", so listing names costs nothing and an optional dependency is only touched when its
entry is asked for. Objects can also be registered directly, from user code.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from tether.core.errors import UnknownName, did_you_mean
from tether.core.importing import missing_module


class Registry:
    """A named table of one kind of thing ("environment", "algorithm")."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self._entries: dict[str, Any] = dict(entries)

    def names(self) -> list[str]:
        return sorted(self._entries)

    def register(self, name: str, entry: Any) -> None:
        """Add an entry: an object, or "module:attribute" to import later. An existing name is refused."""
        if name in self._entries:
            raise UnknownName(f"{self.kind} '{name}' is registered already; choose another name")
        self._entries[name] = entry

    def get(self, name: str) -> Any:
        """The object of a name; an unknown name is an error that suggests the nearest one."""
        if name not in self._entries:
            raise UnknownName(f"unknown {self.kind} '{name}': {did_you_mean(name, self._entries)}")
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            try:
                entry = getattr(importlib.import_module(module), attribute)
            except ModuleNotFoundError as error:
                raise missing_module(f"{self.kind} '{name}'", error) from error
        return entry
