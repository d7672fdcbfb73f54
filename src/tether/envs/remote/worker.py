"""The main function of a worker process: build the environment, then execute calls until the other end closes the connection.

The reply to a call is the pickled result, or a `Failed` with the text of the error. The worker ignores Ctrl-C: the main process handles
it. A worker ends with the process it works for, even in the middle of an endless loop.
"""

import multiprocessing
import os
import pickle
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tether.core.errors import EnvironmentFailure, environment_boundary
from tether.core.protocols import Env
from tether.envs.remote.calls import build_env, close_env, perform


@dataclass(frozen=True, slots=True)
class Failed:
    """Sent in place of a result."""

    reason: str


def serve(connection: Connection, make: bytes, environ: dict[str, str]) -> None:
    """Run the worker. `make` is a pickled function without arguments that builds the environment."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ.clear()  # the fork server may have been started long ago, with other variables
    os.environ.update(environ)
    try:
        env = _build(make)
    except EnvironmentFailure as failure:
        connection.send(Failed(str(failure)))
        return
    connection.send(None)
    _answer_calls(env, connection)
    close_env(env)


def _build(make: bytes) -> Env:
    try:
        maker = pickle.loads(make)
    except Exception as error:
        raise EnvironmentFailure(
            f"start: the worker process cannot import the environment ({type(error).__name__}: {error}); "
            "define it in a module that can be imported from anywhere, not in an interactive session"
        ) from error
    return build_env(maker)


def _answer_calls(env: Env, connection: Connection) -> None:
    while True:
        try:
            call = connection.recv()
        except EOFError:  # the other end closed the connection
            return
        try:
            reply = _pickled(perform(env, call), call.what)
        except EnvironmentFailure as failure:
            reply = pickle.dumps(Failed(str(failure)))
        try:
            connection.send_bytes(reply)
        except OSError:  # the connection was closed meanwhile
            return


def _pickled(result: Any, what: str) -> bytes:
    with environment_boundary(f"{what}: the result cannot leave the worker process"):
        return pickle.dumps(result)


def _leave_with_parent() -> None:
    # A watching thread, because the main thread may be inside environment code that never returns.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
