"""What runs inside a cluster's workers: Ray actors, each with one child process that ends with it.

A `ServerActor` runs `tether serve`, `tether serve-env` or vLLM. Where the server ends, the actor ends too, and Ray starts it again in its place;
a server that cannot be started is reported instead, because trying again would not help. A `LearnerActor` runs `tether train` as one rank, with the
environment variables that torchrun sets, and keeps the file that tells the rank where its servers are.
"""

import collections
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tether.core.child import Child
from tether.core.errors import TetherError
from tether.core.http import free_port
from tether.core.http_client import is_healthy
from tether.training.distributed.topology import PLACEMENT_VARIABLE, Placement

LAST_LINES = 20
HEALTH_SECONDS = 0.5
"""Between two looks whether a server that starts answers yet."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What a `ServerActor` serves."""

    words: tuple[str, ...]
    """The arguments of `tether`; for vLLM its model and no verb."""
    token: str
    """Secret that the run's processes send."""
    folder: str
    """Where the run was started; names of folders and modules are found from there, on machines that have it."""
    start_timeout: float
    vllm: "VllmPlan | None" = None


@dataclass(frozen=True, slots=True)
class VllmPlan:
    """How vLLM is started."""

    command: str
    arguments: tuple[str, ...]
    dtype: str
    max_context: int
    on_gpus: bool
    """It has GPUs of its own."""


def node_ip() -> str:
    """The address of this machine that the others of the cluster use."""
    import ray

    return str(ray.util.get_node_ip_address())


class ServerActor:
    """One server, started with the actor."""

    def __init__(self, plan: ServerPlan) -> None:
        self._address: str | None = None
        self._problem = ""
        self._end: Callable[[], object] = lambda: None
        self._closed = False
        try:
            self._address = self._start_vllm(plan, plan.vllm) if plan.vllm else self._start_tether(plan)
        except (TetherError, OSError) as error:
            self._problem = str(error)

    def status(self) -> tuple[str | None, str]:
        """The address, or why there is none."""
        return self._address, self._problem

    def close(self) -> None:
        """End the server for good."""
        self._closed = True
        self._end()

    def _end_with(self, wait: Callable[[], object]) -> None:
        """End this actor when the server has ended, so that Ray starts both again."""

        def follow() -> None:
            wait()
            if not self._closed:
                os._exit(1)

        threading.Thread(target=follow, daemon=True, name="server").start()

    def _start_tether(self, plan: ServerPlan) -> str | None:
        host = node_ip()
        port = free_port(host)
        command = [sys.executable, "-P", "-m", "tether", *plan.words, "--host", host, "--port", str(port)]
        process = _Child(command, {"TETHER_TOKEN": plan.token}, plan.folder if Path(plan.folder).is_dir() else None)
        address, deadline = f"http://{host}:{port}", time.monotonic() + plan.start_timeout
        while not is_healthy(address):
            if process.code() is not None:
                self._problem = process.last_line() or f"it ended with exit code {process.code()}"
                return None
            if time.monotonic() > deadline:
                process.close()
                self._problem = f"it did not answer within {plan.start_timeout:g} s (start_timeout of the topology)"
                return None
            time.sleep(HEALTH_SECONDS)
        self._end = process.close
        self._end_with(process.wait)
        return address

    def _start_vllm(self, plan: ServerPlan, vllm: VllmPlan) -> str:
        from tether.models.load import load_model
        from tether.models.policy import Policy
        from tether.rollout.engines.vllm_server import VllmOptions, VllmServer

        if Path(plan.folder).is_dir():
            os.chdir(plan.folder)
        (model,) = plan.words
        policy = Policy(*load_model(model, device="cpu", dtype=vllm.dtype), max_positions=vllm.max_context)
        os.environ.update(_hidden_gpus())
        folder = Path(tempfile.mkdtemp(prefix="tether-vllm-"))
        options = VllmOptions(vllm.command, vllm.arguments, plan.start_timeout, folder, node_ip(), plan.token, vllm.on_gpus)
        server = VllmServer(policy, vllm.max_context, options)

        def end() -> None:
            server.stop()
            shutil.rmtree(folder, ignore_errors=True)  # its output is of use only where it fails

        self._end = end
        self._end_with(server.wait)
        return server.address


