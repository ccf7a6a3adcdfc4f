"""Acting, storing and gradient steps of off-policy actor-critics (SAC, CrossQ, TD3), as functions.

An iteration steps all environments, adds the steps to the replay buffer, and takes gradient steps on
minibatches from it. Between fragments, actions are in [-1, 1]; `step` rescales them to the environment's
bounds. Observations are stored unnormalised, and normalised with the current statistics.

Shapes: `B` environments, `U` gradient steps of an iteration, `N` samples of a minibatch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fdg
from algos import networks, optimizers
from algos.checks import check_gaussian, check_shape, check_two, check_value
from algos.distributions import stretched
from algos.replay import Replay, ReplayState, Step, StepReplay, whole_updates
from algos.replaying import NO_MEMORY, ActorMemory, ExplorerChoice, Head, NoMemory
from algos.rings import Recollection, rollout_with_memory
from algos.rollout import Actor, episode_metrics, rollout
from algos.values import NETWORK, Layers, Network, ObservationNormalizer, Transforming
from envs import Box, Observation, composite
from fdg.settings.fields import require, require_positive, require_within
from fdg.settings.parts import Part

# --- all algorithms with replay: rollouts and what is stored ---


class State(NamedTuple):
    """The state of an algorithm with replay."""

    learned: Any  # everything that an update changes
    observation_statistics: Any  # as in `PPO`; None if observations are not normalised
    replay: ReplayState  # rows of B
    env_state: Any  # leading axis B
    observation: Observation  # [B, *obs]
    key: jax.Array
    iteration: jax.Array  # int32
    bonus: Any = None  # the state of `Agent.bonus`
    recollection: Recollection | None = None  # [B], if the networks or the explorer have a memory


def first_state(self: Any, learned: Any, env_state: Any, observation: Any, key: jax.Array) -> State:
    """The initial state, with a replay buffer for `observation [B, *obs]`."""
    action, recollection = _no_action(self, self.num_envs), first_recollection(self, self.num_envs)
    memory = None if recollection is None else stored_memory(recollection)
    return State(
        learned=learned,
        observation_statistics=self.normalizers.begin(self.env.observation_space),
        replay=self.buffer.init(observation, action, *(() if memory is None else (memory,))),
        env_state=env_state,
        observation=observation,
        key=key,
        iteration=jnp.int32(0),
        bonus=self._first_bonus(observation),
        recollection=recollection,
    )


def first_recollection(self: Any, num_envs: int) -> Recollection | None:
    """The initial memories of network and explorer; None without both."""
    network, explorer = self._memory.begin(num_envs), self.explorer.begin(_no_action(self, num_envs))
    if network is None and explorer is None:
        return None
    return Recollection(ActorMemory(network, explorer), jnp.ones(num_envs, bool))


def _no_action(self: Any, num_envs: int) -> jax.Array:
    space = self.env.action_space
    return jnp.zeros((num_envs, *space.shape), jnp.float32 if isinstance(space, Box) else jnp.int32)


class Collected(NamedTuple):
    """The results of a rollout."""

    env_state: Any  # leading axis B
    observation: Any  # [B, *obs], after the last step
    recollection: Recollection | None  # after the last step
    bonus: Any  # the state of `Agent.bonus`
    rows: Any  # [T, B] or [C, B], for `Replay.add`
    observations: Any  # [T, B, *obs], before each action
    metrics: dict[str, jax.Array]


def collect(
    algorithm: Any, state: Any, act: Callable[..., tuple[jax.Array, Any]], key: jax.Array
) -> Collected:
    """Steps all environments `num_steps` times.

    `act`: `(observation [B], recollection [B], keys [B]) -> (action [B], memory [B])`.
    """
    buffer, first = algorithm.buffer, state.recollection
    each = getattr(buffer, "sequence_length", None)
    one_sequence = each == algorithm.num_steps

    def acting(observation: Any, recollection: Any, keys: jax.Array) -> tuple[Any, Any, Any]:
        action, memory = act(observation, recollection, keys)
        # If the rollout is one sequence, only its first memory is stored.
        if each is None:
            return action, (None, None), memory
        return action, (recollection.start, None if one_sequence else stored_memory(recollection)), memory

    begun = {"key": key, "env_state": state.env_state, "observation": state.observation}
    if first is None:
        env_state, observation, steps = rollout(
            lambda observation, keys: acting(observation, None, keys)[:2], **begun, **algorithm._rolling
        )
        recollection = None
    else:
        env_state, observation, recollection, steps = rollout_with_memory(
            acting, recollection=first, **begun, **algorithm._rolling
        )
    (observations, actions), (start, before), time_steps = steps
    if one_sequence:
        before = jax.tree.map(lambda x: x[None], stored_memory(first))
    elif each is not None:
        before = jax.tree.map(lambda x: x[::each], before)
    bonus, time_steps, paid = algorithm._paid(state.bonus, time_steps)
    rows = buffer.cut(before, start, Step.of(observations, actions, time_steps))
    metrics = {**episode_metrics(time_steps), **paid}
    return Collected(env_state, observation, recollection, bonus, rows, observations, metrics)


def stored_memory(recollection: Recollection) -> Any:
    """The part of the memory that replay stores: the network's."""
    memory = recollection.memory
    return memory.network if isinstance(memory, ActorMemory) else memory


