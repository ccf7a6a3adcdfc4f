"""EnvPool's environments (github.com/sail-sg/envpool; Weng et al. 2022, arXiv 2206.10558): C++ threads.

`envs.make("envpool:HalfCheetah-v4")`, and every other name of `envpool.list_all_envs()`. Differences from
EnvPool:

- EnvPool resets an instance in the step after its last one, and ignores that step's action. Here finished
instances are reset within the same call, so every action counts.
- `gymnasium_spaces` converts observations: EnvPool's MuJoCo uses float64, its Atari has channels first.
`gymnasium_parts` converts observations with parts, and masks.
- EnvPool fixes seeds when it makes instances: each `reset` with new keys makes new instances.
- EnvPool starts one thread per core; waiting threads spin, which slows down the program that acts. Here one
core is left free; `num_threads` overrides this.

As in EnvPool, an episode that ends exactly at its time limit is truncated, also in a terminal state, and
`reward_clip` and similar options also change the episode's return.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from envs import gymnasium_parts, gymnasium_spaces
from envs.deadline import Deadline
from envs.environment import named_info
from envs.families import family
from envs.host import HostEnvironment, make_from
from envs.pools import InTwoHalves, Transition
from fdg.arguments import check_options
from fdg.errors import FdgError, HostError, listed, one_line, raised, unknown_name

PREFIX = "envpool:"  # of its names for `envs.make`

# Options that the pool sets, or that do not apply to single-agent environments.
_RESERVED_OPTIONS = {
    "num_envs", "batch_size", "seed", "env_seed", "max_num_players", "gym_reset_return_info", "base_path",
}  # fmt: skip
_NO_LIMIT = 2**31 - 1  # EnvPool's `max_episode_steps` of an environment without a time limit


def make(name: str, **overrides: Any) -> HostEnvironment:
    """EnvPool's environment `name`.

    `overrides` are EnvPool's options (`max_episode_steps=200`, `num_threads=4`, Atari's `frame_skip=4`),
    `timeout` and `restarts` of `HostEnvironment`, and `info`, names of episode metrics in the info of the
    last step.

    Raises:
      FdgError: EnvPool is not installed, or has no such environment or option; suggests the nearest.
    """
    available = _envpool().list_all_envs()
    if name not in available:
        raise unknown_name("environment of EnvPool", name, available)
    info = named_info(overrides.pop("info", ()))
    return make_from(lambda options: EnvPoolSource(PREFIX + name, options, info), overrides)


def all_names() -> tuple[str, ...]:
    """All names of EnvPool; empty if it is not installed."""
    return () if importlib.util.find_spec("envpool") is None else tuple(_envpool().list_all_envs())


def trust_reason(name: str) -> str | None:
    """As `envs.trust_reason`: what an environment does outside this process, or None; `name` has the prefix.

    Only ViZDoom's environments do so.
    """
    spec = _envpool().registration.registry.specs.get(name.removeprefix(PREFIX), ("",))
    is_vizdoom = "vizdoom" in spec[0]
    return "starts ViZDoom, which writes into the current folder" if is_vizdoom else None


@dataclasses.dataclass(frozen=True)
class EnvPoolSource(gymnasium_parts.LibrarySource):
    """A `pools.Source`: EnvPool's environment and changed options."""

    name: str  # with the prefix
    options: tuple[tuple[str, Any], ...] = ()  # (name, value), sorted
    info: tuple[str, ...] = ()  # names of episode metrics

    def __post_init__(self) -> None:
        if not self.options:
            return
        config = _spec(self.name).config
        check_options(f"environment '{self.name}'", config._asdict(), dict(self.options))
        known = set(config._fields) - _RESERVED_OPTIONS
        for option, _ in self.options:
            if option not in known:
                raise unknown_name(
                    f"parameter of environment '{self.name}'", option, known | HostEnvironment.FIELDS
                )

    @property
    def facts(self) -> gymnasium_parts.Facts:
        """What EnvPool says about this environment: spaces and limits."""
        return _facts(self)

    def with_cores(self, cores: int) -> "EnvPoolSource":
        """The same source with at most this many threads, unless `num_threads` is given."""
        options = {"num_threads": cores, **dict(self.options)}
        return dataclasses.replace(self, options=tuple(sorted(options.items())))

    def start(self, size: int) -> "EnvPoolPool":
        """A pool of `size` instances."""
        return EnvPoolPool(self, size)


