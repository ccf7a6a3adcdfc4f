"""Chooses the preset of a command line: the environment's, a named one, or none.

`algos` is imported inside functions: importing it may start JAX, too early for the first parsing step.
"""

import textwrap
from collections.abc import Mapping
from typing import Any

from fdg.commands.flags import Flag, fields_of
from fdg.errors import FdgError
from fdg.kinds import shown

_FAR_FEWER = 3  # times fewer steps than a preset was chosen for


def starting_preset(
    cls: type,
    asked: str | None,
    env_name: str,
    env: Any,
    given: Mapping[str, Any],
) -> Any:
    """The preset that an algorithm starts from in an environment; None for its defaults.

    `env_name` is without parameters; `given` are hyperparameters of the command line or of its starting run,
    some of which select the preset.
    """
    from algos import presets
    from fdg.settings.presets import HasPresets, own_preset

    if asked == "none" or env is None:
        return None
    based_on = _based_on(cls)
    if based_on is not None:
        assert issubclass(cls, HasPresets)
        name = asked or cls.preset_name(given)
        found = presets.find(based_on, env_name, env) if name is None else presets.named(based_on, name)
        return None if found is None else found.without(cls.gives_way(given))
    if asked is not None:
        raise FdgError(
            f"--preset {asked}: {cls.__name__} has no named presets: omit it, or write --preset none"
        )
    values = own_preset(cls, env_name)
    return presets.Preset(env_name, f"{cls.__name__}.preset", values) if values else None


def defaults(cls: type) -> Any:
    """The preset of `--preset none`: the class's default of each hyperparameter."""
    from algos.presets import Preset

    return Preset("none", f"the class {cls.__name__}", {flag.name: flag.default for flag in fields_of(cls)})


def preset_names(cls: type) -> tuple[str, ...]:
    """The names of all presets of an algorithm's class."""
    from algos import presets

    based_on = _based_on(cls)
    return () if based_on is None else presets.names(based_on)


def check_allowed(asked: Mapping[str, Any], resumes: bool, keeps: bool) -> None:
    """Refuses `--preset` together with settings of a run or of a file."""
    name = asked.get("preset")
    if name is not None and (resumes or keeps):
        other = "--resume continues with" if resumes else "--config and --from start from"
        raise FdgError(f"--preset {name}: {other} the settings of a run: omit --preset")


def line(
    name: str | None,
    values: Mapping[str, Any],
    algo: str,
    env_name: str | None,
    follows: Mapping[str, Any] | None = None,
    steps: int | None = None,
) -> str:
    """One line about a run's preset.

    `follows` are settings that were adjusted to the flags, and `steps` the run's own `total_steps`: settings
    that were chosen for far more may be too slow for it, and the line says so.

    >>> line("minatar", {"num_envs": 64, "num_steps": 128}, "ppo", "Snake-v1")
    'preset: minatar, 2 settings of ppo for Snake-v1 (--show-preset lists them; --preset none omits them)'
    """
    adjusted = "".join(
        f"; {field}={shown(value)} follows from the flags" for field, value in (follows or {}).items()
    )
    if name is None:
        return f"preset: none for {env_name}, the defaults of {algo}{adjusted}"
    chosen = values.get("total_steps")
    budget = ""
    if steps is not None and isinstance(chosen, int) and steps * _FAR_FEWER <= chosen:
        budget = f"; it was chosen for {chosen:,} steps: in {steps:,} --preset none may learn faster"
    return (
        f"preset: {name}, {len(values)} settings of {algo} for {env_name}"
        f" (--show-preset lists them; --preset none omits them){adjusted}{budget}"
    )


def preset_table(preset: Any, algo: str, env_name: str, flags: list[Flag], known: tuple[str, ...]) -> str:
    """The output of `--show-preset`: each setting, and its default without the preset.

    Without a preset, the families among the `known` names are listed.
    """
    if preset is None:
        first = f"no preset of {algo} for {env_name}: the algorithm's defaults"
        families = ", ".join(name for name in known if name.islower() and not set(name) & set(":*"))
        others = f"--preset FAMILY takes that of another family: {families}"
        wrapped = textwrap.wrap(others, 80, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join([first, *(wrapped if families else [])])
    defaults = {flag.name: flag.default for flag in flags}
    width = max((len(name) for name in preset.values), default=0)
    lines = [
        f"  {name:{width}}  {shown(value)}  (default: {shown(defaults.get(name))})"
        for name, value in preset.values.items()
    ]
    return "\n".join([f"preset {preset.name} of {algo} for {env_name}", f"from {preset.source}", *lines])


def _based_on(cls: type) -> str | None:
    """The built-in algorithm whose presets a class uses; None if a user overrides its method `preset`."""
    from fdg.settings.presets import HasPresets

    if not issubclass(cls, HasPresets):
        return None
    written = next(vars(kind)["preset"] for kind in cls.__mro__ if "preset" in vars(kind))
    return cls.presets_of if written is vars(HasPresets)["preset"] else None
