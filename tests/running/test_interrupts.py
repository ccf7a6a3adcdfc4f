"""Ctrl-C within `DelayedInterrupt`: recorded at first, delivered on exit."""

import signal

import pytest

from fdg.running.interrupts import DelayedInterrupt


@pytest.fixture(autouse=True)
def _default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_first_interrupt_is_delivered_on_exit():
    done = []
    with pytest.raises(KeyboardInterrupt), DelayedInterrupt() as held:
        assert not held.is_pending()
        signal.raise_signal(signal.SIGINT)
        assert held.is_pending()
        done.append("the rest")
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_is_delivered_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), DelayedInterrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert not done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_error_is_not_hidden_by_an_interrupt():
    with pytest.raises(ValueError, match="ours"), DelayedInterrupt():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("ours")


def test_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with DelayedInterrupt() as held:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
    assert not held.is_pending()
