"""Helpers for benchmarks: measuring in turns, medians with their spread, tables, command lines."""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
Key = TypeVar("Key")
Result = TypeVar("Result")


def in_turns(
    sides: Mapping[Key, Callable[[int], Result]], rounds: int, warm_up: int = 1
) -> dict[Key, list[Result]]:
    """Calls all sides in each round, in reverse order every other round; returns each side's results.

    A call's argument is the number of the round. Sides take turns, so that other work on the machine slows
    all of them. The results of warm-up rounds are left out.

    >>> in_turns({"a": lambda i: i, "b": lambda i: -i}, rounds=2)
    {'a': [1, 2], 'b': [-1, -2]}
    """
    results: dict[Key, list[Result]] = {name: [] for name in sides}
    for round_number in range(warm_up + rounds):
        for name in list(sides) if round_number % 2 else reversed(sides):
            results[name].append(sides[name](round_number))
    return {name: side_results[warm_up:] for name, side_results in results.items()}


def seconds(call: Callable[[], Any]) -> float:
    """Seconds from the start of a call until the arrays that it returns are computed."""
    import jax

    begun = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begun


def timed_in_turns(calls: Mapping[Key, Callable[[], Any]], rounds: int) -> dict[Key, list[float]]:
    """Seconds of each call in each round; a warm-up round comes first."""
    sides = {name: lambda _, call=call: seconds(call) for name, call in calls.items()}
    return in_turns(sides, rounds)


def repeated(step: Callable[[Any], tuple[Any, Any]], state: Any) -> Callable[[], tuple[Any, Any]]:
    """A function that calls `step` on the state that the last call returned, which may be donated.

    >>> call = repeated(lambda state: (state + 1, f"from {state}"), 0)
    >>> call(), call()
    ((1, 'from 0'), (2, 'from 1'))
    """

    def call() -> tuple[Any, Any]:
        nonlocal state
        state, result = step(state)
        return state, result

    return call


def run_module(module: str, *arguments: str, seconds: float, **environment: str) -> Any:
    """Runs a module in a new process, on CPUs by default; returns the last line of its output, as JSON.

    `environment` has environment variables, in addition to those of this process.

    Raises:
      subprocess.SubprocessError: the process took more than `seconds`, or failed; the message of a failure is
        the last line of its error output.
    """
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if process.returncode:
        raise subprocess.SubprocessError((process.stderr.strip().splitlines() or ["it failed"])[-1])
    return json.loads(process.stdout.splitlines()[-1])


def zeros_and_keys(shapes: Any) -> Any:
    """Zeros or random keys with the shapes and shardings of a pytree, as arguments of a compiled program."""
    import jax
    import jax.numpy as jnp

    def array(shape: Any) -> Any:
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            key = jax.random.key(0)
            return jax.device_put(jax.random.split(key, shape.shape) if shape.shape else key, shape.sharding)
        return jax.device_put(jnp.zeros(shape.shape, shape.dtype), shape.sharding)

    return jax.block_until_ready(jax.tree.map(array, shapes))


def environment(text: str) -> Any:
    """The environment with a name and parameters such as "text:sorting?length=4"."""
    import envs

    name, parameters = envs.parse(text)
    return envs.make(name, **parameters)


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of some values, and their middle half.

    `low` and `high` are the smallest and largest value after a quarter of the values, rounded down, is left
    out at each end.

    >>> print(f"{Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]):.1f}")
    3.0 (2.0 to 4.0)
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        quarter = len(ordered) // 4
        return cls(statistics.median(ordered), ordered[quarter], ordered[-1 - quarter])

    @classmethod
    def ratio(cls, above: Iterable[float], below: Iterable[float]) -> "Spread":
        """The spread of the ratios `above / below`, one ratio for each round."""
        return cls.of(a / b for a, b in zip(above, below, strict=True))

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"

    @property
    def figures(self) -> dict[str, Any]:
        """This spread, of ratios, as entries of a JSON file of results."""
        return {"ratio": self.median, "ratio_middle_half": [self.low, self.high]}


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown.

    >>> print(table(("a", "b"), [(1, "x")]))
    | a | b |
    |---|---|
    | 1 | x |
    """
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def split_at_marks(document: Path, module: str) -> tuple[str, str, str]:
    """A document's text before, between and after the marks of a module.

    Raises:
      SystemExit: the document has no such marks.
    """
    begin, end = f"<!-- measured: written by python -m {module} -->", "<!-- end of measured -->"
    before, has_begin, rest = document.read_text().partition(begin)
    text, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise SystemExit(f"{document} lacks the marks {begin} and {end}: write them where the tables belong")
    return before + begin, text, end + after


def rewrite(document: Path, module: str, text: str) -> None:
    """Replaces the text between a module's marks in a document; the rest stays as it is."""
    before, _, after = split_at_marks(document, module)
    document.write_text(f"{before}\n\n{text}\n\n{after}")


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser of a module's command line, whose help shows the module's docstring unchanged."""
    verbatim = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m {module}", description=doc, formatter_class=verbatim)


def interpreter(name: str) -> str:
    """The absolute path of a Python interpreter, for `type=` of an argument.

    Raises:
      argparse.ArgumentTypeError: there is no such program.
    """
    if path := shutil.which(name):
        return os.path.abspath(path)
    raise argparse.ArgumentTypeError(f"there is no program {name}: create its environment first")
