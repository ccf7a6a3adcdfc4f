"""A built wheel in an empty environment: installs it with all that it needs, and trains, away from here.

    python -m tools.empty_environment            # some minutes: every library is installed
    python -m tools.empty_environment --extras gymnasium,onnx

`tests/test_wheel.py` is the quick form, which borrows the libraries.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
_WHERE = (
    "import fdg, policies, algos, envs; print(*(m.__file__ for m in (fdg, policies, algos, envs)), sep='\\n')"
)


def main() -> None:
    """Raises where a step fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--extras", default="", help="of pyproject.toml, separated by commas")
    extras = parser.parse_args().extras
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*words: str, cwd: Path) -> None:
        print("$", *words, flush=True)
        subprocess.run(words, cwd=cwd, env=environment, check=True)

    with tempfile.TemporaryDirectory(prefix="fdg-wheel-") as made:
        folder = Path(made)
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", made, cwd=ROOT)
        (wheel,) = folder.glob("fdg-*.whl")
        run(sys.executable, "-m", "venv", "env", cwd=folder)
        python = str(folder / "env" / "bin" / "python")
        asked = f"{wheel}[{extras}]" if extras else str(wheel)
        run(python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), asked, cwd=folder)
        run(python, "-c", _WHERE, cwd=folder)
        train = "train --total-steps 20480 --devices 1 --out run".split()
        run(str(folder / "env" / "bin" / "fdg"), *train, cwd=folder)
        run(str(folder / "env" / "bin" / "fdg"), "evaluate", "run", "--episodes", "8", cwd=folder)


if __name__ == "__main__":
    main()
