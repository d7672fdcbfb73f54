"""`tether train --ray ADDRESS --topology FILE`: learner ranks, engines and environment workers of a run, placed on a cluster by Ray.

Ray reserves the resources (one placement group), starts the processes (actors), starts servers again that have ended, and carries what is said
between them. What is left for this file is to ask for all that, to tell the ranks where their servers are whenever that changes, and to end the run
with one line where a rank is lost. The ranks themselves are those that torchrun would start.
"""

import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from tether.core.child import this_attempt
from tether.core.errors import BadInput, EngineUnavailable, MissingDependency, RankFailure
from tether.runs.checkpoints import newest_checkpoint
from tether.training.distributed.ray_actors import LearnerActor, ServerActor, ServerPlan, VllmPlan
from tether.training.distributed.topology import Topology, check_gpus_are_used, check_room
from tether.training.settings import RunSettings

LOCAL = "local"
POLL_SECONDS = 1.0
CALL_SECONDS = 60.0
"""How long a learner's actor may take to answer, which does nothing but that."""
REACH_SECONDS = 10.0
STOP_SECONDS = 120.0
"""How long ranks that were told to stop, or that lost another, may take to end by themselves."""
CLOSE_SECONDS = 30.0
SIGNALLED = 128
"""Exit codes above this stand for a signal."""


@dataclass(slots=True)
class _Server:
    """An engine or an environment worker."""

    name: str
    actor: Any
    address: str | None = None
    last_address: str | None = None
    """Where it was before it ended."""
    ended_at: float = 0.0
    """When it was found to have ended."""
    lost: bool = False
    """Ray will not start it again."""
    asked: Any = None
    """The call in flight."""

    def as_engine(self, now: float, longest: float) -> str | None:
        """The address that ranks are told. None while Ray starts the engine, for at most so many seconds: ranks that have no other wait for it. One that
        stays away keeps its last address, so that they give up."""
        return self.address or (self.last_address if self.lost or now > self.ended_at + longest else None)


@dataclass(slots=True)
class _Ended:
    """How the ranks ended."""

    codes: dict[int, int] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    """Ranks whose actor is gone, and what Ray says about it."""
    complaints: dict[int, str] = field(default_factory=dict)
    """The last line of each rank on standard error."""

    def __len__(self) -> int:
        return len(self.codes) + len(self.gone)


class Output(Protocol):
    """Takes a line for people; `error`: it was for standard error."""

    def __call__(self, line: str, *, error: bool = False) -> None: ...


