"""Tuned settings by algorithm and by family of environments; other settings keep their defaults.

`envs/families.py` maps environments to families. Each file of this folder has the presets of a few families.
A key of its table is a family, the name of an environment, or a shell pattern of such names. If several keys
match, the most specific key is used: a name before a pattern, a pattern before a family. Every entry names
its source.
"""

import dataclasses
import fnmatch
from collections.abc import Collection, Mapping
from typing import Any

from algos.normalize import has_statistics
from algos.presets import control, designs, language, physics, pixels, teams, worlds
from algos.presets.entry import Entry
from algos.presets.sizes import fitting_sizes
from envs.families import family, family_by_spaces
from envs.text import is_text
from fdg.errors import unknown_name

__all__ = ["Entry", "Preset", "find", "fitting_sizes", "named", "names", "of"]

_FILES = (control, designs, language, physics, pixels, teams, worlds)


@dataclasses.dataclass(frozen=True)
class Preset:
    """The settings of an algorithm for an environment."""

    name: str  # the family, environment or pattern that the settings are for
    source: str  # where the settings come from
    values: Mapping[str, Any]  # by field of the algorithm

    def without(self, fields: Collection[str]) -> "Preset":
        """A copy without some fields."""
        values = {field: value for field, value in self.values.items() if field not in fields}
        return dataclasses.replace(self, values=values)


def of(algorithm: str, env_name: str, env: Any = None) -> dict[str, Any]:
    """The fields that a preset changes for an environment, by the algorithm's class name; may be empty.

    The arguments are those of `find`.

    >>> of("PPO", "Pendulum-v1")["discount"], of("PPO", "Asterix-MinAtar")["num_envs"]
    (0.95, 64)
    >>> of("PPO", "gymnasium:Pendulum-v1") == of("PPO", "Pendulum-v1")
    True
    """
    preset = find(algorithm, env_name, env)
    return dict(preset.values) if preset else {}


def find(algorithm: str, env_name: str, env: Any = None) -> Preset | None:
    """The preset of an algorithm for an environment; None if there is none, or if it changes nothing.

    Args:
      algorithm: its class name.
      env_name: as for `envs.make`.
      env: the environment, which may define its `family`; its spaces are used if the algorithm has no preset
        for its name. Normalisation of observations is dropped from the preset if all observations are codes,
        categories or images, which have no statistics.
    """
    table = _entries(algorithm)
    env_name = env_name.removeprefix("ray:")  # the prefix only says where the environment runs
    if is_text(env):  # whichever module made it
        env_name = f"text:{env.name.removeprefix('text:')}"
    families = [getattr(env, "family", None) or family(env_name)]
    if hasattr(env, "observation_space") and families != ["probe"]:
        families.append(family_by_spaces(env.observation_space, env.action_space))
    patterns = [key for key in table if key != env_name and fnmatch.fnmatchcase(env_name, key)]
    key = next((key for key in (env_name, *patterns, *families) if key in table), None)
    preset = None if key is None else _without_unfit_fields(_preset(key, table[key]), env)
    return preset if preset and preset.values else None


def named(algorithm: str, name: str) -> Preset:
    """The preset with this name: a family, an environment, or a pattern.

    Raises:
      UnknownNameError: the algorithm has no such preset; the message suggests the nearest name.
    """
    preset = find(algorithm, name)
    table = _entries(algorithm)
    if preset is None and name in table:
        preset = _preset(name, table[name])
    if preset is None:
        raise unknown_name(f"preset of {algorithm}", name, ("none", *names(algorithm)))
    return preset


def names(algorithm: str) -> tuple[str, ...]:
    """The algorithm's preset keys: families, environments and patterns.

    >>> "minatar" in names("PPO"), names("no-such-algorithm")
    (True, ())
    """
    return tuple(_entries(algorithm))


def _entries(algorithm: str) -> dict[str, Entry]:
    """The algorithm's entries in all files, by key."""
    return {key: entry for file in _FILES for key, entry in file.PRESETS.get(algorithm, {}).items()}


def _preset(name: str, entry: Entry) -> Preset:
    return Preset(name, entry.source, entry.for_backend())


def _without_unfit_fields(preset: Preset, env: Any) -> Preset:
    """The preset without `normalize_observation`, if no part of the observations can be normalised."""
    space = getattr(env, "observation_space", None)
    can_normalize = space is None or has_statistics(space)
    return preset if can_normalize else preset.without(("normalize_observation",))
