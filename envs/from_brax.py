"""Every environment of brax 0.14 (github.com/google/brax), with every physics backend.

`brax:ant` uses brax's default physics backend, `generalized`. `brax:ant:spring` uses another one, and so does
`make("brax:ant", backend="spring")`. Differences from brax:

- brax's `done` is a termination, because its environments only terminate in invalid states. The time limit,
`episode_length`, is a truncation. `vectorize` makes truncations, batches, resets and statistics, so brax's
wrappers are not used.
- Every episode of an environment starts in its first start state, as with brax's `AutoResetWrapper`
(`repeat_start`; see `envs.vectorize`): a reset in every step would take as long as the step, or longer.
- Observations are unbounded; actions are in [-1, 1], and brax scales them to each actuator.
- Making an environment allocates nothing: brax is imported on first use, and the model's arrays are NumPy
arrays that become literals of a program.

As in brax, `brax:fast`, a toy for unit tests, has no physics, and `brax:swimmer` has only one backend.
"""

import contextlib
import dataclasses
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from envs.adapters import Overrides, check_count, check_names, checked_overrides, converting_errors
from envs.composite import Dict, ObservationSpace
from envs.environment import Vectorized, vectorize
from envs.library import Facts, LibraryEnvironment
from envs.literals import as_arrays, replace_pytree_arrays
from envs.quiet import mujoco_quietly, quietly
from envs.spaces import Box
from fdg.arguments import check_options
from fdg.errors import FdgError, one_line

# Copied from brax's registry, and compared with it in a test, because importing brax takes seconds.
ENVIRONMENTS = (
    "ant", "fast", "halfcheetah", "hopper", "humanoid", "humanoidstandup", "inverted_pendulum",
    "inverted_double_pendulum", "pusher", "reacher", "swimmer", "walker2d",
)  # fmt: skip
DEFAULT_BACKEND = "generalized"
BACKENDS = (DEFAULT_BACKEND, "positional", "spring", "mjx")  # physics backends
_ONE_BACKEND = ("fast", "swimmer")  # the former has no physics, the latter supports only the default

_HEIGHT, _WIDTH = 320, 420  # pixels of an image