# --- acting, with a memory or without ---


def memory(self: Any) -> NoMemory:
    """The memories of the algorithm's networks."""
    choice = getattr(self, "memory_settings", None)
    return NO_MEMORY if choice is None else choice.of(self)


def decide(self: Any, acting: Any, seen: Any, recollection: Recollection | None) -> tuple[Any, Any]:
    """The action distribution for observations `[B, *obs]`, and the networks' memory after them."""
    seen = self._memory.seen(seen, recollection)
    return self._policy(self._memory.of_actor(acting), seen), self._memory.after(acting, seen)


def actor_of(self: Any, state: State, acting: Any, amount: jax.Array) -> Actor:
    """An actor with the parameters `acting`; `amount` scales exploration."""

    def act(memory, observation, start, keys, greedy):
        seen = self.normalizers.seen(state.observation_statistics, observation)
        recollection = None if memory == () else Recollection(memory, start)
        policy, network = decide(self, acting, seen, recollection)
        sample = functools.partial(self._sampled, policy, amount)
        action, after = self.explorer.drawn(policy, sample, recollection, network, keys, amount, greedy)
        return self._for_environment(action), memory if recollection is None else after

    def begun(num_envs):
        recollection = first_recollection(self, num_envs)
        return () if recollection is None else recollection.memory

    return Actor(begun, act)


def seen_types(self: Any, state: State) -> Any:
    """Shapes and dtypes of the networks' inputs."""
    observation = composite.types(self.env.observation_space, (self.num_envs,))
    return jax.eval_shape(self._memory.seen, observation, state.recollection)


# --- actor-critics ---


@dataclasses.dataclass(frozen=True)
class ActorAndCritics(Part):
    """The user's networks, as (init, apply) pairs, in place of the defaults.

    The actor returns means and log standard deviations, `[N, 2 * size]`, or for TD3 and its variants actions
    before tanh, `[N, size]`. The critics take observations and actions, and return two values, each `[N]`; an
    ensemble returns `[E, N]` or `[E, N, K]`.
    """

    actor_network: Network | None = dataclasses.field(default=None, metadata=NETWORK)
    critic_network: Network | None = dataclasses.field(default=None, metadata=NETWORK)


def check(algorithm: Any) -> None:
    """Raises for fields out of range, unbounded actions, and sizes that do not divide."""
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
    """The replay buffer, no larger than the run.

    It samples the minibatches of all gradient steps at once, unless errors change priorities.
    """
    made = algorithm.replays.of(
        algorithm,
        buffer_size=min(algorithm.buffer_size, algorithm.num_iterations * algorithm.steps_per_iteration),
        batch_size=algorithm.batch_size,
        n_step=algorithm.n_step,
        **algorithm._memory.replay,
    )
    if made.has_priorities:
        return made
    return dataclasses.replace(made, batch_size=algorithm.updates_per_iteration * algorithm.batch_size)


# --- methods of classes with `driver=off_policy` ---
#
# An algorithm defines `_first(actor_key, critics_key, observation [B, *obs], action [B, *action])`, the
# initial parameters (only shapes and dtypes of its inputs are used); `_acting(learned)`, the parameters that
# act; `_learn_from(learned, minibatch [N], keys)`, one gradient step, which also returns the samples' errors
# if they have weights; and `_keys`, the keys of each sample.


def init(self: Any, key: jax.Array) -> State:
    """The initial state."""
    actor_key, critics_key, env_key, key = jax.random.split(key, 4)
    env_state, observation = self._reset(env_key)
    learned = self._first(actor_key, critics_key, observation, _no_action(self, self.num_envs))
    return first_state(self, learned, env_state, observation, key)


def iterate(self: Any, state: State) -> tuple[State, dict[str, jax.Array]]:
    """Steps all environments, then takes the gradient steps."""
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
    learned, replay_state, losses = gradient_steps(
        self, state.learned, statistics, replay_state, sample_key, learn_key, learning, state.iteration
    )
    # Here, so that an iteration normalises all observations with the same statistics.
    if self.normalizers.used:
        statistics = self.observe(statistics, acted.observations)
    left = acted.env_state, acted.observation, key, state.iteration + 1, acted.bonus, acted.recollection
    return State(learned, statistics, replay_state, *left), {**acted.metrics, **losses}


