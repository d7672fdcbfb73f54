"""The program that compares two mathematical expressions with math-verify, in a process of its own.

Started by `symbolic.py` and never imported: it reads one JSON line {"gold", "answer"} at a time and writes one {"equal", "given_up"}. The process
that is started only imports the libraries and forks; its child does the work. A comparison that takes more than its CPU seconds, its
seconds on the clock or its memory, or that raises, ends the child; the parent says so ({"equal": null, "given_up": true}) and forks the next
one within milliseconds. The limits of time are timers of the kernel without a handler, so they also end what Python could not interrupt
(a power of a hundred digits).
It depends on math-verify alone, so that it can be run by path wherever the package lies.
"""

import json
import os
import re
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
from math_verify import verify
from sympy import I, Symbol

MEMORY_BYTES = 2 * 1024**3
_CONVERSION = ConversionConfig(lowercase_symbols=False)  # R - r is not 0
_NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
_WARM_UP = (r"x^{2}+2x+1", r"(x+1)^{2}"), (r"\sqrt{18}", r"3\sqrt{2}"), (r"\frac{x}{2}=1", r"x=2")
"""Compared once before the first fork: what they make sympy load and compute is then there for every child."""


def equal(gold: str, answer: str) -> bool | None:
    """Whether two expressions in LaTeX are mathematically the same; None if one is no expression."""
    imaginary = bool(_IMAGINARY.search(gold + " " + answer))
    left, right = _expression(gold, imaginary), _expression(answer, imaginary)
    if left is None or right is None:
        return None
    return bool(verify(left, right, timeout_seconds=None, allow_set_relation_comp=True))


def _expression(latex: str, imaginary: bool) -> Any:
    try:
        parsed = latex2sympy(
            latex,
            is_real=not imaginary,
            convert_degrees=True,
            normalization_config=_NORMALIZATION,
            conversion_config=_CONVERSION,
        )
    except Exception as error:
        if type(error) is not Exception:  # the parser has no class of its own for what it cannot parse
            raise
        return None
    return parsed.subs({Symbol("i"): I, Symbol("i", real=False): I}) if imaginary else parsed


def _serve(cpu_seconds: float, wall_seconds: float) -> None:
    """Answer requests until there are no more."""
    with suppress(OSError, ValueError):  # some systems know no such limit, or have a lower one already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, wall_seconds)
        result = equal(request["gold"], request["answer"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(result)


def _reply(result: bool | None, *, given_up: bool = False) -> None:
    sys.stdout.write(json.dumps({"equal": result, "given_up": given_up}) + "\n")
    sys.stdout.flush()


def main(cpu_seconds: float, wall_seconds: float) -> None:
    """Fork a child that serves; when one ends over a request, answer for it and fork the next."""
    for gold, answer in _WARM_UP:
        equal(gold, answer)
    _reply(True)  # ready
    while True:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _serve(cpu_seconds, wall_seconds)
                code = 0
            finally:
                os._exit(code)  # at once: there is nobody to read a traceback, and nothing to clear up
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            return
        _reply(None, given_up=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