@dataclasses.dataclass(frozen=True)
class BraxEnvironment(LibraryEnvironment):
    """A `SingleEnvironment` of brax: registered name, physics backend, and overrides."""

    environment: Any  # brax's name, or an environment with its interface
    backend: str = DEFAULT_BACKEND
    episode_length: int = 1000  # time limit in steps
    overrides: Overrides = ()  # of the constructor's arguments

    @property
    def name(self) -> str:
        """`brax:ENVIRONMENT`, and the backend unless it is the default."""
        if not isinstance(self.environment, str):
            return type(self.environment).__name__
        return _name_with_backend(self.environment, self.backend)

    @property
    def facts(self) -> Facts:
        """Its properties, from brax's environment and a trace of its reset."""
        return _facts(self)

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """Starts an episode."""
        env = _brax_environment(self)
        with _relaxed_for_brax(), as_arrays(env):
            state = env.reset(key)
        return state, state.obs

    def step(
        self, key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[Any, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Takes one step, without reset."""
        env = _brax_environment(self)
        with _relaxed_for_brax(), as_arrays(env):
            state = env.step(state, action)
        return state, state.obs, state.reward, state.done != 0, jnp.bool_(False)

    def frames(self, states: Sequence[Any]) -> Any:
        """Images of states, `[H, W, 3]` uint8 each, by MuJoCo's renderer (OpenGL); None for `fast`."""
        system = getattr(_brax_environment(self), "sys", None)
        if system is None:
            return None
        from brax.io import image

        with _relaxed_for_brax(), mujoco_quietly():
            try:
                return image.render_array(system, _pipeline_states(states), height=_HEIGHT, width=_WIDTH)
            except Exception as error:  # MuJoCo raises various types without OpenGL
                raise FdgError(
                    f"{self.name} cannot be rendered without OpenGL ({one_line(error)}): write a page"
                    " instead, --out video.html, or set MUJOCO_GL=egl or osmesa"
                ) from error

    def html(self, states: Sequence[Any]) -> str | None:
        """brax's HTML viewer of states; None for `fast`, which has no physics."""
        system = getattr(_brax_environment(self), "sys", None)
        if system is None:
            return None
        from brax.io import html

        with _relaxed_for_brax(), mujoco_quietly():
            return html.render(
                system.tree_replace({"opt.timestep": _brax_environment(self).dt}), _pipeline_states(states)
            )


def adapt(env: Any, **parameters: Any) -> BraxEnvironment:
    """Wraps a user's instance of brax's `Env` or Playground's `MjxEnv`.

    The only parameter is `episode_length`; default: that of Playground's configuration, else 1,000.
    """
    where = f"environment '{type(env).__name__}'"
    check_names(where, parameters, ("episode_length",))
    default = getattr(getattr(env, "_config", None), "episode_length", 1000)
    length = parameters.get("episode_length", default)
    check_count(where, "episode_length", length)
    return BraxEnvironment(env, episode_length=length)


def _pipeline_states(states: Sequence[Any]) -> list[Any]:
    """The states of the physics engine within brax's states."""
    return [state.pipeline_state for state in states]


def factories() -> dict[str, Callable[..., Vectorized]]:
    """Factories by name, with and without backend, for the registry."""
    return {
        _name_with_backend(environment, backend): functools.partial(_make, environment, backend)
        for environment in ENVIRONMENTS
        for backend in _backends(environment)
    }


def _name_with_backend(environment: str, backend: str) -> str:
    return f"brax:{environment}" if backend == DEFAULT_BACKEND else f"brax:{environment}:{backend}"


def _backends(environment: str) -> tuple[str, ...]:
    return (DEFAULT_BACKEND,) if environment in _ONE_BACKEND else BACKENDS


def _make(
    environment: str,
    named_backend: str,
    *,
    backend: str | None = None,
    episode_length: int = 1000,
    repeat_start: bool = True,
    **overrides: Any,
) -> Vectorized:
    """Makes `brax:ENVIRONMENT` with the backend in its name; `backend` is for names without one."""
    where = f"environment '{_name_with_backend(environment, named_backend)}'"
    check_options(where, _make, {"repeat_start": repeat_start})
    backend = backend or named_backend
    if backend not in _backends(environment) or named_backend not in (DEFAULT_BACKEND, backend):
        known = _backends(environment) if named_backend == DEFAULT_BACKEND else (named_backend,)
        raise FdgError(f"{where}: backend={backend!r} must be one of {', '.join(known)}")
    check_count(where, "episode_length", episode_length)
    ours = ("backend", "episode_length", "repeat_start")
    checked = checked_overrides(where, overrides, lambda: _overridable_arguments(environment), ours)
    return vectorize(BraxEnvironment(environment, backend, episode_length, checked), repeat_start)


@functools.cache
def _overridable_arguments(environment: str) -> dict[str, Any]:
    """Arguments that a user may override, with defaults: those with plain Python defaults, and `n_frames`."""
    parameters = inspect.signature(_registry()[environment]).parameters.values()
    kinds = (bool, int, float, str, tuple)
    defaults = {p.name: p.default for p in parameters if isinstance(p.default, kinds) and p.name != "backend"}
    return defaults if environment == "fast" else {"n_frames": None, **defaults}


@contextlib.contextmanager
def _relaxed_for_brax() -> Iterator[None]:
    """A context for brax's code: allows rank promotion, and hides MuJoCo's deprecation warnings."""
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@functools.cache
def _registry() -> dict[str, Callable[..., Any]]:
    """brax's constructors by name; imports brax, also while JAX traces."""
    with jax.ensure_compile_time_eval(), quietly():
        from brax import envs, fluid
    # Fluid forces (swimmer) call `clip` with an argument that JAX has renamed.
    fluid.jp = types.SimpleNamespace(**{**vars(jnp), "clip": lambda x, a_min: jnp.maximum(x, a_min)})
    return dict(envs._envs)


@functools.cache
def _facts(single: BraxEnvironment) -> Facts:
    """As `BraxEnvironment.facts`; computed once."""
    env = _brax_environment(single)
    with _relaxed_for_brax(), as_arrays(env):
        state = jax.eval_shape(lambda: env.reset(jax.random.key(0)))
    # One action component per actuator.
    actions = Box(-1.0, 1.0, (int(env.action_size),))
    return Facts(_unbounded_space(state.obs), actions, single.episode_length)


def _unbounded_space(observation: Any) -> ObservationSpace:
    if isinstance(observation, Mapping):
        return Dict({name: _unbounded_space(part) for name, part in observation.items()})
    return Box(float("-inf"), float("inf"), tuple(observation.shape))


@functools.cache
def _brax_environment(single: BraxEnvironment) -> Any:
    """brax's environment, with its arrays on the host."""
    if not isinstance(single.environment, str):
        return single.environment
    arguments = dict(single.overrides)
    if single.environment != "fast":
        arguments["backend"] = single.backend
    # Each loaded model warns that brax is no longer developed, and of MuJoCo's deprecations.
    with jax.ensure_compile_time_eval(), quietly(), mujoco_quietly():
        with converting_errors(f"environment '{single.name}'", "brax", arguments.items()):
            env = _registry()[single.environment](**arguments)
        replace_pytree_arrays(env)
    return env
