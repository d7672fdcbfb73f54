"""Where one environment of a pool runs: in the caller's thread, in a thread beside it, or in a process of its own.

A host is made for one environment and ends with it. An environment that hung, or whose process crashed, is never called again; a new host
replaces it. The deadline of a call starts when the call starts, not while it waits for a slot. Building the environment has a deadline of
its own.

Processes are forked by Python's fork server, a clean helper process that has the environments' modules loaded. Starting a process takes
milliseconds, and this process with its threads is never forked. The fork server (and Python's resource tracker) live as long as this
process does. A worker process (`serve`) answers each call with the pickled result, or a `Failed` with the text of the error. It ignores Ctrl-C,
which the main process handles, and ends with the process it works for, even in the middle of an endless loop.
"""

import asyncio
import inspect
import multiprocessing
import os
import pickle
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from tether.core.child import signal_name
from tether.core.errors import EnvironmentFailure, environment_boundary
from tether.core.protocols import Env
from tether.envs.registry import MAIN_GUARD, refuse_while_main_is_imported
from tether.envs.remote.calls import (
    GRACE_SECONDS,
    Background,
    Call,
    build_env,
    close_env,
    close_in_thread,
    close_logged,
    in_thread,
    perform,
    perform_async,
    within,
)


@dataclass(frozen=True, slots=True)
class Failed:
    """Sent in place of a result."""

    reason: str


def serve(connection: Connection, output: Connection, make: bytes, environ: dict[str, str]) -> None:
    """Run the worker. `make` is a pickled function without arguments that builds the environment; what it prints goes to `output`."""
    for standard in (1, 2):
        os.dup2(output.fileno(), standard)
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
    while True:
        try:
            call = connection.recv()
        except EOFError:  # the other end closed the connection
            break
        try:
            result = perform(env, call)
            with environment_boundary(f"{call.what}: the result cannot leave the worker process"):
                reply = pickle.dumps(result)
        except EnvironmentFailure as failure:
            reply = pickle.dumps(Failed(str(failure)))
        try:
            connection.send_bytes(reply)
        except OSError:  # the connection was closed meanwhile
            break
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


def _leave_with_parent() -> None:
    # A watching thread, because the main thread may be inside environment code that never returns.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


START_SECONDS = 300.0
"""The deadline for building an environment; the first one may have to load its data."""

_BOOKKEEPING = threading.Lock()
"""multiprocessing reaps ended children whenever it starts one. Two threads that read one exit code at the same time disturb each other."""


class Host(ABC):
    """A place for one environment."""

    dead = False
    """The environment hung or crashed and must not be used again."""

    @abstractmethod
    def submit(self, call: Call) -> Future[Any]:
        """Start a call; its future holds the result or an EnvironmentFailure."""

    @abstractmethod
    def hang_up(self) -> None:
        """Let the environment end. A dead one is killed, or left behind where it cannot be."""

    def wait_for_end(self) -> None:  # noqa: B027  (where `hang_up` has closed it, or its thread was left behind)
        """Return when the environment has ended."""


class InlineHost(Host):
    """Calls run at once, in the caller's thread: for environments that need microseconds. No deadline."""

    def __init__(self, make: Callable[[], Env], env: Env | None = None) -> None:
        self._make, self._env = make, env

    def submit(self, call: Call) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            if self._env is None:
                self._env = build_env(self._make)
            future.set_result(perform(self._env, call))
        except EnvironmentFailure as failure:
            future.set_exception(failure)
        return future

    def hang_up(self) -> None:
        if self._env is not None:
            close_logged(self._env)


