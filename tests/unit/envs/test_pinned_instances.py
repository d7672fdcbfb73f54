"""Instances follow from their seeds, for good: a recorded run plays the same episodes with a later version of Tether.

The digests were made with tether 0.1.0, whose tables were Python modules (qa: with 0.2.0); they pin the data files and the seed streams.
"""

import hashlib

import pytest

from tether.envs.registry import make_env

PINNED = {
    "countdown": "2d362525b608260e",
    "deepcoder": "3d350b67eef64f0e",
    "frozen_lake": "d2e2b6fa20379e38",
    "metamathqa": "c5ccb28d50ca829d",
    "qa": "19865bb1bd0be00e",
    "searchqa": "be3c6b15c9b28b2d",
    "sokoban": "dc5d7b5fda68d1a8",
    "webshop": "476eae2a48270526",
}


def _digest(name: str) -> str:
    """The first observations of 20 seeds of each split, and a slip of the lake, which shows the stream of env_seed."""
    digest = hashlib.sha256()
    for split in ("train", "validation", "test"):
        env = make_env(name, split=split, **({"slip": 0.5} if name == "frozen_lake" else {}))
        for seed in range(20):
            digest.update(env.reset(seed).text.encode() + b"\0")
            if name == "frozen_lake":
                digest.update(env.step("Down || Right").observation.text.encode() + b"\0")
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("name", sorted(PINNED))
def test_instances_are_those_of_the_first_release(name: str) -> None:
    assert _digest(name) == PINNED[name]
