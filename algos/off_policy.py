"""The driver of off-policy actor-critics (SAC, CrossQ, TD3): methods that these algorithms share.

An iteration steps all environments, adds the steps to the replay buffer, and takes gradient steps on
minibatches from it. Between fragments, actions are in [-1, 1]; `step` rescales them to the environment's
bounds. The buffer stores unnormalised observations; learning normalises them with the current statistics.

Shapes: `B` environments, `U` gradient steps of an iteration, `N` samples of a minibatch.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

import fdg
from algos import registry, replaying
from algos.replaying import ExplorerChoice, State, StepReplay, whole_updates
from algos.rollout import Actor
from algos.values import NETWORK, Network, Normalizers, Transforming
from envs import Box
from fdg.settings.fields import hyperparameter
from fdg.settings.parts import Part


@dataclasses.dataclass(frozen=True)
class ActorAndCritics(Part):
    """The user's networks, as (init, apply) pairs, in place of the default ones.

    For actions of D components, the actor returns means and log standard deviations, `[N, 2 * D]`, or for TD3
    and its variants actions before tanh, `[N, D]`. The critics take observations and actions, and return two
    values, each `[N]`; an ensemble of E critics returns `[E, N]`, or with K outputs `[E, N, K]`.
    """

    actor_network: Network | None = dataclasses.field(default=None, metadata=NETWORK)
    critic_network: Network | None = dataclasses.field(default=None, metadata=NETWORK)


@dataclasses.dataclass(frozen=True)
class PolyakTargets(Part):
    """The step size of target networks, which are moving averages."""

    target_rate: float = hyperparameter(0.005, "tau: Polyak step of the target networks, per update")


@dataclasses.dataclass(frozen=True)
class ReturnGrid(Part):
    """Whether critics predict values, or distributions over a grid of returns."""

    atoms: int | None = hyperparameter(
        None, "atoms of the critics' return distributions; None: critics predict values"
    )
    value_min: float = hyperparameter(-250.0, "smallest atom", only_with="atoms")
    value_max: float = hyperparameter(250.0, "largest atom", only_with="atoms")

    @property
    def critic_kind(self) -> Any:
        """How to interpret the critics' outputs: an `algos.distributional.Values` or `Distributions`.

        Both compute the `lower` value of two critics, their `target`, and their loss (`errors`).
        """
        distributional = registry.option("atoms")
        if self.atoms is None:
            return distributional.Values()
        return distributional.Distributions(self.atoms, self.value_min, self.value_max)

    def check(self, algorithm: Any) -> None:
        """Refuses values that do not define a grid."""
        if self.atoms is not None:
            registry.option("atoms").check_grid(algorithm)


# --- methods of classes with `driver=off_policy` ---
#
# An algorithm defines:
# - `_init_learned(actor_key, critics_key, observation [B, *obs], action [B, *action])`: the initial value of
#   `State.learned`; of observation and action, only shapes and dtypes are used.
# - `_policy(actor, observation [N, *obs])`: a distribution of actions.
# - `_learn_from(learned, minibatch [N], keys [k, N])`: one gradient step; returns the new `learned`, the
#   samples' errors (None without weights), and losses.
# - `_keys_per_sample`: k, the random keys that a gradient step needs for each sample.


def buffer(self: Any) -> Any:
    """The replay buffer, no larger than the run.

    A sample contains the minibatches of all gradient steps, unless errors change priorities.
    """
    replay = self.replays.of(
        self,
        buffer_size=min(self.buffer_size, self.num_iterations * self.steps_per_iteration),
        batch_size=self.batch_size,
        n_step=self.n_step,
    )
    if replay.has_priorities:
        return replay
    return dataclasses.replace(replay, batch_size=self.updates_per_iteration * self.batch_size)


def init(self: Any, key: jax.Array) -> State:
    """The initial state."""
    actor_key, critics_key, env_key, key = jax.random.split(key, 4)
    env_state, observation = self._reset(env_key)
    action = replaying.zero_actions(self, self.num_envs)
    learned = self._init_learned(actor_key, critics_key, observation, action)
    return replaying.initial_state(self, learned, env_state, observation, key)


def iterate(self: Any, state: State) -> tuple[State, dict[str, jax.Array]]:
    """Steps all environments, then takes the gradient steps."""
    key, rollout_key, sample_key, learn_key = jax.random.split(state.key, 4)
    actor, statistics = _rollout_parameters(self, state.learned), state.observation_statistics
    is_learning = state.iteration >= self._first_learning_iteration
    progress = state.iteration / self.num_iterations if self.explore is not None else None
    rows, observations, new_fields, metrics = replaying.collect(
        self, state, lambda *inputs: self.act(actor, statistics, is_learning, progress, *inputs), rollout_key
    )
    stored = state._replace(replay=self.buffer.add(state.replay, rows), returns=new_fields["returns"])
    learned, replay, losses = gradient_steps(self, stored, sample_key, learn_key, is_learning)
    # Updated last, so that an iteration normalises all observations with the same statistics.
    if self.normalizers.used:
        statistics = self.observe(statistics, observations)
    new_fields |= {"learned": learned, "replay": replay, "observation_statistics": statistics}
    return state._replace(key=key, iteration=state.iteration + 1, **new_fields), {**metrics, **losses}


def gradient_steps(
    self: Any, state: State, sample_key: jax.Array, learn_key: jax.Array, is_learning: jax.Array
) -> tuple[Any, Any, Any]:
    """Takes all gradient steps of an iteration; returns `learned`, the buffer's state, and mean losses."""
    if self.buffer.has_priorities:
        steps = registry.option("replay").prioritized_steps
        return steps(self, state, sample_key, learn_key, is_learning)
    samples = self.buffer.sample(state.replay, sample_key).transition
    rows = jax.tree.map(lambda x: minibatches(x, self.num_envs, self.updates_per_iteration), samples)
    rows = replaying.transform_and_scale(self, state, rows, state.learned, learn_key)
    statistics = state.observation_statistics
    learned, _, losses = self.learn(state.learned, statistics, rows, learn_key, is_learning)
    return learned, state.replay, losses


