"""Transfers between groups of a schedule: copies in one process, collectives from process to process."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from fdg.lowering.programs import value_shape
from fdg.placing.layout import Layout
from fdg.placing.schedule import Value
from fdg.running.exchange import Exchange
from fdg.running.program import Program, is_here, spans_processes
from fdg.running.transfers import Mover


class Crossings:
    """Collectives of several processes: one at a time, so that their order is the same everywhere."""

    def __init__(self) -> None:
        self._pending: Sequence[jax.Array] = ()

    def wait(self) -> None:
        """Until the last one is over; raises what it raised, once."""
        pending, self._pending = self._pending, ()
        jax.block_until_ready(pending)

    def add(self, pending: Sequence[jax.Array]) -> None:
        """One was started; `pending` is there when it is over."""
        self._pending = pending


class Transfer:
    """Moves values from group to group, again and again: arrays to arrays, None for what is elsewhere.

    Attributes:
      programs: those that it runs around the copies.
      is_here: whether this process takes part.
    """

    def __init__(
        self,
        source: Mesh,
        target: Mesh,
        pairs: Sequence[tuple[Value, Value]],
        times: int,
        crossings: Crossings,
    ):
        """For steps.

        Args:
          pairs: (at the source, at the target).
          times: that it moves them in an iteration.
        """
        crosses = spans_processes(source, target)
        layouts = [
            (Layout(a.shape, a.axis, source.size), Layout(b.shape, b.axis, target.size)) for a, b in pairs
        ]
        mover: Mover | Exchange = (Exchange if crosses else Mover)(source, target, layouts)
        self.programs = []
        between = f"{pairs[0][0].group} -> {pairs[0][1].group}"
        for name, function, arguments in mover.functions([value_shape(source, a) for a, _ in pairs]):
            where = tuple(mover.mesh_of(name).devices.flat)
            program = Program(f"{name} {between}", (), where, times, function, (arguments,))
            program.exchanges = name == "exchange"
            self.programs.append(program)
            mover.programs[name] = program
        self.is_here = is_here(source) or is_here(target)
        self._mover, self._crossings = mover, crossings

    @property
    def bytes(self) -> int:
        """That a call moves: what arrives on all devices here together; 0 before the first."""
        return self._mover.bytes

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays on the target; returns before they are there."""
        if not isinstance(self._mover, Exchange):
            return self._mover(arrays)
        self._crossings.wait()
        results = self._mover(arrays)
        self._crossings.add(self._mover.pending)
        return results
