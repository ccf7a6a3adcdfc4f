"""EnvPool's environments (github.com/sail-sg/envpool; Weng et al. 2022, arXiv 2206.10558): C++ threads.

`envs.make("envpool:HalfCheetah-v4")`, and every other name of `envpool.list_all_envs()`. Differences from
EnvPool:

- EnvPool resets an instance in the step after its last one, and ignores that step's action. Here finished
instances are reset within the same call, so every action counts.
- Observations are converted as in `gymnasium_spaces` (EnvPool's MuJoCo has float64, its Atari channels
first), and composite ones and action masks as in `gymnasium_parts`.
- EnvPool fixes seeds when it makes instances, so each `reset` makes new instances.
- EnvPool starts one thread per core; waiting threads spin and starve the acting program. Here one core stays
free; `num_threads` overrides this.

As in EnvPool: an episode that ends exactly at its time limit is truncated, also in a terminal state;
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
from envs.deadline import TimedThread
from envs.environment import named_info
from envs.families import family
from envs.host import HostEnvironment, make_from
from envs.pools import Transition
from fdg.arguments import check_options
from fdg.errors import FdgError, HostError, listed, one_line, raised, unknown_name

PREFIX = "envpool:"

# Options that the pool sets, or that do not apply to single-agent environments.
_RESERVED = {
    "num_envs",
    "batch_size",
    "seed",
    "env_seed",
    "max_num_players",
    "gym_reset_return_info",
    "base_path",
}
_NO_LIMIT = 2**31 - 1


def make(name: str, **overrides: Any) -> HostEnvironment:
    """EnvPool's environment `name`.

    `overrides` are EnvPool's options (`max_episode_steps=200`, `num_threads=4`, Atari's `frame_skip=4`),
    `timeout` and `restarts` of `HostEnvironment`, and `info`, names of episode metrics in the info of the
    last step.

    Raises:
      FdgError: EnvPool is not installed, or has no such environment or option; suggests the nearest.
    """
    env_names = _envpool().list_all_envs()
    if name not in env_names:
        raise unknown_name("environment of EnvPool", name, env_names)
    info = named_info(overrides.pop("info", ()))
    return make_from(lambda options: EnvPoolSource(PREFIX + name, options, info), overrides)


def installed_names() -> tuple[str, ...]:
    """All names of EnvPool; empty if it is not installed."""
    return () if importlib.util.find_spec("envpool") is None else tuple(_envpool().list_all_envs())


def side_effects(name: str) -> str | None:
    """Describes what an environment does outside this process (only ViZDoom's), or None; `name` has the
    prefix."""
    spec = _envpool().registration.registry.specs.get(name.removeprefix(PREFIX), ("",))
    is_vizdoom = "vizdoom" in spec[0]
    return "starts ViZDoom, which writes into the current folder" if is_vizdoom else None


@dataclasses.dataclass(frozen=True)
class EnvPoolSource(gymnasium_parts.LibrarySource):
    """A `pools.Source`: EnvPool's environment and changed options."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    info: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.options:
            return
        config = _make_spec(self.name).config
        check_options(f"environment '{self.name}'", config._asdict(), dict(self.options))
        accepted = set(config._fields) - _RESERVED
        for option, _ in self.options:
            if option not in accepted:
                raise unknown_name(
                    f"parameter of environment '{self.name}'", option, accepted | HostEnvironment.FIELDS
                )

    @property
    def facts(self) -> gymnasium_spaces.Facts:
        """EnvPool's specification."""
        return _spaces(self)

    def within(self, cores: int) -> "EnvPoolSource":
        """The same source with at most this many threads, unless `num_threads` is given."""
        options = {"num_threads": cores, **dict(self.options)}
        return dataclasses.replace(self, options=tuple(sorted(options.items())))

    def start(self, size: int) -> "EnvPoolPool":
        """A pool of `size` instances."""
        return EnvPoolPool(self, size)


class EnvPoolPool:
    """A `pools.Pool` whose instances run on EnvPool's threads and are recreated together."""

    def __init__(self, source: EnvPoolSource, size: int):
        self._source, self._size = source, size
        self._action_space = source.facts.library_action_space
        self._env: Any = None
        self._thread = TimedThread()

    def reset(self, rows: np.ndarray, seeds: np.ndarray, timeout: float) -> np.ndarray:
        """Recreates all instances; `rows` always includes all."""
        self._abandon()

        def start() -> tuple[Any, np.ndarray]:
            options = {"num_threads": num_threads(self._size), **dict(self._source.options)}
            _make_vizdoom_folder(self._source.name)
            with _without_precision_warnings():
                env = _make(self._source.name, num_envs=self._size, seed=seeds.tolist(), **options)
                return env, self._source.encoded(env.reset()[0])

        try:
            self._env, observation = self._thread.call(start, timeout)
        except TimeoutError:
            raise HostError(
                f"environment '{self._source.name}': EnvPool has not started {self._size} instances in"
                f" {timeout:g} s"
            ) from None
        return observation

    def step(self, action: np.ndarray, timeout: float) -> Transition:
        """Steps all instances, then resets those whose episode ended."""
        self.send(action, timeout)
        return self.recv(timeout)

    def send(self, action: np.ndarray, timeout: float) -> None:
        """Makes the thread start a step."""
        env, action = self._env, gymnasium_spaces.decode(self._action_space, action)
        self._thread.submit(lambda: self._step(env, action))

    def ready(self) -> bool:
        """True if the step has finished."""
        return self._thread.ready()

    def recv(self, timeout: float) -> Transition:
        """Waits for the running step and returns its result."""
        try:
            return self._thread.finish(timeout)
        except TimeoutError:
            reason = f"a step was not done in {timeout:g} s"
        except Exception as error:
            reason = f"a step raised {raised(error)}"
        return Transition.lost(self._size, self._source.wire_space, reason, len(self._source.info))

    def close(self) -> None:
        """Releases the threads; one that hangs stays until the process ends."""
        self._thread.close()
        self._env = None

    def _abandon(self) -> None:
        self.close()
        self._thread = TimedThread()

    def _step(self, env: Any, action: np.ndarray) -> Transition:
        library_observation, reward, terminated, truncated, said = env.step(action)
        final_observation = self._source.encoded(library_observation)
        observation = final_observation
        done_rows = np.flatnonzero(terminated | truncated).astype(np.int32)
        if len(done_rows):
            observation = final_observation.copy()
            library_observation, reset_info = env.reset(done_rows)
            observation[reset_info["env_id"]] = self._source.encoded(library_observation)
        return Transition(
            observation,
            np.array(reward, np.float32),
            np.array(terminated),
            np.array(truncated),
            final_observation,
            tuple(self._info_values(name, said) for name in self._source.info),
        )

    def _info_values(self, name: str, info: Any) -> np.ndarray:
        values = np.array(info[name], np.float32) if name in info else np.empty(0)
        if values.shape != (self._size,):
            available = [key for key, value in info.items() if np.shape(value) == (self._size,)]
            raise HostError(
                f"its info has no array '{name}' with a number per instance; it has"
                f" {listed(available, 'and')}"
            )
        return values


def _make_vizdoom_folder(name: str) -> None:
    """Makes the folder that every instance of ViZDoom would make in the working directory.

    If two make it at once, or it cannot be made, ViZDoom ends the whole process with a segmentation fault.

    Raises:
      HostError: it cannot be made.
    """
    if side_effects(name) is None:
        return
    try:
        os.makedirs("_vizdoom", exist_ok=True)
        with tempfile.TemporaryFile(dir="."):  # ViZDoom also writes its settings here
            pass
    except OSError as error:
        raise HostError(
            f"environment '{name}': ViZDoom must write into the current folder, which failed"
            f" ({os.path.abspath(error.filename or '.')}: {error.strerror}): start in a writable folder"
        ) from error


def num_threads(size: int) -> int:
    """The number of threads for `size` instances: at most all cores but one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(size, max(1, cores - 1))


@functools.cache
def _spaces(source: EnvPoolSource) -> gymnasium_spaces.Facts:
    spec = _make_spec(source.name, **dict(source.options))
    with _without_precision_warnings():
        observation_space, action_space = spec.gymnasium_observation_space, spec.gymnasium_action_space
    limit = getattr(spec.config, "max_episode_steps", 0)
    return gymnasium_spaces.facts(
        source.name, observation_space, action_space, limit if 0 < limit < _NO_LIMIT else None
    )


@contextlib.contextmanager
def _without_precision_warnings() -> Iterator[None]:
    """Suppresses Gymnasium's warnings about the precision of EnvPool's bounds."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*precision lowered by casting", UserWarning)
        yield


def _make_spec(name: str, **options: Any) -> Any:
    """EnvPool's specification, without starting the environment."""
    try:
        spec = _envpool().make_spec(name.removeprefix(PREFIX), **options)
    except ImportError as error:  # some families need libraries of the system
        raise FdgError(f"environment '{name}' cannot be loaded: {one_line(error)}") from error
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        options_text = "".join(f" with {option}={value!r}" for option, value in options.items())
        raise FdgError(f"environment '{name}'{options_text} cannot be made: {one_line(error)}") from error
    players = getattr(spec.config, "max_num_players", 1)
    if players != 1:
        raise FdgError(f"environment '{name}' has {players} players: use an environment for a single player")
    return spec


def _make(name: str, **options: Any) -> Any:
    library = _envpool()
    if family(name) == "jumanji":
        # Sudoku's boards are in the package itself, but it looks for them among other assets.
        options["base_path"] = os.path.dirname(os.path.abspath(library.__file__))
    return library.make_gymnasium(name.removeprefix(PREFIX), **options)


def _envpool() -> Any:
    if importlib.util.find_spec("envpool") is None:
        raise FdgError(f"'{PREFIX}...' needs EnvPool, which is not installed: pip install 'fdg[envpool]'")
    import envpool

    return envpool
