"""`--sweep`, `--search` and `--member`: from their words to values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fdg.aliases import ours
from fdg.commands.flags import Flag
from fdg.errors import FdgError, unknown_name
from fdg.kinds import is_tuple, reader


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


def spelled_search(text: str, flags: Sequence[Flag], given: Mapping[str, Any]) -> str:
    """What was given to `--search`, as `config.json` has it.

    Raises:
      FdgError: it is no space of these hyperparameters, or one has a flag too.
    """
    from fdg.training.space import space_text

    space = space_of(text, flags)
    for one in space:
        if one.name in given:
            raise FdgError(f"--search {one.name} and its own flag: leave one of them out")
    return space_text(space)


def space_of(text: str, flags: Sequence[Flag]) -> Any:
    """The space that `--search` names, its values read as the flags of an algorithm read theirs.

    Raises:
      FdgError: it is none.
    """
    from fdg.training.space import parse_space

    kinds = {flag.name: flag.kind for flag in flags}

    def read(name: str) -> tuple[Callable[[str], Any], bool, bool]:
        if name not in kinds:
            raise unknown_name("hyperparameter to search", name, kinds)
        kind = kinds[name]
        return reader(kind), is_tuple(kind), kind in (int, int | None)

    words = [word.partition("=") for word in text.split()]
    return parse_space(" ".join(_full_name(name) + equals + v for name, equals, v in words), read)


def check_searched(algorithm: Any, run: Mapping[str, Any], flags: Sequence[Flag], said: Any) -> None:
    """Refuses a search that cannot be.

    Args:
      algorithm: whose hyperparameters are searched.
      run: `optuna`, the number of trials, and `search`, the space.
      flags: of its hyperparameters.
      said: who says so, a `Said`.

    Raises:
      FdgError: trials without values to choose from, or the other way round; of what cannot be searched; of
        networks that only a file names.
    """
    trials, text = run["optuna"], run["search"]
    if (trials is None) != (text is None):
        lacks = (
            "--search: say how many trials, by --optuna"
            if trials is None
            else "--optuna: say what from, by --search"
        )
        raise FdgError(f"{lacks}, such as --optuna 20 --search hidden=64,64/128,128 num_steps=64,128")
    if text is not None:
        from fdg.training.search import check_search, require_optuna

        space = space_of(text, flags)
        said.check_searched(algorithm, text, space)
        check_search(algorithm, space)
        require_optuna()


def search_of(job: Any) -> Any:
    """The space of a job that is a search.

    Raises:
      FdgError: its configuration is damaged.
    """
    from fdg.commands.flags import fields_of
    from fdg.training.sweep import Sweep

    own = job.algorithm.algorithm if isinstance(job.algorithm, Sweep) else job.algorithm
    return space_of(job.search, fields_of(type(own)))


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
    return ours(name) or name.replace("-", "_")
