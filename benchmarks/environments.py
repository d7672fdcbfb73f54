"""How fast the environments are, each beside its peer in the same run.

    python benchmarks/environments.py [--only NAME ...] [--json FILE]

Ours and the peer's are measured in turn. What runs on one core is timed in seconds of CPU, so that other programs matter less; the
sandbox and HTTP, which are several processes or threads, in seconds of the clock. A job that is the same each time counts with its
best run. Where there is a peer the target is a ratio, else a speed. The exit code is 1 if a target was missed. benchmarks/README.md
says how to get the peer that Tether does not depend on.
"""

import argparse
import importlib.util
import json
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from tether import make_env
from tether.core.errors import TetherError
from tether.envs.frozen_lake.env import FrozenLake, FrozenLakeOptions
from tether.envs.frozen_lake.generator import Lake
from tether.envs.remote.http_server import serving
from tether.envs.sokoban.env import Sokoban, SokobanOptions
from tether.envs.sokoban.levels import Level
from tether.envs.sokoban.solver import solve

REPEATS = 5


@dataclass(frozen=True)
class Row:
    """One line of the table. Speeds are in things per second, of the kind that `what` names."""

    name: str
    what: str
    ours: float | None = None
    peer: float | None = None
    least: float | None = None
    """The target: of the ratio where there is a peer, else of our speed."""
    lengths: tuple[float, float] | None = None
    """Mean solution lengths, ours and the peer's: ours must not be shorter."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None if there is none, or nothing was measured."""
        if self.least is None or self.ours is None:
            return None
        reached = self.ours if self.peer is None else self.ours / self.peer
        return reached >= self.least and (self.lengths is None or self.lengths[0] >= self.lengths[1])


class Absent(Exception):
    """A row that cannot be measured here; the message says why."""


Clock = Callable[[], float]


def best(*jobs: Callable[[], int], clock: Clock = time.process_time) -> list[float]:
    """Things per second of each job, the best of several runs that take turns. A job answers how many things it has done."""
    speeds = [0.0] * len(jobs)
    for _ in range(REPEATS):
        for place, job in enumerate(jobs):
            began = clock()
            done = job()
            speeds[place] = max(speeds[place], done / (clock() - began))
    return speeds


# --- sokoban ---


def sokoban_small() -> list[Row]:
    return [_sokoban("sokoban 6x6, 1 box", 6, 1, num_levels=(4000, 400), least=10)]


def sokoban_large() -> list[Row]:
    return [_sokoban("sokoban 8x8, 2 boxes", 8, 2, num_levels=(1000, 100), least=50)]