def run_on_ray(address: str, topology: Topology, settings: RunSettings, words: Sequence[str], out: Path | None, output: Output) -> int:
    """Train on a cluster; returns the exit code.

    Args:
        address: of the cluster, or `local`.
        topology: what is placed there.
        settings: of the run.
        words: the arguments of `tether` for every rank.
        out: the run folder, where it is known.
        output: gets what rank 0 prints, what all ranks complain about, and what happens to servers.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependency("--ray needs Ray; install it with: pip install 'tether-agents[ray]'") from error
    if address == LOCAL:
        output("starting Ray on this machine; it gives up after half a minute")
    with _connected(ray, address):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        where = "this machine" if address == LOCAL else f"the cluster at {address}"
        try:
            check_room(topology, nodes, where)
        except BadInput as error:
            if this_attempt().number == 1:
                raise
            raise RankFailure(str(error)) from error  # it had room before: a machine is gone, and may come back
        if settings.model.device != "cpu":
            check_gpus_are_used(topology, nodes, where)
        with _reserved(ray, topology) as actors:
            return _Run(ray, topology, settings, actors, words, out, output).run()


@contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    """A connection to the cluster at an address, or a cluster of this machine alone for as long as the block lasts."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common = {"namespace": f"tether-{secrets.token_hex(4)}", "log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        try:
            ray.init(address=LOCAL, include_dashboard=False, **common)
        except Exception as error:  # Ray raises its time-outs as plain exceptions
            ray.shutdown()
            raise BadInput(
                f"Ray did not start on this machine ({_one_line(error)}); look into /tmp/ray/session_latest/logs, free memory and /dev/shm, "
                "or train without it: tether train --gpus N"
            ) from error
    else:
        _check_reachable(address)
        try:
            ray.init(address=address, **common)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise BadInput(
                f"no Ray cluster can be used at '{address}' ({_one_line(error)}); see `ray status`, or give --ray local"
            ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not host or not port.isdigit():
        raise BadInput(f"--ray got '{address}'; give HOST:PORT of the cluster's head (as `ray start --head` prints it), auto, or local")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise BadInput(
            f"nothing answers at {address} ({error}); start a cluster there with: ray start --head --port {port}, or give --ray local"
        ) from error


@contextmanager
def _reserved(ray: Any, topology: Topology) -> Iterator[Callable[..., Any]]:
    """The resources of the whole topology. Yields a function that makes an actor of a class in the bundle of a number."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundles = topology.bundles()
    group = placement_group([bundle for _, bundle in bundles], strategy="PACK")
    try:
        try:
            ray.get(group.ready(), timeout=topology.start_timeout)
        except ray.exceptions.GetTimeoutError as error:
            raise BadInput(
                f"the cluster did not have room for the topology within {topology.start_timeout:g} s (its start_timeout): other work holds it; "
                "see `ray status`, and wait or ask for less"
            ) from error

        def actor(kind: type, number: int, restarts: int = 0) -> Any:
            bundle = bundles[number][1]
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "max_restarts": restarts}
            return ray.remote(kind).options(scheduling_strategy=strategy, **options)

        yield actor
    finally:
        remove_placement_group(group)


class _Run:
    """One run on its actors."""

    def __init__(
        self,
        ray: Any,
        topology: Topology,
        settings: RunSettings,
        actor: Callable[..., Any],
        words: Sequence[str],
        out: Path | None,
        output: Output,
    ) -> None:
        self._ray, self._topology, self._settings, self._words, self._out = ray, topology, settings, list(words), out
        self._output = output
        self._token = os.environ.get("TETHER_TOKEN") or secrets.token_hex(24)
        self._stop = False
        self._told: tuple[list[str | None], dict[str, list[str | None]]] = ([], {})
        num_ranks = topology.learners.ranks
        self._learners = [actor(LearnerActor, rank).remote() for rank in range(num_ranks)]
        self._servers = [
            _Server(topology.bundles()[number][0], actor(ServerActor, number, topology.restarts).remote(plan))
            for number, plan in enumerate(self._plans(), start=num_ranks)
        ]

    def _plans(self) -> list[ServerPlan]:
        """What each server serves, in the order of the topology's bundles."""
        settings, engines, timeout = self._settings, self._topology.engines, self._topology.start_timeout
        model, folder = settings.model.name, os.getcwd()
        if engines.backend == "vllm":
            server = settings.server
            dtype = settings.model.dtype or ("bfloat16" if engines.num_gpus else "float32")  # what the learner computes in
            arguments = (*server.vllm_args, *engines.args)
            vllm = VllmPlan(server.vllm_command, arguments, dtype, settings.rollout.max_context, on_gpus=engines.num_gpus > 0)
            engine = ServerPlan((model,), self._token, folder, timeout, vllm)
        else:
            precision = () if settings.model.dtype is None else ("--dtype", settings.model.dtype)
            engine = ServerPlan(("serve", model, "--grace", "0", *precision, *engines.args), self._token, folder, timeout)
        workers = [
            ServerPlan(
                ("serve-env", entry.env, "--allow-option", "*", "--grace", "0", *entry.args), self._token, folder, timeout
            )  # its clients are the run's own
            for entry in self._topology.environments
            for _ in range(entry.count)
        ]
        return [*[engine] * engines.count, *workers]

    # ------------------------------------------------------------------------------------------------------------- the run

    def run(self) -> int:
        with self._listening():
            try:
                self._start()
                ended = self._watch()
            finally:
                self._close()
        return self._exit_code(ended)

    def _start(self) -> None:
        deadline = time.monotonic() + self._topology.start_timeout + CALL_SECONDS
        if self._topology.engines.backend == "vllm" and self._topology.engines.count:
            self._say(f"starting {self._topology.engines.count} x vLLM, which takes a minute or more")
        while not all(server.address for server in self._servers):
            self._look_at_servers(starting=True)
            if self._stop:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                waiting = ", ".join(server.name for server in self._servers if not server.address)
                raise EngineUnavailable(
                    f"{waiting} did not start within {self._topology.start_timeout:g} s (start_timeout of the topology)"
                )
            time.sleep(POLL_SECONDS)
        for server in self._servers:
            self._say(f"{server.name} at {server.address}")
        machines = self._call([learner.machine.remote() for learner in self._learners])
        self._tell_learners()
        host, port, _ = machines[0]
        size = len(machines)
        started = []
        for rank, (learner, (_, _, node)) in enumerate(zip(self._learners, machines, strict=True)):
            # Ray shows every rank its own GPU alone, so it is the first of its machine.
            names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "MASTER_PORT": port}
            names["LOCAL_WORLD_SIZE"] = sum(other == node for _, _, other in machines)
            rendezvous = {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": host} if size > 1 else {}
            variables = {**rendezvous, **this_attempt().variables(), "TETHER_TOKEN": self._token}
            started.append(learner.start.remote(self._words, variables, os.getcwd()))
        problems = [problem for problem in self._call(started) if problem]
        if problems:
            raise BadInput(problems[0])

    def _watch(self) -> _Ended:
        """Until all ranks have ended; those that are left when one is lost get some time for that."""
        ended, deadline, told = _Ended(), math.inf, False
        while len(ended) < len(self._learners):
            self._poll_learners(ended)
            self._look_at_servers()
            if self._addresses() != self._told:
                self._tell_learners(ended)
            if self._stop and not told:
                told, deadline = True, time.monotonic() + STOP_SECONDS
                for rank in self._left(ended):
                    self._learners[rank].interrupt.remote()
            if any(ended.codes.values()) or ended.gone:
                deadline = min(deadline, time.monotonic() + STOP_SECONDS)
            if time.monotonic() > deadline:
                break
            if len(ended) < len(self._learners):
                time.sleep(POLL_SECONDS)
        return ended

    def _left(self, ended: _Ended) -> list[int]:
        return [rank for rank in range(len(self._learners)) if rank not in ended.codes and rank not in ended.gone]

    def _poll_learners(self, ended: _Ended) -> None:
        asked = {rank: self._learners[rank].poll.remote() for rank in self._left(ended)}
        for rank, call in asked.items():
            try:
                code, printed, complained = self._ray.get(call, timeout=CALL_SECONDS)
            except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError) as error:
                ended.gone[rank] = _one_line(error)
                continue
            for line in printed if rank == 0 else ():
                self._output(line)
            for line in complained:
                if not line.startswith("tether: "):
                    self._output(line, error=True)
                ended.complaints[rank] = line if line.strip() else ended.complaints.get(rank, "")
            if code is not None:
                ended.codes[rank] = code

    def _exit_code(self, ended: _Ended) -> int:
        """Of the run; a run that failed is an error with the line of the rank that failed first, as far as that can be told."""
        size, resume = len(self._learners), self._how_to_resume()
        killed = {rank: code - SIGNALLED for rank, code in ended.codes.items() if code > SIGNALLED and code != SIGNALLED + signal.SIGINT}
        for rank, said in ended.gone.items():
            raise RankFailure(f"rank {rank} of {size} is gone with its worker or machine ({said}), and the others were ended; {resume}")
        for rank, number in killed.items():
            raise RankFailure(
                f"rank {rank} of {size} was killed by {signal.Signals(number).name} (a machine that is out of memory does that), and the others "
                f"were ended; {resume}"
            )
        failed = {rank: code for rank, code in sorted(ended.codes.items()) if code}
        if not failed and len(ended.codes) < size:
            raise RankFailure(
                f"ranks {', '.join(map(str, self._left(ended)))} did not end within {STOP_SECONDS:g} s and were killed; {resume}"
            )
        for rank, code in failed.items():
            said = ended.complaints.get(rank, "").removeprefix("tether: ")
            if code == SIGNALLED + signal.SIGINT:
                return code
            if said:
                raise (BadInput if code == BadInput.exit_code else RankFailure)(said)
        return next(iter(failed.values()), 0)

    def _how_to_resume(self) -> str:
        checkpoint = None if self._out is None else newest_checkpoint(self._out / "checkpoints")
        if checkpoint is not None:
            return f"continue from its last checkpoint, {checkpoint.name}, with --resume"
        return "continue from its last checkpoint with --resume"

    # ------------------------------------------------------------------------------------------------------------- servers

    def _look_at_servers(self, *, starting: bool = False) -> None:
        """Ask every server where it is. Never waits for one that is being started."""
        for server in self._servers:
            if server.asked is None and not server.lost:
                server.asked = server.actor.status.remote()
        calls = {server.asked: server for server in self._servers if server.asked is not None}
        ready, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0) if calls else ([], [])
        for call in ready:
            server = calls[call]
            server.asked, before = None, server.address
            self._settle(server, call, starting)
            if server.address != before:
                server.last_address, server.ended_at = server.address or before, time.monotonic()
                if not starting:
                    now = (
                        f"was replaced, now at {server.address}"
                        if server.address
                        else "has ended"
                        if server.lost
                        else "has ended, and is started again"
                    )
                    self._say(f"{server.name} {now}")

    def _settle(self, server: _Server, call: Any, starting: bool) -> None:
        try:
            address, problem = self._ray.get(call)
        except self._ray.exceptions.ActorUnavailableError:
            server.address = None
            return
        except self._ray.exceptions.RayActorError as error:
            if starting:
                raise EngineUnavailable(f"{server.name} could not be started: {_one_line(error)}") from error
            server.address, server.lost = None, True
            self._say(f"{server.name} is gone for good: {_one_line(error)}")
            return
        if problem and starting:
            raise BadInput(f"{server.name} could not be started: {problem}")
        if problem:
            server.lost = True
            self._say(f"{server.name} could not be started again: {problem}")
        server.address = address

    def _addresses(self) -> tuple[list[str | None], dict[str, list[str | None]]]:
        """Of the engines, and of each environment's workers."""
        count = self._topology.engines.count
        rest = iter(self._servers[count:])
        environments = {entry.env: [next(rest).address for _ in range(entry.count)] for entry in self._topology.environments}
        longest = self._topology.start_timeout + CALL_SECONDS
        return [server.as_engine(time.monotonic(), longest) for server in self._servers[:count]], environments

    def _tell_learners(self, ended: _Ended | None = None) -> None:
        """Where the servers are now."""
        self._told = engines, environments = self._addresses()
        calls = [
            self._learners[rank].write_addresses.remote(engines, environments)
            for rank in (range(len(self._learners)) if ended is None else self._left(ended))
        ]
        if ended is None:
            self._call(calls)

    # ------------------------------------------------------------------------------------------------------------- the rest

    def _call(self, calls: Sequence[Any]) -> list[Any]:
        """What the learners answer; one that does not is lost."""
        try:
            found: list[Any] = self._ray.get(list(calls), timeout=self._topology.start_timeout)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError) as error:
            raise RankFailure(f"a learner rank could not be started: {_one_line(error)}") from error
        return found

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM let the ranks stop together."""

        def handle(_signal: int, _frame: FrameType | None) -> None:
            self._stop = True

        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _say(self, text: str) -> None:
        self._output(f"ray: {text}")

    def _close(self) -> None:
        """End every process, as far as that takes no longer than a while, then every actor."""
        actors = [*self._learners, *(server.actor for server in self._servers)]
        self._ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=CLOSE_SECONDS)
        for actor in actors:
            self._ray.kill(actor, no_restart=True)


def _one_line(error: BaseException) -> str:
    """The last line of what Ray says that is not empty, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
