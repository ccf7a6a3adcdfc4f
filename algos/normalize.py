"""Running means and variances, which normalise observations and scale rewards.

Statistics are arrays in the algorithm's state. They are updated once per iteration, from the whole rollout
`[T, B]`. So all steps of a rollout use the same statistics, and the loop over steps needs no collective.
Under a distribution policy with staleness, the actor's statistics are as old as its parameters.

Each environment has a running discounted return. Rewards are divided by the standard deviation of these
returns (Engstrom et al. 2020, "Implementation Matters in Deep RL", arXiv 2005.12729, optimisation 2).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import fdg
from algos.interfaces import Normalizer
from algos.values import Normalizers, ObservationNormalizer, by_name
from envs import composite, features_and_mask, map_features
from envs.composite import ObservationSpace
from envs.spaces import Box, Space
from fdg.arguments import quoted
from fdg.errors import FdgError
from fdg.settings.fields import require
from fdg.settings.user_results import check_same

_EPSILON = 1e-8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunningStatistics:
    """Mean and variance of all samples so far, for each component."""

    mean: jax.Array  # [*shape] float32
    var: jax.Array  # [*shape] float32, the population variance; 1 before the first update
    count: jax.Array  # [] float32, number of samples; exact up to 2**24


def init(shape: tuple[int, ...]) -> RunningStatistics:
    """Empty statistics: mean 0, variance 1. Normalising with them only clips.

    >>> init((3,)).var.tolist()
    [1.0, 1.0, 1.0]
    """
    return RunningStatistics(jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32), jnp.float32(0))


# --- observations: an array, or parts in a dictionary or tuple ---


def has_statistics(space: ObservationSpace) -> bool:
    """True if a part of the observations is normalised.

    >>> from envs.spaces import Discrete
    >>> has_statistics(Discrete(3)), has_statistics(composite.Tuple((Discrete(3), Box(0.0, 1.0, ()))))
    (False, True)
    """
    return any(_is_normalized(space, part) for _, part in composite.parts(space))


def init_observations(space: ObservationSpace) -> Any:
    """Initial statistics: `init` for each part that is normalised, None for the other parts.

    Categories and codes, which networks convert to one-hot, and uint8 images, which networks divide by 255,
    are not normalised. An observation that is a single array is always normalised.
    """
    if not composite.is_composite(space):
        return init(composite.parts(space)[0][1].shape)
    return composite.map_parts(lambda part: init(part.shape) if _is_normalized(space, part) else None, space)


def _is_normalized(space: ObservationSpace, part: Space) -> bool:
    return isinstance(part, Box) and (part is space or (part.dtype != "uint8" and part.codes is None))


def normalize_observations(stats: Any, observation: Any) -> Any:
    """Normalises each part of observations `[..., *obs]` that has statistics (`normalize`)."""
    return _map_normalized(normalize, stats, observation)


def update_observations(stats: Any, observation: Any) -> Any:
    """Updates the statistics with observations `[..., *obs]`, whose leading axes are samples."""
    return _map_normalized(update, stats, observation, lambda stats, _: stats)


def _map_normalized(
    function: Any, stats: Any, observation: Any, otherwise: Any = lambda _, part: part
) -> Any:
    """Calls `function(statistics, part)` for each part with statistics, and `otherwise` for other parts."""
    return jax.tree.map(
        lambda part_stats, part: (otherwise if part_stats is None else function)(part_stats, part),
        stats,
        observation,
        is_leaf=lambda leaf: leaf is None or isinstance(leaf, RunningStatistics),
    )


# Running mean and variance; the default of `normalize_observation=True`.
RUNNING = Normalizer(init_observations, normalize_observations, update_observations)


# --- functions that `algos.values.Normalizers` calls; `normalizer` is the user's, or None ---


def begin(normalizer: Normalizer | None, space: ObservationSpace) -> Any:
    """Initial statistics of observations."""
    return _normalizer_or_default(normalizer).init(space)


def normalize_inputs(normalizer: Normalizer | None, statistics: Any, observation: Any) -> Any:
    """Normalises observations `[..., *obs]` for the networks."""

    def apply(features: Any) -> Any:
        if hasattr(features, "map_observations"):  # sequences
            return features.map_observations(apply)
        normalized = _normalizer_or_default(normalizer).apply(statistics, features)
        check_same("apply of normalize gives observations", features, normalized, dtypes=False)
        return normalized

    return map_features(apply, observation)


def update_with_rollout(normalizer: Normalizer | None, statistics: Any, observation: Any) -> Any:
    """Updates the statistics with observations `[T, B, *obs]`."""
    new_statistics = _normalizer_or_default(normalizer).update(statistics, features_and_mask(observation)[0])
    check_same("update of normalize gives statistics", statistics, new_statistics)
    return new_statistics


def begin_returns(shape: tuple[int, ...]) -> tuple[RunningStatistics, jax.Array]:
    """Initial statistics of returns, and zeros of this shape as the environments' running returns."""
    return init(()), jnp.zeros(shape, jnp.float32)


