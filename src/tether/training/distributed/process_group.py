"""Ranks over torch's process group: gloo for objects and host memory, NCCL for GPUs. Started by torchrun, one rank a GPU.

Objects are pickled and gathered over gloo, so decisions never wait in a GPU's queue. A rank that dies closes its connections, which ends the
others' wait at once; one that hangs, or a machine that is gone, ends it after TETHER_RANK_TIMEOUT seconds (1200 unless set). Either is one
RankFailure, and the launcher ends what is left.
"""

import copy
import logging
import math
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tether.core.child import PARENT_VARIABLE
from tether.core.errors import BadInput, RankFailure, TetherError
from tether.models.hardware import check_device, default_device, num_gpus
from tether.training.distributed.ranks import Ranks, launched_rank
from tether.training.interrupts import Interrupts, grace_seconds

TIMEOUT_VARIABLE = "TETHER_RANK_TIMEOUT"
TIMEOUT_SECONDS = 1200.0
"""Longer than ranks that work wait for each other: for the longest episode of a rollout, for a checkpoint written in the foreground."""

ANSWER_SECONDS = 0.01
"""How long rank 0 waits at the start before it looks again who is there."""

_LOST = re.compile(r"gloo|nccl|connection (closed|reset)|timed out", re.IGNORECASE)
"""How torch says that another rank did not take part in an exchange, among the errors of a computation that exchanges something."""

Value = TypeVar("Value")


class _Failure:
    """What a rank tells the others about an error; without its traceback, which would keep the tensors of the failed work alive."""

    def __init__(self, error: BaseException) -> None:
        self.kind = type(error) if isinstance(error, TetherError | KeyboardInterrupt) else RankFailure
        self.message = str(error) if isinstance(error, TetherError) else f"{type(error).__name__}: {error}"


