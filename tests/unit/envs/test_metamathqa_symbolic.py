"""The worker that compares formulas: bounded in time, from any thread, and alive after whatever was asked of it."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tether.core.errors import MissingDependency, TetherError
from tether.envs.metamathqa import compare, symbolic
from tether.envs.metamathqa.compare import same, same_mathematics
from tether.envs.metamathqa.symbolic import ComparisonPool, SymbolicComparison


@pytest.fixture(scope="module")
def comparison() -> Iterator[SymbolicComparison]:
    """A worker with little patience."""
    worker = SymbolicComparison(cpu_seconds=0.3)
    yield worker
    worker.close()


def test_equal_unequal_and_no_expression(comparison: SymbolicComparison) -> None:
    assert comparison.equal(r"\sqrt{18}", r"3\sqrt{2}") is True
    assert comparison.equal(r"\sqrt{18}", r"3\sqrt{3}") is False
    assert comparison.equal(r"\sqrt{18}", r"\frac{1") is None
    assert comparison.equal("5", "\ud800") is None


HOPELESS = ["9^{9^{9^{9}}}", "100000000!", "(" * 60 + "1" + ")" * 60]


@pytest.mark.parametrize("hopeless", HOPELESS, ids=lambda text: text[:10])
def test_a_hopeless_question_is_given_up_and_the_next_one_answered(comparison: SymbolicComparison, hopeless: str) -> None:
    begun = time.monotonic()
    assert comparison.equal("5", hopeless) is not True
    assert time.monotonic() - begun < 30  # a third of a second of computing, on however loaded a machine
    assert comparison.equal("x+x", "2x") is True


def test_time_on_the_clock_is_limited_too_and_the_first_time_is_said(caplog: pytest.LogCaptureFixture) -> None:
    symbolic._GIVEN_UP_SAID.clear()
    worker = SymbolicComparison(cpu_seconds=60.0, wall_seconds=0.3)
    try:
        assert worker.equal("x+x", "2x") is True
        process = worker._worker
        with caplog.at_level("WARNING"):
            assert worker.equal("5", "100000000!") is None
            assert worker.equal("6", "100000000!") is None
        assert worker._worker is process and worker.equal("x+x+x", "3x") is True  # it ended the comparison itself
    finally:
        worker.close()
    assert caplog.messages == [
        "metamathqa: comparing '5' and '100000000!' takes more than 60 s of CPU, 0.3 s on the clock and 2 GiB; "
        "the answer counts as wrong, and so do later ones of the kind"
    ]


def test_an_answer_has_a_limit_of_time_for_all_its_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    gold = ",".join(f"x^{{2}}+{2 * n}x+{n * n}" for n in range(1, 5))
    answer = ",".join(f"(x+{n})^2" for n in range(1, 5))
    assert same(gold, answer, "math")
    monkeypatch.setattr(compare, "MAX_SECONDS", 0.0)
    same_mathematics.cache_clear()
    assert not same(gold, answer, "math")
    same_mathematics.cache_clear()


def test_it_works_off_the_main_thread_and_from_many_at_once(comparison: SymbolicComparison) -> None:
    verdicts: dict[int, bool | None] = {}

    def ask(number: int) -> None:
        verdicts[number] = comparison.equal(f"{number}x", f"x+{number - 1}x" if number % 2 else f"x+{number}x")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {number: number % 2 == 1 for number in range(2, 10)}


@pytest.mark.long
def test_a_slow_formula_does_not_hold_up_the_others() -> None:
    pool = ComparisonPool(num_workers=2, cpu_seconds=3.0)
    slow = threading.Thread(target=pool.equal, args=("5", "100000000!"))
    try:
        assert all(worker.equal("x+x", "2x") for worker in pool._workers)  # both have started: that takes seconds
        slow.start()
        assert pool.equal("x+x+x", "3x") is True
        assert slow.is_alive()
    finally:
        pool.close()
        slow.join()


def test_a_worker_that_died_is_replaced(comparison: SymbolicComparison) -> None:
    assert comparison.equal("x", "x") is True
    process = comparison._worker
    assert process is not None
    os.killpg(process.process_id, signal.SIGKILL)
    process.wait()
    assert comparison.equal("x", "x") is None  # the question that found it dead
    assert comparison.equal("x", "x") is True


def test_a_silent_worker_is_killed(comparison: SymbolicComparison, monkeypatch: pytest.MonkeyPatch) -> None:
    assert comparison.equal("x", "x") is True
    process = comparison._worker
    assert process is not None
    monkeypatch.setattr(comparison, "_wall_seconds", 0.01)
    monkeypatch.setattr(symbolic, "_GRACE_SECONDS", 0.0)
    assert comparison.equal("5", "100000000!") is None
    assert process.exit_code is not None
    assert comparison._worker is None
    comparison.close()  # nothing left to close


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # pytest's own threads, from Python 3.12 on
def test_a_forked_process_starts_a_worker_of_its_own() -> None:
    assert same(r"\sqrt{8}", r"2\sqrt{2}", "math")
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_compare_in_child, args=(answers,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == (True, False)
    assert same(r"\sqrt{12}", r"2\sqrt{3}", "math")  # and the parent's is as it was


def _compare_in_child(answers: "multiprocessing.SimpleQueue[tuple[bool, bool]]") -> None:
    assert all(worker._worker is None for worker in symbolic.COMPARISON._workers)
    answers.put((same(r"\sqrt{50}", r"5\sqrt{2}", "math"), same(r"\sqrt{50}", r"5\sqrt{3}", "math")))


def test_a_worker_that_cannot_start_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    program = tmp_path / "worker.py"
    program.write_text("import a_package_that_is_not_there\n", encoding="utf-8")
    monkeypatch.setattr(symbolic, "_WORKER", program)
    with pytest.raises(MissingDependency, match="metamathqa needs math-verify"):
        SymbolicComparison().equal("x", "x")
    program.write_text("import time\ntime.sleep(60)\n", encoding="utf-8")
    with pytest.raises(TetherError, match=r"did not start within 0\.2 s"):
        SymbolicComparison(start_seconds=0.2).equal("x", "x")


HOSTILE = [
    "9**9**9**9", "9^9^9^9", "10^{10^{10}}", "((5!)!)!", "\\frac{" * 20_000, "(" * 100_000, "(" * 450 + "1" + ")" * 450, "[" * 400 + "]" * 400,
    "1" * 100_000, "9" * 900 + "/7", "1," * 400 + "1", ";".join([r"\sqrt{2}x"] * 90), "$" * 999, r"\boxed{" * 140, "=" * 900, "x=" * 400 + "5",
    r"\pm" * 200, r"(1,2)\cup" * 90 + "(1,2)", r"\begin{pmatrix}" * 60, "0.\\overline{" + "9" * 900 + "}", "\x00\x01", "\ud800", "-" * 900 + "1",
    r"\text{" * 150, "1e9999999", "__import__('os').abort()",
]  # fmt: skip


@pytest.mark.parametrize("gold", ["5", "x+1", r"\{1,2\}"])
def test_no_answer_can_hang_or_crash_the_comparison(gold: str) -> None:
    for answer in HOSTILE:
        assert not same(gold, answer, "math"), answer[:40]
        assert not same(answer, gold, "math"), answer[:40]
