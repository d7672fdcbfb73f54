"""Ranks that srun starts: what Slurm says, as torchrun would. tests/e2e/test_ranks.py has two real ranks with Slurm's variables."""

import pytest

from tether.core.errors import BadInput
from tether.training.distributed.slurm import first_host, join_slurm, tasks_of_node

TASK = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "12",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}
"""Task 9 of 12, the second one on the second of two nodes."""


def joined(**changes: str | None) -> dict[str, str]:
    """What is added to the variables of the task, with these changes."""
    environment = {name: value for name, value in {**TASK, **changes}.items() if value is not None}
    before = dict(environment)
    join_slurm(environment)
    return {name: value for name, value in environment.items() if before.get(name) != value}


def test_a_task_of_srun_is_a_rank() -> None:
    assert joined() == {
        "RANK": "9",
        "WORLD_SIZE": "12",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "26567",  # 12000 + 1234567 % 20000
    }
    assert joined(SLURM_STEP_TASKS_PER_NODE=None, SLURM_NNODES="2")["LOCAL_WORLD_SIZE"] == "6"
    assert "MASTER_ADDR" not in joined(MASTER_ADDR="10.0.0.1") and joined(MASTER_PORT="29500")["MASTER_ADDR"] == "gpu07"
    assert joined(CUDA_VISIBLE_DEVICES="3")["LOCAL_RANK"] == "0" and joined(CUDA_VISIBLE_DEVICES="0,1,2,3")["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(
    "changes",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},  # torchrun, or --gpus, inside srun
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --ntasks 1 in a larger allocation
        {"SLURM_STEP_ID": None, "SLURM_STEP_NUM_TASKS": None, "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},  # the batch script itself
        {"SLURM_STEP_ID": None, "SLURM_STEP_NUM_TASKS": None, "SLURM_PROCID": None},  # the shell of salloc
    ],
)
def test_what_is_no_task_of_several(changes: dict[str, str | None]) -> None:
    assert joined(**changes) == {}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("gpu[007-009,12],login1", "gpu007"),
        ("a1,b[2-3]", "a1"),
        ("rack[1-2]n[04,06]", "rack1n04"),
        ("n-3.cluster.example", "n-3.cluster.example"),
    ],
)
def test_the_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_numbers_of_tasks_and_what_slurm_may_say_wrong() -> None:
    assert [tasks_of_node("8(x2),4", node) for node in range(3)] == [8, 8, 4]
    for changes, line in (
        ({"SLURM_JOB_NODELIST": ""}, "which names no host; set MASTER_ADDR"),
        ({"SLURM_NODEID": "2"}, "SLURM_TASKS_PER_NODE is '8,4', and SLURM_NODEID is 2"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS is 'many', not a number"),
    ):
        with pytest.raises(BadInput, match=line):
            joined(**changes)
