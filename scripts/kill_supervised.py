"""Runs on two ranks that sample from a server, under `tether train --restarts`: ranks, their launcher and the server are killed at random.

Nobody resumes them: they must go on by themselves, and end with the turns, records, weights and moments of a run that nobody disturbed. What differs
is rounding, as between any two runs with a server: which requests it computes together depends on when they come. A keeper starts the server again, as
Kubernetes would. The part `restarts` of scripts/torture.py.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from compare_ranks import COMMON, MOMENTS, WEIGHTS, different_metrics, distances, turns_of
from kill_many import unreadable
from tether.core.http_client import is_healthy
from tether.runs.checkpoints import list_checkpoints
from tether.runs.store import RunStore
from torture_part import Part

STEPS = 8
SHARDINGS = ("zero1", "fsdp")
VICTIMS = ("rank 0", "rank 1", "launcher", "server", "rank 1 and server")
LONGEST = 900.0
"""Seconds of one run."""
OWN = {
    "steps": STEPS,
    "env.options.max_turns": 1,
    "rollout.group_size": 2,
    "learner.update_batch": 2,
    "diagnosis.every": 3,
    "evaluation.every": 2,
    "filter.strategy": "all",
    "early_stop.invalid_steps": 0,
    "server.patience": 3,
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Keeper:
    """A server that is started again whenever it has ended."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.address, self._log = f"http://127.0.0.1:{self._port}", log.open("ab")
        self._process: subprocess.Popen[bytes] | None = None
        self.look()
        while not is_healthy(self.address):
            time.sleep(0.1)

    def look(self) -> None:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "tether", "serve", "tiny", "--port", str(self._port), "--device", "cpu"]
            self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=ENVIRONMENT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        self.kill()
        self._log.close()


class Supervised:
    """One run under its supervisor."""

    def __init__(self, run: Path, sharding: str, keeper: Keeper) -> None:
        self.run, self._keeper = run, keeper
        settings = {**COMMON, **OWN, "learner.sharding": sharding}
        words = ["train", "frozen_lake", "--gpus", "2", "--engine", keeper.address, "--out", str(run), "--restarts", "99", "--quiet"]
        words += [word for pair in settings.items() for word in ("--set", "=".join(map(str, pair)))]
        self.log = run.with_suffix(".log")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen([sys.executable, "-m", "tether", *words], stdout=log, stderr=log, env=ENVIRONMENT)
        self._deadline = time.monotonic() + LONGEST

    def poll(self) -> int | None:
        self._keeper.look()
        if time.monotonic() > self._deadline:
            self.close()
        return self._process.poll()

    def wait_for_more(self, steps: int) -> None:
        """Until the run has more checkpoints than so many steps, or has ended."""
        while self.poll() is None and self.newest() <= steps:
            time.sleep(0.05)

    def newest(self) -> int:
        return max((int(path.name[5:]) for path in list_checkpoints(self.run / "checkpoints")), default=0)

    def kill(self, victim: str) -> bool:
        """Kill a part of the run; False where it is not there at the moment."""
        if "server" in victim:
            self._keeper.kill()
        wanted = victim.removesuffix("server").removesuffix(" and ")
        pids = self._processes()[wanted] if wanted else []
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return bool(pids) or not wanted

    def _processes(self) -> dict[str, list[int]]:
        """The processes of the attempt that runs now."""
        found: dict[str, list[int]] = {"rank 0": [], "rank 1": [], "launcher": []}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                environ = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            if str(self.run).encode() not in words or b"-c" in words or b"--restarts" in words:
                continue
            rank = next((word[5:].decode() for word in environ if word.startswith(b"RANK=")), None)
            found["launcher" if rank is None else f"rank {rank}"].append(int(folder.name))
        return found

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def differences(reference: Path, run: Path) -> list[str]:
    """What is not the same in two runs but for rounding, in words."""
    ours, theirs = RunStore.open(run), RunStore.open(reference)
    found = ["turns"] if turns_of(ours) != turns_of(theirs) else []
    if [record.step for record in ours.steps()] != [record.step for record in theirs.steps()]:
        return [*found, "steps"]
    for record, other in zip(ours.steps(), theirs.steps(), strict=True):
        found += [f"{name} of step {record.step}" for name in different_metrics(record.metrics, other.metrics)]
    weights, moments = distances(theirs, ours)
    found += [f"weights by {weights:.1e}"] if not weights <= WEIGHTS else []
    found += [f"moments by {moments:.1e}"] if not moments <= MOMENTS else []
    return found if ours.finished == theirs.finished else [*found, "how it ended"]


def restarts(part: Part) -> None:
    keeper = Keeper(part.folder / "server.log")
    try:
        references = {sharding: _undisturbed(part, sharding, keeper) for sharding in SHARDINGS}
        number = 0
        while part.has_time and not part.failures:
            for sharding in SHARDINGS:
                number += 1
                disturb(part, Supervised(part.folder / f"{sharding}-{number}", sharding, keeper), references[sharding])
    finally:
        keeper.close()


def _undisturbed(part: Part, sharding: str, keeper: Keeper) -> Path:
    reference = Supervised(part.folder / f"{sharding}-reference", sharding, keeper)
    while (code := reference.poll()) is None:
        time.sleep(0.05)
    if code or RunStore.open(reference.run).attempts():
        sys.exit(f"the reference run ended with code {code}: {reference.log.read_text()[-3000:]}")
    return reference.run


def disturb(part: Part, run: Supervised, reference: Path) -> None:
    """Kill something at random after every few steps, then let the run end, and compare it."""
    random: Any = part.random
    try:
        while run.newest() < STEPS and run.poll() is None:
            if random.random() < 0.8:  # most of the time of so short an attempt is its start
                run.wait_for_more(run.newest())
            time.sleep(float(random.uniform(0.0, 1.5)))
            victim = VICTIMS[int(random.integers(len(VICTIMS)))]
            if run.poll() is None and run.kill(victim):
                part.count(f"kills of {victim}")
                part.count("kills")
            bad = unreadable(run.run / "checkpoints")
            if bad:
                part.fail(f"{run.run.name}: {bad}")
        while (code := run.poll()) is None:
            time.sleep(0.05)
    finally:
        run.close()
    found = [f"exit code {code}"] if code else differences(reference, run.run)
    if found:
        part.fail(f"{run.run.name} differs in {', '.join(found)}: {run.log.read_text()[-3000:]}")
    part.count("further attempts", max((entry["attempt"] - 1 for entry in RunStore.open(run.run).attempts()), default=0))
    part.count("equal runs", not found)
