"""Prints constraints.txt: the versions to which pip resolves the ranges in pyproject.toml, for all extras.

`make lock` runs this; `--only EXTRA` resolves one extra, for constraints-newest.txt. The packages of `cuda`
and `tpu` are resolved last, with the other versions fixed. pip installs nothing.
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
    """Versions of `requirements` and their dependencies, by normalised name; `pinned` versions are kept."""
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
    """Resolves everything but the packages for accelerators, then these; prints all versions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="EXTRA", choices=EXTRAS, help="resolve this extra alone")
    only = parser.parse_args().only
    chosen = [only] if only else EXTRAS
    requirements = [line for extra in chosen if extra not in ACCELERATORS for line in EXTRAS[extra]]
    # Leaves out `fdg[...]`, by which an extra includes others.
    third_party = [line for line in requirements if not line.startswith(f"{PROJECT['name']}[")]
    with tempfile.TemporaryDirectory() as environment:
        venv.create(environment, with_pip=True)
        pip = str(Path(environment, "bin", "pip"))
        subprocess.run([pip, "install", "--quiet", "--upgrade", "pip"], check=True, stdout=sys.stderr)
        core = resolve(pip, PROJECT["dependencies"] + third_party, {})
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
