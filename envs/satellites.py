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

from envs.pools import Begun, Pool, Segment, Transition
from fdg.errors import FdgError, HostError

Act = Callable[[Any, jax.Array], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Program:
    """An actor for workers; equal to others with the same text."""

    digest: str  # of the texts
    # serialised by `jax.export`, by number of rows
    texts: Mapping[int, bytes] = dataclasses.field(compare=False, repr=False)
    x64: bool = False  # traced with 64-bit types enabled


class Acting(NamedTuple):
    """A traced actor for workers."""

    program: Program
    kept: Any  # pytree of jax.ShapeDtypeStruct, leading axis B


def trace(
    name: str, act: Act, seen: Callable[[int], Any], shares: Sequence[int]
) -> tuple[Acting, list[jax.Array]]:
    """Traces an actor for shares of a batch; also returns the arrays that it closes over.

    `act` maps `(rows [n, ...], key data [n, k] uint32)` to `(action of the environment [n, ...], kept)`,
    where `kept` is a pytree of arrays with leading axis n; it may close over traced arrays. `seen` maps a
    number of rows to shapes and dtypes of both arguments, and `shares` are the workers' numbers of rows.
    """
    texts, operands = {}, None
    for rows in sorted(set(shares)):
        closed = jax.make_jaxpr(act)(*seen(rows))
        if operands is None:
            operands = closed.consts
        elif [x.shape for x in closed.consts] != [x.shape for x in operands]:
            raise FdgError(
                f"environment '{name}': acts=True: the actor closes over arrays of one row for each"
                " environment, which workers do not have: leave acts out"
            )

        def run(operands: Any, *given: Any, jaxpr: Any = closed.jaxpr) -> Any:
            return jax.core.eval_jaxpr(jaxpr, operands, *given)

        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in closed.consts]
        exported = jax.export.export(jax.jit(run), platforms=["cpu"])(shapes, *seen(rows))
        texts[rows] = bytes(exported.serialize())
    digest = hashlib.sha256(b"".join(texts.values())).hexdigest()
    kept = jax.eval_shape(act, *seen(sum(shares)))[1]
    return Acting(Program(digest, texts, bool(jax.config.read("jax_enable_x64"))), kept), operands or []


_compiled: dict[tuple[str, int], Callable[..., Any]] = {}  # of this worker


def _call(program: Program, rows: int) -> Callable[..., Any]:
    key = program.digest, rows
    if key not in _compiled:
        jax.config.update("jax_platforms", "cpu")  # before a worker's backend starts
        _compiled[key] = jax.jit(jax.export.deserialize(bytearray(program.texts[rows])).call)
    return _compiled[key]


def carry_out(
    program: Program,
    pool: Pool,
    seen: np.ndarray,
    operands: Sequence[np.ndarray],
    keys: np.ndarray,
    begun: Begun | None,
    timeout: float,
) -> tuple[Segment, np.ndarray]:
    """Acts and steps in a worker.

    `pool` has n instances; `seen` is `[n, *wire]`, the input of the first action; `keys` is `[T, n, k]`
    uint32, key data for actions. `begun` is set if the instances have just replaced lost ones, else None.
    Returns the segment, and the input of the next action.

    Raises:
      HostError: instances were lost.
    """
    act, kept, steps = _call(program, len(seen)), [], []
    for number, key in enumerate(keys):
        restart = begun if number == 0 else None
        with jax.enable_x64(program.x64):
            action, *more = act(operands, seen if restart is None else restart.seen, key)
        step = pool.step(np.asarray(action), timeout) if restart is None else restart.step()
        if step.failures:
            raise HostError(step.failures[0].reason)
        kept.append([np.asarray(x) for x in more])
        steps.append(step)
        seen = step.observation
    whole = [np.stack(each) for each in zip(*kept, strict=True)]
    return Segment(whole, Transition.stacked(steps)), seen
