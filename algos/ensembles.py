"""Ensembles of critics: any number of critics of one shape, evaluated as one batch of matrices.

Letters in shapes: `E` critics, `N` samples of a minibatch, `K` numbers of a critic.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from algos import networks
from algos.given import Network
from algos.layers import Layers, Trunk, features
from envs.composite import ObservationSpace
from fdg.settings.fields import hyperparameter, require, require_positive
from fdg.settings.parts import Part


@dataclasses.dataclass(frozen=True)
class Ensemble(Part):
    """How many critics there are, and of what size."""

    num_critics: int = hyperparameter(10, "E, critics of the ensemble")
    critic_hidden: tuple[int, ...] | None = hyperparameter(
        None, "widths of the critics' layers; None: those of the actor"
    )
    critic_layer_norm: bool = hyperparameter(
        False, "normalise each layer of the critics before its activation; layer_norm: of the actor, too"
    )
    dropout: float = hyperparameter(
        0.0,
        "share of the critics' features that is dropped in training",
        structural="whether there is dropout",
    )

    def check(self, algorithm: Any) -> None:
        """Refuses an empty ensemble, widths that are not positive, and a share outside [0, 1)."""
        require_positive(algorithm, "num_critics")
        require(
            algorithm,
            all(width > 0 for width in self.critic_hidden or ()),
            f"critic_hidden={self.critic_hidden}: widths are above zero",
        )
        require(
            algorithm,
            0 <= self.dropout < 1,
            f"dropout={self.dropout}: it must be from 0 to below 1",
        )
        require(
            algorithm,
            self.dropout == 0 or (algorithm.critic_network is None and algorithm.torso == "dense"),
            f"dropout={self.dropout}: only dense default critics have it: set dropout=0, or leave out"
            " torso='simba' and critic_network",
        )

    def network(self, observation_space: ObservationSpace, layers: Layers, outputs: int = 1) -> Network:
        """The critics: `apply(parameters, observation [N, *obs], action [N, *action], keys [N] or None)`.

        They give `[E, N]` float32, or `[E, N, outputs]` if `outputs` is above one.
        Without keys there is no dropout. Parameters have a leading axis `E`.
        """
        hidden = layers.hidden if self.critic_hidden is None else self.critic_hidden
        layer_norm = layers.layer_norm or self.critic_layer_norm
        changed = dataclasses.replace(layers, hidden=hidden, layer_norm=layer_norm)
        sized = changed.sized(observation_space)
        return networks.of_module(Critics(observation_space, sized, self.num_critics, outputs, self.dropout))


class Critics(nn.Module):
    """Independent trunks on the same inputs, mapped over a leading axis of their parameters."""

    observation_space: ObservationSpace
    layers: Layers
    count: int
    outputs: int = 1
    dropout: float = 0.0

    @nn.compact
    def __call__(  # noqa: D102
        self, observation: Any, action: jax.Array, keys: jax.Array | None = None
    ) -> jax.Array:
        inputs = features(observation, self.observation_space, self.layers.convolve)
        each = jnp.arange(self.count)
        own = (
            None if keys is None else jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))(keys, each)
        )
        trunks = nn.vmap(
            Trunk,
            in_axes=(None, None, 0),
            out_axes=0,
            axis_size=self.count,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )
        trunk = trunks(self.layers, self.outputs, 1.0, self.dropout, name="critics")
        found = trunk(inputs, action.reshape(action.shape[0], -1), own)
        return found[..., 0] if self.outputs == 1 else found
