"""What algorithms share that learn the value of each action (`DQN`, `PQN`, ...): how they act and explore.

Where an action is several choices (`MultiDiscrete`) there are as many values as the sum of the choices, and
not as their product: each choice is a branch that is valued, and explored, by itself (Tavakoli et al. 2018,
arXiv 1711.08946). All are fitted to one target, what the best of each is worth in the mean (its equation 6).

Letters in shapes: `B` environments, `N` rows of any origin, `M` choices.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import fdg
from algos import networks, outputs
from algos.acting import Actor, empty_memory
from algos.agent import Agent
from algos.distributions import Categorical, allowed_values, sizes
from algos.exploration import epsilon_greedy
from algos.networks import Network
from envs import Discrete, MultiDiscrete, Observation, features_and_mask


class EpsilonGreedy(Agent):
    """Base of agents that value discrete actions, and mostly take the best: the fields that they share."""

    action_spaces: ClassVar[tuple[type, ...]] = (Discrete,)

    def _epsilon(self, iteration: jax.Array) -> jax.Array:
        """Probability of a random action in an iteration: `[]` float32."""
        return self.exploration.epsilon(iteration, self.num_iterations)


class QLearning(EpsilonGreedy):
    """Base of algorithms of one agent without memory that values actions, or each choice of an action.

    A subclass has also the fields annotated here, `init`, `iterate`, `actor`, a learner and a loss.
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete)

    # --- fragments; `step` is that of every agent ---

    @fdg.fragment("actor", in_axes=(None, None, None, 0, 0))
    def act(self, parameters, statistics, epsilon, observation, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`."""
        values = self._values(parameters, self.normalizers.seen(statistics, observation))
        return epsilon_greedy(values, epsilon).sample(keys)

    # --- parts ---

    def _acting(self, parameters: Any, statistics: Any, iteration: jax.Array) -> Actor:
        """How it acts: with the best action, or drawn as in training, now and then any."""

        def act(memory, observation, start, keys, greedy):
            values = self._values(parameters, self.normalizers.seen(statistics, observation))
            policy = Categorical(values) if greedy else epsilon_greedy(values, self._epsilon(iteration))
            return self._chosen(policy, keys, greedy), memory

        return Actor(empty_memory, act)

    def _values(self, parameters: Any, observation: Observation) -> jax.Array:
        """Q of every action `[N, n]`, for observations `[N, *obs]` as the network sees them.

        Of several choices `[N, M, n]`, `n` being the most that one has. `-inf`: not allowed, or not there.
        """
        features, action_mask = features_and_mask(observation)
        return allowed_values(self._actions, self._network.apply(parameters, features), action_mask)

    def check_when_traced(self, state: Any) -> None:
        """Refuses a network that does not value each action."""
        features = features_and_mask(state.observation)[0]
        parameters = getattr(state, "learned", state).parameters
        values = jax.eval_shape(self._network.apply, parameters, features)
        outputs.action_values(values, sum(sizes(self._actions)), self.num_envs)

    @property
    def _actions(self) -> Discrete | MultiDiscrete:
        space = self.env.action_space
        assert isinstance(space, Discrete | MultiDiscrete)  # checked when constructed
        return space

    @property
    def _network(self) -> Network:
        return self._computing(self._own("network", "actor") or networks.q_network(
            self.env.observation_space, self.env.action_space,
            dueling=self.dueling, **vars(self.layers),
        ))  # fmt: skip


def over_choices(each: jax.Array, reduced: Callable[[jax.Array, int], jax.Array] = jnp.mean) -> jax.Array:
    """What each choice of an action is worth, `[N, M]`, as one number, `[N]`; of one choice it stays `[N]`.

    >>> over_choices(jnp.array([[1.0, 3.0]])).tolist(), over_choices(jnp.array([1.0, 3.0])).tolist()
    ([2.0], [1.0, 3.0])
    """
    return each if each.ndim == 1 else reduced(each, -1)


def for_each_choice(one: jax.Array, values: jax.Array) -> jax.Array:
    """Numbers `[N]` in a shape that goes with `values`, `[N]` or `[N, M]`."""
    return one if values.ndim == 1 else one[:, None]
