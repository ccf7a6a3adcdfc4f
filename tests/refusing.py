"""Calls and commands that refuse what they are given, as a user's mistake: in one line."""

import contextlib

import pytest

from fdg.errors import FdgError


@contextlib.contextmanager
def refuses(*words, match=None, kind=FdgError):
    """What is done within has to fail, in one line that has these words, and `match`, a pattern."""
    with pytest.raises(kind, match=match) as caught:
        yield
    said = str(caught.value)
    assert "\n" not in said, said
    for word in words:
        assert word in said, said


def refused(capsys, words, command):
    """Runs a command that has to fail: the line that it says."""
    capsys.readouterr()
    assert command(words.split() if isinstance(words, str) else words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said.strip()
