"""Start of a command's process: closed streams, and files that shadow libraries.

The subprocesses look like a command's, and import only `fdg.process_exit`, not JAX.
"""

import os
import subprocess
import sys
import types

import pytest

import fdg
from fdg import process_exit

PRELUDE = f"""
import os, sys, types
fdg = types.ModuleType("fdg")
fdg.__path__ = [{os.path.dirname(fdg.__file__)!r}]
sys.modules["fdg"] = fdg
sys.orig_argv, sys.argv = ["python", "-m", "fdg.train"], ["-m"]
sys.path.insert(0, os.getcwd())
import fdg.process_exit
"""


def run_process(folder, code, closed=()):
    shell = 'exec "$@" ' + " ".join(f"{number}>&-" for number in closed)
    command = ["sh", "-c", shell, "sh", sys.executable, "-c", PRELUDE + code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("words", "expected"),  # the arguments of the module or script are after |
    [
        ("-m fdg.train | --algo a2c", True),
        ("-um fdg.train", True),  # other flags before -m, in one word with it
        ("-OIm fdg", True),
        ("-X dev -umfdg.plan", True),
        ("-Wm train.py", False),  # the value of -W
        ("-m pytest | -m fdg.train", False),
        ("train.py | -m fdg.train", False),
        ("-c pass | -m fdg.train", False),
        ("-um fdgs.train", False),
    ],
)
def test_is_command(words, expected, monkeypatch):
    options, arguments = (part.split() for part in f"{words} |".split("|")[:2])
    monkeypatch.setattr(sys, "orig_argv", ["python", *options, *arguments])
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    assert process_exit.is_command() == expected


@pytest.mark.parametrize("closed", [(1,), (1, 2), (0, 1, 2)])
def test_closed_streams_are_replaced(tmp_path, closed):
    code = """
with open("kept", "w") as file:
    print("nobody reads this", flush=True)
    print("nor this", file=sys.stderr, flush=True)
    os.write(1, b"nor what C++ has to say")
    file.write(f"{file.fileno()} {sys.stdout.isatty()} {sys.stdin.read()}")
"""
    done = run_process(tmp_path, code, closed)
    assert done.returncode == 0 and done.stdout == ""
    assert (tmp_path / "kept").read_text() == "3 False "


@pytest.mark.parametrize(
    ("name", "content", "code", "message"),
    [
        ("wave.py", "", "import wave; wave.open(3)", "hides Python's own module 'wave' (AttributeError: "),
        ("jax.py", "", "import jax.extend", "hides the installed package 'jax' (ModuleNotFoundError: "),
        ("optax.py", "1 / 0", "import optax", "hides the installed package 'optax' (ZeroDivisionError: "),
        ("numpy/__init__.py", "", "import numpy; numpy.zeros", "hides the installed package 'numpy'"),
    ],
)
def test_shadowing_file_is_a_one_line_error(tmp_path, name, content, code, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    done = run_process(tmp_path, code)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {path} {message}") and "rename it" in done.stderr


def test_other_errors_keep_their_traceback(tmp_path):
    (tmp_path / "mine.py").write_text("1 / 0")
    done = run_process(tmp_path, "import mine")
    assert done.returncode == 1 and done.stderr.startswith("Traceback") and "ZeroDivision" in done.stderr


def test_closed_event_loop_of_orbax_is_not_reported(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "__unraisablehook__", reported.append)
    for text in ("Event loop is closed", "something else"):
        process_exit._unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(text)))
    assert [str(one.exc_value) for one in reported] == ["something else"]
