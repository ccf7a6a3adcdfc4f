"""A worker process of `from_gymnasium`: some instances of one Gymnasium environment, stepped in turn.

It runs as a script (`worker_process`), so that it shares no threads, memory or open files with its parent,
and does not import JAX. Its argument is the descriptor of a `multiprocessing` connection. Requests are
`(method, arguments)`, replies `(True, result)` or `(False, error)`.
"""

import importlib
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from select import poll
from typing import Any

import numpy as np

from .gymnasium_codec import decode, encode_row, kind, select
from .numpy_program import NumpyProgram, Runner

_GRACE_SECONDS = 5.0  # for environments to close after the parent has gone


class WrongAnswerError(Exception):
    """An environment's `reset` or `step` violated Gymnasium's interface."""


class Instance:
    """An environment whose results are checked against its spaces, and copied.

    An environment may return Python numbers, another dtype, or the same array each time.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self._observation_space = env.observation_space  # each wrapper would pass the question on

    def reset(self, seed: int | None = None) -> Any:
        """Starts an episode; returns its first observation, from `convert`."""
        result = self.env.reset() if seed is None else self.env.reset(seed=seed)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise WrongAnswerError(
                f"reset returned {_describe(result)}: return the pair (observation, info), info a dictionary"
            )
        return convert(self._observation_space, result[0])

    def step(self, action: Any, info: Sequence[str] = ()) -> tuple[Any, ...]:
        """Observation (from `convert`), reward, terminated, truncated; at an episode's end also `info`."""
        result = self.env.step(action)
        if not isinstance(result, tuple) or len(result) != 5:
            raise WrongAnswerError(
                f"step returned {_describe(result)}: return five"
                " (observation, reward, terminated, truncated, info)"
            )
        observation, reward, terminated, truncated, infos = result
        terminated, truncated = (
            bool(_scalar("terminated", terminated)),
            bool(_scalar("truncated", truncated)),
        )
        ended = terminated or truncated
        return (
            convert(self._observation_space, observation),
            _scalar("reward", reward),
            terminated,
            truncated,
            *[_info_value(name, infos) if ended else 0.0 for name in info],
        )


def is_wrong_answer(reason: str) -> bool:
    """True if `Instances.describe_error` described a `WrongAnswerError`, which a restart would repeat."""
    return re.search(r"its instance \d+: ", reason) is not None


