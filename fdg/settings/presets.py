"""What a class has that begins with the settings found good for an environment."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fdg.arguments import check_call, explain_frozen, quoted
from fdg.errors import Elsewhere, FdgError, own_code, place_of, unknown_name
from fdg.kinds import dataclass_fields
from fdg.settings.parts import flattened

# A type checker cannot see the fields that parts add.
if TYPE_CHECKING:
    _AnyFields: Any
else:
    _AnyFields = object


class HasPresets(_AnyFields):
    """Base of algorithms, as far as settings go.

    Attributes:
      default_env: the environment of the command line, where it names none.
      presets_of: the algorithm whose presets it takes, also under another name or in another package; "" for
        none.
      preset_table: where they are: `of`, `named` and `followed` of `algos.presets`.
    """

    default_env: ClassVar[str] = "CartPole-v1"
    presets_of: ClassVar[str] = ""
    preset_table: ClassVar[Any]
    train = Elsewhere("fdg.fit(algorithm, total_steps=N), which returns a run")
    fit = Elsewhere("fdg.fit(algorithm, total_steps=N), which returns a run")
    predict = Elsewhere("run.policy(observation), of the run that fdg.fit(algorithm, total_steps=N) returns")
    save = Elsewhere("fdg.fit(algorithm, total_steps=N, out=RUN), which saves the run there")
    load = Elsewhere("fdg.load(RUN)")
    export: ClassVar[Any] = Elsewhere(
        "run.export(path), of the run that fdg.fit(algorithm, total_steps=N) returns"
    )

    def __init_subclass__(cls, **options: Any) -> None:
        """Puts the fields of each part in its place."""
        super().__init_subclass__(**options)
        flattened(cls)

    def __new__(cls, *args: Any, **given: Any) -> Any:
        """Refuses a name that is no field, with the nearest that is, and fields that are missing."""
        missing = not args and "env" not in given
        check_call(cls, args, {"env": None, **given} if missing else given, "hyperparameter")
        if missing:
            raise FdgError(f"{cls.__name__}: env is missing: give env=envs.make({cls.default_env!r})")
        explain_frozen(cls, "algorithm")
        return super().__new__(cls)

    def __reduce__(self) -> Any:
        """Makes copies and pickles without `__new__`, which they give no fields."""
        return object.__new__, (type(self),), vars(self)

    @classmethod
    def preset(cls, env_name: str, env: Any = None) -> dict[str, Any]:
        """Field values found good for an environment; empty where the defaults are.

        Those of a subclass that somebody else wrote are those of the algorithm that it is based on.

        Args:
          env_name: as `envs.make` knows it.
          env: the environment; its spaces decide if its name has no preset.
        """
        return cls.preset_table.of(cls.presets_of, env_name, env)

    @classmethod
    def settings(cls, env_name: str, env: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Field values: the given ones, and those of a preset that do not contradict them."""
        name, own = cls.preset_name(given), cls.presets_of
        found = cls.preset(env_name, env) if name is None else dict(cls.preset_table.named(own, name).values)
        kept = {field: value for field, value in found.items() if field not in cls.gives_way(given)}
        return cls.adjust_unnamed({**kept, **given}, given)

    @classmethod
    def preset_name(cls, given: Mapping[str, Any]) -> str | None:
        """The preset that the given hyperparameters ask for, by its name; None for the environment's."""
        return None

    @classmethod
    def gives_way(cls, given: Mapping[str, Any]) -> frozenset[str]:
        """Fields that are not taken from a preset, because the given values contradict it."""
        return frozenset()

    @classmethod
    def adjust_unnamed(cls, values: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
        """Field values; those that the user did not name are adjusted to those that the user named."""
        made: Any = cls
        defaults = {field.name: field.default for field in dataclasses.fields(made)}
        return {**values, **cls._sizes({**defaults, **values}, named)}

    @classmethod
    def _sizes(cls, values: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
        """Changes to fields that the user did not name, so that sizes divide."""
        return cls.preset_table.followed(values, named)

    @property
    def num_iterations(self) -> int:
        """Iterations of the whole run: all that fit in `total_steps`, and at least one."""
        return max(1, self.total_steps // self.steps_per_iteration)

    def changed(self, **values: Any) -> Any:
        """A copy with other values of some fields; fields that change no number are adjusted to them."""
        made: Any = self
        return dataclasses.replace(made, **values)


def own_preset(cls: type, env_name: str) -> dict[str, Any]:
    """What a user's own method `preset` says of an environment; empty of a class that has none.

    Raises:
      FdgError: it is no class method, it fails, or what it returns are no values of fields.
    """
    method: Any = getattr(cls, "preset", None)
    if method is None:
        return {}
    what = f"{cls.__name__}.preset({env_name!r})"
    written = next(vars(kind)["preset"] for kind in cls.__mro__ if "preset" in vars(kind))
    if not isinstance(written, classmethod | staticmethod):
        raise FdgError(f"{cls.__name__}.preset{place_of(written)}: write @classmethod above it")
    with own_code(what, written.__func__):
        values = method(env_name)
    where = place_of(written.__func__)
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise FdgError(f"{what} returned {quoted(values)}{where}: return a dict of fields and their values")
    known = [field.name for field in dataclass_fields(cls) if field.init and field.name != "env"]
    for name in values:
        if name not in known:
            raise FdgError(f"{what}{where}: {unknown_name('field', name, known)}")
    return dict(values)
