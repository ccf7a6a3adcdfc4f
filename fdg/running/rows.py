"""Rows of metrics that several programs make, one an iteration, stacked a few dozen at a time."""

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
    """Stacks up to `ROWS` iterations' metrics: one program for each group, whatever their number.

    Attributes:
      programs: those that stack.
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
            start = interpreter.on_lane(group, _starter(program), len(positions))
            self._stacks.append((positions, program, start))
        self.programs = tuple(program for _, program, _ in self._stacks)
        words = [keys.words_shape(value.shape, value.dtype) for value in metrics]
        self._shapes = [jax.ShapeDtypeStruct((ROWS, *row.shape), row.dtype) for row in words]
        self._owners = [meshes[value.group].devices.flat[0].process_index for value in metrics]

    def __call__(self, rows: Sequence[Sequence[Any]]) -> list[Any]:
        """A buffer `[ROWS, ...]` of each metric; None for one that other processes make.

        Args:
          rows: one an iteration, each with all metrics; what is missing of `ROWS` is filled up with the last.
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
        """Buffers, of which each process has some, on all of them."""
        return share(buffers, self._shapes, self._owners)


def _starter(program: Program) -> Action:
    """A call with the rows of all metrics, one metric after the other."""

    def start(arrays: Sequence[Any]) -> Sequence[Any]:
        return program.compiled([arrays[i : i + ROWS] for i in range(0, len(arrays), ROWS)])

    return start


def _stacked(rows: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    return [jnp.stack([keys.words(x) for x in row]) for row in rows]
