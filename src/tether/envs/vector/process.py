"""An environment in a process of its own: it can be killed when it hangs, and when it crashes nothing else does.

Processes are forked by Python's fork server, a clean helper process that has the environments' modules loaded: starting one takes
milliseconds, and nobody ever forks this process with its threads. The fork server (and Python's resource tracker) live as long as this
process does.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from tether.core.errors import EnvironmentFailure, environment_boundary
from tether.envs.env_factory import MAIN_GUARD, refuse_while_main_is_imported
from tether.envs.vector.background import GRACE_SECONDS, Background, in_thread
from tether.envs.vector.calls import Call
from tether.envs.vector.hosts import BesideHost
from tether.envs.vector.worker import Failed, serve

_BOOKKEEPING = threading.Lock()
"""multiprocessing looks for ended children whenever it starts one, and two readers of one exit code get in each other's way."""


def fork_server(*modules: str) -> ForkServerContext:
    """The fork server, with these modules and the main script loaded if it is not running yet."""
    refuse_while_main_is_imported()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", serve.__module__, *modules])
    return context


class ProcessHost(BesideHost):
    """An environment in a process."""

    def __init__(self, make: bytes, label: str, context: ForkServerContext, background: Background, step_seconds: float) -> None:
        super().__init__(background, step_seconds)
        self._make, self._label, self._context = make, label, context
        self._process: ForkServerProcess | None = None
        self._connection: Connection | None = None

    async def _build(self) -> None:
        await in_thread("start", self._start)

    async def _perform(self, call: Call) -> Any:
        return await in_thread(call.what, partial(self._exchange, call))

    def _start(self) -> None:
        with _BOOKKEEPING, environment_boundary("start"):
            if self.dead:  # closed before it began
                return
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=serve, args=(theirs, self._make, dict(os.environ)), name=f"tether-{self._label}")
            try:
                process.start()
            except (EOFError, ConnectionError) as error:
                raise RuntimeError(f"the fork server ended; {MAIN_GUARD}") from error
            theirs.close()
            self._process, self._connection = process, ours
        self._receive("start")

    def _exchange(self, call: Call) -> Any:
        assert self._connection is not None
        try:
            self._connection.send(call)
        except OSError:
            raise EnvironmentFailure(f"{call.what}: {self._post_mortem()}") from None
        return self._receive(call.what)

    def _receive(self, what: str) -> Any:
        assert self._connection is not None
        try:
            message = self._connection.recv_bytes()
        except (EOFError, OSError):
            hint = f"; {MAIN_GUARD}" if what == "start" else ""
            raise EnvironmentFailure(f"{what}: {self._post_mortem()}{hint}") from None
        with environment_boundary(f"{what}: the result of the worker process cannot be read"):
            reply = pickle.loads(message)
        if isinstance(reply, Failed):
            self.dead = self.dead or what == "start"
            raise EnvironmentFailure(reply.reason)
        return reply

    def _post_mortem(self) -> str:
        """How the process ended."""
        self.dead = True
        code = self._reap()
        if code is None:
            return "the process of the environment closed its connection"
        ending = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"the process of the environment {ending}"

    def _reap(self) -> int | None:
        """The exit code, if the process ends within the grace period."""
        assert self._process is not None
        wait([self._process.sentinel], timeout=GRACE_SECONDS)
        with _BOOKKEEPING:
            self._process.join(timeout=0)  # takes it off multiprocessing's list
            return self._process.exitcode

    def _kill(self) -> None:
        with _BOOKKEEPING:
            if self._process is None:
                return
            self._process.kill()
        self._reap()

    def hang_up(self) -> None:
        """An idle worker leaves when the connection is closed. One at work (the host is dead then) is killed: a thread of ours is
        reading from its connection."""
        if self.dead:
            self._kill()
        elif self._connection is not None:
            self._connection.close()

    def see_off(self) -> None:
        if self._process is not None and self._reap() is None:
            self._kill()


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
