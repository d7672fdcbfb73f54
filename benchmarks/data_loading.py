"""How long a large data file takes to load, and what memory it takes.

    python benchmarks/data_loading.py [--rows 100000] [--format parquet]

Writes a file of generated word problems (`question`, `answer`, and a column of 400 characters that nothing reads), loads it as metamathqa does in
a process of its own, and reports CPU seconds, seconds on the clock, and the peak of resident memory beyond that of a file of one row. Parquet
needs the extra `data`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tether.core.enums import Split
from tether.envs.metamathqa.generator import WordProblems

_LOAD = """
import re, sys, time
from pathlib import Path
from tether.envs.metamathqa.dataset import load
begun, computed = time.perf_counter(), time.process_time()
pool = load(sys.argv[1], "error")
taken, computed = time.perf_counter() - begun, time.process_time() - computed
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))
print(len(pool), taken, computed, peak / 1024)
"""
"""Linux's own peak of this program: getrusage counts that of the process it was started from as well."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        small, large = (Path(folder) / f"{rows}.{chosen.format}" for rows in (1, chosen.rows))
        _write(small, 1)
        _write(large, chosen.rows)
        base, full = _measured(small), _measured(large)
        print(f"{full[0]:,.0f} rows, {large.stat().st_size / 2**20:.0f} MiB of {chosen.format}")
        print(f"loaded in {full[1]:.1f} s ({full[2]:.1f} s of CPU)")
        print(f"peak memory {full[3]:.0f} MiB, {full[3] - base[3]:.0f} MiB more than for one row")


def _rows(count: int) -> Iterator[dict[str, Any]]:
    make = WordProblems()
    problems = [make(seed, Split.TRAIN) for seed in range(min(count, 2000))]
    for number in range(count):
        problem = problems[number % len(problems)]
        yield {"question": f"{problem.question} (row {number})", "answer": problem.label, "notes": f"{number} " * 80}


def _write(path: Path, count: int) -> None:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, _rows(count))), encoding="utf-8")
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(_rows(count))), path)


def _measured(path: Path) -> list[float]:
    """Rows, seconds, CPU seconds and peak MiB of a process that loads the file."""
    ran = subprocess.run([sys.executable, "-c", _LOAD, str(path)], capture_output=True, text=True, check=True)
    return [float(word) for word in ran.stdout.split()]


if __name__ == "__main__":
    main()
