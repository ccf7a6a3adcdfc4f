"""Value-decomposition networks, VDN (Sunehag et al. 2018, "Value-Decomposition Networks For Cooperative
Multi-Agent Learning Based On Team Reward", arXiv 1706.05296).

`algos/value_decomposition.py` where what agents do together is worth the sum of what each does.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from algos.value_decomposition import ValueDecomposition


@dataclasses.dataclass(frozen=True)
class VDN(ValueDecomposition):
    """VDN for discrete actions of several agents, feed-forward or recurrent (`memory`).

    Raises:
      FdgError: (construction) a field out of range, sizes that do not divide, an environment of one agent.

    >>> import envs
    >>> VDN(env=envs.make("probe:agents")).steps_per_iteration
    256
    """

    presets_of: ClassVar[str] = "VDN"

    def _mixed(self, mixer, values: jax.Array, observation) -> jax.Array:
        """The sum (the paper's section 3, "the joint action-value function")."""
        return jnp.sum(values, axis=-1)
