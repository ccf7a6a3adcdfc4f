"""Running means and variances, which normalise observations and scale rewards.

Statistics are arrays in the algorithm's state. A rollout reads them; they are updated once an iteration, from
the whole `[T, B]` rollout. So all steps of a rollout are normalised with the same statistics, and the loop
over steps needs no collective. The actor reads them as it reads parameters, so under a distribution policy
with staleness they are as old as these.

Rewards are divided by the standard deviation of a running discounted return (Engstrom et al. 2020,
"Implementation Matters in Deep RL", arXiv 2005.12729, optimisation 2), one such return per environment.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos.networks import by_name
from envs import TimeStep, composite, features_and_mask, map_features
from envs.composite import ObservationSpace
from envs.spaces import Box, Space
from fdg.arguments import check_takes, checked_names
from fdg.errors import FdgError
from fdg.settings.fields import hyperparameter, own_value, require
from fdg.settings.given import check_same
from fdg.settings.parts import Part

_EPSILON = 1e-8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunningStatistics:
    """Mean and variance of all samples so far, for each component."""

    mean: jax.Array  # [*shape] float32
    var: jax.Array  # [*shape] float32, population variance (divided by count); 1 before the first update
    count: jax.Array  # [] float32, number of samples; exact up to 2**24


def init(shape: tuple[int, ...]) -> RunningStatistics:
    """Statistics of no samples: mean 0, variance 1. Normalising with them only clips.

    >>> init((3,)).var.tolist()
    [1.0, 1.0, 1.0]
    """
    return RunningStatistics(jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32), jnp.float32(0))


# --- what algorithms are given ---


@checked_names
class Normalizer(NamedTuple):
    """Normalisation of observations, as three pure functions.

    `init(observation_space) -> statistics`, a pytree.
    `apply(statistics, observation [..., *obs]) -> observation [..., *obs]`, with the same shapes.
    `update(statistics, observation [T, B, *obs]) -> statistics`, once after each rollout; with several
    agents, and in A3C with its workers, there is another leading axis: count axes from the last.
    """

    init: Callable[[ObservationSpace], Any]
    apply: Callable[[Any, Any], Any]
    update: Callable[[Any, Any], Any]

    @staticmethod
    def described() -> str:
        """Its name in messages."""
        return "an algos.Normalizer(init, apply, update), 'module:name' of one"


@dataclass(frozen=True)
class ObservationNormalizer(Part):
    """Settings of the normalisation of observations."""

    normalize_observation: bool = hyperparameter(False, "normalise observations by running mean and variance")
    normalize: Normalizer | None = own_value(
        "module:name of a normaliser of observations, an algos.Normalizer (None: by --normalize-observation)",
        "normalizer",
    )

    @property
    def used(self) -> bool:
        """Whether observations are normalised."""
        return self.normalize_observation or self.normalize is not None

    @property
    def _normalizer(self) -> Normalizer:
        return by_name("--normalize", self.normalize) or RUNNING

    def begin(self, space: ObservationSpace, kept: bool = False) -> Any:
        """Initial statistics; None if observations are not normalised, unless they are kept."""
        return self._normalizer.init(space) if self.used or kept else None

    def seen(self, statistics: Any, observation: Any) -> Any:
        """Observations `[..., *obs]` as inputs of networks."""
        if not self.used:
            return observation

        def apply(features: Any) -> Any:
            after = self._normalizer.apply(statistics, features)
            check_same("apply of normalize gives observations", features, after, dtypes=False)
            return after

        return map_features(apply, observation)

    def observed(self, statistics: Any, observation: Any) -> Any:
        """The statistics with the observations `[T, B, *obs]` added."""
        if not self.used:
            return statistics
        after = self._normalizer.update(statistics, features_and_mask(observation)[0])
        check_same("update of normalize gives statistics", statistics, after)
        return after

    def check(self, algorithm: Any) -> None:
        """Refuses two normalisers, and observations without a mean or variance."""
        require(
            algorithm,
            self.normalize is None or not self.normalize_observation,
            f"normalize_observation=True and normalize={self.normalize!r:.60}: give one of them",
        )
        space = algorithm.env.observation_space
        require(
            algorithm,
            has_statistics(space) or not self.normalize_observation,
            f"normalize_observation=True: {space} has no mean or variance; leave it False",
        )


@dataclass(frozen=True)
class Normalizers(ObservationNormalizer):
    """Settings of the normalisation of observations and rewards."""

    normalize_reward: bool = hyperparameter(
        False, "divide rewards by the running standard deviation of the discounted return"
    )

    def begin_returns(self, shape: tuple[int, ...]) -> tuple[RunningStatistics | None, jax.Array | None]:
        """Initial statistics of returns, and running returns of environments `shape`; None if not needed."""
        return (init(()), jnp.zeros(shape, jnp.float32)) if self.normalize_reward else (None, None)

    def reward(
        self, time_step: TimeStep, running_return: Any, statistics: Any, discount: float | jax.Array
    ) -> tuple[jax.Array, Any, Any]:
        """Normalised rewards `[T, B]`, the running returns `[B]`, and the statistics of returns."""
        if not self.normalize_reward:
            return time_step.reward, running_return, statistics
        running_return, returns = accumulate_rollout_returns(
            running_return, time_step.reward, time_step.done, discount
        )
        statistics = update(statistics, returns)
        return scale(statistics, time_step.reward), running_return, statistics

    def rollout(
        self, statistics: Any, running: Any, trajectory: Any, discount: float | jax.Array
    ) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
        """The rollout as the loss gets it; the running returns, and both statistics, after it.

        `statistics` are of observations and returns; `running` begins with the running returns; further
        entries of either are unchanged. `trajectory` is a named tuple with an `observation [T, B, *obs]` and
        a `time_step [T, B]`.
        """
        (observation_statistics, return_statistics, *more), (running_return, *kept) = statistics, running
        time_step = trajectory.time_step
        reward, running_return, return_statistics = self.reward(
            time_step, running_return, return_statistics, discount
        )
        final = self.seen(observation_statistics, time_step.final_observation)
        seen = trajectory._replace(
            observation=self.seen(observation_statistics, trajectory.observation),
            time_step=time_step._replace(reward=reward, final_observation=final),
        )
        observation_statistics = self.observed(observation_statistics, trajectory.observation)
        return seen, (running_return, *kept), (observation_statistics, return_statistics, *more)


# --- of observations, which may be in parts ---


def has_statistics(space: ObservationSpace) -> bool:
    """Whether a part of the observations is normalised.

    >>> from envs.spaces import Discrete
    >>> has_statistics(Discrete(3)), has_statistics(composite.Tuple((Discrete(3), Box(0.0, 1.0, ()))))
    (False, True)
    """
    return any(_is_normalised(space, part) for _, part in composite.parts(space))


def init_observations(space: ObservationSpace) -> Any:
    """Statistics of no observations: `init` for each part that is normalised, None for the others.

    Not normalised are categories and codes, which networks see one-hot, and uint8 images, which they divide
    by 255. An observation that is a single array is always normalised.
    """
    if not composite.is_composite(space):
        return init(composite.parts(space)[0][1].shape)
    return composite.map_parts(lambda part: init(part.shape) if _is_normalised(space, part) else None, space)


def _is_normalised(space: ObservationSpace, part: Space) -> bool:
    return isinstance(part, Box) and (part is space or (part.dtype != "uint8" and part.codes is None))


def normalize_observations(stats: Any, observation: Any) -> Any:
    """Normalises each part of observations `[..., *obs]` that has statistics (`normalize`)."""
    return _each(normalize, stats, observation)


def update_observations(stats: Any, observation: Any) -> Any:
    """Updates the statistics with observations `[..., *obs]`, whose leading axes are samples."""
    return _each(update, stats, observation, lambda stats, _: stats)


def _each(function: Any, stats: Any, observation: Any, otherwise: Any = lambda _, part: part) -> Any:
    return jax.tree.map(
        lambda one, part: otherwise(one, part) if one is None else function(one, part),
        stats,
        observation,
        is_leaf=lambda one: one is None or isinstance(one, RunningStatistics),
    )


# By running mean and variance; what `normalize_observation=True` stands for.
RUNNING = Normalizer(init_observations, normalize_observations, update_observations)


def update(
    stats: RunningStatistics, batch: jax.Array, axes: int | tuple[int, ...] | None = None
) -> RunningStatistics:
    """Updates the statistics `[*shape]` with the samples of `batch [..., *shape]`.

    Uses the pairwise formula (Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance"),
    which stays accurate if the mean is large. `axes` of `batch` are samples; by default all before `shape`.

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
            f"but the statistics have shape {list(stats.mean.shape)}: name the axes that are samples"
        )
    batch_count = batch.size // max(batch_mean.size, 1)
    count = stats.count + batch_count
    share = batch_count / count  # fraction of new samples
    difference = batch_mean - stats.mean
    return RunningStatistics(
        mean=stats.mean + share * difference,
        var=(1.0 - share) * stats.var + share * batch_var + (1.0 - share) * share * jnp.square(difference),
        count=count,
    )