def minibatches(x: jax.Array, num_envs: int, updates: int) -> jax.Array:
    """Reshapes samples `[U * N, ...]` to minibatches `[U, N, ...]`, both environment-major."""
    by_environment = x.reshape(num_envs, updates, -1, *x.shape[1:])
    return by_environment.swapaxes(0, 1).reshape(updates, -1, *x.shape[1:])


def actor(self: Any, state: State) -> Actor:
    """The actor with these parameters and statistics."""
    progress = state.iteration / self.num_iterations
    return replaying.make_actor(self, state, _rollout_parameters(self, state.learned), progress)


def _rollout_parameters(self: Any, learned: Any) -> Any:
    """The actor's parameters; with a memory also the critics', whose memories advance in the rollout too."""
    actor = self._acting_parameters(learned)
    return actor if self._memory is None else (actor, learned.parameters.critics)


@fdg.fragment("actor", in_axes=(None, None, None, None, 0, 0, 0))
def act(self, actor, statistics, is_learning, progress, observation, recollection, keys):
    """Acts in all environments; returns `action [B, *action]`, and the next memory `[B]`.

    Arguments are `observation [B, *obs]`, `recollection [B]` (None without a memory) and `keys [B]`. Actions
    are uniform until learning starts.
    """
    action, memory = replaying.compute_actions(
        self, actor, statistics, observation, recollection, keys, progress
    )
    # `action` and `uniform` may share a key, since only one of the two is used.
    uniform = jax.vmap(Box(-1.0, 1.0, self.env.action_space.shape).sample)(keys)
    return jnp.where(is_learning, action, uniform), memory


@fdg.fragment("learner", in_axes=(None, None, 1, None, None), out_axes=(None, 1, None))
def learn(self, learned, statistics, minibatches, key, is_learning):
    """One gradient step on each of the minibatches `[U, N]` from replay.

    Returns the changed `learned`, the samples' errors `[U, N]` (None without weights), and mean losses. Until
    learning starts, no step is taken: `learned` is unchanged, errors are zero, and losses are NaN.
    """
    normalize = functools.partial(self.normalizers.seen, statistics)
    updates = len(jax.tree.leaves(minibatches)[0])
    keys = jax.random.split(key, (updates, self._keys_per_sample, self.batch_size))

    def one_step(learned, minibatch_and_keys):
        learned, error, losses = self._learn_from(learned, *minibatch_and_keys)
        return learned, (losses, error)

    def all_steps():
        samples = self.buffer.map_observations(normalize, minibatches)
        new, (losses, error) = jax.lax.scan(one_step, learned, (samples, keys))
        return new, error, jax.tree.map(lambda x: jnp.mean(x, axis=0), losses)

    def no_steps():
        _, error, losses = jax.eval_shape(all_steps)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), error)
        return learned, zeros, jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), losses)

    return jax.lax.cond(is_learning, all_steps, no_steps)


def split_off_error(self: Any, losses: dict[str, Any]) -> tuple[jax.Array | None, dict[str, Any]]:
    """Splits losses into the samples' errors `[N]` (None without weights) and the rest."""
    error = losses.pop("error", None)
    return None if error is None else self.buffer.priority(error), losses


# Methods, settings and properties that each class with `driver=off_policy` gets.
MEMBERS = {
    "normalizers": Normalizers(),
    "networks": ActorAndCritics(),
    "transforming": Transforming(),
    "explorer": ExplorerChoice(),
    "replays": StepReplay(),
    "action_spaces": (Box,),
    "default_env": "Pendulum-v1",
    "updates_per_iteration": property(whole_updates),
    "buffer": property(buffer),
    "_first_learning_iteration": property(
        lambda self: math.ceil(self.learning_starts / self.steps_per_iteration)
    ),
    "init": init,
    "iterate": iterate,
    "actor": actor,
    "act": act,
    "learn": learn,
    "check_when_traced": lambda self, state: registry.option("checks").check_actor_and_critics(self, state),
    "_check": lambda self: registry.option("checks").check_off_policy(self),
    "_actor": property(lambda self: registry.option("networks").actor_network_of(self)),
    "_critics": property(lambda self: registry.option("networks").critics_of(self, self.layers)),
    "_outputs_per_component": 2,  # the actor's, per action component: mean, log standard deviation
    "_memory": property(replaying.memory_of),
    "_sample_actions": lambda self, policy, amount, keys: policy.sample(keys),  # as in training
    "_for_environment": lambda self, action: registry.option("distributions").stretched(
        action, self.env.action_space
    ),
    "_default_optimizer": property(lambda self: registry.option("optimizers").adam_of(self)),
    # Checks of networks' outputs call the next three too.
    "_acting_parameters": lambda self, learned: learned.parameters.actor,
    "_actor_output": lambda self, actor, observation: self._actor.apply(actor, observation),
    "_critic_output": lambda self, learned, *inputs: self._critics.apply(learned.parameters.critics, *inputs),
}
