"""Optimisers, step-size schedules, and epochs of minibatches.

Samples of a rollout `[T, B, ...]` are kept *environment-major*: `[B, T]` flattened, so that a sharding of the
environments becomes one of the samples. A sample is one step, or a sequence of steps (`per_env` for each
environment).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax

from envs import user_code
from fdg.errors import FdgError, kind_of, one_line, unknown_name
from fdg.settings.fields import hyperparameter, own_value, require, require_positive
from fdg.settings.moved import moved
from fdg.settings.parts import Part

__getattr__ = moved(
    __name__, __name__, {"given": "user_optimizer", "annealed": "linear_decay", "updated": "run_minibatches"}
)

# A step size is a number, possibly traced, or a schedule of the number of steps so far.
StepSize: TypeAlias = float | jax.Array | optax.Schedule


# Functions of optax and optax.contrib from a step size to an optimiser.
NAMES = tuple(
    "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad"
    " lamb lars lion noisy_sgd novograd radam rmsprop sgd sm3 yogi"
    " ademamix adopt muon prodigy schedule_free_adamw schedule_free_sgd sophia".split()
)


@dataclasses.dataclass(frozen=True)
class OptimizerSettings(Part):
    """An optimiser and its step size."""

    learning_rate: float = hyperparameter(2.5e-4, "step size of the optimiser")
    anneal_learning_rate: bool = hyperparameter(False, "anneal the step size linearly to zero")
    optimizer: Any = own_value(
        "an optimiser of optax by its name (lion, adamw, muon, ...), or module:name of a function of the"
        " step size that returns one; in Python also a gradient transformation (None: the algorithm's)",
        "optimizer",
    )

    def check(self, algorithm: Any) -> None:
        """Refuses a step size that is not positive, and an invalid optimiser."""
        require_positive(algorithm, "learning_rate")
        user_optimizer(self.optimizer, 1e-3)


@dataclasses.dataclass(frozen=True)
class ClippedOptimizer(OptimizerSettings):
    """The step size, and the gradient norm, of an optimiser with clipping."""

    max_grad_norm: float = hyperparameter(0.5, "global norm to which gradients are clipped")

    def check(self, algorithm: Any) -> None:
        """Refuses a step size or a norm that is not positive."""
        super().check(algorithm)
        require_positive(algorithm, "max_grad_norm")


def user_optimizer(
    optimizer: Any, learning_rate: StepSize, max_grad_norm: float | jax.Array | None = None
) -> optax.GradientTransformation | None:
    """The user's optimiser; None if none is set.

    Args:
      optimizer: one of `NAMES`, `module:name`, or a function of the step size, with gradients clipped to the
        global norm `max_grad_norm`, if any; or a gradient transformation, used unchanged.
      learning_rate: a number, or a schedule.

    Raises:
      FdgError: an invalid optimiser, or the function fails.

    >>> user_optimizer("lion", 1e-3).init({}) == user_optimizer(optax.lion, 1e-3).init({})
    True
    """
    if optimizer is None:
        return None
    make = _found(optimizer) if isinstance(optimizer, str) else optimizer
    if _is_transformation(make):
        return make
    if not callable(make):
        raise FdgError(
            f"optimizer={make!r:.60} is {kind_of(make)}: give a name ('lion', ...), a function of the step"
            " size that returns an optax.GradientTransformation, or such a transformation"
        )
    try:
        made = make(learning_rate)
    except Exception as error:  # user code may raise anything
        raise FdgError(
            f"optimizer={_named(make)} fails for a step size alone: {one_line(error)}: give a function of the"
            " step size, such as lambda step_size: optax.sgd(step_size, momentum=0.9)"
        ) from error
    if not _is_transformation(made):
        raise FdgError(
            f"optimizer={_named(make)} returns {kind_of(made)} for a step size: it must return an"
            " optax.GradientTransformation"
        )
    return made if max_grad_norm is None else optax.chain(optax.clip_by_global_norm(max_grad_norm), made)


def _is_transformation(value: Any) -> bool:
    """True if it has the two functions of an optax.GradientTransformation."""
    return not isinstance(value, type) and all(
        callable(getattr(value, part, None)) for part in ("init", "update")
    )


@functools.lru_cache(maxsize=64)
def _found(name: str) -> Callable[..., Any]:
    """Resolves a name."""
    if ":" in name:
        return user_code.found("--optimizer", name)
    if name.lower() not in NAMES:
        raise unknown_name("optimizer", name, NAMES, "algos.optimizers.NAMES")
    return getattr(optax, name.lower(), None) or getattr(optax.contrib, name.lower())


def _named(function: Any) -> str:
    return str(getattr(function, "__qualname__", function))[:60]


def linear_decay(
    learning_rate: float | jax.Array, num_iterations: int, updates_per_iteration: int = 1
) -> optax.Schedule:
    """A step size that decreases linearly to zero over a run, constant within an iteration (as in CleanRL).

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
    square starts at one, as in TensorFlow, where these hyperparameters come from: from zero, the first steps
    would be ten times as large (`1 / sqrt(1 - decay)`).
    """
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.rmsprop(learning_rate, decay=decay, eps=eps, initial_scale=1.0),
    )


# --- minibatches of a rollout ---

# Rounds of the shuffle: enough, by the tests, to make all orders of few rows equally probable.
_ROUNDS = 24
_LARGE = 1 << 16  # more rounds from this number of rows on


def rmsprop_of(algorithm: Any) -> optax.GradientTransformation:
    """`clipped_rmsprop` with an algorithm's step size."""
    return clipped_rmsprop(algorithm._step_size, algorithm.max_grad_norm)


