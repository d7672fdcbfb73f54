"""Seeds on random paths: different paths give different seeds, and a stream does not notice what any other stream does."""

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tether.core.seeding import derive_seed, env_seed, generator, instance_seed, sampling_seed, validation_seed

laws = settings(derandomize=True, max_examples=100, deadline=None, database=None)

NUMBERS = st.integers(-(2**40), 2**40)
PATHS = st.lists(NUMBERS | st.text(alphabet="ab01, '\\é", max_size=4), min_size=1, max_size=5).map(tuple)
PLACES = st.tuples(*[st.integers(0, 30)] * 4)


@laws
@given(PATHS, PATHS)
def test_different_paths_have_different_seeds(a: tuple[int | str, ...], b: tuple[int | str, ...]) -> None:
    assert (derive_seed(*a) == derive_seed(*b)) == (a == b)
    assert 0 <= derive_seed(*a) < 2**63


@laws
@given(st.lists(st.sampled_from([0, 1, 11, "0", "1", "11", "", ", "]), max_size=4), st.integers(0, 4))
def test_the_shape_of_the_path_counts(parts: list[int | str], at: int) -> None:
    """Neither a missing part, nor a joined one, nor a number written as text is the same path."""
    path = ("x", *parts)
    seeds = {derive_seed(*path), derive_seed(*path, 0), derive_seed(*path, ""), derive_seed(*map(str, path), "s"), derive_seed("y", *parts)}
    assert len(seeds) == 5
    if at < len(parts) and isinstance(parts[at], int):
        other = [*parts[:at], str(parts[at]), *parts[at + 1 :]]
        assert derive_seed("x", *other) != derive_seed(*path)


@laws
@given(PATHS)
def test_numpy_integers_are_integers(path: tuple[int | str, ...]) -> None:
    assert derive_seed(*(part if isinstance(part, str) else np.int64(part) for part in path)) == derive_seed(*path)


@laws
@given(PLACES, PLACES)
def test_members_share_the_puzzle_and_nothing_else(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> None:
    assert (instance_seed(*a[:3]) == instance_seed(*b[:3])) == (a[:3] == b[:3])
    assert (env_seed(*a) == env_seed(*b)) == (a == b)
    assert (sampling_seed(*a) == sampling_seed(*b)) == (a == b)
    assert len({instance_seed(*a[:3]), env_seed(*a), sampling_seed(*a), env_seed(*b[:3], 99), validation_seed(a[0])}) == 5


@laws
@given(PATHS, PATHS, st.lists(st.booleans(), max_size=12))
def test_interleaving_draws_changes_nothing(a: tuple[int | str, ...], b: tuple[int | str, ...], turns: list[bool]) -> None:
    """Drawing from one stream in between, more or less, leaves the numbers of the other as they are."""
    assume(a != b)
    first, second = generator(*a), generator(*b)
    drawn: list[list[float]] = [[], []]
    for turn in turns:
        drawn[turn].append((second if turn else first).random())
    assert drawn[0] == generator(*a).random(len(drawn[0])).tolist()
    assert drawn[1] == generator(*b).random(len(drawn[1])).tolist()
    assert generator(*a).random() != generator(*b).random()
