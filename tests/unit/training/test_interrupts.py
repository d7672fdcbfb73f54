"""Ctrl-C waits for the end of a shielded section, however deep; a second one does not wait; and the old handler comes back."""

import signal
import threading

import pytest

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


# Several ranks: a signal waits for a place where the ranks can tell each other.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
