"""One base class, one class per boundary that can fail, and the words for near misses.

A message says what went wrong, what was got, and what to do, in one line. Mistakes of the user (`BadInput` and below)
leave the command line with exit code 2; everything else with 1. Each class also inherits the standard exception it refines,
so library callers can catch `ValueError` or `OSError` without knowing Tether's names.
"""

import difflib
import dis
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tether.core.output import environment_output


class TetherError(Exception):
    """Base of every error Tether raises on purpose."""

    exit_code = 1
    common = False
    """Every rank of a run on several raises this error: rank 0 reports it, the others end in silence."""


class BadInput(TetherError, ValueError):
    """The user gave something that cannot be used."""

    exit_code = 2


class UnknownName(BadInput):
    """A name that is in no registry; the message suggests the nearest one."""


class ConfigError(BadInput):
    """One or more settings are wrong; every problem is listed, one a line."""


class MissingDependency(TetherError, ImportError):
    """An optional package is needed; the message names the command that installs it."""

    exit_code = 2


class ModelUnavailable(BadInput):
    """A model cannot be had here; the message says how to get it."""


class CheckpointError(TetherError):
    """A checkpoint cannot be read or written; nothing already on disk was changed."""


class StorageError(TetherError, OSError):
    """The run folder cannot be written (disk full, no permission)."""


class OutOfMemory(TetherError, MemoryError):
    """A stage of a step did not fit into memory; the message says what to lower. Nothing already written is lost.

    Ranks run out of memory together: an allocation that fails on one rank where the others cannot be told is a RankFailure.
    """

    common = True


class RankFailure(Exception):
    """A rank failed where the others cannot follow, or another rank no longer answers. The run continues from its last checkpoint.

    No TetherError: whoever takes a failed measurement in its stride must not take this one, or the ranks would go separate ways.
    """

    exit_code = 1


class EngineUnavailable(TetherError):
    """The servers that sample responses cannot be used any more, or hold other weights than the learner. Nothing already written is lost."""


class OutdatedEngine(EngineUnavailable):
    """A rank that publishes no weights has no server with the present ones left: the ranks publish them again, together."""


class DivergedModel(TetherError, ArithmeticError):
    """The model's numbers are not finite: nothing can be sampled from it."""


class EnvironmentFailure(TetherError):
    """An environment raised; it ends that episode and is recorded on it, its siblings go on."""


@contextmanager
def environment_boundary(what: str) -> Iterator[None]:
    """Attribute whatever escapes from an environment's code to the environment, with the step that raised it; what it prints is shown as its
    output."""
    try:
        with environment_output():
            yield
    except EnvironmentFailure as failure:  # from a worker that has already put it into words, without the number of the step
        raise EnvironmentFailure(f"{what}: {str(failure).removeprefix(f'{what.split()[0]}: ')}") from failure
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: an environment must not end the run
        if from_outside(error):
            raise
        raise EnvironmentFailure(f"{what}: {type(error).__name__}: {error}".removesuffix(": ")) from error


def from_outside(error: BaseException) -> bool:
    """Whether an exception only passes through the code that it comes from: Ctrl-C, a signal, a task that is cancelled, a generator that is closed.

    An environment that raises KeyboardInterrupt itself does so by a raise statement, which an exception from outside never comes from, unless it is
    the statement of a signal handler.
    """
    if isinstance(error, Exception):
        return False
    trace = error.__traceback__
    in_main_thread = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
    handlers: list[Any] = [signal.getsignal(number) for number in signals]
    handling = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers}
    raised_here = True
    while trace is not None:
        if in_main_thread and trace.tb_frame.f_code in handling:
            return True
        raised_here = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")
        trace = trace.tb_next
    if isinstance(error, SystemExit) or (isinstance(error, KeyboardInterrupt) and not in_main_thread):
        return False
    return not raised_here


def did_you_mean(name: str, known: Iterable[str], most: int | None = None) -> str:
    """The tail of a message about an unknown name: the nearest known one, and all of them, or the first `most`.

    >>> did_you_mean("frozenlake", ["sokoban", "frozen_lake"])
    "did you mean 'frozen_lake'? (known: frozen_lake, sokoban)"
    """
    names = sorted(known)
    listing = ", ".join(names[:most]) if names else "none"
    if most is not None and len(names) > most:
        listing += f", ... {len(names) - most} more"
    spelled = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.6)
    return f"did you mean '{spelled[near[0]]}'? (known: {listing})" if near else f"known: {listing}"
