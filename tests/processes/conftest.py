"""What processes are started with, in place of Python."""

import sys

import pytest


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Takes a script of a shell, which the launcher starts as Python; `$last` is its last word."""
    path = tmp_path / "python"

    def write(script):
        path.write_text(f"#!/bin/sh\nfor word; do last=$word; done\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return write
