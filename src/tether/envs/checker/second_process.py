"""The same episodes in another Python, whose string hashes are salted otherwise: what leans on the order of a set shows there."""

import multiprocessing
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

from tether.core.errors import EnvironmentFailure, environment_boundary
from tether.core.protocols import Env
from tether.envs.checker.episodes import play, transcript
from tether.envs.factory import MAIN_GUARD

SECONDS = 300.0
"""What the other process may take, its start included."""

Transcript = list[tuple[str, str]]


def transcripts_elsewhere(make: bytes, numbers: Sequence[int]) -> list[Transcript]:
    """The transcripts of the checker's episodes of these numbers, each played in a fresh environment, all in one fresh process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_play_all, args=(theirs, make, numbers), name="tether-check")
    with _another_hash_seed():
        process.start()
    theirs.close()
    try:
        if not ours.poll(SECONDS):
            raise EnvironmentFailure(f"another process did not play {len(numbers)} episodes within {SECONDS:g} s")
        found: list[Transcript] | str = ours.recv()
    except EOFError:
        process.join()
        raise EnvironmentFailure(
            f"another process ended with exit code {process.exitcode} before it had played {len(numbers)} episodes; {MAIN_GUARD}"
        ) from None
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
    if isinstance(found, str):
        raise EnvironmentFailure(found)
    return found


def _play_all(connection: Connection, make: bytes, numbers: Sequence[int]) -> None:
    """What the other process does."""
    try:
        with environment_boundary("in another process"):
            maker = pickle.loads(make)
            envs: list[Env] = [maker() for _ in numbers]
        connection.send([transcript(play(env, number)) for env, number in zip(envs, numbers, strict=True)])
    except EnvironmentFailure as failure:
        connection.send(str(failure))


@contextmanager
def _another_hash_seed() -> Iterator[None]:
    """While this lasts, a Python that is started salts its hashes otherwise than this one does (or, if unsalted, did)."""
    variable = "PYTHONHASHSEED"
    before = os.environ.get(variable)
    os.environ[variable] = "1" if before != "1" else "2"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
