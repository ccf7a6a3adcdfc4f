"""The DeepMind Control Suite of MuJoCo Playground 0.2 (Zakka et al. 2025, arXiv 2502.08844).

`playground:CheetahRun` and others, on MJX in JAX (`impl="jax"`, which version 1.0 has removed). Differences
from Playground:

- `done` is a termination: in these tasks, a state with NaN. The time limit, `episode_length`, is a
truncation. `vectorize` makes truncations, batches, resets and statistics, so Playground's wrappers are not
used.
- Every episode of an environment starts in its first start state (`repeat_start`), as with Playground's
training wrapper: a reset takes as long as a step.
- `action_repeat` is that of `envs.make` (`ActionRepeat`): it adds up the rewards; a step is one action.
- Observations are unbounded; actions are in [-1, 1].

Playground's robots (locomotion, manipulation) are not supported: they need models that Playground downloads,
and have separate observations for the critic.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from envs.adapters import Overrides, check_count, checked_overrides, converting_errors, importing
from envs.environment import Vectorized, vectorize
from envs.lazy_plotting import without_plotting
from envs.library import Facts, LibraryEnvironment, with_dtypes_of
from envs.literals import as_arrays, replace_pytree_arrays
from envs.quiet import mujoco_quietly, quietly, relaxed_checks
from envs.spaces import Box
from fdg.arguments import check_options
from fdg.errors import FdgError, one_line

PREFIX = "playground:"  # of its names for `envs.make`

# Copied from Playground's registry, and compared with it in a test, because importing it takes seconds.
TASKS = (
    "AcrobotSwingup", "AcrobotSwingupSparse", "BallInCup", "CartpoleBalance", "CartpoleBalanceSparse",
    "CartpoleSwingup", "CartpoleSwingupSparse", "CheetahRun", "FingerSpin", "FingerTurnEasy",
    "FingerTurnHard", "FishSwim", "HopperHop", "HopperStand", "HumanoidStand", "HumanoidWalk", "HumanoidRun",
    "PendulumSwingup", "PointMass", "ReacherEasy", "ReacherHard", "SwimmerSwimmer6", "WalkerRun",
    "WalkerStand", "WalkerWalk",
)  # fmt: skip

_HEIGHT, _WIDTH = 240, 320  # pixels of an image


@dataclasses.dataclass(frozen=True)
class PlaygroundEnvironment(LibraryEnvironment):
    """A `SingleEnvironment` of Playground: its task and overrides."""

    task: str
    overrides: Overrides = ()

    @property
    def name(self) -> str:
        """`playground:TASK`."""
        return PREFIX + self.task

    @property
    def facts(self) -> Facts:
        """Its properties, from Playground's configuration and a trace of its reset."""
        return _facts(self)

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """Starts an episode."""
        env = _playground_environment(self)
        with _relaxed_for_playground(), as_arrays(env):
            state = env.reset(key)
        return state, state.obs

    def step(
        self, key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[Any, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Takes one step, without reset."""
        env, state = _playground_environment(self), jax.tree.map(jnp.asarray, state)
        with _relaxed_for_playground(), as_arrays(env):
            new = with_dtypes_of(env.step(state, action), state)
        return new, new.obs, new.reward, new.done != 0, jnp.bool_(False)

    def frames(self, states: Sequence[Any]) -> Any:
        """Images of states, `[H, W, 3]` uint8 each, by MuJoCo's renderer, which needs OpenGL."""
        try:
            return _playground_environment(self).render(list(states), height=_HEIGHT, width=_WIDTH)
        except Exception as error:  # MuJoCo raises various types without OpenGL
            raise FdgError(
                f"{self.name} cannot be rendered without OpenGL ({one_line(error)}): set MUJOCO_GL=egl or"
                " osmesa"
            ) from error


def factories() -> dict[str, Callable[..., Vectorized]]:
    """Factories of tasks by name, for the registry."""
    return {PREFIX + task: functools.partial(_make, task) for task in TASKS}


def _make(task: str, *, repeat_start: bool = True, **overrides: Any) -> Vectorized:
    """Makes the environment of the task `task`."""
    where = f"environment '{PREFIX}{task}'"
    check_options(where, _make, {"repeat_start": repeat_start})
    checked = checked_overrides(where, overrides, lambda: _defaults(task), ("repeat_start",), converts=True)
    check_count(where, "episode_length", overrides.get("episode_length", 1))
    if checked:
        _check_steps(where, {**_defaults(task), "impl": "jax", **dict(checked)})
    return vectorize(PlaygroundEnvironment(task, checked), repeat_start)


def _defaults(task: str) -> dict[str, Any]:
    """Entries of a task's configuration that a user may override: numbers and strings."""
    config = _suite().get_default_config(task)
    # Images, a parameter of `envs.make`, and sizes of another implementation.
    unused = ("vision", "action_repeat", "naconmax", "njmax")
    return {
        name: value
        for name, value in config.items()
        if isinstance(value, bool | int | float | str) and name not in unused
    }


def _check_steps(where: str, config: dict[str, Any]) -> None:
    """Refuses times for which Playground's `n_substeps` is 0 or no number, and other implementations."""
    for name in ("ctrl_dt", "sim_dt"):
        if not 0 < config[name] < math.inf:
            raise FdgError(f"{where}: {name}={config[name]} must be a finite number above zero")
    if round(config["ctrl_dt"] / config["sim_dt"]) < 1:
        raise FdgError(
            f"{where}: ctrl_dt={config['ctrl_dt']} must be at least sim_dt={config['sim_dt']}, or no step is"
            " simulated"
        )
    if config["impl"] != "jax":
        raise FdgError(f"{where}: impl={config['impl']!r} must be 'jax', MJX in JAX")


@contextlib.contextmanager
def _relaxed_for_playground() -> Iterator[None]:
    """A context for Playground's code: relaxes JAX's checks, and hides MuJoCo's warnings."""
    with relaxed_checks(), mujoco_quietly():
        yield


@functools.cache
def _suite() -> Any:
    """Playground's module of the suite; imports it, also while JAX traces."""
    who_needs = f"environments '{PREFIX}...' need"
    # Only one task uses lxml, which is as large as all tasks together: it is imported on first use.
    with importing(who_needs, "MuJoCo Playground", "playground"), without_plotting("lxml"):
        from mujoco_playground._src import dm_control_suite
    return dm_control_suite


@functools.cache
def _playground_environment(single: PlaygroundEnvironment) -> Any:
    """Playground's environment, with its arrays on the host."""
    overrides = {"impl": "jax", **dict(single.overrides)}
    with jax.ensure_compile_time_eval(), quietly(), _relaxed_for_playground():
        with converting_errors(f"environment '{single.name}'", "Playground", single.overrides):
            env = _suite().load(single.task, config_overrides=overrides)
        replace_pytree_arrays(env)
    return env


@functools.cache
def _facts(single: PlaygroundEnvironment) -> Facts:
    """As `PlaygroundEnvironment.facts`; computed once."""
    env = _playground_environment(single)
    with _relaxed_for_playground(), as_arrays(env):
        state = jax.eval_shape(lambda: env.reset(jax.random.key(0)))
    observations = Box(float("-inf"), float("inf"), tuple(state.obs.shape))
    actions = Box(-1.0, 1.0, (int(env.action_size),))  # one component per actuator
    return Facts(observations, actions, int(env._config.episode_length))
