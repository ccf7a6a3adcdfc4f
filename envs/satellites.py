"""Satellites: workers of a fleet that act themselves, for whole segments of a rollout.

Without satellites, the training program sends actions to the workers at every step and waits for them.
Satellites get the policy's parameters once per segment of T steps (inline inference of SRL, Mei et al., arXiv
2306.16688). The actor is an exported program (`jax.export`), compiled for a CPU and the worker's rows.
Parameters are arguments, so a program is sent and compiled once.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from envs.pools import ActorInputs, Pool, Recreated, Segment, Transition
from fdg.errors import FdgError, HostError

Act = Callable[[Any, jax.Array], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Program:
    """An actor, serialised for workers. Programs are equal if their serialised bytes (and `x64`) are."""

    digest: str  # of the serialised bytes
    # by number of rows: bytes from `jax.export`, or from `NumpyProgram.serialized`
    serialized: Mapping[int, bytes] = dataclasses.field(compare=False, repr=False)
    x64: bool = False  # traced with 64-bit types enabled

    @staticmethod
    def of(serialized: Mapping[int, bytes]) -> "Program":
        """The program with these serialised bytes, traced just now."""
        digest = hashlib.sha256(b"".join(serialized.values())).hexdigest()
        return Program(digest, serialized, bool(jax.config.read("jax_enable_x64")))


class TracedActor(NamedTuple):
    """A traced actor for workers."""

    program: Program
    extras: Any  # pytree of jax.ShapeDtypeStruct, leading axis B
    # (arrays that the actor closes over, key data `[T, B, k]`) -> what workers get
    inputs: Callable[[list[jax.Array], jax.Array], ActorInputs[jax.Array]]


def trace(
    name: str, act: Act, argument_shapes: Callable[[int], Any], rows_per_worker: Sequence[int]
) -> tuple[TracedActor, list[jax.Array]]:
    """Traces an actor for the workers' parts of a batch; also returns the arrays that it closes over.

    `act` maps `(rows [n, ...], key data [n, k] uint32)` to `(action of the environment [n, ...], extras)`,
    where `extras` is a pytree of arrays with leading axis n; it may close over traced arrays.
    `argument_shapes` maps a number of rows to shapes and dtypes of both arguments.
    """
    serialized, operands = {}, None
    for rows in sorted(set(rows_per_worker)):
        closed = jax.make_jaxpr(act)(*argument_shapes(rows))
        if operands is None:
            operands = closed.consts
        elif [x.shape for x in closed.consts] != [x.shape for x in operands]:
            raise unequal_constants(name)

        def run(operands: Any, *arguments: Any, jaxpr: Any = closed.jaxpr) -> Any:
            return jax.core.eval_jaxpr(jaxpr, operands, *arguments)

        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in closed.consts]
        exported = jax.export.export(jax.jit(run), platforms=["cpu"])(shapes, *argument_shapes(rows))
        serialized[rows] = bytes(exported.serialize())
    extras = jax.eval_shape(act, *argument_shapes(sum(rows_per_worker)))[1]
    inputs = lambda operands, key_data: ActorInputs(operands, [key_data])  # noqa: E731
    return TracedActor(Program.of(serialized), extras, inputs), operands or []


def unequal_constants(name: str) -> FdgError:
    """The error for an actor with an array whose shape depends on the number of rows."""
    return FdgError(
        f"environment '{name}': acts=True needs an actor whose constants have the same shapes for any"
        " number of environments, because each worker runs some of them: leave out acts=True"
    )


_compiled_actors: dict[tuple[str, int], Callable[..., Any]] = {}  # by digest and rows


def _compiled_actor(program: Program, rows: int) -> Callable[..., Any]:
    """The actor for a number of rows, compiled for this process's CPU."""
    key = program.digest, rows
    if key not in _compiled_actors:
        jax.config.update("jax_platforms", "cpu")  # before a worker's backend starts
        _compiled_actors[key] = jax.jit(jax.export.deserialize(bytearray(program.serialized[rows])).call)
    return _compiled_actors[key]


def run_segment(
    program: Program,
    pool: Pool,
    observation: np.ndarray,
    num_steps: int,
    inputs: ActorInputs[np.ndarray],
    recreated: Recreated | None,
    timeout: float,
) -> tuple[Segment, np.ndarray]:
    """Acts and steps in a worker.

    `pool` has n instances; `observation` is `[n, *wire]`, the input of the first action; `inputs` are those
    of these instances. `recreated` describes instances that have just replaced lost ones (see
    `pools.Recreated`); None if there are none. Returns the segment, and the input of the next action.

    Raises:
      HostError: instances were lost.
    """
    act, extras, steps = _compiled_actor(program, len(observation)), [], []
    for t in range(num_steps):
        restart = recreated if t == 0 else None
        with jax.enable_x64(program.x64):
            action, *step_extras = act(
                inputs.fixed,
                observation if restart is None else restart.last_observation,
                *(values[t] for values in inputs.per_step),
            )
        step = pool.step(np.asarray(action), timeout) if restart is None else restart.step()
        if step.failures:
            raise HostError(step.failures[0].reason)
        extras.append([np.asarray(x) for x in step_extras])
        steps.append(step)
        observation = step.observation
    stacked_extras = [np.stack(values) for values in zip(*extras, strict=True)]
    return Segment(stacked_extras, Transition.stack(steps)), observation
