"""`HostReward`: a Python function on text as a reward, called from compiled programs once for each batch."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from fdg.errors import FdgError, HostError, one_line

RewardFunction = Callable[[list[str], list[str], list[Any]], Sequence[float]]


@dataclasses.dataclass(frozen=True)
class HostReward:
    """What a function says of responses.

    The fragment that it is called in cannot be split over devices, as with environments on the host: give
    the role `reward` a device of its own, `policies.Colocated(rewards=1)`. It may not compute with JAX.

    Attributes:
      function: of prompts, responses and answers (lists of `N`: text, text, and what the problem knows as
      NumPy
        arrays) to `N` numbers.
    """

    function: RewardFunction

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise FdgError(
                f"HostReward({self.function!r:.60}): give a function of prompts, responses, answers"
            )

    @property
    def name(self) -> str:
        """The function's name, under which its reward is reported."""
        return getattr(self.function, "__name__", type(self.function).__name__).strip("<>")

    def call(
        self,
        task: Any,
        prompts: tuple[jax.Array, jax.Array],
        responses: tuple[jax.Array, jax.Array],
        content: Any,
    ) -> jax.Array:
        """The rewards `[N] float32` of a batch; see `TextTask.reward`.

        Raises:
          HostError: (as the program runs) the function raised, or gave not-a-number, or not `N` numbers.
        """
        shape = jax.ShapeDtypeStruct((responses[0].shape[0],), jnp.float32)
        return io_callback(_Call(self, task), shape, prompts, responses, content)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a program calls. A value, so that equal tasks share their compiled programs."""

    reward: HostReward
    task: Any

    @property
    def __name__(self) -> str:
        return f"reward '{self.reward.name}' of task '{self.task.name}'"

    def __call__(self, prompts: Any, responses: Any, content: Any) -> np.ndarray:
        asked, said = self.task.texts(*prompts), self.task.texts(*responses)
        whole = jax.tree.map(np.asarray, content)
        answers = [jax.tree.map(lambda leaf, i=i: leaf[i], whole) for i in range(len(said))]
        try:
            given = self.reward.function(asked, said, answers)
            found = [float(value) for value in given]
        except Exception as error:
            raise HostError(f"{self.__name__} raised {one_line(error)}") from error
        if len(found) != len(said):
            raise HostError(f"{self.__name__} gave {len(found)} numbers for {len(said)} responses")
        for value, prompt, response in zip(found, asked, said, strict=True):
            if not math.isfinite(value):
                raise HostError(f"{self.__name__} gave {value} for {response!r:.60}, asked {prompt!r:.60}")
        return np.asarray(found, np.float32)