def check(settings: ObservationNormalizer, algorithm: Any) -> None:
    """Refuses two normalisers, and observations without a mean or variance."""
    require(
        algorithm,
        settings.normalize is None or not settings.normalize_observation,
        f"normalize_observation=True and normalize={quoted(settings.normalize)}: give one of them",
    )
    space = algorithm.env.observation_space
    require(
        algorithm,
        not settings.normalize_observation or has_statistics(space),
        f"normalize_observation=True: {space} has no mean or variance; leave it False",
    )


def normalize_rollout(
    normalizers: Normalizers, statistics: Any, running: Any, trajectory: Any, discount: float | jax.Array
) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Normalises a rollout for the loss; returns it, `running` and `statistics` after it.

    `statistics` is a tuple: of observations, of returns, and others. `running` is a tuple: the running
    returns, and others. The others are returned unchanged. `trajectory` is a named tuple with an
    `observation [T, B, *obs]` and a `time_step [T, B]`.
    """
    observation_statistics, return_statistics, *other_statistics = statistics
    running_return, *other_running = running
    time_step = trajectory.time_step
    reward, running_return, return_statistics = normalizers.reward(
        time_step, running_return, return_statistics, discount
    )
    final = normalizers.seen(observation_statistics, time_step.final_observation)
    normalized = trajectory._replace(
        observation=normalizers.seen(observation_statistics, trajectory.observation),
        time_step=time_step._replace(reward=reward, final_observation=final),
    )
    observation_statistics = normalizers.update(observation_statistics, trajectory.observation)
    statistics = (observation_statistics, return_statistics, *other_statistics)
    return normalized, (running_return, *other_running), statistics


def _normalizer_or_default(normalizer: Normalizer | None) -> Normalizer:
    """The user's normaliser, or `RUNNING`."""
    return RUNNING if normalizer is None else by_name("--normalize", normalizer)


def update(
    stats: RunningStatistics, batch: jax.Array, axes: int | tuple[int, ...] | None = None
) -> RunningStatistics:
    """Updates the statistics `[*shape]` with the samples of `batch [..., *shape]`.

    Uses the pairwise formula (Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance"),
    which stays accurate if the mean is large. `axes` are the axes of samples in `batch`; None: all before
    `shape`.

    >>> stats = update(init(()), jnp.array([1.0, 2.0]))
    >>> stats = update(stats, jnp.array([[3.0, 6.0]]))
    >>> float(stats.mean), float(stats.var), float(stats.count)  # of 1, 2, 3, 6
    (3.0, 3.5, 4.0)
    """
    axes = tuple(range(batch.ndim - stats.mean.ndim)) if axes is None else axes
    batch = batch.astype(jnp.float32)
    batch_mean = jnp.mean(batch, axis=axes, keepdims=True)
    batch_var = jnp.mean(jnp.square(batch - batch_mean), axis=axes)
    batch_mean = batch_mean.reshape(batch_var.shape)
    if batch_mean.shape != stats.mean.shape:
        raise FdgError(
            f"a batch of shape {list(batch.shape)} reduced over axes {axes} leaves {list(batch_mean.shape)}, "
            f"but the statistics have shape {list(stats.mean.shape)}: give the axes of samples"
        )
    batch_count = batch.size // max(batch_mean.size, 1)
    count = stats.count + batch_count
    share = batch_count / count  # the new samples' fraction of all samples
    difference = batch_mean - stats.mean
    return RunningStatistics(
        mean=stats.mean + share * difference,
        var=(1.0 - share) * stats.var + share * batch_var + (1.0 - share) * share * jnp.square(difference),
        count=count,
    )


