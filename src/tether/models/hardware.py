"""What there is to compute with: the device in words, the memory it has left, what to say where it runs out, and how fast it multiplies.

The peak is measured, not looked up: square matrix products in the type the model computes in, larger and larger until one takes long enough
to be timed, then the fastest of a few. A share of that peak says how much of what this machine can do a stage of training used.
"""

import ctypes
import errno
import functools
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tether.core.errors import BadInput, OutOfMemory

PRODUCT_WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
TIMED_SECONDS = 0.01
"""A product that takes at least this long is not made larger: the clock and the start of a kernel no longer count."""
PEAK_SECONDS = 0.2
"""How long the products of the last width are repeated."""
CGROUP = Path("/sys/fs/cgroup")
"""Where Linux says what a container may use."""
SLEEP_WHILE_WAITING = 4
"""CU_CTX_SCHED_BLOCKING_SYNC of CUDA's driver."""
_ON_CPU = ("can't allocate memory", "not enough memory")
"""How torch's allocator for the CPU says it, as a plain RuntimeError."""


def default_device() -> str:
    """The GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def num_gpus() -> int:
    """How many GPUs this process sees."""
    return torch.cuda.device_count()


def sleep_while_waiting() -> None:
    """Let this process sleep while it waits for a card. By default it keeps a core busy, which answers some microseconds sooner, and which runs that
    share card and cores take from each other. To be called before the card is first used; does nothing where there is none."""
    if not torch.cuda.is_available():
        return
    driver = ctypes.CDLL("libcuda.so.1")
    failed = driver.cuInit(0) or driver.cuDevicePrimaryCtxSetFlags_v2(0, SLEEP_WHILE_WAITING)
    if failed:
        raise RuntimeError(f"the CUDA driver refuses to sleep while it waits: error {failed}")


def check_device(name: str) -> str:
    """The name of a device that exists here, as it was given."""
    if name.partition(":")[0].strip().lower() == "meta":
        raise BadInput(f"device '{name}' holds no numbers, only shapes; use cpu or cuda")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch's answers to: no such kind, not built in, none present
        raise BadInput(f"device '{name}' cannot be used here: {str(error).splitlines()[0][:120]}; use cpu or cuda") from error
    return name


def describe_compute() -> str:
    """The GPU, or the CPU's threads."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return f"GPU {properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return f"no GPU; {torch.get_num_threads()} CPU threads (float32)"


def device_name(device: torch.device) -> str:
    """What a device is called. Example: "NVIDIA H200", or "CPU, 2 threads"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type.upper()}, {torch.get_num_threads()} threads"


@functools.cache
def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product, measured once per process in well under a second."""
    for width in PRODUCT_WIDTHS:
        # Random values: a GPU computes zeros with less power and so faster. A generator of its own: the run's must not advance.
        source = torch.Generator(device).manual_seed(0)
        left, right = (torch.randn(width, width, generator=source, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        _seconds_of_product(left, right, out)  # the first one also sets the library up
        seconds = _seconds_of_product(left, right, out)
        if seconds >= TIMED_SECONDS:
            break
    end = time.perf_counter() + PEAK_SECONDS
    while time.perf_counter() < end:
        seconds = min(seconds, _seconds_of_product(left, right, out))
    return 2.0 * width**3 / seconds


def _seconds_of_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    """The seconds of one product; on a card, of one among several, which hides the way there and back."""
    on_card = left.device.type == "cuda"
    repeats = 8 if on_card else 1
    synchronise(left.device)
    start = time.perf_counter()
    for _ in range(repeats):
        torch.mm(left, right, out=out)
    synchronise(left.device)
    return max(time.perf_counter() - start, 1e-9) / repeats


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device; from the host to a card without waiting for what the card still has to do."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def synchronise(device: torch.device) -> None:
    """Wait until a card has done what it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def available_memory(device: torch.device) -> int | None:
    """Bytes that this process could still take on a device: what others use is gone, what torch holds and does not use is not.

    None where the system does not say.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    found = [bytes_left for bytes_left in (_available_in_system(), _available_in_container(CGROUP)) if bytes_left is not None]
    return min(found, default=None)


def taken_by_others(device: torch.device) -> int:
    """Bytes of a card that other processes hold, with what CUDA itself takes for this one; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total) - int(free) - torch.cuda.memory_reserved(device)


def _available_in_system() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux: what is there at all is the best that can be said
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return 1024 * kilobytes["MemAvailable"] if "MemAvailable" in kilobytes else None


def _available_in_container(folder: Path) -> int | None:
    """What a container's limit leaves; files that are only cached do not count as used."""
    try:
        limit, used = ((folder / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        facts = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:  # no container, or an older kind of limit
        return None
    return None if limit == "max" else int(limit) - int(used) + int(facts.get("inactive_file", 0))


@contextmanager
def memory_boundary(stage: str, remedy: str, kind: type[Exception] = OutOfMemory) -> Iterator[None]:
    """Turn a failed allocation of the block into an error of this kind that names the stage and the remedy."""
    try:
        yield
    except OutOfMemory:  # said already, by a boundary inside
        raise
    except (RuntimeError, MemoryError, OSError) as error:
        if not _is_out_of_memory(error):
            raise
        raise kind(f"out of memory in the {stage} ({' '.join(str(error).split())[:120]}); {remedy}") from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _ON_CPU)


def forget_failed(device: torch.device) -> None:
    """Give back what a failed attempt held: its tensors may hang in cycles of objects, and torch keeps their memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
