"""Assert that calls and commands fail with a one-line error message."""

import contextlib

import pytest

from fdg.errors import FdgError


@contextlib.contextmanager
def refuses(*words, match=None, kind=FdgError):
    """The block must raise `kind` with a one-line message that has all `words` and matches `match`."""
    with pytest.raises(kind, match=match) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message, message
    for word in words:
        assert word in message, message


def refused(capsys, words, command):
    """Runs a command that must fail, and returns its error line."""
    capsys.readouterr()
    assert command(words.split() if isinstance(words, str) else words) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1, message
    return message.strip()
