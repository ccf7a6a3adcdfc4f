"""The driver of algorithms that learn from a data set: methods that these algorithms share.

At the start of a run, the steps of a data set (`algos.offline.minari`) are added to the replay buffers, an
equal part for each environment. Offline, an iteration only takes gradient steps, and only evaluations step
the environment. Online, an iteration also acts, and stores its steps (`algos.off_policy`). Each gradient step
counts as a step towards `total_steps`.

Shapes: `B` environments, `L` rows of each buffer, `U` gradient steps of an iteration, `N` samples.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from algos import off_policy, replaying
from algos.distributions import Normal
from algos.offline.minari import ARRAYS, FILES, DataSet
from algos.replay import Replay, Step
from algos.replaying import State
from algos.values import ObservationNormalizer
from envs import Box, composite
from fdg.errors import FdgError, FdgWarning, HostError
from fdg.settings.fields import hyperparameter, require, require_divides, require_positive
from fdg.settings.parts import Part

_LOG_STD_BOUNDS = (-5.0, 2.0)  # as in the code of IQL's authors, github.com/ikostrikov/implicit_q_learning


@dataclasses.dataclass(frozen=True)
class OfflineData(Part):
    """The settings of an algorithm that learns only from a data set; see `Data` for one that may act too."""

    dataset: str | None = hyperparameter(
        None, "folder of a data set (fdg collect, Minari) to learn from (None: no data)", holds="folder"
    )
    batch_size: int = hyperparameter(
        256, "samples of a gradient step, equally many from each environment's part"
    )

    def check(self, algorithm: Any) -> None:
        """Refuses an invalid `batch_size`, settings that only acting uses, and data that does not fit.

        Data does not fit if it has other spaces than the environment, or too few steps for `num_envs`.
        """
        require_positive(algorithm, "batch_size")
        require_divides(algorithm, "num_envs", self.batch_size, f"batch_size={self.batch_size}")
        if not self.acts:
            fix = "set online=True, or leave it out" if hasattr(self, "online") else "leave it out"
            acting_settings = {
                "bonus": algorithm.bonus,
                "rnd=True": algorithm.rnd,
                f"rings={algorithm.rings}": algorithm.rings > 1,
            }
            for name in (name for name, is_set in acting_settings.items() if is_set):
                require(algorithm, False, f"{name} has no effect where nothing acts in training: {fix}")
        if self.dataset is None:
            return
        env = algorithm.env
        DataSet(self.dataset).check_spaces(env.observation_space, env.action_space, env.name)
        require(
            algorithm,
            self.rows(algorithm) >= 2,
            f"num_envs={algorithm.num_envs}: the data set has {DataSet(self.dataset).num_steps} steps, and"
            " each environment takes an equal part of at least 2",
        )

    @property
    def files(self) -> dict[str, str]:
        """The data set's files, by the names of their copies in a run directory."""
        folder = None if self.dataset is None else DataSet(self.dataset).folder
        return {} if folder is None else {name.partition(".")[0]: str(folder / name) for name in FILES}

    @property
    def acts(self) -> bool:
        """True if training steps the environment."""
        return False

    def rows(self, algorithm: Any) -> int:
        """L, the steps of the data set in each environment's buffer; steps left over are not used."""
        return 0 if self.dataset is None else DataSet(self.dataset).num_steps // algorithm.num_envs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BoundedNormal(Normal):
    """A Gaussian whose mean lies within [-1, 1]; its samples are clipped to that range.

    Densities are those before clipping.
    """

    @classmethod
    def of(cls, output: jax.Array, shape: tuple[int, ...]) -> Self:
        """From an actor's output `[N, 2 * D]`: means before tanh, then log standard deviations."""
        mean, log_std = jnp.split(output, 2, axis=-1)
        return cls(jnp.tanh(mean), jnp.clip(log_std, *_LOG_STD_BOUNDS), shape)

    def sample(self, keys: jax.Array) -> jax.Array:
        """Random actions `[..., *shape]` in [-1, 1]; `keys`: one, or one per element of the leading axes."""
        return jnp.clip(super().sample(keys), -1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Data(OfflineData):
    """The settings of an algorithm that learns from a data set, from the agent's own steps, or from both."""

    online: bool = hyperparameter(False, "also act, and add the steps to the data set", only_with="dataset")

    @property
    def acts(self) -> bool:
        """True if training steps the environment."""
        return self.dataset is None or self.online


# --- methods of classes with `driver=learning` ---


def learning_starts(algorithm: Any) -> int:
    """Steps before the first gradient step: 0 with a data set."""
    if algorithm.dataset is not None:
        return 0
    return max(algorithm.batch_size, algorithm.num_envs * algorithm.buffer.least_rows)


def buffer(algorithm: Any, kind: Callable[..., Replay] = Replay, **options: Any) -> Replay:
    """The replay buffer of the data set's steps and the agent's."""
    new_steps = algorithm.num_iterations * algorithm.steps_per_iteration if algorithm.data.acts else 0
    return kind(
        num_envs=algorithm.num_envs,
        buffer_size=algorithm.num_envs * algorithm.data.rows(algorithm) + new_steps,
        batch_size=algorithm.updates_per_iteration * algorithm.batch_size,
        discount=algorithm.discount,
        **options,
    )


def init(self: Any, key: jax.Array) -> State:
    """The initial state, whose replay buffer and statistics include the data set."""
    if self.data.acts:
        state = off_policy.init(self, key)
        if self.dataset is None:
            return state
    else:
        actor_key, critics_key, _, key = jax.random.split(key, 4)
        observation = composite.zeros(self.env.observation_space, (self.num_envs,))
        action = replaying.zero_actions(self, self.num_envs)
        learned = self._init_learned(actor_key, critics_key, observation, action)
        state = replaying.initial_state(self, learned, None, observation, key)
        state = state._replace(observation=(), recollection=None)
    steps = stored_steps(self)
    return state._replace(
        replay=self.buffer.add(state.replay, steps),
        observation_statistics=self.normalizers.update(state.observation_statistics, steps.observation),
    )


def iterate(self: Any, state: State) -> tuple[State, dict[str, jax.Array]]:
    """Takes gradient steps on minibatches from replay; if training acts, steps the environments first."""
    if self.data.acts:
        return off_policy.iterate(self, state)
    key, sample_key, learn_key = jax.random.split(state.key, 3)
    learned, _, losses = off_policy.gradient_steps(self, state, sample_key, learn_key, jnp.bool_(True))
    return state._replace(learned=learned, key=key, iteration=state.iteration + 1), losses


def stored_steps(algorithm: Any) -> Step:
    """The data set's steps, `[L, B]`, with bounded actions in [-1, 1]; environment i has the i-th part.

    A host callback reads the file when the program runs, so arrays are not constants of the program.
    """
    env, count, rows = algorithm.env, algorithm.num_envs, algorithm.data.rows(algorithm)

    def array_type(space: Any) -> Any:
        return jax.ShapeDtypeStruct((rows, count, *space.shape), space.dtype)

    observation = composite.map_parts(array_type, env.observation_space)
    flag: Any = jax.ShapeDtypeStruct((rows, count), bool)
    reward = array_type(Box(0.0, 1.0, ()))
    types = Step(observation, array_type(_replay_space(env.action_space)), reward, flag, flag, observation)
    read = functools.partial(_read, algorithm.dataset, env.observation_space, env.action_space, rows, count)
    return jax.pure_callback(read, types)


def _replay_space(space: Any) -> Any:
    """The action space between fragments, and in replay: bounded actions are in [-1, 1]."""
    return Box(-1.0, 1.0, space.shape) if isinstance(space, Box) else space


def _read(path: str, observation_space: Any, action_space: Any, rows: int, count: int) -> Step:
    """`stored_steps` on the host, from the folder `path`: NumPy arrays `[rows, count, ...]`."""
    try:
        steps = DataSet(path).steps(observation_space, action_space)
    except FdgError as error:
        raise HostError(str(error)) from None  # passes through XLA unchanged
    if isinstance(action_space, Box):
        steps = steps._replace(action=_scale_actions(steps.action, action_space, path))

    def by_environment(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x[: rows * count].reshape(count, rows, *x.shape[1:]).swapaxes(0, 1))

    parts = jax.tree.map(by_environment, steps)
    parts.truncated[-1] |= ~parts.terminated[-1]  # the ring buffer's next row belongs to another episode
    return parts


def _scale_actions(action: Any, space: Box, path: str) -> Any:
    """Scales actions `[T, *action]` to [-1, 1]; a component with only one possible value becomes 0."""
    low, high = space.low_array, space.high_array
    margin = 1e-5 * np.maximum(np.abs(low), np.abs(high))  # for rounding errors
    outside = ((action < low - margin) | (action > high + margin)).reshape(len(action), -1).any(axis=1)
    if count := np.count_nonzero(outside):
        warnings.warn(
            f"{DataSet(path).folder / ARRAYS}: {count:,} of {len(action):,} actions are outside the bounds of"
            f" {space}, the first at step {np.argmax(outside)} of all: they are clipped to the bounds",
            FdgWarning,
            stacklevel=2,
        )
    half_range = np.where(high > low, high / 2.0 - low / 2.0, 1.0)  # halves, since high - low may overflow
    scaled = np.clip(2.0 * ((action / 2.0 - low / 2.0) / half_range) - 1.0, -1.0, 1.0)
    return np.where(high > low, scaled, 0.0).astype(np.float32)


# Methods, settings and properties that each class with `driver=learning` gets.
MEMBERS = {
    # Without `replays`, since minibatches are always sampled uniformly.
    **{name: value for name, value in off_policy.MEMBERS.items() if name != "replays"},
    "normalizers": ObservationNormalizer(),  # not of rewards: those of the data set are used as they are
    "steps_are": "steps",  # the unit of `total_steps`: steps of the environment or of the gradient
    "updates_per_iteration": property(lambda self: self.steps_per_iteration),  # one for each step
    "learning_starts": property(learning_starts),
    "buffer": property(buffer),
    "init": init,
    "iterate": iterate,
}
