"""A built wheel trains outside the checkout, without access to it."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

# One process prints where each package was imported from, and trains.
_TRAINS = """
import sys, fdg, policies, algos, envs, fdg.__main__
print([module.__file__ for module in (fdg, policies, algos, envs)])
sys.exit(fdg.__main__.main(sys.argv[1:]))
"""


def _libraries():
    """Folders of installed packages; a checkout added by a `.pth` file is excluded."""
    return [path for path in sys.path if path.endswith("site-packages")] or [sysconfig.get_path("purelib")]


def test_wheel_trains(tmp_path):
    """Unpacks the wheel and uses this environment's libraries without fdg: `-S` skips `.pth` files.

    `python -m tools.empty_environment` tests a full installation.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

    def run(*words, cwd=tmp_path):
        done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2_000:]
        return done.stdout

    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), cwd=ROOT)
    (wheel,) = tmp_path.glob("fdg-*.whl")
    packages = tmp_path / "packages"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(packages)
    environment["PYTHONPATH"] = os.pathsep.join([str(packages), *_libraries()])

    flags = "train --algo a2c --env probe:value --hidden 4 --total-steps 320 --eval-episodes 0".split()
    flags += ["--devices", "1", "--out", "run"]
    printed = run(sys.executable, "-S", "-P", "-c", _TRAINS, *flags)
    assert printed.splitlines()[0].count(str(packages)) == 4, printed
    assert (tmp_path / "run" / "summary.json").is_file()
    assert (tmp_path / "run" / "learning_curve.png").is_file()
    assert (packages / "fdg" / "py.typed").is_file()
    (points,) = packages.glob("fdg-*.dist-info/entry_points.txt")
    assert "fdg = fdg.__main__:command" in points.read_text()
    assert "[fdg.commands]\ncodesign = envs.codesign.command:main" in points.read_text()
    assert (packages / "envs" / "codesign" / "workloads" / "w1.toml").is_file()
    assert not (packages / "tests").exists()