@dataclasses.dataclass(frozen=True)
class Epochs(Part):
    """The number of epochs over a rollout, and their minibatches."""

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
        """Refuses counts that are not positive, and an unknown kind of shuffle."""
        require_positive(algorithm, "num_epochs", "num_minibatches")
        require(
            algorithm,
            self.shuffle in ("each", "all", "time"),
            f"shuffle={self.shuffle!r}: it must be 'each', 'all' or 'time'",
        )

    def check_divides(
        self, algorithm: Any, per_env: int, of_env: str = "num_steps", of_all: str = "num_envs * num_steps"
    ) -> None:
        """Refuses a number of minibatches that does not divide the samples, `per_env` per environment.

        `of_env` and `of_all` are phrases for the samples of one environment and of all.
        """
        count, what = per_env, of_env
        if self.shuffle != "time":
            count, what = algorithm.num_envs * per_env, of_all
        require(
            algorithm,
            count % self.num_minibatches == 0,
            f"num_minibatches={self.num_minibatches} does not divide {what}={count}: choose a divisor",
        )

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
        """Parameters and optimiser state after all epochs, and the mean losses; see `updated`.

        `samples [B * per_env, ...]` are environment-major.
        """
        per_env = jax.tree.leaves(samples)[0].shape[0] // num_envs
        blocks = own_blocks(num_envs, per_env, self.num_minibatches) if self.shuffle == "each" else 1
        count = per_env if self.shuffle == "time" else num_envs * per_env // blocks
        rows = shuffled_rows(key, count, self.num_epochs, self.num_minibatches, blocks)
        return run_minibatches(
            gradient, update, parameters, optimizer_state, rows,
            lambda some: self.minibatch(samples, some, num_envs),
        )  # fmt: skip

    def minibatch(self, samples: Any, rows: jax.Array, num_envs: int) -> Any:
        """The samples at rows `[blocks, n]`; for rows of time steps, those of every environment."""
        return take_of_every_env(samples, rows, num_envs) if self.shuffle == "time" else take(samples, rows)


def permutations(key: jax.Array, count: int, blocks: int) -> jax.Array:
    """Random orders of `count` rows, one for each block, without a sort: `[blocks, count]` int32.

    The swap-or-not shuffle (Hoang, Morris and Rogaway 2012, "An Enciphering Scheme Based on a Card Shuffle",
    CRYPTO, figure 1): each round pairs rows `x` and `pivot - x`, and a random bit of each pair decides
    whether they swap. The bit is a multiply-shift hash (Dietzfelbinger et al. 1997, "A Reliable Randomized
    Algorithm for the Closest-Pair Problem"), redrawn for every block and round. All is elementwise, so blocks
    are shuffled on their own devices; a sort took 40% of PPO's time on a CPU.

    >>> orders = permutations(jax.random.key(0), count=5, blocks=2)
    >>> jnp.sort(orders).tolist()
    [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    """
    rounds = _ROUNDS if count < _LARGE else 2 * math.ceil(math.log2(count))
    drawn = jax.random.bits(key, (rounds, 3, blocks, 1), jnp.uint32)

    def one_round(rows, drawn):
        pivot, factor, offset = drawn[0] % count, drawn[1] | 1, drawn[2]
        partner = jnp.where(rows <= pivot, pivot - rows, pivot + (count - rows))
        swap = (jnp.maximum(rows, partner) * factor + offset) >> 31
        return jnp.where(swap == 1, partner, rows)

    rows = jnp.broadcast_to(jnp.arange(count, dtype=jnp.uint32)[None], (blocks, count))
    for i in range(rounds):  # unrolled: XLA makes one pass over the rows
        rows = one_round(rows, drawn[i])
    return rows.astype(jnp.int32)


