"""`fdg.profile`: measures the time of an engine's iteration by fragment."""

import collections
import functools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdg import jaxprs
from fdg.arguments import check_at_least, checked
from fdg.engine import Engine, initial_leaves
from fdg.jaxprs.count import Product
from fdg.lowering import host_calls
from fdg.placing.plans import Plan
from fdg.placing.policy import Group
from fdg.processes import distributed
from fdg.profiling.fragments import PlacedFragment, fragment_benchmarks, place_fragments
from fdg.profiling.rates import Rates
from fdg.profiling.repeating import Repeated, compile_all
from fdg.profiling.report import FragmentProfile, GroupProfile, ProductProfile, Profile
from fdg.profiling.work import Work, sum_of_work
from fdg.running.leaves import copied
from fdg.running.xla_options import jit
from fdg.showing.plan_outline import split_fragments
from fdg.showing.words import ancestors

_ROUND_SECONDS = 0.2  # approximate seconds per round of iterations
_COVERED_FRACTION = 0.98  # fraction of the FLOPs of products that measured products must cover
_MAX_PRODUCTS = 12  # maximum number of timed product shapes per group


@checked
def profile(engine: Engine, state: Any, rounds: int = 7) -> Profile:
    """Times an engine's iteration and each of its fragments, and compares them with the devices' limits.

    Each fragment runs alone, many calls in one program, with the inputs of its first call after `state`.
    Matrix products of the fragments' shapes, and memory, are timed too. This takes as long as compiling the
    engine twice, and some seconds. Host environments are stepped, so a later run continues with new episodes
    in them. All processes must call it.

    Args:
      engine: an engine.
      state: a state of the engine; it is copied and stays usable.
      rounds: the number of timing rounds.

    Raises:
      FdgError: `rounds` is below 1, or `engine.run` raises it.
    """
    check_at_least(1, rounds=rounds)
    plan = engine.plan
    fragments = place_fragments(plan)
    iterations = Iterations(engine, state)
    split = split_fragments(plan)
    whole = [placed for placed in fragments if placed.fragment.name not in split]
    benchmarks = fragment_benchmarks(plan, whole, engine.devices, _local_leaves(engine, state))
    compile_all(benchmarks.values())
    rates = {group.name: _prepare_rates(engine, group, fragments) for group in plan.groups}
    for _ in range(rounds):
        iterations.measure()
        for program in benchmarks.values():
            program.measure()
        for group_rates in rates.values():
            if group_rates is not None:
                group_rates.measure()
    return make_profile(plan, fragments, iterations, benchmarks, rates)


class Iterations:
    """Times an engine's iterations."""

    def __init__(self, engine: Engine, state: Any, seconds: float = _ROUND_SECONDS, min_iterations: int = 1):
        """Compiles the engine, copies the state, and chooses the number of iterations in a round.

        A round takes about `seconds`, and has at least `min_iterations` iterations.
        """
        self._engine = engine
        self._state = copied(state)
        self._count = min_iterations
        self.samples: list[float] = []  # seconds per iteration in each round
        # per round, busy seconds per iteration by group; empty for a single group
        self.busy_samples: list[Mapping[str, float]] = []
        self._run()
        seconds_per_iteration = self._run() / min_iterations
        count = math.ceil(seconds / max(seconds_per_iteration, 1e-6))
        self._count = distributed.exchange(max(min_iterations, count))[0]

    def measure(self) -> None:
        """Runs one round."""
        before = self._engine.busy_seconds()
        self.samples.append(self._run() / self._count)
        after = self._engine.busy_seconds()
        self.busy_samples.append({group: (after[group] - before[group]) / self._count for group in after})

    @property
    def seconds(self) -> float:
        """Seconds per iteration in the best round."""
        return min(self.samples)

    def busy_seconds(self, group: str) -> float | None:
        """Busy seconds of a group per iteration, in its best round; None for a single group."""
        return min((sample[group] for sample in self.busy_samples if group in sample), default=None)

    def _run(self) -> float:
        """Runs the iterations of a round; returns the seconds that they took."""
        start_time = time.perf_counter()
        self._state, metrics = self._engine.run(self._state, self._count)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - start_time


def _local_leaves(engine: Engine, state: Any) -> list[Any]:
    """The leaves of `state`, or of a new initial state, on one device.

    The state is a new one if other processes hold parts of `state`, or if `state` contains host environments,
    which the engine's iterations step.
    """
    leaves, plan = list(map(jnp.asarray, jax.tree.leaves(state))), engine.plan
    device = jax.local_devices(backend=engine.devices[0].platform)[0]
    on_host = host_calls.calls_host(jaxprs.open_jaxpr(plan.graph.jaxpr).eqns)
    if all(leaf.is_fully_addressable for leaf in leaves) and not on_host:
        return [jax.device_put(leaf, device) for leaf in leaves]
    initialize = jit(functools.partial(initial_leaves, engine.algorithm, plan), device.platform)
    with jax.default_device(device):
        return initialize(jax.random.key(0))