class LearnerActor:
    """One rank."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tether-rank-"))
        self._placement = Placement(self._folder / "addresses.json")
        self._child: _Child | None = None

    def machine(self) -> tuple[str, int, str]:
        """The address of the machine, a free port there, and the machine's name in the cluster."""
        import ray

        return node_ip(), free_port(node_ip()), str(ray.get_runtime_context().get_node_id())

    def write_addresses(self, engines: list[str | None], environments: dict[str, list[str | None]]) -> None:
        self._placement.write(engines, environments)

    def start(self, words: Sequence[str], environment: Mapping[str, str], folder: str) -> str:
        """Start the rank in a working folder; returns why that is not possible, or nothing."""
        if not Path(folder).is_dir():
            return f"the machine {node_ip()} has no folder '{folder}'; start from one that all machines share"
        placed = {PLACEMENT_VARIABLE: str(self._folder / "addresses.json")}
        self._child = _Child([sys.executable, "-P", "-m", "tether", *words], {**environment, **placed}, folder, keep_output=True)
        return ""

    def poll(self) -> tuple[int | None, list[str], list[str]]:
        """The exit code of the rank, if it has ended, and what it printed since the last call: to standard output, and to standard error."""
        assert self._child is not None  # started before
        code = self._child.code()
        return code, *self._child.take()

    def interrupt(self) -> None:
        """Ctrl-C: the ranks stop together, with a checkpoint."""
        if self._child is not None:
            self._child.interrupt()

    def close(self) -> None:
        """End the rank, if it has not ended by itself."""
        if self._child is not None:
            self._child.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Child:
    """A child process under a guard, and what it says."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str | None = None, *, keep_output: bool = False
    ) -> None:
        """`keep_output`: its lines are kept for `take`; else standard output goes where the actor's does."""
        self._process = Child(
            command,
            "guard",
            environment={**os.environ, **environment, **_hidden_gpus()},
            folder=folder,
            stdout=subprocess.PIPE if keep_output else None,
            stderr=subprocess.PIPE,
        )
        self._printed: collections.deque[str] = collections.deque()
        self._complained: collections.deque[str] = collections.deque(maxlen=None if keep_output else LAST_LINES)
        pipes = [(self._process.stdout, self._printed)] if keep_output else []
        self._readers = [
            threading.Thread(target=_read, args=pair, daemon=True) for pair in [*pipes, (self._process.stderr, self._complained)]
        ]
        for reader in self._readers:
            reader.start()

    def code(self) -> int | None:
        """Of the process that ended; its last lines are there by then."""
        code = self._process.exit_code
        if code is not None:
            for reader in self._readers:
                reader.join(5.0)
        return code

    def wait(self) -> int:
        return self._process.wait()

    def take(self) -> tuple[list[str], list[str]]:
        """The lines since the last call."""
        return tuple([lines.popleft() for _ in range(len(lines))] for lines in (self._printed, self._complained))  # type: ignore[return-value]

    def last_line(self) -> str:
        return next((line.removeprefix("tether: ") for line in reversed(self._complained) if line.strip()), "")

    def interrupt(self) -> None:
        self._process.send(b"INT\n")

    def close(self) -> None:
        """End it; a process that does not end by itself is killed after a while."""
        self._process.close()


def _hidden_gpus() -> dict[str, str]:
    """A process that asked for no GPU sees none; whether Ray hides them itself depends on its version."""
    import ray

    return {} if ray.get_gpu_ids() else {"CUDA_VISIBLE_DEVICES": ""}


def _read(pipe: IO[bytes] | None, lines: "collections.deque[str]") -> None:
    assert pipe is not None
    for line in pipe:
        lines.append(line.decode("utf-8", "replace").rstrip("\r\n"))
