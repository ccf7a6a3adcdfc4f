"""Presets: tuned settings for an environment, which replace an algorithm's defaults."""

import dataclasses
import inspect
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fdg.arguments import check_call, checked, explain_frozen, quoted
from fdg.errors import OURS, Elsewhere, FdgError, place_of, unknown_name, user_errors
from fdg.keys import takes_typed_key
from fdg.kinds import dataclass_fields
from fdg.settings.overridden_methods import check_overridden_methods
from fdg.settings.parts import flattened

# A type checker cannot see the fields that parts add.
if TYPE_CHECKING:
    _AnyFields: Any
else:
    _AnyFields = object


class HasPresets(_AnyFields):
    """Base class of algorithms with presets."""

    default_env: ClassVar[str] = "CartPole-v1"  # if the command line has no --env
    presets_of: ClassVar[str] = ""  # the algorithm whose presets the class uses; "" if there are none
    preset_table: ClassVar[Any]  # the presets: `of`, `named` and `fitting_sizes` of `algos.presets`
    train = Elsewhere("fdg.fit(algorithm, total_steps=N), which returns a run")
    fit = Elsewhere("fdg.fit(algorithm, total_steps=N), which returns a run")
    predict = Elsewhere("run.policy(observation), with run = fdg.fit(algorithm, total_steps=N)")
    save = Elsewhere("fdg.fit(algorithm, total_steps=N, out=RUN), which saves the run there")
    load = Elsewhere("fdg.load(RUN)")
    export: ClassVar[Any] = Elsewhere("run.export(path), with run = fdg.fit(algorithm, total_steps=N)")

    def __init_subclass__(cls, presets: str | None = None, driver: Any = None, **options: Any) -> None:
        """Replaces parts by their fields, and sets `presets_of` to `presets`.

        Also adds the members in `driver.MEMBERS` that the class itself does not define; `driver` is a module.
        """
        for name, value in getattr(driver, "MEMBERS", {}).items():
            if name not in vars(cls):
                setattr(cls, name, value)
        if presets is not None:
            cls.presets_of = presets
        super().__init_subclass__(**options)
        flattened(cls)
        if cls.__module__.partition(".")[0] not in OURS:
            check_overridden_methods(cls)
        if inspect.isfunction(vars(cls).get("init")):
            cls.init = takes_typed_key(vars(cls)["init"])

    def __new__(cls, *args: Any, **given: Any) -> Any:
        """Raises an error for unknown field names (with the most similar one) and missing fields."""
        missing = not args and "env" not in given
        check_call(cls, args, {"env": None, **given} if missing else given, "hyperparameter")
        if missing:
            raise FdgError(f"{cls.__name__}: env is missing: give env=envs.make({cls.default_env!r})")
        explain_frozen(cls, "algorithm")
        return super().__new__(cls)

    def __reduce__(self) -> Any:
        """Copies and pickles bypass `__new__`."""
        return object.__new__, (type(self),), vars(self)

    @classmethod
    @checked
    def preset(cls, env_name: str, env: Any = None) -> dict[str, Any]:
        """Tuned field values for an environment; empty if the defaults are right.

        A user's subclass gets the presets of its base algorithm. If the environment's name has no preset, its
        spaces select one.
        """
        return cls.preset_table.of(cls.presets_of, env_name, env)

    @classmethod
    def settings(cls, env_name: str, env: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """The field values `given`, and the preset's values of the other fields."""
        name, algorithm = cls.preset_name(given), cls.presets_of
        preset_values = (
            cls.preset(env_name, env)
            if name is None
            else dict(cls.preset_table.named(algorithm, name).values)
        )
        applicable = {
            field: value for field, value in preset_values.items() if field not in cls.superseded(given)
        }
        return cls.adjust_unnamed({**applicable, **given}, given)

    @classmethod
    def preset_name(cls, given: Mapping[str, Any]) -> str | None:
        """The name of the preset that the hyperparameters `given` select; None: the environment's preset."""
        return None

    @classmethod
    def superseded(cls, given: Mapping[str, Any]) -> frozenset[str]:
        """The fields of a preset that do not apply because of the values `given`."""
        return frozenset()

    @classmethod
    def adjust_unnamed(cls, values: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
        """Adjusts the fields that the user did not name to the fields that the user named."""
        dataclass: Any = cls
        defaults = {field.name: field.default for field in dataclasses.fields(dataclass)}
        return {**values, **cls._sizes({**defaults, **values}, named)}

    @classmethod
    def _sizes(cls, values: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
        """Changes of unnamed fields that make samples divisible into equal minibatches."""
        return cls.preset_table.fitting_sizes(values, named)

    @property
    def num_iterations(self) -> int:
        """The number of iterations that fit in `total_steps`, at least one."""
        return max(1, self.total_steps // self.steps_per_iteration)

    def changed(self, **values: Any) -> Any:
        """A copy with changed fields."""
        algorithm: Any = self
        return dataclasses.replace(algorithm, **values)


def own_preset(cls: type, env_name: str) -> dict[str, Any]:
    """The result of a user's method `preset` for an environment; empty if there is no such method."""
    method: Any = getattr(cls, "preset", None)
    if method is None:
        return {}
    call = f"{cls.__name__}.preset({env_name!r})"
    method_definition = next(vars(base)["preset"] for base in cls.__mro__ if "preset" in vars(base))
    if not isinstance(method_definition, classmethod | staticmethod):
        raise FdgError(f"{cls.__name__}.preset{place_of(method_definition)}: write @classmethod above it")
    with user_errors(call, method_definition.__func__):
        values = method(env_name)
    place = place_of(method_definition.__func__)
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise FdgError(f"{call} returned {quoted(values)}{place}: return a dict of fields and their values")
    field_names = [field.name for field in dataclass_fields(cls) if field.init and field.name != "env"]
    for name in values:
        if name not in field_names:
            raise FdgError(f"{call}{place}: {unknown_name('field', name, field_names)}")
    return dict(values)
