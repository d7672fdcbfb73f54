"""Assertions taken apart: what becomes a call compared outside the sandbox, what stays a script, what is no test."""

import ast

import pytest

from tether.envs.deepcoder.assertions import Suite
from tether.envs.deepcoder.expressions import RESULT, Unsupported, check_supported, constant, holds
from tether.envs.deepcoder.problem import TRUTH_OF, Case
from tether.envs.deepcoder.sandbox.jobs import CallTask, Report, ScriptTask


def cases_of(body: str, *, before: str = "", alias: str = "candidate") -> list[Case]:
    return Suite("f", ast.parse(body).body, alias=alias, before=ast.parse(before).body).cases()


def only(body: str) -> Case:
    [case] = cases_of(body)
    return case


def expression(text: str) -> ast.expr:
    return ast.parse(text.replace("result", RESULT), mode="eval").body


@pytest.mark.parametrize(
    ("text", "arguments", "right", "wrong"),
    [
        ("assert candidate(1, 2) == 3", (1, 2), 3, 4),
        ("assert f(1, 2) == 3, 'message'", (1, 2), 3, "3"),
        ("assert f(-1, 2.5, 'a', None) == -3", (-1, 2.5, "a", None), -3, 3),
        ("assert f(([1, (2,)], {3: {4}})) == {'a': (1, [2])}", (([1, (2,)], {3: {4}}),), {"a": (1, [2])}, {"a": [1, [2]]}),
        ("assert f(1) == (1, 2)", (1,), (1, 2), [1, 2]),  # Python's own equality: a list is no tuple
        ("assert f(1) == {1, 2}", (1,), {2, 1}, [1, 2]),
        ("assert f(1) == True", (1,), 1, 0),
        ("assert f(1) is True", (1,), True, 1),
        ("assert f(1) is not None", (1,), 0, None),
        ("assert f(1) == None", (1,), None, False),
        ("assert f(1) != 2", (1,), 3, 2),
        ("assert 1 <= f(1) < 3", (1,), 2, 3),
        ("assert f(1) in (2, 3)", (1,), 3, 4),
        ("assert f(3 * 19) == [3, 19]", (57,), [3, 19], [19, 3]),
        ("assert f('ab' + 'c' * 2) == 2 ** 3", ("abcc",), 8, 6),
        ("assert abs(f(1) - 0.5) < 1e-6", (1,), 0.5000001, 0.51),
        ("assert math.isclose(f(1), 2.5, rel_tol=0.01)", (1,), 2.51, 2.6),
        ("assert set(f(1)) == set([1, 2])", (1,), [2, 1, 1], [1, 3]),
        ("assert tuple(f(1)) == tuple([1, 2])", (1,), [1, 2], [2, 1]),
        ("assert sorted(f(1)) == [1, 2] and len(f.__name__) == 1", None, None, None),
        ("assert round(f(1), 2) == 0.33", (1,), 0.333, 0.34),
        ("assert f(1)[0] == 5", (1,), [5], [6]),
        ("assert f(1)[0] == 5 and isinstance(1, int)", (1,), [5], []),
        ("assert isinstance(f(1), list)", (1,), [], ()),
        ("assert not f(1) == 2", (1,), 3, 2),
        ("assert f(float('inf')) == inf", (float("inf"),), float("inf"), 1.0),
        ("assert f(list(range(3))) == sum([0, 1, 2])", ([0, 1, 2],), 3, 4),
        ("assert f() == 3 or f is None", None, None, None),
    ],
)
def test_a_call_with_constants_is_compared_outside(text: str, arguments: tuple[object, ...] | None, right: object, wrong: object) -> None:
    case = only(text)
    if arguments is None:
        assert isinstance(case.task, ScriptTask)
        return
    assert case.task == CallTask("f", arguments)
    assert case.passed(Report("ok", value=right))
    assert not case.passed(Report("ok", value=wrong))
    assert not case.passed(Report("timeout", value=right))


@pytest.mark.parametrize(("text", "truth"), [("assert f(1, 2)", True), ("assert not f(1, 2)", False)])
def test_an_assertion_of_truth_asks_for_nothing_but_the_truth(text: str, truth: bool) -> None:
    case = only(text)
    assert case.task == CallTask(TRUTH_OF, ("f", [1, 2]))
    assert case.given == "f(1, 2)"
    assert case.passed(Report("ok", value=truth))
    assert not case.passed(Report("ok", value=not truth))


def test_names_are_looked_through() -> None:
    first, second = cases_of("x0 = candidate([1, 2])\nassert x0 == 3\nx1 = candidate(4)\nassert x1 == 5 and x1 < 9")
    assert (first.task, second.task) == (CallTask("f", ([1, 2],)), CallTask("f", (4,)))
    assert (first.passed(Report("ok", value=3)), second.passed(Report("ok", value=5))) == (True, True)
    assert second.expected == "assert f(4) == 5 and f(4) < 9"


def test_names_of_names_and_names_that_turn_in_a_circle() -> None:
    assert only("a = 2\nb = a + 1\nassert f(b) == a").task == CallTask("f", (3,))
    assert isinstance(only("a = b\nb = a\nassert f(b) == 1").task, ScriptTask)
    assert isinstance(only("a = a\nassert f(a) == 1").task, ScriptTask)


