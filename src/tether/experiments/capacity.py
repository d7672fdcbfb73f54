"""How many runs go side by side: measured on a GPU, the number of cores on a CPU, or what the user says.

On a GPU the number is doubled while it pays: one run is started, and when every run has made a few steps, their summed steps a second are
compared with those of half as many. The number grows while the sum rises by at least a quarter and memory for as many more runs, each as
large as the largest so far, is free. It never exceeds the cores, which every run needs one of. What was found is kept in a file, so a
later start on the same device begins with it.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tether.core.errors import BadInput
from tether.runs.files import write_whole

STEPS_TO_MEASURE = 4
"""Steps of every run before its pace counts: the first ones compile kernels."""
GAIN = 1.25
"""What doubling the runs must bring, at least."""
SPARE = 1.2
"""Memory that must be free for each further run, over the largest one so far."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card as nvidia-smi shows it; memory in MiB."""

    name: str
    total: int
    used: int


def read_gpu() -> Gpu | None:
    """The first card that is visible; None where there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "" or shutil.which("nvidia-smi") is None:
        return None
    number = (visible or "0").split(",")[0]
    query = ["nvidia-smi", f"--id={number}", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    name, total, used = (part.strip() for part in done.stdout.splitlines()[0].rsplit(",", 2))
    return Gpu(name, int(total), int(used))


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Capacity:
    """Says whether one more run fits. Make it with `fixed`, `of_cores` or `of_gpu`."""

    most: int
    """Never more than this."""
    target: int
    """At present."""
    settled: bool = True
    memory: Path | None = None
    """File in which the number that was found is kept."""
    gpu: Gpu | None = None
    """As it was before the first run."""
    rates: dict[int, float] = field(default_factory=dict)
    """Runs side by side to their summed steps a second."""

    @classmethod
    def fixed(cls, jobs: int) -> "Capacity":
        if jobs < 1:
            raise BadInput(f"--jobs is {jobs}; give at least 1")
        return cls(jobs, jobs)

    @classmethod
    def of_cores(cls, cores: int) -> "Capacity":
        return cls(cores, cores)

    @classmethod
    def of_gpu(cls, gpu: Gpu, cores: int, memory: Path) -> "Capacity":
        """Begins with what `memory` has of this card, if anything."""
        if memory.is_file():
            found = json.loads(memory.read_text(encoding="utf-8"))
            if found["device"] == gpu.name and found["cores"] == cores:
                return cls(found["jobs"], found["jobs"], memory=memory)
        return cls(cores, 1, settled=False, memory=memory, gpu=gpu)

    def has_room(self, running: Sequence[tuple[int, float | None]]) -> bool:
        """Whether one more run may start beside those that run, given as (step, seconds a step)."""
        if not self.settled and len(running) == self.target:
            self._measure(running)
        return len(running) < self.target

    def _measure(self, running: Sequence[tuple[int, float | None]]) -> None:
        """Grow or settle, once every run has a pace."""
        paces = [seconds for step, seconds in running if step >= STEPS_TO_MEASURE and seconds]
        if len(paces) < len(running):
            return
        self.rates[self.target] = sum(1 / seconds for seconds in paces)
        half = self.rates.get(self.target // 2)
        if half is not None and self.rates[self.target] < GAIN * half:
            self.target //= 2  # the surplus runs end by themselves and are not replaced
            self._settle()
        elif self.target == self.most or (further := self._fitting(min(self.target, self.most - self.target))) == 0:
            self._settle()
        else:
            self.settled = further < self.target  # a number that is no doubling is the last one
            self.target += further
            if self.settled:
                self._settle()

    def _fitting(self, wanted: int) -> int:
        """How many further runs memory has room for, at most `wanted`."""
        now = read_gpu()
        if self.gpu is None or now is None:
            return wanted
        largest = max(1.0, (now.used - self.gpu.used) / self.target)
        return min(wanted, int((now.total - now.used) / (SPARE * largest)))

    def _settle(self) -> None:
        self.settled, self.most = True, self.target
        if self.memory is not None and self.gpu is not None:
            found = {"device": self.gpu.name, "cores": count_cores(), "jobs": self.target, "steps_per_second": self.rates}
            write_whole(self.memory, json.dumps(found, indent=2) + "\n")
