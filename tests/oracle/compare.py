"""Compares the engine with plain JAX for one program and placement: numbers, effects, bytes moved."""

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
    """The result of a check.

    `kind`: "right"; "refused", by an error of one line that names a cause; "unclear", where the staleness
    reference has no rule, or XLA has a known bug; "wrong" numbers or effects; "error", any other exception;
    "vague", a refusal that names no cause; "unplanned", correct numbers by exchanges that are not in the
    plan.
    """

    kind: str
    detail: str = ""

    @property
    def is_bad(self) -> bool:
        return self.kind not in ("right", "refused", "unclear")


class Expected:
    """Results of a program in plain JAX, cached for all its placements."""

    def __init__(self, program: Program):
        self.program, self.algorithm = program, Algorithm(program)

    def initial_state(self, seed: int = 0) -> list[Any]:
        """The initial state of an agent."""
        return self.algorithm.init(jax.random.key(seed))

    def under(self, placement: Placement) -> tuple[Any, Any, Any]:
        """((state, metrics), calls, notes) of plain JAX with the placement's staleness."""
        by_agent = [self._run_agent(placement, seed) for seed in range(placement.num_seeds or 1)]
        if placement.num_seeds is None:
            return by_agent[0]
        results, calls, notes = zip(*by_agent, strict=True)
        states, metrics = zip(*results, strict=True)
        state = jax.tree.map(lambda *x: jnp.stack(x), *states)
        metrics = jax.tree.map(lambda *x: jnp.stack(x, 1), *metrics)
        return (state, metrics), list(itertools.chain(*calls)), list(itertools.chain(*notes))

    def _run_agent(self, placement: Placement, seed: int) -> tuple[Any, Any, Any]:
        iterations = sum(placement.runs)
        if not placement.staleness:
            return self._run_plain(iterations, seed)
        groups = groups_of(self.program, placement)
        if groups is None:
            raise UnclearError("a fragment that the policy does not place")
        host = Algorithm(self.program).host
        state = self.initial_state(seed)
        results = stale_run(self.program, state, iterations, groups, placement.staleness, host)
        return _block_until_done(results), host.calls, host.notes

    @functools.cached_property
    def _iterate(self) -> Any:
        return jax.jit(self.algorithm.iterate)

    @functools.lru_cache(maxsize=10)  # noqa: B019
    def _run_plain(self, iterations: int, seed: int) -> tuple[Any, Any, Any]:
        host = self.algorithm.host
        host.calls.clear()
        host.notes.clear()
        state, metrics = self.initial_state(seed), []
        for _ in range(iterations):
            state, one = self._iterate(state)
            metrics.append(one)
        results = state, jax.tree.map(lambda *m: jnp.stack(m), *metrics)
        return _block_until_done(results), list(host.calls), list(host.notes)


def _block_until_done(results: Any) -> Any:
    jax.block_until_ready(results)
    jax.effects_barrier()
    return results


def under_test(program: Program) -> Algorithm:
    """The algorithm that the engine runs; tests replace it by a wrong one."""
    return Algorithm(program)


@contextlib.contextmanager
def limit_agents_per_vmap(count: int | None) -> Iterator[None]:
    """Engines compiled in this context vmap at most `count` agents per device (None: the engine's choice)."""

    def limited(graph: fdg.FDG, here: int, *on: Any) -> int:
        most = min(count or here, agents_per_vmap(graph, here, *on))
        return max(n for n in divisors(here) if n <= most)

    with mock.patch.object(place, "agents_per_vmap", limited):
        yield


# Errors that XLA (jaxlib 0.10.2) raises for plain JAX too.
_XLA_BUGS = (
    # On CPU, an FFT whose operand is gathered in column-major layout, such as in
    # `jax.grad(lambda x: jnp.sum(jnp.abs(jnp.fft.fft(x.T))))` with the rows of x split over two devices.
    "fft_thunk.cc",
)


def check(
    program: Program, placement: Placement, expected: Expected | None = None, tolerance: float = 1e-5
) -> Verdict:
    """Runs the program in the engine and in plain JAX, and compares them."""
    devices = jax.devices("cpu")[: placement.devices]
    expected = expected or Expected(program)
    try:
        want, calls, notes = expected.under(placement)
    except UnclearError as unclear:
        return Verdict("unclear", str(unclear))
    algorithm = under_test(program)
    try:
        with limit_agents_per_vmap(placement.vmap_limit), warnings.catch_warnings():
            warnings.simplefilter("ignore", FdgWarning)  # random programs may reuse a key
            engine = fdg.compile(algorithm, placement.policy, devices, placement.num_seeds)
    except (fdg.GraphError, fdg.PlanError) as refusal:
        return _refusal(str(refusal), program, placement)
    except Exception as error:
        return Verdict("error", _summary(error))
    try:
        actual = _block_until_done(_run(engine, algorithm, placement))
        difference = _difference(want, actual, tolerance) or _effects_differ(
            calls, notes, algorithm, tolerance
        )
        if difference:
            return Verdict("wrong", difference)
        return _unplanned(engine, sum(placement.runs))
    except Exception as error:
        known = any(bug in str(error) for bug in _XLA_BUGS)
        return Verdict("unclear" if known else "error", _summary(error))


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
    words = {*named, *named.values(), type(placement.policy).__name__, *_changing_leaves(program)}
    is_clear = "\n" not in message and any(word in message for word in words)
    return Verdict("refused" if is_clear else "vague", message)