def _sokoban(name: str, size: int, boxes: int, num_levels: tuple[int, int], least: float) -> Row:
    """Means over many levels: some take far longer than others, so that the best of a few would be chance."""
    env = Sokoban(SokobanOptions(height=size, width=size, boxes=boxes))
    generate_room = _room_generator()
    random.seed(0)  # the peer draws from both global streams
    np.random.seed(0)  # noqa: NPY002
    num_ours, num_peers = num_levels
    levels: list[list[Level]] = [[], []]
    seconds = [0.0, 0.0]
    for part in range(REPEATS):
        began = time.process_time()
        for seed in range(part * num_ours // REPEATS, (part + 1) * num_ours // REPEATS):
            env.reset(seed)
            levels[0].append(env.level)
        turned = time.process_time()
        levels[1] += [_peer_level(generate_room, size, boxes) for _ in range(num_peers // REPEATS)]
        seconds = [seconds[0] + turned - began, seconds[1] + time.process_time() - turned]
    lengths = statistics.mean(map(_length, levels[0][:400])), statistics.mean(map(_length, levels[1]))
    return Row(name, "levels", len(levels[0]) / seconds[0], len(levels[1]) / seconds[1], least, lengths, "default options")


def _room_generator() -> Callable[..., Any]:
    """gym-sokoban's generator alone: importing the package would need gym, which its generator does not."""
    package = importlib.util.find_spec("gym_sokoban")
    if package is None or not package.submodule_search_locations:
        raise Absent("the peer gym-sokoban is not installed, see benchmarks/README.md")
    file = Path(package.submodule_search_locations[0]) / "envs" / "room_utils.py"
    spec = importlib.util.spec_from_file_location("gym_sokoban_room_utils", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.generate_room


def _peer_level(generate_room: Callable[..., Any], size: int, boxes: int) -> Level:
    """A level of the peer's; like its own environment, it tries again when it finds none."""
    while True:
        try:
            fixed, state, _ = generate_room(dim=(size, size), num_steps=int(1.7 * 2 * size), num_boxes=boxes)
        except (RuntimeError, RuntimeWarning):
            continue
        return Level(
            size, size, _cells(fixed, 0), _cells(fixed, 2), _cells(state, 3) | _cells(state, 4), int(np.flatnonzero(state == 5)[0])
        )


def _cells(board: Any, kind: int) -> int:
    return sum(1 << int(cell) for cell in np.flatnonzero(board == kind))


def _length(level: Level) -> int:
    actions = solve(level)
    assert actions is not None, "a generated level can be solved"
    return len(actions)


# --- frozen lake ---

_OPEN_LAKE = ["SFFF", "FFFF", "FFFF", "FFFG"]
_STEPS = 10_000


def frozen_lake() -> list[Row]:
    """The same map on both sides, slippery as gymnasium's default. Going left only ever slides along the left edge: no episode ends."""
    options = FrozenLakeOptions(slip=2 / 3, actions_per_turn=1, max_turns=10**9)
    env = FrozenLake(options, generator=lambda seed, split: Lake.of(_OPEN_LAKE))
    env.reset(0)
    made = gymnasium.make("FrozenLake-v1", desc=_OPEN_LAKE, is_slippery=True, max_episode_steps=10**9)
    made.reset(seed=0)

    def our_steps() -> int:
        for answer in ("Left", "left", " Left ", "LEFT") * (_STEPS // 4):
            env.step(answer)
        return _STEPS

    def peer_steps(peer: Any) -> int:
        for _ in range(_STEPS):
            peer.step(0)
        return _STEPS

    ours, bare, wrapped = best(our_steps, lambda: peer_steps(made.unwrapped), lambda: peer_steps(made))
    return [
        Row("frozen_lake, gymnasium's class", "steps", ours, bare, 1.0, note="ours reads an answer and writes the state as text"),
        Row("frozen_lake, gymnasium.make", "steps", ours, wrapped, 1.0, note="with the wrappers that everybody gets"),
    ]


# --- environments without a peer ---


def searchqa() -> list[Row]:
    """Each query is another question, so nothing is answered from memory."""
    asking = make_env("searchqa")
    questions = [asking.reset(seed).text.rpartition("Question:")[2].strip() for seed in range(500)]
    env = make_env("searchqa", max_turns=10**9)
    env.reset(0)

    def queries() -> int:
        for question in questions:
            assert env.step(f"search[{question}]").info["valid"]
        return len(questions)

    return [Row("searchqa", "queries", best(queries)[0], least=1000, note="whole questions, the default encyclopedia")]


def webshop() -> list[Row]:
    """Random episodes of a shopper who searches, looks around and buys."""
    env = make_env("webshop")
    rng = random.Random(0)

    def steps() -> int:
        count = 0
        for seed in range(60):
            text = env.reset(seed).text
            done = False
            while not done:
                step = env.step(_shopping(rng, text))
                done, text, count = step.done, step.observation.text, count + 1
        return count

    return [Row("webshop", "steps", best(steps)[0], least=500, note="a quarter searches, else random clicks")]


def _shopping(rng: random.Random, page: str) -> str:
    clicks = re.findall(r"^click\[.*\]$", page, re.MULTILINE)
    if not clicks or rng.random() < 0.25:
        words = re.findall(r"[a-z]{3,}", page)
        return f"search[{' '.join(rng.choices(words, k=4))}]"
    return rng.choice(clicks)


def deepcoder() -> list[Row]:
    """Small programs that read and print a number, two at a time."""
    return [_test_runs(num_tests) for num_tests in (1, 10)]


def _test_runs(num_tests: int) -> Row:
    tests = [{"input": f"{number}\n", "output": f"{number + 1}\n", "testtype": "stdin_stdout"} for number in range(num_tests)]
    answer = "```python\nprint(int(input()) + 1)\n```"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "problems.jsonl"
        file.write_text(json.dumps({"problem": "Read a number and print the next one.", "tests": tests}) + "\n")
        envs = [make_env("deepcoder", data=str(file), split="all", concurrency=2) for _ in range(2)]
        programs = max(2, 20 // num_tests)

        def solve_all(env: Any) -> int:
            for _ in range(programs):
                env.reset(0)
                assert env.step(answer).success
            return programs * num_tests

        with ThreadPoolExecutor(2) as threads:
            speed = best(lambda: sum(threads.map(solve_all, envs)), clock=time.perf_counter)[0]
    return Row(
        f"deepcoder, {num_tests} test{'s' if num_tests > 1 else ''} a program",
        "test runs",
        speed,
        least=20,
        note="in the sandbox, 2 at a time",
    )


def countdown() -> list[Row]:
    return [_resets("countdown", "puzzles", 300)]


def metamathqa() -> list[Row]:
    return [_resets("metamathqa", "problems", 300)]


def _resets(name: str, what: str, count: int) -> Row:
    env = make_env(name)
    env.reset(0)
    seeds = iter(range(10**9))

    def resets() -> int:
        for _ in range(count):
            env.reset(next(seeds))
        return count

    return Row(name, what, best(resets)[0], note="generated")


def http() -> list[Row]:
    """The cost of the way there and back: an environment whose steps take microseconds."""
    rows = []
    with serving("frozen_lake", max_turns=10**9, frozen=1.0) as url:
        for num_clients in (1, 16):
            envs = [make_env(url) for _ in range(num_clients)]
            with ThreadPoolExecutor(num_clients) as threads:

                def play(env: Any) -> int:
                    env.reset(0)
                    for _ in range(100):
                        if env.step("nothing").done:
                            env.reset(0)
                    return 100

                speed = best(lambda: sum(threads.map(play, envs)), clock=time.perf_counter)[0]  # noqa: B023 - used up within this turn of the loop
            rows.append(
                Row(f"http, {num_clients} client{'s' if num_clients > 1 else ''}", "steps", speed, note="client and server in one process")
            )
    return rows


# --- the table ---

MEASURES: dict[str, Callable[[], list[Row]]] = {
    "sokoban_6x6": sokoban_small,
    "sokoban_8x8": sokoban_large,
    "frozen_lake": frozen_lake,
    "searchqa": searchqa,
    "webshop": webshop,
    "deepcoder": deepcoder,
    "countdown": countdown,
    "metamathqa": metamathqa,
    "http": http,
}


def measured(names: list[str]) -> Iterator[Row]:
    for name in names:
        try:
            yield from MEASURES[name]()
        except (Absent, TetherError) as error:
            yield Row(name, "", note=f"skipped: {error}")


def shown(row: Row) -> str:
    if row.ours is None:
        return f"| {row.name} | | | | | | {row.note} |"
    ratio = f"{row.ours / row.peer:.2f}" if row.peer else ""
    target = "" if row.least is None else f"{row.least:g} times" if row.peer else f"{row.least:,g}/s"
    note = row.note if row.lengths is None else f"mean solution {row.lengths[0]:.1f} against {row.lengths[1]:.1f} actions; {row.note}"
    met = {True: "yes", False: "NO", None: ""}[row.met]
    return f"| {row.name} | {_speed(row.ours, row.what)} | {_speed(row.peer, row.what)} | {ratio} | {target} | {met} | {note} |"


def _speed(value: float | None, what: str) -> str:
    return "" if value is None else f"{value:,.0f} {what}/s" if value >= 100 else f"{value:.1f} {what}/s"


def machine() -> dict[str, Any]:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "load before": load}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), default=list(MEASURES), metavar="NAME", help=", ".join(MEASURES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    chosen = parser.parse_args()
    facts = machine()
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print("| environment | ours | peer | ratio | target | met | how |\n|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for row in measured(chosen.only):
        rows.append(row)
        print(shown(row), flush=True)
    if chosen.json is not None:
        record = {"machine": facts, "repeats": REPEATS, "rows": [{**asdict(row), "met": row.met} for row in rows]}
        chosen.json.write_text(json.dumps(record, indent=2) + "\n")
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
