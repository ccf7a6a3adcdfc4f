"""Stacks the metrics of several programs: one row for each iteration, `ROWS` rows at a time."""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdg import keys
from fdg.lowering.programs import batch_sharding, value_shape
from fdg.placing.scheduling.schedule import Value
from fdg.processes.arrays import share
from fdg.running.lanes import Action
from fdg.running.program import Program
from fdg.running.steps import Interpreter

ROWS = 64


class RowStacks:
    """Stacks the metrics of up to `ROWS` iterations: one program for each group, for any number of rows.

    Attributes:
      programs: the programs that stack.
    """

    def __init__(self, metrics: Sequence[Value], interpreter: Interpreter):
        meshes = interpreter.meshes
        by_group: dict[str, list[int]] = collections.defaultdict(list)
        for i, value in enumerate(metrics):
            by_group[value.group].append(i)
        self._stacks: list[tuple[list[int], Program, Action]] = []
        for group, positions in by_group.items():
            mesh = meshes[group]
            rows = [[value_shape(mesh, metrics[i])] * ROWS for i in positions]
            stack = jax.jit(_stacked, out_shardings=batch_sharding(mesh, None))
            program = Program(f"stack {group}", (), tuple(mesh.devices.flat), 0, stack, (rows,))
            start = interpreter.on_lane(group, _stacking_call(program), len(positions))
            self._stacks.append((positions, program, start))
        self.programs = tuple(program for _, program, _ in self._stacks)
        words = [keys.words_shape(value.shape, value.dtype) for value in metrics]
        self._shapes = [jax.ShapeDtypeStruct((ROWS, *row.shape), row.dtype) for row in words]
        self._owners = [meshes[value.group].devices.flat[0].process_index for value in metrics]

    def __call__(self, rows: Sequence[Sequence[Any]]) -> list[Any]:
        """A buffer `[ROWS, ...]` for each metric; None for metrics of other processes.

        Args:
          rows: all metrics of each iteration; the last row is repeated up to `ROWS`.
        """
        buffers: list[Any] = [None] * len(self._shapes)
        padded = [*rows, *[rows[-1]] * (ROWS - len(rows))]
        for positions, program, start in self._stacks:
            if program.is_here:
                stacked = start([row[i] for i in positions for row in padded])
                for i, buffer in zip(positions, stacked, strict=True):
                    buffers[i] = buffer
        return buffers

    def share(self, buffers: Sequence[Any]) -> list[jax.Array]:
        """Copies the buffers that each process has to all processes."""
        return share(buffers, self._shapes, self._owners)


def _stacking_call(program: Program) -> Action:
    """A function that calls the program with a flat list: `ROWS` arrays of each metric in turn."""

    def start(arrays: Sequence[Any]) -> Sequence[Any]:
        return program.compiled([arrays[i : i + ROWS] for i in range(0, len(arrays), ROWS)])

    return start


def _stacked(rows: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    return [jnp.stack([keys.words(x) for x in row]) for row in rows]
