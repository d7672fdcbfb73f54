"""Train the same run on one rank and on several, and compare what was sampled and what was learned; kill ranks and resume.

    python scripts/compare_ranks.py 2 4                     every kind of run on 2 and on 4 ranks, beside one rank
    python scripts/compare_ranks.py 2 --only ppo            one kind
    python scripts/compare_ranks.py 2 --set learner.sharding=fsdp
    python scripts/compare_ranks.py 2 4 --kills 20          and runs of which a rank is killed (SIGKILL) at random moments, resumed on
                                                            1, 2 or 4 ranks each time, until they end

Turns must be the same, metrics equal within 1e-3, weights within 1e-5, moments within 1e-4 of their norm, and all ranks must end with the
same bits. A rank that lost another must end by itself within half a minute. Each rank is `tether train` in a process of its own, forked from
this one after its imports, on a CPU. Prints a line per run; exit code 1 if anything differs.
"""

import argparse
import hashlib
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the ranks of a machine share its cores

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tether.cli import train
from tether.cli.main import main as tether_main
from tether.core.errors import RankFailure
from tether.core.seeding import generator
from tether.models import hardware
from tether.runs.checkpoints import MODEL, list_checkpoints
from tether.runs.store import RunStore
from tether.training.checkpoint import load_state
from tether.training.loop import Trainer

# At a rate of 1e-5 Adam moves a weight by at most about that: where a gradient is nothing but rounding, so is the direction it moves in. The
# moments say whether the gradients are the same.
COMMON = {
    "model.device": "cpu",
    "env.options.max_turns": 2,
    "rollout.num_groups": 3,
    "rollout.group_size": 4,
    "rollout.max_tokens": 32,
    "learner.learning_rate": 0.00001,
    "learner.update_batch": 4,
    "critic.learning_rate": 0.00001,
    "evaluation.prompts": 3,
    "checkpoint.every": 1,
    "checkpoint.keep": 9,
    "diagnosis.every": 2,
    "diagnosis.gradients.bound": "false",
    "steps": 2,
}
# More groups than ranks, uneven shares, and with PPO fewer groups than ranks. A word with = is a setting.
KINDS = {
    "filtered": "frozen_lake --filter top_p:0.9 diagnosis.gradients.every=9 diagnosis.gradients.buckets=3 diagnosis.probe_prompts=3 "
    "diagnosis.probe_samples=2",
    "ppo": "frozen_lake --algo ppo --filter all rollout.num_groups=1 algorithm.kl_coef=0.05",
    "mixed": "frozen_lake --also countdown --filter all",
}
KILLED = -signal.SIGKILL
ALONE_SECONDS = 30.0
"""How long a rank may take to end once it has lost another."""
WEIGHTS, MOMENTS, METRICS = 1e-5, 1e-4, 1e-3
CUT = ("update/tokens_shared", "update/padding", "update/micro_tokens")


class Kill(NamedTuple):
    """SIGKILL for one rank, so many seconds after the start."""

    rank: int
    delay: float


def words_of(kind: str, out: Path, settings: Sequence[str] = ()) -> list[str]:
    """The arguments of `tether` for a new run."""
    words = KINDS[kind].split()
    pairs = [*(f"{key}={value}" for key, value in COMMON.items()), *(word for word in words if "=" in word), *settings]
    return ["train", *(word for word in words if "=" not in word), "--out", str(out), *(word for pair in pairs for word in ("--set", pair))]


def tether(words: Sequence[str]) -> Callable[[int], None]:
    """`tether WORDS`, as the work of a rank."""

    def work(_rank: int) -> None:
        _write_digest_at_the_end()
        # The report and the measured peak take half of the time of so short a run.
        train._finish = lambda console, store, write_report: None
        hardware.PEAK_SECONDS = 0.0
        tether_main(list(words))

    return work


