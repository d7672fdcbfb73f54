"""Hostile programs against the sandbox of DeepCoder, at every level of isolation that this machine has; a part of scripts/torture.py.

The programs are those of the sandbox's tests (tests/unit/envs/hostile_programs.py), each by itself and up to three in one, disguised and run from
odd places (threads, exit functions, destructors, signal handlers), with a claim at the end that all went well. Beside each runs an honest
program, which must not notice. After each, everything that the programs were told to attack must be as it was, and no test may count as passed.
"""

import base64
import os
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, get_args

import numpy as np

from tether.envs.deepcoder.problem import Case, Prints, Returns, grade
from tether.envs.deepcoder.sandbox.client import Isolation, running_fork_server
from tether.envs.deepcoder.sandbox.jobs import CallTask, Limits, StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Sandbox, describe_isolation
from torture_part import Part

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "unit" / "envs"))
from hostile_programs import HEAD, Targets, single_programs

Item = TypeVar("Item")
LIMITS = Limits(cpu_seconds=0.5, wall_seconds=1.0, memory_mib=64, output_kib=64, file_kib=256, threads=8)
SLOW_SECONDS = 30.0
"""No program may hold the grader up for longer, whatever else the machine does; its limits are 1 s."""
CLOCK_SECONDS = 5.0
"""How far the machine's clock may move by itself."""
VARIABLE = "TETHER_TORTURE_SECRET"

PLACES = {
    "as it is": "{attack}()",
    "twice": "{attack}(); {attack}()",
    "in a thread": "import threading; thread = threading.Thread(target={attack}, daemon=True); thread.start(); thread.join(0.2)",
    "at exit": "import atexit; atexit.register({attack})",
    "in a destructor": "type('Bomb', (), {{'__del__': lambda self: {attack}()}})()",
    "in a signal handler": "import signal; signal.signal(signal.SIGUSR1, lambda *_: {attack}()); signal.raise_signal(signal.SIGUSR1)",
    "while handling an error": "[].pop()\nexcept IndexError: {attack}()",
    "while sorting": "sorted([1, 2], key=lambda _: {attack}())",
}
"""From where an attack is run; each is the body of a try."""

CLAIMS = [
    "print('passed')",
    "import os; os._exit(0)",
    "raise SystemExit(0)",
    "def f(): return True",
    "class Always:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(): return Always()",
    f"import os\ndef f():\n    os.write(3, {HEAD + b'true'!r})\n    os._exit(0)",
    f"import os\nos.write(1, b'passed'); os.write(3, {HEAD!r}); os._exit(0)",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
]
"""How a program makes out that it is right."""

LOOT = """
import os
for path in ({secret!r}, '/proc/self/environ', '/proc/1/environ', '/proc/{process}/environ'):
    try: print(open(path).read())
    except BaseException: pass
print(dict(os.environ))
"""
"""Prints every secret that can be had."""


def programs(part: Part) -> None:
    """Run hostile programs until the time is up."""
    levels = [level for level in get_args(Isolation) if _is_available(level)]
    part.folder.parent.chmod(0o755)  # programs run as another user where this one is root: what they are to attack must be open to them
    with Bystanders.placed(part.folder / "open") as bystanders:
        singles = single_programs(bystanders.targets)
        part.count("different programs", len(singles))
        waiting = [(level, name) for name in part.random.permutation([*singles]) for level in levels]
        bystanders.remember(levels)
        while part.has_time and not part.failures:
            if waiting and part.random.random() < 0.7:
                level, name = waiting.pop()
                code = singles[name]
            else:
                level = levels[int(part.random.integers(len(levels)))]
                name, code = combined(part.random, singles)
                part.count("combined")
            code += "\n" + LOOT.format(secret=str(bystanders.targets.secret), process=os.getpid())
            _attack(part, level, name, code, bystanders)
            part.count(f"at level {level}")


def _is_available(level: Isolation) -> bool:
    """The whole level: without a filter or file rules, `process` does not promise that the machine stays as it is."""
    if level == "kernel":
        return describe_isolation().name == "kernel"
    facts = running_fork_server(level).facts
    return bool(facts["seccomp"] and facts["landlock"])


def combined(random: np.random.Generator, singles: dict[str, str]) -> tuple[str, str]:
    """Up to three programs in one, and what it is called."""
    names = [str(name) for name in random.choice([*singles], size=int(random.integers(1, 4)), replace=False)]
    places = [str(place) for place in random.choice([*PLACES], size=len(names))]
    parts = []
    for number, (name, place) in enumerate(zip(names, places, strict=True)):
        hidden = base64.b85encode(singles[name].encode()).decode()
        source = repr(singles[name]) if random.random() < 0.5 else f"__import__('base64').b85decode({hidden!r}).decode()"
        parts.append(f"def attack_{number}(): exec(compile({source}, 'solution.py', 'exec'), {{'__name__': '__main__'}})")
        parts.append(f"try: {PLACES[place].format(attack=f'attack_{number}')}\nexcept BaseException: pass")
    claim = CLAIMS[int(random.integers(len(CLAIMS)))]
    return ", ".join(f"{name} ({place})" for name, place in zip(names, places, strict=True)), "\n".join([*parts, claim])


