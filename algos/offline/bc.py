"""Behaviour cloning (Pomerleau 1989, "ALVINN", NIPS 1): the actor imitates the actions of a data set.

For example, a student without privileged observations imitates a teacher that has them, from data that the
teacher collected or labelled (`fdg collect --labels`).

Shapes: `N` samples of a minibatch, `D` components of an action.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos import distributions, networks, off_policy, optimizers
from algos.agent import Agent, Rollouts
from algos.checks import check_action_values, check_bounded_floats, check_gaussian
from algos.distributions import stretched
from algos.offline import learning
from algos.offline.learning import BoundedNormal, OfflineData
from algos.replaying import ExplorerChoice, State, Transition
from algos.values import NETWORK, Layers, Network, ObservationNormalizer, OptimizerSettings, Transforming
from envs import Box, Discrete, Environment, MultiDiscrete, Observation, composite, features_and_mask
from fdg.settings.fields import require


class Parameters(NamedTuple):
    """The trained parameters."""

    actor: Any


class Learned(NamedTuple):
    """All values that an update changes."""

    parameters: Parameters
    optimizer_state: Any


@dataclasses.dataclass(frozen=True)
class BC(Agent, presets="BC"):
    """Maximum likelihood of a data set's actions, for discrete and bounded continuous actions.

    >>> import envs
    >>> BC(env=envs.make("CartPole-v1")).updates_per_iteration
    32
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Box, Discrete, MultiDiscrete)
    steps_are: ClassVar[str] = "gradient steps"
    discount: ClassVar[float] = 1.0  # the replay buffer needs one; imitation does not use it

    env: Environment
    rollouts = Rollouts(num_envs=8, num_steps=4, total_steps=100_000)
    data = OfflineData()
    optimizer_settings = OptimizerSettings(learning_rate=3e-4)
    normalizers = ObservationNormalizer()
    layers = Layers(hidden=(256, 256), activation="relu")
    # An (init, apply) pair in place of the default network. It returns logits, or for continuous actions
    # means before tanh and log standard deviations, [N, 2 * D].
    actor_network: Network | None = dataclasses.field(default=None, metadata=NETWORK)

    def __post_init__(self):
        self._check()
        if isinstance(self.env.action_space, Box):
            check_bounded_floats(self)

    def check_files(self) -> None:
        """Raises an `FdgError` if there is no data set."""
        require(self, self.dataset is not None, "dataset=None: give a folder of fdg collect, or of Minari")

    # --- the interface of `algos/offline/learning.py` ---

    updates_per_iteration = learning.MEMBERS["updates_per_iteration"]
    buffer = property(learning.buffer)
    iterate, actor, learn = learning.iterate, off_policy.actor, off_policy.learn
    explorer = property(lambda self: ExplorerChoice())  # no exploration
    transforming = property(lambda self: Transforming())  # no transformation of rows: rewards do not matter
    _keys_per_sample = 1  # in a gradient step; not used
    _memory = None
    _sample_actions = learning.MEMBERS["_sample_actions"]
    _default_optimizer = property(optimizers.adam_of)

    def init(self, key: jax.Array) -> State:
        """The initial state, with the data set in its replay buffer."""
        self.check_files()
        return learning.init(self, key)

    @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None)
    def gradient(self, parameters, transition):
        """Gradient of the loss over a minibatch `[N]`, and the terms of the loss."""
        return jax.grad(self.loss, has_aux=True)(parameters, transition)

    # --- parts; `update` is inherited from `Agent` ---

    def _init_learned(self, actor_key, critics_key, observation, action) -> Learned:
        parameters = Parameters(self._actor.init(actor_key, observation))
        return Learned(parameters, self._optimizer.init(parameters))

    def _acting_parameters(self, learned: Learned) -> Any:
        return learned.parameters.actor

    def _learn_from(self, learned: Learned, transition: Transition, keys) -> tuple[Learned, None, Any]:
        gradient, losses = self.gradient(learned.parameters, transition)
        parameters, optimizer_state = self.update(gradient, learned.optimizer_state, learned.parameters)
        return Learned(parameters, optimizer_state), None, losses

    def loss(self, parameters: Parameters, transition: Transition) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The negative mean log-likelihood, and the mean squared error of the mode."""
        policy = self._policy(parameters.actor, transition.observation)
        loss = -jnp.mean(policy.log_prob(transition.action))
        error = jnp.square(policy.mode().astype(jnp.float32) - transition.action.astype(jnp.float32))
        return loss, {"loss": loss, "squared_error": jnp.mean(error)}

    def _policy(self, actor: Any, observation: Observation) -> Any:
        """The distribution over actions for observations `[N, *obs]`; continuous actions are in [-1, 1]."""
        features, action_mask = features_and_mask(observation)
        output, space = self._actor.apply(actor, features), self.env.action_space
        if isinstance(space, Box):
            return BoundedNormal.of(output, space.shape)
        return distributions.masked(distributions.for_space(space).distribution(output), action_mask)

    def _for_environment(self, action):
        return stretched(action, self.env.action_space)

    def check_when_traced(self, state: State) -> None:
        """Refuses a network whose outputs do not fit the action space."""
        space, count = self.env.action_space, self.num_envs
        features = composite.types(self.env.observation_space, (count,))
        output = jax.eval_shape(self._actor.apply, state.learned.parameters.actor, features)
        if isinstance(space, Box):
            check_gaussian(output, space, count)
        else:
            check_action_values(output, sum(distributions.sizes(space)), (count,))

    @property
    def _actor(self) -> Network:
        make = networks.gaussian_actor if isinstance(self.env.action_space, Box) else networks.q_network
        default = make(self.env.observation_space, self.env.action_space, **vars(self.layers))
        return networks.with_precision(self, networks.user_network(self, "actor_network", "actor") or default)
