"""One type for what the devices of a program exchange, predicted from a jaxpr or read from compiled code."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Collective:
    """A communication between the devices of one program.

    Attributes:
      kind: as HLO spells it, such as "all-reduce".
      bytes: of its result on one device, each time; of several that were combined, together.
      calls: how often it runs when the program does (loops of unknown length counted once).
      fragments: the fragments around it, outermost first; empty for code between fragments.
      op_name: where in the traced program it comes from, as JAX says; empty where it is predicted.
    """

    kind: str
    bytes: int
    calls: int
    fragments: tuple[str, ...] = ()
    op_name: str = ""

    @property
    def fragment(self) -> str | None:
        """The innermost fragment around it; None between fragments.

        >>> Collective("all-reduce", 4, 1, ("learn", "gradient")).fragment
        'gradient'
        """
        return self.fragments[-1] if self.fragments else None


def unexplained(measured: Iterable[Collective], predicted: Iterable[Collective]) -> tuple[Collective, ...]:
    """The measured collectives that no predicted one names.

    A prediction names those of its kind that have its innermost fragment around them, or that are between
    fragments if it has none. What XLA combined from several counts as named where one of them is.

    >>> unexplained([Collective("all-gather", 4, 1, ("act",))], [Collective("all-reduce", 4, 1, ("act",))])
    (Collective(kind='all-gather', bytes=4, calls=1, fragments=('act',), op_name=''),)
    """
    named = {(c.kind, c.fragment) for c in predicted}
    return tuple(
        c for c in measured if not any((c.kind, around) in named for around in c.fragments or (None,))
    )
