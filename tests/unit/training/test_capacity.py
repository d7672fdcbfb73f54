"""How many runs go side by side; the card is described by numbers, since tests have none."""

import json
from pathlib import Path

import pytest

from tether.core.errors import BadInput
from tether.training import side_by_side
from tether.training.side_by_side import Capacity, Gpu


def grown(paces: dict[int, float], used: dict[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int = 16) -> Capacity:
    """Drive the growth: `paces` gives the seconds a step with n runs, `used` the memory in MiB."""
    card = Gpu("a card", 100_000, 1_000)
    found = Capacity.of_gpu(card, cores, tmp_path / "side_by_side.json")
    monkeypatch.setattr(side_by_side, "read_gpu", lambda: Gpu("a card", 100_000, used[found.target]))
    for _ in range(20):
        if found.settled:
            break
        found.has_room([(5, paces[found.target])] * found.target)
    return found


def test_it_doubles_while_the_summed_pace_rises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps a second: 1, 2, 4, then 8 runs bring 4.4: not a quarter more, so 4 are kept."""
    paces = {1: 1.0, 2: 1.0, 4: 1.0, 8: 8 / 4.4}
    found = grown(paces, dict.fromkeys((1, 2, 4, 8, 16), 2_000), tmp_path, monkeypatch)
    assert (found.target, found.most) == (4, 4)
    assert json.loads((tmp_path / "side_by_side.json").read_text())["jobs"] == 4


def test_it_never_exceeds_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = grown(dict.fromkeys((1, 2, 4, 6), 1.0), dict.fromkeys((1, 2, 4, 6), 2_000), tmp_path, monkeypatch, cores=6)
    assert found.target == 6


def test_memory_bounds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes 20 GB of 100: with two, 59 GB are free, room for 2 more at 24 GB each; with four, none."""
    used = {1: 21_000, 2: 41_000, 4: 81_000}
    found = grown(dict.fromkeys((1, 2, 4), 1.0), used, tmp_path, monkeypatch)
    assert found.target == 4


def test_it_waits_until_every_run_has_a_pace(tmp_path: Path) -> None:
    found = Capacity.of_gpu(Gpu("a card", 1000, 10), 16, tmp_path / "x.json")
    assert found.has_room([])
    assert not found.has_room([(2, 0.5)]) and found.target == 1
    assert not found.has_room([(9, None)]) and found.target == 1


def test_a_later_start_on_the_same_card_begins_with_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"device": "a card", "cores": 16, "jobs": 12}))
    assert Capacity.of_gpu(Gpu("a card", 1000, 10), 16, path).target == 12
    assert Capacity.of_gpu(Gpu("another", 1000, 10), 16, path).target == 1
    assert Capacity.of_gpu(Gpu("a card", 1000, 10), 8, path).target == 1


def test_fixed_and_by_cores() -> None:
    assert Capacity.fixed(3).has_room([(0, None)] * 2) and not Capacity.fixed(3).has_room([(0, None)] * 3)
    assert Capacity.of_device(Path("nowhere"), 1).target == 1 or side_by_side.read_gpu() is not None
    with pytest.raises(BadInput, match="--jobs is 0"):
        Capacity.fixed(0)
