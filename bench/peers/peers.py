"""The peers: what each needs to be installed, and where it comes from."""

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
      name: also of its environment, `build/venvs/NAME`.
      packages: for pip, the peer itself pinned.
      source: the repository; where it is on no registry, a checkout of it is given by a flag.
      is_checkout: whether that is so.
      with_our_versions: install JAX and the like in the versions of `constraints.txt`, so that one compiler
        is compared with itself.
    """

    name: str
    packages: tuple[str, ...]
    source: str
    is_checkout: bool = False
    with_our_versions: bool = True

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return VENVS / self.name / "bin" / "python"

    def install(self) -> None:
        """Makes its environment, unless it is there with these packages.

        Raises:
          subprocess.CalledProcessError: pip could not.
        """
        stamp = VENVS / self.name / "installed"
        wanted = "\n".join(self.packages)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        print(f"installing {self.name}: {' '.join(self.packages)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", VENVS / self.name], check=True)
        constraints = ["-c", _CONSTRAINTS] if self.with_our_versions else []
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *constraints, *self.packages], check=True)
        stamp.write_text(wanted)


_JAX = ("jax", "flax", "optax", "six")
_SCRIPTS = (*_JAX, "hydra-core", "omegaconf", "wandb", "safetensors", "matplotlib", "chex")

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "purejaxrl",
            (*_JAX, "gymnax==1.0.1", "distrax", "brax", "navix"),
            "github.com/luchris429/purejaxrl",
            is_checkout=True,
        ),
        Peer("purejaxql", (*_SCRIPTS, "gymnax==1.0.1"), "github.com/mttga/purejaxql", is_checkout=True),
        Peer("jaxmarl", (*_SCRIPTS, "jaxmarl", "distrax"), "github.com/FLAIROX/JaxMARL", is_checkout=True),
        Peer("brax", (*_JAX, "brax"), "github.com/google/brax"),
        Peer("rejax", (*_JAX, "rejax==0.1.3", "gymnax==1.0.1"), "github.com/keraJLi/rejax"),
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
