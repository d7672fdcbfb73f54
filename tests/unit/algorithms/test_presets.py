"""The algorithms as data: the values of the design and of the papers, and names that are checked."""

import dataclasses

import pytest

from tether.algorithms.aggregate import AGGREGATIONS
from tether.algorithms.presets import PRESETS, Algorithm, preset


def test_grpo() -> None:
    """Clip 0.2 / 0.28 and entropy 0.001 are RAGEN-2's (appendix B.2); GRPO scales by the std and averages within a sequence first."""
    assert preset("grpo") == Algorithm("grpo", True, "sequence_mean_token_mean", clip_low=0.2, clip_high=0.28, entropy_coef=0.001)


def test_dr_grpo() -> None:
    """Neither the std nor the length enters."""
    assert preset("dr_grpo") == Algorithm("dr_grpo", False, "sequence_mean_token_sum", clip_low=0.2, clip_high=0.28, entropy_coef=0.001)


def test_every_preset_is_named_after_itself_and_can_be_computed() -> None:
    for name, algorithm in PRESETS.items():
        assert algorithm.name == name
        assert algorithm.aggregation in AGGREGATIONS
        assert 0 < algorithm.clip_low <= algorithm.clip_high < 1


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset("grpo").clip_low = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(("name", "near"), [("GRPO", "'grpo'"), ("dr-grpo", "'dr_grpo'"), ("drgrpo", "'dr_grpo'")])
def test_near_miss(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"unknown algorithm '{name}': did you mean {near}"):
        preset(name)


def test_far_miss_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"known: .*dr_grpo, grpo"):
        preset("xyz")
