"""Tether's side of the fork server: started when first needed, one per process and level of isolation, restarted when it has died.

A forked process must not share its parent's fork server, because it could not notice the fork server's end. It drops the connection and
starts a fork server of its own. The fork server ends when the socket to it is closed. The kernel closes it when the process ends, in whatever
way, so nothing is left behind.
"""

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Literal

from tether.core import codec
from tether.envs.deepcoder.sandbox.jobs import SandboxUnavailable

Isolation = Literal["kernel", "process"]

_START_SECONDS = 60.0
_END_SECONDS = 5.0
_PACKAGE = "tether.envs.deepcoder.sandbox"
FOLDER_PREFIX = "tether-sandbox-"
"""Prefix of the folder that a fork server without a jail makes. Tether removes the folder if the fork server was killed."""
# The fork server has neither site-packages nor Tether on its path. Empty stand-ins for Tether's packages, two of them with a path, let it import
# the modules of this folder and of `tether.core` under their usual names. Of the latter it imports the codec alone.
_BOOTSTRAP = f"""
import sys, types
paths = {{"tether": [], "tether.core": [sys.argv[1]], "tether.envs": [], "tether.envs.deepcoder": [], {_PACKAGE!r}: [sys.argv[2]]}}
for name, path in paths.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path
from {_PACKAGE}.fork_server import main
main(int(sys.argv[3]), sys.argv[4], sys.argv[5])
"""
_NEEDED_TO_START = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")


class Client:
    """A connection to one running fork server."""

    def __init__(self, isolation: Isolation) -> None:
        """Start it and wait until it is ready; `SandboxUnavailable` if it cannot be."""
        self.facts: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        flags = ["-P", "-s", "-S", "-B", "-X", "utf8"]
        place = [str(Path(codec.__file__).parent), str(Path(__file__).parent), str(theirs.fileno()), isolation, FOLDER_PREFIX]
        # Neither -I nor -E: they would ignore the seed too. Nothing else is set.
        environment = {name: os.environ[name] for name in _NEEDED_TO_START if name in os.environ} | {"PYTHONHASHSEED": "0"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _BOOTSTRAP, *place],
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self._control.close()
            raise SandboxUnavailable(_refusal(isolation, f"starting {sys.executable or 'Python'}: {error.strerror}")) from None
        finally:
            theirs.close()
        try:
            self.facts = self._first_words(isolation)
        except BaseException:
            self.close()
            raise

    def _first_words(self, isolation: Isolation) -> dict[str, Any]:
        self._control.settimeout(_START_SECONDS)
        said = b""
        try:
            while not said.endswith(b"\n"):
                part = self._control.recv(4096)
                if not part:
                    break
                said += part
            facts: dict[str, Any] = json.loads(said) if said else {"missing": "the sandbox's own process ended while it started"}
        except TimeoutError:
            facts = {"missing": f"the sandbox's own process did not start within {_START_SECONDS:g} s"}
        if "missing" in facts:
            raise SandboxUnavailable(_refusal(isolation, facts["missing"]))
        self._control.settimeout(None)
        return facts

    def start_sandbox(self, theirs: socket.socket) -> None:
        """Start a sandbox that uses the other end of a connection; `OSError` if the fork server is gone."""
        with self._lock:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def process_id(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the fork server and every sandbox, and remove the folder that a killed fork server leaves behind."""
        self._control.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        folder = Path(self.facts.get("folder", ""))
        if folder.name.startswith(FOLDER_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)

    def forget(self) -> None:
        """In a forked process: drop the connection, because the fork server belongs to the parent."""
        self._control.close()
        self._process.returncode = 0


def _refusal(isolation: Isolation, missing: str) -> str:
    if isolation == "process":
        return f"programs cannot be run here even with isolation=process: {missing}"
    return (
        f"kernel isolation for programs is not available here ({missing}); allow user namespaces (docs/sandbox.md), "
        "or accept weaker isolation with the environment's option isolation=process"
    )


class _ForkServers:
    """The fork servers of this process, and the connections to their sandboxes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Isolation, Client] = {}
        self._connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def get(self, isolation: Isolation, instead_of: Client | None = None) -> Client:
        """The running fork server, started if there is none; a new one if the one in use (`instead_of`) has died."""
        with self._lock:
            client = self._running.get(isolation)
            if client is not None and client is not instead_of and client.alive:
                return client
            if client is not None:
                del self._running[isolation]
                client.close()
            self._running[isolation] = Client(isolation)
            return self._running[isolation]

    def connect(self, isolation: Isolation) -> socket.socket:
        """A connection to a new sandbox."""
        client = self.get(isolation)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                try:
                    client.start_sandbox(theirs)
                except OSError:
                    self.get(isolation, instead_of=client).start_sandbox(theirs)
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        self._connections.add(ours)
        return ours

    def close(self) -> None:
        """At the end of the process."""
        with self._lock:
            for client in self._running.values():
                client.close()
            self._running.clear()

    def forget(self) -> None:
        """In a forked process: drop everything, it belongs to the parent. The lock is replaced, because a thread that does not exist in this
        process may hold it."""
        for client in self._running.values():
            client.forget()
        for connection in list(self._connections):
            connection.close()
        self._lock, self._running, self._connections = threading.Lock(), {}, weakref.WeakSet()


_FORK_SERVERS = _ForkServers()
atexit.register(_FORK_SERVERS.close)
os.register_at_fork(after_in_child=_FORK_SERVERS.forget)
running_fork_server = _FORK_SERVERS.get
connect = _FORK_SERVERS.connect
