"""Runs a plan whose fragments share their devices: the training loop is one program."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdg.lowering import programs as lowering
from fdg.placing.plans import Plan
from fdg.processes.arrays import put
from fdg.running import metrics
from fdg.running.metrics import PendingMetrics
from fdg.running.program import Program, compile_programs
from fdg.running.timeline import Timeline


class OneProgram:
    """A training loop as one executable, for any number of iterations.

    Attributes:
      shapes: shapes, dtypes and shardings of the state's leaves.
      timeline: None, since a single group is always busy.
      moved_bytes: bytes transferred between groups; 0, since there is one group.
    """

    timeline: Timeline | None = None
    moved_bytes = 0

    def __init__(self, plan: Plan, devices: Sequence[jax.Device]):
        graph = plan.graph
        lower = lowering.lower_shared if graph.agents is None else lowering.lower_agents
        loop = lower(plan, devices)
        state, self._metrics = graph.of_all((graph.state, graph.metrics))
        self.shapes = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(jax.tree.leaves(state), loop.shardings, strict=True)
        ]
        self._iterations_per_call = rows = metrics.rows_per_buffer(jax.tree.leaves(self._metrics))

        def train(leaves, iterations):
            return loop.run(leaves, iterations, rows)

        self._program = Program(
            "train",
            tuple(f.name for f in graph.fragments),
            tuple(devices[i] for i in plan.groups[0].devices),
            1,
            jax.jit(train, donate_argnums=0, out_shardings=(loop.shardings, loop.buffer_sharding)),
            (self.shapes, jax.ShapeDtypeStruct((), jnp.int32, sharding=loop.count_sharding)),
        )
        self.programs: tuple[Program, ...] = (self._program,)
        # `device_put` is an explicit transfer, which `jax.transfer_guard("disallow")` permits.
        count = self._program.arguments[1]
        self._count = functools.cache(lambda n: put(jax.device_put(np.int32(n)), count))

    def compile(self, meanwhile: Callable[[], Any]) -> Any:
        """Compiles the program; calls `meanwhile` at the same time, and returns its result."""
        return compile_programs(self.programs, meanwhile)

    def start(
        self, leaves: list[jax.Array], iterations: int, stop: Callable[[], bool]
    ) -> tuple[list[jax.Array], PendingMetrics]:
        """Dispatches one call for each `metrics.rows_per_buffer` iterations, without waiting for the calls.

        Donates the leaves, which must have the shardings of `shapes` and share no buffers. The host cannot
        interrupt the loop, so `stop` is ignored.
        """
        chunks = []
        for start_iteration in range(0, iterations, self._iterations_per_call):
            count = min(self._iterations_per_call, iterations - start_iteration)
            leaves, buffers = self._program.compiled(leaves, self._count(count))
            chunks.append((buffers, count))
        return leaves, PendingMetrics(self._metrics, chunks, None)
