"""On-policy training as functions: each iteration makes a rollout of all environments and learns from it.

    begin -> State;    iteration: State -> T times (act, step) -> learn -> State

Shapes: `T` steps of a rollout, `B` environments, `N` rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from algos import registry
from algos.rollout import (
    Actor,
    Recollection,
    choose_actions,
    empty_memory,
    ignoring_memory,
    rollout_with_memory,
)
from algos.values import Layers, Policy
from envs import Observation, TimeStep, features_and_mask
from fdg.settings.fields import hyperparameter, require_positive
from fdg.settings.moved import moved
from fdg.settings.parts import Part

# Names that moved.
__getattr__ = moved(__name__, "algos.one_update", "over_time algos.values:Normalizers")


@dataclasses.dataclass(frozen=True)
class PolicyLayers(Layers):
    """Layers of an actor-critic, and the initial deviation of a Gaussian policy."""

    initial_log_std: float = hyperparameter(
        0.0, "initial log standard deviation of the policy (continuous actions)"
    )


class State(NamedTuple):
    """The state of an on-policy algorithm."""

    parameters: Any
    optimizer_state: Any
    observation_statistics: Any  # RunningStatistics of [*obs], or of each part; None if not normalised
    return_statistics: Any  # of discounted returns, whose deviation divides rewards; or None
    running_return: jax.Array | None  # [B] float32, the discounted return so far
    env_state: Any  # leading axis B
    observation: Observation  # [B, *obs]
    key: jax.Array
    iteration: jax.Array  # int32
    known: Any = None  # PPO's `algos.rnd.NoveltyState`; None without `rnd` (the name is a key in checkpoints)
    running_novelty: jax.Array | None = None  # [B] float32, discounted novelty so far; None without `rnd`
    bonus: Any = None  # the state of `Agent.bonus`
    recollection: Any = None  # `algos.rollout.Recollection [B]`, if the network has a memory
    past: Any = None  # `algos.recurrent_ppo.Past [B]`, with burn-in


# The fields of a state that learning changes. The last is PPO's; A3C and RecurrentPPO use the first four.
LEARNED = ("parameters", "optimizer_state", "observation_statistics", "return_statistics", "known")


class Trajectory(NamedTuple):
    """A rollout. For the loss, its observations and rewards are normalised, if the settings say so."""

    observation: Observation  # [T, B, *obs]; in losses of recurrent networks `algos.sequences.RolloutSteps`
    action: jax.Array  # [T, B, *action]
    decision: Any  # [T, B], what the actor recorded with each action, or None
    time_step: TimeStep  # [T, B], the results of the actions


def begin(
    algorithm: Any,
    key: jax.Array,
    keep_statistics: bool = False,
    novelty: Any = None,
    memory: Callable[[int], Any] | None = None,
) -> State:
    """The initial state: environments are reset, and network, optimiser and statistics initialised.

    Args:
      algorithm: an on-policy algorithm.
      key: the random key of the run.
      keep_statistics: True if the state has statistics even if nothing is normalised.
      novelty: adds the networks of a novelty bonus to the parameters: `(key, parameters, observation) ->
        (parameters, novelty_state, running_novelty)`; None for no bonus.
      memory: `B -> memory`, the network's initial memory `[B, ...]`.
    """
    normalizers = algorithm.normalizers
    parameter_key, env_key, key = jax.random.split(key, 3)
    env_state, observation = algorithm._reset(env_key)
    inputs, recollection = features_and_mask(observation)[0], None
    if memory is not None:
        recollection = Recollection(memory(algorithm.num_envs), jnp.ones(algorithm.num_envs, bool))
    if hasattr(algorithm._network, "unroll"):  # a recurrent network takes sequences of steps
        inputs = jax.tree.map(lambda x: x[None], inputs)
    parameters = algorithm._network.init(parameter_key, inputs)
    novelty_state, running_novelty = None, None
    if novelty is not None:
        parameters, novelty_state, running_novelty = novelty(parameter_key, parameters, observation)
    return_statistics, running_return = normalizers.begin_returns(algorithm._reward_shape, keep_statistics)
    return State(
        parameters=parameters,
        optimizer_state=algorithm._optimizer.init(parameters),
        observation_statistics=normalizers.begin(algorithm.env.observation_space, keep_statistics),
        return_statistics=return_statistics,
        running_return=running_return,
        env_state=env_state,
        observation=observation,
        key=key,
        iteration=jnp.int32(0),
        known=novelty_state,
        running_novelty=running_novelty,
        bonus=algorithm._initial_bonus_state(observation, key),
        recollection=recollection,
    )


def iteration(
    algorithm: Any,
    state: State,
    act: Callable[..., tuple[jax.Array, Any]] | None = None,
    learn: Callable[..., tuple[tuple[Any, ...], Any, dict[str, jax.Array]]] | None = None,
) -> tuple[State, dict[str, jax.Array]]:
    """Makes a rollout of all environments and learns from it; returns the new state, and metrics.

    Args:
      act: `(parameters, observation_statistics, observation [B, *obs], keys [B]) -> (action, decision)`; by
        default `algorithm.act`.
      learn: `(learned, running, Trajectory [T, B], key) -> (learned, running, metrics)`; by default
        `algorithm.learn`. `learned` has the fields `LEARNED` of the state; `running` is `(running_return,
        running_novelty)`.
    """
    act, learn = act or algorithm.act, learn or algorithm.learn
    key, rollout_key, learn_key = jax.random.split(state.key, 3)
    trajectory, new_fields, bonus_metrics = rollout_with_bonus(
        algorithm,
        state,
        lambda *inputs: act(state.parameters, state.observation_statistics, *inputs),
        rollout_key,
    )
    learned, running, metrics = learn(
        tuple(getattr(state, name) for name in LEARNED),
        (state.running_return, state.running_novelty),
        algorithm.transforming.rows(trajectory, state.parameters, learn_key),
        learn_key,
    )
    names = (*LEARNED, "running_return", "running_novelty")
    new_fields |= dict(zip(names, (*learned, *running), strict=True))
    state = state._replace(key=key, iteration=state.iteration + 1, **new_fields)
    return state, {**metrics, **bonus_metrics}


def rollout_with_bonus(
    algorithm: Any, state: Any, act: Callable[..., tuple[jax.Array, Any]], key: jax.Array
) -> tuple[Trajectory, dict[str, Any], dict[str, jax.Array]]:
    """A rollout `[T, B]` with the bonus added, changed fields of the state, and the bonus's metrics.

    `act` is as for `algos.rollout.rollout`, or, if the state has a recollection, `rollout_with_memory`.
    """
    recollection = getattr(state, "recollection", None)
    env_state, observation, recollection, ((observations, actions), decisions, time_steps) = (
        rollout_with_memory(
            act if recollection is not None else ignoring_memory(act),
            key=key, env_state=state.env_state, observation=state.observation, recollection=recollection,
            **algorithm._rollout_arguments,
        )
    )  # fmt: skip
    bonus, time_steps, bonus_metrics = algorithm._add_bonus(state.bonus, time_steps)
    new_fields = {"env_state": env_state, "observation": observation, "bonus": bonus}
    new_fields |= {} if recollection is None else {"recollection": recollection}
    return Trajectory(observations, actions, decisions, time_steps), new_fields, bonus_metrics


def actor(self: Any, state: State) -> Actor:
    """The actor with the parameters and observation statistics of the state."""

    def policy(observation):
        normalized = self.normalizers.seen(state.observation_statistics, observation)
        return self.policy_and_value(state.parameters, normalized)[0]

    return without_memory(policy, self._for_environment)


def without_memory(
    policy: Callable[[Observation], Policy], to_env_action: Callable[[jax.Array], jax.Array]
) -> Actor:
    """The actor of a feed-forward policy, a function of observations `[N, *obs]` to a distribution `[N]`.

    `to_env_action` converts the policy's actions for the environment, such as by clipping.
    """

    def act(memory, observation, start, keys, greedy):
        return to_env_action(choose_actions(policy(observation), keys, greedy)), memory

    return Actor(empty_memory, act)


# --- learning: epochs of minibatches ---


def environment_major(x: jax.Array) -> jax.Array:
    """Reshapes steps `[T, B, ...]` to rows `[B * T, ...]`; a sharding of `B` becomes a sharding of rows.

    Steps and environments become one axis, because XLA is fast at products of two-dimensional matrices.

    >>> environment_major(jnp.array([[1, 10], [2, 20], [3, 30]])).tolist()
    [1, 2, 3, 10, 20, 30]
    """
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


@dataclasses.dataclass(frozen=True)
class Epochs(Part):
    """Settings of the epochs over a rollout, and of their minibatches."""

    num_epochs: int = hyperparameter(4, "passes over each rollout")
    num_minibatches: int = hyperparameter(4, "gradient steps in one pass")
    shuffle: Literal["each", "all", "time"] = hyperparameter(
        "each",
        "how an epoch shuffles; each: within each environment; all: all samples together (devices exchange"
        " them); time: time steps, in the same order for every environment",
    )

    @property
    def updates(self) -> int:
        """Gradient steps for one rollout."""
        return self.num_epochs * self.num_minibatches

    def check(self, algorithm: Any) -> None:
        """Refuses counts that are not positive."""
        require_positive(algorithm, "num_epochs", "num_minibatches")

    def learn(
        self,
        key: jax.Array,
        samples: Any,
        num_envs: int,
        parameters: Any,
        optimizer_state: Any,
        gradient: Callable[[Any, Any], tuple[Any, Any]],
        update: Callable[[Any, Any, Any], tuple[Any, Any]],
    ) -> tuple[Any, Any, Any]:
        """Parameters and optimiser state after all epochs, and the mean losses; see `run_minibatches`.

        `samples [B * per_env, ...]` are environment-major (see `algos.optimizers`).
        """
        per_env = jax.tree.leaves(samples)[0].shape[0] // num_envs
        rows = registry.option("optimizers").rows_of_epochs(self, key, num_envs, per_env)
        take = functools.partial(self.minibatch, samples, num_envs=num_envs)
        return run_minibatches(gradient, update, parameters, optimizer_state, rows, take)

    def minibatch(self, samples: Any, rows: jax.Array, num_envs: int) -> Any:
        """The samples at rows `[blocks, n]`; if `shuffle` is "time", at these rows of every environment."""
        optimizers = registry.option("optimizers")
        if self.shuffle == "time":
            return optimizers.take_of_every_env(samples, rows, num_envs)
        return optimizers.take(samples, rows)


def run_minibatches(
    gradient: Callable[[Any, Any], tuple[Any, Any]],
    update: Callable[[Any, Any, Any], tuple[Any, Any]],
    parameters: Any,
    optimizer_state: Any,
    rows: jax.Array,
    take: Callable[[jax.Array], Any],
) -> tuple[Any, Any, Any]:
    """Makes all updates, each on its own minibatch; returns parameters, optimiser state and mean losses.

    `gradient`: `(parameters, minibatch) -> (gradient, losses)`. `update`: `(gradient, optimizer_state,
    parameters) -> (parameters, optimizer_state)`. `rows`: `[updates, blocks, n]` int32, for each update `n`
    rows of each block of samples (see `algos.optimizers.shuffled_rows`). `take` makes a minibatch from the
    rows of one update, `[blocks, n]`.

    >>> gradient = lambda w, x: (x.sum(), {"loss": w})
    >>> update = lambda gradient, count, w: (w + gradient, count + 1)
    >>> rows, samples = jnp.array([[0], [2]]), jnp.array([1.0, 2.0, 4.0])
    >>> take = lambda r: samples[r]
    >>> w, count, losses = run_minibatches(gradient, update, jnp.float32(0), jnp.int32(0), rows, take)
    >>> float(w), int(count), float(losses["loss"])  # 0, then 0 + 1, then 1 + 4
    (5.0, 2, 0.5)
    """

    def one_update(carry, update_rows):
        parameters, optimizer_state = carry
        update_gradient, losses = gradient(parameters, take(update_rows))
        return update(update_gradient, optimizer_state, parameters), losses

    (parameters, optimizer_state), losses = jax.lax.scan(one_update, (parameters, optimizer_state), rows)
    return parameters, optimizer_state, jax.tree.map(lambda x: jnp.mean(x, axis=0), losses)
