"""The off-policy driver of actor-critics (SAC, CrossQ, TD3) as functions: acting, storing, gradient steps.

An iteration steps all environments, adds the steps to the replay buffer, and takes gradient steps on
minibatches from it. Between fragments, actions are in [-1, 1]; `step` rescales them to the environment's
bounds. Observations are stored unnormalised, and normalised with the current statistics.

Letters in shapes: `B` environments, `U` gradient steps of an iteration, `N` samples of a minibatch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fdg
from algos import distributions, networks
from algos.distributions import stretched
from algos.explorers import Remembered, State, begin, collect, empty, first_state
from algos.layers import Layers
from algos.memories import RecurrentNetwork
from algos.networks import NETWORK, Network
from algos.replay import Replay, ReplayState, Transition, whole_updates
from algos.rollout import Actor, Recollection, chosen
from algos.sequences import (
    memory_after,
    one_step,
    over_sequences,
    remembering_critics,
    remembering_trunk,
)
from envs import Box, composite
from fdg.settings.fields import require, require_positive, require_within
from fdg.settings.parts import Part


@dataclasses.dataclass(frozen=True)
class ActorAndCritics(Part):
    """The user's networks, any (init, apply) pairs, instead of the defaults.

    The actor returns means and log standard deviations, `[N, 2 * size]`, or for TD3 and its kind actions
    before their tanh, `[N, size]`. The critics take observations and actions, and return two values, each
    `[N]`; those of an ensemble return `[E, N]` or `[E, N, K]`.
    """

    actor_network: Network | None = dataclasses.field(default=None, metadata=NETWORK)
    critic_network: Network | None = dataclasses.field(default=None, metadata=NETWORK)


def check(algorithm: Any) -> None:
    """Refuses fields out of range, actions without bounds, and sizes that do not divide."""
    algorithm._check()
    require_within(algorithm, 0, 1, *(name for name in ("target_rate",) if hasattr(algorithm, name)))
    require_positive(algorithm, *(name for name in ("policy_delay",) if hasattr(algorithm, name)))
    space, num_envs, batch_size = algorithm.env.action_space, algorithm.num_envs, algorithm.batch_size
    require(
        algorithm,
        isinstance(space, Box) and space.is_bounded and np.issubdtype(np.dtype(space.dtype), np.floating),
        f"cannot act in the action space {space}: give it finite bounds and a floating dtype",
    )
    require(
        algorithm,
        batch_size % num_envs == 0,
        f"num_envs={num_envs} does not divide batch_size={batch_size}: choose a divisor",
    )
    rows = algorithm.buffer.least_rows
    begins_full = getattr(algorithm, "dataset", None) is not None
    require(
        algorithm,
        rows == 1 or begins_full or algorithm.learning_starts >= rows * num_envs,
        f"learning_starts={algorithm.learning_starts} is before there is a window of {rows} steps of each"
        f" environment: make it at least {rows * num_envs}",
    )


def buffer(algorithm: Any) -> Replay:
    """The replay buffer, at most as large as the run.

    It samples the minibatches of all gradient steps at once, unless errors change the sampling.
    """
    made = algorithm.replays.of(
        algorithm,
        buffer_size=min(algorithm.buffer_size, algorithm.num_iterations * algorithm.steps_per_iteration),
        batch_size=algorithm.batch_size,
        n_step=algorithm.n_step,
        **(algorithm.remembering.sizes(algorithm, True) if algorithm._recurrent else {}),
    )
    if made.has_priorities:
        return made
    return dataclasses.replace(made, batch_size=algorithm.updates_per_iteration * algorithm.batch_size)


# --- methods of classes with `driver=off_policy` ---
#
# An algorithm says all that an update changes, `_first(actor_key, critics_key, observation [B, *obs],
# action [B, *action])`, of which only types count; what of it acts, `_acting(learned)`; one gradient step,
# `_learn_from(learned, minibatch [N], keys)`, which also gives the samples' errors where they have weights;
# and how many keys each sample of that takes, `_keys`.


def init(self: Any, key: jax.Array) -> State:
    """The initial state."""
    actor_key, critics_key, env_key, key = jax.random.split(key, 4)
    env_state, observation = self._reset(env_key)
    action = jnp.zeros((self.num_envs, *self.env.action_space.shape), jnp.float32)
    recollection = first_recollection(self, self.num_envs)
    learned = self._first(actor_key, critics_key, observation, action)
    return first_state(self, learned, env_state, observation, action, recollection, key)


def iterate(self: Any, state: State) -> tuple[State, dict[str, jax.Array]]:
    """Some steps of all environments, and the gradient steps for them."""
    key, rollout_key, sample_key, learn_key = jax.random.split(state.key, 4)
    acting, statistics, replay = _at_work(self, state.learned), state.observation_statistics, self.buffer
    learning = state.iteration >= math.ceil(self.learning_starts / self.steps_per_iteration)
    progress = state.iteration / self.num_iterations if self.explore is not None else None
    acted = collect(
        self,
        state,
        lambda *seen: self.act(acting, statistics, learning, progress, *seen),
        rollout_key,
    )
    replay_state = replay.add(state.replay, acted.rows)
    learned, replay_state, losses = improved(
        self, state.learned, statistics, replay_state, sample_key, learn_key, learning, state.iteration
    )
    # Only now, so that all that one iteration acts on and learns from is normalised alike.
    if self.normalizers.used:
        statistics = self.observe(statistics, acted.observations)
    left = acted.env_state, acted.observation, key, state.iteration + 1, acted.bonus, acted.recollection
    return State(learned, statistics, replay_state, *left), {**acted.metrics, **losses}


def improved(
    self: Any,
    learned: Any,
    statistics: Any,
    kept: ReplayState,
    sample_key: jax.Array,
    learn_key: jax.Array,
    learning: jax.Array,
    iteration: jax.Array,
) -> tuple[Any, ReplayState, Any]:
    """All gradient steps of an iteration."""
    replay = self.buffer
    if not replay.has_priorities:
        samples = replay.sample(kept, sample_key).transition
        drawn = jax.tree.map(lambda x: minibatches(x, self.num_envs, self.updates_per_iteration), samples)
        drawn = self.transforming.rows(drawn, learned, learn_key)
        learned, _, losses = self.learn(learned, statistics, drawn, learn_key, learning)
        return learned, kept, losses
    beta = self.replays.beta(iteration, self.num_iterations)

    def one_step(carry, keys):
        learned, kept = carry
        sample = replay.sample(kept, keys[0])
        weighted = sample.transition._replace(weight=replay.weight(sample, beta))
        minibatch = jax.tree.map(lambda x: x[None], weighted)
        minibatch = self.transforming.rows(minibatch, learned, keys[1])
        learned, error, losses = self.learn(learned, statistics, minibatch, keys[1], learning)
        # As in `Priorities.improve`: no priority is zero.
        kept = replay.prioritize(kept, sample.indices, jnp.abs(error[0]) + 1e-6, learning)
        return (learned, kept), losses

    updates = self.updates_per_iteration
    keys = jnp.stack([jax.random.split(key, updates) for key in (sample_key, learn_key)], axis=1)
    (learned, kept), losses = jax.lax.scan(one_step, (learned, kept), keys)
    return learned, kept, jax.tree.map(lambda x: jnp.mean(x, axis=0), losses)


def actor(self: Any, state: State) -> Actor:
    """The actor with these parameters and statistics."""
    progress = state.iteration / self.num_iterations

    def act(memory, observation, start, keys, greedy):
        seen = self.normalizers.seen(state.observation_statistics, observation)
        recollection = None if memory == () else Recollection(memory, start)
        policy, network = _policy(self, _at_work(self, state.learned), seen, recollection)
        if recollection is None:
            return self._for_environment(chosen(policy, keys, greedy)), memory
        if greedy:
            return self._for_environment(policy.mode()), memory._replace(network=network)
        action, explorer = self.explorer.drawn(policy, policy.sample, recollection, keys, progress)
        return self._for_environment(action), Remembered(network, explorer)

    return Actor(lambda num_envs: empty(first_recollection(self, num_envs)), act)


def first_recollection(self: Any, num_envs: int) -> Recollection | None:
    """The initial memory; None without one."""
    action = jnp.zeros((num_envs, *self.env.action_space.shape), jnp.float32)
    networks = None if self._recurrent is None else tuple(one.memory(num_envs) for one in self._recurrent)
    return begin(networks, self.explorer.begin(action), num_envs)


def _at_work(self: Any, learned: Any) -> Any:
    """The parameters for acting; with a memory also those of the critics, whose memories advance too."""
    acting = self._acting(learned)
    return acting if self._recurrent is None else (acting, learned.parameters.critics)


def _policy(self: Any, acting: Any, seen: Any, recollection: Recollection | None) -> tuple[Any, Any]:
    """The distribution over actions for observations `[B, *obs]`, and the networks' memories after them."""
    if self._recurrent is None:
        return self._policy(acting, seen), None
    assert recollection is not None
    (actor, critics), (of_actor, of_critics) = acting, self._recurrent
    memories, start = recollection.memory.network, recollection.start
    # Actions change no critic's memory.
    none = jnp.zeros((1, len(start), *self.env.action_space.shape), jnp.float32)
    first, second = (one_step(seen, memory, start) for memory in memories)
    after = memory_after(of_actor, actor, first), memory_after(of_critics, critics, second, none)
    return self._policy(actor, one_step(seen, memories, start)), after


