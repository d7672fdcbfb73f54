"""Seeds: pinned, so that no change of the hash goes unnoticed, and independent of each other."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from tether.core.seeding import derive_seed, env_seed, generator, instance_seed, sampling_seed, seed_everything, validation_seed


def test_pinned_seeds() -> None:
    """Computed with the b2sum program: the first 8 bytes of BLAKE2b, little end first, without the lowest bit.

    A change here changes every puzzle, every draw and every published number.
    """
    assert instance_seed(0, 0, 0) == 7705295595381390432
    assert instance_seed(0, 0, 1) == 5164476040657336667
    assert validation_seed(0) == 2951119591887191984
    assert validation_seed(511) == 797926364110421470
    assert env_seed(7, 3, 2, 1) == 7221645619432001883
    assert sampling_seed(7, 3, 2, 1) == 3911046197558622432


def test_the_same_in_another_process() -> None:
    """Python's own hash of a text differs from process to process; ours must not."""
    code = "from tether.core.seeding import env_seed; print(env_seed(7, 3, 2, 1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert int(done.stdout) == 7221645619432001883


def test_every_part_of_the_path_counts() -> None:
    base = ("luck", 1, 2, 3, 4)
    variants = [
        ("sampling", 1, 2, 3, 4),
        *[(*base[:i], 9, *base[i + 1 :]) for i in range(1, 5)],
        base[:4],
        (*base, 0),
        ("luck", 1, 2, 4, 3),
    ]
    seeds = [derive_seed(*path) for path in [base, *variants]]
    assert len(set(seeds)) == 9


def test_parts_do_not_run_into_each_other() -> None:
    assert (
        len({derive_seed("a", 1, 23), derive_seed("a", 12, 3), derive_seed("a", 123), derive_seed("a", "1", 23), derive_seed("a1", 23)})
        == 5
    )


def test_no_collisions_and_63_bits() -> None:
    seeds = [
        derive_seed("luck", run, step, group, member)
        for run in range(2)
        for step in range(25)
        for group in range(8)
        for member in range(16)
    ]
    assert len(set(seeds)) == 6400
    assert min(seeds) >= 0
    assert 2**62 < max(seeds) < 2**63


def test_streams_are_independent() -> None:
    """Low correlation between neighbouring streams: 4 standard errors of 20,000 draws is 0.028."""
    draws = [generator("sampling", 0, 0, 0, member).random(20_000) for member in range(3)]
    correlation = np.corrcoef(draws)
    assert abs(correlation[np.triu_indices(3, 1)]).max() < 0.028
    assert [stream.mean() for stream in draws] == pytest.approx([0.5] * 3, abs=0.01)


def test_generator_is_fresh_each_time() -> None:
    first = generator("luck", 1)
    first.random(100)
    assert generator("luck", 1).integers(0, 2**32, 3).tolist() == generator("luck", 1).integers(0, 2**32, 3).tolist()
    assert generator("luck", 1).random() != generator("luck", 2).random()


def test_generator_draws_are_pinned() -> None:
    assert generator("sampling", 7, 3, 2, 1).integers(0, 1000, 5).tolist() == [810, 241, 461, 374, 417]


def test_seed_everything_sets_all_three_and_the_cublas_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def draw(seed: int) -> tuple[float, float, float]:
        seed_everything(seed)
        return random.random(), float(np.random.random()), float(torch.rand(()))

    try:
        first, again, other = draw(2**62 + 1), draw(2**62 + 1), draw(2**62 + 2)
        assert first == again
        assert all(a != b for a, b in zip(first, other, strict=True))
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        seed_everything(1)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "a choice of the user stays"
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
