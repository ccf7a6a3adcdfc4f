"""Replay buffers of one environment; each is a tuple of pure functions, a `ReplayBuffer`.

`replay=` of DQN, SAC, TD3, their variants that learn online, VDN and QMIX takes a function from a
`BufferSpec` to a buffer. `algos.replay.Replay` maps this buffer over the environments and makes fragments of
its functions, so a user's buffer runs under every distribution policy, with n-step returns and with memories.
A row is one stored step, or with a memory or several agents one stored sequence of steps.

Shapes: `T` rows of a rollout, `n` samples, `w` rows of a window.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flashbax
import jax
import jax.numpy as jnp
import numpy as np

from envs import features_and_mask, map_features, user_code
from fdg.arguments import check_takes, checked_names, quoted
from fdg.errors import FdgError, kind_of, one_line, unknown_name
from fdg.settings.moved import moved

# A function that was renamed.
__getattr__ = moved(__name__, __name__, {"made": "make_buffer"})


class BufferSpec(NamedTuple):
    """The sizes of a buffer: the argument of a function that makes one."""

    env: Any  # the environment
    length: int  # rows kept for one environment
    num_windows: int  # n, windows in a sample
    window: int  # w, consecutive rows in a window: the n of n-step returns


class Windows(NamedTuple):
    """A sample of a buffer."""

    rows: Any  # [n, w, ...], consecutive rows
    indices: jax.Array  # [n] int32, for `update`
    probability: jax.Array  # [n] float32, of sampling each window; ones if uniform


@checked_names
class ReplayBuffer(NamedTuple):
    """The rows of one environment, as four pure functions that share a state.

    `init(row) -> state`: an empty buffer; only shapes and dtypes of the row are used.
    `add(state, rows [T]) -> state`: appends a rollout, which continues the last one.
    `sample(state, key) -> Windows [n]`: the values are arbitrary while the buffer has too few rows for a
    window.
    `update(state, indices [n], priority [n], ready) -> state`: receives the absolute errors of samples as
    priorities. If `ready` (bool) is false, learning has not begun, and the state must not change. Without
    `update`, all samples of an iteration are drawn at once.
    `least_rows`: the number of rows that a window needs; learning does not begin before the buffer has them.
    """

    init: Callable[[Any], Any]
    add: Callable[[Any, Any], Any]
    sample: Callable[[Any, jax.Array], Windows]
    update: Callable[[Any, jax.Array, jax.Array, jax.Array], Any] | None = None
    least_rows: int = 1


# A factor of all stored priorities. Only their ratios matter, but old checkpoints contain this factor.
_PRIORITY_UNIT = 1024.0


def uniform(spec: BufferSpec) -> ReplayBuffer:
    """The newest `length` rows; windows are sampled uniformly, with replacement.

    >>> buffer = uniform(BufferSpec(None, length=4, num_windows=5, window=2))
    >>> state = buffer.add(buffer.init(jnp.float32(0)), jnp.arange(4.0))
    >>> state = buffer.add(state, jnp.array([4.0, 5.0]))
    >>> rows = buffer.sample(state, jax.random.key(0)).rows  # of 2, 3, 4, 5
    >>> bool(jnp.all(rows[:, 1] == rows[:, 0] + 1)), float(jnp.min(rows)) >= 2
    (True, True)
    """
    buffer = flashbax.make_trajectory_buffer(**_flashbax_sizes(spec))

    def sample(state: Any, key: jax.Array) -> Windows:
        rows = _with_rank_promotion(buffer.sample)(state, key).experience
        return Windows(rows, jnp.zeros(spec.num_windows, jnp.int32), jnp.ones(spec.num_windows, jnp.float32))

    return ReplayBuffer(buffer.init, _add_to_one_environment(buffer.add), sample)


def prioritized(spec: BufferSpec, exponent: float = 0.6) -> ReplayBuffer:
    """The newest `length` rows, sampled with probability proportional to `priority ** exponent`.

    Proportional prioritised replay (Schaul et al. 2016, arXiv 1511.05952, equation 1).
    """
    if not 0 <= exponent <= 1:
        raise FdgError(f"prioritized: exponent={exponent}: it must be from 0 to 1")
    # `update` applies the exponent. "cpu" selects sequential updates of the tree, which run on any device.
    buffer = flashbax.make_prioritised_trajectory_buffer(
        **_flashbax_sizes(spec), priority_exponent=1.0, device="cpu"
    )

    def init(row: Any) -> Any:
        state = buffer.init(row)
        tree = state.sum_tree_state.replace(max_recorded_priority=jnp.float32(_PRIORITY_UNIT))
        return state.replace(sum_tree_state=tree)

    def add(state: Any, rows: Any) -> Any:
        # flashbax 0.1.3 rounds the priority of new windows, the largest so far, to int32: set it again.
        after = _add_to_one_environment(buffer.add)(state, rows)
        starts = jnp.arange(jax.tree.leaves(rows)[0].shape[0]) + (state.running_index - spec.window + 1)
        is_new = starts >= jnp.maximum(after.running_index - spec.length, 0)
        return set_priorities(after, starts % spec.length, state.sum_tree_state.max_recorded_priority, is_new)

    def sample(state: Any, key: jax.Array) -> Windows:
        sample = _with_rank_promotion(buffer.sample)(state, key)
        return Windows(sample.experience, sample.indices, sample.probabilities)

    def update(state: Any, indices: jax.Array, priority: jax.Array, ready: jax.Array) -> Any:
        return set_priorities(state, indices, _PRIORITY_UNIT * priority**exponent, ready)

    def set_priorities(state: Any, indices: jax.Array, priority: jax.Array, where: jax.Array) -> Any:
        # flashbax skips indices beyond the end of the tree.
        indices, priority = jnp.where(where, indices, 4 * spec.length), jnp.where(where, priority, 0.0)
        return _with_rank_promotion(buffer.set_priorities)(state, indices, priority)

    return ReplayBuffer(init, add, sample, update)


def hindsight(
    spec: BufferSpec,
    share: float = 0.8,
    horizon: int | None = None,
    base: Callable[[BufferSpec], ReplayBuffer] = uniform,
    reward: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    terminated: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> ReplayBuffer:
    """Hindsight experience replay: most windows get a goal that the episode reached later.

    Andrychowicz et al. 2017, arXiv 1707.01495, section 3.3 and algorithm 1, with the strategy "future" of
    section 4.5: the goal was achieved at a step drawn uniformly from the current step to the episode's end.
    Observations are dictionaries with `achieved_goal` and `desired_goal`, as in Gymnasium-Robotics.

    Args:
      share: fraction of windows that get another goal; k of the paper is `share / (1 - share)`.
      horizon: the number of rows from which a goal is drawn; None: a whole episode.
      base: the buffer that samples windows, such as `prioritized`.
      reward: `(achieved_goal [*goal], desired_goal [*goal]) -> []`; None: the environment's `compute_reward`.
      terminated: as `reward`, but returns a bool; None: the environment's `compute_terminated`. If there is
        neither, a step with another goal terminates where the stored step did.

    Raises:
      FdgError: the environment has no goals, or `length` is less than `horizon`.
    """
    env = spec.env
    _check_goals(env)
    if not 0 <= share <= 1:
        raise FdgError(f"hindsight: share={share}: it must be from 0 to 1")
    if horizon is not None and (isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1):
        raise FdgError(
            f"hindsight: horizon={quoted(horizon)}: give a whole number of rows, at least 1, or None"
        )
    for name, function in (("reward", reward), ("terminated", terminated)):
        if function is not None:
            if not callable(function):
                raise FdgError(f"hindsight: {name}={quoted(function)}: give a function of two goals, or None")
            check_takes(function, ("achieved_goal", "desired_goal"), f"hindsight: {name}")
    reward = reward or _environment_method(env, "compute_reward")
    terminated = terminated or _environment_method(env, "compute_terminated")
    if reward is None:
        raise FdgError(
            f"hindsight: environment '{env.name}' has no compute_reward(achieved_goal, desired_goal): give"
            " functools.partial(algos.buffers.hindsight, reward=...)"
        )
    rows_ahead = env.max_episode_steps if horizon is None else horizon
    if rows_ahead is None:
        raise FdgError(
            f"hindsight: environment '{env.name}' has no time limit: give"
            " functools.partial(algos.buffers.hindsight, horizon=100)"
        )
    rows_ahead = max(rows_ahead, spec.window)
    if rows_ahead > spec.length:
        raise FdgError(
            f"hindsight looks {rows_ahead} steps ahead, but the buffer keeps {spec.length} of each"
            " environment: raise buffer_size, or lower num_envs"
        )
    base_buffer = base(spec._replace(window=rows_ahead))

    def init(row: Any) -> Any:
        if not hasattr(row, "final_observation"):
            raise FdgError(
                "hindsight: with a memory or several agents, rows of the buffer are sequences, in which goals"
                " cannot be replaced: leave memory=None"
            )
        return base_buffer.init(row)

    def sample(state: Any, key: jax.Array) -> Windows:
        base_key, goal_key = jax.random.split(key)
        windows = base_buffer.sample(state, base_key)
        relabel = jax.vmap(lambda rows, key: _relabel(rows, key, share, reward, terminated, spec.window))
        return windows._replace(rows=relabel(windows.rows, jax.random.split(goal_key, spec.num_windows)))

    return base_buffer._replace(init=init, sample=sample, least_rows=max(rows_ahead, base_buffer.least_rows))


def _relabel(rows: Any, key: jax.Array, share: float, reward: Any, terminated: Any, window: int) -> Any:
    """The first `window` of the steps `[w, ...]`; with probability `share` they get another goal."""
    step_key, share_key = jax.random.split(key)
    ended = rows.terminated | rows.truncated
    steps = len(ended)
    end = jnp.where(jnp.any(ended), jnp.argmax(ended), steps - 1)
    goal_step = jax.random.randint(step_key, (), 0, end + 1)
    is_relabeled = jax.random.uniform(share_key) < share
    all_achieved = features_and_mask(rows.final_observation)[0]["achieved_goal"]
    goal, achieved = all_achieved[goal_step], all_achieved[:window]
    rows = jax.tree.map(lambda x: x[:window], rows)
    goals = jnp.broadcast_to(goal, (window, *goal.shape))

    def with_new_goal(features: Any) -> Any:
        return {**features, "desired_goal": jnp.where(is_relabeled, goals, features["desired_goal"])}

    relabeled = rows._replace(
        observation=map_features(with_new_goal, rows.observation),
        final_observation=map_features(with_new_goal, rows.final_observation),
        reward=jnp.where(is_relabeled, jax.vmap(_wrap_scalar(reward, False))(achieved, goals), rows.reward),
    )
    if terminated is None:
        return relabeled
    reached = jax.vmap(_wrap_scalar(terminated, True))(achieved, goals)
    terminates = jnp.where(is_relabeled, reached, rows.terminated)
    # A step that terminated only by its original goal is truncated: the next row belongs to another episode.
    truncated = (rows.terminated | rows.truncated) & ~terminates
    return relabeled._replace(terminated=terminates, truncated=truncated)


def _wrap_scalar(function: Any, is_flag: bool) -> Callable[[Any, Any], Any]:
    """Wraps a function of one step's goals; checks that it returns one number, or if `is_flag` one bool."""

    def checked(achieved: Any, desired: Any) -> Any:
        result = function(achieved, desired)
        is_value = isinstance(result, bool | int | float) or hasattr(result, "dtype")
        dtypes = (jnp.bool_,) if is_flag else (jnp.bool_, jnp.integer, jnp.floating)
        fits = is_value and any(jnp.issubdtype(jnp.result_type(result), dtype) for dtype in dtypes)
        if not fits or np.shape(result) != ():
            raise FdgError(
                f"hindsight: {_name_of(function)} of one step's goals returned {kind_of(result)}: return"
                f" {'a bool' if is_flag else 'one number'}"
            )
        return jnp.asarray(result, bool if is_flag else jnp.float32)

    return checked


