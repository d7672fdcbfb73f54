"""All randomness flows from here: a path of names and numbers becomes a seed.

A seed is a hash of its path (run, step, group, member), so streams never overlap, never depend on how many numbers
another stream drew, and are the same on every machine and in every process. The stream's name is the first part of the path:

- instance: which puzzle a group plays (shared by its members)
- luck: the env seed, the environment's own randomness, one stream per member
- sampling: the uniform draws that pick tokens, one stream per member

Validation instances do not depend on the run's seed: every run is evaluated on the same prompts.
"""

import hashlib
import os
import random

import numpy as np


def derive_seed(*path: int | str) -> int:
    """A 63-bit seed for a path such as ("luck", run, step, group, member); any change of the path changes it."""
    plain = tuple(part if isinstance(part, str) else int(part) for part in path)  # numpy integers print otherwise than Python's
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def instance_seed(run: int, step: int, group: int) -> int:
    """The puzzle played by a training group."""
    return derive_seed("instance", run, step, group)


def validation_seed(index: int) -> int:
    """The puzzle of one validation prompt, the same for every run."""
    return derive_seed("validation", index)


def env_seed(run: int, step: int, group: int, member: int) -> int:
    """The environment's own randomness for one member of a group."""
    return derive_seed("luck", run, step, group, member)  # the stream keeps its first name: another would change every published number


def sampling_seed(run: int, step: int, group: int, member: int) -> int:
    """The token draws of one member of a group."""
    return derive_seed("sampling", run, step, group, member)


def generator(*path: int | str) -> np.random.Generator:
    """A numpy generator for a path."""
    return np.random.Generator(np.random.PCG64(derive_seed(*path)))


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch, for libraries that draw from them."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - third-party code reads numpy's global state
    torch.manual_seed(seed)
    # cuBLAS reads this when its handle is made; without it matrix products differ from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
