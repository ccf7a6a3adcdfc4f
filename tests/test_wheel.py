"""A built wheel installs, and trains, outside the checkout, with nothing of the checkout in reach."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent

# One process for all: what was imported from where, and a training.
_TRAINS = """
import sys, fdg, policies, algos, envs, fdg.__main__
print([module.__file__ for module in (fdg, policies, algos, envs)])
sys.exit(fdg.__main__.main(sys.argv[1:]))
"""


def test_a_wheel_trains_in_an_environment_of_its_own(tmp_path):
    """The environment finds this one's libraries, but for fdg: by a path, which reads no `.pth` of theirs.

    `python -m tools.empty_environment` installs the libraries too.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

    def run(*words, cwd=tmp_path):
        done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2_000:]
        return done.stdout

    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), cwd=ROOT)
    (wheel,) = tmp_path.glob("fdg-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", "env")
    python = tmp_path / "env" / "bin" / "python"
    install = ("install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", str(wheel))
    run(sys.executable, "-m", "pip", "--python", str(python), *install)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")

    flags = "train --algo a2c --total-steps 320 --eval-episodes 0 --devices 1 --out run".split()
    printed = run(str(python), "-P", "-c", _TRAINS, *flags)
    assert printed.splitlines()[0].count(str(packages)) == 4, printed
    assert (tmp_path / "run" / "summary.json").is_file()
    assert (tmp_path / "run" / "learning_curve.png").is_file()
    assert (tmp_path / "env" / "bin" / "fdg").is_file()
    assert (packages / "fdg" / "py.typed").is_file()
    (points,) = packages.glob("fdg-*.dist-info/entry_points.txt")
    assert "[fdg.commands]\ncodesign = envs.codesign.command:main" in points.read_text()
    assert (packages / "envs" / "codesign" / "workloads" / "w1.toml").is_file()
    assert not (packages / "tests").exists()
