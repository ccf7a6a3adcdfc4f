"""Settings that several algorithms share, as small values whose fields become fields of the algorithm."""

import dataclasses
import inspect
import typing
from typing import TYPE_CHECKING, Any, Self


class Part:
    """Base of frozen dataclasses of settings that belong together, such as `algos.layers.Layers`.

    A class attribute that is a part stands for its fields: the class gets each of them, in that place and
    with the part's value as its default, so flags, files and sweeps see flat fields. Of an instance the
    attribute is the part made of that instance's values.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Momentum(Part):
    ...     decay: float = 0.9
    >>> @dataclasses.dataclass(frozen=True)
    ... class Heavy(HasParts):
    ...     rate: float = 0.1
    ...     momentum = Momentum(decay=0.99)
    >>> Heavy(decay=0.5), Heavy(decay=0.5).momentum, Heavy.momentum
    (Heavy(rate=0.1, decay=0.5), Momentum(decay=0.5), Momentum(decay=0.99))
    """

    def __get__(self, instance: Any, owner: Any = None) -> Self:
        """The part of an instance; of a class its default."""
        if instance is None:
            return self
        own: Any = self
        return type(self)(**{field.name: getattr(instance, field.name) for field in dataclasses.fields(own)})


# A type checker cannot see the fields that parts add; it takes any.
if TYPE_CHECKING:
    _AnyFields: Any
else:
    _AnyFields = object


class HasParts(_AnyFields):
    """Base of dataclasses that have parts."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Replaces each part by its fields, before `dataclasses.dataclass` reads them."""
        super().__init_subclass__(**options)
        own = inspect.get_annotations(cls)
        parts: dict[str, Any] = {name: value for name, value in vars(cls).items() if isinstance(value, Part)}
        annotations: dict[str, Any] = {}
        without_default = dict.fromkeys(name for name in own if name not in vars(cls))
        for name in {**without_default, **vars(cls)}:
            if name not in parts:
                annotations.update({name: own[name]} if name in own else {})
                continue
            part, kinds = parts[name], typing.get_type_hints(type(parts[name]))
            for field in dataclasses.fields(part):
                if field.name not in own:  # a class may say more of one of them
                    annotations[field.name] = kinds[field.name]
                    default = dataclasses.field(default=getattr(part, field.name), metadata=field.metadata)
                    setattr(cls, field.name, default)
        cls.__annotations__ = annotations
