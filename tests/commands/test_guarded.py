"""How `guarded` reports errors of commands, without running a command."""

import os
import subprocess
import sys
import warnings

import jax
import pytest

from fdg.commands.cli import guarded
from fdg.errors import FdgError, FdgWarning, HostError


def line_of(error, capsys, status=2):
    def run(argv):
        raise error

    assert guarded(run, []) == status
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    return message.removeprefix("error: ").rstrip("\n")


def test_out_of_memory(capsys):
    fix = ": use a smaller batch, or more devices"
    lost = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 7 bytes\nwhere they\nwere needed")
    assert line_of(lost, capsys) == f"out of memory (RESOURCE_EXHAUSTED: 7 bytes){fix}"
    assert line_of(MemoryError("of the host\nhere"), capsys) == f"out of memory (of the host){fix}"
    assert line_of(MemoryError(), capsys) == f"out of memory (no memory){fix}"


def test_jax_without_devices(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "gpuu")
    code = "import jax, fdg.commands.cli as cli; raise SystemExit(cli.guarded(lambda _: jax.devices(), []))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert "JAX finds no devices (RuntimeError: Unable to initialize backend 'gpuu'" in done.stderr
    assert "set JAX_PLATFORMS=cpu for CPUs" in done.stderr


def test_warnings_are_escaped(capsys):
    def run(argv):
        warnings.warn("a\x1b[2Jb\n  c", FdgWarning, stacklevel=2)
        return 0

    assert guarded(run, []) == 0 and capsys.readouterr().err == "warning: a\\x1b[2Jb\n  c\n"


def test_long_errors_are_cut_in_the_middle(capsys):
    longest = "begin" + "x" * 990 + "later"
    assert line_of(FdgError(longest), capsys) == longest  # 1000 characters
    cut = line_of(FdgError(f"begin{'x' * 2000}: the fix"), capsys)
    assert len(cut) == 1005 and cut.startswith("beginx") and cut.endswith("x: the fix") and " ... " in cut


def test_file_errors(capsys):
    assert (
        line_of(PermissionError(13, "Permission denied", "/there"), capsys, 1) == "/there: Permission denied"
    )
    full = "No space left on device"
    assert line_of(OSError(28, full), capsys, 1) == f"standard output: {full}"
    assert line_of(OSError(5, "Input/output error"), capsys, 1) == "Input/output error"


def test_lost_output_is_an_error(monkeypatch, capsys):
    """As in `fdg compare A B > /dev/full`, whose output is written when the process ends."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    out = open(descriptor, "w", closefd=False)  # noqa: SIM115 closing it raises the error again
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert guarded(lambda _: print("a table") or 0, []) == 1
    assert capsys.readouterr().err == "error: standard output: No space left on device\n"
    with pytest.raises(OSError, match="No space left"):
        out.close()
    os.close(descriptor)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (FdgError("no\nsuch thing"), 2, "error: no\\nsuch thing\n"),
        (HostError("step raised"), 1, "error: step raised\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(0), 0, ""),
        (SystemExit(3), 3, ""),
        (SystemExit(None), 0, ""),
    ],
)
def test_error_line_and_status(error, status, message, capsys):
    def fail(*_, **__):
        raise error

    before = list(sys.path)
    assert guarded(fail, []) == status
    assert capsys.readouterr().err == message and sys.path == before


def test_broken_pipe_is_no_error(monkeypatch, tmp_path):
    """As in `python -m fdg.plan | head -1`: the status is that of a process ended by SIGPIPE."""

    def say(*_, **__):
        raise BrokenPipeError

    with open(tmp_path / "out", "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert guarded(say, []) == 141


def test_removed_current_folder(capsys, monkeypatch):
    def gone():
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    line = line_of(AssertionError("not reached"), capsys)
    assert line == "the current folder cannot be used (No such file or directory): change to another folder"
