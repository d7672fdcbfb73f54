"""Generated word problems: each kind solved a second time, from its numbers alone and by another way than the generator's."""

import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, permutations, product

import pytest

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.envs.countdown.expression import parse
from tether.envs.metamathqa.generator import KINDS, Problem, WordProblems
from tether.envs.metamathqa.story import compute, money, show
from tether.envs.splits import split_of

Numbers = dict[str, Fraction]
Solver = Callable[..., Fraction | int]


@pytest.mark.parametrize(("text", "value"), [("12.5 * (1 - 2/5)", Fraction(15, 2)), ("5 - -8", 13), ("-(3 + 4) / 2", Fraction(-7, 2))])
def test_steps_are_computed_exactly_also_below_zero(text: str, value: Fraction | int) -> None:
    assert compute(text) == value


def first(condition: Callable[[Fraction], bool], step: Fraction = Fraction(1), limit: int = 5000) -> Fraction:
    """The least positive multiple of a step that meets a condition: solving by trying."""
    return next(step * count for count in range(1, limit) if condition(step * count))


def fill(quick: Fraction, long: Fraction, sign: int) -> Fraction:
    """Hours until a tank is full, by its contents: what flows in an hour, and how many such hours make one tank."""
    hourly = 1 / quick + sign / long
    assert hourly > 0
    return 1 / hourly


def tickets(price: Fraction, start: Fraction, weekly: Fraction) -> int:
    weeks = 0
    while start < price:
        start += weekly
        weeks += 1
    assert start == price
    return weeks


def boxes(lots: Fraction, each: Fraction, broken: Fraction, size: Fraction) -> tuple[int, int]:
    """Boxes opened and things in the last one, packing one thing after another."""
    opened, room = 0, 0
    for _ in range(int(lots * each - broken)):
        if room == 0:
            opened, room = opened + 1, int(size)
        room -= 1
    return opened, int(size) - room


def grown(start: Fraction, factor: int, hours: Fraction) -> Fraction:
    for _ in range(int(hours)):
        start *= factor
    return start


def run_of(count: Fraction, total: Fraction, kind: str) -> list[int]:
    """Consecutive numbers with this sum, by trying first ones."""
    gap = 1 if kind == "whole" else 2
    for begin in range(1, int(total)):
        numbers = [begin + gap * place for place in range(int(count))]
        if sum(numbers) == total:
            assert kind == "whole" or begin % 2 == (kind == "odd")
            return numbers
    raise AssertionError("no such numbers")