class Instances:
    """Instances of one environment, each with its own random numbers."""

    def __init__(self) -> None:
        self._envs: list[Instance] = []
        self._observations: Any = None  # the current ones, stacked
        self._current = 0  # the current instance, for messages

    def reset(self, name: str, options: dict[str, Any], seeds: list[int]) -> Any:
        """Makes an instance for each seed; returns their first observations."""
        self._envs = [Instance(make_instance(name, **options)) for _ in seeds]
        self._observations = stack([self._select(i).reset(seed) for i, seed in enumerate(seeds)])
        return self._observations

    def step(self, actions: list[Any], info: Sequence[str] = ()) -> tuple[Any, ...]:
        """Steps each instance; those whose episode ends start the next one.

        Returns:
          Observations after the resets; observations before them (None if no episode ended); and an array
          with one row each for rewards, terminations, truncations and each `info`.
        """
        observations: list[Any] = []
        finals: list[Any] = []
        rows: list[list[float]] = []
        any_ended = False
        for i, action in enumerate(actions):
            observation, *numbers = self._select(i).step(action, info)
            rows.append(numbers)
            finals.append(observation)
            if numbers[1] or numbers[2]:
                any_ended, observation = True, self._select(i).reset()
            observations.append(observation)
        self._observations = stack(observations)
        return self._observations, stack(finals) if any_ended else None, np.array(rows, np.float64).T

    def segment(
        self,
        program: bytes | None,
        num_steps: int,
        fixed: bytes,
        per_step: list[np.ndarray],
        last_rows: np.ndarray | None,
        info: Sequence[str] = (),
    ) -> tuple[Any, ...]:
        """Acts and steps `num_steps` times.

        Args:
          program: a serialised `NumpyProgram`, which computes actions and extras; None: the previous one.
          num_steps: T.
          fixed: the program's fixed inputs, pickled.
          per_step: the program's inputs of each step, `[T, n, ...]` each.
          last_rows: if given, the instances are new ones, which replace lost ones with this last observation,
            `[n, *wire]`: the first action is only recorded, and the first step is left to the caller.
          info: names of episode metrics.

        Returns:
          Extras, `[T, n, ...]`; observations after each step, `[T, n, *wire]`; for steps in which an episode
          ended, also observations before the resets; and numbers as from `step`, `[3 + len(info), T, n]`.
        """
        if program is not None:
            self._runner = Runner(NumpyProgram.deserialized(program))
        env = self._envs[0].env
        rows = self._encode(self._observations) if last_rows is None else last_rows
        extras: list[list[np.ndarray]] = []
        all_rows = np.zeros((num_steps, *rows.shape), rows.dtype)
        finals: dict[int, np.ndarray] = {}
        numbers = np.zeros((3 + len(info), num_steps, len(rows)))
        self._runner.begin(pickle.loads(fixed))
        for t in range(num_steps):
            action, *step_extras = self._runner.step(rows, [values[t] for values in per_step])
            extras.append(step_extras)
            if t > 0 or last_rows is None:
                actions = decode(env.action_space, np.asarray(action))
                _, final, numbers[:, t] = self.step([select(actions, i) for i in range(len(rows))], info)
                if final is not None:
                    finals[t] = self._encode(final)
            rows = all_rows[t] = self._encode(self._observations)
        return [np.stack(values) for values in zip(*extras, strict=True)], all_rows, finals, numbers

    @np.errstate(over="ignore")  # as in the parent: a number beyond float32 becomes infinite
    def _encode(self, observations: Any) -> np.ndarray:
        """Encodes stacked observations, `[n, *wire]`."""
        return encode_row(self._envs[0].env.observation_space, observations)

    def describe_error(self, error: BaseException) -> str:
        """An error message that names the current instance."""
        text = " ".join(str(error).split())
        if isinstance(error, WrongAnswerError):
            return f"its instance {self._current}: {text}"
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [
            frame for frame in frames if "site-packages" not in frame.filename and frame.filename != __file__
        ]
        place = (
            f" ({user_frames[-1].filename.rpartition('/')[2]}, line {user_frames[-1].lineno})"
            if user_frames
            else ""
        )
        return f"its instance {self._current} raised {type(error).__name__}: {text}{place}"

    def _select(self, i: int) -> Instance:
        self._current = i
        return self._envs[i]


def make_instance(name: str, **options: Any) -> Any:
    """Makes an instance of a name in `gymnasium.make`, or of `module:NAME`, a class or a function."""
    import gymnasium

    module, _, attribute = name.rpartition(":")
    value: Any = importlib.import_module(module) if module else None
    for part in attribute.split("."):
        value = getattr(value, part, None)
    entry = gymnasium.envs.registration.EnvSpec(attribute, entry_point=value) if callable(value) else name
    return gymnasium.make(entry, disable_env_checker=True, **options)


