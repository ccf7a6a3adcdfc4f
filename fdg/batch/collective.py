"""The description of a collective, which is predicted from a jaxpr or read from compiled code."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of one program, such as the all-reduce of gradients."""

    kind: str  # the name in HLO, such as "all-reduce"
    bytes: int  # size of the result on one device; the sum of sizes if XLA combined several collectives
    calls: int  # runs in one run of the program; a loop of unknown length counts as one trip
    fragments: tuple[str, ...] = ()  # the enclosing fragments, outermost first; empty between fragments
    op_name: str = ""  # HLO's name of the traced operation that it belongs to; "" if it is predicted

    @property
    def fragment(self) -> str | None:
        """The innermost enclosing fragment; None between fragments.

        >>> Collective("all-reduce", 4, 1, ("learn", "gradient")).fragment
        'gradient'
        """
        return self.fragments[-1] if self.fragments else None


def unexplained(measured: Iterable[Collective], predicted: Iterable[Collective]) -> tuple[Collective, ...]:
    """The measured collectives that no prediction covers. Called by `Engine.unexplained`.

    A prediction covers collectives of its kind inside its innermost fragment, or between fragments if it has
    no fragment. A combined collective is covered if one of its parts is covered.

    >>> unexplained([Collective("all-gather", 4, 1, ("act",))], [Collective("all-reduce", 4, 1, ("act",))])
    (Collective(kind='all-gather', bytes=4, calls=1, fragments=('act',), op_name=''),)
    """
    covered = {(collective.kind, collective.fragment) for collective in predicted}
    return tuple(
        collective
        for collective in measured
        if not any((collective.kind, enclosing) in covered for enclosing in collective.fragments or (None,))
    )
