"""Asks a worker process whether two expressions are equal, and never waits for it longer than a limit.

sympy can run forever, or use all memory, on a short text, and math-verify's own time-outs are signals that work in the main thread only.
So the comparison runs in `symbolic_worker.py`, which limits its own CPU and wall time. A worker that does not answer at all is killed, and a new one
is started with the next question. A process has a few workers, so that one slow formula does not hold up the answers of a whole batch;
threads take the workers in turn, and a forked process starts its own.

The worker survives any formula, but a hopeless one costs seconds. So `for_worker` sends only short, shallow formulas without towers of powers
or giant factorials, spelled for the worker's parser.
"""

import atexit
import json
import logging
import os
import queue
import re
import sys
import threading
from pathlib import Path

from tether.core.child import Child
from tether.core.errors import MissingDependency, TetherError

MAX_SYMBOLIC = 300
"""Characters; the longest formula among the public answers has about eighty."""
MAX_NESTING = 15
MAX_EXPONENT = 9999
"""Of a number, as in 3^{2007}."""
MAX_EXPONENT_OF_BRACKETS = 30
"""Of anything in brackets, which may be a sum to be multiplied out, or a power already."""
MAX_FACTORIAL = 200

_TEXT = re.compile(r"\\text\{([A-Za-z])\}")
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_SCIENTIFIC = re.compile(r"(\d)[eE]([+-]?\d{1,3})(?![\d^])")
_SPACED_DIGITS = re.compile(r"\d \d")
_EXPONENT = re.compile(r"\^\{?\(?[+-]?(\d+)")
_EXPONENT_OF_BRACKETS = re.compile(r"[)\]}]\^\{?\(?[+-]?(\d+)")
_FACTORIAL = re.compile(r"(\d*)!")
_FACTORIALS = re.compile(r"!\)*!")
_UNREADABLE = re.compile(r"[^ -~°]")
_TOWER = re.compile(r"[\d)}]\s*\^")


