"""Parses the values of `--sweep`, `--search` and `--member`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fdg.aliases import ours
from fdg.commands.flags import Flag
from fdg.errors import FdgError, unknown_name
from fdg.kinds import is_tuple, reader
from fdg.training.space import grid_text, parse_grid, parse_space, space_text


def normalised_sweep(text: str, flags: Mapping[str, Any]) -> str:
    """Rewrites the value of `--sweep` for `config.json`: with full names, and ranges expanded to values."""
    grid = parse_grid(_with_full_names(text))
    for name, _ in grid:
        if name in flags:
            option = name.replace("_", "-")
            raise FdgError(f"--sweep {name} and --{option} {flags[name]}: leave out one of them")
    return grid_text(grid)


def normalised_search(text: str, flags: Sequence[Flag], values: Mapping[str, Any]) -> str:
    """Rewrites the value of `--search` for `config.json`: with full names."""
    space = space_of(text, flags)
    for dimension in space:
        if dimension.name in values:
            raise FdgError(f"--search {dimension.name} and the flag of this name: leave out one of them")
    return space_text(space)


def space_of(text: str, flags: Sequence[Flag]) -> Any:
    """Parses the value of `--search`, with each value parsed like the hyperparameter's flag."""
    kinds = {flag.name: flag.kind for flag in flags}

    def reader_of(name: str) -> tuple[Callable[[str], Any], bool, bool]:
        """The argument `read` of `parse_space`."""
        if name not in kinds:
            raise unknown_name("hyperparameter to search", name, kinds)
        kind = kinds[name]
        return reader(kind), is_tuple(kind), kind in (int, int | None)

    return parse_space(_with_full_names(text), reader_of)


def check_searched(algorithm: Any, run: Mapping[str, Any], flags: Sequence[Flag], resolver: Any) -> None:
    """Checks the flags `--optuna` and `--search`; `run` has their values, `flags` the algorithm's flags."""
    trials, text = run["optuna"], run["search"]
    if (trials is None) != (text is None):
        problem = "--optuna needs --search"
        if trials is None:
            problem = "--search needs a number of trials, --optuna"
        raise FdgError(f"{problem}, such as --optuna 20 --search hidden=64,64/128,128 num_steps=64,128")
    if text is not None:
        from fdg.training.search import check_search, require_optuna

        space = space_of(text, flags)
        resolver.check_searched(algorithm, text, space)
        check_search(algorithm, space)
        require_optuna()


def member_of(run: Any, text: str) -> Any:
    """The run of some agents of a sweep, by the value of `--member`: `best`, or `NAME=VALUE,...,seed=N`."""
    if text == "best":
        return run.best
    if "=" not in text:
        raise FdgError(f"--member {text}: give best, or settings, such as learning_rate=1e-3,seed=2")

    values_by_name = {}
    for name, values in parse_grid(text.replace(",", " ")):
        if len(values) != 1:
            raise FdgError(f"--member {text}: give one value of {name}")
        values_by_name[_full_name(name)] = values[0]
    seed = values_by_name.pop("seed", None)
    if seed is not None and not seed.is_integer():
        raise FdgError(f"--member {text}: a seed is a whole number")
    return run.member(seed=None if seed is None else int(seed), **values_by_name)


def _with_full_names(text: str) -> str:
    words = (word.partition("=") for word in text.split())
    return " ".join(_full_name(name) + equals + values for name, equals, values in words)


def _full_name(name: str) -> str:
    return ours(name) or name.replace("-", "_")
