"""Optimisers, step-size schedules, and epochs of minibatches.

Samples of a rollout `[T, B, ...]` are *environment-major*: axes `[B, T]`, flattened, so that a sharding of
the environments becomes a sharding of the samples. A sample is one step or one sequence of steps; each
environment has `per_env` samples.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from algos.layers import project_kernels
from algos.values import ClippedOptimizer as ClippedOptimizer
from algos.values import OptimizerSettings as OptimizerSettings
from envs import user_code
from fdg.arguments import quoted
from fdg.errors import FdgError, kind_of, one_line, unknown_name
from fdg.settings.moved import moved

# Names that moved to `algos.on_policy`, or to MODULE in OLD=MODULE:NEW; OLD=NEW is a name that also changed.
_MOVED = "Epochs run_minibatches updated=run_minibatches"
__getattr__ = moved(
    __name__,
    "algos.on_policy",
    f"{_MOVED} given=algos.optimizers:user_optimizer annealed=algos.optimizers:linear_decay",
)

# A step size is a number, possibly traced, or a schedule: a function of the number of steps so far.
StepSize: TypeAlias = float | jax.Array | optax.Schedule


# Functions of optax and optax.contrib that make an optimiser from a step size.
NAMES = tuple(
    "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad"
    " lamb lars lion noisy_sgd novograd radam rmsprop sgd sm3 yogi"
    " ademamix adopt muon prodigy schedule_free_adamw schedule_free_sgd".split()
)


def user_optimizer(
    optimizer: Any, learning_rate: StepSize, max_grad_norm: float | jax.Array | None = None
) -> optax.GradientTransformation | None:
    """The user's optimiser; None if none is set.

    Args:
      optimizer: one of `NAMES`; `module:name`; a function of the step size; or a gradient transformation,
        which is returned unchanged.
      learning_rate: a number, or a schedule.
      max_grad_norm: the global norm to which gradients are clipped, except for a gradient transformation;
        None: no clipping.

    Raises:
      FdgError: an invalid optimiser, or the function fails.

    >>> user_optimizer("lion", 1e-3).init({}) == user_optimizer(optax.lion, 1e-3).init({})
    True
    """
    if optimizer is None:
        return None
    make = _optimizer_by_name(optimizer) if isinstance(optimizer, str) else optimizer
    if _is_transformation(make):
        return make
    if not callable(make):
        raise FdgError(
            f"optimizer={quoted(make)} is {kind_of(make)}: give a name ('lion', ...), a function of the step"
            " size that returns an optax.GradientTransformation, or such a transformation"
        )
    try:
        result = make(learning_rate)
    except Exception as error:  # user code may raise anything
        raise FdgError(
            f"optimizer={_name_of(make)} fails if it gets only a step size: {one_line(error)}: give a"
            " function of the step size, such as lambda step_size: optax.sgd(step_size, momentum=0.9)"
            + (", or anneal_learning_rate=False if it takes no schedule" if callable(learning_rate) else "")
        ) from error
    if not _is_transformation(result):
        raise FdgError(
            f"optimizer={_name_of(make)} returns {kind_of(result)} for a step size: it must return an"
            " optax.GradientTransformation"
        )
    return result if max_grad_norm is None else optax.chain(optax.clip_by_global_norm(max_grad_norm), result)


def _is_transformation(value: Any) -> bool:
    """True for an instance with the two functions of an optax.GradientTransformation."""
    return not isinstance(value, type) and all(
        callable(getattr(value, part, None)) for part in ("init", "update")
    )


@functools.lru_cache(maxsize=64)
def _optimizer_by_name(name: str) -> Callable[..., Any]:
    """Resolves one of `NAMES`, or `module:name`."""
    if ":" in name:
        return user_code.import_attribute("--optimizer", name)
    if name.lower() not in NAMES:
        raise unknown_name("optimizer", name, NAMES, "algos.optimizers.NAMES")
    return getattr(optax, name.lower(), None) or getattr(optax.contrib, name.lower())


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", function))[:60]


def linear_decay(
    learning_rate: float | jax.Array, num_iterations: int, updates_per_iteration: int = 1
) -> optax.Schedule:
    """A step size that falls linearly to zero over a run, constant in each iteration (as in CleanRL).

    >>> step_size = linear_decay(1.0, num_iterations=4, updates_per_iteration=10)
    >>> [float(step_size(count)) for count in (0, 9, 10, 39, 40)]
    [1.0, 1.0, 0.75, 0.25, 0.0]
    """

    def step_size(count: jax.Array) -> jax.Array:
        return learning_rate * jnp.maximum(1.0 - (count // updates_per_iteration) / num_iterations, 0.0)

    return step_size


def clipped_adam(
    learning_rate: StepSize, max_grad_norm: float | jax.Array, eps: float = 1e-5
) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2015, arXiv 1412.6980) on gradients clipped to a global norm."""
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.adam(learning_rate, eps=eps))


