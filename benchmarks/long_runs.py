"""Whether a run stays as fast and as small at its 2,000th step as at its first, and how quickly episodes are found in a large run folder.

    python benchmarks/long_runs.py steps --steps 2000       a whole run of many cheap steps: seconds of a step, memory, open files
    python benchmarks/long_runs.py files --gigabytes 5      the writer and the index alone, on a trajectories.jsonl of that size
    python benchmarks/long_runs.py files --gigabytes 0.5 --tokens 60     the same number of shorter episodes, on a small disk

`steps` trains `tiny` on FrozenLake with episodes of one turn and four tokens: what grows with the number of steps shows, and nothing hides it.
`files` writes blocks of a training step's size, and then asks what a dashboard asks. Times are CPU seconds of the process, which other work on
the machine does not change, and for questions seconds of the clock beside them. Figures and the machine: docs/reliability.md.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

SETTINGS: dict[str, Any] = {
    "env": {"options": {"max_turns": 1}},
    "model": {"device": "cpu"},
    "rollout": {"num_groups": 1, "group_size": 2, "max_tokens": 4},
    "filter": {"strategy": "all"},
    "learner": {"update_batch": 2},
    "diagnosis": {"every": 0},
    "evaluation": {"every": 0, "prompts": 1},
    "checkpoint": {"every": 500, "keep": 1},
    "early_stop": {"invalid_steps": 0, "empty_steps": 0, "variance_steps": 100_000, "success_evaluations": 100_000},
}


def measure_steps(steps: int, folder: Path) -> None:
    """Train, and print the seconds and the memory of the first and the last tenth of the steps."""
    import tether
    from tether.runs.schema import StepRecord
    from tether.runs.timings import StepTimings

    class Watch(tether.Callback):
        def __init__(self) -> None:
            self.times, self.sizes, self.files = [time.process_time()], [0], [0]

        def on_step_end(self, record: StepRecord, timings: StepTimings) -> None:
            self.times.append(time.process_time())
            self.sizes.append(resident_bytes())
            self.files.append(len(list(Path("/proc/self/fd").iterdir())))

    watch = Watch()
    tether.train("frozen_lake", model={"name": "tiny", **SETTINGS["model"]}, steps=steps, out=folder / "run", callbacks=[watch],
                 options=SETTINGS["env"]["options"], **{key: value for key, value in SETTINGS.items() if key not in ("model", "env")})  # fmt: skip
    seconds = [after - before for before, after in zip(watch.times, watch.times[1:], strict=False)][2:]  # 0 and 1 set things up
    tenth = len(seconds) // 10
    for name, part in (("first", slice(None, tenth)), ("last", slice(-tenth, None))):
        sizes, files = watch.sizes[3:][part], watch.files[3:][part]
        print(
            f"{name} {tenth} steps: median {1000 * statistics.median(seconds[part]):.1f} ms of CPU a step, "
            f"{statistics.median(sizes) / 1e6:.0f} MB resident, {max(files)} open files"
        )


def measure_files(gigabytes: float, tokens: int, folder: Path) -> None:
    """Write a run folder of this size, and ask for episodes."""
    from tether.runs.index import INDEX, TRAJECTORIES, TrajectoryIndex
    from tether.runs.store import RunStore

    store = RunStore.create(folder / "run", "steps: 1\n", {})
    path = store.folder / TRAJECTORIES
    turn = {"observation": "x" * 400, "response": "y" * 3 * tokens, "response_ids": list(range(tokens)), "logprobs": [-0.123456] * tokens}
    seconds, step = [], 0
    while not path.exists() or path.stat().st_size < gigabytes * 1e9:
        step += 1
        block = [
            {
                "step": step, "split": "train", "env": "bench", "group": n // 16, "member": n % 16, "seed": n, "reward": (step * 7 + n) % 10 / 10,
                "success": (step + n) % 3 == 0, "stop_reason": "success" if (step + n) % 3 == 0 else "turn_limit", "error": None, "measures": {},
                "kept": n % 2 == 0, "turns": [turn],
            }
            for n in range(128)
        ]  # fmt: skip
        start = time.process_time()
        store.append_trajectories(block)
        seconds.append(time.process_time() - start)
    store.close()
    tenth = max(1, len(seconds) // 10)
    print(
        f"{path.stat().st_size / 1e9:.2f} GB, {128 * step:,} episodes in {step} steps; the index has {(store.folder / INDEX).stat().st_size / 1e6:.1f} MB"
    )
    print(
        f"writing a step: {1000 * statistics.median(seconds[:tenth]):.0f} ms at the start, {1000 * statistics.median(seconds[-tenth:]):.0f} ms of CPU at the end"
    )

    def ask(what: str, **wanted: Any) -> None:
        start, worked = time.perf_counter(), time.process_time()
        index = TrajectoryIndex(store.folder)
        index.refresh()
        rows = index.select(**wanted)
        found = list(index.read(rows[:20]))
        taken = f"{1000 * (time.perf_counter() - start):.0f} ms ({1000 * (time.process_time() - worked):.0f} of CPU)"
        print(f"{what}: {taken} for {len(rows):,} rows and {len(found)} episodes, opening included")

    ask("a step in the middle", step=step // 2)
    ask("failures with a reward of 0.8 or more", success=False, reward_at_least=0.8)
    ask("by stop reason", stop_reason="turn_limit", split="train")
    (store.folder / INDEX).unlink()
    start = time.process_time()
    RunStore.open(store.folder).trajectory_index()
    print(f"without an index: {time.process_time() - start:.1f} s of CPU, once")
    ask("then", step=step // 2)


def resident_bytes() -> int:
    """What the process takes of the memory now."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:  # not Linux: the most it has taken
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["steps", "files"])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=1000, help="of an episode in `files`; 1000 make 20 KB")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder unless given")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        if chosen.what == "steps":
            measure_steps(chosen.steps, Path(folder))
        else:
            measure_files(chosen.gigabytes, chosen.tokens, Path(folder))
    print(json.dumps({"python": sys.version.split()[0], "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
