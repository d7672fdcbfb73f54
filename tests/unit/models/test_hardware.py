"""What there is to compute with: memory that is left, and a peak that is measured without touching anything random."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tether.models import hardware
from tether.models.hardware import available_memory, device_name, measured_peak

CPU = torch.device("cpu")


def test_the_peak_is_that_of_a_real_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of width 128 is said to take 2 ms, of width 256 16 ms: 2 x 256^3 operations in 16 ms."""
    measured_peak.cache_clear()
    widths: list[int] = []

    def seconds(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
        widths.append(len(left))
        torch.mm(left, right, out=out)
        assert left.dtype == torch.float64 and out.abs().sum() > 0
        return {128: 0.002, 256: 0.016}[len(left)]

    monkeypatch.setattr(hardware, "_seconds_of_product", seconds)
    monkeypatch.setattr(hardware, "PEAK_SECONDS", 0.0)
    before = torch.random.get_rng_state()
    assert measured_peak(CPU, torch.float64) == pytest.approx(2 * 256**3 / 0.016)
    assert widths == [128, 128, 256, 256]
    assert torch.equal(before, torch.random.get_rng_state()), "a run's random numbers must not move"
    measured_peak(CPU, torch.float64)
    assert len(widths) == 4, "it is measured once"
    measured_peak.cache_clear()


def test_the_fastest_of_several_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_peak.cache_clear()
    told = iter([0.05, 0.04, 0.02, 0.03])
    clock = iter([0.0, 0.1, 0.15, 0.3])
    monkeypatch.setattr(hardware, "_seconds_of_product", lambda *_: next(told))
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: next(clock))
    assert measured_peak(CPU, torch.float16) == pytest.approx(2 * 128**3 / 0.02)
    measured_peak.cache_clear()


def test_a_real_measurement() -> None:
    measured_peak.cache_clear()
    assert 1e7 < measured_peak(CPU, torch.float32) < 1e15


def test_memory_that_is_left() -> None:
    left = available_memory(CPU)
    assert left is not None and 2**20 < left < 2**50
    assert available_memory(torch.device("meta")) is None
    assert device_name(CPU) == f"CPU, {torch.get_num_threads()} threads"


def _container(folder: Path, limit: str) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("600\n")
    (folder / "memory.stat").write_text("anon 250\ninactive_file 150\nactive_file 10\n")
    return folder


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 may be used, 600 are, 150 of these only cache files."""
    monkeypatch.setattr(hardware, "CGROUP", _container(tmp_path, "1000"))
    assert available_memory(CPU) == 1000 - 600 + 150


@pytest.mark.parametrize("limit", ["max", None])
def test_no_limit(limit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CGROUP", _container(tmp_path, limit) if limit else tmp_path / "none")
    left = available_memory(CPU)
    assert left is not None and left > 2**20


WAITS = """
import time, torch
from tether.models.hardware import sleep_while_waiting
sleep_while_waiting()
torch.cuda._sleep(1)
torch.cuda.synchronize()
before = time.process_time(), time.perf_counter()
torch.cuda._sleep(2_000_000_000)
torch.zeros(1, device="cuda").cpu()
spent, waited = time.process_time() - before[0], time.perf_counter() - before[1]
assert waited > 0.5, waited
assert spent < waited / 5, (spent, waited)
"""


def test_a_process_that_shares_the_card_sleeps_while_it_waits(gpu: str) -> None:
    """In a process of its own: the card must not have been used before."""
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_a_card_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: pytest.fail(f"{name} was loaded"))
    hardware.sleep_while_waiting()