def convert(space: Any, value: Any, where: str = "observation") -> Any:
    """Copies an element of a Gymnasium space to new arrays of the space's shapes and dtypes.

    `value` may be an array, a list, a tuple or a number; messages begin with `where`.

    Raises:
      WrongAnswerError: missing parts, a wrong shape, or a number outside the space's dtype.
    """
    name = kind(space)
    is_exact = type(value) is np.ndarray and (value.dtype, value.shape) == (space.dtype, space.shape)
    if name == "Box" and is_exact:
        return value.copy()  # the checks below take longer than the steps of many environments
    if name == "Dict":
        missing = [key for key in space.spaces if not isinstance(value, Mapping) or key not in value]
        if missing:
            raise WrongAnswerError(
                f"{where} is {_describe(value)}, without the part {missing[0]!r} of its space: give all parts"
            )
        return {key: convert(part, value[key], f"{where}[{key!r}]") for key, part in space.spaces.items()}
    if name == "Tuple":
        if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
            raise WrongAnswerError(
                f"{where} is {_describe(value)}, where its space has {len(space.spaces)} parts"
            )
        return tuple(convert(part, value[i], f"{where}[{i}]") for i, part in enumerate(space.spaces))
    if space.dtype is None or np.issubdtype(space.dtype, np.str_):
        return str(value)
    try:
        raw = _real_array(value)
        array = raw.astype(space.dtype)  # a copy
    except (TypeError, ValueError) as error:
        raise WrongAnswerError(
            f"{where} is {_describe(value)}, which is not an array of numbers: {error}"
        ) from None
    if array.shape != tuple(space.shape):
        raise WrongAnswerError(
            f"{where} has the shape {list(array.shape)}, where its space has {list(space.shape)}"
        )
    if array.dtype.kind != "f" and raw.dtype != array.dtype and not np.array_equal(array, raw):
        raise WrongAnswerError(
            f"{where} has {raw[array != raw].flat[0]}, which its space's dtype {array.dtype} cannot hold"
        )
    if name in ("Discrete", "MultiDiscrete"):
        low, count = space.start, space.n if name == "Discrete" else space.nvec
        outside = (array < low) | (array >= low + count)
        if outside.any():
            raise WrongAnswerError(
                f"{where} has {array[outside].flat[0]}, which is outside of its space {space}"
            )
    return array


def stack(elements: list[Any]) -> Any:
    """Stacks a batch: an array (for texts a list), or for parts a dictionary or tuple."""
    first = elements[0]
    if isinstance(first, dict):
        return {key: stack([element[key] for element in elements]) for key in first}
    if isinstance(first, tuple):
        return tuple(stack([element[i] for element in elements]) for i in range(len(first)))
    return np.array(elements)  # much faster than `np.stack` for small arrays


def _real_array(value: Any) -> np.ndarray:
    """`np.asarray(value)`; a cast would drop imaginary parts, and make NaN of None."""
    array = np.asarray(value)
    if array.dtype.kind == "c":
        raise TypeError("its numbers are complex")
    if array.dtype.kind == "O" and any(item is None for item in array.flat):
        raise TypeError("it contains None")
    return array


def _scalar(what: str, value: Any) -> float:
    """A number that an environment returned, possibly as an array with one element."""
    if isinstance(value, float | int | np.bool_ | np.floating | np.integer):
        return float(value)
    try:
        array = _real_array(value).astype(np.float64)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.size != 1:
        raise WrongAnswerError(f"step returned {what} = {_describe(value)}: return one number")
    return array.item()


def _info_value(name: str, info: Any) -> float:
    """A number by name from the info of an episode's last step."""
    if not isinstance(info, Mapping) or name not in info:
        raise WrongAnswerError(
            f"step returned no {name!r} in info at the end of an episode: info is {_describe(info)}: give a"
            " name that it has, or leave out info="
        )
    return _scalar(f"info[{name!r}]", info[name])


def _describe(value: Any) -> str:
    """A value for a message, by its type and size."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} values"
    if isinstance(value, Mapping):
        return f"a dictionary of {', '.join(map(repr, value)) or 'nothing'}"[:200]
    if isinstance(value, np.ndarray):
        return f"an array of shape {list(value.shape)}"
    return f"{type(value).__name__} {value!r:.60}"


def _end_after_parent(connection: Connection) -> None:
    """Kills this process if it still runs a while after its parent has gone: an environment hangs."""
    parent = poll()
    parent.register(connection, 0)  # no events: it only waits until the other end is closed
    parent.poll()
    time.sleep(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Serves requests until the parent has gone."""
    # The parent handles signals: it saves before it ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_after_parent, args=(connection,), daemon=True).start()
    instances = Instances()
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            reply = True, getattr(instances, method)(*arguments)
        except BaseException as error:
            reply = False, instances.describe_error(error)
        try:
            connection.send(reply)
        except BrokenPipeError:
            return
