"""On-policy training as functions: a rollout of all environments, then learning from it.

    begin -> State,    iteration: State -> act and step, T times -> learn -> State

Shapes: `T` steps of a rollout, `B` environments, `N` rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos import networks
from algos.distributions import Distribution
from algos.rollout import Actor, environment_major, episode_metrics, rollout, time_major, without_memory
from envs import Observation, TimeStep, features_and_mask


class State(NamedTuple):
    """The state of an on-policy algorithm."""

    parameters: Any
    optimizer_state: Any
    observation_statistics: Any  # RunningStatistics of [*obs], or of each part; None if not normalised
    return_statistics: Any  # of the discounted return that scales rewards, or None
    running_return: jax.Array | None  # [B] float32, the discounted return so far
    env_state: Any  # leading axis B
    observation: Observation  # [B, *obs]
    key: jax.Array
    iteration: jax.Array  # int32
    known: Any = None  # the state of an exploration bonus (`algos.ppo`), without parameters
    running_novelty: jax.Array | None = None  # [B] float32, likewise: the discounted return of novelty
    bonus: Any = None  # the state of `Agent.bonus`


# The part of a state that learning changes.
LEARNED = ("parameters", "optimizer_state", "observation_statistics", "return_statistics", "known")


class Trajectory(NamedTuple):
    """A rollout. The loss gets it with normalised observations and rewards, if enabled."""

    observation: Observation  # [T, B, *obs]
    action: jax.Array  # [T, B, *action]
    decision: Any  # [T, B], recorded by the actor with the action; None if nothing
    time_step: TimeStep  # [T, B], the results of the actions


def begin(
    algorithm: Any,
    key: jax.Array,
    statistics: Any,
    returns: tuple[Any, jax.Array | None],
    novelty: Callable[[jax.Array, Any, Observation], tuple[Any, Any, Any]] | None = None,
) -> State:
    """The initial state.

    `statistics`: the initial statistics of observations. `returns`: the initial statistics of returns, and
    running returns. `novelty`: `(key, parameters, observation) -> (parameters, known, running_novelty)`, or
    None.
    """
    parameter_key, env_key, key = jax.random.split(key, 3)
    env_state, observation = algorithm._reset(env_key)
    parameters = algorithm._network.init(parameter_key, features_and_mask(observation)[0])
    known, running_novelty = None, None
    if novelty is not None:
        parameters, known, running_novelty = novelty(parameter_key, parameters, observation)
    return State(
        parameters=parameters,
        optimizer_state=algorithm._optimizer.init(parameters),
        observation_statistics=statistics,
        return_statistics=returns[0],
        running_return=returns[1],
        env_state=env_state,
        observation=observation,
        key=key,
        iteration=jnp.int32(0),
        known=known,
        running_novelty=running_novelty,
        bonus=algorithm._first_bonus(observation),
    )


def iteration(
    algorithm: Any,
    state: State,
    act: Callable[..., tuple[jax.Array, Any]] | None = None,
    learn: Callable[..., tuple[tuple[Any, ...], Any, dict[str, jax.Array]]] | None = None,
) -> tuple[State, dict[str, jax.Array]]:
    """Steps all environments for a rollout and learns from it; returns the new state, and metrics.

    Args:
      act: `(parameters, observation_statistics, observation [B, *obs], keys [B]) -> (action, decision)`; None
        for the algorithm's.
      learn: `((parameters, optimizer_state, observation_statistics, return_statistics, known),
        (running_return, running_novelty), Trajectory [T, B], key)` to the new first two and metrics; None for
        the algorithm's. `known` is None without `rnd`.
    """
    act, learn = act or algorithm.act, learn or algorithm.learn
    key, rollout_key, learn_key = jax.random.split(state.key, 3)
    trajectory, after, paid = rollout_with_bonus(
        algorithm,
        state,
        lambda observation, keys: act(state.parameters, state.observation_statistics, observation, keys),
        rollout_key,
    )
    learned, running, metrics = learn(
        tuple(getattr(state, name) for name in LEARNED),
        (state.running_return, state.running_novelty),
        algorithm.transforming.rows(trajectory, state.parameters, learn_key),
        learn_key,
    )
    after |= dict(zip((*LEARNED, "running_return", "running_novelty"), (*learned, *running), strict=True))
    return state._replace(key=key, iteration=state.iteration + 1, **after), {**metrics, **paid}


def rollout_with_bonus(
    algorithm: Any, state: Any, act: Callable[..., tuple[jax.Array, Any]], key: jax.Array
) -> tuple[Trajectory, dict[str, Any], dict[str, jax.Array]]:
    """A rollout `[T, B]` with the bonus added, changed fields of the state by name, and the bonus's
    metrics."""
    env_state, observation, ((observations, actions), decisions, time_steps) = rollout(
        act=act, key=key, env_state=state.env_state, observation=state.observation, **algorithm._rolling
    )
    bonus, time_steps, paid = algorithm._paid(state.bonus, time_steps)
    after = {"env_state": env_state, "observation": observation, "bonus": bonus}
    return Trajectory(observations, actions, decisions, time_steps), after, paid


def over_time(function: Callable[[Observation], Any], observation: Observation) -> Any:
    """Applies a function of rows `[N, *obs]` to observations `[T, B, *obs]`; results are `[T, B, ...]`."""
    num_steps = jax.tree.leaves(observation)[0].shape[0]
    of_rows = function(jax.tree.map(environment_major, observation))
    return jax.tree.map(lambda x: time_major(x, num_steps), of_rows)


# --- methods of actor-critics with `driver=on_policy`, which update once per rollout ---


def init(self: Any, key: jax.Array) -> Any:
    """The initial state."""
    statistics = self.normalizers.begin(self.env.observation_space)
    return begin(self, key, statistics, self.normalizers.begin_returns((self.num_envs,)))


def iterate_once(self: Any, state: Any) -> tuple[Any, dict[str, jax.Array]]:
    """One rollout of all environments, and one update on it."""
    return iteration(self, state, learn=lambda *arguments: self.learn(*arguments[:3]))


def actor(self: Any, state: State) -> Actor:
    """The actor with these parameters and statistics."""

    def policy(observation):
        seen = self.normalizers.seen(state.observation_statistics, observation)
        return self._policy(state.parameters, seen)[0]

    return without_memory(policy, self._for_environment)


def policy_and_value(self: Any, parameters: Any, observation: Observation) -> tuple[Distribution, jax.Array]:
    """Distribution over actions and value `[N]`, for observations `[N, *obs]`."""
    return networks.policy_and_value(self._network, parameters, observation, self.env.action_space)


def check_when_traced(self: Any, state: State) -> None:
    """Refuses a network whose outputs do not fit the action space."""
    self._check_actor_critic(self._network, state.parameters)


@fdg.fragment("learner", in_axes=(None, 0, 1), out_axes=(None, 0, None), name="learn")
def learn_once(self, learned, running, trajectory):
    """One update of parameters and optimiser on a rollout `[T, B]`, then of the statistics."""
    parameters, optimizer_state, *statistics = learned
    seen, running, statistics = self.normalizers.rollout(statistics, running, trajectory, self.discount)
    gradient, losses = self.gradient(parameters, seen)
    learned = (*self.update(gradient, optimizer_state, parameters), *statistics)
    return learned, running, {**episode_metrics(trajectory.time_step), **losses}


@fdg.fragment("gradient", in_axes=(None, 1), out_axes=None, name="gradient")
def gradient_of_rollout(self, parameters, trajectory):
    """Gradient of the loss over a rollout `[T, B]`, and the loss's terms."""
    return jax.grad(self.loss, has_aux=True)(parameters, trajectory)


MEMBERS = {
    "init": init,
    "iterate": iterate_once,
    "actor": actor,
    "learn": learn_once,
    "gradient": gradient_of_rollout,
    "updates_per_iteration": property(lambda self: 1),
    "check_when_traced": check_when_traced,
    "_policy": policy_and_value,
    "_network": property(lambda self: self._actor_critic()),
}
