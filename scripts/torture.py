"""What a hostile world does to Tether, for as long as you let it. Prints figures; exit code 1 on any failure.

    make torture                      an hour
    make torture TORTURE_MINUTES=3
    python scripts/torture.py 10 --part fuzz --part clients --seed 7

kills     training runs are killed at random moments and resumed; each must end as one that was never stopped (scripts/kill_many.py)
restarts  ranks, launchers and servers of supervised runs are killed; they must go on by themselves to the same end (scripts/kill_supervised.py)
faults    the disk is full at a random size of a file; the run must end with one line, and resume to the same end
damage    checkpoints of a finished run are altered, cut, removed from and added to; `tether doctor`, --resume and `tether eval` must say so, each
          with one line, and name what is whole (scripts/damage_many.py)
folders   files of a run are replaced by pipes, devices, hostile values and bytes that are no text; every command and the dashboard must end in time, with lines
          (scripts/foul_folders.py)
evaluations  evaluations and dashboards are killed at random moments; the same evaluation again must give the same numbers, and leave nothing behind
fuzz      settings, files, messages and answers made at random; each must be taken or refused with a line, in bounded time
clients   a served environment under half-open, endless, foreign and wrong requests; an honest client must see none of it, the log must
          stay short, and SIGTERM must stop the server
programs  hostile programs in the sandbox of DeepCoder, single and combined; the machine must stay as it was and no test may count as passed
          (scripts/attack_many.py)
soak      one long run; its memory and open files must not grow
"""

import argparse
import json
import os
import resource
import signal
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import httpx
import numpy as np

from attack_many import programs
from damage_many import damage
from foul_folders import evaluations, folders
from kill_many import Trial, attempt, differences  # sets the number of threads before torch
from kill_supervised import restarts
from tether.core.config import merge, parse_overrides, read_file, validate
from tether.core.errors import TetherError
from tether.core.seeding import generator
from tether.diagnostics.rollouts.record import BadRecord
from tether.diagnostics.rollouts.values import flag, number, step, text, total
from tether.envs.registry import make_env
from tether.envs.remote.wire import WireError, decode
from tether.training.settings import RunSettings
from torture_part import Part

SHARES = {
    "kills": 0.1,
    "restarts": 0.1,
    "faults": 0.1,
    "damage": 0.1,
    "folders": 0.1,
    "evaluations": 0.05,
    "fuzz": 0.1,
    "clients": 0.1,
    "programs": 0.1,
    "soak": 0.15,
}
"""Of the time."""
SLOW_SECONDS = 10.0
"""No input may take longer."""
REFUSALS = (TetherError, WireError, BadRecord)


# --- kills and faults ---


def kills(part: Part) -> None:
    for algo in ("grpo", "ppo"):
        trial = Trial(part.folder, algo, int(part.random.integers(2**31)), ())
        end = part.until if algo == "ppo" else (time.monotonic() + part.until) / 2
        while time.monotonic() < end and not trial.failures:
            trial.moments(3)
        part.count("kills", trial.kills)
        if trial.failures:
            part.fail(f"{algo}: a killed run did not end as the reference; see above")


def faults(part: Part) -> None:
    trial = Trial(part.folder, "grpo", 0, ())
    largest = max(path.stat().st_size for path in trial.reference.rglob("*") if path.is_file())
    while part.has_time:
        run = part.folder / f"full-{int(part.counts.get('full disks', 0))}"
        size = int(part.random.integers(1, largest))
        log = run.with_suffix(".log")
        code = attempt(trial._start(run), log, point=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size)))
        said = log.read_text()
        if code not in (0, 1, 2) or "Traceback" in said:
            part.fail(f"a disk that is full at {size} bytes: exit code {code}; {said[-1500:]}")
        begun = (run / "run.json").is_file()
        code = attempt(["train", "--resume", "--out", str(run)] if begun else trial._start(run), log)
        if code or differences(trial.reference, run):
            part.fail(f"after a disk that was full at {size} bytes: exit code {code}, differs in {differences(trial.reference, run)}")
        part.count("full disks")


# --- fuzz ---

ALPHABET = [*string.printable, "\x00", "\x1b", "\x9b", "\ud800", "\udcff", "\u202e", "é", "√", "😀"]
PIECES = [
    "[" * 50,
    "]" * 50,
    "search[",
    "click[",
    "{a: ",
    "&a [*a]",
    "1e999",
    ".nan",
    "||",
    "<answer>",
    "</think>",
    "\\frac{",
    "^" * 20,
    "9" * 400,
    "(" * 90,
]