def clipped_radam(learning_rate: StepSize, max_grad_norm: float | jax.Array) -> optax.GradientTransformation:
    """Rectified Adam (Liu et al. 2020, arXiv 1908.03265) on gradients clipped to a global norm."""
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.radam(learning_rate))


def clipped_rmsprop(
    learning_rate: StepSize, max_grad_norm: float | jax.Array, decay: float = 0.99, eps: float = 1e-5
) -> optax.GradientTransformation:
    """RMSProp (Tieleman and Hinton 2012) on gradients clipped to a global norm.

    Not centred, with `eps` inside the root, as in Mnih et al. 2016 (arXiv 1602.01783, section 4). The mean
    square starts at one, as in TensorFlow, for which these hyperparameters were chosen. If it started at
    zero, the first steps would be ten times as large (`1 / sqrt(1 - decay)`).
    """
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.rmsprop(learning_rate, decay=decay, eps=eps, initial_scale=1.0),
    )


def optimizer_of(algorithm: Any) -> optax.GradientTransformation:
    """An algorithm's optimiser: the user's, or its default."""
    step_size, clip = step_size_of(algorithm), getattr(algorithm, "max_grad_norm", None)
    optimizer = user_optimizer(algorithm.optimizer, step_size, clip)
    if optimizer is None and hasattr(algorithm, "_default_optimizer"):
        return algorithm._default_optimizer
    return clipped_adam(step_size, algorithm.max_grad_norm) if optimizer is None else optimizer


def adam_of(algorithm: Any) -> optax.GradientTransformation:
    """Adam with an algorithm's step size."""
    return optax.adam(step_size_of(algorithm))


def step_size_of(algorithm: Any) -> StepSize:
    """An algorithm's step size, or its schedule over the iterations that learn."""
    if not algorithm.anneal_learning_rate:
        return algorithm.learning_rate
    iterations = algorithm.num_iterations - getattr(algorithm, "_first_learning_iteration", 0)
    return linear_decay(algorithm.learning_rate, max(iterations, 1), algorithm.updates_per_iteration)


def apply_update(
    optimizer: optax.GradientTransformation, gradient: Any, optimizer_state: Any, parameters: Any
) -> tuple[Any, Any]:
    """One step of an optimiser: new parameters (see `project_kernels`) and optimiser state."""
    try:
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, parameters)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise FdgError(
            f"optimizer: {one_line(error)}, and an optimiser gets only gradients and parameters: leave out"
            " transformations that need the loss (reduce_on_plateau, polyak_sgd, lbfgs)"
        ) from error
    return project_kernels(optax.apply_updates(parameters, updates)), optimizer_state


def update_if(is_due: jax.Array, new: Any, old: Any) -> Any:
    """`new` if `is_due`, else `old`: parameters with their optimiser state.

    Counts of step-size schedules always advance, so a schedule ends with the run under any `policy_delay`.
    """

    def select(new: Any, old: Any) -> Any:
        return new if isinstance(new, optax.ScaleByScheduleState) else jnp.where(is_due, new, old)

    return jax.tree.map(select, new, old, is_leaf=lambda x: isinstance(x, optax.ScaleByScheduleState))


def rmsprop_of(algorithm: Any) -> optax.GradientTransformation:
    """`clipped_rmsprop` with an algorithm's step size."""
    return clipped_rmsprop(step_size_of(algorithm), algorithm.max_grad_norm)


# --- minibatches of a rollout ---

# Rounds of the shuffle. The tests show that all orders of a few rows are then equally probable.
_ROUNDS = 24
_MANY_ROWS = 1 << 16  # with at least this many rows, there are more rounds


