"""A replacement for the Python executable of child processes."""

import sys

import pytest


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Writes a shell script that replaces `sys.executable`; `$last` is its last argument."""
    path = tmp_path / "python"

    def write(script):
        path.write_text(f"#!/bin/sh\nfor word; do last=$word; done\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return write