def recurrent(self: Any, outputs: int) -> tuple[RecurrentNetwork, RecurrentNetwork] | None:
    """An actor with `outputs` outputs and two critics, each with a memory; None without one."""
    memory, space = self.remembering.kind, self.env.observation_space
    if memory is None:
        return None
    require(
        self,
        self.actor_network is None and self.critic_network is None,
        f"memory={self.memory}: networks of your own have none; leave it None",
    )
    actor = remembering_trunk(space, outputs, self.layers, memory, scale=0.01)
    critics = remembering_critics(space, self.grid.reading.outputs, self.layers, memory)
    return self._computing(actor), self._computing(critics)


def observed(self: Any, state: State) -> Any:
    """Observations as inputs of its networks, for a state of shapes."""
    if self._recurrent is None:
        return composite.types(self.env.observation_space, (self.num_envs,))
    recollection = state.recollection
    assert recollection is not None
    return jax.eval_shape(one_step, state.observation, recollection.memory.network, recollection.start)


def rows(self: Any, minibatch: Any, keys: jax.Array) -> tuple[Transition, jax.Array]:
    """A minibatch `[N]` as transitions, with keys `[K, N]` for each; of sequences `N * L` of both."""
    if self._recurrent is None:
        return minibatch, keys
    transition, weight = self.buffer.transitions(minibatch, minibatch.weight)
    length = self.buffer.sequence_length
    each = jax.vmap(jax.vmap(lambda key: jax.random.split(key, length)))(keys)
    return transition._replace(weight=weight), each.reshape(len(keys), -1)


