"""Reads a study file: algorithms x environments x variants x budgets, each cell of several seeds.

algorithms = ["ppo", "a2c"]      # or "all": in each environment those that can act in it
environments = ["CartPole-v1", "Acrobot-v1"]
total_steps = 100_000            # or {short = 100_000, long = 1_000_000}: a comparison for each
seeds = 10
first_seed = 0
random_episodes = 128            # of random actions, for the level that agents have to leave; 0: none

[settings]                       # flags of `fdg train` that all cells have
eval_episodes = 32

[variants.default]               # further flags: each variant is a side of its own
[variants.wide]
hidden = [128, 128]
"""

import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fdg.errors import FdgError, unknown_name
from fdg.reading import read_text

_KNOWN = (
    *("algorithms", "environments", "total_steps", "seeds", "first_seed", "random_episodes"),
    *("settings", "variants"),
)
_OURS = {  # flags that a study gives, and where it says them
    "algo": "algorithms",
    "env": "environments",
    "total_steps": "total_steps",
    "seed": "first_seed",
    "num_seeds": "seeds",
    "out": "--out of fdg study",
    "resume": "--out of fdg study",
    **dict.fromkeys(("sweep", "optuna", "search", "config", "from"), "fdg train, before a study"),
}
_MOST_CELLS = 100_000


@dataclasses.dataclass(frozen=True)
class StudyCell:
    """One algorithm with its settings in one environment, for one budget; of several seeds.

    Attributes:
      algo, env: as the command line names them.
      side: what the comparison calls it.
      budget: the name of its budget; empty where there is one.
      total_steps: steps of each seed.
      words: further flags of `fdg train`.
    """

    algo: str
    env: str
    side: str
    budget: str
    total_steps: int
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """That of its run directory."""
        parts = (self.budget, self.env, self.side)
        return "-".join(re.sub(r"[^\w.]+", "_", part).strip("_") for part in parts if part)

    def command(self, seeds: range) -> list[str]:
        """The flags of `fdg train` for these seeds, without where they are written."""
        words = ["--algo", self.algo, "--env", self.env, "--total-steps", str(self.total_steps)]
        return [*words, "--seed", str(seeds[0]), "--num-seeds", str(len(seeds)), *self.words]


@dataclasses.dataclass(frozen=True)
class Study:
    """What a study file says.

    Attributes:
      cells: all of them.
      seeds: those of each cell.
      random_episodes: of random actions in each environment; 0 for none.
    """

    cells: Sequence[StudyCell]
    seeds: range
    random_episodes: int


def read_study(path: Path) -> Study:
    """The study that a TOML file describes.

    Raises:
      FdgError: there is no such file, it is no TOML, or something in it is wrong: names it and the fix.
    """
    text = read_text(path)
    try:
        return study_of(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FdgError(
            f"{path} is no TOML: {error}: docs/how-to/compare.md has a file to start from"
        ) from None
    except FdgError as error:
        raise FdgError(f"{path}: {error}") from None


def study_of(content: Mapping[str, Any]) -> Study:
    """The study that the content of such a file describes.

    Raises:
      FdgError: something in it is wrong.
    """
    for name in content:
        if name not in _KNOWN:
            raise unknown_name("setting of a study", name, _KNOWN)
    environments = _names(content, "environments", "CartPole-v1")
    everyone = content.get("algorithms") == "all"
    algorithms = None if everyone else _names(content, "algorithms", "ppo")
    budgets = _budgets(content)
    seeds = _whole("seeds", content.get("seeds", 1), 1)
    first = _whole("first_seed", content.get("first_seed", 0), 0)
    shared = _words("settings", content.get("settings", {}))
    variants = content.get("variants", {"": {}})
    if not isinstance(variants, dict) or not variants:
        raise FdgError("variants must be tables, such as [variants.wide] with hidden = [128, 128]")
    words = {name: (*shared, *_words(f"variants.{name}", each)) for name, each in variants.items()}
    cells = [
        StudyCell(algo, env, algo + (f" {name}" if name and len(words) > 1 else ""), budget, steps, flags)
        for budget, steps in budgets.items()
        for env in environments
        for algo in (_able(env) if algorithms is None else algorithms)
        for name, flags in words.items()
    ]
    if len(cells) > _MOST_CELLS:
        raise FdgError(f"{len(cells):,} cells are more than {_MOST_CELLS:,}: give fewer names")
    names: dict[str, StudyCell] = {}
    for cell in cells:
        if cell.name in names:
            other = names[cell.name]
            raise FdgError(
                f"{cell.side} on {cell.env} and {other.side} on {other.env} would both be in {cell.name}:"
                " name each once"
            )
        names[cell.name] = cell
    episodes = _whole("random_episodes", content.get("random_episodes", 128), 0)
    return Study(cells, range(first, first + seeds), episodes)


def _able(env: str) -> list[str]:
    """The algorithms that can act in an environment."""
    import envs
    from algos import able_in

    name, overrides = envs.parse(env)
    return able_in(envs.make(name, **overrides))


def _names(content: Mapping[str, Any], name: str, example: str) -> list[str]:
    given = content.get(name)
    if not isinstance(given, list) or not given or not all(isinstance(one, str) and one for one in given):
        what = "is missing" if given is None else f"= {given!r:.60}"
        raise FdgError(f'{name} {what}: give a list of names, such as {name} = ["{example}"]')
    twice = next((one for i, one in enumerate(given) if one in given[:i]), None)
    if twice is not None:
        raise FdgError(f"{name} has {twice} twice: name each once")
    return given


def _budgets(content: Mapping[str, Any]) -> dict[str, int]:
    given = content.get("total_steps")
    if given is None:
        raise FdgError("total_steps is missing: give steps of each seed, such as total_steps = 100_000")
    if not isinstance(given, dict):
        return {"": _whole("total_steps", given, 1)}
    if not given:
        raise FdgError("total_steps has no budget: give such as {short = 100_000, long = 1_000_000}")
    for name in given:
        if not re.fullmatch(r"\w+", name):
            raise FdgError(f"total_steps has a budget {name!r}: name it by letters and digits, such as short")
    return {name: _whole(f"total_steps.{name}", steps, 1) for name, steps in given.items()}


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**53:
        raise FdgError(f"{name} = {value!r:.60}: give a whole number, at least {least}")
    return value


def _words(where: str, settings: Any) -> tuple[str, ...]:
    """Settings of a table as flags of `fdg train`."""
    if not isinstance(settings, dict):
        raise FdgError(
            f"{where} = {settings!r:.60}: it must be a table of flags, such as learning_rate = 1e-3"
        )
    words: list[str] = []
    for name, value in settings.items():
        name = name.replace("-", "_")
        if name in _OURS:
            raise FdgError(f"{where} has {name}, which is not of a cell: say it by {_OURS[name]}")
        if isinstance(value, bool):
            value = str(value).lower()
        elif isinstance(value, list) and value and all(isinstance(one, int | float) for one in value):
            value = ",".join(map(str, value))
        elif not isinstance(value, str | int | float):
            raise FdgError(
                f"{where}.{name} = {value!r:.60}: give a number, a text, true or false, or numbers"
            )
        words += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(words)