class EnvPoolPool(InTwoHalves):
    """A `pools.Pool` of EnvPool's threads, which are replaced together."""

    def __init__(self, source: EnvPoolSource, size: int):
        self._source, self._size = source, size
        self._action_space = source.facts.library_action_space
        self._env: Any = None
        self._caller = Deadline()

    def reset(self, rows: np.ndarray, seeds: np.ndarray, timeout: float) -> np.ndarray:
        """Recreates all instances; `rows` always includes all."""
        self.close()
        self._caller = Deadline()  # the thread of the earlier one may hang

        def make_and_reset() -> tuple[Any, np.ndarray]:
            options = {"num_threads": threads_for(self._size), **dict(self._source.options)}
            _make_vizdoom_folder(self._source.name)
            with _quiet():
                env = _make(self._source.name, num_envs=self._size, seed=seeds.tolist(), **options)
                return env, self._source.encode(env.reset()[0])

        try:
            self._env, observation = self._caller.call(make_and_reset, timeout)
        except TimeoutError:
            raise HostError(
                f"environment '{self._source.name}': EnvPool has not started {self._size} instances in"
                f" {timeout:g} s"
            ) from None
        return observation

    def send(self, action: np.ndarray, timeout: float) -> None:
        """Makes the thread start a step."""
        env, action = self._env, gymnasium_spaces.decode(self._action_space, action)
        self._caller.begin(lambda: self._step(env, action))

    def ready(self) -> bool:
        """True if the step has finished."""
        return self._caller.ready()

    def recv(self, timeout: float) -> Transition:
        """The result of the running step; if it failed, all instances are lost."""
        try:
            return self._caller.finish(timeout)
        except TimeoutError:
            reason = f"a step was not done in {timeout:g} s"
        except Exception as error:
            reason = f"a step raised {raised(error)}"
        return Transition.all_lost(self._size, self._source.wire_space, reason, len(self._source.info))

    def close(self) -> None:
        """Releases the threads; one that hangs stays until the process ends."""
        self._caller.close()
        self._env = None

    def _step(self, env: Any, action: np.ndarray) -> Transition:
        """Steps all instances of `env`, and resets those that ended; runs in the thread."""
        library_observation, reward, terminated, truncated, infos = env.step(action)
        final_observation = self._source.encode(library_observation)
        observation = final_observation
        ended = np.flatnonzero(terminated | truncated).astype(np.int32)
        if len(ended):
            observation = final_observation.copy()
            library_observation, info = env.reset(ended)
            observation[info["env_id"]] = self._source.encode(library_observation)
        return Transition(
            observation,
            np.array(reward, np.float32),
            np.array(terminated),
            np.array(truncated),
            final_observation,
            tuple(self._info_values(name, infos) for name in self._source.info),
        )

    def _info_values(self, name: str, info: Any) -> np.ndarray:
        """A metric of each instance, `[B] float32`, from EnvPool's `info`."""
        values = np.array(info[name], np.float32) if name in info else np.empty(0)
        if values.shape != (self._size,):
            available = [key for key, value in info.items() if np.shape(value) == (self._size,)]
            raise HostError(
                f"its info has no entry '{name}' with one number per instance: such entries are"
                f" {listed(available, 'and')}"
            )
        return values


def _make_vizdoom_folder(name: str) -> None:
    """Makes the folder that every instance of ViZDoom would make in the working directory.

    If two instances make the folder at once, or none can, ViZDoom ends the process with a segmentation fault.

    Raises:
      HostError: the folder cannot be made.
    """
    if trust_reason(name) is None:  # not ViZDoom
        return
    try:
        os.makedirs("_vizdoom", exist_ok=True)
        with tempfile.TemporaryFile(dir="."):  # a test: ViZDoom also writes its settings here
            pass
    except OSError as error:
        raise HostError(
            f"environment '{name}': ViZDoom writes into the working directory, and cannot"
            f" ({os.path.abspath(error.filename or '.')}: {error.strerror}): start in another directory"
        ) from error


def threads_for(size: int) -> int:
    """The number of threads for `size` instances: at most all cores but one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(size, max(1, cores - 1))


@functools.cache
def _facts(source: EnvPoolSource) -> gymnasium_parts.Facts:
    """EnvPool's spaces and time limit, without starting the environment."""
    spec = _spec(source.name, **dict(source.options))
    with _quiet():
        observed, actions = spec.gymnasium_observation_space, spec.gymnasium_action_space
    limit = getattr(spec.config, "max_episode_steps", 0)
    return gymnasium_parts.facts(source.name, observed, actions, limit if 0 < limit < _NO_LIMIT else None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses Gymnasium's warnings about the precision of EnvPool's bounds."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*precision lowered by casting", UserWarning)
        yield


def _spec(name: str, **options: Any) -> Any:
    """EnvPool's specification, without starting the environment."""
    try:
        spec = _envpool().make_spec(name.removeprefix(PREFIX), **options)
    except ImportError as error:  # some families need libraries of the system
        raise FdgError(f"environment '{name}' cannot be loaded: {one_line(error)}") from error
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        text = "".join(f" with {option}={value!r}" for option, value in options.items())
        raise FdgError(f"environment '{name}'{text} cannot be made: {one_line(error)}") from error
    players = getattr(spec.config, "max_num_players", 1)
    if players != 1:
        raise FdgError(f"environment '{name}' has {players} players: use a single-player environment")
    return spec


def _make(name: str, **options: Any) -> Any:
    """Starts EnvPool's instances."""
    library = _envpool()
    if family(name) == "jumanji":
        # Sudoku's boards are in the package itself, but EnvPool looks for them in another folder.
        options["base_path"] = os.path.dirname(os.path.abspath(library.__file__))
    return library.make_gymnasium(name.removeprefix(PREFIX), **options)


def _envpool() -> Any:
    """The package; imported on first use."""
    if importlib.util.find_spec("envpool") is None:
        raise FdgError(f"'{PREFIX}...' needs EnvPool, which is not installed: pip install 'fdg[envpool]'")
    import envpool

    return envpool
