"""Where Countdown's puzzles come from: the generator, the exact solver against brute force, and the real rows."""

import json
from collections import Counter
from fractions import Fraction
from itertools import combinations, permutations
from pathlib import Path

import pytest

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.envs.countdown.env import Countdown, CountdownOptions
from tether.envs.countdown.expression import check_answer, parse
from tether.envs.countdown.generator import Puzzle, RandomPuzzle
from tether.envs.countdown.solver import solve
from tether.envs.registry import make_env
from tether.envs.splits import split_of

ROWS = Path(__file__).parents[4] / "shared" / "data" / "countdown" / "train.jsonl"
real_rows = pytest.mark.skipif(not ROWS.is_file(), reason="the public rows are not beside this checkout")

# --- generator ---


def test_generated_puzzles_are_solvable_in_range_and_varied() -> None:
    puzzles = [RandomPuzzle()(seed, Split.TRAIN) for seed in range(600)]
    for puzzle in puzzles:
        assert puzzle.solution is not None
        solution = parse(puzzle.solution)
        assert solution.value == puzzle.target
        assert sorted(solution.numbers) == sorted(puzzle.numbers)
        assert 10 <= puzzle.target <= 100
        assert all(1 <= number <= 99 for number in puzzle.numbers)
        assert puzzle.target not in puzzle.numbers
    assert len({puzzle.fingerprint for puzzle in puzzles}) > 580
    sizes = Counter(len(puzzle.numbers) for puzzle in puzzles)
    assert set(sizes) == {3, 4} and min(sizes.values()) > 240
    for symbol in "+-*/":
        assert sum(symbol in str(puzzle.solution) for puzzle in puzzles) > 120
    # Neither all solvable by adding and subtracting alone, nor none.
    assert 0.2 < sum(_by_signs_alone(puzzle) for puzzle in puzzles) / 600 < 0.45
    # The order shown is not the order of the solution.
    assert sum(parse(str(puzzle.solution)).numbers == puzzle.numbers for puzzle in puzzles) < 200


def _by_signs_alone(puzzle: Puzzle) -> bool:
    reached = {0}
    for number in puzzle.numbers:
        reached = {value + sign * number for value in reached for sign in (1, -1)}
    return puzzle.target in reached


@pytest.mark.parametrize(
    ("count", "max_number", "target"),
    [((2, 2), 9, (10, 81)), ((6, 6), 99, (100, 999)), ((2, 6), 10, (1, 50)), ((3, 3), 9999, (1, 1_000_000))],
)
def test_every_setting_is_kept_to(count: tuple[int, int], max_number: int, target: tuple[int, int]) -> None:
    seen = set()
    for seed in range(150):
        puzzle = RandomPuzzle(count, max_number, target)(seed, Split.ALL)
        assert parse(str(puzzle.solution)).value == puzzle.target
        assert sorted(parse(str(puzzle.solution)).numbers) == sorted(puzzle.numbers)
        assert target[0] <= puzzle.target <= target[1]
        assert max(puzzle.numbers) <= max_number and min(puzzle.numbers) >= 1
        seen.add(len(puzzle.numbers))
    assert seen == set(range(count[0], count[1] + 1))


def test_a_seed_is_a_puzzle_for_ever() -> None:
    assert [RandomPuzzle()(seed, Split.TRAIN) for seed in (0, 1)] == [
        Puzzle(58, (47, 36, 2), "(2 * 47) - 36"),
        Puzzle(28, (2, 6, 89, 19), "((6 * 89) - 2) / 19"),
    ]


def test_a_permutation_of_the_numbers_never_crosses_splits() -> None:
    for numbers in permutations((3, 5, 2, 9)):
        assert Puzzle(4, numbers).fingerprint == "4 from 2 3 5 9"
    for split in (Split.TRAIN, Split.VALIDATION, Split.TEST):
        env = Countdown(CountdownOptions(split=split))
        for seed in range(20):
            env.reset(seed)
            assert split_of(env.instance) is split


# --- solver ---


