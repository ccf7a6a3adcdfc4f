"""Print constraints.txt: the exact versions that the ranges in pyproject.toml resolve to, for every extra.

Run by `make lock`; with `--only EXTRA`, for that extra alone: constraints-newest.txt. Each extra is resolved
by pip in a throwaway environment that installs nothing.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ACCELERATORS = ("cuda", "tpu")


def resolve(pip: str, requirements: list[str], pinned: dict[str, str]) -> dict[str, str]:
    """Versions of `requirements` and of all they need, keeping to those already `pinned`."""
    with tempfile.TemporaryDirectory() as scratch:
        constraints, report = Path(scratch, "constraints.txt"), Path(scratch, "report.json")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pinned.items()))
        flags = [
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--report",
            str(report),
            "-c",
            str(constraints),
        ]
        subprocess.run([pip, "install", *flags, *requirements], check=True, stdout=sys.stderr)
        installs = json.loads(report.read_text())["install"]
    packages = [install["metadata"] for install in installs]
    return {re.sub(r"[-_.]+", "-", package["name"]).lower(): package["version"] for package in packages}


def main() -> None:
    """Resolve all but the accelerators' own packages first, which must then agree with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="EXTRA", choices=EXTRAS, help="resolve no other extra")
    only = parser.parse_args().only
    chosen = [only] if only else EXTRAS
    everything = [line for extra in chosen if extra not in ACCELERATORS for line in EXTRAS[extra]]
    others = [line for line in everything if not line.startswith(f"{PROJECT['name']}[")]  # extras of extras
    with tempfile.TemporaryDirectory() as environment:
        venv.create(environment, with_pip=True)
        pip = str(Path(environment, "bin", "pip"))
        subprocess.run([pip, "install", "--quiet", "--upgrade", "pip"], check=True, stdout=sys.stderr)
        core = resolve(pip, PROJECT["dependencies"] + others, {})
        extras = {extra: resolve(pip, EXTRAS[extra], core) for extra in ACCELERATORS if extra in chosen}
    python = ".".join(map(str, sys.version_info[:2]))
    print(f"# The versions that were tested together (resolved on Python {python}); written by `make lock`.")
    for title, pins in {f"runtime and {only or 'dev'}": core, **extras}.items():
        print(f"\n# {title}")
        for name in sorted(pins):
            if pins is core or name not in core:
                print(f"{name}=={pins[name]}")


if __name__ == "__main__":
    main()