def test_a_list_that_two_assertions_share_is_not_given_to_each_of_them() -> None:
    """The function may have changed it in between; the first assertion would then see another list than the second."""
    cases = cases_of("x = [3, 1]\nassert f(x) == 1\nassert f(x) == 2")
    assert [type(case.task) for case in cases] == [ScriptTask, ScriptTask]
    cases = cases_of("x = (3, 1)\nassert f(x) == 1\nassert f(x) == 2")
    assert [case.task for case in cases] == [CallTask("f", ((3, 1),))] * 2
    cases = cases_of("x = 1\nassert f(x) == 1\nx = 2\nassert f(x) == 2")
    assert [type(case.task) for case in cases] == [ScriptTask, ScriptTask]


@pytest.mark.parametrize(
    "text",
    [
        "assert f(g(1)) == 2",  # another function of the program
        "assert f(1) == g(1)",
        "assert f(1) == f(2)",  # two calls
        "assert f(f(1)) == 1",
        "assert f(x=1) == 1",
        "assert f(*[1]) == 1",
        "assert f(int) == 1",
        "assert f(1) == sys.maxsize",
        "assert 2 ** f(1) == 8",  # would take whatever the program makes of it
        "assert 'a' * f(1) == 'aaa'",
        "assert '%d' % f(1) == '1'",
        "assert [x for x in f(1)]",
        "assert f(1).upper() == 'A'",
        "assert f(10 ** 10 ** 10) == 1",
        "assert f('a' * 10 ** 12) == 1",
        "assert f(...) == 1",
        "assert f(1) is 300",
        "assert f(1) == 1 / 0",
        "assert f({**{}}) == 1",
        "assert f(lambda: 1) == 1",
    ],
)
def test_whatever_else_stays_a_script(text: str) -> None:
    case = only(text)
    assert case.task == ScriptTask(f"candidate = f\n{text}\n")
    assert case.passed(Report("ok"))
    assert not case.passed(Report("error"))


def test_a_name_the_test_redefines_is_not_ours() -> None:
    [case] = cases_of("assert set(f(1)) == set([1])", before="def set(x):\n    return 1")
    assert isinstance(case.task, ScriptTask)


def test_scripts_hold_what_came_before_and_asserts_nothing() -> None:
    first, second, third = cases_of(
        "import random\nrng = random.Random(1)\nassert f(1) == 2\nfor i in range(3):\n    assert f(i) == rng.random()\nassert f(rng) == 3",
        before="def helper(x):\n    return x",
    )
    assert first.task == CallTask("f", (1,))
    start = "def helper(x):\n    return x\ncandidate = f\nimport random\nrng = random.Random(1)\n"
    assert second.task == ScriptTask(start + "for i in range(3):\n    assert f(i) == rng.random()\n")
    assert third.task == ScriptTask(start + "assert f(rng) == 3\n")


def test_a_helper_that_asserts_makes_a_test_of_each_call() -> None:
    cases = cases_of("close(f(1), 2)\nclose(f(2), 3)", before="def close(a, b):\n    assert abs(a - b) < 1")
    assert [type(case.task) for case in cases] == [ScriptTask, ScriptTask]


def test_statements_that_need_each_other_stay_together() -> None:
    body = "for i in range(3):\n    last = f(i)\n    assert last == i\nassert last == 2"
    case = only(body)
    assert case.task == ScriptTask(f"candidate = f\n{body}\n")


def test_two_loops_with_the_same_variable_are_two_tests() -> None:
    assert len(cases_of("for i in range(3):\n    assert f(i) == i\nfor i in range(2):\n    assert f(i) == i")) == 2


def test_what_asserts_nothing_about_the_program_is_no_test() -> None:
    assert cases_of("'a docstring'\nassert True, 'prints if it fails'\nassert 1 == 1\nprint\npass") == []


def test_an_assertion_is_shown_with_the_function_itself() -> None:
    case = only("x = candidate('a')\nassert len(x) == 2, 'no'")
    assert (case.given, case.expected) == ("f('a')", "assert len(f('a')) == 2")


@pytest.mark.parametrize("text", ["result + [1]", "result - 1", "result[0]", "len(result)", "sum(result)", "sorted(result)", "result < 3"])
@pytest.mark.parametrize("value", [None, 1, "text", [1, "a"], {}, {1: 2}, 1e308, [[[]]], [10**5000]])
def test_no_value_makes_the_evaluator_raise(text: str, value: object) -> None:
    check_supported(expression(text))
    assert holds(expression(text), value) in (True, False)


def test_constants() -> None:
    assert constant(expression("[1, -2, (3,), {'a': {4, 5}}, 2 * 3 + 10 // 3 % 2, not 1, 1j]")) == [
        1,
        -2,
        (3,),
        {"a": {4, 5}},
        7,
        False,
        1j,
    ]
    for text in ("x", "result", "open('a')", "__import__('os')", "[].append", "(1).__class__", "f'{1}'", "[x for x in [1]]", "1 << 99"):
        with pytest.raises(Unsupported):
            constant(expression(text))
