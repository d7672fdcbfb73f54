"""A child process: started from a command, talked to over a socket, and ended with this process, however that ends.

The child sees the end of its socket when this process is gone, and ends itself. A command that knows nothing of that (vLLM, Ray's workers) runs
under a guard: a small process that ends the command and all of its children when the socket closes. A line `INT` is passed on as Ctrl-C, to all
of them, `TERM` and `HUP` as their signals, to the command. The guard exits as the command did: with its exit code, or with 128 and the number of the signal that killed it. Signals that this process blocks, as
Ray's workers do with Ctrl-C, reach the command. Beside the guard stands a second process, which kills what is left of the command and its children
once the guard is gone: where the guard itself was killed (Ray kills the children of a worker that ends), and where the command ended without its
own children. vLLM's workers, for one, outlive a server that is killed, and keep their memory.

A forked process must not use the children of its parent, whose end it could not notice: it drops its copies of the sockets.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any, Literal, NamedTuple

GUARD = """
import os, signal, subprocess, sys, threading
signal.pthread_sigmask(signal.SIG_SETMASK, set())
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
guard_lives, write_end = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
    os.close(write_end)
    os.read(guard_lives, 1)
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    os._exit(0)
def wait():
    code = child.wait()
    os._exit(code if code >= 0 else 128 - code)
threading.Thread(target=wait, daemon=True).start()
signal.signal(signal.SIGINT, signal.SIG_IGN)
for line in sys.stdin:
    word = line.strip()
    if word in ("INT", "TERM", "HUP"):
        (os.killpg if word == "INT" else os.kill)(child.pid, getattr(signal, "SIG" + word))
for sign, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
    try:
        os.killpg(child.pid, sign)
        child.wait(seconds)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
"""
"""The program of the guard: `python -P -c GUARD COMMAND ...`, with its end of the socket, or a pipe, as its standard input."""

Channel = Literal["stdio", "descriptor", "guard"]
"""Where the child has its end of the socket: as its standard input and output; as a descriptor whose number is its last argument; or its guard
has it, and the child has none."""

END_SECONDS = 5.0
"""How long a child may take to end after its socket was closed."""


class Child:
    """A process that runs a command in a session of its own, so that no Ctrl-C meant for this process reaches it."""

    def __init__(
        self,
        command: Sequence[str],
        channel: Channel,
        *,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        stdout: IO[bytes] | int | None = subprocess.DEVNULL,
        stderr: IO[bytes] | int | None = subprocess.DEVNULL,
    ) -> None:
        """Standard output is the channel where that is `stdio`; None: where that of this process goes. `OSError` if there is no such command."""
        self.connection, theirs = socket.socketpair()
        self._said = b""
        streams: dict[str, Any] = {"stdin": theirs, "stdout": theirs if channel == "stdio" else stdout}
        if channel == "guard":
            command = [sys.executable, "-P", "-c", GUARD, *command]  # -P: without the current folder, which may hold modules of these names
        elif channel == "descriptor":
            command = [*command, str(theirs.fileno())]
            streams |= {"stdin": subprocess.DEVNULL, "pass_fds": [theirs.fileno()]}
        try:
            self._process = subprocess.Popen(command, env=environment, cwd=folder, stderr=stderr, start_new_session=True, **streams)
        except OSError:
            self.connection.close()
            raise
        finally:
            theirs.close()
        self._guarded = channel == "guard"
        self.stdout, self.stderr = self._process.stdout, self._process.stderr
        _CHILDREN.add(self)

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the number of the signal that ended it."""
        return self._process.poll()

    def send(self, data: bytes) -> bool:
        """Send bytes; False if the child has ended."""
        try:
            self.connection.sendall(data)
        except OSError:
            return False
        return True

    def read_line(self, seconds: float) -> bytes | None:
        """The next line that the child says; empty if it has ended, None if it stays silent for so long."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._said:
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                part = self.connection.recv(1 << 16)
            except TimeoutError:
                return None
            except OSError:
                part = b""
            if not part:
                return b""
            self._said += part
        self.connection.settimeout(None)
        line, _, self._said = self._said.partition(b"\n")
        return line + b"\n"

    def wait(self) -> int:
        """Until it has ended; the exit code."""
        return self._process.wait()

    def kill(self) -> None:
        """End it and its children at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it may have ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()

    def close(self) -> None:
        """Close the socket and wait until it has ended; a child that does not end by itself is killed. A guard ends in its own time."""
        self.connection.close()
        try:
            self._process.wait(None if self._guarded else END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def _forget(self) -> None:
        """In a process just forked: the child is the parent's, and there is nothing to wait for."""
        self.connection.close()
        self._process.returncode = 0


PARENT_VARIABLE = "TETHER_PARENT"
"""Of a `tether` command: the process that it ends with."""
SHARES_CARD_VARIABLE = "TETHER_SHARES_CARD"
"""Of a run beside others: it sleeps while it waits for the card, because the others have use for its core."""
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Stop this process, as SIGTERM does, when the process that PARENT_VARIABLE names is gone: a scheduler that was killed leaves no run behind. Linux
    does that; elsewhere the run goes on, and holds its lock. Called once, by the command itself, from its main thread."""
    parent = os.environ.pop(PARENT_VARIABLE, "")  # its own children are not meant
    if not parent.isdigit() or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it was gone before
        os.kill(os.getpid(), signal.SIGTERM)


ATTEMPT_VARIABLE = "TETHER_ATTEMPT"
"""Of a `tether train` that is started again: which attempt it is, and how the one before ended, as JSON."""


class Attempt(NamedTuple):
    """One of the times that the same command is started. Example: Attempt(2, "rank 1 of 2 was killed by SIGKILL")."""

    number: int
    cause: str
    """Why there was another attempt; empty for the first."""

    def variables(self) -> dict[str, str]:
        """What tells it to a process."""
        return {ATTEMPT_VARIABLE: json.dumps({"attempt": self.number, "cause": self.cause})} if self.number > 1 else {}


def this_attempt() -> Attempt:
    """Which attempt this process is: of Tether's supervisor, or of torchrun's agent (`--max-restarts`), which does not say why."""
    told = os.environ.get(ATTEMPT_VARIABLE)
    if told:
        found = json.loads(told)
        return Attempt(int(found["attempt"]), str(found["cause"]))
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    return Attempt(restarts + 1, "torchrun started the ranks again, whose last lines say why" if restarts else "")


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_CHILDREN: weakref.WeakSet[Child] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for child in list(_CHILDREN):
        child.close()


def _forget_all() -> None:
    for child in list(_CHILDREN):
        child._forget()


os.register_at_fork(after_in_child=_forget_all)