def permutations(key: jax.Array, count: int, blocks: int) -> jax.Array:
    """Random orders of `count` rows, one for each block, without a sort: `[blocks, count]` int32.

    The swap-or-not shuffle (Hoang, Morris and Rogaway 2012, "An Enciphering Scheme Based on a Card Shuffle",
    CRYPTO, figure 1): each round pairs rows `x` and `pivot - x`, and a random bit of each pair decides
    whether they swap. The bit is a multiply-shift hash (Dietzfelbinger et al. 1997, "A Reliable Randomized
    Algorithm for the Closest-Pair Problem"), with new random numbers for every block and round. All
    operations are elementwise, so each block is shuffled on its own device; a sort took 40% of PPO's time on
    a CPU.

    >>> orders = permutations(jax.random.key(0), count=5, blocks=2)
    >>> jnp.sort(orders).tolist()
    [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    """
    rounds = _ROUNDS if count < _MANY_ROWS else 2 * math.ceil(math.log2(count))
    bits = jax.random.bits(key, (rounds, 3, blocks, 1), jnp.uint32)

    def one_round(rows, round_bits):
        pivot, factor, offset = round_bits[0] % count, round_bits[1] | 1, round_bits[2]
        partner = jnp.where(rows <= pivot, pivot - rows, pivot + (count - rows))
        swap = (jnp.maximum(rows, partner) * factor + offset) >> 31
        return jnp.where(swap == 1, partner, rows)

    rows = jnp.broadcast_to(jnp.arange(count, dtype=jnp.uint32)[None], (blocks, count))
    for i in range(rounds):  # unrolled: XLA makes one pass over the rows
        rows = one_round(rows, bits[i])
    return rows.astype(jnp.int32)


def shuffled_rows(
    key: jax.Array, count: int, num_epochs: int, num_minibatches: int, blocks: int = 1
) -> jax.Array:
    """The rows that each block of `count` rows contributes to each update; an epoch uses each row once.

    Returns `[num_epochs * num_minibatches, blocks, count / num_minibatches]` int32.
    """
    # Blocks first: devices compute only the rows of their own blocks.
    rows = permutations(key, count, blocks * num_epochs)
    rows = rows.reshape(blocks, num_epochs * num_minibatches, -1)
    return rows.swapaxes(0, 1)


def num_blocks(num_envs: int, per_env: int, num_minibatches: int) -> int:
    """The largest number of equal blocks of samples that each contribute equally to every minibatch.

    A block has the samples of one environment, or of as few environments as possible, so that devices
    exchange no samples. `num_minibatches` divides `num_envs * per_env`.

    >>> num_blocks(num_envs=4, per_env=128, num_minibatches=16)
    4
    >>> num_blocks(num_envs=32, per_env=4, num_minibatches=16)
    8
    """
    return num_envs * math.gcd(per_env, num_minibatches) // num_minibatches


def rows_of_epochs(epochs: Any, key: jax.Array, num_envs: int, per_env: int) -> jax.Array:
    """`shuffled_rows` for an `algos.on_policy.Epochs` over `per_env` samples of each environment."""
    count, shuffle = epochs.num_minibatches, epochs.shuffle
    blocks = num_blocks(num_envs, per_env, count) if shuffle == "each" else 1
    rows = per_env if shuffle == "time" else num_envs * per_env // blocks
    return shuffled_rows(key, rows, epochs.num_epochs, count, blocks)


def take(samples: Any, rows: jax.Array) -> Any:
    """Selects `rows [blocks, n]` of each block of samples `[B * per_env, ...]`: `[blocks * n, ...]`.

    With several blocks, a sharding that keeps each block on one device is preserved.
    """
    blocks = rows.shape[0]
    if blocks == 1:
        return jax.tree.map(lambda x: x[rows[0]], samples)

    def take_from_blocks(x):
        by_block = x.reshape(blocks, -1, *x.shape[1:])
        return jax.vmap(lambda x, rows: x[rows])(by_block, rows).reshape(-1, *x.shape[1:])

    return jax.tree.map(take_from_blocks, samples)


def take_of_every_env(samples: Any, rows: jax.Array, num_envs: int) -> Any:
    """Selects rows `[1, n]` of the samples of each environment, `[B * per_env, ...]`: `[B * n, ...]`."""

    def take_from_envs(x):
        by_env = x.reshape(num_envs, -1, *x.shape[1:])[:, rows[0]]
        return by_env.reshape(-1, *x.shape[1:])

    return jax.tree.map(take_from_envs, samples)
