"""The topology file of `tether train --ray` (how many learner ranks, engines and environment workers there are, and what each of them takes), and the
placement file that says where they are."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tether.core.config import Settings, read_file, validate
from tether.core.errors import BadInput, ConfigError, did_you_mean

PLACEMENT_VARIABLE = "TETHER_PLACEMENT"
"""Names the placement file of this process, as RANK and WORLD_SIZE name its rank."""
ENGINE_NAME = "ray"
"""What rollout.engine is where the topology has engines."""


class Placed(Settings):
    """What Ray reserves for each process of a kind."""

    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] = 0.0

    def bundle(self) -> dict[str, float]:
        """As Ray counts it; a process that takes nothing of the cluster is counted as almost nothing, because Ray places no empty bundle."""
        return {name: value for name, value in (("CPU", self.num_cpus), ("GPU", self.num_gpus)) if value} or {"CPU": 0.001}


class Learners(Placed):
    """The ranks that train."""

    ranks: Annotated[int, Field(ge=1)] = 1


class Engines(Placed):
    """The servers that sample; none: every rank samples natively."""

    count: Annotated[int, Field(ge=0)] = 0
    backend: Literal["serve", "vllm"] = "serve"
    """`tether serve`, or vLLM."""
    args: list[str] = []
    """Further arguments of `tether serve` or `vllm serve`."""


class EnvWorkers(Placed):
    """Servers of one environment (`tether serve-env`)."""

    env: str
    """The name of one of the run's environments."""
    count: Annotated[int, Field(ge=1)] = 1
    args: list[str] = []
    """Further arguments of `tether serve-env`."""


class Topology(Settings):
    """Everything that Ray places for a run."""

    learners: Learners = Learners()
    engines: Engines = Engines()
    environments: list[EnvWorkers] = []
    """Environments without workers are played by the learner ranks themselves."""
    start_timeout: Annotated[float, Field(gt=0)] = 900.0
    """Seconds until resources must be there and every process must have started."""
    restarts: Annotated[int, Field(ge=0)] = 8
    """How often Ray may start an engine or an environment worker again, each of them."""

    def bundles(self) -> list[tuple[str, dict[str, float]]]:
        """What each process is and takes: ranks first, then engines, then environment workers."""
        found = [(f"learner rank {rank}", self.learners.bundle()) for rank in range(self.learners.ranks)]
        found += [(f"engine {number}", self.engines.bundle()) for number in range(self.engines.count)]
        for workers in self.environments:
            found += [(f"{workers.env} worker {number}", workers.bundle()) for number in range(workers.count)]
        return found


def load_topology(path: Path) -> Topology:
    """The topology of a YAML or TOML file, checked; every problem is one line."""
    data = read_file(path)
    workers = data.pop("environments", None) or []
    if not isinstance(workers, list) or not all(isinstance(entry, dict) for entry in workers):
        raise ConfigError("topology key 'environments': give a list, each entry with env and count")
    topology = validate(Topology, data, "topology")
    return topology.model_copy(update={"environments": [validate(EnvWorkers, entry, "topology environments") for entry in workers]})


def check_environments(topology: Topology, played: list[str]) -> None:
    """Refuse workers of an environment that the run does not play, and two entries for one."""
    names = [workers.env for workers in topology.environments]
    for name in names:
        if name not in played:
            raise BadInput(f"the topology has workers of '{name}', which the run does not play: {did_you_mean(name, played)}")
        if names.count(name) > 1:
            raise BadInput(f"the topology has {names.count(name)} entries of '{name}'; give one, with their count")


def check_room(topology: Topology, nodes: list[dict[str, float]], where: str) -> None:
    """Refuse a topology that the cluster cannot hold even when nothing else runs there. `nodes`: what each machine has."""
    bundles = topology.bundles()
    for kind, noun in (("CPU", "CPUs"), ("GPU", "GPUs")):
        asked, there = sum(bundle.get(kind, 0.0) for _, bundle in bundles), sum(node.get(kind, 0.0) for node in nodes)
        if asked > there + 1e-9:
            key = "num_gpus" if kind == "GPU" else "num_cpus"
            raise BadInput(
                f"the topology asks for {asked:g} {noun}, and {where} has {there:g}; lower ranks, counts or {key} (parts of one, such as 0.5, are "
                "allowed), or add machines"
            )
    for what, bundle in bundles:
        if not any(all(node.get(kind, 0.0) + 1e-9 >= size for kind, size in bundle.items()) for node in nodes):
            asked_words = " and ".join(f"{size:g} {kind}" for kind, size in bundle.items())
            raise BadInput(
                f"the topology asks for {asked_words} for {what}, and no machine of {where} has that; lower it, or add a machine"
            )


def check_gpus_are_used(topology: Topology, nodes: list[dict[str, float]], where: str) -> None:
    """Refuse to compute on CPUs beside GPUs, unless that was asked for."""
    num_gpus = sum(node.get("GPU", 0.0) for node in nodes)
    without = [name for name, placed in (("learners", topology.learners), ("engines", topology.engines)) if not placed.num_gpus]
    if not topology.engines.count and "engines" in without:
        without.remove("engines")
    if num_gpus and without:
        raise BadInput(
            f"{where} has {num_gpus:g} GPUs, and the topology gives its {' and '.join(without)} none; set num_gpus there, or --set model.device=cpu"
        )


class Placement:
    """Where the servers of a run are, for a learner rank that Ray has placed: one file, written again when one of them is replaced.

    The file holds the address of every engine, in order, and those of the workers of each environment; null stands for one that is being
    replaced. Whoever loses a server reads the file again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def engines(self) -> list[str | None]:
        """Of every engine, in order."""
        return list(self._read()["engines"])

    def is_placed(self, env: str) -> bool:
        """Whether an environment has workers."""
        return env in self._read()["environments"]

    def workers(self, env: str) -> list[str]:
        """Of the workers of an environment that are there."""
        return [address for address in self._read()["environments"][env] if address]

    def write(self, engines: list[str | None], environments: dict[str, list[str | None]]) -> None:
        """Replace the file in one move: a reader sees the old one or the new one."""
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps({"engines": engines, "environments": environments}), encoding="utf-8")
        draft.replace(self._path)

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadInput(
                f"{PLACEMENT_VARIABLE} is '{self._path}', which cannot be read ({error}); start with tether train --ray"
            ) from error
        return found


def joined_placement() -> Placement | None:
    """The placement of this process; None where Ray did not start it."""
    path = os.environ.get(PLACEMENT_VARIABLE)
    return Placement(Path(path)) if path else None
