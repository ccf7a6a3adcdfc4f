"""QMIX (Rashid et al. 2018, "QMIX: Monotonic Value Function Factorisation for Deep Multi-Agent Reinforcement
Learning", arXiv 1803.11485).

`algos/value_decomposition.py` where what agents do together is worth a mixture of what each does, which rises
with each of these values, by weights that depend on what all agents see.
"""

import dataclasses
from typing import ClassVar

import jax

from algos import agent_values
from algos.given import Network
from algos.value_decomposition import ValueDecomposition
from envs import Observation
from fdg.settings.fields import hyperparameter, require, require_positive


@dataclasses.dataclass(frozen=True)
class QMIX(ValueDecomposition):
    """QMIX for discrete actions of several agents, feed-forward or recurrent (`memory`).

    The state that the mixing network sees are the observations of all agents side by side, as MAPPO's central
    value function has them, parts that are `privileged` among them.

    Raises:
      FdgError: (construction) a field out of range, sizes that do not divide, an environment of one agent.

    >>> import envs
    >>> QMIX(env=envs.make("probe:agents")).mixer_size
    32
    """

    presets_of: ClassVar[str] = "QMIX"

    mixer_size: int = hyperparameter(32, "units of the mixing network's hidden layer")
    hypernetwork: tuple[int, ...] = hyperparameter(
        (64,), "widths of the layers between state and mixing weights; the paper has none: ()"
    )

    mixer_scale: float = hyperparameter(
        1.0, "of the hypernetworks' first weights; small: what all do is worth nothing at first"
    )

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "mixer_size", "mixer_scale")
        require(
            self,
            all(width > 0 for width in self.hypernetwork),
            f"hypernetwork={self.hypernetwork}: widths are above zero",
        )

    def _mixer_parameters(self, key: jax.Array, values: jax.Array, observation: Observation):
        return self._mixer.init(key, values, self._state_of(observation))

    def _mixed(self, mixer, values: jax.Array, observation: Observation) -> jax.Array:
        """The mixing network (`algos.agent_values.monotonic_mixer`)."""
        return self._mixer.apply(mixer, values, self._state_of(observation))

    @property
    def _mixer(self) -> Network:
        return agent_values.monotonic_mixer(self.mixer_size, self.hypernetwork, self.mixer_scale)
