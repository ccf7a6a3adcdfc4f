"""One program under one placement: has the engine the numbers, effects and bytes that it should have?"""

import contextlib
import dataclasses
import functools
import itertools
import traceback
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import fdg
from fdg import FdgWarning
from fdg.batch.lengths import divisors
from fdg.placing import place
from fdg.placing.agents_per_device import agents_per_vmap
from fdg.placing.plans import SteppedPlan
from tests.oracle.interpret import Algorithm
from tests.oracle.placements import Placement, groups_of
from tests.oracle.program import Program, fragments
from tests.oracle.staleness import UnclearError, stale_run
from tests.running.order import is_in_order


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found.

    `kind`: "right"; "refused", by an error of one line that names a cause; "unclear", where the rules of
    staleness do not say, or XLA has a known fault; "wrong" numbers or effects; "error", any other exception;
    "vague", a refusal that names nothing; "unplanned", right numbers by exchanges that the plan does not
    name.
    """

    kind: str
    detail: str = ""

    @property
    def is_bad(self) -> bool:
        return self.kind not in ("right", "refused", "unclear")


class Expected:
    """What plain JAX makes of a program, worked out once for all its placements."""

    def __init__(self, program: Program):
        self.program, self.algorithm = program, Algorithm(program)

    def first(self, seed: int = 0) -> list[Any]:
        """The state that an agent starts from."""
        return self.algorithm.init(jax.random.key(seed))

    def under(self, placement: Placement) -> tuple[Any, Any, Any]:
        """(state and metrics, calls, notes) of plain JAX, with the placement's old parameters."""
        found = [self._of_agent(placement, seed) for seed in range(placement.num_seeds or 1)]
        if placement.num_seeds is None:
            return found[0]
        results, calls, notes = zip(*found, strict=True)
        states, metrics = zip(*results, strict=True)
        state = jax.tree.map(lambda *x: jnp.stack(x), *states)
        metrics = jax.tree.map(lambda *x: jnp.stack(x, 1), *metrics)
        return (state, metrics), list(itertools.chain(*calls)), list(itertools.chain(*notes))

    def _of_agent(self, placement: Placement, seed: int) -> tuple[Any, Any, Any]:
        iterations = sum(placement.runs)
        if not placement.staleness:
            return self._plain(iterations, seed)
        groups = groups_of(self.program, placement)
        if groups is None:
            raise UnclearError("a fragment that the policy does not place")
        host = Algorithm(self.program).host
        state = self.first(seed)
        results = stale_run(self.program, state, iterations, groups, placement.staleness, host)
        return _settled(results), host.calls, host.notes

    @functools.cached_property
    def _iterate(self) -> Any:
        return jax.jit(self.algorithm.iterate)

    @functools.lru_cache(maxsize=10)  # noqa: B019
    def _plain(self, iterations: int, seed: int) -> tuple[Any, Any, Any]:
        host = self.algorithm.host
        host.calls.clear()
        host.notes.clear()
        state, metrics = self.first(seed), []
        for _ in range(iterations):
            state, one = self._iterate(state)
            metrics.append(one)
        results = state, jax.tree.map(lambda *m: jnp.stack(m), *metrics)
        return _settled(results), list(host.calls), list(host.notes)


def _settled(results: Any) -> Any:
    jax.block_until_ready(results)
    jax.effects_barrier()
    return results


def under_test(program: Program) -> Algorithm:
    """The algorithm that is given to the engine; `breakage` changes it."""
    return Algorithm(program)


@contextlib.contextmanager
def at_most_together(count: int | None) -> Iterator[None]:
    """Engines that are compiled meanwhile map no more agents together on a device; None: as they choose."""

    def fewer(graph: fdg.FDG, here: int, *on: Any) -> int:
        most = min(count or here, agents_per_vmap(graph, here, *on))
        return max(n for n in divisors(here) if n <= most)

    with mock.patch.object(place, "agents_per_vmap", fewer):
        yield


# What XLA (jaxlib 0.10.2) raises of plain JAX too.
_FAULTS_OF_XLA = (
    # On CPUs, of a transform that is gathered in a layout of columns, such as that of
    # `jax.grad(lambda x: jnp.sum(jnp.abs(jnp.fft.fft(x.T))))` with the rows of x split over two devices.
    "fft_thunk.cc",
)


def check(
    program: Program, placement: Placement, expected: Expected | None = None, tolerance: float = 1e-5
) -> Verdict:
    """Runs the engine, and plain JAX."""
    devices = jax.devices("cpu")[: placement.devices]
    expected = expected or Expected(program)
    try:
        want, calls, notes = expected.under(placement)
    except UnclearError as unclear:
        return Verdict("unclear", str(unclear))
    algorithm = under_test(program)
    try:
        with at_most_together(placement.together), warnings.catch_warnings():
            warnings.simplefilter("ignore", FdgWarning)  # random programs may draw from one key each time
            engine = fdg.compile(algorithm, placement.policy, devices, placement.num_seeds)
    except (fdg.GraphError, fdg.PlanError) as refusal:
        return _refusal(str(refusal), program, placement)
    except Exception as error:
        return Verdict("error", _brief(error))
    try:
        have = _settled(_run(engine, algorithm, placement))
        difference = _difference(want, have, tolerance) or _effects_differ(calls, notes, algorithm, tolerance)
        if difference:
            return Verdict("wrong", difference)
        return _unplanned(engine, sum(placement.runs))
    except Exception as error:
        known = any(fault in str(error) for fault in _FAULTS_OF_XLA)
        return Verdict("unclear" if known else "error", _brief(error))


