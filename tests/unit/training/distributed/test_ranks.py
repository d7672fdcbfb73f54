"""Which world a process belongs to, what its launcher may say wrong, and how work is dealt out. tests/e2e/test_ranks.py has several processes."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tether.core.config import validate
from tether.core.errors import BadInput, ConfigError, RankFailure
from tether.training.api import check_several_ranks, join_world
from tether.training.distributed import process_group
from tether.training.distributed.process_group import ProcessGroup, check_gpus
from tether.training.distributed.ranks import Ranks, balanced, launched_rank
from tether.training.settings import RunSettings


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TETHER_RANK_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)


def test_a_world_of_one_exchanges_nothing() -> None:
    ranks = join_world()
    tensor = torch.ones(2)
    assert type(ranks) is Ranks and (ranks.rank, ranks.size) == (0, 1)
    assert (ranks.all_gather(7), ranks.share(lambda: 7), ranks.broadcast_object(lambda: 7), ranks.barrier(lambda: 7)) == ([7], [7], 7, 7)
    ranks.reduce([tensor], [0])
    ranks.broadcast([tensor], [0])
    assert ranks.gather_to_first(tensor, 0) is tensor and tensor.tolist() == [1, 1]
    with pytest.raises(ZeroDivisionError):
        ranks.share(lambda: 1 // 0)


def test_the_launcher_says_which_rank_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert launched_rank() == (3, 4)


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "4"), ("", "2"), ("one", "2"), ("0", "many"), ("0", "0")])
def test_a_rank_that_cannot_be(rank: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(BadInput, match=f"the environment holds RANK={rank} and WORLD_SIZE={size}; start with torchrun, or unset both"):
        join_world()


def test_a_world_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        BadInput, match="WORLD_SIZE is 2, but MASTER_ADDR and MASTER_PORT are not set; start with torchrun, or unset WORLD_SIZE"
    ):
        ProcessGroup()


@pytest.mark.parametrize("said", ["soon", "0", "-3", "inf", "nan"])
def test_a_time_that_is_none(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TETHER_RANK_TIMEOUT", said)
    with pytest.raises(BadInput, match=f"TETHER_RANK_TIMEOUT is '{said}'; give seconds, such as 1200"):
        ProcessGroup()


STARTS = """
import multiprocessing, os, time
from tether.training.distributed.process_group import ProcessGroup

def work(rank, late):
    os.environ["RANK"] = str(rank)
    time.sleep(0.2 * (rank == late))
    assert ProcessGroup().all_gather(rank) == [0, 1]  # and no leave is taken, as by those that are killed