def _attack(part: Part, level: Isolation, name: str, code: str, bystanders: "Bystanders") -> None:
    """One program, an honest one beside it, and a look at what it was told to attack."""
    answer = secrets.token_hex(16)
    cases = [Case(StdinTask(""), Prints(answer)), Case(CallTask("f", ()), Returns(answer))]
    honest: list[str] = []
    beside = threading.Thread(target=lambda: honest.append(Sandbox(isolation=level).run("print(6 * 7)", [StdinTask("")])[0].stdout))
    begun = time.monotonic()
    beside.start()
    result = grade(code, cases, Sandbox(LIMITS, isolation=level), wave=len(cases), total_limit=60)
    beside.join()
    found = bystanders.effects()
    if time.monotonic() - begun > SLOW_SECONDS:
        found.append(f"it took {time.monotonic() - begun:.0f} s")
    if honest != ["42\n"]:
        found.append(f"an honest program beside it printed {honest}")
    if result.passed:
        found.append(f"{result.passed} tests count as passed")
    for failure in result.failures:
        said = f"{failure.report.stdout} {failure.report.detail} {failure.report.value!r}"
        if bystanders.secret in said:
            found.append("it printed a secret of the machine")
        if len(failure.report.stdout) > LIMITS.output_kib * 1024:
            found.append(f"it printed {len(failure.report.stdout)} characters")
        part.count({"wrong": "runs to their end", "error": "errors"}.get(failure.ending, "runs stopped"))
    for what in found:
        part.fail(f"{level}: {name}: {what}; the program:\n{code[:1500]}")


class Bystanders:
    """What the programs are told to attack: open files, a variable, a socket, processes, the settings of the machine."""

    def __init__(self, folder: Path) -> None:
        self.secret = secrets.token_hex(16)
        self._folder = folder
        (folder / "deep" / "er").mkdir(parents=True)
        for path in (folder / "secret.txt", folder / "deep" / "notes.txt", folder / "deep" / "er" / "run.sh"):
            path.write_text(self.secret)
            path.chmod(0o666)
        for path in (folder, folder / "deep", folder / "deep" / "er"):
            path.chmod(0o777)
        os.environ[VARIABLE] = self.secret
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._process = subprocess.Popen(["sleep", "1000000"])
        processes = (os.getpid(), os.getppid(), self._process.pid)
        self.targets = Targets(folder, folder / "secret.txt", self._listener.getsockname()[1], processes)

    @classmethod
    @contextmanager
    def placed(cls, folder: Path) -> Iterator["Bystanders"]:
        bystanders = cls(folder)
        try:
            yield bystanders
        finally:
            bystanders._process.kill()
            bystanders._process.wait()
            bystanders._listener.close()
            del os.environ[VARIABLE]

    def remember(self, levels: list[Isolation]) -> None:
        """Take everything as it is now for the truth; the fork servers run already."""
        servers = [running_fork_server(level) for level in levels]
        self._servers = {level: server.process_id for level, server in zip(levels, servers, strict=True)}
        self._work = [Path(server.facts["folder"]) for server in servers if server.facts["folder"]]
        self._sessions = {os.getsid(server.process_id) for server in servers}
        time.sleep(1)  # the sandboxes of the first programs end
        self._family = self._related()
        self._before = self._facts()
        self._clock = time.time() - time.monotonic()

    def effects(self) -> list[str]:
        """What is not as it was, a sentence each."""
        found = [f"{what} changed to {str(now)[:300]}" for what, now in self._facts().items() if now != self._before[what]]
        if abs(time.time() - time.monotonic() - self._clock) > CLOCK_SECONDS:
            found.append("the clock was moved")
        if self._process.poll() is not None:
            found.append("a process of the machine was ended")
        try:
            self._listener.accept()
            found.append("it connected to a socket of the machine")
        except BlockingIOError:
            pass
        for level, process in self._servers.items():
            if running_fork_server(level).process_id != process:
                found.append(f"the fork server of {level} had to be started again")
        left = _left(lambda: self._related() - self._family)
        if left:
            found.append(f"processes are left: {sorted(left)}")
        kept = _left(lambda: {str(path) for folder in self._work for path in folder.iterdir()})
        if kept:
            found.append(f"files are left: {sorted(kept)}")
        return found

    def _facts(self) -> dict[str, object]:
        limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
        return {
            "files": {str(path): (path.lstat().st_mode, path.lstat().st_mtime_ns, _content(path)) for path in _tree(self._folder)},
            "environment": dict(os.environ),
            "host name": socket.gethostname(),
            "working folder": os.getcwd(),
            "limits": limits,
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "cores": os.sched_getaffinity(0),
            "user": (os.getresuid(), os.getresgid(), os.getgroups()),
        }

    def _related(self) -> set[int]:
        """Processes that descend from this one, or are in the session of a fork server, whoever their parent is."""
        parents, found = dict[int, int](), {os.getpid()}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            process = int(path.parent.name)
            parents[process] = int(fields[1])
            if int(fields[3]) in self._sessions:
                found.add(process)
        while more := {process for process, parent in parents.items() if parent in found} - found:
            found |= more
        return found


def _left(look: Callable[[], set[Item]]) -> set[Item]:
    """What is still there after 10 s: the end of a sandbox takes a moment."""
    end = time.monotonic() + 10
    while (seen := look()) and time.monotonic() < end:
        time.sleep(0.02)
    return seen


def _tree(folder: Path) -> list[Path]:
    return [folder, *sorted(folder.rglob("*"))]


def _content(path: Path) -> bytes:
    return os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
