"""Ctrl-C within `delayed_interrupt`: recorded at first, delivered on exit."""

import signal

import pytest

from fdg.running.interrupts import delayed_interrupt


@pytest.fixture(autouse=True)
def _default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_first_interrupt_is_delivered_on_exit():
    done = []
    with pytest.raises(KeyboardInterrupt), delayed_interrupt() as is_interrupted:
        assert not is_interrupted()
        signal.raise_signal(signal.SIGINT)
        assert is_interrupted()
        done.append("the rest")
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_is_delivered_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), delayed_interrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert not done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_error_is_not_hidden_by_an_interrupt():
    with pytest.raises(ValueError, match="ours"), delayed_interrupt():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("ours")


def test_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with delayed_interrupt() as is_interrupted:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
    assert not is_interrupted()