def _text(random: np.random.Generator, most: int = 60) -> str:
    words = [*ALPHABET, *PIECES]
    return "".join(words[int(place)] for place in random.integers(len(words), size=int(random.integers(most))))


def _settings(random: np.random.Generator, folder: Path) -> None:
    keys = ["seed", "env.name", "env.options.name", "rollout.group_size", "model.device", "also", "steps", "filter.keep", _text(random, 5)]
    pairs = [f"{keys[int(random.integers(len(keys)))]}={_text(random, 12)}" for _ in range(int(random.integers(1, 4)))]
    validate(RunSettings, merge({"env": {"name": "frozen_lake"}}, parse_overrides(pairs)))


def _file(random: np.random.Generator, folder: Path) -> None:
    path = folder / f"fuzz.{('yaml', 'toml')[int(random.integers(2))]}"
    path.write_bytes(_text(random).encode("utf-8", "surrogatepass"))
    validate(RunSettings, read_file(path))


def _message(random: np.random.Generator, folder: Path) -> None:
    decode(_text(random).encode("utf-8", "surrogatepass"))


def _record(random: np.random.Generator, folder: Path) -> None:
    values = [_text(random), 10.0 ** int(random.integers(-300, 300)), 10 ** int(random.integers(600)), None, True, [1e308, 1e308], {"a": 1}]
    for read in (text, number, total, step, flag):
        try:
            read(values[int(random.integers(len(values)))], "field")
        except BadRecord:
            continue


ENVS = ("frozen_lake", "sokoban", "countdown", "metamathqa", "webshop", "searchqa")


def _answers() -> Callable[[np.random.Generator, Path], None]:
    envs = [make_env(name) for name in ENVS]

    def play(random: np.random.Generator, folder: Path) -> None:
        env = envs[int(random.integers(len(envs)))]
        env.reset(int(random.integers(2**62)))
        answer = _text(random) * int(random.choice([1, 1, 1, 100, 5000]))
        made = env.step(answer)
        if not np.isfinite(made.reward):
            raise ValueError(f"{env.name} paid {made.reward}")

    return play


def fuzz(part: Part) -> None:
    kinds = {"settings": _settings, "files": _file, "messages": _message, "records": _record, "answers": _answers()}
    while part.has_time:
        for name, work in kinds.items():
            state, begun = part.random.bit_generator.state, time.monotonic()
            try:
                work(part.random, part.folder)
            except REFUSALS:
                part.count("refused with a line")
            except Exception as error:
                part.fail(f"{name}: {type(error).__name__}: {error}; generator {json.dumps(state, default=str)}")
            if time.monotonic() - begun > SLOW_SECONDS:
                part.fail(f"{name}: took {time.monotonic() - begun:.1f} s; generator {json.dumps(state, default=str)}")
            part.count(name)


# --- hostile clients ---


