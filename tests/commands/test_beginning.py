"""How a command's process begins: with closed streams, and in a folder whose files are named as libraries.

`fdg.process_exit` alone is imported, not JAX, in processes that look like a command's.
"""

import os
import subprocess
import sys
import types

import pytest

import fdg
from fdg import process_exit

BEGIN = f"""
import os, sys, types
fdg = types.ModuleType("fdg")
fdg.__path__ = [{os.path.dirname(fdg.__file__)!r}]
sys.modules["fdg"] = fdg
sys.orig_argv = ["python", "-m", "fdg.train"]
sys.path.insert(0, os.getcwd())
import fdg.process_exit
"""


def begin(folder, code, closed=()):
    shell = 'exec "$@" ' + " ".join(f"{number}>&-" for number in closed)
    command = ["sh", "-c", shell, "sh", sys.executable, "-c", BEGIN + code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("closed", [(1,), (1, 2), (0, 1, 2)])
def test_no_file_takes_the_number_of_a_closed_stream(tmp_path, closed):
    code = """
with open("kept", "w") as file:
    print("nobody reads this", flush=True)
    print("nor this", file=sys.stderr, flush=True)
    os.write(1, b"nor what C++ has to say")
    file.write(f"{file.fileno()} {sys.stdout.isatty()} {sys.stdin.read()}")
"""
    done = begin(tmp_path, code, closed)
    assert done.returncode == 0 and done.stdout == ""
    assert (tmp_path / "kept").read_text() == "3 False "


@pytest.mark.parametrize(
    ("name", "content", "code", "said"),
    [
        ("wave.py", "", "import wave; wave.open(3)", "hides Python's own module 'wave' (AttributeError: "),
        ("jax.py", "", "import jax.extend", "hides the installed package 'jax' (ModuleNotFoundError: "),
        ("optax.py", "1 / 0", "import optax", "hides the installed package 'optax' (ZeroDivisionError: "),
        ("numpy/__init__.py", "", "import numpy; numpy.zeros", "hides the installed package 'numpy'"),
    ],
)
def test_a_file_named_as_a_library_is_one_line(tmp_path, name, content, code, said):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    done = begin(tmp_path, code)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {path} {said}") and "rename it" in done.stderr


def test_what_has_a_name_of_its_own_fails_as_it_did(tmp_path):
    (tmp_path / "mine.py").write_text("1 / 0")
    done = begin(tmp_path, "import mine")
    assert done.returncode == 1 and done.stderr.startswith("Traceback") and "ZeroDivision" in done.stderr


def test_an_ended_loop_of_orbax_is_no_news(monkeypatch):
    heard = []
    monkeypatch.setattr(sys, "__unraisablehook__", heard.append)
    for text in ("Event loop is closed", "something else"):
        process_exit._unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(text)))
    assert [str(one.exc_value) for one in heard] == ["something else"]
