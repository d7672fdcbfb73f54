"""Where the servers of a run are, for a learner rank that Ray has placed: one file, which is written again when one of them is replaced.

`TETHER_PLACEMENT` names the file, as RANK and WORLD_SIZE name the rank. It holds the address of every engine, in order, and those of the workers of
each environment; null stands for one that is being replaced. Whoever loses a server reads the file again.
"""

import json
import os
from pathlib import Path
from typing import Any

from tether.core.errors import BadInput

PLACEMENT_VARIABLE = "TETHER_PLACEMENT"


class Placement:
    """The addresses in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def engines(self) -> list[str | None]:
        """Of every engine, in order."""
        return list(self._read()["engines"])

    def is_placed(self, env: str) -> bool:
        """Whether an environment has workers."""
        return env in self._read()["environments"]

    def workers(self, env: str) -> list[str]:
        """Of the workers of an environment that are there."""
        return [address for address in self._read()["environments"][env] if address]

    def write(self, engines: list[str | None], environments: dict[str, list[str | None]]) -> None:
        """Replace the file in one move: a reader sees the old one or the new one."""
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps({"engines": engines, "environments": environments}), encoding="utf-8")
        draft.replace(self._path)

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadInput(
                f"{PLACEMENT_VARIABLE} is '{self._path}', which cannot be read ({error}); start with tether train --ray"
            ) from error
        return found


def joined_placement() -> Placement | None:
    """The placement of this process; None where Ray did not start it."""
    path = os.environ.get(PLACEMENT_VARIABLE)
    return Placement(Path(path)) if path else None