def _environment_method(env: Any, name: str) -> Any:
    """A method of the environment, or of the single environment that it vectorises; None if there is none."""
    return getattr(env, name, None) or getattr(getattr(env, "single", None), name, None)


def _check_goals(env: Any) -> None:
    parts = dict(getattr(env.observation_space, "spaces", ()) or ())
    if not {"achieved_goal", "desired_goal"} <= parts.keys():
        raise FdgError(
            f"hindsight: observations of '{env.name}' have no parts achieved_goal and desired_goal:"
            " take an environment with goals, such as probe:reach, or another --replay"
        )
    shapes = [getattr(parts[name], "shape", None) for name in ("achieved_goal", "desired_goal")]
    if None in shapes:
        raise FdgError(f"hindsight: a goal of '{env.name}' has parts: make each goal a single array")
    if shapes[0] != shapes[1]:
        raise FdgError(
            f"hindsight: achieved_goal of '{env.name}' has shape {shapes[0]}, but desired_goal {shapes[1]}:"
            " give both the same"
        )


NAMES: dict[str, Callable[[BufferSpec], ReplayBuffer]] = {
    "uniform": uniform,
    "prioritized": prioritized,
    "hindsight": hindsight,
}


def make_buffer(replay: Any, spec: BufferSpec) -> ReplayBuffer:
    """The buffer for a field `replay`: one of `NAMES`, `module:name`, or a function of a `BufferSpec`.

    Raises:
      FdgError: the value is none of these, the function fails, or it does not return a `ReplayBuffer`.
    """
    if isinstance(replay, str):
        if ":" not in replay and replay not in NAMES:
            raise unknown_name("replay", replay, NAMES)
        replay = NAMES[replay] if ":" not in replay else user_code.import_attribute("--replay", replay)
    if not callable(replay):
        raise FdgError(
            f"replay={quoted(replay)} is {kind_of(replay)}: give a name ({', '.join(NAMES)}), or a function"
            " of an algos.buffers.BufferSpec that returns an algos.ReplayBuffer"
        )
    try:
        buffer = replay(spec)
    except FdgError:
        raise
    except Exception as error:  # user code may raise anything
        raise FdgError(f"replay={_name_of(replay)} fails for {spec!r:.200}: {one_line(error)}") from error
    if not isinstance(buffer, ReplayBuffer):
        raise FdgError(
            f"replay={_name_of(replay)} returns {kind_of(buffer)}: it must return an"
            " algos.ReplayBuffer(init, add, sample, update)"
        )
    return buffer


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))