def launch(work: Callable[[int], None], num_ranks: int, log: Path, kill: Kill | None = None) -> list[int]:
    """Do some work on several ranks; returns their exit codes, KILLED for one that was killed or did not end by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.stdout.flush()
    pids = [_fork(work, rank, num_ranks, port, log) for rank in range(num_ranks)]
    start, codes, lost = time.monotonic(), dict[int, int](), 0.0
    while len(codes) < num_ranks:
        for rank, pid in enumerate(pids):
            done, status = (0, 0) if rank in codes else os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
                lost = lost or (time.monotonic() if codes[rank] else 0.0)
        if kill is not None and kill.rank not in codes and time.monotonic() - start > kill.delay:
            os.kill(pids[kill.rank], signal.SIGKILL)
            kill = None
        if lost and time.monotonic() - lost > ALONE_SECONDS:
            for rank in set(range(num_ranks)) - codes.keys():
                os.kill(pids[rank], signal.SIGKILL)
        time.sleep(0.005)
    return [codes[rank] for rank in range(num_ranks)]


def _fork(work: Callable[[int], None], rank: int, num_ranks: int, port: int, log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        if num_ranks > 1:
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
        work(rank)
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        raise
    finally:  # never back into the parent's code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _write_digest_at_the_end() -> None:
    """Have every rank write what it holds at the end, beside the run folder."""
    real = Trainer.run

    def run(trainer: Trainer) -> None:
        lost = False
        try:
            real(trainer)
        except RankFailure:  # divided weights cannot be gathered without the others
            lost = True
            raise
        finally:
            digest = hashlib.sha256()
            for parameter in () if lost else trainer.policy.module.parameters():
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                digest.update(whole.detach().numpy().tobytes())
            place = trainer.store.folder
            place.with_name(f"{place.name}.rank{trainer.ranks.rank}").write_text(digest.hexdigest(), encoding="ascii")

    Trainer.run = run  # type: ignore[method-assign, assignment]


def differences(reference: Path, run: Path, num_ranks: int) -> list[str]:
    """What is not the same in two runs, in words."""
    ours, theirs = RunStore.open(run), RunStore.open(reference)
    found = []
    if turns_of(ours) != turns_of(theirs):
        found.append("turns")
    for record, other in zip(ours.steps(), theirs.steps(), strict=True):
        if record.notes != other.notes:
            found.append(f"notes of step {record.step}")
        found += [f"{name} of step {record.step}" for name in different_metrics(record.metrics, other.metrics)]
    weights, moments = distances(theirs, ours)
    if not weights <= WEIGHTS:
        found.append(f"weights by {weights:.1e}")
    if not moments <= MOMENTS:
        found.append(f"moments by {moments:.1e}")
    held = {run.with_name(f"{run.name}.rank{rank}").read_text(encoding="ascii") for rank in range(num_ranks)}
    return [*found, *(["ranks from one another"] if len(held) > 1 else [])]


def different_metrics(ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[str]:
    """The metrics that are not the same; how a minibatch is cut is not the same, on purpose."""
    ours, theirs = ({name: value for name, value in metrics.items() if name not in CUT} for metrics in (ours, theirs))
    if ours.keys() != theirs.keys():
        return sorted(ours.keys() ^ theirs.keys())
    return [name for name, value in ours.items() if not abs(value - theirs[name]) <= METRICS * max(1.0, abs(value))]


def turns_of(store: RunStore, split: str | None = None) -> list[Any]:
    """Every sampled turn of a run, in order."""
    return sorted(
        (t["step"], t["split"], t["group"], t["member"], [turn["response_ids"] for turn in t["turns"]])
        for t in store.trajectories(split=split)
    )


def distances(one: RunStore, other: RunStore) -> tuple[float, float]:
    """How far the last checkpoints are apart: the largest difference of a weight, and of the first moments relative to their norm."""
    last = [list_checkpoints(store.checkpoints)[-1] for store in (one, other)]
    weights = [load_file(next((path / MODEL).glob("*.safetensors"))) for path in last]
    furthest = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    moments = [_first_moments(load_state(path)) for path in last]
    return furthest, float(torch.linalg.vector_norm(moments[0] - moments[1]) / torch.linalg.vector_norm(moments[0]).clamp(min=1e-12))


def _first_moments(state: dict[str, Any]) -> torch.Tensor:
    parts = [
        kept["exp_avg"].double().flatten()
        for optimizer in state["learner"]["optimizers"].values()
        for kept in optimizer["adam"]["state"].values()
    ]
    return torch.cat(parts) if parts else torch.zeros(1)


class Comparison:
    """One kind of run: on one rank, and what is compared with it."""

    def __init__(self, folder: Path, kind: str, settings: Sequence[str]) -> None:
        self.folder, self.kind, self.settings, self.failures = folder, kind, settings, 0
        self.reference = folder / f"{kind}-1"
        start = time.monotonic()
        self._must(launch(tether(words_of(kind, self.reference)), 1, self.reference.with_suffix(".log")), self.reference)
        self.seconds = time.monotonic() - start
        self._say(f"1 rank: {self.seconds:.1f} s")

    def on(self, num_ranks: int) -> None:
        """The same run on several ranks, without trouble."""
        run = self.folder / f"{self.kind}-{num_ranks}"
        start = time.monotonic()
        self._must(launch(tether(words_of(self.kind, run, self.settings)), num_ranks, run.with_suffix(".log")), run)
        self._compare(run, num_ranks, f"{num_ranks} ranks, {time.monotonic() - start:.1f} s")

    def killed(self, number: int, sizes: Sequence[int], draws: Any) -> int:
        """A run that loses a rank again and again, and goes on with as many as it may; returns how often it did."""
        run, kills = self.folder / f"{self.kind}-killed-{number}", 0
        while True:
            size = int(draws.choice([1, *sizes]))
            begun = (run / "run.json").is_file()
            words = ["train", "--resume", "--out", str(run)] if begun else words_of(self.kind, run, self.settings)
            kill = Kill(int(draws.integers(size)), float(draws.uniform(0.1, 1.2)) * self.seconds)
            start = time.monotonic()
            codes = launch(tether(words), size, run.with_suffix(".log"), kill=kill)
            if not any(codes):
                self._compare(run, size, f"killed {kills} times, ended on {size} ranks")
                return kills
            kills += 1
            alone = [code for rank, code in enumerate(codes) if rank != kill.rank]
            self._say(
                f"killed rank {kill.rank} of {size} after {kill.delay:.1f} s: exit codes {codes}, all ended {time.monotonic() - start:.1f} s"
            )
            if any(code not in (0, 1) for code in alone):
                self._fail(f"a rank did not end by itself: {run.with_suffix('.log').read_text()[-2000:]}")
                return kills

    def _compare(self, run: Path, num_ranks: int, what: str) -> None:
        found = differences(self.reference, run, num_ranks)
        weights, moments = distances(RunStore.open(self.reference), RunStore.open(run))
        num_turns = sum(len(turns) for *_, turns in turns_of(RunStore.open(run)))
        if found:
            self._fail(f"{what}: differs in {', '.join(found)}")
        else:
            self._say(f"{what}: the same {num_turns} turns, weights within {weights:.1e}, moments within {moments:.1e}")

    def _must(self, codes: Sequence[int], run: Path) -> None:
        if any(codes):
            sys.exit(f"{self.kind} ended with codes {list(codes)}: {run.with_suffix('.log').read_text()[-3000:]}")

    def _fail(self, what: str) -> None:
        self.failures += 1
        self._say(f"FAILED {what}")

    def _say(self, what: str) -> None:
        print(f"{self.kind}: {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ranks", type=int, nargs="+", help="how many ranks; several numbers are compared one after the other")
    parser.add_argument("--only", action="append", choices=list(KINDS), help="a kind of run; may be given several times (default all)")
    parser.add_argument("--kills", type=int, default=0, help="how many kills of a rank at random moments, for each kind")
    parser.add_argument("--set", action="append", default=[], help="a setting of the runs on several ranks, such as learner.sharding=fsdp")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    arguments = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.only or list(KINDS):
            comparison = Comparison(Path(folder), kind, arguments.set)
            for num_ranks in arguments.ranks:
                comparison.on(num_ranks)
            draws, kills, number = generator("kill-ranks", kind, arguments.seed), 0, 0
            while kills < arguments.kills and not comparison.failures:
                number += 1
                kills += comparison.killed(number, arguments.ranks, draws)
            failures += comparison.failures
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
