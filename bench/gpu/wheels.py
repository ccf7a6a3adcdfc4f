"""What a machine lacks that has JAX, flax, optax, chex, orbax, numpy and pytest, and no registry: wheels.

For Python 3.12 on x86-64. Drawing is not among them (Matplotlib would be as much as a third of all the rest),
nor `lxml`, by which one task of the DM suite writes its model.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path

from fdg.errors import FdgError

MOST = 45 * 2**20  # bytes of all of them
_PYTHON = "3.12"
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17)] + ["manylinux2014_x86_64"]


@dataclasses.dataclass(frozen=True)
class Wheel:
    """One file.

    Attributes:
      name, version: as pip takes them.
      size: its bytes.
      needed_for: what imports it.
    """

    name: str
    version: str
    size: int
    needed_for: str


WHEELS = (
    Wheel("gymnax", "1.0.1", 101_241, "environments"),
    Wheel("gymnasium", "1.3.0", 953_904, "gymnax"),
    Wheel("farama-notifications", "0.0.6", 2_897, "gymnasium"),
    Wheel("cloudpickle", "3.1.2", 22_228, "gymnasium"),
    Wheel("six", "1.17.0", 11_050, "gymnax"),
    Wheel("flashbax", "0.1.3", 82_386, "replay"),
    Wheel("craftax", "1.6.1", 412_033, "environments"),
    Wheel("imageio", "2.38.1", 328_389, "craftax"),
    Wheel("pillow", "13.0.0", 7_144_542, "craftax, brax"),
    Wheel("brax", "0.14.2", 356_878, "environments, a peer"),
    Wheel("jaxopt", "0.8.5", 172_434, "brax"),
    Wheel("ml-collections", "1.1.0", 76_707, "brax"),
    Wheel("mujoco", "4.0.0", 108_599, "brax"),
    Wheel("mujoco-core", "4.0.0", 9_681_493, "brax"),
    Wheel("mujoco-mjx", "3.17.0", 7_257_088, "brax"),
    Wheel("trimesh", "5.2.0", 751_459, "brax"),
    Wheel("playground", "0.2.0", 7_964_958, "the DM suite"),
    Wheel("tqdm", "4.70.1", 80_199, "playground"),
    Wheel("distrax", "0.1.9", 313_467, "PureJaxRL"),
    Wheel("tfp-nightly", "0.26.0.dev20261027", 6_976_929, "distrax"),
    Wheel("decorator", "5.3.1", 10_365, "tfp-nightly"),
    Wheel("dm-tree", "0.1.10", 186_506, "tfp-nightly"),
    Wheel("gast", "0.7.0", 22_966, "tfp-nightly"),
    Wheel("hypothesis", "6.170.15", 1_167_677, "tests"),
    Wheel("sortedcontainers", "2.4.0", 29_575, "hypothesis"),
    Wheel("pytest-xdist", "3.8.0", 46_396, "tests"),
    Wheel("execnet", "2.1.2", 40_708, "pytest-xdist"),
)


def download(folder: Path) -> None:
    """Downloads them all into a folder, without what they depend on, and prints their sizes.

    Raises:
      FdgError: pip cannot, or together they are larger than `MOST`.
    """
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words += ["--only-binary=:all:", "--implementation", "cp", "--python-version", _PYTHON]
    words += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    words += ["--dest", str(folder), *(f"{wheel.name}=={wheel.version}" for wheel in WHEELS)]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise FdgError(f"pip download: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
    files = {_name(path): path.stat().st_size for path in folder.glob("*.whl")}
    for wheel in WHEELS:
        size = files[wheel.name]
        other = "" if size == wheel.size else f"; {wheel.size:,} when it was listed"
        print(f"{size:>12,}  {wheel.name} {wheel.version} ({wheel.needed_for}){other}")
    total = sum(files.values())
    print(f"{total:>12,}  bytes of {len(files)} wheels: {total / 2**20:.1f} MiB")
    if total > MOST:
        raise FdgError(
            f"{folder} has {total / 2**20:.1f} MiB, and {MOST / 2**20:g} are allowed: remove others"
        )


def _name(path: Path) -> str:
    """
    >>> _name(Path("ml_collections-1.1.0-py3-none-any.whl"))
    'ml-collections'
    """
    return path.name.partition("-")[0].replace("_", "-").lower()