SOLVERS: dict[tuple[str, str], Solver] = {
    ("ages", "sum"): lambda gap, years, total: first(lambda age: (age + years) + (age + gap + years) == total),
    ("ages", "multiple"): lambda now, then, years: first(lambda age: now * age + years == then * (age + years)),
    ("animals", ""): lambda heads, legs: next(four for four in range(int(heads)) if 4 * four + 2 * (heads - four) == legs),
    ("areas", "fence"): lambda length, width, gate, price: sum(price for _ in range(int(length + width + length + width))) - price * gate,
    ("areas", "tiles"): lambda length, width, side: (length * width * 10_000) / (side * side),
    ("averages", "needed"): lambda tests, average, wanted: first(lambda score: (average * tests + score) / (tests + 1) == wanted),
    ("averages", "groups"): lambda few, low, many, high: sum([low] * int(few) + [high] * int(many)) / (few + many),
    ("catch_up", ""): lambda slow, fast, head_start: first(lambda hours: fast * hours == slow * (hours + head_start), Fraction(1, 12)),
    ("change", ""): lambda few, many, first_price, second_price, note: note - sum([first_price] * int(few) + [second_price] * int(many)),
    ("coins", ""): lambda quarters, dimes, nickels: quarters / 4 + dimes / 10 + nickels / 20,
    ("combinations", "outfits"): lambda shirts, trousers, hats: len(
        list(product(range(int(shirts)), range(int(trousers)), range(int(hats))))
    ),
    ("combinations", "handshakes"): lambda people: len(list(combinations(range(int(people)), 2))),
    ("combinations", "offices"): lambda people: len(list(permutations(range(int(people)), 2))),
    ("discount", ""): lambda price, percent, coupon: price - price * percent / 100 - coupon,
    ("fractions", "forwards"): lambda first, second, whole: whole - whole * first - (whole - whole * first) * second,
    ("fractions", "backwards"): lambda **n: first(
        lambda whole: whole - whole * n["first"] - (whole - whole * n["first"]) * n["second"] == n["left"]
    ),
    ("mixtures", "mixed"): lambda much, weak, little, strong: 100 * (much * weak / 100 + little * strong / 100) / (much + little),
    ("mixtures", "diluted"): lambda much, strong, weak: first(lambda water: much * strong / (much + water) == weak, Fraction(1, 12)),
    ("percent_change", "forwards"): lambda start, up, down: start * (1 + up / 100) * (1 - down / 100),
    ("percent_change", "backwards"): lambda end, up, down: first(
        lambda start: start * (1 + up / 100) * (1 - down / 100) == end, Fraction(20)
    ),
    ("profit", ""): lambda count, cost, price, fee: count * price - count * cost - fee,
    ("rates", "distance"): lambda fast, fast_hours, slow, slow_hours: sum([fast] * int(fast_hours) + [slow] * int(slow_hours)),
    ("rates", "average"): lambda fast, fast_hours, slow, slow_hours: (
        sum([fast] * int(fast_hours) + [slow] * int(slow_hours)) / (fast_hours + slow_hours)
    ),
    ("ratios", "share"): lambda first, second, third, total: total * (second / (first + second + third)),
    ("ratios", "difference"): lambda first, second, third, total: (
        (max(first, second, third) - min(first, second, third)) * total / (first + second + third)
    ),
    ("remainders", "left_over"): lambda **n: boxes(**n)[1],
    ("remainders", "boxes"): lambda **n: boxes(**n)[0],
    ("savings", ""): lambda price, start, allowance, chores, spent: tickets(price, start, allowance + chores - spent),
    ("schedules", "lessons"): lambda lessons, minutes, pause: lessons * (minutes + pause) - pause,
    ("schedules", "departures"): lambda interval, hours, seats: seats * len(range(0, int(hours * 60) + 1, int(interval))),
    ("sequences", "rows"): lambda **n: sum(n["first"] + n["more"] * row for row in range(int(n["rows"]))),
    ("sequences", "doubles"): lambda start, hours: grown(start, 2, hours),
    ("sequences", "triples"): lambda start, hours: grown(start, 3, hours),
    ("units", "bottles"): lambda rate, milliliters, hours: (milliliters / 1000) * rate * (hours * 60),
    ("units", "laps"): lambda lap, laps, days: sum([lap / 1000 * laps] * int(days)),
    ("units", "typing"): lambda words, pages, per_page: per_page / words / 60 * pages,
    ("unknown_x", "packs"): lambda packs, each, given, result: first(lambda x: x + packs * each - given == result),
    ("unknown_x", "wages"): lambda hours, days, tax, result: first(lambda x: x * hours * days - tax == result),
    ("unknown_x", "reading"): lambda daily, days, result: first(lambda x: x - (daily + daily) * days == result),
    ("work_together", "together"): lambda quick, long: fill(quick, long, 1),
    ("work_together", "against"): lambda quick, long: fill(quick, long, -1),
}
for kind, want in product(["whole", "even", "odd"], ["largest", "smallest"]):
    SOLVERS["consecutive", f"{kind} {want}"] = lambda count, total, kind=kind, want=want: run_of(count, total, kind)[
        -1 if want == "largest" else 0
    ]

EACH = 60


@pytest.fixture(scope="module")
def problems() -> dict[str, list[Problem]]:
    return {kind: [WordProblems((kind,))(seed, Split.ALL) for seed in range(EACH)] for kind in KINDS}


