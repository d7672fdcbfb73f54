"""Ctrl-C waits for the end of a shielded section, however deep; a second one does not wait; and the old handler comes back."""

import signal
import threading
import time

import pytest

from tether.core.errors import BadInput
from tether.training.interrupts import Interrupts


def _press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_outside_a_shield_it_is_raised_at_once() -> None:
    done: list[str] = []

    def work() -> None:
        _press()
        done.append("after")

    with Interrupts().listening(), pytest.raises(KeyboardInterrupt):
        work()
    assert done == []


def test_a_shield_holds_it_back_until_its_end() -> None:
    interrupts, done = Interrupts(), []

    def work() -> None:
        with interrupts.shield():
            _press()
            done.append("inside")
        done.append("after")

    with interrupts.listening(), pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inside"]


def test_the_outermost_shield_decides() -> None:
    interrupts, done = Interrupts(), []

    def work() -> None:
        with interrupts.shield():
            with interrupts.shield():
                _press()
            done.append("between")
        done.append("after")

    with interrupts.listening(), pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["between"]


def test_the_second_one_does_not_wait() -> None:
    interrupts, done = Interrupts(), []

    def work() -> None:
        with interrupts.shield():
            _press()
            done.append("first")
            _press()
            done.append("second")

    with interrupts.listening(), pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["first"]


def test_a_shield_without_interrupt_does_nothing() -> None:
    interrupts = Interrupts()
    with interrupts.listening():
        for _ in range(3):
            with interrupts.shield():
                pass


def test_once_raised_it_is_over() -> None:
    interrupts = Interrupts()
    with interrupts.listening():
        with pytest.raises(KeyboardInterrupt), interrupts.shield():
            _press()
        with interrupts.shield():
            pass


def test_the_earlier_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts().listening():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_listens_to_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with Interrupts().listening():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


# SIGTERM and SIGHUP: like Ctrl-C, but once, and with a time by which everything ends.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_every_signal_to_stop_is_raised_and_held_back_alike(number: int, code: int) -> None:
    interrupts, done = Interrupts(), []
    assert interrupts.received is None

    def work() -> None:
        with interrupts.shield():
            signal.raise_signal(number)
            done.append("inside")
        done.append("after")

    with interrupts.listening(), pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inside"] and interrupts.received == number and interrupts.exit_code == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_scheduler_may_repeat_itself(number: int) -> None:
    interrupts, done = Interrupts(), []

    def work() -> None:
        with interrupts.shield():
            signal.raise_signal(number)
            signal.raise_signal(number)
            done.append("inside")

    with interrupts.listening():
        with pytest.raises(KeyboardInterrupt):
            work()
        signal.raise_signal(signal.SIGTERM)  # while the checkpoint is written
        done.append("saved")
        with pytest.raises(KeyboardInterrupt):
            _press()  # somebody at the keyboard does not want to wait
    assert done == ["inside", "saved"]


def test_what_takes_longer_than_the_grace_time_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_GRACE", "0.05")
    interrupts, done = Interrupts(), []

    def wait() -> None:
        with interrupts.shield():
            signal.raise_signal(signal.SIGTERM)
            done.append("held back")
            time.sleep(20)
            done.append("never")

    with interrupts.listening(), pytest.raises(KeyboardInterrupt):
        wait()
    assert done == ["held back"]
    time.sleep(0.1)  # and nothing comes afterwards


def test_the_grace_time_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_GRACE", "0.05")
    interrupts = Interrupts()
    with interrupts.listening(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    time.sleep(0.1)  # a signal now would end the tests


@pytest.mark.parametrize("said", ["soon", "-1", "0", "nan", "inf", "1e300"])
def test_a_grace_time_that_is_none(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_GRACE", said)
    with pytest.raises(BadInput, match=rf"TETHER_GRACE is '{said}'; give seconds"), Interrupts().listening():
        pass


def test_nohup_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts().listening():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_console_that_is_gone_stops_the_run(in_thread: bool) -> None:
    interrupts, done = Interrupts(), []

    def work() -> None:
        with interrupts.shield():
            if in_thread:
                thread = threading.Thread(target=interrupts.console_closed)
                thread.start()
                thread.join()
            else:
                interrupts.console_closed()
            done.append("inside")

    with interrupts.listening(), pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inside"] and interrupts.exit_code == 141


def test_a_console_that_was_gone_before_stops_the_run_when_it_begins() -> None:
    interrupts = Interrupts()
    interrupts.console_closed()
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupts.listening():
        raise AssertionError("never")
    assert signal.getsignal(signal.SIGTERM) is handler


# Several ranks: a signal waits for a place where the ranks can tell each other.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_of_several_ranks_it_waits_for_work_of_its_own(number: int) -> None:
    interrupts, done = Interrupts(several_ranks=True), []
    with interrupts.listening():
        signal.raise_signal(number)
        with interrupts.shield():
            signal.raise_signal(number)
            with interrupts.interruptible():
                done.append("shielded")
        done.append("between")
        with pytest.raises(KeyboardInterrupt), interrupts.interruptible():
            done.append("never")
    assert done == ["shielded", "between"]


def test_of_several_ranks_it_breaks_off_work_of_its_own() -> None:
    interrupts, done = Interrupts(several_ranks=True), []

    def work() -> None:
        with interrupts.interruptible():
            done.append("inside")
            _press()
            done.append("never")

    with interrupts.listening(), pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inside"]


def test_ranks_that_stop_are_not_interrupted_again() -> None:
    interrupts, done = Interrupts(several_ranks=True), []
    with interrupts.listening():
        with pytest.raises(KeyboardInterrupt), interrupts.interruptible():
            _press()
        interrupts.agreed()
        with interrupts.interruptible():
            _press()
            done.append("saved")
    assert done == ["saved"]


def test_ranks_that_wait_for_each_other_hold_it_back() -> None:
    """Inside work that a rank does alone it is raised at once, but for the parts of it in which the others wait for this rank."""
    interrupts, done = Interrupts(several_ranks=True), []

    def work() -> None:
        with interrupts.interruptible():
            with interrupts.exchanging():
                _press()
                done.append("exchanged")
            done.append("after")

    with interrupts.listening():
        with pytest.raises(KeyboardInterrupt):
            work()
        with interrupts.exchanging():  # outside of such work nothing is raised
            done.append("alone")
    assert done == ["exchanged", "alone"]
