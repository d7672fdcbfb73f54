"""Tether's side of the fork server: started when first needed, one per process and level of isolation, restarted when it has died.

A forked process starts a fork server of its own. The fork server ends when the socket to it is closed. The kernel closes it when the process ends,
in whatever way, so nothing is left behind.
"""

import atexit
import json
import os
import shutil
import socket
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Literal

from tether.core import codec
from tether.core.child import Child
from tether.envs.deepcoder.sandbox.jobs import SandboxUnavailable

Isolation = Literal["kernel", "process"]

_START_SECONDS = 60.0
_PACKAGE = "tether.envs.deepcoder.sandbox"
FOLDER_PREFIX = "tether-sandbox-"
"""Prefix of the folder that a fork server without a jail makes. Tether removes the folder if the fork server was killed."""
# The fork server has neither site-packages nor Tether on its path. Empty stand-ins for Tether's packages, two of them with a path, let it import
# the modules of this folder and of `tether.core` under their usual names. Of the latter it imports the codec and `temporary` alone.
_BOOTSTRAP = f"""
import sys, types
paths = {{"tether": [], "tether.core": [sys.argv[1]], "tether.envs": [], "tether.envs.deepcoder": [], {_PACKAGE!r}: [sys.argv[2]]}}
for name, path in paths.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path
from {_PACKAGE}.fork_server import main
main(int(sys.argv[5]), sys.argv[3], sys.argv[4])
"""
_NEEDED_TO_START = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")


class ForkServer:
    """A running fork server, and the connection to it."""

    def __init__(self, isolation: Isolation) -> None:
        """Start it and wait until it is ready; `SandboxUnavailable` if it cannot be."""
        flags = ["-P", "-s", "-S", "-B", "-X", "utf8"]
        place = [str(Path(codec.__file__).parent), str(Path(__file__).parent), isolation, FOLDER_PREFIX]
        # Neither -I nor -E: they would ignore the seed too. Nothing else is set.
        environment = {name: os.environ[name] for name in _NEEDED_TO_START if name in os.environ} | {"PYTHONHASHSEED": "0"}
        try:
            self._child = Child([sys.executable, *flags, "-c", _BOOTSTRAP, *place], "descriptor", environment=environment, folder="/")
        except OSError as error:
            raise SandboxUnavailable(_refusal(isolation, f"starting {sys.executable or 'Python'}: {error.strerror}")) from None
        self._lock = threading.Lock()
        self.facts: dict[str, Any] = {}
        try:
            said = self._child.read_line(_START_SECONDS)
            if said is None:
                self.facts = {"missing": f"the sandbox's own process did not start within {_START_SECONDS:g} s"}
            else:
                self.facts = json.loads(said) if said else {"missing": "the sandbox's own process ended while it started"}
            if "missing" in self.facts:
                raise SandboxUnavailable(_refusal(isolation, self.facts["missing"]))
        except BaseException:
            self.close()
            raise

    def start_sandbox(self, theirs: socket.socket) -> None:
        """Start a sandbox that uses the other end of a connection; `OSError` if the fork server is gone."""
        with self._lock:
            socket.send_fds(self._child.connection, [b"+"], [theirs.fileno()])

    @property
    def alive(self) -> bool:
        return self._child.exit_code is None

    @property
    def process_id(self) -> int:
        return self._child.process_id

    def close(self) -> None:
        """End the fork server and every sandbox, and remove the folder that a killed fork server leaves behind."""
        self._child.close()
        folder = Path(self.facts.get("folder", ""))
        if folder.name.startswith(FOLDER_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)


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
        self._running: dict[Isolation, ForkServer] = {}
        self._connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def get(self, isolation: Isolation, instead_of: ForkServer | None = None) -> ForkServer:
        """The running fork server, started if there is none; a new one if the one in use (`instead_of`) has died."""
        with self._lock:
            server = self._running.get(isolation)
            if server is not None and server is not instead_of and server.alive:
                return server
            if server is not None:
                del self._running[isolation]
                server.close()
            self._running[isolation] = ForkServer(isolation)
            return self._running[isolation]

    def connect(self, isolation: Isolation) -> socket.socket:
        """A connection to a new sandbox."""
        server = self.get(isolation)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                try:
                    server.start_sandbox(theirs)
                except OSError:
                    self.get(isolation, instead_of=server).start_sandbox(theirs)
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        self._connections.add(ours)
        return ours

    def close(self) -> None:
        """At the end of the process."""
        with self._lock:
            for server in self._running.values():
                server.close()
            self._running.clear()

    def forget(self) -> None:
        """In a forked process: drop everything, it belongs to the parent. The lock is replaced, because a thread that does not exist in this
        process may hold it."""
        for connection in list(self._connections):
            connection.close()
        self._lock, self._running, self._connections = threading.Lock(), {}, weakref.WeakSet()


_FORK_SERVERS = _ForkServers()
atexit.register(_FORK_SERVERS.close)
os.register_at_fork(after_in_child=_FORK_SERVERS.forget)
running_fork_server = _FORK_SERVERS.get
connect = _FORK_SERVERS.connect