def _changing_leaves(program: Program) -> list[str]:
    """Paths of state leaves whose dtype or weak type an iteration changes: an error may name them."""
    algorithm = Algorithm(program)
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    changing: dict[str, None] = {}
    for _ in jax.tree.leaves(state):  # a change may propagate from leaf to leaf
        after = jax.eval_shape(algorithm.iterate, state)[0]
        leaves = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(after), strict=True)
        kinds = [(path, (a.dtype, a.weak_type), (b.dtype, b.weak_type)) for (path, a), b in leaves]
        changing |= {f"state{jax.tree_util.keystr(path)} ": None for path, old, new in kinds if old != new}
        state = after
    return list(changing)


def _summary(error: Exception) -> str:
    """The error and the innermost frames in fdg."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/fdg/" in f.filename]
    where = " < ".join(f"{f.filename.split('/fdg/')[-1]}:{f.lineno}" for f in reversed(frames[-3:]))
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]} ({len(lines)} lines) [{where}]"


def _difference(want: Any, actual: Any, tolerance: float) -> str:
    """The first difference, or "": floats within `tolerance` of each array's largest value, others equal."""
    wanted, structure = jax.tree_util.tree_flatten_with_path(want)
    found, other = jax.tree_util.tree_flatten_with_path(actual)
    if structure != other:
        return f"{other}, not {structure}"
    for (path, a), (_, b) in zip(wanted, found, strict=True):
        where = f"{'state' if path[0].idx == 0 else 'metrics'}{jax.tree_util.keystr(path[1:])}"
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{where} is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}"
        mismatch = _mismatch(_array(a), _array(b), tolerance)
        if mismatch:
            return f"{where} {mismatch}"
    return ""


def _array(x: Any) -> np.ndarray:
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def _mismatch(a: np.ndarray, b: np.ndarray, tolerance: float) -> str:
    if a.shape != b.shape:
        return f"is {list(b.shape)}, not {list(a.shape)}"
    if not np.issubdtype(a.dtype, np.floating):
        return "" if np.array_equal(a, b) else f"differs: {b.ravel()[:4]}, not {a.ravel()[:4]}"
    scale = max(0.1, float(np.max(np.abs(a), initial=0, where=np.isfinite(a))))
    with np.errstate(invalid="ignore"):
        apart = np.where(np.isfinite(a) & np.isfinite(b), np.abs(a - b), np.where(_equal(a, b), 0, np.inf))
    worst = float(np.max(apart, initial=0)) / scale
    return f"differs by {worst:.2g} of its largest value" if worst > tolerance else ""


def _equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a == b) | (np.isnan(a) & np.isnan(b))


def _effects_differ(calls: Any, notes: Any, algorithm: Algorithm, tolerance: float) -> str:
    """The first difference, or "": ordered calls one by one; prints sorted by name and value."""
    host = algorithm.host

    def order(log: list) -> list:
        return sorted(log, key=lambda note: (note[0], np.round(note[1], 4).ravel().tolist()))

    for what, want, actual in (("call", calls, host.calls), ("print", order(notes), order(host.notes))):
        if [name for name, _ in want] != [name for name, _ in actual]:
            return f"{what}s {_names(actual)}, not {_names(want)}"
        for k, ((name, a), (_, b)) in enumerate(zip(want, actual, strict=True)):
            mismatch = _mismatch(a, b, tolerance)
            if mismatch:
                return f"{what} {k} ({name}) {mismatch}"
    return ""


def _names(log: list) -> str:
    return " ".join(name for name, _ in log[:12]) + (f" ... ({len(log)})" if len(log) > 12 else "") or "none"


def _unplanned(engine: Any, iterations: int) -> Verdict:
    if isinstance(engine.plan, SteppedPlan):
        planned = sum(m.bytes_per_iteration for m in engine.plan.movements if m.how == "transfer")
        if engine.moved_bytes != iterations * planned:
            return Verdict("unplanned", f"{engine.moved_bytes} bytes moved, {iterations * planned} planned")
    if not is_in_order(engine):
        return Verdict("unplanned", "a collective after a loop with collectives does not wait for it")
    extra = engine.unexplained()
    return Verdict("unplanned", f"{extra[0][0]}: {extra[0][1]}") if extra else Verdict("right")