def gradient_steps(
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
    return actor_of(self, state, _at_work(self, state.learned), state.iteration / self.num_iterations)


def _at_work(self: Any, learned: Any) -> Any:
    """The parameters for acting; with a memory also the critics', whose memories advance too."""
    return self._memory.parameters(self._acting(learned), getattr(learned.parameters, "critics", None))


def sampled(self: Any, policy: Any, amount: Any, keys: jax.Array) -> jax.Array:
    """Actions as in training."""
    return policy.sample(keys)


def heads(self: Any) -> tuple[Head, Head]:
    """Outputs of the default networks with a memory."""
    size = math.prod(self.env.action_space.shape)
    return Head(self._each * size, scale=0.01), Head(_outputs(self), of_actions=True)


def without_error(self: Any, losses: dict[str, Any]) -> tuple[jax.Array | None, dict[str, Any]]:
    """Splits losses into the samples' errors `[N]` (None without weights) and the rest."""
    error = losses.pop("error", None)
    return None if error is None else self.buffer.priority(error), losses


@fdg.fragment("actor", in_axes=(None, None, None, None, 0, 0, 0))
def act(self, actor, statistics, learning, progress, observation, recollection, keys):
    """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`, and the next memory, `[B]`.

    Actions are uniform until learning starts.
    """
    seen = self.normalizers.seen(statistics, observation)
    policy, network = decide(self, actor, seen, recollection)
    # Both branches share a key, since only one result is used.
    uniform = jax.vmap(Box(-1.0, 1.0, self.env.action_space.shape).sample)(keys)
    action, memory = self.explorer.drawn(policy, policy.sample, recollection, network, keys, progress)
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
    # Steps before learning starts are computed and discarded: fragments inside a `cond` could not be placed
    # on different devices.
    learned = jax.tree.map(lambda new, old: jnp.where(learning, new, old), after, learned)
    losses = jax.tree.map(lambda x: jnp.where(learning, jnp.mean(x, axis=0), jnp.nan), losses)
    return learned, error, losses


def _one_step(self: Any, learned: Any, minibatch: Any, keys: jax.Array) -> tuple[Any, Any]:
    """A gradient step; losses, and the samples' errors `[N]` if there are weights."""
    learned, error, losses = self._learn_from(learned, minibatch, keys)
    return learned, (losses, error)


def default_actor(self: Any) -> Network:
    """The actor: with a memory, the user's, or the default with `_each` outputs per action component."""
    make = networks.gaussian_actor if self._each == 2 else networks.deterministic_actor
    return self._memory.network(0) or networks.computing(
        self,
        networks.own(self, "actor_network", "actor")
        or make(self.env.observation_space, self.env.action_space, **vars(self.layers)),
    )


def twin_critics(self: Any, layers: Layers | None = None) -> Network:
    """Two critics: with a memory, the user's, or the defaults with these layers."""
    return self._memory.network(1) or networks.computing(
        self,
        networks.own(self, "critic_network", "critic")
        or networks.twin_critics(
            self.env.observation_space, outputs=_outputs(self), **vars(layers or self.layers)
        ),
    )


def adam(self: Any) -> optax.GradientTransformation:
    """The optimiser, unless the user gave one."""
    return optax.adam(optimizers.step_size_of(self))


def minibatches(x: jax.Array, num_envs: int, updates: int) -> jax.Array:
    """Reshapes samples `[U * N, ...]` to minibatches `[U, N, ...]`, both environment-major."""
    by_environment = x.reshape(num_envs, updates, -1, *x.shape[1:])
    return by_environment.swapaxes(0, 1).reshape(updates, -1, *x.shape[1:])


def check_outputs(self: Any, state: State) -> None:
    """Raises if the networks' outputs do not fit the action space."""
    count, space, seen = self.num_envs, self.env.action_space, seen_types(self, state)
    actor = jax.eval_shape(self._acts, self._acting(state.learned), seen)
    check_gaussian(actor, space, count, self._each)
    action = jax.ShapeDtypeStruct((count, *space.shape), jnp.float32)
    self._check_critics(jax.eval_shape(self._valued, state.learned, seen, action))


def check_twins(self: Any, found: Any) -> None:
    """Raises unless critics return two values, each `[N]`, or logits of a grid of returns."""
    count, numbers = self.num_envs, _outputs(self)
    for value in check_two("critic_network", found, f"it gives two values, each [{count}]"):
        if numbers > 1:
            why = f"{numbers} numbers (atoms) for each sample"
            check_shape("critic_network gives a distribution as", value, (count, numbers), why)
        else:
            check_value("critic_network gives a value as", value, (count,), "one for each sample")


def _outputs(self: Any) -> int:
    """Outputs of a critic for each sample; more than one for a grid of returns."""
    grid = getattr(self, "grid", None)
    return 1 if grid is None else grid.reading.outputs


MEMBERS = {
    "normalizers": ObservationNormalizer(),
    "networks": ActorAndCritics(),
    "transforming": Transforming(),
    "explorer": ExplorerChoice(),
    "replays": StepReplay(),
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
    "check_when_traced": check_outputs,
    "_actor": property(default_actor),
    "_each": 2,  # actor outputs per action component: mean, log standard deviation
    "_heads": property(heads),
    "_memory": property(memory),
    "_sampled": sampled,
    "_critics": property(twin_critics),
    "_for_environment": lambda self, action: stretched(action, self.env.action_space),
    "_default_optimizer": property(adam),
    # The acting parameters, and what `check_outputs` calls.
    "_acting": lambda self, learned: learned.parameters.actor,
    "_acts": lambda self, actor, observation: self._actor.apply(actor, observation),
    "_valued": lambda self, learned, *inputs: self._critics.apply(learned.parameters.critics, *inputs),
    "_check_critics": check_twins,
}