def without_error(self: Any, losses: dict[str, Any]) -> tuple[jax.Array | None, dict[str, Any]]:
    """The samples' errors `[N]`, None without weights; and the other losses."""
    error = losses.pop("error", None)
    return None if error is None else self.buffer.priority(error), losses


@fdg.fragment("actor", in_axes=(None, None, None, None, 0, 0, 0))
def act(self, actor, statistics, learning, progress, observation, recollection, keys):
    """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`, and the new memory, `[B]`.

    Actions are uniform until learning starts.
    """
    seen = self.normalizers.seen(statistics, observation)
    policy, network = _policy(self, actor, seen, recollection)
    # One key for both, of which only one is used.
    uniform = jax.vmap(Box(-1.0, 1.0, self.env.action_space.shape).sample)(keys)
    action, explorer = self.explorer.drawn(policy, policy.sample, recollection, keys, progress)
    memory = None if recollection is None else Remembered(network, explorer)
    return jnp.where(learning, action, uniform), memory


@fdg.fragment("learner", in_axes=(None, None, 1, None, None), out_axes=(None, 1, None))
def learn(self, learned, statistics, minibatches, key, learning):
    """One gradient step for each of the stored minibatches `[U, N]`.

    Returns the changed state, the samples' errors `[U, N]` (None without weights), and means of the losses.
    """
    see = functools.partial(self.normalizers.seen, statistics)
    updates = len(jax.tree.leaves(minibatches)[0])
    keys = jax.random.split(key, (updates, self._keys, self.batch_size))
    minibatches = self.buffer.seen(see, minibatches)
    after, (losses, error) = jax.lax.scan(
        lambda learned, minibatch: _one_step(self, learned, *minibatch), learned, (minibatches, keys)
    )
    # Before learning begins steps are taken too, and thrown away: fragments in a branch could not be placed
    # apart.
    learned = jax.tree.map(lambda new, old: jnp.where(learning, new, old), after, learned)
    losses = jax.tree.map(lambda x: jnp.where(learning, jnp.mean(x, axis=0), jnp.nan), losses)
    return learned, error, losses


def _one_step(self: Any, learned: Any, minibatch: Any, keys: jax.Array) -> tuple[Any, Any]:
    """A gradient step; losses, and the samples' errors `[N]` if there are weights."""
    learned, error, losses = self._learn_from(learned, minibatch, keys)
    return learned, (losses, error)


