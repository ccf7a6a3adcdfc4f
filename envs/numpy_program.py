"""Runs programs of array operations with NumPy; imports neither JAX nor this package.

A program is plain data: JAX's operations by name (`numpy_operations`), with their static parameters.
`envs.numpy_actors` makes it from a jaxpr.

A program reads one array of observations at each step, further arrays of that step, and arrays that stay
fixed for a segment of steps, such as parameters. Equations that read only fixed arrays run once per segment.
"""

import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .numpy_operations import Function, function_of


class Equation(NamedTuple):
    """One operation; values are numbered."""

    operation: str
    params: dict[str, Any]  # numbers, texts, and tuples and dictionaries of these
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class NumpyProgram(NamedTuple):
    """A program whose first value is the observation, followed by the other inputs and the constants."""

    num_per_step: int  # inputs of each step, besides the observation
    num_fixed: int  # inputs that stay fixed for a segment
    constants: Sequence[np.ndarray]
    equations: Sequence[Equation]
    outputs: tuple[int, ...]

    def serialized(self) -> bytes:
        """The program for `deserialized`, which needs no module of this package to read it."""
        return pickle.dumps((*self[:3], [tuple(equation) for equation in self.equations], self.outputs))

    @staticmethod
    def deserialized(content: bytes) -> "NumpyProgram":
        """The program that `serialized` wrote."""
        num_per_step, num_fixed, constants, equations, outputs = pickle.loads(content)
        return NumpyProgram(num_per_step, num_fixed, constants, [Equation(*x) for x in equations], outputs)


# A function, a function that selects its operands from all values, and the numbers of its results.
_Step = tuple[Function, Callable[[list[Any]], Sequence[Any]], tuple[int, ...]]


class Runner:
    """Runs a program: `begin` once per segment, `step` for each step.

    Raises:
      UnsupportedError: the program has an operation, or a parameter, that is not supported.
    """

    def __init__(self, program: NumpyProgram) -> None:
        self._program = program
        num_changing = 1 + program.num_per_step
        num_inputs = num_changing + program.num_fixed
        self._first_fixed = num_changing
        changing = set(range(num_changing))
        self._values: list[Any] = [None] * num_inputs + list(program.constants)
        self._at_begin: list[_Step] = []
        self._at_step: list[_Step] = []
        for equation in program.equations:
            self._values += [None] * (max(equation.outputs, default=0) + 1 - len(self._values))
            step = (
                function_of(equation.operation, equation.params),
                _selection(equation.inputs),
                equation.outputs,
            )
            if changing.isdisjoint(equation.inputs):
                self._at_begin.append(step)
            else:
                self._at_step.append(step)
                changing.update(equation.outputs)

    def begin(self, fixed: Sequence[np.ndarray]) -> None:
        """Sets the inputs that stay fixed for the next steps."""
        self._values[self._first_fixed : self._first_fixed + len(fixed)] = fixed
        self._run(self._at_begin)

    def step(self, observation: np.ndarray, per_step: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs for an observation and the other inputs of this step."""
        self._values[: self._first_fixed] = [observation, *per_step]
        self._run(self._at_step)
        return [self._values[i] for i in self._program.outputs]

    @np.errstate(all="ignore")  # JAX does not warn either
    def _run(self, steps: Sequence[_Step]) -> None:
        values = self._values
        for run, operands, outputs in steps:
            if len(outputs) == 1:
                values[outputs[0]] = run(*operands(values))
                continue
            for i, value in zip(outputs, run(*operands(values)), strict=True):
                values[i] = value


def _selection(numbers: tuple[int, ...]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that selects some elements of a list."""
    if len(numbers) > 1:
        return operator.itemgetter(*numbers)  # faster than a loop
    return operator.itemgetter(slice(numbers[0], numbers[0] + 1) if numbers else slice(0))
