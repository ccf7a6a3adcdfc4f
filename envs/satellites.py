"""Satellites: workers of a fleet that act themselves, for whole segments of a rollout.

Otherwise a program sends the actions of every step to the workers, and waits for each step. Satellites get
the policy's parameters once per segment of T steps (inline inference of SRL, Mei et al., arXiv 2306.16688).
The actor is an exported program (`jax.export`), compiled for a CPU and the worker's rows. Parameters are
arguments, so a program is sent and compiled once.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from envs.pools import FreshRows, Pool, Segment, Transition
from fdg.errors import FdgError, HostError

Act = Callable[[Any, jax.Array], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Program:
    """An exported actor for workers; equal to other programs with the same texts."""

    digest: str  # SHA-256 of the texts
    # serialised by `jax.export`, by number of rows
    texts: Mapping[int, bytes] = dataclasses.field(compare=False, repr=False)
    x64: bool = False  # traced with 64-bit types enabled


class WorkerActor(NamedTuple):
    """A traced actor for workers."""

    program: Program
    kept: Any  # pytree of jax.ShapeDtypeStruct, leading axis B


def trace_actor(
    name: str, act: Act, input_types: Callable[[int], Any], shares: Sequence[int]
) -> tuple[WorkerActor, list[jax.Array]]:
    """Traces an actor for shares of a batch; also returns the arrays that it closes over.

    `act` maps `(rows [n, ...], key data [n, k] uint32)` to `(action of the environment [n, ...], kept)`,
    where `kept` is a pytree of arrays with leading axis n; it may close over traced arrays. `seen` maps a
    number of rows to shapes and dtypes of both arguments, and `shares` are the workers' numbers of rows.
    """
    texts, operands = {}, None
    for rows in sorted(set(shares)):
        closed_jaxpr = jax.make_jaxpr(act)(*input_types(rows))
        if operands is None:
            operands = closed_jaxpr.consts
        elif [x.shape for x in closed_jaxpr.consts] != [x.shape for x in operands]:
            raise FdgError(
                f"environment '{name}': acts=True: the actor closes over arrays of one row for each"
                " environment, which workers do not have: leave acts out"
            )

        def run(operands: Any, *inputs: Any, jaxpr: Any = closed_jaxpr.jaxpr) -> Any:
            return jax.core.eval_jaxpr(jaxpr, operands, *inputs)

        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in closed_jaxpr.consts]
        exported = jax.export.export(jax.jit(run), platforms=["cpu"])(shapes, *input_types(rows))
        texts[rows] = bytes(exported.serialize())
    digest = hashlib.sha256(b"".join(texts.values())).hexdigest()
    kept = jax.eval_shape(act, *input_types(sum(shares)))[1]
    return WorkerActor(Program(digest, texts, bool(jax.config.read("jax_enable_x64"))), kept), operands or []


_loaded_actors: dict[tuple[str, int], Callable[..., Any]] = {}  # (digest, rows) -> actor, in this worker


def _load_actor(program: Program, rows: int) -> Callable[..., Any]:
    key = program.digest, rows
    if key not in _loaded_actors:
        jax.config.update("jax_platforms", "cpu")  # before a worker's backend starts
        _loaded_actors[key] = jax.jit(jax.export.deserialize(bytearray(program.texts[rows])).call)
    return _loaded_actors[key]


def run_segment(
    program: Program,
    pool: Pool,
    observation: np.ndarray,
    operands: Sequence[np.ndarray],
    keys: np.ndarray,
    fresh_rows: FreshRows | None,
    timeout: float,
) -> tuple[Segment, np.ndarray]:
    """Acts and steps T times in a worker.

    `pool` has n instances; `observation` is `[n, *wire]`, the input of the first action; `keys` is `[T, n,
    k]` uint32, key data for actions. `fresh_rows` is set if the instances have just replaced lost ones, else
    None. Returns the segment, and the input of the next action.

    Raises:
      HostError: instances were lost.
    """
    act, kept, steps = _load_actor(program, len(observation)), [], []
    for number, key in enumerate(keys):
        restart = fresh_rows if number == 0 else None
        with jax.enable_x64(program.x64):
            action, *kept_leaves = act(
                operands, observation if restart is None else restart.last_observation, key
            )
        step = pool.step(np.asarray(action), timeout) if restart is None else restart.step()
        if step.failures:
            raise HostError(step.failures[0].reason)
        kept.append([np.asarray(x) for x in kept_leaves])
        steps.append(step)
        observation = step.observation
    arrays = [np.stack(leaves) for leaves in zip(*kept, strict=True)]
    return Segment(arrays, Transition.stacked(steps)), observation
