"""How a command ends: its exit status, and what it says."""

import sys

import pytest

from fdg.commands import cli
from fdg.errors import FdgError, HostError


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (FdgError("no\nsuch thing"), 2, "error: no\\nsuch thing\n"),
        (HostError("step raised"), 1, "error: step raised\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(0), 0, ""),
        (SystemExit(3), 3, ""),
        (SystemExit(None), 0, ""),
    ],
)
def test_what_a_user_can_mend_is_a_line_and_a_status(error, status, said, capsys):
    def fail(*_, **__):
        raise error

    before = list(sys.path)
    assert cli.guarded(fail, []) == status
    assert capsys.readouterr().err == said and sys.path == before


def test_a_reader_that_has_enough_is_no_error(monkeypatch, tmp_path):
    """As in `python -m fdg.plan | head -1`: the status is that of a process ended by SIGPIPE."""

    def say(*_, **__):
        raise BrokenPipeError

    with open(tmp_path / "out", "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert cli.guarded(say, []) == 141
