"""What a trainer tells whoever watches it. The command line shows it live; tests and library callers watch nothing."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from tether.runs.schema import StepRecord
from tether.runs.timings import StepTimings


class Callback(Protocol):
    """A view of a run."""

    def stage(self, name: str, total: int) -> None:
        """A stage of the step begins, with so many units of work."""
        ...

    def advance(self) -> None:
        """One unit of the stage is done."""
        ...

    def record(self, record: StepRecord, timings: StepTimings) -> None:
        """A step is complete and on disk, and this is what it cost."""
        ...

    def note(self, text: str) -> None:
        """Something worth knowing before the first step."""
        ...

    def showing(self) -> AbstractContextManager[None]:
        """Entered while the run goes on."""
        ...


class NullCallback:
    """Shows nothing."""

    def stage(self, name: str, total: int) -> None:
        pass

    def advance(self) -> None:
        pass

    def record(self, record: StepRecord, timings: StepTimings) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def showing(self) -> AbstractContextManager[None]:
        return nullcontext()
