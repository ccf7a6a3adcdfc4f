"""The trainers that fdg is compared with (peers): their packages, sources and environments."""

import dataclasses
import subprocess
import sys
from pathlib import Path

from bench.harness import ROOT

VENVS = ROOT / "build" / "venvs"
_CONSTRAINTS = ROOT / "constraints.txt"


@dataclasses.dataclass(frozen=True)
class Peer:
    """A trainer that fdg is compared with.

    Attributes:
      name: the peer's name; `build/venvs/NAME` is its environment.
      packages: packages for pip, with a pinned version of the peer.
      source: its repository.
      is_checkout: whether a flag must name a checkout, because no package registry has the peer.
      with_our_versions: whether to install JAX and others in the versions of `constraints.txt`, so that both
        sides have the same compiler.
    """

    name: str
    packages: tuple[str, ...]
    source: str
    is_checkout: bool = False
    with_our_versions: bool = True

    @property
    def python(self) -> Path:
        return VENVS / self.name / "bin" / "python"

    def install(self) -> None:
        """Makes the peer's environment, unless there is one with these packages.

        Raises:
          subprocess.CalledProcessError: pip failed.
        """
        stamp = VENVS / self.name / "installed"
        packages = "\n".join(self.packages)
        if stamp.exists() and stamp.read_text() == packages:
            return
        print(f"installing {self.name}: {' '.join(self.packages)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", VENVS / self.name], check=True)
        constraints = ["-c", _CONSTRAINTS] if self.with_our_versions else []
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *constraints, *self.packages], check=True)
        stamp.write_text(packages)


_JAX_PACKAGES = ("jax", "flax", "optax", "six")
_SCRIPT_PACKAGES = (*_JAX_PACKAGES, "hydra-core", "omegaconf", "wandb", "safetensors", "matplotlib", "chex")

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "purejaxrl",
            (*_JAX_PACKAGES, "gymnax==1.0.1", "distrax", "brax", "navix"),
            "github.com/luchris429/purejaxrl",
            is_checkout=True,
        ),
        Peer(
            "purejaxql", (*_SCRIPT_PACKAGES, "gymnax==1.0.1"), "github.com/mttga/purejaxql", is_checkout=True
        ),
        Peer(
            "jaxmarl",
            (*_SCRIPT_PACKAGES, "jaxmarl", "distrax"),
            "github.com/FLAIROX/JaxMARL",
            is_checkout=True,
        ),
        Peer("brax", (*_JAX_PACKAGES, "brax"), "github.com/google/brax"),
        Peer("rejax", (*_JAX_PACKAGES, "rejax==0.1.3", "gymnax==1.0.1"), "github.com/keraJLi/rejax"),
        Peer("sbx", ("sbx-rl==0.28.0",), "github.com/araffin/sbx", with_our_versions=False),
        Peer(
            "stable-baselines3",
            ("stable-baselines3==2.9.2",),
            "github.com/DLR-RM/stable-baselines3",
            with_our_versions=False,
        ),
        Peer(
            "rllib",
            ("ray[rllib]==2.60.0", "torch", "gymnasium"),
            "github.com/ray-project/ray",
            with_our_versions=False,
        ),
        Peer(
            "sample-factory",
            ("sample-factory==2.1.1",),
            "github.com/alex-petrenko/sample-factory",
            with_our_versions=False,
        ),
    )
}
