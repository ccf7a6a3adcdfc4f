"""Ctrl-C while arrays change hands: noted at first, delivered afterwards."""

import signal

import pytest

from fdg.running.interrupts import DelayedInterrupt


@pytest.fixture(autouse=True)
def _as_python_starts():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_is_delivered_on_leaving():
    done = []
    with pytest.raises(KeyboardInterrupt), DelayedInterrupt() as held:
        assert not held.is_pending()
        signal.raise_signal(signal.SIGINT)
        assert held.is_pending()
        done.append("the rest")
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_is_delivered_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), DelayedInterrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert not done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_is_not_hidden_by_it():
    with pytest.raises(ValueError, match="ours"), DelayedInterrupt():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("ours")


def test_what_python_does_not_handle_stays_so():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with DelayedInterrupt() as held:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
    assert not held.is_pending()
