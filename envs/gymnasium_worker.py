"""A worker process of `from_gymnasium`: some instances of one Gymnasium environment, stepped in turn.

Run as a script, `python gymnasium_worker.py FD`, so that a worker starts from nothing: it has none of its
parent's threads, memory or open files, and does not import JAX. FD is a `multiprocessing` connection. What
comes over it is `(method, arguments)`, what goes back `(True, result)` or `(False, what went wrong)`.
"""

import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np


class Instances:
    """Instances of one environment, each with its own random numbers."""

    def __init__(self) -> None:
        self._envs: list[Any] = []
        self._at = 0  # the instance at work, for messages

    def reset(self, name: str, options: dict[str, Any], seeds: list[int]) -> Any:
        """Makes an instance for each seed; their first observations."""
        import gymnasium

        self._envs = [gymnasium.make(name, disable_env_checker=True, **options) for _ in seeds]
        return stack([self._of(i).reset(seed=seed)[0] for i, seed in enumerate(seeds)])

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """Steps each; those whose episode ends begin the next one.

        Returns:
          Observations after and before the reset (the same object where none was), and columns of rewards,
          terminations and truncations.
        """
        observations: list[Any] = []
        finals: list[Any] = []
        numbers = np.zeros((3, len(self._envs)))
        for i, action in enumerate(actions):
            observation, *numbers[:, i], _ = self._of(i).step(action)
            if numbers[1:, i].any():
                # An environment may hand out the same array again and again, so: before the reset.
                finals.append(copy(observation))
                observation = self._of(i).reset()[0]
            else:
                finals.append(None)
            observations.append(copy(observation))
        after = stack(observations)
        if all(final is None for final in finals):
            return after, None, numbers
        before = stack([o if f is None else f for o, f in zip(observations, finals, strict=True)])
        return after, before, numbers

    def blame(self, error: BaseException) -> str:
        """Which instance has raised what."""
        return f"its instance {self._at} raised {type(error).__name__}: {' '.join(str(error).split())}"

    def _of(self, i: int) -> Any:
        self._at = i
        return self._envs[i]


def copy(element: Any) -> Any:
    """A copy of an observation."""
    if isinstance(element, dict):
        return {key: copy(part) for key, part in element.items()}
    return tuple(map(copy, element)) if isinstance(element, tuple) else np.array(element)


def stack(elements: list[Any]) -> Any:
    """A batch: an array, or for observations that have parts a dictionary or tuple of them."""
    first = elements[0]
    if isinstance(first, dict):
        return {key: stack([element[key] for element in elements]) for key in first}
    if isinstance(first, tuple):
        return tuple(stack([element[k] for element in elements]) for k in range(len(first)))
    return np.stack([np.asarray(element) for element in elements])


def main() -> None:
    """Works until the parent has gone."""
    # They are for the parent, who will save its work first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    instances = Instances()
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            reply = True, getattr(instances, method)(*arguments)
        except BaseException as error:
            reply = False, instances.blame(error)
        try:
            connection.send(reply)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