def normalize(stats: RunningStatistics, x: jax.Array, clip: float = 10.0) -> jax.Array:
    """`(x - mean) / std`, clipped to `[-clip, clip]`: `[..., *shape]` float32.

    No gradient flows into the statistics.
    """
    mean, std = jax.lax.stop_gradient((stats.mean, jnp.sqrt(stats.var + _EPSILON)))
    leading = (1,) * (x.ndim - mean.ndim)
    centred = x.astype(jnp.float32) - mean.reshape(leading + mean.shape)
    return jnp.clip(centred / std.reshape(leading + std.shape), -clip, clip)


def accumulate_rollout_returns(
    running_return: jax.Array, reward: jax.Array, done: jax.Array, discount: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Updates the running discounted returns over a rollout `[T, B]`; their deviation scales rewards.

    Returns the `running_return [B]` after the rollout (initially zero; reset where an episode is `done`), and
    the returns of all steps `[T, B]`, which are samples for the statistics. `reward` is unscaled.

    >>> done = jnp.array([[False, True]])
    >>> carry, samples = accumulate_rollout_returns(jnp.array([2.0, 2.0]), jnp.ones((1, 2)), done, 0.5)
    >>> carry.tolist(), samples.tolist()
    ([2.0, 0.0], [[2.0, 2.0]])
    """

    def step(running_return: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, done = row
        accumulated = discount * running_return + reward
        return jnp.where(done, 0.0, accumulated), accumulated

    return jax.lax.scan(step, running_return, (reward, done))


def scale(stats: RunningStatistics, reward: jax.Array, clip: float = 10.0) -> jax.Array:
    """Reward divided by the standard deviation of the running return, clipped to `[-clip, clip]`.

    `stats` has shape `()`; `reward` any shape. The mean is not subtracted, since that would change the
    best policy. If a return of 1e19 or more makes the variance infinite, the result is NaN, which stops the
    run. Division by infinity would make all later rewards 0.
    """
    std = jax.lax.stop_gradient(jnp.sqrt(stats.var + _EPSILON))
    return jnp.clip(reward / jnp.where(jnp.isinf(std), jnp.nan, std), -clip, clip)


def update_returns(self: Any, returns: tuple[Any, Any], time_step: Any) -> tuple[Any, Any]:
    """Updates `returns` with a rollout `[T, B]`; `self` is the algorithm.

    `returns` is a pair: the statistics of returns, and the running returns `[B]`. If both are None, rewards
    are not normalised, and both stay None.
    """
    return returns if returns[0] is None else _update_returns.__get__(self)(*returns, time_step)


@fdg.fragment("learner", in_axes=(None, 0, 1), out_axes=(None, 0), name="observe")
def _update_returns(self, statistics, running_return, time_step):
    """`update_returns`, if rewards are normalised."""
    _, running_return, statistics = self.normalizers.reward(
        time_step, running_return, statistics, self.discount
    )
    return statistics, running_return


def scale_row_rewards(stats: RunningStatistics, rows: Any, replay: Any) -> Any:
    """Scales the rewards of rows from replay, `algos.replaying.Transition` or `algos.sequences.Sequences`."""
    if hasattr(rows, "steps"):
        return rows._replace(steps=rows.steps._replace(reward=_scale_rows(stats, rows.steps.reward)))
    # A transition's reward is a discounted sum of up to n rewards. Each may be as large as `clip` of `scale`,
    # so the sum is clipped at `size * clip`.
    size = sum(replay.discount**k for k in range(replay.n_step))
    return rows._replace(reward=size * _scale_rows(stats, rows.reward / size))


@fdg.fragment("buffer", in_axes=(None, 1), out_axes=1, name="scale")
def _scale_rows(stats, reward):
    return scale(stats, reward)


def scale_rewards(
    reward: jax.Array,
    done: jax.Array,
    running_return: jax.Array,
    stats: RunningStatistics,
    discount: float | jax.Array,
) -> tuple[jax.Array, jax.Array, RunningStatistics]:
    """Scales the rewards `[T, B]` of a rollout; also returns new running returns `[B]` and statistics."""
    done = done.reshape(*done.shape, *(1,) * (reward.ndim - done.ndim))  # an axis for agents
    running_return, returns = accumulate_rollout_returns(running_return, reward, done, discount)
    stats = update(stats, returns)
    return scale(stats, reward), running_return, stats