def _flashbax_sizes(spec: BufferSpec) -> dict[str, Any]:
    """Arguments that flashbax's buffers share. `period=1`: a window may start at any row."""
    return {
        "add_batch_size": 1,
        "sample_batch_size": spec.num_windows,
        "sample_sequence_length": spec.window,
        "period": 1,
        "min_length_time_axis": spec.window,
        "max_length_time_axis": spec.length,
    }


def _add_to_one_environment(add: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps flashbax's `add`, which takes rows `[1, T]` with an axis of environments, to take rows `[T]`."""

    def add_rows(state: Any, rows: Any) -> Any:
        return _with_rank_promotion(add)(state, jax.tree.map(lambda x: x[None], rows))

    return add_rows


def _with_rank_promotion(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function of flashbax promote ranks, which this project's JAX settings forbid."""

    @functools.wraps(function)
    def with_promotion(*arguments: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            return function(*arguments)

    return with_promotion


# --- n-step returns of windows; arguments as in `algos.returns` ---


class NStep(NamedTuple):
    """Rewards of up to `n` steps; the return is `reward + weight * next_value[last]`."""

    reward: jax.Array  # [T, B] float32, discounted sum
    weight: jax.Array  # [T, B] float32, discount ** number of steps; 0 if the last one terminated
    last: jax.Array  # [T, B] int32, the row of the last step


def n_step_sums(
    reward: jax.Array, terminated: jax.Array, truncated: jax.Array, discount: float | jax.Array, n: int
) -> NStep:
    """Discounted rewards of up to `n >= 1` steps from each row; fewer at the end of an episode or trajectory.

    The sums contain no values, so learners with replay compute only the value at `last`.

    >>> reward, never = jnp.ones((3, 1)), jnp.zeros((3, 1), bool)
    >>> sums = n_step_sums(reward, never, never, 0.5, n=2)
    >>> sums.reward[:, 0].tolist(), sums.weight[:, 0].tolist(), sums.last[:, 0].tolist()
    ([1.5, 1.5, 1.0], [0.25, 0.25, 0.5], [1, 2, 2])
    """
    row = jax.lax.broadcasted_iota(jnp.int32, reward.shape, 0)
    one_step = NStep(reward, discount * (1.0 - terminated.astype(jnp.float32)), row)
    # The last row counts too, because `roll` wraps around there.
    is_last = jnp.logical_or(jnp.logical_or(terminated, truncated), row == reward.shape[0] - 1)

    def extend(_, sums: NStep) -> NStep:
        """Prepends each row's step to the sums of the next row, except where `is_last`."""
        next_sums = NStep(*(jnp.roll(x, -1, axis=0) for x in sums))
        extended = NStep(reward + discount * next_sums.reward, discount * next_sums.weight, next_sums.last)
        return NStep(*(jnp.where(is_last, x, y) for x, y in zip(one_step, extended, strict=True)))

    return jax.lax.fori_loop(1, n, extend, one_step)


def n_step_returns(
    reward: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    discount: float | jax.Array,
    n: int,
) -> jax.Array:
    """Discounted rewards of `n >= 1` steps plus the value after them (Sutton and Barto 2018, equation 7.1).

    At the end of an episode or trajectory there are fewer steps. The value is 0 after a termination; after a
    truncation and after the last row it is that step's `next_value`.
    """
    sums = n_step_sums(reward, terminated, truncated, discount, n)
    return sums.reward + sums.weight * jnp.take_along_axis(next_value, sums.last, axis=0)