fork = multiprocessing.get_context("fork")
for late in (0, 1, 0, 1, 0, 1):
    ranks = [fork.Process(target=work, args=(rank, late)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0], f"rank {late} came late"
"""


@pytest.mark.slow
def test_ranks_that_are_started_again_do_not_meet_the_dead() -> None:
    """torchrun's agent keeps its store from start to start; that of this process stands for it. Whichever rank comes first finds the words of dead ones."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ended = subprocess.run(
        [sys.executable, "-c", STARTS],
        env={**os.environ, **launched, "TETHER_RANK_TIMEOUT": "5"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_rank_that_never_comes_is_named() -> None:
    """As one that dies after it has asked: its word stays."""
    store = dist.HashStore()
    store.set("tether/asks/1", "the word of one that is dead")
    with pytest.raises(dist.DistStoreError, match="timed out waiting for rank 1"):
        process_group._fresh_part(store, 0, 2, 0.05)


# The largest first, each to the rank that has least; of equal ranks to the lowest.
@pytest.mark.parametrize(
    ("sizes", "num_ranks", "owners"),
    [
        ([5, 1, 4, 3, 3], 2, [0, 1, 1, 1, 0]),
        ([1, 1, 1, 1], 2, [0, 1, 0, 1]),
        ([7], 3, [0]),
        ([], 3, []),
        ([2, 2], 1, [0, 0]),
        ([10, 9, 8, 7], 4, [0, 1, 2, 3]),
    ],
)
def test_work_is_dealt_out_evenly(sizes: list[int], num_ranks: int, owners: list[int]) -> None:
    assert balanced(sizes, num_ranks) == owners


def test_every_rank_owns_about_its_share(tiny: object) -> None:
    sizes = [parameter.numel() for parameter in tiny.model.parameters()]  # type: ignore[attr-defined]
    for num_ranks in (2, 3, 8):
        totals = [
            sum(size for size, owner in zip(sizes, balanced(sizes, num_ranks), strict=True) if owner == rank) for rank in range(num_ranks)
        ]
        assert sum(totals) == sum(sizes) and max(totals) <= 1.1 * max(sum(sizes) / num_ranks, max(sizes))


def _settings(device: str | None) -> RunSettings:
    return validate(RunSettings, {"env": {"name": "frozen_lake"}, "model": {"name": "tiny", "device": device}})


def test_devices_that_several_ranks_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    ranks.rank, ranks.size, ranks.local_rank = 3, 4, 1
    check_several_ranks(_settings("cpu"), ranks)
    with pytest.raises(BadInput, match=r"model.device is 'cuda:1', and each of 4 ranks takes a GPU of its own; give cuda or cpu"):
        check_several_ranks(_settings("cuda:1"), ranks)
    monkeypatch.setattr("tether.models.hardware.num_gpus", lambda: 2)
    check_several_ranks(_settings("cuda"), ranks)
    monkeypatch.setattr("tether.models.hardware.num_gpus", lambda: 1)
    with pytest.raises(BadInput, match=r"rank 3 is the 2\. on its machine, which has 1 GPUs; start one rank a GPU, or try it on the CPU"):
        check_several_ranks(_settings("cuda"), ranks)


def test_adapters_are_not_divided() -> None:
    ranks = Ranks()
    ranks.size = 2
    settings = {"env": {"name": "frozen_lake"}, "model": {"name": "tiny", "device": "cpu"}, "learner": {"sharding": "fsdp"}}
    check_several_ranks(validate(RunSettings, settings), ranks)
    with pytest.raises(BadInput, match=r"learner.sharding is fsdp, and the run trains adapters .* give learner.sharding=zero1"):
        check_several_ranks(validate(RunSettings, {**settings, "lora": {"rank": 4}}), ranks)
    with pytest.raises(ConfigError, match=r"learner.sharding.*'fsdp2'.*did you mean 'fsdp'"):
        validate(RunSettings, {**settings, "learner": {"sharding": "fsdp2"}})


def test_the_gradient_decomposition_needs_the_whole_model() -> None:
    ranks = Ranks()
    ranks.size = 2
    chosen = {"learner": {"sharding": "fsdp"}, "diagnosis": {"gradients": {"every": 5}}}
    settings = {"env": {"name": "frozen_lake"}, "model": {"name": "tiny", "device": "cpu"}, **chosen}
    check_several_ranks(validate(RunSettings, settings), ranks)  # every rank has it
    with pytest.raises(BadInput, match=r"no rank has it; give diagnosis.gradients.every=0, or learner.sharding=zero1"):
        check_several_ranks(validate(RunSettings, {**settings, "rollout": {"engine": "http://a:1"}}), ranks)


def test_a_lost_rank_is_told_from_a_failed_computation() -> None:
    group = ProcessGroup.__new__(ProcessGroup)
    group.rank, group.size, group._seconds = 0, 2, 60.0
    with pytest.raises(RankFailure, match="rank 0 of 2: another rank has ended during the update"), group.exchanging("the update"):
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    with pytest.raises(RankFailure, match="another rank has ended during the start"), group._waiting("the start"):
        raise RuntimeError(
            "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:4711"
        )
    with pytest.raises(RuntimeError, match=r"^size mismatch$"), group.exchanging("the update"):
        raise RuntimeError("size mismatch")


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "num_gpus", lambda: 2)
    monkeypatch.setattr(process_group, "check_device", lambda name: name)
    check_gpus(2, "cuda")
    check_gpus(8, "cpu")
    with pytest.raises(BadInput, match="--gpus is 3, and this machine has 2; give at most so many, or several machines by torchrun"):
        check_gpus(3, "cuda")
    with pytest.raises(BadInput, match="--gpus is 0; give at least 1"):
        check_gpus(0, None)
    monkeypatch.setattr(process_group, "default_device", lambda: "cpu")
    with pytest.raises(BadInput, match=r"this machine has no GPU; leave it out, or try 2 ranks on the CPU: --set model.device=cpu"):
        check_gpus(2, None)
