"""`tether train --gpus N`: one rank a GPU of this machine, started by torch's launcher as `torchrun --standalone` does.

The launcher passes Ctrl-C and SIGTERM on to the ranks, which stop together with a checkpoint. Where a rank dies, it ends the others. A rank that
ends with an error has said why itself; one that was killed could not, so that is said here.
"""

import logging
import os
import signal
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from tether.core.errors import BadInput, RankFailure
from tether.models.hardware import check_device, default_device, num_gpus

STOP_SECONDS = 120
"""How long ranks that were told to stop may take, for their last checkpoint, before they are killed."""


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
    """Run `tether WORDS` on so many ranks of this machine; returns the exit code. A rank that was killed is a RankFailure."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(STOP_SECONDS))
    # What torch's launcher logs about signals and failed ranks is said below, in one line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.disable(logging.WARNING)
    try:
        run(parse_args(["--standalone", f"--nproc-per-node={num_ranks}", "-m", "tether", *words]))
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
