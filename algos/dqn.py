"""Deep Q-learning (Mnih et al. 2015, Nature 518, "Human-level control through deep reinforcement learning").

With what was added to it as options: double Q-learning, dueling networks, n-step returns, prioritised replay.

How it stores, samples and what it fits, top to bottom; `algos/q_learning.py` has how it acts, and
`algos/replayed_q.py` how it learns. Nothing here knows of devices: the `fdg.fragment`s in those files, and in
`algos/replay.py`, say what the parts are, and which axis of their arrays is the batch.

Letters in shapes: `T` steps of a rollout, `B` environments, `N` samples of a minibatch.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from algos.acting import Actor
from algos.agent import Rollouts
from algos.exploration import Exploration
from algos.hyperparameters import NETWORK, hyperparameter, require, whole_updates
from algos.layers import Layers
from algos.networks import Network, of_action
from algos.normalize import ObservationNormalizer
from algos.optimizers import ClippedOptimizer
from algos.q_learning import QLearning, for_each_choice, over_choices
from algos.replay import Replay, ReplayState, ReplayUpdates, Step, Transition
from algos.replayed_q import Learned, Priorities, ReplayedQLearning, TargetUpdates
from algos.rollout import episode_metrics, rollout
from envs import Environment, Observation, features_and_mask


class State(NamedTuple):
    """All that the next iteration needs."""

    learned: Learned
    observation_statistics: Any  # as of `PPO`; None where observations are not normalised
    replay: ReplayState
    env_state: Any  # leading axis B
    observation: Observation  # [B, *obs]
    key: jax.Array
    iteration: jax.Array  # int32


@dataclasses.dataclass(frozen=True)
class DQN(ReplayedQLearning, QLearning):
    """Deep Q-learning for discrete actions; of several choices with a branch for each (BDQ).

    Defaults are close to those of CleanRL's `dqn.py` (Huang et al. 2022, JMLR 23(274)), with eight
    environments in place of one. Errors are not clipped: where episodes end in failure, as CartPole's do, the
    few large errors of their last steps are what keeps values from growing without bound. Frozen and
    hashable; equal values are equal algorithms.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not divide.

    >>> import envs
    >>> DQN(env=envs.make("CartPole-v1")).updates_per_iteration
    8
    """

    env: Environment
    rollouts = Rollouts(num_envs=8, num_steps=8, total_steps=500_000)
    replaying = ReplayUpdates(
        buffer_size=10_000, batch_size=128, learning_starts=10_000, updates_per_step=0.125
    )
    optimizer_settings = ClippedOptimizer(
        learning_rate=2.5e-4, anneal_learning_rate=False, max_grad_norm=10.0
    )
    max_error: float | None = hyperparameter(
        None, "error beyond which the loss goes on as a line (Mnih et al.: 1); None: squared throughout"
    )
    discount: float = hyperparameter(0.99, "gamma")
    targets = TargetUpdates(target_period=50)
    exploration = Exploration(epsilon_end=0.05, exploration_fraction=0.5)
    double: bool = hyperparameter(False, "double Q-learning: one network chooses, the other values")
    dueling: bool = hyperparameter(False, "dueling network: a value, and advantages of actions")
    n_step: int = hyperparameter(1, "rewards summed up before a value follows")
    priorities = Priorities()
    normalizers = ObservationNormalizer()
    layers = Layers(activation="relu")
    network: Network | None = dataclasses.field(default=None, metadata=NETWORK)

    def __post_init__(self):
        self._check()
        require(
            self,
            self.max_error is None or self.max_error > 0,
            f"max_error={self.max_error}: it must be above zero, or None",
        )

    @property
    def updates_per_iteration(self) -> int:
        """Gradient steps in one iteration."""
        return whole_updates(self)

    # --- the two functions of every algorithm ---

    def init(self, key: jax.Array) -> State:
        """The state before the first iteration."""
        parameter_key, env_key, key = jax.random.split(key, 3)
        env_state, observation = self._reset(env_key)
        parameters = self._network.init(parameter_key, features_and_mask(observation)[0])
        return State(
            learned=self._begin(parameters),
            observation_statistics=self.normalizers.begin(self.env.observation_space),
            replay=self._replay.init(
                observation, jnp.zeros((self.num_envs, *self._actions.shape), jnp.int32)
            ),
            env_state=env_state,
            observation=observation,
            key=key,
            iteration=jnp.int32(0),
        )

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """A few steps of all environments into the buffer, and gradient steps on minibatches out of it."""
        key, rollout_key, replay_key = jax.random.split(state.key, 3)
        epsilon, statistics = self._epsilon(state.iteration), state.observation_statistics
        env_state, observation, ((observations, actions), _, time_steps) = rollout(
            act=lambda observation, keys: (
                self.act(state.learned.parameters, statistics, epsilon, observation, keys), ()
            ),
            step=self.step,
            key=rollout_key,
            env_state=state.env_state,
            observation=state.observation,
            num_steps=self.num_steps,
        )  # fmt: skip
        replay = self._replay.add(state.replay, Step.of(observations, actions, time_steps))
        learned, replay, losses = self._improved(
            state.learned, statistics, replay, replay_key, state.iteration
        )
        statistics = self._after_observing(statistics, observations)
        metrics = {
            **episode_metrics(time_steps),
            **losses,
            "epsilon": epsilon,
            "updates": learned.updates,
        }
        return State(learned, statistics, replay, env_state, observation, key, state.iteration + 1), metrics

    def actor(self, state: State) -> Actor:
        """How it acts with these values of actions."""
        return self._acting(state.learned.parameters, state.observation_statistics, state.iteration)

    # --- parts ---

    def _seen_minibatch(self, statistics: Any, minibatch: Transition) -> Transition:
        return minibatch._replace(
            observation=self.normalizers.seen(statistics, minibatch.observation),
            next_observation=self.normalizers.seen(statistics, minibatch.next_observation),
        )

    def _loss(self, parameters, target_parameters, transition: Transition, weight):
        value = of_action(self._values(parameters, transition.observation), transition.action)
        target = jax.lax.stop_gradient(self._target(parameters, target_parameters, transition))
        error = for_each_choice(target, value) - value
        # The loss L_i of Mnih et al. ("Training algorithm for deep Q-networks"), halved; weighted as in
        # Schaul et al., algorithm 1, line 12. To clip the error, as the former do, is to let the square go on
        # as a line.
        squared = 0.5 * jnp.square(error)
        if self.max_error is not None:
            squared = optax.losses.huber_loss(error, delta=self.max_error)
        loss = jnp.mean(weight * over_choices(squared))
        # Priorities of several choices: Tavakoli et al., section "Error for experience prioritization".
        error = error if error.ndim == 1 else jnp.sum(jnp.abs(error), axis=-1)
        return loss, (error, {"loss": loss, "value": jnp.mean(value)})

    def _target(self, parameters, target_parameters, transition: Transition) -> jax.Array:
        """What `Q(observation, action)` should be: `[N]`."""
        next_values = self._values(target_parameters, transition.next_observation)
        if self.double:  # van Hasselt, Guez and Silver 2016, arXiv 1509.06461, equation 4
            best = jnp.argmax(self._values(parameters, transition.next_observation), axis=-1)
            next_value = of_action(next_values, best)
        else:  # the same paper, equation 2 with the target network of Mnih et al.
            next_value = jnp.max(next_values, axis=-1)
        return transition.reward + transition.discount * over_choices(next_value)

    @property
    def _replay(self) -> Replay:
        return Replay(
            num_envs=self.num_envs,
            buffer_size=self.buffer_size,
            batch_size=self.batch_size,
            learning_starts=self.learning_starts,
            n_step=self.n_step,
            discount=self.discount,
            priority_exponent=self.priority_exponent,
        )
