"""Settings that several algorithms share, as small values whose fields become the algorithm's fields."""

import dataclasses
import inspect
import typing
from typing import Any, Self, TypeVar

_Class = TypeVar("_Class", bound=type)


class Part:
    """Base of frozen dataclasses of related settings, such as `algos.layers.Layers`.

    The decorator `flattened` replaces a class attribute that is a part by its fields, in the same place and
    with the part's values as defaults, so flags, files and sweeps have flat fields. On an instance, the
    attribute is a part with the instance's values.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Momentum(Part):
    ...     decay: float = 0.9
    >>> @dataclasses.dataclass(frozen=True)
    ... @flattened
    ... class Heavy:
    ...     rate: float = 0.1
    ...     momentum = Momentum(decay=0.99)
    >>> Heavy(decay=0.5), Heavy(decay=0.5).momentum, Heavy.momentum
    (Heavy(rate=0.1, decay=0.5), Momentum(decay=0.5), Momentum(decay=0.99))
    """

    def __get__(self, instance: Any, owner: Any = None) -> Self:
        """The part with an instance's values; on the class, the part with the defaults."""
        if instance is None:
            return self
        part: Any = self
        return type(self)(**{field.name: getattr(instance, field.name) for field in dataclasses.fields(part)})

    def check(self, algorithm: Any) -> None:
        """Raises an `FdgError` that names the algorithm if a value is out of range."""


def check_parts(instance: Any) -> None:
    """Calls `check` of each part in the order of definition, base classes first."""
    names = dict.fromkeys(
        name for cls in reversed(type(instance).__mro__) for name, value in vars(cls).items()
        if isinstance(value, Part)
    )  # fmt: skip
    for name in names:
        getattr(instance, name).check(instance)


def flattened(cls: _Class) -> _Class:
    """A class decorator that replaces parts by their fields; apply it before `dataclasses.dataclass`.

    Subclasses of fdg's algorithms are flattened automatically.
    """
    own_annotations = inspect.get_annotations(cls)
    annotations: dict[str, Any] = {}
    for name in [*(name for name in own_annotations if name not in vars(cls)), *vars(cls)]:
        part: Any = vars(cls).get(name)
        if not isinstance(part, Part):
            annotations.update({name: own_annotations[name]} if name in own_annotations else {})
            continue
        values: Any = part
        kinds = typing.get_type_hints(type(part))
        for field in dataclasses.fields(values):
            if field.name not in own_annotations:  # a class may redefine a field
                annotations[field.name] = kinds[field.name]
                default = dataclasses.field(default=getattr(part, field.name), metadata=field.metadata)
                setattr(cls, field.name, default)
    cls.__annotations__ = annotations
    return cls