def for_worker(text: str) -> str | None:
    """The formula in LaTeX for the worker; None if it should not be sent."""
    formula = _TEXT.sub(r"\1", text)
    if (
        len(formula) > MAX_SYMBOLIC
        or r"\text" in formula
        or ":" in formula
        or _SPACED_DIGITS.search(formula)
        or _UNREADABLE.search(formula)
    ):
        return None
    if _nesting(formula) > MAX_NESTING or _is_tower(formula) or _is_giant(formula):
        return None
    formula = _DECIMAL.sub(_as_fraction, _SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", formula))
    return formula.replace("°", r"^{\circ}").replace("*", r"\cdot ").replace(";", ",").replace("%", r"\%")


def _nesting(text: str) -> int:
    deepest = depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _is_tower(text: str) -> bool:
    """Whether an exponent holds a power of a number: 2^{3^{4}}, but not e^{x^{2}}."""
    for found in re.finditer(r"\^\{", text):
        depth, at = 1, found.end()
        while at < len(text) and depth:
            depth += (text[at] == "{") - (text[at] == "}")
            at += 1
        if _TOWER.search(text[found.end() : at]):
            return True
    return False


def _is_giant(text: str) -> bool:
    limits = ((_EXPONENT, MAX_EXPONENT), (_EXPONENT_OF_BRACKETS, MAX_EXPONENT_OF_BRACKETS), (_FACTORIAL, MAX_FACTORIAL))
    too_large = any(int(found.group(1) or 0) > limit for pattern, limit in limits for found in pattern.finditer(text))
    return too_large or bool(_FACTORIALS.search(text))


def _as_fraction(found: re.Match[str]) -> str:
    """A decimal as an exact fraction, which sympy would otherwise round."""
    whole, decimals = found.groups()
    return rf"\frac{{{int(whole + decimals)}}}{{{10 ** len(decimals)}}}"


CPU_SECONDS = 2.0
"""What one comparison may compute. Those of the public data take hundredths of a second."""
WALL_SECONDS = 10.0
"""What one comparison may take on the clock: a machine that swaps, or a worker that waits, spends no CPU."""
START_SECONDS = 60.0
"""What a worker has to start, however loaded the machine."""
_GRACE_SECONDS = 10.0
"""Beyond WALL_SECONDS, after which a worker that has not ended its comparison itself is killed."""

_LOG = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("symbolic_worker.py")


class SymbolicComparison:
    """A worker process, started when it is first needed."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS, wall_seconds: float = WALL_SECONDS, start_seconds: float = START_SECONDS) -> None:
        self._cpu_seconds, self._wall_seconds, self._start_seconds = cpu_seconds, wall_seconds, start_seconds
        self.forget()

    def equal(self, gold: str, answer: str) -> bool | None:
        """Whether two expressions in LaTeX are the same; None if unknown (no expression, or too hard)."""
        question = json.dumps({"gold": gold, "answer": answer}) + "\n"
        with self._lock:
            try:
                worker = self._worker or self._start()
                reply = worker.read_line(self._wall_seconds + _GRACE_SECONDS) if worker.send(question.encode()) else b""
            except BaseException:  # an interrupt, say: the reply would otherwise be taken for that to the next question
                self._stop()
                raise
            if not reply:
                self._stop()
            verdict = json.loads(reply) if reply else {"equal": None, "given_up": True}
            if verdict["given_up"] and not _GIVEN_UP_SAID.is_set():
                _GIVEN_UP_SAID.set()
                _LOG.warning(
                    "metamathqa: comparing '%.80s' and '%.80s' takes more than %g s of CPU, %g s on the clock and 2 GiB; "
                    "the answer counts as wrong, and so do later ones of the kind",
                    *(gold, answer, self._cpu_seconds, self._wall_seconds),
                )
            equal: bool | None = verdict["equal"]
            return equal

    def close(self) -> None:
        """End the worker, if this process started one."""
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """In a process just forked: the worker is the parent's, and so may be whoever holds the lock."""
        self._lock = threading.Lock()
        self._worker: Child | None = None

    def _start(self) -> Child:
        # -P keeps the folder of the program out of its module path; a fixed hash seed makes sympy order alike in every worker.
        command = [sys.executable, "-P", str(_WORKER), str(self._cpu_seconds), str(self._wall_seconds)]
        self._worker = Child(command, "stdio", environment={**os.environ, "PYTHONHASHSEED": "0"})
        greeting = self._worker.read_line(self._start_seconds)
        if greeting == b"":
            raise MissingDependency("metamathqa needs math-verify, which cannot be imported here; run: pip install math-verify")
        if greeting is None:
            raise TetherError(f"metamathqa: the worker that compares answers did not start within {self._start_seconds:g} s; try again")
        return self._worker

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()


_GIVEN_UP_SAID = threading.Event()
"""Once per process: a policy that writes hopeless formulas writes many."""


NUM_WORKERS = max(1, min(8, os.cpu_count() or 1))
"""Worker processes that compare formulas side by side; each is started when those before it are busy."""


class ComparisonPool:
    """Workers that threads borrow; the one returned last is lent first, so that a process that asks seldom starts only one."""

    def __init__(self, num_workers: int = NUM_WORKERS, cpu_seconds: float = CPU_SECONDS) -> None:
        self._workers = [SymbolicComparison(cpu_seconds) for _ in range(num_workers)]
        self.forget()

    def equal(self, gold: str, answer: str) -> bool | None:
        """As a worker's `equal`; waits for a free one."""
        worker = self._free.get()
        try:
            return worker.equal(gold, answer)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.close()

    def forget(self) -> None:
        """In a process just forked: the workers are the parent's, and so are the threads that borrowed some."""
        for worker in self._workers:
            worker.forget()
        self._free: queue.LifoQueue[SymbolicComparison] = queue.LifoQueue()
        for worker in self._workers:
            self._free.put(worker)


COMPARISON = ComparisonPool()
"""The workers of this process."""
atexit.register(COMPARISON.close)
os.register_at_fork(after_in_child=COMPARISON.forget)