def test_there_are_kinds_enough_and_each_has_a_second_solver(problems: dict[str, list[Problem]]) -> None:
    assert len(KINDS) >= 14
    seen = {(problem.kind, problem.form) for each in problems.values() for problem in each}
    assert seen == set(SOLVERS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_follows_from_the_numbers_alone(problems: dict[str, list[Problem]], kind: str) -> None:
    for problem in problems[kind]:
        assert problem.kind == kind
        expected = SOLVERS[kind, problem.form](**problem.parameters)
        assert Fraction(problem.label) == expected, problem


@pytest.mark.parametrize("kind", KINDS)
def test_the_question_tells_exactly_its_numbers(problems: dict[str, list[Problem]], kind: str) -> None:
    for problem in problems[kind]:
        told = {Fraction(text) for text in re.findall(r"\d+/\d+|\d+(?:\.\d+)?", problem.question)}
        assert told == set(problem.parameters.values()), problem


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_hold_and_end_in_the_answer(problems: dict[str, list[Problem]], kind: str) -> None:
    for problem in problems[kind]:
        results = []
        for step in problem.steps:
            left, _, right = step.partition(" = ")
            exact = re.sub(r"\d+\.\d+", lambda found: f"({Fraction(found.group())})", left)
            assert parse(exact).value == Fraction(right), step
            results.append(Fraction(right))
        assert results[-1] == Fraction(problem.label)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_make_sense(problems: dict[str, list[Problem]], kind: str) -> None:
    may_be_parts = {"catch_up", "change", "coins", "discount", "mixtures", "averages", "rates", "units", "work_together"}
    for problem in problems[kind]:
        value = Fraction(problem.label)
        assert 0 < value < 200_000
        assert value.denominator == 1 or kind in may_be_parts
        assert problem.question.count("?") in (1, 2) and not re.search(r"[{}]|\s\s|\b1 \w+s\b", problem.question), problem.question
        if kind in ("change", "coins", "discount"):
            assert (value * 100).denominator == 1  # whole cents


def test_wording_and_numbers_vary() -> None:
    problems = [WordProblems()(seed, Split.TRAIN) for seed in range(800)]
    assert len({problem.fingerprint for problem in problems}) > 780
    assert set(Counter(problem.kind for problem in problems)) == set(KINDS)
    answers = [problem.label for problem in problems]
    assert sum("/" in answer for answer in answers) > 40 and sum("." in answer for answer in answers) > 80
    assert Counter(answers).most_common(1)[0][1] < 40  # no answer is worth guessing


def test_splits_are_disjoint_and_seeds_repeat() -> None:
    for split in (Split.TRAIN, Split.VALIDATION, Split.TEST):
        for seed in range(15):
            problem = WordProblems()(seed, split)
            assert split_of(problem.fingerprint) is split
            assert problem == WordProblems()(seed, split)
    problem = WordProblems(("animals",))(0, Split.TRAIN)
    assert (problem.question, problem.label, problem.steps) == (
        "Olga keeps only ducks and goats. Together they have 54 heads and 152 legs. How many goats does she have?",
        "22",
        ("2 * 54 = 108", "152 - 108 = 44", "44 / 2 = 22"),
    )


def test_kinds_can_be_chosen() -> None:
    chosen = WordProblems(("ages", "coins"))
    assert {chosen(seed, Split.TRAIN).kind for seed in range(30)} == {"ages", "coins"}
    with pytest.raises(BadInput, match=r"unknown kind 'age': did you mean 'ages'\?"):
        WordProblems(("age",))
    with pytest.raises(BadInput, match="empty list"):
        WordProblems(())


def test_how_numbers_are_written() -> None:
    assert [show(Fraction(value)) for value in ("12", "12.5", "0.0625", "1/3", "-3/8")] == ["12", "12.5", "0.0625", "1/3", "-0.375"]
    assert [money(Fraction(value)) for value in ("7", "7.5", "0.25")] == ["$7", "$7.50", "$0.25"]


def test_sums_are_computed_exactly_also_below_zero() -> None:
    assert compute("-8 + 20 - 27") == -15
    assert compute("12.5 * (1 - 2/5)") == Fraction(15, 2)
    assert compute("2 * 3 / (4 - 1)") == 2
    with pytest.raises(ValueError, match="no sum of numbers"):
        compute("2 ** 3")
