"""Ranks that `srun` starts: Slurm's variables put as torchrun puts its own, which everything else reads.

    srun --ntasks-per-node 8 tether train ...       one task a GPU; under torchrun or `--gpus`, whose variables count, this does nothing

In the batch script itself, outside srun, Slurm says "task 0 of N" too, and no other task is there: such a process is a run of one rank.
"""

import os
import re
from collections.abc import MutableMapping

from tether.core.errors import BadInput

FIRST_PORT, NUM_PORTS = 12_000, 20_000
"""The job's number chooses one of these ports for rank 0: below those that Linux gives to outgoing connections."""


def join_slurm(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, where srun started this process as one of several."""
    if "WORLD_SIZE" in environment or "SLURM_PROCID" not in environment:
        return
    in_step = "SLURM_STEP_ID" in environment or "SLURM_STEP_NUM_TASKS" in environment
    if not in_step and environment.get("ENVIRONMENT") == "BATCH":
        return
    size = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if size == 1:
        return
    nodes = next((environment[name] for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if name in environment), "")
    tasks = next((environment[name] for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if name in environment), None)
    node, local = _number(environment, "SLURM_NODEID"), _number(environment, "SLURM_LOCALID")
    # A task that Slurm shows one GPU alone (--gpus-per-task=1) finds it as number 0.
    alone = re.fullmatch(r"[^,]+", environment.get("CUDA_VISIBLE_DEVICES", "")) is not None
    port = FIRST_PORT + _number(environment, "SLURM_JOB_ID") % NUM_PORTS
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": 0 if alone else local,
        "LOCAL_WORLD_SIZE": tasks_of_node(tasks, node) if tasks else -(-size // max(1, _number(environment, "SLURM_NNODES"))),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environment.get("MASTER_PORT") or port,
    }
    environment.update({name: str(value) for name, value in found.items()})


def first_host(nodes: str) -> str:
    """The first host of a list as Slurm writes it: where rank 0 is.

    >>> first_host("gpu[007-009,12],login1"), first_host("a1,b[2-3]"), first_host("rack[1-2]n[04,06]")
    ('gpu007', 'a1', 'rack1n04')
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else ""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise BadInput(f"SLURM_JOB_NODELIST is '{nodes}', which names no host; set MASTER_ADDR to the host of rank 0")
    return host


def tasks_of_node(tasks: str, node: int) -> int:
    """How many tasks run on a node, by its number.

    >>> [tasks_of_node("8(x2),4", node) for node in range(3)]
    [8, 8, 4]
    """
    counts: list[int] = []
    for count, _, times in re.findall(r"(\d+)(\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(times or 1)
    if node >= len(counts):
        raise BadInput(f"SLURM_TASKS_PER_NODE is '{tasks}', and SLURM_NODEID is {node}; start the ranks with srun, or with torchrun")
    return counts[node]


def _number(environment: MutableMapping[str, str], *names: str) -> int:
    """The first of these variables that is set; 1 task, or number 0."""
    name = next((name for name in names if name in environment), None)
    if name is None:
        return 1 if len(names) > 1 else 0
    if not environment[name].isdigit():
        raise BadInput(f"{name} is '{environment[name]}', not a number; start the ranks with srun, or with torchrun")
    return int(environment[name])
