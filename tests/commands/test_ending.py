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


def end(tmp_path, *words):
    (tmp_path / "own.py").write_text(MODULE)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)


def test_a_command_is_left_without_the_teardown_in_which_threads_abort_it(tmp_path):
    done = end(tmp_path, "-m", "fdg", "plan", "--algo", "own:Pupil", "--num-envs", "4", "--devices", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("what is registered runs\n") and "Pupil" in done.stdout
    failed = end(tmp_path, "-m", "fdg.plan", "--algo", "own:Pupil", "--num-envs", "4", "--devices", "0")
    assert failed.returncode == 2 and failed.stderr.startswith("error: ") and failed.stderr.count("\n") == 1


def test_other_programs_end_as_they_would(tmp_path):
    done = end(tmp_path, "-c", "import fdg, own; from fdg.ending import ends_with; ends_with(3)")
    assert (done.returncode, done.stdout) == (0, "what is registered runs\n")
    assert done.stderr == "torn down\n"
