"""Which settings a command line begins with: those for its environment, those it names, or none.

Algorithms are imported when they are asked for: their import may start JAX, for which it is too early when
flags are read for the first time.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from fdg.commands.flags import Flag, fields_of
from fdg.errors import FdgError
from fdg.kinds import shown

if TYPE_CHECKING:
    from algos.presets import Preset


def chosen(
    cls: type,
    asked: str | None,
    env_name: str,
    env: Any,
    given: Mapping[str, Any],
) -> Preset | None:
    """The preset that an algorithm begins with on an environment; None for its defaults.

    Args:
      cls: the algorithm's class.
      asked: what `--preset` says.
      env_name: the environment, without its parameters.
      env: the environment itself; None where the algorithm has its own.
      given: hyperparameters of the command line, or of the run that it begins with, some of which decide.

    Raises:
      UnknownNameError: there is no preset of the name that was asked for.
    """
    from algos import presets
    from algos.presets.preferring import HasPresets

    if asked == "none" or env is None:
        return None
    based_on = _based_on(cls)
    if based_on is not None:
        assert issubclass(cls, HasPresets)
        name = asked or cls.preset_name(given)
        found = presets.find(based_on, env_name, env) if name is None else presets.named(based_on, name)
        return None if found is None else found.without(cls.gives_way(given))
    if asked is not None:
        raise FdgError(f"--preset {asked}: {cls.__name__} has no presets by name: leave it out, or say none")
    values = cls.preset(env_name) if hasattr(cls, "preset") else {}
    return presets.Preset(env_name, f"{cls.__name__}.preset", values) if values else None


def defaults(cls: type) -> Preset:
    """What `--preset none` begins with: each hyperparameter as the class has it."""
    from algos.presets import Preset

    return Preset("none", f"the class {cls.__name__}", {flag.name: flag.default for flag in fields_of(cls)})


def settled(cls: type, values: Mapping[str, Any], named: Collection[str]) -> Mapping[str, Any]:
    """An algorithm's fields, of which those that were not named follow those that were."""
    from algos.presets.preferring import HasPresets

    return cls.settled(values, named) if issubclass(cls, HasPresets) else values


def known(cls: type) -> tuple[str, ...]:
    """What an algorithm's class has presets for."""
    from algos import presets

    based_on = _based_on(cls)
    return () if based_on is None else presets.names(based_on)


def check_allowed(asked: Mapping[str, Any], resumes: bool, keeps: bool) -> None:
    """Refuses a preset where the settings are those of a run, or of a file.

    Raises:
      FdgError: says which.
    """
    name = asked.get("preset")
    if name is not None and (resumes or keeps):
        other = "--resume goes on with" if resumes else "--config and --from begin with"
        raise FdgError(f"--preset {name}: {other} the settings of a run: leave it out")


def line(
    name: str | None,
    values: Mapping[str, Any],
    algo: str,
    env_name: str | None,
    follows: Mapping[str, Any] | None = None,
) -> str:
    """What a run says of its preset, in a line; `follows` are settings that go with what was named.

    >>> line("minatar", {"num_envs": 64, "num_steps": 128}, "ppo", "Asterix-MinAtar")
    'preset: minatar, 2 settings of ppo for Asterix-MinAtar (--show-preset: which; --preset none: without)'
    """
    said = "".join(
        f"; {field}={shown(value)} goes with the flags" for field, value in (follows or {}).items()
    )
    if name is None:
        return f"preset: none for {env_name}, the defaults of {algo}{said}"
    return (
        f"preset: {name}, {len(values)} settings of {algo} for {env_name}"
        f" (--show-preset: which; --preset none: without){said}"
    )


def table(preset: Preset | None, algo: str, env_name: str, flags: list[Flag], known: tuple[str, ...]) -> str:
    """What `--show-preset` prints: each setting, and what it would be without the preset.

    Args:
      preset: the one in use, or None.
      algo: the algorithm, as the command line names it.
      env_name: likewise.
      flags: of the algorithm's hyperparameters, with the class's defaults.
      known: names of all presets of the algorithm; without a preset, the families among them are listed.
    """
    if preset is None:
        first = f"no preset of {algo} for {env_name}: the algorithm's defaults"
        families = ", ".join(name for name in known if name.islower() and not set(name) & set(":*"))
        others = f"--preset FAMILY takes that of another family: {families}"
        return "\n".join(
            [first, *textwrap.wrap(others, 80, subsequent_indent="  ", break_on_hyphens=False)]
            if families
            else [first]
        )
    defaults = {flag.name: flag.default for flag in flags}
    width = max((len(name) for name in preset.values), default=0)
    lines = [
        f"  {name:{width}}  {shown(value)}  (default: {shown(defaults.get(name))})"
        for name, value in preset.values.items()
    ]
    return "\n".join([f"preset {preset.name} of {algo} for {env_name}", f"from {preset.source}", *lines])


def _based_on(cls: type) -> str | None:
    """The algorithm of ours whose presets a class has; None for one whose `preset` somebody else wrote."""
    from algos.presets.preferring import HasPresets

    if not issubclass(cls, HasPresets):
        return None
    written = next(vars(kind)["preset"] for kind in cls.__mro__ if "preset" in vars(kind))
    return cls.presets_of if written is vars(HasPresets)["preset"] else None
