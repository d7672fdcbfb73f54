"""What runs in the process of an environment: build it, then answer calls until the other end hangs up.

A call is answered with the pickled result, or with a `Failed` that holds the words of the error. Ctrl-C is the caller's business and
is not listened to here. A worker never outlives the process it works for, not even in the middle of an endless loop.
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
from tether.envs.vector.calls import close_env, perform


@dataclass(frozen=True, slots=True)
class Failed:
    """In place of a result: what went wrong."""

    reason: str


def serve(connection: Connection, make: bytes, environ: dict[str, str]) -> None:
    """The life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ.clear()  # the server that forked this process may have been started long before
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
    with environment_boundary("start"):
        env: Env = maker()
        return env


def _answer_calls(env: Env, connection: Connection) -> None:
    while True:
        try:
            call = connection.recv()
        except EOFError:  # the other end hung up
            return
        try:
            reply = _pickled(perform(env, call), call.what)
        except EnvironmentFailure as failure:
            reply = pickle.dumps(Failed(str(failure)))
        try:
            connection.send_bytes(reply)
        except OSError:  # it hung up in the meantime
            return


def _pickled(result: Any, what: str) -> bytes:
    with environment_boundary(f"{what}: the result cannot leave the worker process"):
        return pickle.dumps(result)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