class BackgroundHost(Host):
    """Calls run beside the caller, each under a deadline."""

    def __init__(self, background: Background, step_seconds: float) -> None:
        self._background, self._step_seconds = background, step_seconds
        self._built = False

    def submit(self, call: Call) -> Future[Any]:
        return self._background.submit(self._play(call))

    @abstractmethod
    async def _build(self) -> None:
        """Build the environment."""

    @abstractmethod
    async def _perform(self, call: Call) -> Any:
        """Execute a call."""

    async def _play(self, call: Call) -> Any:
        what = call.what
        try:
            async with self._background.slot():
                if not self._built:
                    what = "start"
                    await within(START_SECONDS, self._build())
                    self._built, what = True, call.what
                return await within(self._step_seconds, self._perform(call))
        except asyncio.CancelledError:
            self.dead = True
            raise EnvironmentFailure(f"{call.what}: the vector of environments was closed meanwhile") from None
        except TimeoutError as error:
            self.dead = True
            raise EnvironmentFailure(f"{what}: {error}") from None
        except (OSError, RuntimeError, EOFError) as error:  # the system has no more processes, threads or files
            self.dead = True
            raise EnvironmentFailure(f"{call.what}: {type(error).__name__}: {error}") from error


class ThreadHost(BackgroundHost):
    """For environments that mostly wait: each call in a thread, or on the loop itself where there are `areset` and `astep`."""

    def __init__(self, make: Callable[[], Env], background: Background, step_seconds: float, env: Env | None = None) -> None:
        super().__init__(background, step_seconds)
        self._make, self._env, self._built = make, env, env is not None

    async def _build(self) -> None:
        self._env = await in_thread("start", partial(build_env, self._make), on_late=close_in_thread)

    async def _perform(self, call: Call) -> Any:
        env = self._env
        assert env is not None  # built before
        if all(inspect.iscoroutinefunction(getattr(env, name, None)) for name in ("areset", "astep")):
            return await perform_async(env, call)
        # A call that returns after its deadline belongs to a dead host: nobody else closes its environment.
        return await in_thread(call.what, partial(perform, env, call), on_late=lambda _: close_in_thread(env))

    def hang_up(self) -> None:
        if self._env is not None and not self.dead:
            close_logged(self._env)


def fork_server(*modules: str) -> ForkServerContext:
    """The fork server; it loads these modules and the main script when it starts."""
    refuse_while_main_is_imported()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", serve.__module__, *modules])
    return context


class ProcessHost(BackgroundHost):
    """An environment in a process: it can be killed when it hangs, and its crash does not affect anything else."""

    def __init__(self, make: bytes, label: str, context: ForkServerContext, background: Background, step_seconds: float) -> None:
        super().__init__(background, step_seconds)
        self._make, self._label, self._context = make, label, context
        self._process: ForkServerProcess | None = None
        self._connection: Connection | None = None

    async def _build(self) -> None:
        await in_thread("start", self._start)

    async def _perform(self, call: Call) -> Any:
        def exchange() -> Any:
            assert self._connection is not None
            try:
                self._connection.send(call)
            except OSError:
                raise EnvironmentFailure(f"{call.what}: {self._post_mortem()}") from None
            return self._receive(call.what)

        return await in_thread(call.what, exchange)

    def _start(self) -> None:
        with _BOOKKEEPING, environment_boundary("start"):
            if self.dead:  # closed before it started
                return
            ours, theirs = self._context.Pipe()
            printed, output = self._context.Pipe(duplex=False)
            arguments = (theirs, output, self._make, dict(os.environ))
            process = self._context.Process(target=serve, args=arguments, name=f"tether-{self._label}")
            try:
                process.start()
            except (EOFError, ConnectionError) as error:
                raise RuntimeError(f"the fork server ended; {MAIN_GUARD}") from error
            theirs.close()
            output.close()
            self._background.show_output(printed)
            self._process, self._connection = process, ours
        self._receive("start")

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
        """How the process ended, in words."""
        self.dead = True
        code = self._reap()
        if code is None:
            return "the process of the environment closed its connection"
        ending = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
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
        # An idle worker ends when its connection is closed. A busy one (then the host is dead) must be killed: one of our threads is
        # reading from its connection, and a connection must not be closed under a reader.
        if self.dead:
            self._kill()
        elif self._connection is not None:
            self._connection.close()

    def wait_for_end(self) -> None:
        if self._process is not None and self._reap() is None:
            self._kill()
