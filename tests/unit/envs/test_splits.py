"""An instance belongs to one split, decided by the instance itself."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.envs.frozen_lake.generator import Lake, RandomLake
from tether.envs.registry import make_env
from tether.envs.sokoban.generator import ReversePlay
from tether.envs.splits import draw, split_of


def test_split_of_known_fingerprints() -> None:
    assert [split_of(f"level {number}") for number in range(8)] == [split_of(f"level {number}".encode()) for number in range(8)]
    shares = Counter(split_of(str(number)) for number in range(20_000))
    assert shares[Split.VALIDATION] / 20_000 == pytest.approx(0.1, abs=0.01)
    assert shares[Split.TEST] / 20_000 == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("generator", [RandomLake(), ReversePlay()], ids=["frozen_lake", "sokoban"])
def test_splits_share_no_instance(generator: Callable[[int, Split], Any]) -> None:
    pools = {split: {generator(seed, split).fingerprint for seed in range(2000)} for split in (Split.TRAIN, Split.VALIDATION, Split.TEST)}
    assert not pools[Split.TRAIN] & pools[Split.VALIDATION]
    assert not pools[Split.TRAIN] & pools[Split.TEST]
    assert not pools[Split.VALIDATION] & pools[Split.TEST]
    assert min(map(len, pools.values())) > 400


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_split_option_reaches_the_generator(name: str) -> None:
    env: Any = make_env(name, split="test")
    env.reset(0)
    instance = env.lake if name == "frozen_lake" else env.level
    assert split_of(instance.fingerprint) is Split.TEST


def test_empty_split_is_an_error_not_a_hang() -> None:
    train = next(lake for lake in (RandomLake()(seed, Split.TRAIN) for seed in range(9)))
    with pytest.raises(BadInput, match="frozen_lake: none of 10000 draws gave a test instance"):
        draw("frozen_lake", 0, Split.TEST, lambda rng: Lake(train.tiles))
