"""In which numbers networks compute: a field of every agent, and what stands behind it."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import fdg
from algos.hyperparameters import PRECISION


@dataclasses.dataclass(frozen=True)
class Precise:
    """Base of agents whose networks may compute in bfloat16: the field `precision`.

    Parameters, optimisers, losses, normalisers and what networks give are float32 all the same, and so is
    all that a network does between its products ([decision 061](docs/decisions/061-precision.md)).
    """

    precision: Literal["float32", "bfloat16"] = dataclasses.field(
        default="float32", metadata=PRECISION, kw_only=True
    )

    def _computing(self, network: Any) -> Any:
        """A network that computes as the field says: any of the kinds that algorithms here take."""
        if self.precision == "float32":
            return network
        if hasattr(network, "unroll"):
            return network._replace(unroll=InBfloat16(network.unroll))
        return network._replace(apply=InBfloat16(network.apply))


@dataclasses.dataclass(frozen=True)
class InBfloat16:
    """A function with its products in bfloat16 (`fdg.in_bfloat16`); of equal functions equal."""

    function: Callable[..., Any]

    def __call__(self, *arguments: Any, **options: Any) -> Any:  # noqa: D102
        return fdg.in_bfloat16(self.function)(*arguments, **options)
