"""How many small tests a second the sandbox runs: one test per program, and ten.

    python benchmarks/sandbox.py [--isolation process] [--seconds 5]

Figures depend on the machine and on what else it does; compare only within one run.
"""

import argparse
import os
import time
from typing import get_args

from tether.envs.deepcoder.sandbox.jobs import StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Isolation, Sandbox, describe_isolation

PROGRAM = "a, b = map(int, input().split())\nprint(a + b)"


def runs_per_second(sandbox: Sandbox, tests: int, seconds: float) -> float:
    """Test runs a second, with so many tests per program, one program after another."""
    tasks = [StdinTask(f"{number} 1\n") for number in range(tests)]
    expected = [f"{number + 1}\n" for number in range(tests)]
    sandbox.run(PROGRAM, tasks)  # the first one starts the fork server
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        if [report.stdout for report in sandbox.run(PROGRAM, tasks)] != expected:
            raise RuntimeError("the sandbox gave a wrong answer")
        count += tests
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isolation", choices=get_args(Isolation), default=describe_isolation().name)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    sandbox = Sandbox(isolation=arguments.isolation)
    print(f"isolation {arguments.isolation}, {sandbox.concurrency} at a time, load {os.getloadavg()[0]:.1f}")
    for tests in (1, 10):
        print(f"{tests:3} per program: {runs_per_second(sandbox, tests, arguments.seconds):6.0f} test runs/s")


if __name__ == "__main__":
    main()