def _run(engine: Any, algorithm: Algorithm, placement: Placement) -> tuple[Any, Any]:
    state = algorithm.init(jax.random.key(0)) if placement.shares_arrays else engine.init(0)
    metrics = []
    for iterations in placement.runs:
        state, some = engine.run(state, iterations)
        metrics.append(some)
    joined = jax.tree.map(lambda *m: jnp.concatenate([jnp.asarray(np.asarray(x)) for x in m]), *metrics)
    return engine.algorithm_state(state), joined


def _refusal(message: str, program: Program, placement: Placement) -> Verdict:
    named = fragments(program)
    words = {*named, *named.values(), type(placement.policy).__name__, *_changing(program)}
    is_clear = "\n" not in message and any(word in message for word in words)
    return Verdict("refused" if is_clear else "vague", message)


def _changing(program: Program) -> list[str]:
    """The leaves of the state whose dtype or weak type an iteration changes: these may be refused by name."""
    algorithm = Algorithm(program)
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    changing: dict[str, None] = {}
    for _ in jax.tree.leaves(state):  # a change may move on from leaf to leaf
        after = jax.eval_shape(algorithm.iterate, state)[0]
        leaves = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(after), strict=True)
        kinds = [(path, (a.dtype, a.weak_type), (b.dtype, b.weak_type)) for (path, a), b in leaves]
        changing |= {f"state{jax.tree_util.keystr(path)} ": None for path, old, new in kinds if old != new}
        state = after
    return list(changing)


def _brief(error: Exception) -> str:
    """The error, and where in the project it arose."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/fdg/" in f.filename]
    where = " < ".join(f"{f.filename.split('/fdg/')[-1]}:{f.lineno}" for f in reversed(frames[-3:]))
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]} ({len(lines)} lines) [{where}]"


def _difference(want: Any, have: Any, tolerance: float) -> str:
    """Floats within `tolerance` of each array's largest value, all else equal; "" if so."""
    wanted, structure = jax.tree_util.tree_flatten_with_path(want)
    found, other = jax.tree_util.tree_flatten_with_path(have)
    if structure != other:
        return f"{other}, not {structure}"
    for (path, a), (_, b) in zip(wanted, found, strict=True):
        where = f"{'state' if path[0].idx == 0 else 'metrics'}{jax.tree_util.keystr(path[1:])}"
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{where} is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}"
        by = _distance(_array(a), _array(b), tolerance)
        if by:
            return f"{where} {by}"
    return ""


def _array(x: Any) -> np.ndarray:
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def _distance(a: np.ndarray, b: np.ndarray, tolerance: float) -> str:
    if a.shape != b.shape:
        return f"is {list(b.shape)}, not {list(a.shape)}"
    if not np.issubdtype(a.dtype, np.floating):
        return "" if np.array_equal(a, b) else f"differs: {b.ravel()[:4]}, not {a.ravel()[:4]}"
    scale = max(0.1, float(np.max(np.abs(a), initial=0, where=np.isfinite(a))))
    with np.errstate(invalid="ignore"):
        apart = np.where(np.isfinite(a) & np.isfinite(b), np.abs(a - b), np.where(_same(a, b), 0, np.inf))
    worst = float(np.max(apart, initial=0)) / scale
    return f"differs by {worst:.2g} of its largest value" if worst > tolerance else ""


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a == b) | (np.isnan(a) & np.isnan(b))


def _effects_differ(calls: Any, notes: Any, algorithm: Algorithm, tolerance: float) -> str:
    """Ordered calls one by one; prints of each name in order of their numbers."""
    host = algorithm.host

    def order(said: list) -> list:
        return sorted(said, key=lambda note: (note[0], np.round(note[1], 4).ravel().tolist()))

    for what, want, have in (("call", calls, host.calls), ("print", order(notes), order(host.notes))):
        if [name for name, _ in want] != [name for name, _ in have]:
            return f"{what}s {_names(have)}, not {_names(want)}"
        for k, ((name, a), (_, b)) in enumerate(zip(want, have, strict=True)):
            by = _distance(a, b, tolerance)
            if by:
                return f"{what} {k} ({name}) {by}"
    return ""


def _names(said: list) -> str:
    return (
        " ".join(name for name, _ in said[:12]) + (f" ... ({len(said)})" if len(said) > 12 else "") or "none"
    )


def _unplanned(engine: Any, iterations: int) -> Verdict:
    if isinstance(engine.plan, SteppedPlan):
        planned = sum(m.bytes_per_iteration for m in engine.plan.movements if m.how == "transfer")
        if engine.moved_bytes != iterations * planned:
            return Verdict("unplanned", f"{engine.moved_bytes} bytes moved, {iterations * planned} planned")
    if not is_in_order(engine):
        return Verdict("unplanned", "a collective after a loop with collectives does not wait for it")
    extra = engine.unexplained()
    return Verdict("unplanned", f"{extra[0][0]}: {extra[0][1]}") if extra else Verdict("right")
