"""How commands end: without Python's teardown, and quietly if their output is closed."""

import os
import subprocess
import sys

MODULE = """
import atexit, sys

class Remains:
    def __del__(self, write=sys.stderr.write):
        write("torn down\\n")

sys.remains = Remains()
atexit.register(lambda: print("what is registered runs"))
from tests.tiny import Pupil
"""


def run(tmp_path, *words):
    (tmp_path / "own.py").write_text(MODULE)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)


def test_command_skips_interpreter_teardown(tmp_path):
    done = run(tmp_path, "-m", "fdg", "plan", "--algo", "own:Pupil", "--num-envs", "4", "--devices", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("what is registered runs\n") and "Pupil" in done.stdout
    failed = run(tmp_path, "-m", "fdg.plan", "--algo", "own:Pupil", "--num-envs", "4", "--devices", "0")
    assert failed.returncode == 2 and failed.stderr.startswith("error: ") and failed.stderr.count("\n") == 1


def test_closed_pipe_ends_commands_quietly():
    """With buffered and unbuffered output, for a closed standard output and standard error."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    reader, writer = os.pipe()
    os.close(reader)
    started = [
        subprocess.Popen(
            [sys.executable, *words],
            env=environment,
            stdout=subprocess.PIPE if "nonsense" in words else writer,
            stderr=writer if "nonsense" in words else subprocess.PIPE,
            text=True,
        )
        for words in (
            ["-m", "fdg", "--help"],
            ["-u", "-m", "fdg", "nonsense"],
            ["-u", "-m", "fdg", "--help"],
        )
    ]
    os.close(writer)
    for process in started:
        out, err = process.communicate(timeout=120)
        assert not out and not err and process.returncode in (0, 2, 141), (process.args, err)
