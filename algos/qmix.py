"""QMIX (Rashid et al. 2018, "QMIX: Monotonic Value Function Factorisation for Deep Multi-Agent Reinforcement
Learning", arXiv 1803.11485).

QMIX adds a mixing network to `algos/value_decomposition.py`. It maps agents' values to a joint value, with
weights that depend on all agents' observations. If an agent's value increases, the joint value does not fall.

Shapes: `N` rows, `A` agents, `S` components of a state, `H` units of a mixer.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from algos.networks import of_module
from algos.value_decomposition import ValueDecomposition
from algos.values import Network
from envs import Observation
from fdg.settings.fields import float_or_array, hyperparameter, require, require_positive


@dataclasses.dataclass(frozen=True)
class QMIX(ValueDecomposition, presets="QMIX"):
    """QMIX for discrete actions of several agents, feed-forward or recurrent (`memory`).

    The mixing network's state is the concatenated observations of all agents, `privileged` parts included, as
    for MAPPO's central critic.

    >>> import envs
    >>> QMIX(env=envs.make("probe:agents")).mixer_size
    32
    """

    mixer_size: int = hyperparameter(32, "units of the mixing network's hidden layer")
    hypernetwork: tuple[int, ...] = hyperparameter(
        (64,), "widths of the layers between state and mixing weights; the paper has none: ()"
    )
    mixer_scale: float = hyperparameter(
        1.0, "scale of the hypernetworks' initial weights; if small, initial joint values are near zero"
    )

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "mixer_size", "mixer_scale")
        require(
            self,
            all(width > 0 for width in self.hypernetwork),
            f"hypernetwork={self.hypernetwork}: widths must be above zero",
        )

    def _mixer_parameters(self, key: jax.Array, values: jax.Array, observation: Observation):
        return self._mixer.init(key, values, self._mixer_state(observation))

    def _mix(self, mixer, values: jax.Array, observation: Observation) -> jax.Array:
        """The joint value, by the mixing network (`MonotonicMixer`)."""
        return self._mixer.apply(mixer, values, self._mixer_state(observation))

    @property
    def _mixer(self) -> Network:
        scale: Any = float_or_array(self.mixer_scale)
        return of_module(MonotonicMixer(self.mixer_size, self.hypernetwork, scale))


class MonotonicMixer(nn.Module):
    """The mixing network of QMIX (Rashid et al. 2018, arXiv 1803.11485, section 4.1 and figure 2a).

    Maps values `[N, A]` and a state `[N, S]` to the joint value `[N]`, which is monotonic in each agent's
    value: the weights are absolute values of a hypernetwork's outputs. Biases may have any sign.
    """

    units: int  # `H`, of the only hidden layer, whose activation is ELU
    hypernetwork: tuple[int, ...]  # widths of the layers between state and weights; none in the paper
    # Scale of the hypernetworks' initial weights; with 1 they are uniform within 1 / sqrt(inputs) of zero, as
    # in the authors' code. With a larger scale, a mixer of 32 units overestimates, and targets diverge.
    scale: float = 1.0

    @nn.compact
    def __call__(self, values: jax.Array, state: jax.Array) -> jax.Array:  # noqa: D102
        count, agents = values.shape
        kernel_init = nn.initializers.variance_scaling(self.scale**2 / 3.0, "fan_in", "uniform")

        def dense(x: jax.Array, outputs: int, name: str) -> jax.Array:
            return nn.Dense(outputs, kernel_init=kernel_init, name=name)(x)

        def from_state(outputs: int, name: str) -> jax.Array:
            x = state
            for i, width in enumerate(self.hypernetwork):
                x = nn.relu(dense(x, width, f"{name}_{i}"))
            return dense(x, outputs, name)

        weight_1 = jnp.abs(from_state(agents * self.units, "weight_1")).reshape(count, agents, self.units)
        hidden = nn.elu(jnp.sum(values[:, :, None] * weight_1, axis=1) + dense(state, self.units, "bias_1"))
        weight_2 = jnp.abs(from_state(self.units, "weight_2"))
        # The paper's "2-layer hypernetwork with a ReLU nonlinearity" outputs the last bias.
        bias_2 = dense(nn.relu(dense(state, self.units, "bias_2_0")), 1, "bias_2")
        return jnp.sum(hidden * weight_2, axis=1) + bias_2[:, 0]
