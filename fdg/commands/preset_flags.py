"""Chooses the preset of a command line: the environment's, a named one, or none.

`algos` is imported inside functions: importing it may start JAX, too early for the first parsing step.
"""

import textwrap
from collections.abc import Mapping
from typing import Any

from fdg.commands.flags import flags_of
from fdg.errors import FdgError
from fdg.kinds import shown

_FAR_FEWER_STEPS = 3  # warn if a preset was chosen for this many times the steps of the run


def starting_preset(
    cls: type,
    preset_name: str | None,
    env_name: str,
    env: Any,
    hyperparameters: Mapping[str, Any],
) -> Any:
    """The preset that an algorithm starts from in an environment; None means the defaults.

    `env_name` has no parameters. `hyperparameters` come from the command line or the starting run; some
    of them select the preset.
    """
    from algos import presets
    from fdg.settings.presets import HasPresets, own_preset

    if preset_name == "none" or env is None:
        return None
    owner = _presets_of(cls)
    if owner is not None:
        assert issubclass(cls, HasPresets)
        name = preset_name or cls.preset_name(hyperparameters)
        preset = presets.find(owner, env_name, env) if name is None else presets.named(owner, name)
        return None if preset is None else preset.without(cls.superseded(hyperparameters))
    if preset_name is not None:
        raise FdgError(
            f"--preset {preset_name}: {cls.__name__} has no named presets: leave it out, or use --preset none"
        )
    values = own_preset(cls, env_name)
    return presets.Preset(env_name, f"{cls.__name__}.preset", values) if values else None


def check_allowed(flags: Mapping[str, Any], resumes: bool, keeps_settings: bool) -> None:
    """Raises an error for `--preset` if the settings come from a run or a file.

    `keeps_settings`: whether the run or file is of the same algorithm, so that its settings are kept.
    """
    name = flags.get("preset")
    if name is not None and (resumes or keeps_settings):
        option = "--resume continues with" if resumes else "--config and --from start from"
        raise FdgError(f"--preset {name}: {option} the settings of a run: leave out --preset")


def preset_line(
    name: str | None,
    values: Mapping[str, Any],
    algo: str,
    env_name: str | None,
    follows: Mapping[str, Any] | None = None,
    steps: int | None = None,
) -> str:
    """One line about a run's preset.

    `follows` are settings that were adjusted to the flags. `steps` is the run's `total_steps`: a preset for
    far more steps may learn too slowly, so the line then has a warning.

    >>> preset_line("minatar", {"num_envs": 64, "num_steps": 128}, "ppo", "Snake-v1")
    'preset: minatar, 2 settings of ppo for Snake-v1 (--show-preset lists them; --preset none omits them)'
    """
    adjusted = "".join(
        f"; {field}={shown(value)} follows from the flags" for field, value in (follows or {}).items()
    )
    if name is None:
        return f"preset: none for {env_name}, the defaults of {algo}{adjusted}"
    preset_steps = values.get("total_steps")
    warning = ""
    if steps is not None and isinstance(preset_steps, int) and steps * _FAR_FEWER_STEPS <= preset_steps:
        warning = f"; it was chosen for {preset_steps:,} steps: in {steps:,} --preset none may learn faster"
    return (
        f"preset: {name}, {len(values)} settings of {algo} for {env_name}"
        f" (--show-preset lists them; --preset none omits them){adjusted}{warning}"
    )


def preset_table(preset_name: str | None, preset: Any, cls: type, algo: str, env_name: str) -> str:
    """The output of `--show-preset`: each setting of the preset, and the default of the algorithm `cls`.

    `preset_name` is the value of `--preset`; "none" shows the defaults. Without a preset, lists the families
    of presets.
    """
    from algos import presets

    defaults = {flag.name: flag.default for flag in flags_of(cls)}
    if preset_name == "none":
        preset = presets.Preset("none", f"the class {cls.__name__}", defaults)
    if preset is None:
        title = f"no preset of {algo} for {env_name}: the algorithm's defaults"
        owner = _presets_of(cls)
        names = () if owner is None else presets.names(owner)  # of families, environments and patterns
        families = ", ".join(name for name in names if name.islower() and not set(name) & set(":*"))
        hint = f"--preset FAMILY uses the preset of another family: {families}"
        hint_lines = textwrap.wrap(hint, 80, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join([title, *(hint_lines if families else [])])
    width = max((len(name) for name in preset.values), default=0)
    lines = [
        f"  {name:{width}}  {shown(value)}  (default: {shown(defaults.get(name))})"
        for name, value in preset.values.items()
    ]
    return "\n".join([f"preset {preset.name} of {algo} for {env_name}", f"from {preset.source}", *lines])


def _presets_of(cls: type) -> str | None:
    """The built-in algorithm whose presets a class uses; None if a subclass overrides the method `preset`."""
    from fdg.settings.presets import HasPresets

    if not issubclass(cls, HasPresets):
        return None
    method = next(vars(kind)["preset"] for kind in cls.__mro__ if "preset" in vars(kind))
    return cls.presets_of if method is vars(HasPresets)["preset"] else None