def normalize(stats: RunningStatistics, x: jax.Array, clip: float = 10.0) -> jax.Array:
    """`(x - mean) / std`, within `[-clip, clip]`: `[..., *shape]` -> `[..., *shape]` float32.

    No gradient flows into the statistics.
    """
    mean, std = jax.lax.stop_gradient((stats.mean, jnp.sqrt(stats.var + _EPSILON)))
    leading = (1,) * (x.ndim - mean.ndim)
    centred = x.astype(jnp.float32) - mean.reshape(leading + mean.shape)
    return jnp.clip(centred / std.reshape(leading + std.shape), -clip, clip)


def accumulate_return(
    running_return: jax.Array, reward: jax.Array, done: jax.Array, discount: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One step of the running discounted return, whose standard deviation scales rewards: all `[B]`.

    Returns the next `running_return` (initially zero), zero where the episode is `done`, and this step's
    return, a sample for the statistics; in the order of a `lax.scan` body. `reward` is unscaled.

    >>> carry, sample = accumulate_return(jnp.array([2.0, 2.0]), jnp.ones(2), jnp.array([False, True]), 0.5)
    >>> carry.tolist(), sample.tolist()
    ([2.0, 0.0], [2.0, 2.0])
    """
    accumulated = discount * running_return + reward
    return jnp.where(done, 0.0, accumulated), accumulated


def accumulate_rollout_returns(
    running_return: jax.Array, reward: jax.Array, done: jax.Array, discount: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`accumulate_return` over a rollout `[T, B]`: the next `running_return [B]`, and samples `[T, B]`."""
    return jax.lax.scan(
        lambda carry, step: accumulate_return(carry, *step, discount), running_return, (reward, done)
    )


def scale(stats: RunningStatistics, reward: jax.Array, clip: float = 10.0) -> jax.Array:
    """Reward divided by the standard deviation of the running return, within `[-clip, clip]`.

    `stats` has shape `()`; `reward` any shape. The mean is not subtracted: that would change which
    policy is best.
    """
    std = jax.lax.stop_gradient(jnp.sqrt(stats.var + _EPSILON))
    return jnp.clip(reward / std, -clip, clip)


# --- transforms of rows between collecting and learning ---


class Transform:
    """A pure function `(rows, parameters, key) -> rows`; any function with these arguments.

    - `rows`: on-policy, a `Trajectory [T, B]` (`algos.on_policy`); with replay, the sampled minibatches
    `[U, N]` of
      `Transition` (`algos.replay`), or of `Sequences` (`algos.sequences`). The result has the same shapes.
    - `parameters`: on-policy, the network's before the update; with replay, everything that an update
    changes.
      With `staleness` they are newer than those that acted.
    - `key`: one key; split it over the second axis, so that results do not depend on the placement.
    """

    _fields: ClassVar[tuple[str, ...]] = ("__call__",)

    @staticmethod
    def described() -> str:
        """Its name in messages."""
        return "a function of (rows, parameters, key), 'module:name' of one"


@dataclasses.dataclass(frozen=True)
class Transforming(Part):
    """The setting of algorithms that transform rows."""

    transform: Transform | None = own_value(
        "module:name of a function of rows between collecting and learning, an algos.Transform", "transform"
    )

    def rows(self, rows: Any, parameters: Any, key: jax.Array) -> Any:
        """The transformed rows `[T, B, ...]` to learn from.

        Raises:
          FdgError: the transform takes other arguments, or returns rows of another structure, shape or dtype.
        """
        if self.transform is None:
            return rows
        function: Any = by_name("--transform", self.transform)
        check_takes(function, ("rows", "parameters", "key"), "transform")

        @fdg.fragment("buffer", in_axes=(1, None, None), out_axes=1)
        def transform(rows: Any, parameters: Any, key: jax.Array) -> Any:
            after = function(rows, parameters, key)
            check_same(
                "transform gives rows",
                rows,
                after,
                "rows of the structure that it is given (rows._replace(...))",
            )
            return after

        return transform(rows, parameters, jax.random.fold_in(key, 1))