def actor_parameters(self: Any, learned: Any) -> Any:
    """The acting parameters."""
    return learned.parameters.actor


def gaussian_actor(self: Any, make: Callable[..., Network] = networks.gaussian_actor) -> Network:
    """An actor with means and log standard deviations: with a memory, the user's, or the default."""
    if self._recurrent is not None:
        return over_sequences(self._recurrent[0], 0)
    default = make(self.env.observation_space, self.env.action_space, **vars(self.layers))
    return self._computing(self._own("actor_network", "actor") or default)


def deterministic_actor(self: Any) -> Network:
    """As `gaussian_actor`, for an actor that returns actions before their tanh."""
    return gaussian_actor(self, networks.deterministic_actor)


def twin_critics(self: Any, layers: Layers | None = None) -> Network:
    """Two critics with these layers: with a memory, the user's, or the defaults."""
    if self._recurrent is not None:
        return over_sequences(self._recurrent[1], 1)
    default = networks.twin_critics(
        self.env.observation_space, outputs=_outputs(self), **vars(layers or self.layers)
    )
    return self._computing(self._own("critic_network", "critic") or default)


def for_environment(self: Any, action: jax.Array) -> jax.Array:
    """Rescales actions from [-1, 1] to the environment's bounds."""
    return stretched(action, self.env.action_space)


def adam(self: Any) -> optax.GradientTransformation:
    """The optimiser, unless the user gave one."""
    return optax.adam(self._step_size)


def minibatches(x: jax.Array, num_envs: int, updates: int) -> jax.Array:
    """Samples `[U * N, ...]` into minibatches `[U, N, ...]`, both environment-major."""
    by_environment = x.reshape(num_envs, updates, -1, *x.shape[1:])
    return by_environment.swapaxes(0, 1).reshape(updates, -1, *x.shape[1:])


def check_gaussian(self: Any, state: State, each: int = 2) -> None:
    """Refuses networks whose outputs do not fit the action space, with an actor as `gaussian_actor`."""
    count, space, seen = self.num_envs, self.env.action_space, observed(self, state)
    actor = jax.eval_shape(self._acts, self._acting(state.learned), seen)
    distributions.check_gaussian(actor, space, count, each)
    action = jax.ShapeDtypeStruct((count, *space.shape), jnp.float32)
    self._check_critics(jax.eval_shape(self._valued, state.learned, seen, action))


def check_deterministic(self: Any, state: State) -> None:
    """As `check_gaussian`, of an actor as of `deterministic_actor`."""
    check_gaussian(self, state, each=1)


# What `check_gaussian` needs where networks take parameters alone, and there are two critics.


def actor_output(self: Any, actor: Any, observation: Any) -> jax.Array:
    """The output of the actor's network for observations `[N, *obs]`."""
    return self._actor.apply(actor, observation)


def valued(self: Any, learned: Any, observation: Any, action: jax.Array) -> Any:
    """The critics' outputs for actions `[N, *action]`: two values, each `[N]`."""
    return self._critics.apply(learned.parameters.critics, observation, action)


def check_twins(self: Any, found: Any) -> None:
    """Refuses critics that do not return two values, each `[N]`, or logits of a grid of returns."""
    count, numbers = self.num_envs, _outputs(self)
    for value in distributions.check_two("critic_network", found, f"it gives two values, each [{count}]"):
        if numbers > 1:
            why = f"{numbers} numbers (atoms) for each sample"
            distributions.check_shape("critic_network gives a distribution as", value, (count, numbers), why)
        else:
            distributions.check_value(
                "critic_network gives a value as", value, (count,), "one for each sample"
            )


def _outputs(self: Any) -> int:
    """Numbers that a critic returns for a sample; more than one for a grid of returns."""
    grid = getattr(self, "grid", None)
    return 1 if grid is None else grid.reading.outputs


MEMBERS = {
    "action_spaces": (Box,),
    "default_env": "Pendulum-v1",
    "__post_init__": check,
    "updates_per_iteration": property(whole_updates),
    "buffer": property(buffer),
    "init": init,
    "iterate": iterate,
    "actor": actor,
    "act": act,
    "learn": learn,
    "check_when_traced": check_gaussian,
    "_actor": property(gaussian_actor),
    "_critics": property(twin_critics),
    "_for_environment": for_environment,
    "_default_optimizer": property(adam),
    "_acting": actor_parameters,
    "_acts": actor_output,
    "_valued": valued,
    "_check_critics": check_twins,
    "_recurrent": None,  # networks have no memory
}
