"""One part of scripts/torture.py: its time, its random numbers, what it counted and what failed."""

import time
from pathlib import Path

from tether.core.seeding import generator


class Part:
    """One part of the campaign."""

    def __init__(self, name: str, seconds: float, seed: int, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.until = time.monotonic() + seconds
        self.random = generator("torture", name, seed)
        self.counts: dict[str, float] = {}
        self.failures: list[str] = []

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self.until

    def count(self, what: str, number: float = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    def fail(self, what: str) -> None:
        self.failures.append(what)
        print(f"{self.name}: FAILED {what[:2000]}", flush=True)