def _everything(numbers: tuple[int, ...]) -> set[Fraction]:
    """All values of expressions over all of the numbers, by brute force: join any two, until one is left."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}
    found: set[Fraction] = set()
    waiting = [tuple(Fraction(number) for number in numbers)]
    while waiting:
        values = waiting.pop()
        if len(values) == 1:
            found.add(values[0])
            continue
        for i, j in permutations(range(len(values)), 2):
            rest = tuple(value for place, value in enumerate(values) if place not in (i, j))
            joined = [values[i] + values[j], values[i] - values[j], values[i] * values[j]]
            joined += [values[i] / values[j]] if values[j] else []
            waiting += [(*rest, value) for value in joined]
    return found


@pytest.mark.parametrize("numbers", [(1, 5, 7), (2, 2, 3), (4, 4, 6), (13, 8, 5), (1, 3, 4, 6), (2, 9, 9, 20)])
def test_the_solver_finds_exactly_what_can_be_made(numbers: tuple[int, ...]) -> None:
    whole = _everything(numbers)
    parts = whole.union(*(_everything(part) for size in range(1, len(numbers)) for part in combinations(numbers, size)))
    for target in range(0, 80):
        for use, reachable in (("exactly_once", whole), ("at_most_once", parts)):
            found = solve(target, numbers, use)  # type: ignore[arg-type]
            assert (found is not None) == (Fraction(target) in reachable), (target, use)
            if found is not None:
                assert check_answer(found, Puzzle(target, numbers), use).solved  # type: ignore[arg-type]


def test_the_solver_on_known_hard_puzzles() -> None:
    for target, numbers in [
        (24, (1, 3, 4, 6)),
        (24, (3, 3, 8, 8)),
        (24, (1, 5, 5, 5)),
        (952, (25, 50, 75, 100, 3, 6)),
        (97, (2, 3, 5, 7, 11)),
    ]:
        found = solve(target, numbers, "exactly_once")
        assert found is not None
        assert check_answer(found, Puzzle(target, numbers), "exactly_once").solved
    assert solve(24, (1, 1, 1, 1)) is None
    assert solve(10_000, (1, 2, 3, 4, 5)) is None
    assert solve(5, (5, 9), "at_most_once") == "5"


# --- data ---


@real_rows
@pytest.mark.parametrize("use", ["at_most_once", "exactly_once"])
def test_every_solution_of_the_real_rows_scores_one(use: str) -> None:
    env = make_env("countdown", data=str(ROWS), split="all", use=use)
    for seed, line in enumerate(ROWS.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        assert env.reset(seed).text == f"Turn 1 of 1.\nTarget: {row['target']}, nums: {row['nums']}"
        step = env.step(row["solution"])
        assert (step.reward, step.success) == (1.0, True), row
    assert seed == 10239


@real_rows
def test_near_misses_of_the_real_solutions_score_a_tenth_or_nothing() -> None:
    env = make_env("countdown", data=str(ROWS), split="all")
    for seed, line in enumerate(ROWS.read_text(encoding="utf-8").splitlines()[:1000]):
        row = json.loads(line)
        env.reset(seed)
        assert env.step(f"-({row['solution']})").reward == 0.1
        env.reset(seed)
        assert env.step(f"{row['solution']} + 0").reward == 0.0
        env.reset(seed)
        assert env.step(f"{row['solution']} = {row['target']}").reward == 0.0


@real_rows
def test_the_splits_of_the_real_rows_share_no_puzzle() -> None:
    pools = {}
    for split in ("train", "validation", "test"):
        env = make_env("countdown", data=str(ROWS), split=split)
        seen = set()
        for seed in range(300):
            env.reset(seed)
            seen.add(env.instance)  # type: ignore[attr-defined]
        pools[split] = seen
    assert not pools["train"] & pools["validation"] and not pools["train"] & pools["test"] and not pools["validation"] & pools["test"]


def rows_file(tmp_path: Path, *rows: object) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


GOOD = {"target": 24, "nums": [1, 5, 6, 7]}
BAD_ROWS = [
    ({"target": 24}, "has no nums: expected target and nums, got target;"),
    ({"nums": [1, 2]}, "has no target: expected target and nums, got nums;"),
    ([24, [1, 2]], "is a list"),
    (GOOD | {"target": "24"}, "target is '24'; expected a whole number from 1 to"),
    (GOOD | {"target": 24.0}, "target is 24.0"),
    (GOOD | {"target": True}, "target is True"),
    (GOOD | {"target": 0}, "target is 0"),
    (GOOD | {"nums": []}, "nums is []; expected a list of 1 to 6 whole numbers"),
    (GOOD | {"nums": "1 2"}, "nums is '1 2'"),
    (GOOD | {"nums": [1] * 7}, "nums is [1, 1, 1, 1, 1, 1, 1]"),
    (GOOD | {"nums": [1, -5]}, "a number of nums is -5"),
    (GOOD | {"nums": [1, None]}, "a number of nums is None"),
    (GOOD | {"nums": [1, True]}, "a number of nums is True"),
    (GOOD | {"nums": [1, 10**12]}, "a number of nums is 1000000000000"),
    (GOOD | {"solution": 24}, "solution is 24; expected text, or none"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_a_malformed_row_is_named_with_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    source = rows_file(tmp_path, GOOD, row)
    with pytest.raises(BadInput) as caught:
        make_env("countdown", data=source)
    assert str(caught.value).startswith(f"{source}:2: {message}")
    assert "\n" not in str(caught.value)
    env = make_env("countdown", data=source, bad_rows="skip", split="all")
    assert env.reset(1).text.endswith("Target: 24, nums: [1, 5, 6, 7]")


def test_a_missing_file_names_the_option_and_the_default() -> None:
    with pytest.raises(BadInput, match=r"countdown: data='no/such\.jsonl' does not exist; .* leave it out for generated puzzles"):
        make_env("countdown", data="no/such.jsonl")


def test_rows_of_the_same_numbers_in_another_order_are_one_instance(tmp_path: Path) -> None:
    source = rows_file(tmp_path, GOOD, {"target": 24, "nums": [7, 6, 5, 1]})
    env = Countdown(CountdownOptions(data=source, split=Split.ALL))
    env.reset(0)
    first = env.instance
    assert env.reset(1).text.endswith("nums: [7, 6, 5, 1]")
    assert env.instance == first
