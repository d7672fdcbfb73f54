"""Train, validation and test instances are disjoint because the instance itself decides where it belongs.

The fingerprint of an instance (the whole level, nothing left out) is hashed; the hash picks the split. A generator of one
split redraws from its seed's stream until an instance falls into it, so the same level can never turn up in two splits,
whatever the seeds. A tenth of all instances are for validation, a tenth for test.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.core.seeding import derive_seed

MAX_DRAWS = 10_000
"""Redraws before giving up. A split takes a tenth of the draws, so only a pool with (almost) no such instance gets here."""


@runtime_checkable
class Finite(Protocol):
    """A generator that takes its instances from a list, such as the rows of a file: seed i is the i-th of its split, from the beginning
    again behind the last."""

    def num_instances(self, split: Split) -> int: ...


class Instance(Protocol):
    """Anything that can be assigned to a split."""

    @property
    def fingerprint(self) -> str: ...


T = TypeVar("T", bound=Instance)


def split_of(fingerprint: bytes | str) -> Split:
    """The one split an instance belongs to.

    >>> split_of("a level"), split_of(b"a level")
    (<Split.TRAIN: 'train'>, <Split.TRAIN: 'train'>)
    """
    data = fingerprint.encode() if isinstance(fingerprint, str) else fingerprint
    remainder = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") % 10
    return {0: Split.VALIDATION, 1: Split.TEST}.get(remainder, Split.TRAIN)


def belongs(instance: Instance, split: Split) -> bool:
    """Whether an instance is in a split."""
    return split is Split.ALL or split_of(instance.fingerprint) is split


def draw(env: str, seed: int, split: Split, propose: Callable[[random.Random], T | None]) -> T:
    """The first instance of the seed's stream that `propose` accepts (does not return None) and that belongs to the split."""
    rng = random.Random(derive_seed(env, seed))
    for _ in range(MAX_DRAWS):
        instance = propose(rng)
        if instance is not None and belongs(instance, split):
            return instance
    raise BadInput(f"{env}: none of {MAX_DRAWS} draws gave a {split} instance; loosen the options (a larger board, fewer constraints)")