def clients(part: Part) -> None:
    command = [sys.executable, "-m", "tether", "serve-env", "frozen_lake", "--port", "0"]
    log = part.folder / "server.log"
    with log.open("w") as errors:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().split(" at ")[1].split()[0]
    port = int(url.rpartition(":")[2])
    threads = [threading.Thread(target=_attack, args=(part, port, number), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    env, local = make_env(url), make_env("frozen_lake")
    while part.has_time:
        seed = int(part.random.integers(2**62))
        try:
            same = (
                env.reset(seed).text == local.reset(seed).text
                and env.step("Up || Left").observation == local.step("Up || Left").observation
            )
        except TetherError as error:
            part.fail(f"an honest client was not served: {error}")
            break
        if not same:
            part.fail(f"an honest client got another episode than seed {seed}")
        part.count("honest episodes")
    for thread in threads:
        thread.join(timeout=20)
    server.send_signal(signal.SIGTERM)
    try:
        code = server.wait(timeout=15)
    except subprocess.TimeoutExpired:
        server.kill()
        code = -9
    server.stdout.close()
    said = log.read_text()
    part.count("lines in the server's log", len(said.splitlines()))
    if code != 143 or "Traceback" in said or len(said.splitlines()) > 50:
        part.fail(f"the server ended with {code}; its log: {said[-1500:]}")


def _attack(part: Part, port: int, number: int) -> None:
    random = generator("torture", "client", number)
    held: list[socket.socket] = []
    api = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False, verify=False)
    while part.has_time:
        kind = int(random.integers(5))
        try:
            if kind < 3:
                connection = socket.create_connection(("127.0.0.1", port), timeout=5)
                half = [b"", b"GET / HT", b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"][kind]
                connection.sendall(half if random.random() < 0.7 else _text(random).encode("utf-8", "surrogatepass") + b"\r\n\r\n")
                held.append(connection)
                if len(held) > 300:
                    held.pop(0).close()
                part.count("half-open connections")
            else:
                headers = {"Origin": "https://evil.example"} if kind == 3 else {"Content-Type": "application/json"}
                body = json.dumps({"seed": 1, "options": {"instructions": "/etc/passwd"}}) if random.random() < 0.5 else _text(random)
                sent = body.encode("utf-8", "surrogatepass")
                reply = api.post("/v1/sessions", content=sent, headers=headers)
                if reply.status_code not in (400, 403, 415):
                    part.fail(f"a hostile request was answered with {reply.status_code}: {sent[:200]!r}")
                part.count("hostile requests")
        except (OSError, httpx.HTTPError):
            part.count("connections closed by the server")
    api.close()
    for connection in held:
        connection.close()


# --- soak ---


NEVER_STOPS = ("early_stop.variance_share=0", "early_stop.success_floor=0", "early_stop.empty_steps=0", "early_stop.invalid_steps=0")
"""The run of the soak learns nothing; it must go on all the same."""


def soak(part: Part) -> None:
    trial = Trial(part.folder, "grpo", 0, ("checkpoint.every=5", "evaluation.every=50", "diagnosis.every=5", *NEVER_STOPS))
    run, samples = part.folder / "soak", list[tuple[float, int]]()
    words = [*trial._start(run), "--set", "steps=1000000"]
    thread = threading.Thread(target=lambda: attempt(words, run.with_suffix(".log"), delay=part.until - time.monotonic()))
    before = _children()
    thread.start()
    while thread.is_alive():
        time.sleep(0.5)
        children = sorted(_children() - before)
        found = [(_memory(child), len(os.listdir(f"/proc/{child}/fd"))) for child in children if (run / "metrics.jsonl").exists()]
        samples += found[:1]
    thread.join()
    if time.monotonic() < part.until - 2:
        part.fail(f"the long run ended by itself: {run.with_suffix('.log').read_text()[-500:]}")
    steps = len((run / "metrics.jsonl").read_text().splitlines()) - 1
    half = samples[len(samples) // 2 :]
    if len(half) < 4:
        part.count("samples", len(samples))
        return
    part.count("steps", steps)
    part.count("MB at half time", round(half[0][0]))
    part.count("MB at the end", round(half[-2][0]))
    part.count("open files at half time", half[0][1])
    part.count("open files at the end", half[-2][1])
    if half[-2][0] > 1.15 * half[0][0] + 30 or half[-2][1] > half[0][1] + 8:
        part.fail(f"memory or files grow: {half[0]} at half time, {half[-2]} at the end")


def _children() -> set[str]:
    return {name for name in os.listdir("/proc") if name.isdigit() and _parent(name) == os.getpid()}


def _parent(process: str) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _memory(process: str) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


PARTS: dict[str, Callable[[Part], None]] = {
    "kills": kills,
    "restarts": restarts,
    "faults": faults,
    "damage": damage,
    "folders": folders,
    "evaluations": evaluations,
    "fuzz": fuzz,
    "clients": clients,
    "programs": programs,
    "soak": soak,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("minutes", type=float, nargs="?", default=60.0, help="how long, all parts together (default 60)")
    parser.add_argument("--part", action="append", choices=[*PARTS], help="one part; may be given several times (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chosen = arguments.part or [*PARTS]
    whole = sum(SHARES[name] for name in chosen)
    done = []
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            place = Path(folder) / name
            place.mkdir()
            part = Part(name, 60 * arguments.minutes * SHARES[name] / whole, arguments.seed, place)
            PARTS[name](part)
            done.append(part)
            print(
                f"{name}: {', '.join(f'{count:g} {what}' for what, count in part.counts.items())}; {len(part.failures)} failures",
                flush=True,
            )
    print("\n| part | figures | failures |\n|---|---|---|")
    for part in done:
        print(f"| {part.name} | {', '.join(f'{count:,g} {what}' for what, count in part.counts.items())} | {len(part.failures)} |")
    sys.exit(1 if any(part.failures for part in done) else 0)


if __name__ == "__main__":
    main()
