"""Tests the wheel in an empty environment: builds, installs, trains and evaluates.

    python -m tools.empty_environment            # some minutes: every library is installed
    python -m tools.empty_environment --extras gymnasium,onnx

`tests/test_wheel.py` is a quicker test, which uses the libraries of the current environment.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.harness import ROOT, parser

_PRINT_LOCATIONS = (
    "import fdg, policies, algos, envs; print(*(m.__file__ for m in (fdg, policies, algos, envs)), sep='\\n')"
)


def main() -> None:
    command = parser("tools.empty_environment", __doc__)
    command.add_argument("--extras", default="", help="extras of pyproject.toml, separated by commas")
    extras = command.parse_args().extras
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*arguments: str, cwd: Path) -> None:
        print("$", *arguments, flush=True)
        subprocess.run(arguments, cwd=cwd, env=environment, check=True)

    with tempfile.TemporaryDirectory(prefix="fdg-wheel-") as scratch:
        folder = Path(scratch)
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch, cwd=ROOT)
        (wheel,) = folder.glob("fdg-*.whl")
        run(sys.executable, "-m", "venv", "env", cwd=folder)
        python = str(folder / "env" / "bin" / "python")
        package = f"{wheel}[{extras}]" if extras else str(wheel)
        run(python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), package, cwd=folder)
        run(python, "-c", _PRINT_LOCATIONS, cwd=folder)
        train = "train --total-steps 20480 --devices 1 --out run".split()
        run(str(folder / "env" / "bin" / "fdg"), *train, cwd=folder)
        run(str(folder / "env" / "bin" / "fdg"), "evaluate", "run", "--episodes", "8", cwd=folder)


if __name__ == "__main__":
    main()
