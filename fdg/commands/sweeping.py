"""`--sweep`: from its words to an algorithm."""

from collections.abc import Mapping
from typing import Any

from fdg.commands.aliases import ALIASES
from fdg.errors import FdgError


def spelled_sweep(text: str, given: Mapping[str, Any]) -> str:
    """What was given to `--sweep`, as `config.json` has it: full names, ranges as their values.

    Args:
      text: its words, a space between them.
      given: all flags that were given.

    Raises:
      FdgError: it is no sweep, or one of its hyperparameters has a flag too.
    """
    from fdg.training.grid import grid_text, parse_grid

    words = [word.partition("=") for word in text.split()]
    grid = parse_grid(" ".join(_full_name(name) + equals + values for name, equals, values in words))
    for name, _ in grid:
        if name in given:
            option = name.replace("_", "-")
            raise FdgError(f"--sweep {name} and --{option} {given[name]}: leave one of them out")
    return grid_text(grid)


def with_sweep(algorithm: Any, run: Mapping[str, Any]) -> Any:
    """The algorithm, as a sweep if the run is one.

    Raises:
      FdgError: it has no such hyperparameters, or refuses their values.
    """
    from fdg.training.sweep import swept

    return swept(algorithm, run)


def member_of(run: Any, text: str) -> Any:
    """The agents of a sweep that `--member` names: `best`, or `NAME=VALUE,NAME=VALUE,seed=N`.

    Raises:
      FdgError: there are none, or the run is no sweep.
    """
    if text == "best":
        return run.best
    from fdg.training.grid import parse_grid

    values = {name: value for name, (value,) in _single(parse_grid(text.replace(",", " ")), text)}
    named = {_full_name(name): value for name, value in values.items()}
    seed = named.pop("seed", None)
    if seed is not None and not seed.is_integer():
        raise FdgError(f"--member {text}: a seed is a whole number")
    return run.member(seed=None if seed is None else int(seed), **named)


def _single(grid: Any, text: str) -> Any:
    for name, values in grid:
        if len(values) != 1:
            raise FdgError(f"--member {text}: give one value of {name}")
    return grid


def _full_name(name: str) -> str:
    plain = name.replace("-", "_")
    full = {alias.replace("-", "_"): known for known, aliases in ALIASES.items() for alias in aliases}
    return full.get(plain, plain)