class ProcessGroup(Ranks):
    """A world of several."""

    def __init__(self) -> None:
        self.rank, self.size = launched_rank()
        self.local_rank, self.local_size = (
            int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
        )
        self.interrupts = Interrupts(several_ranks=True)
        self._group: dist.ProcessGroup | None = None
        """What objects are exchanged in; None is the group of all else."""
        self._seconds = _timeout()
        if self.local_rank < torch.cuda.device_count():  # else the run computes on a CPU, or is refused once its settings are known
            torch.cuda.set_device(self.local_rank)
        if not dist.is_initialized():  # a second run of one process stays in the world of its first
            if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
                raise BadInput(
                    f"WORLD_SIZE is {self.size}, but MASTER_ADDR and MASTER_PORT are not set; start with torchrun, or unset WORLD_SIZE"
                )
            with self._waiting("the start"):
                backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
                timeout = timedelta(seconds=self._seconds)
                shared, _, _ = next(dist.rendezvous("env://", timeout=timeout))
                store = _fresh_part(shared, self.rank, self.size, self._seconds)
                dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)

    def subgroup(self) -> "ProcessGroup":
        beside = copy.copy(self)
        beside.interrupts = Interrupts(several_ranks=True)  # signals reach the main thread, which stops all of them
        with self._waiting("the start"):
            beside._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._seconds))
        return beside

    def all_gather(self, value: Value) -> list[Value]:
        values: list[Any] = [None] * self.size
        with self._waiting("an exchange"):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def share(self, part: Callable[[], Value]) -> list[Value]:
        failure: _Failure | None = None
        result: Any = None
        try:
            with self.interrupts.interruptible():
                result = part()
        except RankFailure:  # the others are not there to be told
            raise
        except (TetherError, KeyboardInterrupt) as error:
            failure = _Failure(error)
        except Exception as error:  # a defect: told to the others, and raised here as it is
            self.all_gather((_Failure(error), None))
            raise
        found = self.all_gather((failure, result))
        failures = [(rank, said) for rank, (said, _) in enumerate(found) if said is not None]
        if failures:
            self._raise(failures)
        return [each for _, each in found]

    def barrier(self, work: Callable[[], Value]) -> Value:
        kept: list[Value] = []
        self.share(lambda: kept.append(work()))
        return kept[0]

    def broadcast_object(self, work: Callable[[], Value]) -> Value:
        found: list[Any] = self.share(lambda: work() if self.rank == 0 else None)
        result: Value = found[0]
        return result

    def reduce(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        with self._waiting("the sum of gradients"):
            _wait([dist.reduce(tensor, owner, async_op=True) for tensor, owner in zip(tensors, owners, strict=True)])

    def broadcast(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        with self._waiting("the exchange of weights"):
            _wait([dist.broadcast(tensor.detach(), owner, async_op=True) for tensor, owner in zip(tensors, owners, strict=True)])

    def gather_to_first(self, tensor: Tensor, owner: int) -> Tensor:
        with self._waiting("the collection of a checkpoint"):
            if self.rank == owner != 0:
                dist.send(tensor.detach().cpu(), 0)
            elif self.rank == 0 != owner:
                tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
                dist.recv(tensor, owner)
        return tensor

    @contextmanager
    def exchanging(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not _LOST.search(str(error)):
                raise
            with self._waiting(what):
                raise

    def close(self) -> None:
        dist.destroy_process_group()

    def _raise(self, failures: list[tuple[int, _Failure]]) -> None:
        """Raise the same error on every rank: an interrupt first, else that of the lowest rank."""
        if any(failure.kind is KeyboardInterrupt for _, failure in failures):
            self.interrupts.agreed()
            raise KeyboardInterrupt
        rank, failure = failures[0]
        error = failure.kind(failure.message if rank == 0 else f"rank {rank}: {failure.message}")
        if isinstance(error, TetherError):
            error.common = True
        raise error

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # gloo's and NCCL's words for a connection that is gone or silent
            said = " ".join(re.sub(r"^\[[^]]*\]", "", str(error)).split()).partition(". ")[0][:120]
            # gloo says "timed out connecting: ... Connection refused", at once, of a process that is gone.
            silent = ("timed out" in said.lower() or "timeout" in said.lower()) and "Connection refused" not in str(error)
            lost = f"did not answer for {self._seconds:.0f} s ({TIMEOUT_VARIABLE})" if silent else "has ended"
            raise RankFailure(
                f"rank {self.rank} of {self.size}: another rank {lost} during {what} ({said}); its own last lines say why; "
                "continue from the last checkpoint with --resume"
            ) from error


def _fresh_part(store: dist.Store, rank: int, size: int, seconds: float) -> dist.Store:
    """The same part of the store for all ranks, in which no rank of an earlier start has written.

    torchrun's agent keeps one store for all times that it starts the ranks, and torch writes the same keys each time
    (https://github.com/pytorch/pytorch/issues/135712). A rank that reads before another has written would meet the address of a dead one: it is
    refused, or both wait for the other to connect. TORCHELASTIC_RESTART_COUNT does not tell the starts apart, as each machine's agent has its own.

    So rank 0 makes up a name, and each other rank asks for it with a word that was never used, which no dead rank can have answered. Rank 0 may
    find the word of a dead rank first, so it answers until the rank itself was there.
    """
    word = uuid.uuid4().hex
    if rank > 0:
        store.set(f"tether/asks/{rank}", word)
        part = dist.PrefixStore(store.get(f"tether/answers/{word}").decode(), store)
        part.set(f"tether/here/{rank}", "")
        return part
    part, missing, deadline = dist.PrefixStore(f"tether/{word}", store), set(range(1, size)), time.monotonic() + seconds
    while missing:
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"timed out waiting for rank {min(missing)}")
        for other in missing:
            store.set(f"tether/answers/{store.get(f'tether/asks/{other}').decode()}", f"tether/{word}")
        time.sleep(ANSWER_SECONDS)
        missing = {other for other in missing if not part.check([f"tether/here/{other}"])}
    return part


def _timeout() -> float:
    said = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(said or TIMEOUT_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise BadInput(f"{TIMEOUT_VARIABLE} is '{said}'; give seconds, such as {TIMEOUT_SECONDS:.0f}")
    return seconds


def _wait(handles: Sequence[dist.Work | None]) -> None:
    for handle in handles:
        if handle is not None:
            handle.wait()


def check_gpus(num_ranks: int, device: str | None) -> None:
    """Refuse more ranks than this machine has GPUs; with device cpu any number is possible, to try it out."""
    name = check_device(device or default_device())
    if num_ranks < 1:
        raise BadInput(f"--gpus is {num_ranks}; give at least 1")
    if name != "cpu" and num_ranks > num_gpus():
        raise BadInput(f"--gpus is {num_ranks}, and this machine has {num_gpus()}; give at most so many, or several machines by torchrun")
    if name == "cpu" and device is None:
        raise BadInput(
            f"--gpus is {num_ranks}, and this machine has no GPU; leave it out, or try {num_ranks} ranks on the CPU: --set model.device=cpu"
        )


def launch(num_ranks: int, words: Sequence[str]) -> int:
    """Run `tether WORDS` on so many ranks of this machine, as `torchrun --standalone` does (`tether train --gpus N`); returns the exit code.

    The launcher passes Ctrl-C and SIGTERM on to the ranks, which stop together with a checkpoint. Where a rank dies, it ends the others. A rank
    that ends with an error has said why itself; one that was killed could not, so that is a RankFailure.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ[PARENT_VARIABLE] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(grace_seconds())))  # then ranks that were told to stop are killed
    # What torch's launcher logs about signals and failed ranks is said below, in one line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.disable(logging.WARNING)
    try:
        command = [sys.executable, "-P", "-u", "-m", "tether", *words]  # -P: without the current folder, as the command itself
        run(parse_args(["--standalone", f"--nproc-per-node={num_ranks}", "--no-python", *command]))
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        raise RankFailure(
            f"rank {rank} of {num_ranks} was killed by {signal.Signals(-failure.exitcode).name} (process {failure.pid}; a machine that is out of "
            "memory does that), and the others were ended; continue from the last checkpoint with --resume"
        ) from error
    return 0