def _prepare_rates(engine: Engine, group: Group, fragments: Sequence[PlacedFragment]) -> Rates | None:
    """The rates of a group's devices for its fragments; None if no device is in this process."""
    devices = [engine.devices[i] for i in group.devices]
    local_devices = [device for device in devices if device.process_index == jax.process_index()]
    if not local_devices:
        return None
    own_fragments = [placed for placed in fragments if placed.group == group]
    products = _largest_products(_work_per_iteration(own_fragments).products)
    return Rates(local_devices, products, [placed.border for placed in own_fragments])


def _work_per_iteration(fragments: Sequence[PlacedFragment]) -> Work:
    """The work per iteration; a fragment whose parent is among `fragments` counts as part of it."""
    names = {placed.fragment.name for placed in fragments}
    return sum_of_work(
        (placed.work, placed.fragment.calls_per_iteration)
        for placed in fragments
        if placed.fragment.parent not in names
    )


def _largest_products(products: Mapping[Product, int]) -> list[Product]:
    """The products with the most FLOPs, which are worth timing."""
    flops = collections.Counter({product: product.flops * count for product, count in products.items()})
    largest, covered = [], 0
    for product, count in flops.most_common(_MAX_PRODUCTS):
        if covered >= _COVERED_FRACTION * flops.total():
            break
        largest.append(product)
        covered += count
    return largest


def make_profile(
    plan: Plan,
    fragments: Sequence[PlacedFragment],
    iterations: Iterations,
    benchmarks: Mapping[str, Repeated],
    rates: Mapping[str, Rates | None],
) -> Profile:
    """Combines the measurements of all rounds: `benchmarks` by fragment, `rates` by group."""
    rows = []
    for placed in fragments:
        fragment, group_rates = placed.fragment, rates[placed.group.name]
        rows.append(
            FragmentProfile(
                name=fragment.name,
                role=fragment.role,
                parent=fragment.parent,
                depth=len(ancestors(plan.graph, fragment.name)),
                group=placed.group.name,
                calls=fragment.calls_per_iteration,
                exact=fragment.calls_exact,
                flops=fragment.flops_per_call * (plan.graph.agents or 1),
                work=placed.work,
                seconds=benchmarks[fragment.name].seconds if fragment.name in benchmarks else None,
                products_s=0.0 if group_rates is None else group_rates.seconds(placed.work.products),
                memory_s=0.0 if group_rates is None else group_rates.memory_seconds(placed.border),
            )
        )
    first_rates = next((group_rates for group_rates in rates.values() if group_rates is not None), None)
    return Profile(
        algorithm=plan.graph.name,
        policy=str(plan.policy),
        num_devices=sum(len(group) for group in plan.groups),
        agents=plan.graph.agents,
        iteration_s=min(iterations.samples),
        usual_s=statistics.median(iterations.samples),
        rounds=len(iterations.samples),
        fragments=tuple(rows),
        products=tuple(_product_profiles(plan.groups, fragments, rates)),
        groups=tuple(_group_profile(group, fragments, iterations, benchmarks) for group in plan.groups),
        memory_rate=0.0 if first_rates is None else first_rates.memory_rate,
        notes=tuple(_make_notes(fragments, benchmarks)),
    )


def _product_profiles(
    groups: Sequence[Group], fragments: Sequence[PlacedFragment], rates: Mapping[str, Rates | None]
) -> list[ProductProfile]:
    """The matrix products of each group by shape, with measured seconds where they were timed."""
    profiles = []
    for group in groups:
        work = _work_per_iteration([placed for placed in fragments if placed.group == group])
        group_rates = rates[group.name]
        measured = {} if group_rates is None else group_rates.products
        for product, calls in work.products.items():
            seconds, layout = measured.get(product, (None, ""))
            profiles.append(ProductProfile(product, group.name, calls, seconds, layout, len(group)))
    return profiles


def _group_profile(
    group: Group,
    fragments: Sequence[PlacedFragment],
    iterations: Iterations,
    benchmarks: Mapping[str, Repeated],
) -> GroupProfile:
    """The time of a group. A fragment whose parent is timed counts as part of the parent."""
    own_fragments = [placed.fragment for placed in fragments if placed.group == group]
    timed_fragments = [fragment for fragment in own_fragments if fragment.name in benchmarks]
    names = {fragment.name for fragment in timed_fragments}
    outermost = [fragment for fragment in timed_fragments if fragment.parent not in names]
    seconds = sum((benchmarks[f.name].seconds * f.calls_per_iteration for f in outermost), 0.0)
    return GroupProfile(group.name, len(group), iterations.busy_seconds(group.name), seconds)


def _make_notes(fragments: Sequence[PlacedFragment], benchmarks: Mapping[str, Repeated]) -> list[str]:
    missing = [placed.fragment.name for placed in fragments if placed.fragment.name not in benchmarks]
    inexact = [placed.fragment.name for placed in fragments if not placed.work.exact]
    notes = []
    if missing:
        notes.append(
            f"not timed alone (split over several groups, or in another process): {', '.join(missing)}"
        )
    if inexact:
        notes.append(
            f"counts of operations depend on the data (a loop counts its maximum number of trips, or one;"
            f" a conditional counts its most expensive branch): {', '.join(inexact)}"
        )
    return notes