def shuffled_rows(
    key: jax.Array, count: int, num_epochs: int, num_minibatches: int, blocks: int = 1
) -> jax.Array:
    """The rows, of `count`, that each block contributes to each update; every epoch uses each row once.

    Returns:
      `[num_epochs * num_minibatches, blocks, count / num_minibatches]` int32.
    """
    # Blocks first: devices compute only the rows of their own blocks.
    rows = permutations(key, count, blocks * num_epochs)
    rows = rows.reshape(blocks, num_epochs * num_minibatches, -1)
    return rows.swapaxes(0, 1)


def own_blocks(num_envs: int, per_env: int, num_minibatches: int) -> int:
    """The largest number of blocks of which each contributes equally to every minibatch.

    One per environment, or the smallest groups of environments, so that devices exchange no samples.
    `num_minibatches` divides `num_envs * per_env`.

    >>> own_blocks(num_envs=4, per_env=128, num_minibatches=16)
    4
    >>> own_blocks(num_envs=32, per_env=4, num_minibatches=16)
    8
    """
    return num_envs * math.gcd(per_env, num_minibatches) // num_minibatches


def take(samples: Any, rows: jax.Array) -> Any:
    """Selects rows of each block, `rows [blocks, n]`: samples `[B * per_env, ...]` to `[blocks * n, ...]`.

    With several blocks, a sharding that keeps blocks whole is preserved.
    """
    blocks = rows.shape[0]
    if blocks == 1:
        return jax.tree.map(lambda x: x[rows[0]], samples)

    def of_blocks(x):
        by_block = x.reshape(blocks, -1, *x.shape[1:])
        return jax.vmap(lambda x, rows: x[rows])(by_block, rows).reshape(-1, *x.shape[1:])

    return jax.tree.map(of_blocks, samples)


def take_of_every_env(samples: Any, rows: jax.Array, num_envs: int) -> Any:
    """Selects the same rows `[1, n]`, in `[0, per_env)`, of each environment: `[B * n, ...]`."""

    def of_envs(x):
        by_env = x.reshape(num_envs, -1, *x.shape[1:])[:, rows[0]]
        return by_env.reshape(-1, *x.shape[1:])

    return jax.tree.map(of_envs, samples)


def run_minibatches(
    gradient: Callable[[Any, Any], tuple[Any, Any]],
    update: Callable[[Any, Any, Any], tuple[Any, Any]],
    parameters: Any,
    optimizer_state: Any,
    rows: jax.Array,
    take: Callable[[jax.Array], Any],
) -> tuple[Any, Any, Any]:
    """Sequential updates, each on its own minibatch: the epochs of PPO and PQN.

    Args:
      gradient: `(parameters, minibatch) -> (gradient, losses)`.
      update: `(gradient, optimizer_state, parameters) -> (parameters, optimizer_state)`.
      rows: `[updates, blocks, n]` int32, as from `shuffled_rows`.
      take: makes the minibatch of some rows, `[blocks, n] -> minibatch`.

    Returns:
      Parameters and optimiser state after the last update, and the mean losses over all updates.

    >>> gradient = lambda w, x: (x.sum(), {"loss": w})
    >>> update = lambda gradient, count, w: (w + gradient, count + 1)
    >>> rows, samples = jnp.array([[0], [2]]), jnp.array([1.0, 2.0, 4.0])
    >>> take = lambda r: samples[r]
    >>> w, count, losses = run_minibatches(gradient, update, jnp.float32(0), jnp.int32(0), rows, take)
    >>> float(w), int(count), float(losses["loss"])  # 0, then 0 + 1, then 1 + 4
    (5.0, 2, 0.5)
    """

    def one_update(carry, some):
        parameters, optimizer_state = carry
        direction, losses = gradient(parameters, take(some))
        return update(direction, optimizer_state, parameters), losses

    (parameters, optimizer_state), losses = jax.lax.scan(one_update, (parameters, optimizer_state), rows)
    return parameters, optimizer_state, jax.tree.map(lambda x: jnp.mean(x, axis=0), losses)
